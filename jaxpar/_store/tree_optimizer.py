"""A store whose optimizer sees the whole pytree of params, with one state in `store.optimizer_state`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from .. import updaters
from .._core import checks
from .._core.arrays import is_prng_key, is_traced
from .._devices.placement import put
from .._devices.user_mesh import split_like
from ..updaters import Updater, _TreeOptimizer as TreeOptimizer
from .layouts import WHOLE, Layout, Rows
from .store import (
    Arrays,
    Changes,
    KVStore,
    everywhere,
    has_types,
    home,
    is_on_mesh,
    is_split,
    layouts_of,
    names,
    rows_of,
    shards,
    specs_of,
)

_PER_KEY = "updater=jp.updaters.from_optax(tx), which keeps one state a key"


def trained_keys(store: KVStore) -> list[int]:
    """The keys of the floating params, which have gradients."""
    return [k for k, _ in store.paths if jnp.issubdtype(store.values[k].dtype, jnp.inexact)]


def tree_of(store: KVStore, by_key: Mapping[int, Any]) -> Any:
    """The user's pytree with these in place of the floating params, and None in place of the others."""
    assert store.treedef is not None
    trained = set(trained_keys(store))
    return store.treedef.unflatten([by_key[k] if k in trained else None for k, _ in store.paths])


def by_key(store: KVStore, tree: Any) -> Arrays:
    """The inverse of `tree_of`."""
    return dict(zip(trained_keys(store), jax.tree.leaves(tree), strict=True))


def with_optimizer(store: KVStore, tx: Any, where: str) -> KVStore:
    """The store, made by `from_params`, with this transform and its state before the first update.

    Raises:
        ValueError: values are split and the transform is not elementwise, or pushes are delayed and it reads the loss.
    """
    optimizer = TreeOptimizer(tx)
    store = dataclasses.replace(store, updater=optimizer, updater_state=dict.fromkeys(store.values, ()))
    check_shares(store, specs_of(store), where)
    if store.staleness and optimizer.reads_loss(tree_of(store, specs_of(store))):
        raise ValueError(
            f"{where}: this optimizer reads the loss, and a store of staleness {store.staleness} applies a gradient "
            "after the loss of its batch is gone; use kind 'dist_sync', or staleness=0"
        )
    _check_one_place(store, where)
    store = dataclasses.replace(store, optimizer_state=optimizer.init(tree_of(store, store.values)))
    if store.devices is None or is_traced(store.optimizer_state):
        return store
    leaves, structure = jax.tree.flatten(store.optimizer_state)
    placed = [put(leaf, home(store, layout)) for layout, leaf in zip(state_layouts(store), leaves, strict=True)]
    return dataclasses.replace(store, optimizer_state=structure.unflatten(placed))


def needs_whole(tx: Any, params: Any, count: int) -> bool:
    """Whether a transform is not elementwise in the params, so that it cannot be given one device's shares.

    Args:
        params: shapes and dtypes of the whole params, with None where there is no gradient.
        count: how many shares a value is cut into.
    """
    try:
        updaters._check_elementwise_tree(TreeOptimizer(tx), params, count, "")
    except ValueError:
        return True
    return False


def _check_one_place(store: KVStore, where: str) -> None:
    """`ValueError` where values are committed to different devices, so that no program can have them all."""
    places: dict[frozenset[Any], int] = {}
    for k in trained_keys(store):
        value = store.values[k]
        if isinstance(value, jax.Array) and not is_traced(value) and value.committed:
            places.setdefault(frozenset(value.sharding.device_set), k)
    if len(places) > 1:
        one, other = list(places.values())[:2]
        called = names(store)
        raise ValueError(
            f"{where}: params {called[one]!r} and {called[other]!r} are on different devices, and the optimizer sees "
            f"all of them in one program; give devices=, or {_PER_KEY}"
        )


def state_homes(store: KVStore) -> list[Sharding | None]:
    """The sharding of each leaf of the optimizer's state. None: it stays where it is."""
    return [home(store, layout) for layout in state_layouts(store)]


def state_layouts(store: KVStore) -> list[Layout]:
    """How each leaf of the optimizer's state is kept.

    What belongs to a param and has its shape is kept as the param. Each device has a copy of the rest.
    """
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
    """The key to which each leaf of the optimizer's state belongs. None: to no single one.

    Raises:
        UnknownOwners: nobody can tell.
    """
    keys = trained_keys(store)
    return [None if i is None else keys[i] for i in store.updater.owners(tree_of(store, specs_of(store)))]


def check_pushed(store: KVStore, keys: Iterable[int], rows: Iterable[int]) -> None:
    """Check what is pushed to a store whose optimizer sees the whole pytree.

    Args:
        keys: to which something is pushed.
        rows: to which a `RowSparse` is pushed.

    Raises:
        ValueError: a floating param gets no gradient, one that is not floating gets something, or a `RowSparse`.
    """
    trained, called = trained_keys(store), names(store)

    def named(keys: Iterable[int]) -> str:
        keys = sorted(keys)
        return f"{checks.shorten(keys)} ({', '.join(repr(called[k]) for k in keys[:3])})"

    if rows := list(rows):
        mesh = ", and without mesh= and sharding=, over which no RowSparse is split" if is_on_mesh(store) else ""
        raise ValueError(
            f"kv.push: keys {named(rows)}: a RowSparse updates some rows by themselves, and the optimizer of this "
            f"store sees the whole pytree; make the store with {_PER_KEY}{mesh}"
        )
    keys = set(keys)
    if missing := set(trained) - keys:
        raise ValueError(
            f"kv.push: nothing is pushed to keys {named(missing)}: the optimizer of this store sees the whole pytree, "
            f"so push all its keys at once; or make the store with {_PER_KEY}"
        )
    if others := keys - set(trained):
        raise ValueError(
            f"kv.push: keys {named(others)} are not floating, so they have no gradient and the optimizer of this store "
            "leaves them as they are; push the floating ones only"
        )


def update(store: KVStore, summed: Arrays, value: jax.Array | None) -> Changes:
    """What the update of all params by the sums of their gradients changes.

    Args:
        store: with a `TreeOptimizer`. Its values may be whole, or one device's share, or rows of all shares.
        summed: laid out as the values. A param that is not in it is left as it is, and its part of the state too. The
            optimizer sees zeros as its gradient.
        value: the loss, if it is known.
    """
    grads = {k: g.astype(store.values[k].dtype).reshape(store.values[k].shape) for k, g in summed.items()}
    if has_types(store.values[k] for k in grads):
        grads = {k: split_like(g, store.values[k]) for k, g in grads.items()}
    left = {k: jnp.zeros_like(store.values[k]) for k in trained_keys(store) if k not in grads}
    args = tree_of(store, {**grads, **left}), store.optimizer_state, tree_of(store, store.values)

    def run(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return store.updater.update(grads, state, params, value)

    if is_split(store) and any(g.ndim > 1 for g in grads.values()):
        axes = jax.tree.map(lambda leaf: 0 if leaf.ndim > 1 else None, store.optimizer_state)  # of rows, as the grads
        run = jax.vmap(run, in_axes=(0, axes, 0), out_axes=(0, axes))
    params, state = run(*args)
    _check_state(state, store.optimizer_state)
    values = {k: v for k, v in by_key(store, params).items() if k not in left}
    return Changes(values, dict.fromkeys(values, ()), optimizer_state=_keep(store, left, state) if left else state)


def _keep(store: KVStore, keys: Iterable[int], state: Any) -> Any:
    """The new state, with the old one for what belongs to these params."""
    keys = set(keys)
    leaves, structure = jax.tree.flatten(state)
    try:
        found = owners(store)
    except updaters._UnknownOwners as error:
        raise ValueError(
            f'train step: unused="skip" leaves {", ".join(repr(names(store)[k]) for k in sorted(keys)[:8])} and their '
            f"state as they are, and nobody can tell which part of this optimizer's state that is: {error}; leave "
            f"these params out of the pytree that is trained, or give {_PER_KEY}"
        ) from error
    held = jax.tree.leaves(store.optimizer_state)
    return structure.unflatten(old if k in keys else new for k, new, old in zip(found, leaves, held, strict=True))


def _check_state(new: Any, old: Any) -> None:
    """`TypeError` if an update changes the structure of the state, which could not be stored."""
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise TypeError(
            "kv.push: the optimizer's update returns a state of another structure than its init: expected "
            f"{jax.tree.structure(old)}, got {jax.tree.structure(new)}"
        )


def whole_state(store: KVStore) -> Any:
    """The optimizer's state with whole values, for `eval_params` and for checkpoints."""
    leaves, structure = jax.tree.flatten(store.optimizer_state)
    layouts = state_layouts(store)
    return structure.unflatten([layout.whole(leaf) for layout, leaf in zip(layouts, leaves, strict=True)])


def check_shares(store: KVStore, values: Mapping[int, Any], where: str) -> None:
    """`ValueError` if values are cut into rows and the updater is not elementwise for one of these whole values.

    `TypeError` for random keys, which have no shares.

    A plain function is checked when it is traced: to trace it here would run its Python once more.
    """
    if not is_split(store):
        return
    for k, value in values.items():
        if is_prng_key(value):
            raise TypeError(
                f"{where}: key {k} ({dict(store.paths).get(k, str(k))!r}): a store of kind 'sharded' cuts values into "
                "flat shares, and random keys have none; leave them out of the params, or use kind='device'"
            )
    if isinstance(store.updater, TreeOptimizer):
        updaters._check_elementwise_tree(store.updater, tree_of(store, values), shards(store), where)
    if isinstance(store.updater, Updater):
        specs = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in values.items()}
        updaters._check_elementwise(store.updater, specs, shards(store), dict(store.paths), where)
