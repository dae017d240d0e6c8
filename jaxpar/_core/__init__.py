"""What every room uses, and what knows nothing of the rooms.

checks     check what users give, and word the message
arrays     questions about arrays, random keys as plain integers
text       tables, lines on standard error           (no jax)
files      append, replace, flush to the disk        (no jax)
parsers    numbers on the command line              (no jax)
portable   how a node of a state is saved
recent     what belongs to the last few things that a user made
"""
