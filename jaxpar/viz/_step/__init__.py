"""What a training step does on many devices, read from its compiled program.

step       `trace_step` and `plot_step`
places     instructions found in the layers of the trace
phases     layers as forward, backward and optimizer
picture    the three columns, and the band of parameters between them
"""
