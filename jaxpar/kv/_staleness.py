"""Bounded staleness: a pushed value stays on the device that pushed it, unreduced, and is applied tau pushes later.

So the sum over the devices of what was pushed tau steps ago depends on nothing of this step's forward and backward
pass. A compiled step may send the one while it computes the other. A push of a key takes the oldest value out of a
queue, appends the new one, and pushes the oldest as in any other store. The first tau pushes of a key apply nothing:
value, updater state and residuals stay as they are, bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from .._core.arrays import is_traced
from .._devices.mesh import split_over
from .._devices.placement import to_host
from . import _aggregate
from ._store import Arrays, Changes, KVStore, Lists, shapes_of, with_changes

Send = Callable[[KVStore, Lists], Changes]


class PendingPushes(NamedTuple):
    """The pushes of one key that are not applied yet.

    Attributes:
        values: tau arrays (devices, *shape) of the stored dtype, the oldest first. At the prompt the first axis has
            the positions in the pushed list. Places to which nothing was pushed yet hold zeros.
        count: int32 scalar, how many of them (the last ones) were pushed. At most tau.
    """

    values: tuple[jax.Array, ...]
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]


def start(store: KVStore, key: int, count: int) -> PendingPushes:
    """An empty queue for each of `count` devices."""
    shape, dtype = (count, *shapes_of(store)[key]), store.values[key].dtype
    return PendingPushes(tuple(jnp.zeros(shape, dtype) for _ in range(store.staleness)), jnp.zeros((), jnp.int32))


def push(store: KVStore, pushed: Lists, axis_name: str | None, send: Send) -> Changes:
    """What a push changes: `send`, the push without a delay, gets the values that are due."""
    held = {k: store.pending[k] for k in pushed if k in store.pending}
    if axis_name is None and not is_traced((pushed, held, store.values)):
        return _push_at_prompt(store, pushed, send)
    if axis_name is None:
        new = {k: jnp.stack([_aggregate.as_stored(store, k, v) for v in values]) for k, values in pushed.items()}
        due, pending, ready = rotate_queue(store, new)
        lists = {k: list(stacked) for k, stacked in due.items()}
    else:
        _aggregate.axis_size(axis_name, "kv.push")
        due, pending, ready = rotate_queue(store, _aggregate.local_sums(store, pushed), one=True)
        lists = {k: [value] for k, value in due.items()}
    changes = where_ready(store, send(without_delay(store), lists), ready, lists, axis_name)
    return changes._replace(pending=pending)


def without_delay(store: KVStore) -> KVStore:
    """The store as one that applies at once what is pushed."""
    return dataclasses.replace(store, staleness=0, pending={})


def rotate_queue(store: KVStore, new: Arrays, *, one: bool = False) -> tuple[Arrays, dict[int, PendingPushes], Arrays]:
    """Take the oldest values out of the queues and append new ones.

    Args:
        store: any store with a staleness.
        new: with `one` this device's value of each key, else values (n, *shape).
        one: whether this runs inside a mapped axis. There the first axis of the queues, the devices, has length 1
            (`shard_map`) or is gone (`pmap`).

    Returns:
        (the oldest values of each key, in the same layout, the new queues, and for each key a bool scalar, whether
        the oldest value was ever pushed).

    Raises:
        ValueError: a queue is of another number of devices.
    """
    due, pending, ready = {}, {}, {}
    for k, value in new.items():
        value = value.astype(store.values[k].dtype)
        stacked = value[None] if one else value
        held = store.pending.get(k) or start(store, k, stacked.shape[0])
        oldest = held.values[0]
        if one and oldest.size != value.size:
            raise ValueError(
                f"kv.push: key {k}: values {oldest.shape} are pending, and each device pushes {value.shape}; spread "
                "the store by kv.place and kv.partition_specs, or apply the pending ones by kv.flush first"
            )
        due[k] = oldest.reshape(value.shape) if one else oldest
        joined = value.reshape(oldest.shape) if one else value
        pending[k] = PendingPushes((*held.values[1:], joined), jnp.minimum(held.count + 1, store.staleness))
        ready[k] = held.count == store.staleness
    return due, pending, ready


def where_ready(store: KVStore, changes: Changes, ready: Arrays, lists: Lists, axis_name: str | None) -> Changes:
    """The changes of the keys that are ready. The others are as in the store."""
    values, states, residuals, _, optimizer_state = changes

    def residual(k: int) -> Any:
        if axis_name is None:
            return _aggregate.residual_for(store, k, len(lists[k]))
        return _aggregate.held_residual(store, k, axis_name)

    return Changes(
        {k: jnp.where(ready[k], v, store.values[k]) for k, v in values.items()},
        {k: select(ready[k], state, store.updater_state[k]) for k, state in states.items()},
        {k: select(ready[k], state, residual(k)) for k, state in residuals.items()},
        optimizer_state=_where_all_ready(optimizer_state, store.optimizer_state, ready),
    )


def _where_all_ready(new: Any, old: Any, ready: Arrays) -> Any:
    """The state of an optimizer of the whole pytree. All its keys are pushed at once, so they are ready at once."""
    return new if new is None else select(jnp.stack(list(ready.values())).all(), new, old)


def select(condition: jax.Array, new: Any, old: Any) -> Any:
    """One of two pytrees of the same structure, by a bool scalar."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def flush(store: KVStore, axis_name: str | None, send: Send) -> KVStore:
    """The store after all pending pushes, the oldest first."""
    at_prompt = axis_name is None and not is_traced((store.pending, store.values))
    store = dataclasses.replace(store, pending=dict(sorted(store.pending.items())))  # as a push has its keys
    for i in range(store.staleness):
        if at_prompt:
            lists = {k: _unstack(w.values[i]) for k, w in store.pending.items() if i >= store.staleness - _count(w)}
            changes = send(without_delay(store), lists) if lists else Changes()
        else:
            lists, ready = pending_at(store, i, axis_name)
            changes = where_ready(store, send(without_delay(store), lists), ready, lists, axis_name)
        store = with_changes(store, changes)
    empty = jax.tree.map(_zeros_like if at_prompt else jnp.zeros_like, store.pending)
    return dataclasses.replace(store, pending=empty)


def pending_at(store: KVStore, i: int, axis_name: str | None) -> tuple[Lists, Arrays]:
    """Place i of the queues, and whether it was pushed."""
    shapes = shapes_of(store)
    lists = {
        k: list(w.values[i]) if axis_name is None else [w.values[i].reshape(shapes[k])]
        for k, w in store.pending.items()
    }
    return lists, {k: i >= store.staleness - w.count for k, w in store.pending.items()}


def regroup(held: PendingPushes, count: int) -> PendingPushes:
    """The queue for another number of devices, with the same sums.

    Device i takes the values of the devices i, i + count, i + 2 count, ... If there are more devices than before, the
    others have zeros.
    """

    def spread(rows: jax.Array) -> jax.Array:
        if rows.shape[0] == count:
            return rows
        filled = jnp.pad(rows, [(0, -rows.shape[0] % count)] + [(0, 0)] * (rows.ndim - 1))
        return filled.reshape(-1, count, *rows.shape[1:]).sum(0, dtype=rows.dtype)

    return PendingPushes(tuple(map(spread, held.values)), held.count)


# At the prompt, where the number of pushes is known and nothing has to be masked.


def _push_at_prompt(store: KVStore, pushed: Lists, send: Send) -> Changes:
    due: Lists = {}
    pending: dict[int, PendingPushes] = {}
    for k, values in pushed.items():
        new = _stack([_cast(v, store.values[k].dtype) for v in values])
        held = store.pending.get(k)
        if held is None:
            held = PendingPushes(tuple(_zeros_like(new) for _ in range(store.staleness)), jnp.zeros((), jnp.int32))
        number = _count(held)
        if number == store.staleness:
            due[k] = _unstack(held.values[0])
            count = held.count
        else:
            count = jax.device_put(np.int32(number + 1), held.count.sharding)
        pending[k] = PendingPushes((*held.values[1:], new), count)
    changes = send(without_delay(store), due) if due else Changes()
    return changes._replace(pending=pending)


def _count(held: PendingPushes) -> int:
    """How many values were pushed. It is ready at once, since no program of a push computes it."""
    return int(to_host(held.count))


def _cast(value: jax.Array, dtype: Any) -> jax.Array:
    return value if value.dtype == dtype else value.astype(dtype)


def _stack(values: Sequence[jax.Array]) -> jax.Array:
    """(n, *shape): each row stays on its device if these are different ones, else all go to the first."""
    shardings = [v.sharding for v in values]
    single = all(isinstance(s, SingleDeviceSharding) for s in shardings)
    if len(values) > 1 and single and len(set(shardings)) == len(values):
        along = split_over([next(iter(s.device_set)) for s in shardings])
        rows = [_add_axis(v) for v in values]
        return jax.make_array_from_single_device_arrays((len(rows), *values[0].shape), along, rows)
    return _stack_program([v if v.sharding == shardings[0] else jax.device_put(v, shardings[0]) for v in values])


def _unstack(stacked: jax.Array) -> list[jax.Array]:
    """The inverse: a list of this process's rows, each on its device."""
    shards = stacked.addressable_shards
    if len(shards) > 1 and all(s.data.shape[0] == 1 for s in shards) and stacked.shape[0] > 1:
        return [_drop_axis(s.data) for s in sorted(shards, key=lambda s: s.index[0].start)]
    return _unstack_program(stacked)


def _zeros_like(array: jax.Array) -> jax.Array:
    return jnp.zeros(array.shape, array.dtype, device=array.sharding)


_add_axis = jax.jit(lambda value: value[None])
_drop_axis = jax.jit(lambda row: row[0])
_stack_program = jax.jit(jnp.stack)
_unstack_program = jax.jit(lambda stacked: list(stacked))
