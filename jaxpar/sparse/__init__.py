"""Row-sparse values: some rows of a table, for embeddings with sparse gradients.

A `RowSparse` holds m rows of a table as `indices` (m,) and `values` (m, ...). Time and memory of every function except
`to_dense` grow with m and not with the table. Arrays have fixed shapes under `jit`, so a result may contain padding:
rows with index `shape[0]` and zero values. Every function ignores padding.

To train an embedding in a store without a dense gradient:

1. Pull the rows of the batch: `rows = kv.row_sparse_pull(store, key, ids)`, or `take(table, ids)`.
2. Differentiate by the rows: `loss, grads = value_and_grad(loss_fn)(rows, ids)`. `rows[ids]` looks up rows.
3. Push the gradient, which is a `RowSparse`: `store = kv.push(store, key, grads)`.

`train.start(..., row_sparse="users")` does all of this inside of the training step.
"""

# pyright: reportUnusedImport=false
# Names for other rooms have an underscore, so that Tab shows the API only.
from ._row_sparse import (
    RowSparse as RowSparse,
    add as add,
    allreduce as allreduce,
    coalesce as coalesce,
    from_dense as from_dense,
    lazy_update as lazy_update,
    padded as _padded,  # noqa: F401
    read as _read,  # noqa: F401
    take as take,
    to_dense as to_dense,
    value_and_grad as value_and_grad,
    write as _write,  # noqa: F401
)
