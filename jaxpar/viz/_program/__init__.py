"""A compiled program, read from its text: instructions, what reads what, collectives and live bytes. No traces here.

hlo     its text as instructions, which reads which through tuples, calls and loops, and how often each runs
sends   its collectives: bytes, how often, between which devices, and what is computed meanwhile
memory  live bytes while each instruction runs, from XLA's buffer assignment
"""
