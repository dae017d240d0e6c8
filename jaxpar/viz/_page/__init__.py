"""The interactive page: one HTML file whose blocks open and close without a server.

    blocks      a `Graph` as a tree of blocks, and the lines that each block draws
    layout      where Graphviz puts the boxes and lines of each block
    page        the HTML of these layouts, with page.css and the scripts beside it
    still       the HTML of a picture on which nothing moves, in the same colours

Each block is laid out once, with its blocks closed. The script stretches a layout where a block of it opens.
"""
