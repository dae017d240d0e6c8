"""The store as a value, and what a push computes: pure functions that `kv` and the training step are made of.

store       the frozen pytree, how each kind of store sums, how each array is kept and where, the changes of a push
aggregate   what a push computes: sums over the devices, handed to the updater, key by key or all at once
queue       pushes that are applied later
"""
