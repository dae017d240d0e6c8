"""The store as a value, and what a push computes: pure functions that `kv` and the training step are made of.

store           the frozen pytree, how each of its values is kept and shown, the changes of a push
kinds           how each kind of store sums, and where it keeps values
placing         where each array of a store is, new ones and those that it has
aggregate       what a push computes: sums over the devices (`compressed`), each handed to the updater
tree_optimizer  all sums handed to an optimizer that sees the whole pytree
queue           pushes that are applied later
"""
