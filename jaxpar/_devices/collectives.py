"""Sums over the devices of a mapped axis, one for each way in which a store sums what is pushed.

Everything here runs inside `pmap`, `shard_map` or `vmap` with an axis name. The functions with `limits` take a list of
this device's values and send them in buckets.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from .._core.arrays import nbytes
from . import buckets
from .buckets import BucketLimits, Shape
from .user_mesh import is_split, unsplit

# Bytes. A device that gathers whole values of this size from all others spends more on memory than on messages.
_SHARED_BYTES = 64 << 10
# Terms. Longer sums are loops.
_UNROLLED_TERMS = 16


def map_buckets(
    collective: Callable[[jax.Array], jax.Array], values: Sequence[jax.Array], limits: BucketLimits
) -> list[jax.Array]:
    """The results of an elementwise collective, called once for each bucket.

    A value that is split over another axis of the user's mesh shares no bucket and stays split.
    """
    apart = {i: collective(v) for i, v in enumerate(values) if is_split(v)}
    rest = [v for i, v in enumerate(values) if i not in apart]
    groups = buckets.plan_of(rest, limits)
    packed = [collective(array) for array in buckets.pack(rest, groups)]
    results = iter(buckets.unpack(packed, [v.shape for v in rest], groups))
    return [apart[i] if i in apart else next(results) for i in range(len(values))]


def allreduce(values: Sequence[jax.Array], axis_name: str, limits: BucketLimits) -> list[jax.Array]:
    """The sum over the axis of each value, on every device (kind `device`)."""
    return map_buckets(lambda x: lax.psum(x, axis_name), values, limits)


def gather_sum(values: Sequence[jax.Array], axis_name: str, limits: BucketLimits) -> list[jax.Array]:
    """The sum over the axis of each value, added in the order of the devices (kind `local`).

    Every device gathers the values and adds them itself, so the order does not depend on the backend.
    """
    return map_buckets(lambda x: _gather_and_sum(unsplit(x), axis_name), values, limits)


def reduce_scatter(values: Sequence[jax.Array], axis_name: str, limits: BucketLimits) -> list[jax.Array]:
    """This device's (chunk,) of the sum over the axis of each value (kind `sharded`)."""
    shards = lax.axis_size(axis_name)
    rows = [to_rows(v, shards) for v in values]
    groups = buckets.plan_of(rows, limits)
    mine = [_scatter_sum(array, axis_name) for array in buckets.pack(rows, groups, axis=1)]
    return buckets.unpack(mine, [r.shape[1:] for r in rows], groups)


def all_gather(
    chunks: Sequence[jax.Array], shapes: Sequence[Shape], axis_name: str, limits: BucketLimits
) -> list[jax.Array]:
    """The whole values, of these shapes, out of every device's (chunk,): the inverse of a scatter.

    What a bucket holds is gathered and then copied out of it, so large values have none, however small a chunk is.
    """
    shards = lax.axis_size(axis_name)
    groups = buckets.plan(tuple(((shards, *c.shape), c.dtype) for c in chunks), limits)
    whole = [gather_stack(array, axis_name) for array in buckets.pack(chunks, groups)]
    rows = buckets.unpack(whole, [c.shape for c in chunks], groups, axis=1)
    return [from_rows(r, shape) for r, shape in zip(rows, shapes, strict=True)]


def sum_apart(x: jax.Array, axis_name: str) -> jax.Array:
    """The sum over the axis, by a collective that XLA joins with no other.

    XLA joins all-reduces, and all-gathers too. The sum of delayed pushes would then have to wait for what this step
    computes. It does not join all-to-alls.
    """
    count = lax.axis_size(axis_name)

    def of_all(x: jax.Array) -> jax.Array:
        """(devices, *shape), on every device."""
        return lax.all_to_all(jnp.broadcast_to(x[None], (count, *x.shape)), axis_name, split_axis=0, concat_axis=0)

    if nbytes(x) < _SHARED_BYTES:
        return of_all(x).sum(0)
    share = lax.all_to_all(to_rows(x, count), axis_name, split_axis=0, concat_axis=0).sum(0)
    return from_rows(of_all(share), x.shape)


def gather_stack(value: jax.Array, axis_name: str) -> jax.Array:
    """The value of every device, along a new first axis, on every device.

    Under `shard_map(check_vma=True)` the result has the type of a value that is equal on all devices.
    """
    device = jax.typeof(lax.axis_index(axis_name)).manual_axis_type
    return lax.all_gather(value, axis_name, to="invarying" if axis_name in device.varying else "varying")


def sum_in_order(term: Callable[[Any], jax.Array], count: int) -> jax.Array:
    """term(0) + term(1) + ... + term(count - 1), added from left to right.

    Few terms are unrolled, so that XLA fuses them. Many are a loop, so that the program does not grow with them.
    """
    if count <= _UNROLLED_TERMS:
        return functools.reduce(operator.add, map(term, range(count)))
    return sum_by_loop(term, count)


def sum_by_loop(term: Callable[[Any], jax.Array], count: int) -> jax.Array:
    """The same, always as a loop: the program has the same size for any count."""
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
    """The value out of its rows: the inverse of `to_rows`."""
    return unsplit(rows).reshape(-1)[: math.prod(shape)].reshape(shape)


def own_chunk(value: jax.Array, axis_name: str) -> jax.Array:
    """This device's (chunk,) of a value that every device has."""
    rows = to_rows(value, lax.axis_size(axis_name))
    return lax.dynamic_index_in_dim(rows, lax.axis_index(axis_name), keepdims=False)


def _scatter_sum(rows: jax.Array, axis_name: str) -> jax.Array:
    """This device's row of the sum over the axis."""
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return lax.psum_scatter(rows, axis_name)
    # JAX 0.12 compiles no reduce-scatter over one axis of a mesh where another is Explicit.
    return lax.dynamic_index_in_dim(lax.psum(rows, axis_name), lax.axis_index(axis_name), keepdims=False)


def _gather_and_sum(x: jax.Array, axis_name: str) -> jax.Array:
    """Small: every device gathers and adds all. Large: each gathers and adds one share, then all gather the shares."""
    if nbytes(x) < _SHARED_BYTES:
        return _ordered_sum(gather_stack(x, axis_name))
    rows = to_rows(x, lax.axis_size(axis_name))
    share = _ordered_sum(lax.all_to_all(rows, axis_name, split_axis=0, concat_axis=0))
    return from_rows(gather_stack(share, axis_name), x.shape)


def _ordered_sum(stacked: jax.Array) -> jax.Array:
    return sum_in_order(lambda i: stacked[i], stacked.shape[0])
