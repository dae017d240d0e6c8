"""What a training step does on many devices, read from its compiled program.

step       `trace_step` and `plot_step`
places     instructions and collectives found in the layers of the trace
phases     layers as forward, backward and optimizer
columns    the place of everything in the picture, which `dot` draws
"""
