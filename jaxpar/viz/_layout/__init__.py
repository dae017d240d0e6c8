"""From layers to boxes and arrows."""
