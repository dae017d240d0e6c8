"""The interactive page: one HTML file whose blocks open and close without a server.

    blocks      a `Graph` as a tree of blocks, and the lines that each block draws
    page        where Graphviz puts them, and the HTML of that, with page.css and the scripts beside it

Each block is laid out once, with its blocks closed. The script stretches a layout where a block of it opens.
"""
