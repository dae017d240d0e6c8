"""Bounded staleness: a pushed value stays on the device that pushed it, unreduced, and is applied tau pushes later.

So the sum over the devices of what was pushed tau steps ago depends on nothing of this step's forward and backward
pass. A compiled step may send the one while it computes the other. A push of a key takes the oldest value out of a
queue, appends the new one, and pushes the oldest as in any other store. The first tau pushes of a key apply nothing:
value, updater state and residuals stay as they are, bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from .._core.arrays import PyTree, is_traced, is_tracing
from .._devices.mesh import are_on, assemble, copies_on, one_on_each, spans_processes, split_over, to_host
from . import aggregate
from .store import Arrays, Changes, KVStore, Lists, shapes_of, with_changes

# What a push without a delay changes, by lists of values and `aggregate.num_updates` of their keys.
Apply = Callable[[KVStore, Lists, Arrays], Changes]


class PendingPushes(NamedTuple):
    """The pushes of one key that are not applied yet."""

    # Tau arrays (devices, *shape) of the stored dtype, the oldest first. At the prompt the first axis has the positions
    # in the pushed list. Places to which nothing was pushed yet hold zeros.
    values: tuple[jax.Array, ...]
    # Int32 scalar, how many of them (the last ones) were pushed. At most tau.
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]


def start(store: KVStore, key: int, count: int) -> PendingPushes:
    """An empty queue for each of `count` devices."""
    row = jax.ShapeDtypeStruct((count, *shapes_of(store)[key]), store.values[key].dtype)
    return _empty(row, store.staleness)


def push(store: KVStore, pushed: Lists, axis_name: str | None, apply: Apply) -> Changes:
    """What a push changes. `apply` gets the values that have waited long enough."""
    # Inside of a mapped axis a list has the values of one device, which adds them. Elsewhere each value of it counts as
    # that of a device, and waits in a row of its own.
    if is_tracing():
        combine = jnp.stack if axis_name is None else aggregate.add
        new = {k: combine(values) for k, values in aggregate.as_stored(store, pushed).items()}
    else:
        new = {k: _stack(store, k, values) for k, values in pushed.items()}
    oldest, pending, ready = rotate_queue(store, new, of_one_device=axis_name is not None)
    changes = _apply_ready(store, oldest, ready, axis_name, apply)._replace(pending=pending)
    return changes if is_tracing() else _beside_pending(store, changes)


def flush(store: KVStore, axis_name: str | None, apply: Apply) -> KVStore:
    """The store after all pending pushes, the oldest first."""
    store = dataclasses.replace(store, pending=dict(sorted(store.pending.items())))  # as a push has its keys
    for i in range(store.staleness):
        oldest, ready = pending_at(store, i)
        store = with_changes(store, _apply_ready(store, oldest, ready, axis_name, apply))
    changes = Changes(pending=jax.tree.map(jnp.zeros_like, store.pending))
    return with_changes(store, changes if is_tracing() else _beside_pending(store, changes))


def _apply_ready(
    store: KVStore, oldest: Arrays, ready: Mapping[int, Any], axis_name: str | None, apply: Apply
) -> Changes:
    """The changes by the values that are ready. At the prompt it is known which are, and nothing has to be masked."""
    now, shapes = dataclasses.replace(store, staleness=0, pending={}), shapes_of(store)
    if not is_tracing():
        lists = {k: _unstack(value) for k, value in oldest.items() if ready[k]}
        return apply(now, lists, aggregate.num_updates(now, lists)) if lists else Changes()
    lists = {k: list(v) if axis_name is None else [v.reshape(shapes[k])] for k, v in oldest.items()}
    # Under `jit` the values are applied in any case, and what is not ready is put back afterwards.
    changes = apply(now, lists, aggregate.num_updates(now, lists, ready))
    return where_ready(store, changes, ready, lists, axis_name)


def rotate_queue(
    store: KVStore, new: Arrays, *, of_one_device: bool
) -> tuple[Arrays, dict[int, PendingPushes], dict[int, Any]]:
    """The oldest value of each key, the queues with the new ones in their place, and whether each was ever pushed."""
    # Inside a mapped axis the new values are those of one device. There the first axis of the queues, the devices, has
    # length 1 (`shard_map`) or is gone (`pmap`).
    oldest_values, pending, ready = {}, {}, {}
    for k, value in new.items():
        value = value.astype(store.values[k].dtype)
        stacked = value[None] if of_one_device else value
        queue = store.pending.get(k) or _empty(stacked, store.staleness)
        oldest = queue.values[0]
        if of_one_device and oldest.size != value.size:
            raise ValueError(
                f"kv.push: key {k}: values {oldest.shape} are pending, and each device pushes {value.shape}; spread "
                "the store by kv.place, or call kv.flush first"
            )
        oldest_values[k] = oldest.reshape(value.shape) if of_one_device else oldest
        newest = value.reshape(oldest.shape) if of_one_device else value

        # One push more. A value comes out of the queue only if the queue was full.
        count = queue.count
        if is_tracing():
            ready[k] = count == store.staleness
            count = jnp.minimum(count + 1, store.staleness)
        else:
            pushed_before = int(to_host(count))  # ready at once, since no program of a push at the prompt computes it
            ready[k] = pushed_before == store.staleness
            if not ready[k]:
                count = jax.device_put(np.int32(pushed_before + 1), count.sharding if count.committed else None)
        pending[k] = PendingPushes((*queue.values[1:], newest), count)
    return oldest_values, pending, ready


def where_ready(
    store: KVStore, changes: Changes, ready: Mapping[int, Any], lists: Lists, axis_name: str | None
) -> Changes:
    """The changes of the keys that are ready. The others are as in the store."""

    def residual(k: int) -> Any:
        if axis_name is None:
            return aggregate.residuals_for(store, {k: len(lists[k])})[k]
        return aggregate.held_residuals(store, [k], axis_name)[k]

    optimizer_state = changes.optimizer_state
    if optimizer_state is not None:  # of the whole pytree, whose keys are pushed at once, so they are ready at once
        all_ready = jnp.stack(list(ready.values())).all()
        optimizer_state = select(all_ready, optimizer_state, store.optimizer_state)
    return Changes(
        {k: jnp.where(ready[k], v, store.values[k]) for k, v in changes.values.items()},
        {k: select(ready[k], state, store.updater_state[k]) for k, state in changes.updater_state.items()},
        {k: select(ready[k], state, residual(k)) for k, state in changes.residuals.items()},
        optimizer_state=optimizer_state,
    )


def select(condition: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """One of two pytrees of the same structure, by a bool scalar."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def pending_at(store: KVStore, i: int) -> tuple[Arrays, dict[int, Any]]:
    """Place i of the queues, and whether it was pushed."""
    counts = {k: queue.count if is_tracing() else int(to_host(queue.count)) for k, queue in store.pending.items()}
    ready: dict[int, Any] = {k: i >= store.staleness - count for k, count in counts.items()}
    return {k: queue.values[i] for k, queue in store.pending.items()}, ready


def regroup(pushes: PendingPushes, count: int) -> PendingPushes:
    """The queue for another number of devices, with the same sums."""
    # Device i takes the values of the devices i, i + count, i + 2 count, ... If there are more devices than before, the
    # others have zeros.

    def spread(rows: jax.Array) -> jax.Array:
        if rows.shape[0] == count:
            return rows
        filled = jnp.pad(rows, [(0, -rows.shape[0] % count)] + [(0, 0)] * (rows.ndim - 1))
        return filled.reshape(-1, count, *rows.shape[1:]).sum(0, dtype=rows.dtype)

    return PendingPushes(tuple(map(spread, pushes.values)), pushes.count)


# At the prompt. There the rows of what was pushed stay on the devices that pushed them.


def _stack(store: KVStore, key: int, values: Sequence[jax.Array]) -> jax.Array:
    """(n, *shape): each row stays on its device if these are different ones, those of the store if it has some."""
    # Else all go to the devices of the stored value, or to the first one that pushes if that value is anywhere.
    stored, devices = store.values[key], one_on_each([values])
    if devices is not None and store.devices in (None, devices):
        return assemble([_stack_rows([v], stored.dtype) for v in values], split_over(devices))
    home = copies_on(_devices_of(stored)) if stored.committed and not spans_processes(stored) else values[0].sharding
    return _stack_rows([v if v.sharding == home else jax.device_put(v, home) for v in values], stored.dtype)


@functools.partial(jax.jit, static_argnums=1)
def _stack_rows(values: list[jax.Array], dtype: np.dtype[Any]) -> jax.Array:
    return jnp.stack([v.astype(dtype) for v in values])


def _unstack(stacked: jax.Array) -> list[jax.Array]:
    """The inverse: a list of this process's rows, each on its device."""
    shards = stacked.addressable_shards
    if len(shards) > 1 and all(s.data.shape[0] == 1 for s in shards) and stacked.shape[0] > 1:
        return [row for s in sorted(shards, key=lambda s: s.index[0].start) for row in s.data]
    return list(stacked)


def _beside_pending(store: KVStore, changes: Changes) -> Changes:
    """The changes, with all of a key on the devices of its last push. Else no program takes a store of them."""
    new, last = with_changes(store, changes), {k: queue.values[-1] for k, queue in changes.pending.items()}

    def beside(of_keys: dict[int, Any]) -> dict[int, Any]:
        return {k: _move_beside(last[k], x) for k, x in of_keys.items() if k in last}

    # One optimizer's state for all keys, which are pushed together.
    state = _move_beside(list(last.values())[-1], new.optimizer_state)
    by_key = map(beside, (new.values, new.updater_state, changes.residuals, changes.pending))
    return Changes(*by_key, optimizer_state=state)


def _move_beside(pushed: jax.Array, tree: PyTree) -> PyTree:
    """The arrays on the devices of what was pushed. Those that are on no particular device stay so."""
    devices = _devices_of(pushed)

    def move(leaf: jax.Array) -> jax.Array:
        if not leaf.committed or spans_processes(leaf) or are_on(leaf, devices):
            return leaf
        return jax.device_put(leaf, pushed.sharding if leaf.shape == pushed.shape else copies_on(devices))

    return jax.tree.map(move, tree)


def _devices_of(array: jax.Array) -> tuple[Any, ...]:
    """The devices of an array, in the order in which a program has them."""
    sharding = array.sharding
    if isinstance(sharding, NamedSharding):
        return tuple(np.asarray(sharding.mesh.devices).flat)
    return tuple(sorted(sharding.device_set, key=lambda d: d.id))


def _empty(row: jax.Array | jax.ShapeDtypeStruct, staleness: int) -> PendingPushes:
    home = None  # a tracer and a shape are nowhere
    if isinstance(row, jax.Array) and not is_traced(row) and row.committed and not spans_processes(row):
        home = copies_on(_devices_of(row))
    return PendingPushes(tuple(jnp.zeros_like(row) for _ in range(staleness)), jnp.zeros((), jnp.int32, device=home))
