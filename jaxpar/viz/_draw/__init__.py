"""From a `Graph` to a picture or a table. Files are written and programs are run only here.

`picture` is not imported by the others: it loads graphviz.
"""
