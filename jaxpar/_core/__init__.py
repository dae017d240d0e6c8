"""What every room uses, and what knows nothing of the rooms.

calls      what is answered to a call with wrong arguments, or with an old name of one
checks     keys, arrays, devices and options that users give, and the messages about them
arrays     what an array is, random keys as plain integers, programs of the last few things that a user made
updater    the type of an updater
portable   how a node of a state is saved

Without jax:

text       words of messages, tables, printed lines, options of commands
files      write whole or not at all, read regular files
process    signals that are recorded, threads that fail aloud, freed memory that is kept, which process this is
"""
