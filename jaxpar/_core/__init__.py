"""What every room uses, and what knows nothing of the rooms.

checks     keys, arrays, devices and options that users give, and the messages about them
arguments  old names of arguments, and names that other libraries use
functions  whether a function that a user gives takes what it will be given
transfers  calls that put what they are given on devices, under the user's transfer guard
arrays     what an array is, random keys as plain integers
recent     programs of the last few things that a user made
host       arrays of NumPy on their way to the devices: whose memory they are, and in which dtype JAX keeps them
updater    the type of an updater
portable   how a node of a state is saved

Without jax:

text       words of messages, patterns of names, tables, printed lines
options    a dataclass as the options of a command
files      write whole or not at all, read regular files
process    signals that are recorded, threads that fail aloud, freed memory that is kept, which process this is
"""
