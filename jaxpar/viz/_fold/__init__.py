"""From equations to layers."""
