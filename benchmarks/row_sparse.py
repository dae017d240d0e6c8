"""A push of 4,096 rows into a table of a million: row-sparse beside dense.

The table is 1,000,000 x 64 float32 (256 MB), the updater plain SGD. `row-sparse` pushes a `RowSparse` of the rows
that a batch touches; `dense` scatters the same rows into an array of the table's size and pushes that, which is
what a framework without sparse gradients does. Both are compiled, with the store donated.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _harness import Turn, arguments, environment, medians, ratio, save, show, take_turns, timed

from jaxpar import kv
from jaxpar.sparse import RowSparse

LEARNING_RATE = 0.1


def store_of(rows: int, width: int) -> kv.KVStore:
    return kv.set_optimizer(kv.init(kv.create("device"), 0, jnp.zeros((rows, width))), optax.sgd(LEARNING_RATE))


def pushing(store: kv.KVStore, push, ids, values) -> tuple[Turn, np.ndarray]:
    """A turn of `push(store, ids, values) -> store`, compiled; and the rows after one push, to compare."""
    run = jax.jit(push, donate_argnums=0)
    store = run(store, ids, values)
    after = np.asarray(kv.pull(store, 0)[ids])

    def once():
        nonlocal store
        store = run(store, ids, values)
        jax.block_until_ready(store.values)

    return timed(once), after


def main() -> None:
    options = arguments("A push of 4,096 rows into a table of a million: row-sparse beside dense.", 15, 0.2)
    rows, width, touched = (1000, 8, 16) if options.quick else (1_000_000, 64, 4096)
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(0, rows, touched), jnp.int32)
    values = jnp.asarray(rng.standard_normal((touched, width), np.float32))

    def sparse(store, ids, values):
        return kv.push(store, 0, RowSparse(ids, values, (rows, width)))

    def dense(store, ids, values):
        return kv.push(store, 0, jnp.zeros((rows, width)).at[ids].add(values))

    contenders, results = {}, {}
    for push in (sparse, dense):
        contenders[push.__name__], results[push.__name__] = pushing(store_of(rows, width), push, ids, values)
    np.testing.assert_allclose(results["sparse"], results["dense"], rtol=1e-5, atol=1e-6)
    times = take_turns(contenders, options.rounds, options.turn_seconds)
    report = {
        "environment": environment(),
        "table": [rows, width],
        "rows_touched": touched,
        "rounds": options.rounds,
        "ms": {name: round(1e3 * seconds, 4) for name, seconds in medians(times).items()},
        "sparse_against_dense": round(ratio(times, "dense", "sparse"), 2),
    }
    show(
        (f"{touched} rows of {rows} x {width}", "ms", "times faster than dense"),
        [
            (name, f"{ms:.3f}", f"{report['sparse_against_dense'] if name == 'sparse' else 1:.1f}x")
            for name, ms in report["ms"].items()
        ],
    )
    save(options, "row_sparse", report)


if __name__ == "__main__":
    main()
