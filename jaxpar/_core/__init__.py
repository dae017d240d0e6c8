"""What every room uses, and what knows nothing of the rooms.

checks     check what users give, and word the message
arrays     questions about arrays; random keys as plain integers
text       tables, lines on standard error           (no jax)
files      append, replace, flush to the disk        (no jax)
figures    a matplotlib figure without pyplot
formula    which of several formulas a model takes
"""
