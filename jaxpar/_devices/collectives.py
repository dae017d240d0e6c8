"""Sums over the devices of a mapped axis, one for each kind of store, and the buckets in which values are sent.

In a bucket small values are sent as one flat array, while large ones go one by one without a copy. Each collective
costs a rendezvous of all devices, so 256 values of 1 KB are best sent by one collective. Copying 8 values of 4 MB into
one buffer costs more than seven rendezvous. With four CPU devices the two costs are equal at about 16 KB for each
value, which is the default of `BucketLimits`.

The sums run inside `pmap`, `shard_map` or `vmap` with an axis name. Those with `limits` take a list of this device's
values.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from .._core import checks
from .._core.arrays import nbytes
from .user_mesh import is_split, unsplit

# Bytes. A device that gathers whole values of this size from all others spends more on memory than on messages.
_SHARED_BYTES = 64 << 10
# Terms. Longer sums are loops.
_UNROLLED_TERMS = 16
# Elements. A TPU keeps an array in tiles of 8 lines of 128.
_LINE = 128
Shape = tuple[int, ...]
Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class BucketLimits:
    """The sizes that decide which values share a bucket."""

    bucket_bytes: int = 4 << 20  # no bucket of several values is larger than this
    alone_bytes: int = 16 << 10  # a value of this many bytes or more never shares a bucket

    def __post_init__(self) -> None:
        for name in ("bucket_bytes", "alone_bytes"):
            checks.number(getattr(self, name), "BucketLimits", name, "a number of bytes of 0 or more", lambda n: n >= 0)


def plan(values: Sequence[Any], limits: BucketLimits = BucketLimits()) -> Groups:
    """Which values travel together: groups of positions. Each has a shape and a dtype, one dtype for each group."""
    groups: list[list[int]] = []
    still_open: dict[Any, tuple[list[int], int]] = {}
    for position, value in enumerate(values):
        # The bytes of a random key are jax's own. What is split over another axis of the user's mesh stays split.
        is_whole = not isinstance(value.dtype, np.dtype) or is_split(value)
        size = 0 if is_whole else math.prod(value.shape) * value.dtype.itemsize
        if is_whole or size >= limits.alone_bytes:
            groups.append([position])
            continue
        group, filled = still_open.get(value.dtype, (None, 0))
        if group is None or filled + size > limits.bucket_bytes:
            group, filled = [], 0
            groups.append(group)
        group.append(position)
        still_open[value.dtype] = (group, filled + size)
    return tuple(map(tuple, groups))


def pack(values: Sequence[Any], groups: Sequence[Sequence[int]], axis: int = 0, xp: Any = jnp) -> list[Any]:
    """One array for each group: its values one after another along an axis. That of a group of one stays as it is."""
    # The axes before it are kept, and must be equal in a group. The axes from it on are flattened.
    packed: list[Any] = []
    for group in groups:
        own = [values[i] for i in group]
        if len(own) > 1:
            own = [xp.concatenate([v.reshape((*v.shape[:axis], math.prod(v.shape[axis:]))) for v in own], axis=axis)]
        packed += own
    return packed


def unpack(
    packed: Sequence[jax.Array], shapes: Sequence[Shape], groups: Sequence[Sequence[int]], axis: int = 0
) -> list[jax.Array]:
    """Split buckets into values of (*first axes, *shape): the inverse of `pack`."""
    # The first axes are those of the packed array, which may have got them in between: a gather over devices adds one.
    values: list[Any] = [None] * len(shapes)
    for array, group in zip(packed, groups, strict=True):
        start = 0
        for i in group:
            stop = start + math.prod(shapes[i])
            part = array if len(group) == 1 else jax.lax.slice_in_dim(array, start, stop, axis=axis)
            values[i] = part.reshape(array.shape[:axis] + tuple(shapes[i]))
            start = stop
    return values


# Sums over the devices.


def allreduce(
    values: Sequence[jax.Array], axis_name: str, limits: BucketLimits, total: Callable[..., jax.Array] = lax.psum
) -> list[jax.Array]:
    """The sum over the axis of each value, on every device (kind `device`). `total` sums a bucket of them."""
    groups = plan(values, limits)
    sums = [total(bucket, axis_name) for bucket in pack(values, groups)]
    return unpack(sums, [v.shape for v in values], groups)


def gather_sum(values: Sequence[jax.Array], axis_name: str, limits: BucketLimits) -> list[jax.Array]:
    """The sum over the axis of each value, added in the order of the devices (kind `local`)."""
    # Every device gathers the values and adds them itself, so the order does not depend on the backend.
    return allreduce(values, axis_name, limits, _gather_and_sum)


def reduce_scatter(values: Sequence[jax.Array], axis_name: str, limits: BucketLimits) -> list[jax.Array]:
    """This device's (chunk,) of the sum over the axis of each value (kind `sharded`)."""
    shards = lax.axis_size(axis_name)
    rows = [to_rows(v, shards) for v in values]
    groups = plan(rows, limits)
    mine = [_scatter_sum(array, axis_name) for array in pack(rows, groups, axis=1)]
    return unpack(mine, [r.shape[1:] for r in rows], groups)


def all_gather(
    chunks: Sequence[jax.Array], shapes: Sequence[Shape], axis_name: str, limits: BucketLimits
) -> list[jax.Array]:
    """Gather the values of these shapes from every device's (chunk,): the inverse of a scatter."""
    # Values in a bucket are copied out of it after the gather, so large values use no bucket, even if their chunks are
    # small.
    shards = lax.axis_size(axis_name)
    groups = plan([jax.ShapeDtypeStruct((shards, *c.shape), c.dtype) for c in chunks], limits)
    whole = [gather_stack(array, axis_name) for array in pack(chunks, groups)]
    rows = unpack(whole, [c.shape for c in chunks], groups, axis=1)
    return [from_rows(r, shape) for r, shape in zip(rows, shapes, strict=True)]


def sum_apart(x: jax.Array, axis_name: str) -> jax.Array:
    """The sum over the axis, by a collective that XLA joins with no other."""
    # XLA joins all-reduces, and also all-gathers. A joined sum of delayed pushes would wait for this step's gradients.
    # XLA does not join all-to-alls.
    count = lax.axis_size(axis_name)

    def of_all(x: jax.Array) -> jax.Array:
        """(devices, *shape), on every device."""
        return lax.all_to_all(jnp.broadcast_to(x[None], (count, *x.shape)), axis_name, split_axis=0, concat_axis=0)

    if nbytes(x) < _SHARED_BYTES:
        return of_all(x).sum(0)
    share = send_rows(to_rows(x, count), axis_name).sum(0)
    return from_rows(of_all(share), x.shape)


def gather_stack(value: jax.Array, axis_name: str) -> jax.Array:
    """The value of every device, along a new first axis, on every device."""
    # Under `shard_map(check_vma=True)` the result has the type of a value that is equal on all devices.
    device = jax.typeof(lax.axis_index(axis_name)).manual_axis_type
    to = "invarying" if axis_name in device.varying else "varying"
    lines = lax.all_gather(in_lines(value.reshape(1, -1))[0], axis_name, tiled=True, to=to)
    return lines.reshape(lax.axis_size(axis_name), *value.shape)


def send_rows(rows: jax.Array, axis_name: str) -> jax.Array:
    """(devices, chunk) of every device: row i goes to device i, which gets them in the order of the devices."""
    lines = lax.collapse(in_lines(rows), 0, 2)
    return lax.all_to_all(lines, axis_name, split_axis=0, concat_axis=0, tiled=True).reshape(rows.shape)


def sum_in_order(stacked: jax.Array) -> jax.Array:
    """stacked[0] + stacked[1] + ..., added from left to right."""
    # Few terms are unrolled, so that XLA fuses them. Many terms are a loop, so that the program does not grow.
    count = stacked.shape[0]
    if count <= _UNROLLED_TERMS:
        return functools.reduce(operator.add, [stacked[i] for i in range(count)])
    return sum_by_loop(lambda i: stacked[i], count)


def sum_by_loop(term: Callable[[Any], jax.Array], count: int) -> jax.Array:
    """term(0) + ... + term(count - 1), from left to right, as a loop: the program has the same size for any count."""
    return lax.fori_loop(1, count, lambda i, total: total + term(i), term(0))


def chunk_size(size: int, shards: int) -> int:
    """How many elements of a value of `size` elements one of `shards` devices holds."""
    return -(-size // shards)


def to_rows(value: jax.Array, shards: int) -> jax.Array:
    """A value as (shards, chunk): flat, padded with zeros, row i for device i."""
    chunk = chunk_size(value.size, shards)
    flat = unsplit(value).reshape(-1)
    return jnp.pad(flat, (0, shards * chunk - value.size)).reshape(shards, chunk)


def from_rows(rows: jax.Array, shape: Shape) -> jax.Array:
    """Join rows to the value: the inverse of `to_rows`."""
    return unsplit(rows).reshape(-1)[: math.prod(shape)].reshape(shape)


def own_chunk(value: jax.Array, axis_name: str) -> jax.Array:
    """This device's (chunk,) of a replicated value."""
    rows = to_rows(value, lax.axis_size(axis_name))
    return lax.dynamic_index_in_dim(rows, lax.axis_index(axis_name), keepdims=False)


def in_lines(rows: jax.Array) -> jax.Array:
    """Rows (count, chunk) as lines (count, m, width) in the same order. A row of no such width is one line."""
    # Of an array (devices, chunk) a TPU has the rows of eight devices in each tile. Then a reduce-scatter becomes an
    # all-reduce, and what a gather gives has to be copied. Lines of one device fill tiles by themselves.
    count, chunk = rows.shape
    width = max([n for n in range(_LINE // 2 + 1, min(_LINE, chunk) + 1) if chunk % n == 0], default=chunk)
    return rows.reshape(count, chunk // width if width else 1, width)


def _scatter_sum(rows: jax.Array, axis_name: str) -> jax.Array:
    """This device's row of the sum over the axis."""
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return lax.psum_scatter(lax.collapse(in_lines(rows), 0, 2), axis_name, tiled=True).reshape(-1)
    # JAX 0.12 compiles no reduce-scatter over one axis of a mesh where another is Explicit.
    return lax.dynamic_index_in_dim(lax.psum(rows, axis_name), lax.axis_index(axis_name), keepdims=False)


def _gather_and_sum(x: jax.Array, axis_name: str) -> jax.Array:
    """Small: every device gathers and adds all. Large: each gathers and adds one share, then all gather the shares."""
    x = unsplit(x)
    if nbytes(x) < _SHARED_BYTES:
        return sum_in_order(gather_stack(x, axis_name))
    rows = to_rows(x, lax.axis_size(axis_name))
    share = sum_in_order(send_rows(rows, axis_name))
    return from_rows(gather_stack(share, axis_name), x.shape)
