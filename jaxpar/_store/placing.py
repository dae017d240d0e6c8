"""Where the arrays of a store are: new values and states, each array that it has, an optimizer's state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .. import updaters
from .._core.arrays import is_traced
from .._devices.donation import own_copies
from .._devices.mesh import put, split_over
from .._devices.user_mesh import without_types
from ..updaters import Updater
from .store import (
    WHOLE,
    Arrays,
    KVStore,
    Layout,
    Rows,
    copies_for,
    everywhere,
    home,
    is_split,
    layout_of,
    layouts_of,
    rows_of,
    shards,
    specs_of,
)


def lay_out(store: KVStore, key: int, value: jax.Array) -> jax.Array:
    """A whole value as the store holds it, on the store's devices."""
    layout = layout_of(store, key)
    sharding = home(store, layout)
    if sharding is not None:
        value = without_types(value)
    value = layout.stored(value)
    return value if sharding is None or is_traced(value) else put(value, sharding)


def start_state(store: KVStore, key: int, value: jax.Array) -> Any:
    """The updater's state of a key, on the devices of the value. A plain function has none, nor has a frozen key."""
    if not isinstance(store.updater, Updater) or key in store.frozen:
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
    return _for_each_array(store, lambda layout: layout.sharding(devices), split_over(devices), copies_for(store))


def partition_specs(store: KVStore, axis_name: str) -> KVStore:
    """The store with how each array is spread over a mapped axis in place of it."""
    whole, split = PartitionSpec(), PartitionSpec(axis_name)
    return _for_each_array(store, lambda layout: layout.spec(axis_name), split, whole)


def _for_each_array(store: KVStore, of: Callable[[Layout], Any], split: Any, whole: Any) -> KVStore:
    """The store with `of(layout)` in place of each array, `split` or `whole` in place of those without a layout.

    What is spread over the devices along its first axis is split, what every device holds is whole.
    """
    layouts = layouts_of(store)

    def state(k: int, leaf: Any) -> Any:
        return of(layouts[k]) if leaf.shape == store.values[k].shape else whole

    homes = map(of, state_layouts(store))
    return dataclasses.replace(
        store,
        values={k: of(layouts[k]) for k in store.values},
        updater_state={k: jax.tree.map(functools.partial(state, k), v) for k, v in store.updater_state.items()},
        optimizer_state=jax.tree.structure(store.optimizer_state).unflatten(homes),
        residuals=jax.tree.map(lambda _: split, store.residuals),
        pending={k: p._replace(values=(split,) * len(p.values), count=whole) for k, p in store.pending.items()},
    )


# The state of an optimizer that sees the whole pytree of params.


def trained_keys(store: KVStore) -> list[int]:
    """The keys of the params that have gradients: floating ones that are not frozen."""
    floating = [k for k, _ in store.paths if jnp.issubdtype(store.values[k].dtype, jnp.inexact)]
    return [k for k in floating if k not in store.frozen]


def tree_of(store: KVStore, by_key: Mapping[int, Any]) -> Any:
    """The user's pytree with these in place of the params that are trained, and None in place of the others."""
    assert store.treedef is not None
    trained = set(trained_keys(store))
    return store.treedef.unflatten([by_key[k] if k in trained else None for k, _ in store.paths])


def by_key(store: KVStore, tree: Any) -> Arrays:
    """The inverse of `tree_of`."""
    return dict(zip(trained_keys(store), jax.tree.leaves(tree), strict=True))


def state_layouts(store: KVStore) -> list[Layout]:
    """How each leaf of the optimizer's state is kept."""
    # What belongs to a param and has its shape is kept as the param. Each device has a copy of the rest.
    count = len(jax.tree.leaves(store.optimizer_state))
    if not count or not store.layouts:
        return [WHOLE] * count
    layouts, specs = layouts_of(store), specs_of(store)
    if is_split(store):
        # The optimizer is elementwise: the state of a flat share has an axis where it has a number for each element.
        flat = {k: jax.ShapeDtypeStruct((rows.chunk,), specs[k].dtype) for k, rows in rows_of(store).items()}
        whole, share = (
            jax.tree.leaves(jax.eval_shape(store.updater.init, tree_of(store, params))) for params in (specs, flat)
        )
        return [Rows(w.shape, shards(store)) if s.ndim else WHOLE for w, s in zip(whole, share, strict=True)]
    copies = everywhere(store)
    try:
        found = owners(store)
    except updaters._UnknownOwners:
        return [copies] * count
    state = jax.tree.leaves(store.optimizer_state)
    return [
        layouts[k] if k is not None and specs[k].shape == leaf.shape else copies
        for k, leaf in zip(found, state, strict=True)
    ]


def owners(store: KVStore) -> list[int | None]:
    """The key to which each leaf of the optimizer's state belongs. None: to no single one."""
    keys = trained_keys(store)
    return [None if i is None else keys[i] for i in store.updater.owners(tree_of(store, specs_of(store)))]


def whole_state(store: KVStore) -> Any:
    """The optimizer's state with whole values, for `eval_params` and for checkpoints."""
    leaves, structure = jax.tree.flatten(store.optimizer_state)
    layouts = state_layouts(store)
    return structure.unflatten([layout.whole(leaf) for layout, leaf in zip(layouts, leaves, strict=True)])
