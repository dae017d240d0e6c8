"""What a training step does on many devices, read from its compiled program.

step       `trace_step` and `plot_step`
places     layers as forward, backward and optimizer; instructions and collectives found in them
edges      the arrays between layers
picture    the place of everything, drawn
"""
