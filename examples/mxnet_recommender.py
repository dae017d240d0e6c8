"""A recommender of MXNet whose tables are row-sparse: its example/sparse/matrix_factorization, in a loop of its own.

A batch needs a few rows of two large tables. `row_sparse_pull` reads them, the gradient is of these rows alone, and
`push` changes no others: time and memory of a step do not grow with the tables. docs/from_mxnet.md has the script of
MXNet beside it, with its numbers.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jaxpar as jp

USERS, ITEMS, FACTORS, BATCH, EPOCHS = 2000, 1000, 8, 64, 4

# Scores of users for items, from hidden tastes. Some users and items are far more frequent than others.
draw = np.random.RandomState(0)
users = (USERS * draw.uniform(size=6400) ** 3).astype(np.int32)
items = (ITEMS * draw.uniform(size=6400) ** 3).astype(np.int32)
tastes, kinds = draw.normal(size=(USERS, 3)), draw.normal(size=(ITEMS, 3))
ratings = ((tastes[users] * kinds[items]).sum(1) + draw.normal(size=6400) / 10).astype(np.float32)
tables = [draw.normal(scale=0.3, size=(n, FACTORS)).astype(np.float32) for n in (USERS, ITEMS)]

keys = ["user_weight", "item_weight"]


@jax.jit  # one program: under jit the number of rows is that of the batch, with padding where ids repeat
def step(store, user, item, rating):
    """The store after a batch, and the squares of the errors of its predictions, summed."""

    def loss_fn(rows):
        errors = (rows[0][user] * rows[1][item]).sum(1) - rating
        return jnp.square(errors).sum() / 2, jnp.square(errors).sum()

    rows = jp.kv.row_sparse_pull(store, keys, [user, item])
    (_, squares), grads = jp.sparse.value_and_grad(loss_fn, has_aux=True)(rows)
    return jp.kv.push(store, keys, grads), squares


store = jp.kv.from_params(dict(zip(keys, tables)), kind="device")
store = jp.kv.set_updater(store, jp.mxnet.sgd(0.2, momentum=0.9, wd=1e-4, rescale_grad=1 / BATCH))
checkpoints = jp.checkpoint.Manager("runs/mxnet_recommender")
store, info = checkpoints.restore_latest(store) or (store, {"rmse": []})
rmse = info["rmse"]
while len(rmse) < EPOCHS:
    squares = 0.0
    for start in range(0, len(ratings), BATCH):
        store, of_batch = step(store, *(array[start : start + BATCH] for array in (users, items, ratings)))
        squares += float(of_batch)
    rmse = [*rmse, (squares / len(ratings)) ** 0.5]
    checkpoints.save(store, {"rmse": rmse})
checkpoints.close()
for epoch, error in enumerate(rmse, 1):
    print(f"epoch {epoch} RMSE {error:.5f}")
