"""A push of small values from emulated devices, and its pull: no program over several devices, so no thread waits.

NumPy packs what was pushed. One program on one device sums and updates. The other devices take what they hold, and
their copies, out of the packed result, see `small_values`.

The sums are those of the general way, in `programs` and `_pull`, to the bit. So is what an updater makes of them, but
for the rounding of one with many operations, as Adam: XLA fuses them otherwise in another program. Only what is usual
is taken here. The functions return None for all else, wrong arguments too, and the general way computes it or says what
is wrong.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from ..._core.arrays import is_tracing
from ..._core.recent import Recent
from ..._devices import emulated, small_values
from ..._devices.buckets import Shape, unpack
from ..._devices.small_values import Devices, Plan, Views, Wanted
from ...updaters import Updater, assign
from .. import _update
from .._store import Arrays, Changes, KVStore, kind_of, shapes_of, with_changes
from .programs import names_of

Pulled = list[list[jax.Array]]

# XLA runs a program of fewer floating operations than 1000 in the thread that starts it, and counts a loop once.
_INLINE_FLOPS = 900
_MOST_ACROSS = 32  # keys; jax makes an array over several devices in Python, so many take as long as the general way
_MOST_TURNS = 16  # of that loop; a longer one costs more than another thread


class _Pushed(NamedTuple):
    """A push of small values.

    Attributes:
        keys: in ascending order.
        devices: that push one value of each key each.
        plan: how values are packed.
        packed: (devices, length) of each group of the plan.
        where: the one device that sums.
        stored: the values there, or views of them. None: they are not read.
    """

    keys: list[int]
    devices: Devices
    plan: Plan
    packed: Views
    where: Sharding
    stored: Sequence[Any] | None


def push(store: KVStore, key: Any, value: Any) -> KVStore | None:
    """The next store, as of `kv.push`."""
    keys, values = (key, value) if type(key) is list else ([key], [value])
    pushed = _find(store, keys, values)
    return None if pushed is None else _push(store, pushed, ())[0]


def pushpull(store: KVStore, key: Any, value: Any, devices: Any) -> tuple[KVStore, Any] | None:
    """The next store, and copies on these devices, as of `kv.pushpull`."""
    keys, values = (key, value) if type(key) is list else ([key], [value])
    places = _places(devices)
    pushed = _find(store, keys, values) if places else None
    if pushed is None:
        return None
    store, pulled = _push(store, pushed, places)
    by_key = dict(zip(pushed.keys, pulled, strict=True))
    return store, [by_key[k] for k in keys] if keys is key else pulled[0]


def _places(devices: Any) -> Devices:
    """The devices, if all are in one memory, or else none."""
    try:
        return tuple(devices) if emulated.one_memory(devices) else ()
    except (AttributeError, TypeError):
        return ()


# What is asked.


def _find(store: KVStore, keys: list[Any], values: Any) -> _Pushed | None:
    """The push, if it is one of small values, one from each of the same several devices for each key."""
    if type(values) is not list or len(keys) != len(values) or not _is_usual(store, len(keys)) or is_tracing():
        return None
    try:
        keys, values = _sorted(keys, values)
        held, shapes = [store.values[k] for k in keys], shapes_of(store)
        avals = tuple((shapes[k], v.dtype) for k, v in zip(keys, held, strict=True))
        plan = small_values.plan_of(avals, store.limits)
        first = [v.sharding for v in values[0]]
        devices = small_values.devices_of(tuple(first))
        if plan is None or devices is None or len(devices) < 2 or any(v.is_deleted() for v in held):
            return None
        if not all([v.sharding for v in vs] == first for vs in values):  # so all are as many
            return None
        views = [list(map(np.asarray, vs)) for vs in values]
        if not all(_are(own, *aval) for own, aval in zip(views, avals, strict=True)):
            return None
        home = _home(store, keys, held, devices)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):  # the general way says what is wrong
        return None
    return None if home is None else _Pushed(keys, devices, plan, small_values.pack(views, plan), *home)


def _is_usual(store: KVStore, count: int) -> bool:
    """Whether a push to so many keys is only a sum and an update of each, within this process."""
    if count > _MOST_ACROSS and not kind_of(store).on_one_device:
        return False
    usual = isinstance(store.updater, Updater) and store.compressor is None and not store.shardings
    return usual and not store.staleness and kind_of(store).adds_up and jax.process_count() == 1


def _are(views: Views, shape: Shape, dtype: np.dtype) -> bool:
    """Whether all have this shape and dtype."""
    return all(x.shape == shape and x.dtype == dtype for x in views)


def _sorted(keys: list[Any], values: list[Any]) -> tuple[list[int], list[Any]]:
    """Different ints in ascending order, and what belongs to each. `TypeError` for any others."""
    if set(map(type, keys)) != {int} or len(set(keys)) < len(keys):
        raise TypeError
    if all(map(operator.lt, keys, keys[1:])):
        return keys, values
    order = sorted(range(len(keys)), key=keys.__getitem__)
    return [keys[i] for i in order], [values[i] for i in order]


def _home(
    store: KVStore, keys: list[int], held: list[jax.Array], devices: Devices
) -> tuple[Sharding, Sequence[Any] | None] | None:
    """Where a push is summed, and the stored values there. None: it is not summed on one device."""
    shardings = {v.sharding for v in held}
    if kind_of(store).on_one_device:
        (where,) = shardings
        stored = None if store.updater is assign else held
        return None if small_values.devices_of((where,)) is None else (where, stored)
    if store.devices not in (None, devices) or jax.tree.leaves([store.updater_state[k] for k in keys]):
        return None
    where = SingleDeviceSharding(devices[0])
    if store.updater is assign:
        return where, None
    if not all(s.is_fully_replicated and emulated.one_memory(s.device_set) for s in shardings):
        return None
    return where, emulated.views(v.addressable_data(0) for v in held)


# What is computed.


def _push(store: KVStore, pushed: _Pushed, devices: Devices) -> tuple[KVStore, Pulled]:
    """The next store, and for each key in ascending order a copy on each of the devices."""
    keys, plan, (home,) = pushed.keys, pushed.plan, pushed.where.device_set
    on_one = kind_of(store).on_one_device
    wanted = _wanted(store, (home,) if on_one else pushed.devices, devices)
    states = [store.updater_state[k] for k in keys]
    names = tuple(names_of(store, keys).values())
    with emulated.on(pushed.where), jax.transfer_guard("allow"):  # NumPy's views are of the devices' own memory
        run = _programs(store.updater, None if on_one else pushed.where)
        own, states, flat = run(pushed.stored, states, pushed.packed, plan, names, wanted[home])
    host = emulated.views(flat) if len(wanted) > 1 else []
    there = {d: small_values.unpack_on(d, host, plan, each, not on_one) for d, each in wanted.items() if d != home}
    there[home] = own
    new = own[0] if on_one else _across(store, [there[d][0] for d in pushed.devices], pushed.devices)
    changes = Changes(dict(zip(keys, new, strict=True)), dict(zip(keys, states, strict=True)))
    pulled = [list(each) for each in zip(*(there[d][-1] for d in devices), strict=True)]
    return with_changes(store, changes), pulled


def _wanted(store: KVStore, holders: Devices, pullers: Devices) -> dict[Any, Wanted]:
    """What each device takes: first what the store holds there, last what is pulled."""
    rows = kind_of(store).layout.is_split
    held = {d: Wanted((i, len(holders)), 0) if rows else Wanted(None, 1) for i, d in enumerate(holders)}
    nothing = Wanted(None, 0)
    for d in dict.fromkeys(pullers):
        row, copies = held.get(d, nothing)
        held[d] = Wanted(row, copies + 1)
    return held


def _across(store: KVStore, each: Sequence[list[jax.Array]], devices: Devices) -> list[jax.Array]:
    """The values out of what the store holds of them on each device."""
    layout, make = kind_of(store).layout, jax.make_array_from_single_device_arrays
    sharding, rows = layout.sharding(devices), len(devices) if layout.is_split else 1
    parts = [list(of_value) for of_value in zip(*each, strict=True)]
    if layout.is_split:
        return [make((rows, *own[0].shape[1:]), sharding, own) for own in parts]
    return [make(own[0].shape, sharding, own) for own in parts]


def _program(updater: Any, where: Sharding | None) -> Any:
    def run(
        stored: Sequence[Any] | None, states: list[Any], packed: list[jax.Array], plan: Plan, names: Any, own: Wanted
    ) -> Any:
        """What this device takes of the new values, their states, and the values packed."""
        flops = _INLINE_FLOPS // len(packed) if updater is assign else 0
        parts = [_sum(p, flops) for p in packed]
        sums = dict(zip(names, unpack(parts, plan.shapes, plan.groups), strict=True))
        held: Arrays = sums if stored is None else dict(zip(names, stored, strict=True))
        part = KVStore(held, dict(zip(names, states, strict=True)), {}, updater=updater)
        changes = _update.update(part, sums)
        new = [changes.values[n] for n in names]
        states = [changes.updater_state[n] for n in names]
        return small_values.take(new, own), states, small_values.pack_traced(new, plan)

    return jax.jit(run, static_argnums=(3, 4, 5), out_shardings=where)


_programs = Recent(_program)


def _sum(rows: jax.Array, flops: int) -> jax.Array:
    """The sum of rows in their order, in a loop of at most so many operations a turn where that is a short loop."""
    count, length = rows.shape
    turns = -(-length * (count - 1) // flops) if flops else 1
    if not 1 < turns <= _MOST_TURNS:
        return functools.reduce(operator.add, [rows[i] for i in range(count)])
    width = -(-length // turns)
    cut = jax.numpy.pad(rows, ((0, 0), (0, turns * width - length))).reshape(count, turns, width)
    sums = jax.lax.map(lambda part: functools.reduce(operator.add, [part[i] for i in range(count)]), cut.swapaxes(0, 1))
    return sums.reshape(-1)[:length]
