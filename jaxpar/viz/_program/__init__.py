"""A compiled program, as XLA keeps it: instructions, what reads what, collectives and live bytes. No traces here.

hlo     its instructions, which reads which through tuples, calls and loops, and how often each runs
sends   its collectives: bytes, how often, between which devices, and what is computed meanwhile
groups  the devices of a collective, and the axes of a mesh that they are along
memory  live bytes while each instruction runs, from XLA's buffer assignment
proto   the form of all of these, protocol buffers
"""
