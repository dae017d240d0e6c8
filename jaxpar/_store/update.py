"""The updater applied to the sums of a push."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from .._core import checks
from .._core.arrays import is_traced
from .._devices.user_mesh import split_like
from ..updaters import Updater, _TreeOptimizer as TreeOptimizer, stateless
from . import tree_optimizer
from .layouts import Rows
from .placing import lay_out
from .store import Arrays, Changes, KVStore, has_types, is_split, rows_of

_NUMBER = "num_update"  # its name in MXNet
Pair = tuple[jax.Array, Any]  # a new value and a new state


def update(store: KVStore, summed: Arrays, loss: jax.Array | None = None) -> Changes:
    """The changes of the keys in `summed`, in ascending order. A `TreeOptimizer` gets the loss, if it is known."""
    if isinstance(store.updater, TreeOptimizer):
        return tree_optimizer.update(store, summed, loss)
    if (known := counted(store, summed)) is not store:
        return uncounted(update(known, summed, loss))
    keys = sorted(summed)
    pushed = {k: summed[k].astype(store.values[k].dtype).reshape(store.values[k].shape) for k in keys}
    if has_types([store.values[k] for k in keys]):
        pushed = {k: split_like(v, store.values[k]) for k, v in pushed.items()}
    if is_split(store):
        rows = rows_of(store)
        pairs = {k: _update_rows(store, k, rows[k], pushed[k]) for k in keys}
    elif isinstance(store.updater, Updater):
        pairs = {k: store.updater.update(k, pushed[k], store.updater_state[k], store.values[k]) for k in keys}
        pairs = check_results(pairs, store.values)
    else:
        pairs = {k: update_one(store.updater, k, pushed[k], store.updater_state[k], store.values[k]) for k in keys}
    return Changes({k: new for k, (new, _) in pairs.items()}, {k: state for k, (_, state) in pairs.items()})


def counted(store: KVStore, keys: Iterable[int]) -> KVStore:
    """The store whose states hold the count that a schedule of MXNet's is asked with: the largest of any key.

    A push of several keys counts them in ascending order. The number is there while a push runs, see `uncounted`.
    """
    keys = sorted(keys)
    asks = getattr(getattr(store.updater, "update", None), "asks_all_counts", False)
    if not asks or not keys or _NUMBER in store.updater_state[keys[0]]:
        return store
    counts: dict[int, Any] = {k: state["count"] for k, state in store.updater_state.items()}
    larger: Any = jnp.maximum
    if not is_traced(counts):
        counts, larger = {k: int(count) for k, count in counts.items()}, max
    largest, states = functools.reduce(larger, counts.values()), dict[int, Any]()
    for k in keys:
        largest = larger(largest, counts[k] + 1)
        states[k] = {**store.updater_state[k], _NUMBER: jnp.asarray(largest - 1, jnp.int32)}
    return dataclasses.replace(store, updater_state=store.updater_state | states)


def uncounted(changes: Changes) -> Changes:
    """The changes without what `counted` added."""
    states = {k: {n: x for n, x in state.items() if n != _NUMBER} for k, state in changes.updater_state.items()}
    return changes._replace(updater_state=states)


def update_one(updater: Any, key: int, pushed: jax.Array, state: Any, stored: jax.Array) -> Pair:
    """One call of the updater, and the check of its result."""
    if isinstance(updater, Updater):
        pair = updater.update(key, pushed, state, stored)
    else:
        pair = updater(key, pushed, stored), state
    return check_results({key: pair}, {key: stored})[key]


def check_results(pairs: dict[int, Pair], stored: Arrays) -> dict[int, Pair]:
    """What the updater returned, in the dtypes of the stored values.

    Raises:
        TypeError: a result is no array, or its dtype cannot be cast safely.
        ValueError: a result has another shape than the stored value.
    """
    results: dict[int, Pair] = {}
    for key, (new, state) in pairs.items():
        where = f"kv.push: the updater's result for key {key}"
        if new is None:
            raise TypeError(f"{where} is None; an updater returns the new value, it cannot change `stored` in place")
        value = checks.array(new, where)
        checks.same_shape(value, stored[key].shape, where)
        checks.castable(value.dtype, stored[key].dtype, where)
        results[key] = value.astype(stored[key].dtype), state
    return results


def _update_rows(store: KVStore, key: int, rows: Rows, pushed: jax.Array) -> Pair:
    """As `update_one`, of a value that is held in these rows. An `Updater` gets each row as a flat share.

    A plain function gets the whole value if all rows are here. Elsewhere it must be elementwise.
    """
    updater, state, stored = store.updater, store.updater_state[key], store.values[key]
    if not isinstance(updater, Updater):
        if stored.size == rows.count * rows.chunk:
            new, state = update_one(updater, key, rows.whole(pushed), state, rows.whole(stored))
            return lay_out(store, key, new).reshape(stored.shape), state
        updater = stateless(updater)
        spec = jax.ShapeDtypeStruct(rows.shape, stored.dtype)
        tree_optimizer.check_shares(dataclasses.replace(store, updater=updater), {key: spec}, "kv.push")
    if stored.ndim == 1:
        return update_one(updater, key, pushed, state, stored)
    axes = jax.tree.map(lambda leaf: 0 if leaf.shape == stored.shape else None, state)
    run = functools.partial(update_one, updater, key)
    return jax.vmap(run, in_axes=(0, axes, 0), out_axes=(0, axes))(pushed, state, stored)
