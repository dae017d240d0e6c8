"""Small values of emulated devices: packed by NumPy, unpacked by a program on each device.

These devices share one memory, see `emulated`. A program over several of them takes longer to start than to run, since
threads wait for one another. `jax.device_put` takes as long for each array as a program for many. So what shall be on
several devices is packed once, and each device takes its copies out of the packed arrays.

Only what is usual is taken here. Where something else is asked, the functions return None.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from .._core.arrays import Device
from . import buckets, emulated
from .buckets import BucketLimits, Groups, Shape
from .collectives import to_rows
from .copies import donatable

Devices = tuple[Device, ...]
Views = list[np.ndarray]

# XLA compiles a kernel for each value, so a program for thousands would take minutes.
_MOST = 256


class Plan(NamedTuple):
    """How values of some shapes and dtypes are packed.

    Attributes:
        groups: positions of the values that share an array.
        shapes: of the values.
    """

    groups: Groups
    shapes: tuple[Shape, ...]


class Wanted(NamedTuple):
    """What a device takes of each value.

    Attributes:
        row: (i, n): row i of the value in n rows, as a store of kind `sharded` holds it. None: no row.
        copies: how many whole copies.
    """

    row: tuple[int, int] | None
    copies: int


@functools.lru_cache(maxsize=256)
def plan_of(avals: tuple[tuple[Shape, Any], ...], limits: BucketLimits) -> Plan | None:
    """The plan for values of these shapes and dtypes. None: they are too many, not small, or of another dtype.

    Programs over several devices add shorter floating numbers up in a wider dtype.
    """
    for shape, dtype in avals:
        has_kind = isinstance(dtype, np.dtype)  # that of random keys has none
        is_integer = has_kind and dtype.kind in "iu" and dtype.itemsize < 8  # jax may make wider ones narrow
        usual = dtype == np.float32 or is_integer
        if not usual or math.prod(shape) * dtype.itemsize >= limits.alone_bytes:
            return None
    if not 0 < len(avals) <= _MOST:
        return None
    return Plan(buckets.plan(avals, limits), tuple(shape for shape, _ in avals))


@functools.lru_cache(maxsize=256)
def devices_of(shardings: tuple[Sharding, ...]) -> Devices | None:
    """The device of each of several arrays. None: not each is on one, two are on the same, or not all in one memory."""
    if not all(isinstance(s, SingleDeviceSharding) for s in shardings):
        return None
    devices = tuple(device for s in shardings for device in s.device_set)
    return devices if len(set(devices)) == len(devices) and emulated.one_memory(devices) else None


def pack(views: Sequence[Views], plan: Plan) -> Views:
    """(rows, length) of each group, out of as many rows of each value."""
    rows = len(views[0])
    each = [[views[i][r].reshape(-1) for r in range(rows) for i in group] for group in plan.groups]
    return [np.concatenate(parts).reshape(rows, -1) for parts in each]


def pack_traced(values: Sequence[jax.Array], plan: Plan) -> list[jax.Array]:
    """(length,) of each group, inside a program."""
    return [array.reshape(-1) for array in buckets.pack(values, plan.groups)]


def take(values: Sequence[jax.Array], wanted: Wanted) -> list[list[jax.Array]]:
    """What a device takes of whole values, inside a program."""
    rows: list[list[jax.Array]] = []
    if wanted.row is not None:
        values = jax.lax.optimization_barrier(list(values))
        number, count = wanted.row
        rows.append([to_rows(v, count)[number : number + 1] for v in values])
    return rows + [[jnp.copy(v) for v in values] for _ in range(wanted.copies)]


def unpack_on(device: Device, packed: Views, plan: Plan, wanted: Wanted, committed: bool) -> list[list[jax.Array]]:
    """Values on one device, each in memory of its own.

    Args:
        packed: (length,) of each group.
        committed: whether jax leaves them there, as it does with what `jax.device_put` gave.
    """
    with jax.transfer_guard("allow"):  # NumPy's views are of the devices' own memory
        if committed:
            return _unpack_there(device)(packed, plan, wanted)
        with jax.default_device(device):
            return _unpack_anywhere(packed, plan, wanted)


def _unpack(packed: list[jax.Array], plan: Plan, wanted: Wanted) -> list[list[jax.Array]]:
    return take(buckets.unpack(packed, plan.shapes, plan.groups), wanted)


_unpack_anywhere = jax.jit(_unpack, static_argnums=(1, 2))


@functools.lru_cache(maxsize=64)
def _unpack_there(device: Device) -> Any:
    return jax.jit(_unpack, static_argnums=(1, 2), out_shardings=SingleDeviceSharding(device))


def copies(values: Sequence[jax.Array], devices: Devices, limits: BucketLimits) -> list[list[jax.Array]] | None:
    """For each value a list with a copy on each device, none of which shares memory with the value.

    Args:
        values: all on one device, or all whole on the same several ones.
        devices: of one memory, which may have one twice.
    """
    plan = plan_of(tuple((v.shape, v.dtype) for v in values), limits)
    shardings = {v.sharding for v in values}
    if plan is None or len(shardings) > 1 or not emulated.one_memory(devices):
        return None
    (where,) = shardings
    single = isinstance(where, SingleDeviceSharding)
    if not where.is_fully_replicated or not emulated.one_memory(where.device_set):
        return None
    views = emulated.views(values if single else [v.addressable_data(0) for v in values])
    packed = [row for (row,) in pack([[x] for x in views], plan)]
    there = {
        d: unpack_on(d, packed, plan, Wanted(None, 1), not single)[0]
        for d in _others(devices, where if single else None)
    }
    if len(there) < len(set(devices)):
        (own,) = where.device_set
        there[own] = donatable(values)
    return [list(of_value) for of_value in zip(*(there[d] for d in devices), strict=True)]


def _others(devices: Iterable[Device], own: Sharding | None) -> list[Device]:
    """The different devices, without the one that has the values."""
    return [d for d in dict.fromkeys(devices) if own is None or d not in own.device_set]
