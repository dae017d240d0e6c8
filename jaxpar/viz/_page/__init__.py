"""The interactive page: one HTML file whose blocks open and close without a server.

blocks      a `Graph` as a tree of blocks, and the lines that each block draws
layout      where Graphviz puts the boxes and lines of each block, with the blocks in it closed
still       the picture that a page shows before its script, and where no script runs
page        the HTML of all that, with page.css and the scripts beside it, which stretch a layout where a block opens
"""
