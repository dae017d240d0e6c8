"""Where the arrays of a store are: new ones, and each of those that it has."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from .._core.arrays import is_traced
from .._devices.copies import own_copies
from .._devices.mesh import split_over
from .._devices.placement import put
from .._devices.user_mesh import without_types
from ..updaters import Updater
from . import tree_optimizer
from .layouts import Layout
from .store import KVStore, copies_for, everywhere, home, layout_of, layouts_of


def lay_out(store: KVStore, key: int, value: jax.Array) -> jax.Array:
    """A whole value as the store holds it, on the store's devices."""
    layout = layout_of(store, key)
    sharding = home(store, layout)
    if sharding is not None:
        value = without_types(value)
    value = layout.stored(value)
    return value if sharding is None or is_traced(value) else put(value, sharding)


def start_state(store: KVStore, key: int, value: jax.Array) -> Any:
    """The updater's state of a key, on the devices of the value. A plain function has none."""
    if not isinstance(store.updater, Updater):
        return ()
    state = jax.tree.map(lambda x: own_copies(x) if x is value else x, store.updater.init(key, value))
    if store.devices is None or is_traced(value):
        return state
    own, rest = layout_of(store, key), everywhere(store)
    return jax.tree.map(lambda leaf: put(leaf, home(store, own if leaf.shape == value.shape else rest)), state)


def leaf_shardings(store: KVStore) -> KVStore:
    """The store, which has devices, with the `NamedSharding` of each array in place of it."""
    devices = store.devices
    assert devices is not None
    return for_each_array(store, lambda layout: layout.sharding(devices), split_over(devices), copies_for(store))


def for_each_array(store: KVStore, of: Callable[[Layout], Any], split: Any, whole: Any) -> KVStore:
    """The store with something else in place of each array.

    Args:
        of: what takes the place of an array of this layout.
        split: the same for what is spread over the devices along its first axis.
        whole: the same for what every device holds whole.
    """
    layouts = layouts_of(store)

    def state(k: int, leaf: Any) -> Any:
        return of(layouts[k]) if leaf.shape == store.values[k].shape else whole

    homes = map(of, tree_optimizer.state_layouts(store))
    return dataclasses.replace(
        store,
        values={k: of(layouts[k]) for k in store.values},
        updater_state={k: jax.tree.map(functools.partial(state, k), v) for k, v in store.updater_state.items()},
        optimizer_state=jax.tree.structure(store.optimizer_state).unflatten(homes),
        residuals=jax.tree.map(lambda _: split, store.residuals),
        pending={k: p._replace(values=(split,) * len(p.values), count=whole) for k, p in store.pending.items()},
    )
