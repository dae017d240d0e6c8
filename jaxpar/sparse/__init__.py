"""Row-sparse values: some rows of a table, for embeddings whose gradient touches few of them.

A `RowSparse` holds m rows of a table as `indices` (m,) and `values` (m, ...). Work and memory of every
function here, except `to_dense`, grow with m and not with the table. Arrays have fixed shapes under `jit`,
so a result may hold padding there: rows with index `shape[0]` and zero values, which every function ignores.

Training an embedding through a store, without a gradient of the table's size:

1. pull the rows of the batch: `rows = kv.row_sparse_pull(store, key, ids)`, or `take(table, ids)`,
2. differentiate by the rows: `loss, grads = value_and_grad(loss_fn)(rows, ids)`, where `rows[ids]` looks up,
3. push the gradient, a `RowSparse` again: `store = kv.push(store, key, grads)`.

The room: `_row_sparse` has the type and the checks of indices, `_functions` has what is done with it.
"""

from ._functions import (
    add as add,
    allreduce as allreduce,
    coalesce as coalesce,
    from_dense as from_dense,
    lazy_update as lazy_update,
    take as take,
    to_dense as to_dense,
    value_and_grad as value_and_grad,
)
from ._row_sparse import RowSparse as RowSparse
