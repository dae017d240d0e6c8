"""Sums over devices of compressed values: bucket, encode, exchange, decode and add.

Elementwise compressors encode whole buckets. The others encode value by value, and their payloads share buckets. Only
payloads are sent between devices.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._devices import buckets, collectives
from .._devices.buckets import BucketLimits, Shape
from .._devices.user_mesh import unsplit
from ..compression import (
    Compressor,
    LinearCompressor,
    _allreduce_two_way as allreduce_two_way,
    _is_two_way as is_two_way,
    _reduce_scatter_two_way as reduce_scatter_two_way,
    _start_owner as start_owner,
    decode_sum,
)
from . import _owners

State = Any
Sums = tuple[list[jax.Array], list[State]]


def start(
    compressor: Compressor | LinearCompressor,
    shapes: Sequence[Shape],
    dtypes: Sequence[Any],
    seeds: Sequence[Any],
    rows: int | None,
    count: int,
) -> list[State]:
    """The state for each value on a device that has pushed nothing.

    Args:
        rows: with a number, each state has one part for each row of a split value, and `shapes` are those of a row.
        count: the devices. Each owns a share of a value that is not split.
    """
    init = compressor.init if rows is None else functools.partial(_start_rows, compressor, rows)
    states = [init(shape, dtype, seed=seed) for shape, dtype, seed in zip(shapes, dtypes, seeds, strict=True)]
    if rows is None and is_two_way(compressor):
        states = [{**state, **start_owner(shape, count)} for state, shape in zip(states, shapes, strict=True)]
    return states


def _start_rows(compressor: Any, rows: int, shape: Shape, dtype: Any, *, seed: Any) -> State:
    seeds = seed * jnp.uint32(rows) + jnp.arange(rows, dtype=jnp.uint32)
    return jax.vmap(lambda s: compressor.init(shape, dtype, seed=s))(seeds)


def allreduce(
    compressor: Compressor | LinearCompressor,
    values: Sequence[jax.Array],
    states: Sequence[State],
    axis_name: str,
    limits: BucketLimits,
) -> Sums:
    """The sums over the axis on every device, and the new states of this device."""
    values = [unsplit(v) for v in values]
    if isinstance(compressor, LinearCompressor):
        return _linear(compressor, values, states, axis_name, limits)
    if is_two_way(compressor):
        return allreduce_two_way(values, states, axis_name, limits)
    shapes = [v.shape for v in values]
    groups = buckets.plan_of(values, limits) if compressor.elementwise else tuple((i,) for i in range(len(values)))
    flat = [array.reshape(-1) for array in buckets.pack(values, groups)]
    joined = [_join([states[i] for i in g]) for g in groups]
    coded = [compressor.encode(v, s) for v, s in zip(flat, joined, strict=True)]
    sums = _owners.sum_payloads(compressor, [payload for payload, _ in coded], flat, axis_name, limits)
    return buckets.unpack(sums, shapes, groups), _split([state for _, state in coded], shapes, groups)


def reduce_scatter(
    compressor: Compressor | LinearCompressor,
    values: Sequence[jax.Array],
    states: Sequence[State],
    axis_name: str,
    limits: BucketLimits,
) -> Sums:
    """This device's (chunk,) of each sum over the axis. Every row is encoded for the device that keeps it."""
    values = [unsplit(v) for v in values]
    if isinstance(compressor, LinearCompressor):
        sums, states = _linear(compressor, values, states, axis_name, limits)
        return [collectives.own_chunk(s, axis_name) for s in sums], states
    if is_two_way(compressor):
        return reduce_scatter_two_way(values, states, axis_name, limits)
    shards = lax.axis_size(axis_name)
    rows = [collectives.to_rows(v, shards) for v in values]
    coded = [jax.vmap(compressor.encode)(r, s) if r.size else ({}, s) for r, s in zip(rows, states, strict=True)]
    send = functools.partial(_owners.to_owners, axis_name=axis_name)
    exchanged = _owners.exchange([payload for payload, _ in coded], send, 1, limits)
    sums = [
        decode_sum(compressor, payloads, r.shape[1:], r.dtype) if r.size else r[0]
        for payloads, r in zip(exchanged, rows, strict=True)
    ]
    return sums, [state for _, state in coded]


def _linear(
    compressor: LinearCompressor,
    values: Sequence[jax.Array],
    states: Sequence[State],
    axis_name: str,
    limits: BucketLimits,
) -> Sums:
    def psum(tree: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        return structure.unflatten(collectives.allreduce(leaves, axis_name, limits))

    both = [compressor.allreduce(v, s, psum) for v, s in zip(values, states, strict=True)]
    return [total for total, _ in both], [state for _, state in both]


def _join(states: Sequence[State]) -> State:
    """One state for a bucket: the residuals one after another, the rest as the first one has it."""
    (residual,) = buckets.pack([s["residual"] for s in states], [range(len(states))])
    return {**states[0], "residual": residual.reshape(-1)}


def _split(joined: Sequence[State], shapes: Sequence[Shape], groups: buckets.Groups) -> list[State]:
    """The inverse: the state of each value."""
    residuals = buckets.unpack([state["residual"] for state in joined], shapes, groups)
    rest = {i: state for state, group in zip(joined, groups, strict=True) for i in group}
    return [{**rest[i], "residual": residual} for i, residual in enumerate(residuals)]
