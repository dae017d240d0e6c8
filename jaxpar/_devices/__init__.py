"""Arrays on devices and between them.

mesh            the mesh of a store's devices, the two ways to lay an array out on it, transfers, emulated CPU devices
user_mesh       the mesh of `jax.set_mesh`: leaving it for a call, and returning to it
collectives     sums over the devices of a mapped axis, in buckets of small values; the sums of virtual shards
processes       values, decisions and errors shared by all processes
shardings       the sharding of each parameter of a pytree, and rules by size and by name
"""
