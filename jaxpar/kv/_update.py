"""The updater applied to the sums of a push."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax

from .._core import checks
from .._devices import collectives
from .._devices.buckets import Shape
from ..updaters import Updater, stateless
from ._create import lay_out
from ._store import Arrays, KVStore, check_shares, shapes_of, shards


def update(store: KVStore, summed: Arrays) -> tuple[Arrays, dict[int, Any]]:
    """The new values and updater states of the keys in `summed`, in ascending order of the keys."""
    values: Arrays = {}
    states: dict[int, Any] = {}
    shapes = shapes_of(store) if store.kind == "sharded" else None
    for key in sorted(summed):
        stored = store.values[key]
        pushed = summed[key].astype(stored.dtype).reshape(stored.shape)
        state = store.updater_state[key]
        if shapes is None:
            values[key], states[key] = updated(store.updater, key, pushed, state, stored)
        else:
            values[key], states[key] = _updated_rows(store, key, shapes[key], pushed, state, stored)
    return values, states


def _updated_rows(
    store: KVStore, key: int, shape: Shape, pushed: jax.Array, state: Any, stored: jax.Array
) -> tuple[jax.Array, Any]:
    """As `updated`, of a value of this shape that is held in rows: the updater gets each row as a flat share.

    A plain function gets the whole value where all rows are here. Elsewhere it must be elementwise.
    """
    updater, rows = store.updater, shards(store)
    if not isinstance(updater, Updater):
        if stored.size == rows * collectives.chunk_size(math.prod(shape), rows):
            whole = [collectives.from_rows(array, shape) for array in (pushed, stored)]
            new, state = updated(updater, key, whole[0], state, whole[1])
            return lay_out(store, new).reshape(stored.shape), state
        updater = stateless(updater)
        spec = jax.ShapeDtypeStruct(shape, stored.dtype)
        check_shares(dataclasses.replace(store, updater=updater), {key: spec}, "kv.push")
    if stored.ndim == 1:
        return updated(updater, key, pushed, state, stored)
    axes = jax.tree.map(lambda leaf: 0 if leaf.shape == stored.shape else None, state)
    run = functools.partial(updated, updater, key)
    return jax.vmap(run, in_axes=(0, axes, 0), out_axes=(0, axes))(pushed, state, stored)


def updated(updater: Any, key: int, pushed: jax.Array, state: Any, stored: jax.Array) -> tuple[jax.Array, Any]:
    """One call of the updater, and a look at what it returned."""
    if isinstance(updater, Updater):
        new, state = updater.update(key, pushed, state, stored)
    else:
        new = updater(key, pushed, stored)
    where = f"kv.push: the updater's result for key {key}"
    if new is None:
        raise TypeError(f"{where} is None; an updater returns the new value, it cannot change `stored` in place")
    new = checks.array(new, where)
    checks.same_shape(new, stored.shape, where)
    checks.castable(new.dtype, stored.dtype, where)
    return new.astype(stored.dtype), state
