"""From equations to layers: calls, then patterns, then helpers, and the gradient of each."""
