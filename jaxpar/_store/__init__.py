"""The store as a value, and what a push computes: pure functions that `kv` and the training step are made of.

store       the frozen pytree, how each of its arrays is kept and where, the changes of a push
kinds       how each kind of store sums, and where it keeps values
aggregate   what a push computes: sums over the devices, handed to the updater, key by key or all at once
queue       pushes that are applied later
"""
