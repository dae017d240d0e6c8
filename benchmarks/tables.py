"""A step of matrix factorization with a million users: `row_sparse=` beside dense gradients and rows by hand.

The tables are 1,000,000 and 100,000 rows of 64 floats, the batch 8,192 pairs, the optimizer Adam. `by hand` takes the
rows of the batch, differentiates by them and updates them by `jp.sparse`, in a `shard_map` of its own. The rows
are `1` and `4` emulated devices, each of which holds the tables.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")

import functools

import jax
import numpy as np
import optax
from _harness import Turn, arguments, environment, medians, ratio, save, show, take_turns, timed
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxpar import models, sparse, train

ADAM = optax.adam(0.01)


def loss_fn(params, batch):
    return ((models.matrix_factorization.apply(params, batch["user"], batch["item"]) - batch["rating"]) ** 2).mean()


def stepping(params, batch, devices, row_sparse) -> tuple[Turn, np.ndarray]:
    """A turn of a training step, and the loss of its second step, to compare."""
    state, step = train.start(params, ADAM, loss_fn, devices=devices, row_sparse=row_sparse)
    state, _ = step(state, batch)
    state, metrics = step(state, batch)

    def once():
        nonlocal state
        state, metrics = step(state, batch)
        jax.block_until_ready((state.store.values, metrics))

    return timed(once), np.asarray(metrics["loss"])


def by_hand(params, batch, devices) -> tuple[Turn, np.ndarray]:
    """The same of rows by hand."""
    mesh, count = Mesh(np.array(devices), ("data",)), len(devices)

    def update(pushed, state, stored):
        updates, state = ADAM.update(pushed, state, stored)
        return optax.apply_updates(stored, updates), state

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P(), check_vma=False)
    def step(tables, states, batch):
        rows = {name: sparse.take(table, batch[name], size=batch[name].size) for name, table in tables.items()}
        loss, grads = sparse.value_and_grad(lambda rows: loss_fn(rows, batch) / count)(rows)
        new = {}
        for name, grad in grads.items():
            total = sparse.allreduce(grad, "data")
            new[name] = sparse.lazy_update(update, total, states[name], tables[name], coalesced=True)
        tables, states = ({name: pair[i] for name, pair in new.items()} for i in (0, 1))
        return tables, states, jax.lax.psum(loss, "data")

    tables = jax.device_put(params, NamedSharding(mesh, P()))
    states = jax.device_put({name: ADAM.init(table) for name, table in params.items()}, NamedSharding(mesh, P()))
    tables, states, _ = step(tables, states, batch)
    tables, states, loss = step(tables, states, batch)

    def once():
        nonlocal tables, states
        tables, states, loss = step(tables, states, batch)
        jax.block_until_ready((tables, loss))

    return timed(once), np.asarray(loss)


def measure(count, options) -> dict[str, object]:
    users, items, width, size = (1000, 100, 8, 16) if options.quick else (1_000_000, 100_000, 64, 8192)
    devices = jax.devices()[:count]
    params = jax.device_get(models.matrix_factorization.init(jax.random.key(0), users, items, width))
    rng = np.random.default_rng(0)
    batch = {
        "user": rng.integers(0, users, size, np.int32),
        "item": rng.integers(0, items, size, np.int32),
        "rating": rng.standard_normal(size, np.float32),
    }
    batch = jax.device_put(batch, NamedSharding(Mesh(np.array(devices), ("data",)), P("data")))
    made = {
        "dense": stepping(params, batch, devices, None),
        "row_sparse": stepping(params, batch, devices, ["user", "item"]),
        "by hand": by_hand(params, batch, devices),
    }
    for _, loss in made.values():
        np.testing.assert_allclose(loss, made["dense"][1], rtol=1e-4)
    times = take_turns({name: turn for name, (turn, _) in made.items()}, options.rounds, options.turn_seconds)
    return {
        "tables": [[users, width], [items, width]],
        "batch": size,
        "ms": {name: round(1e3 * seconds, 3) for name, seconds in medians(times).items()},
        "against_dense": round(ratio(times, "dense", "row_sparse"), 2),
        "against_hand": round(ratio(times, "by hand", "row_sparse"), 2),
    }


def main() -> None:
    options = arguments("A step of matrix factorization: row_sparse= beside dense gradients and rows by hand.", 9, 0.5)
    report = {"environment": environment(), "rounds": options.rounds}
    report |= {count: measure(int(count), options) for count in options.rows or ("1", "4")}
    show(
        ("devices", "ms dense", "ms row_sparse", "ms by hand"),
        [(n, *(f"{ms:.2f}" for ms in row["ms"].values())) for n, row in report.items() if n.isdigit()],
    )
    save(options, "tables", report)


if __name__ == "__main__":
    main()
