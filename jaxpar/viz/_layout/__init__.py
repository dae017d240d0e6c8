"""From layers to nodes and edges with names, collapsed where they repeat or are many."""
