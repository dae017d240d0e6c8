"""A store whose optimizer sees the whole pytree of params, with one state in `store.optimizer_state`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .. import updaters
from .._core import checks
from .._core.arrays import is_prng_key, is_traced
from .._devices.mesh import put
from .._devices.user_mesh import split_like
from ..updaters import Updater, _TreeOptimizer as TreeOptimizer
from .placing import by_key, owners, state_layouts, trained_keys, tree_of
from .store import Arrays, Changes, KVStore, home, is_on_mesh, is_split, names, shards, specs_of

_SEES_ALL = "the optimizer of this store sees the whole pytree"
_PER_KEY = "updater=jp.updaters.from_optax(tx), which keeps one state a key"


def with_optimizer(store: KVStore, tx: Any, where: str) -> KVStore:
    """The store, made by `from_params`, with this transform and its state before the first update."""
    optimizer = TreeOptimizer(tx)
    store = dataclasses.replace(store, updater=optimizer, updater_state=dict.fromkeys(store.values, ()))
    check_shares(store, specs_of(store), where)
    if store.staleness and optimizer.reads_loss(tree_of(store, specs_of(store))):
        late = f"with staleness {store.staleness} that of a gradient is gone"
        raise ValueError(f"{where}: this optimizer reads the loss, and {late}; use kind 'dist_sync', or staleness=0")
    _check_one_place(store, where)
    store = dataclasses.replace(store, optimizer_state=optimizer.init(tree_of(store, store.values)))
    if store.devices is None or is_traced(store.optimizer_state):
        return store
    leaves, structure = jax.tree.flatten(store.optimizer_state)
    placed = [put(leaf, home(store, layout)) for layout, leaf in zip(state_layouts(store), leaves, strict=True)]
    return dataclasses.replace(store, optimizer_state=structure.unflatten(placed))


def needs_whole(tx: Any, params: Any, count: int) -> bool:
    """Whether a transform is not elementwise in the params, so that it cannot be given shares of them."""
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
        both = f"params {called[one]!r} and {called[other]!r} are on different devices"
        raise ValueError(f"{where}: {both}, and the optimizer sees all in one program; give devices=, or {_PER_KEY}")


def check_pushed(store: KVStore, keys: Iterable[int], rows: Iterable[int]) -> None:
    """Check what is pushed to a store whose optimizer sees the whole pytree: all floating keys, and no rows."""
    trained, called = trained_keys(store), names(store)

    def named(keys: Iterable[int]) -> str:
        keys = sorted(keys)
        return f"{checks.shorten(keys)} ({', '.join(repr(called[k]) for k in keys[:3])})"

    if rows := list(rows):
        mesh = ", and without mesh= and sharding=" if is_on_mesh(store) else ""
        fault = f"keys {named(rows)}: a RowSparse is a part of a value"
        raise ValueError(f"kv.push: {fault}, and {_SEES_ALL}; make the store with {_PER_KEY}{mesh}")
    keys = set(keys)
    if missing := set(trained) - keys:
        fault = f"nothing is pushed to keys {named(missing)}"
        raise ValueError(f"kv.push: {fault}: {_SEES_ALL}; push all at once, or make the store with {_PER_KEY}")
    if others := keys - set(trained):
        fault = f"keys {named(others)} are not floating, so they have no gradient"
        raise ValueError(f"kv.push: {fault} and the optimizer does not change them; push the floating ones only")


def update(store: KVStore, summed: Arrays, value: jax.Array | None) -> Changes:
    """What the update of all params by the sums of their gradients changes. `value` is the loss, if it is known.

    Sums are laid out as the values: whole, one device's share, or rows of all shares. A param without a sum is left as
    it is, and its part of the state too. The optimizer sees zeros as its gradient.
    """
    grads = {k: g.astype(store.values[k].dtype).reshape(store.values[k].shape) for k, g in summed.items()}
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
            f'train step: unused="skip" keeps {", ".join(repr(names(store)[k]) for k in sorted(keys)[:8])} and their '
            f"state unchanged, but their part of this optimizer's state is unknown: {error}; give frozen= for these "
            f"params, or {_PER_KEY}"
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


def check_shares(store: KVStore, values: Mapping[int, Any], where: str) -> None:
    """`ValueError` if values are cut into rows and the updater is not elementwise for one of these whole values.

    `TypeError` for random keys, which have no shares.

    A plain function is checked when it is traced: to trace it here would run its Python once more.
    """
    if not is_split(store):
        return
    for k, value in values.items():
        if is_prng_key(value) and k not in store.frozen:
            which = f"key {k} ({dict(store.paths).get(k, str(k))!r})"
            raise TypeError(
                f"{where}: {which}: kind 'sharded' cuts no random keys; leave them out, or use kind='device'"
            )
    if isinstance(store.updater, TreeOptimizer):
        updaters._check_elementwise_tree(store.updater, tree_of(store, values), shards(store), where)
    if isinstance(store.updater, Updater):
        specs = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in values.items() if k not in store.frozen}
        updaters._check_elementwise(store.updater, specs, shards(store), dict(store.paths), where)
