"""From boxes and arrows to text, SVG and PNG."""
