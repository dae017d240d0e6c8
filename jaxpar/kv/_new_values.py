"""New values of a store: in memory of their own, the same in all processes, laid out on the store's devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .._core import checks
from .._core.arrays import is_traced
from .._devices import processes
from .._devices.copies import own_copies
from .._devices.placement import put, spans_processes
from .._devices.user_mesh import without_types
from ..sparse import RowSparse, to_dense
from ..updaters import Updater
from ._store import KVStore, copies_for, home, layout_of


def signature(arrays: Mapping[int, Any]) -> str:
    """Keys, shapes and dtypes as text, for processes to compare."""
    return ", ".join(f"key {k} {checks.describe(v)}" for k, v in arrays.items()) or "no key"


def own_arrays(given: Mapping[int, Any]) -> dict[int, jax.Array]:
    """The given values as arrays in memory of their own: a list of one as that one, as in a push, rows as a table."""
    given = {k: v[0] if isinstance(v, (list, tuple)) and len(v) == 1 else v for k, v in given.items()}
    given = {k: to_dense(v) if isinstance(v, RowSparse) else v for k, v in given.items()}
    arrays = {k: checks.array(v, f"kv.init: value of key {k}") for k, v in given.items()}
    return arrays | own_copies({k: v for k, v in arrays.items() if v is given[k]})


def lay_out(store: KVStore, key: int, value: jax.Array) -> jax.Array:
    """A whole value as the store holds it, on the store's devices."""
    sharding = home(store, key)
    if sharding is not None:
        value = without_types(value)
    value = layout_of(store).stored(value, store.devices)
    return value if sharding is None or is_traced(value) else put(value, sharding)


def start_state(store: KVStore, key: int, value: jax.Array) -> Any:
    """The updater's state of a key, on the devices of the value. A plain function has none."""
    if not isinstance(store.updater, Updater):
        return ()
    state = jax.tree.map(lambda x: own_copies(x) if x is value else x, store.updater.init(key, value))
    if store.devices is None or is_traced(value):
        return state
    on = home(store, key)
    rest = copies_for(store) if layout_of(store).is_split or store.shardings else on  # of another shape
    return jax.tree.map(lambda leaf: put(leaf, on if leaf.shape == value.shape else rest), state)


def values_of_first(arrays: dict[int, jax.Array]) -> dict[int, jax.Array]:
    """The values that process 0 gives, if there are several processes."""
    if processes.count() == 1 or is_traced(arrays):
        return arrays
    processes.agree("kv.init: every process must give the same keys, in the same shapes", signature(arrays))
    local = {k: v for k, v in arrays.items() if not spans_processes(v)}
    first = processes.from_first(local)
    return arrays | {k: put(v, local[k].sharding) if local[k].committed else jnp.asarray(v) for k, v in first.items()}
