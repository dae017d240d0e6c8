"""Sums over the devices of a mapped axis: what each kind of store does with the values that are pushed.

Everything here runs inside `pmap`, `shard_map` or `vmap` with an axis name, takes a list of this device's
values and sends them in buckets.
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

from . import buckets
from .buckets import BucketLimits, Shape

# Bytes. From here on a device that gathers every other one's whole value spends more on memory than on messages.
_GATHER_BY_SHARES = 64 << 10
_WRITTEN_OUT = 16  # terms


def bucketed(
    collective: Callable[[jax.Array], jax.Array], values: Sequence[jax.Array], limits: BucketLimits
) -> list[jax.Array]:
    """An elementwise collective applied to the values bucket by bucket."""
    groups = buckets.plan_of(values, limits)
    packed = [collective(array) for array in buckets.pack(values, groups)]
    return buckets.unpack(packed, [v.shape for v in values], groups)


def allreduce(values: Sequence[jax.Array], axis_name: str, limits: BucketLimits) -> list[jax.Array]:
    """The sum over the axis of each value, on every device (kind `device`)."""
    return bucketed(lambda x: lax.psum(x, axis_name), values, limits)


def gather_sum(values: Sequence[jax.Array], axis_name: str, limits: BucketLimits) -> list[jax.Array]:
    """The same sum by gathering every device's values and adding them up in the order of the devices.

    Kind `local`: the star of MXNet's article. The order of the additions does not depend on the backend.
    """
    return bucketed(lambda x: _gathered_sum(x, axis_name), values, limits)


def _gathered_sum(x: jax.Array, axis_name: str) -> jax.Array:
    """Small: every device gathers all and adds. Large: each gathers and adds one share, then all get the shares."""
    if x.size * x.dtype.itemsize < _GATHER_BY_SHARES:
        return _ordered_sum(gathered(x, axis_name))
    rows = to_rows(x, lax.axis_size(axis_name))
    share = _ordered_sum(lax.all_to_all(rows, axis_name, split_axis=0, concat_axis=0))
    return from_rows(gathered(share, axis_name), x.shape)


def _ordered_sum(stacked: jax.Array) -> jax.Array:
    return sum_in_order(lambda i: stacked[i], stacked.shape[0])


def sum_in_order(term: Callable[[Any], jax.Array], count: int) -> jax.Array:
    """term(0) + term(1) + ... + term(count - 1), added up from left to right.

    Few terms are written out, so that XLA fuses them; many are a loop, so that the program does not grow with them.
    """
    if count <= _WRITTEN_OUT:
        return functools.reduce(operator.add, map(term, range(count)))
    return lax.fori_loop(1, count, lambda i, total: total + term(i), term(0))


def gathered(value: jax.Array, axis_name: str) -> jax.Array:
    """The value of every device, along a new first axis, on every device.

    `shard_map(check_vma=True)` tells what is equal on all devices from what may differ; this is of the first
    sort, and says so where that is asked.
    """
    device = jax.typeof(lax.axis_index(axis_name)).manual_axis_type
    return lax.all_gather(value, axis_name, to="invarying" if axis_name in device.varying else "varying")


def chunk_size(size: int, shards: int) -> int:
    """How many elements of a value of `size` elements one of `shards` devices holds."""
    return -(-size // shards)


def to_rows(value: jax.Array, shards: int) -> jax.Array:
    """A value as (shards, chunk): flat, padded with zeros, row i for device i."""
    chunk = chunk_size(value.size, shards)
    flat = value.reshape(-1)
    return jnp.pad(flat, (0, shards * chunk - value.size)).reshape(shards, chunk)


def from_rows(rows: jax.Array, shape: Shape) -> jax.Array:
    """The inverse of `to_rows`."""
    return rows.reshape(-1)[: math.prod(shape)].reshape(shape)


def _by_rows(rows: Sequence[jax.Array], limits: BucketLimits) -> tuple[list[jax.Array], tuple[tuple[int, ...], ...]]:
    """(shards, chunk) arrays in buckets along their second axis."""
    groups = buckets.plan_of(rows, limits)
    return [rows[g[0]] if len(g) == 1 else jnp.concatenate([rows[i] for i in g], axis=1) for g in groups], groups


def reduce_scatter(values: Sequence[jax.Array], axis_name: str, limits: BucketLimits) -> list[jax.Array]:
    """The sum over the axis of each value, each device keeping its own (chunk,) of it (kind `sharded`)."""
    shards = lax.axis_size(axis_name)
    rows = [to_rows(v, shards) for v in values]
    packed, groups = _by_rows(rows, limits)
    mine = [lax.psum_scatter(array, axis_name) for array in packed]
    return buckets.unpack(mine, [r.shape[1:] for r in rows], groups)


def all_gather(
    chunks: Sequence[jax.Array], shapes: Sequence[Shape], axis_name: str, limits: BucketLimits
) -> list[jax.Array]:
    """The whole values out of every device's (chunk,): the inverse of the scatter."""
    groups = buckets.plan_of(chunks, limits)
    whole = [gathered(array, axis_name) for array in buckets.pack(chunks, groups)]
    values: list[jax.Array | None] = [None] * len(chunks)
    for array, group in zip(whole, groups, strict=True):
        start = 0
        for i in group:
            width = chunks[i].shape[0]
            values[i] = from_rows(lax.slice_in_dim(array, start, start + width, axis=1), shapes[i])
            start += width
    return values  # pyright: ignore[reportReturnType]


def own_chunk(value: jax.Array, axis_name: str) -> jax.Array:
    """This device's (chunk,) of a value that every device has."""
    rows = to_rows(value, lax.axis_size(axis_name))
    return lax.dynamic_index_in_dim(rows, lax.axis_index(axis_name), keepdims=False)
