"""The store as a value, and what a push computes: pure functions that `kv` and the training step are made of.

store           the frozen pytree, the changes of a push, questions about a store
layouts         how one value is kept: whole, in rows, split over a mesh
kinds           how each kind of store sums, and where it keeps values
aggregate       the sum over the devices: buckets, compression (`compressed`), collective
update          each sum handed to the updater
tree_optimizer  all sums handed to an optimizer that sees the whole pytree
queue           pushes that are applied later
placing         new values on the devices of a store, and the layout of each of its arrays
"""
