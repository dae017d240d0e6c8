"""From equations to layers: calls, patterns, helpers, and the gradient of each."""
