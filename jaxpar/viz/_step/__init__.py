"""What a training step does on many devices, read from its compiled program.

step       `trace_step` and `plot_step`
hlo        the text of a compiled program as instructions
sends      its collectives: bytes, how often, between which devices
flow       which instruction reads which, through tuples, calls and loops
places     instructions found in the layers of the trace
phases     layers as forward, backward and optimizer
memory     live bytes while each instruction runs
picture    the three columns, and the band of parameters between them
"""
