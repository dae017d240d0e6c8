"""From layers to named nodes and edges. Repeats and large graphs are collapsed."""
