"""What a training step does on many devices, read from its compiled program.

step       `trace_step` and `plot_step`
closing    what is one box from the beginning: conditions, compression
phases     layers as forward, backward and optimizer, from the trace
results    what a step returns beside its new state
places     the layer that each instruction of the compiled program is of
sent       the layers that each collective sends for
edges      the arrays between layers
gathered   params that are gathered from other devices before a layer reads them
profile    seconds of layers
picture    the place of everything, drawn
words      what is written in the picture
marks      boxes and arrows at places, for Graphviz
"""
