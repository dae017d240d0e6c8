"""A store on other devices, and how a store is spread over a mapped axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .._core.arrays import Device
from .._core.keys import check_stored
from .._devices import processes
from .._devices.mesh import copied, copies_on, split_over
from .._devices.placement import to_host
from . import _aggregate, _staleness
from ._create import create, signature
from ._store import KVStore, check_shares, kind_of, shapes_of, specs_of


def place(store: KVStore, devices: Sequence[Device]) -> KVStore:
    """Copy a store to other devices, values and updater states with it.

    A store of kind `sharded` is cut into one row for each of the devices. Of the other kinds, `local` too, each device
    gets a copy, as a program over these devices needs it. The residuals of a compressor belong to the devices that
    pushed. They stay if their number is the same, and start from scratch otherwise. Pending pushes are handed to the
    new devices, so that the later sums are the same.

    Args:
        store: any store.
        devices: one or more different devices.

    Returns:
        A new store. Its arrays share no memory with those of `store`.

    Raises:
        ValueError: kind `sharded` and an updater that is not elementwise for shares of this many devices.
        RuntimeError: a stored value was deleted, as by donating the store.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxpar import kv
        >>> store = kv.place(kv.from_params({"w": jnp.ones(2)}), jax.devices()[:1])
        >>> len(store.values[0].sharding.device_set)
        1
    """
    check_stored(store.values, store.values, "kv.place")
    target = create(store.kind, devices=devices).devices
    assert target is not None
    store = _values_of_first(store, target)
    empty = dataclasses.replace(store, devices=target, values={}, updater_state={}, residuals={}, pending={})
    if store.devices is None or len(store.devices) != len(target):
        check_shares(empty, specs_of(store), "kv.place")
    layout, shapes, keys = kind_of(store).layout, shapes_of(store), sorted(store.values)

    def move(k: int, leaf: jax.Array) -> jax.Array:
        """A value, or a leaf of an updater's state. That is laid out as the value if it has its shape."""
        if leaf.shape != store.values[k].shape:
            return copied(leaf, copies_on(target))
        return copied(layout.stored(layout.whole(leaf, shapes[k]), target), layout.sharding(target))

    on_target = dataclasses.replace(
        empty,
        values={k: move(k, store.values[k]) for k in keys},
        updater_state={k: jax.tree.map(lambda leaf, k=k: move(k, leaf), store.updater_state[k]) for k in keys},
    )
    return _with_pending(_with_residuals(on_target, store.residuals), store.pending)


def partition_specs(store: KVStore, axis_name: str) -> KVStore:
    """How a store is spread over a mesh axis, for `shard_map`'s in_specs and out_specs.

    Args:
        store: any store.
        axis_name: the axis of the mesh over which values (kind `sharded`), residuals and pending pushes are spread.

    Returns:
        The store with a `PartitionSpec` in place of each array: `P(axis_name)` for what is spread over the devices
        along its first axis, and `P()` for what every device holds whole.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxpar import kv
        >>> kv.partition_specs(kv.init(kv.create("device"), 3, jnp.ones(2)), "data").values
        {3: P()}
    """
    layout, split, whole = kind_of(store).layout, PartitionSpec(axis_name), PartitionSpec()

    def spec(leaf: Any, k: int) -> PartitionSpec:
        """Of a leaf of an updater's state, which is spread as the value if it has its shape."""
        return layout.spec(axis_name) if layout.is_split and leaf.shape == store.values[k].shape else whole

    return dataclasses.replace(
        store,
        values=dict.fromkeys(store.values, layout.spec(axis_name)),
        updater_state={k: jax.tree.map(lambda leaf, k=k: spec(leaf, k), v) for k, v in store.updater_state.items()},
        residuals=jax.tree.map(lambda _: split, store.residuals),
        pending={k: p._replace(values=(split,) * len(p.values), count=whole) for k, p in store.pending.items()},
    )


def _values_of_first(store: KVStore, target: Sequence[Device]) -> KVStore:
    """The store with process 0's values and states, if they are local and go to devices of several processes."""
    held = (store.values, store.updater_state)
    if not processes.to_share(held, target):
        return store
    processes.agree("kv.place: every process must hold the same keys, in the same shapes", signature(store.values))
    values, states = processes.from_first(held)
    return dataclasses.replace(store, values=values, updater_state=states)


def _with_residuals(store: KVStore, before: dict[int, Any]) -> KVStore:
    """The store with a residual for each compressed key and each of its devices, so that a push makes none."""
    if store.compressor is None:
        return store
    assert store.devices is not None
    residuals = {}
    for k in sorted(_aggregate.compressed_keys(store, store.values)):
        fresh = _aggregate.start_residuals(store, k, len(store.devices))
        held = before.get(k)
        same = held is not None and jax.tree.map(jnp.shape, held) == jax.tree.map(jnp.shape, fresh)
        residuals[k] = copied(held if same else fresh, split_over(store.devices))
    return dataclasses.replace(store, residuals=residuals)


def _with_pending(store: KVStore, before: dict[int, _staleness.PendingPushes]) -> KVStore:
    """The store with the pending pushes of each of its devices, so that a push makes no room for them.

    Raises:
        ValueError: pushes are pending in this process only, and the devices are of several.
    """
    if not store.staleness:
        return store
    assert store.devices is not None
    count, pending = len(store.devices), {}
    for k in sorted(store.values):
        held = before.get(k)
        if held is None and not jnp.issubdtype(store.values[k].dtype, jnp.inexact):
            continue  # a step pushes what has a gradient
        if held is None:
            held = _staleness.start(store, k, count)
        elif processes.to_share(held.values, store.devices):
            raise ValueError(
                f"kv.place: pushes to key {k} are pending in this process only, and the devices are of several "
                "processes; call kv.flush before"
            )
        held = _staleness.regroup(jax.tree.map(to_host, held), count)
        values, number = copied(held.values, split_over(store.devices)), copied(held.count, copies_on(store.devices))
        pending[k] = _staleness.PendingPushes(values, number)
    return dataclasses.replace(store, pending=pending)
