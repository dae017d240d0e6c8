"""Arrays on devices and between them.

mesh         the mesh of a store's devices, and the two ways to lay an array out on it
placement    arrays onto devices and back to the host
donation     whether a state's memory was donated
emulated     emulated CPU devices: one memory, and a hang of older XLA
buckets      small values travel as one array
collectives  sums over the devices of a mapped axis, in buckets
processes    values, decisions and errors that all processes share

How parameters are split over a mesh:

partition_specs  whether a `PartitionSpec` fits a shape and a mesh
sharding_rules   rules by size and by name
shardings        the sharding of each parameter of a pytree
flax_metadata    how Flax says that a parameter is split
"""
