"""A compiled program, read from its text: instructions, what reads what, collectives and live bytes. No traces here.

hlo            its text as computations and instructions
flow           which instruction reads which, through tuples, calls and loops
sends, groups  its collectives: bytes, how often, between which devices
memory, wire   live bytes while each instruction runs, from XLA's buffer assignment
"""
