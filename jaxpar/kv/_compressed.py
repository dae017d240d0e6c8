"""Sums over devices of compressed values: bucket, encode, exchange, decode and add.

Elementwise compressors take whole buckets; the others take value by value, and only what they made is put in
buckets. What crosses between devices is the payload and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._devices import buckets, collectives
from .._devices.buckets import BucketLimits, Shape
from ..compression import Compressor, LinearCompressor, decode_sum

State = Any


def start(compressor: Compressor | LinearCompressor, shape: Shape, dtype: Any, seed: Any, rows: int | None) -> State:
    """The state of a device that has pushed nothing; with `rows`, one for each row of a sharded value."""
    if rows is None:
        return compressor.init(shape, dtype, seed=seed)
    seeds = jnp.asarray(seed, jnp.uint32) * jnp.uint32(rows) + jnp.arange(rows, dtype=jnp.uint32)
    return jax.vmap(lambda s: compressor.init(shape, dtype, seed=s))(seeds)


def allreduce(
    compressor: Compressor | LinearCompressor,
    values: Sequence[jax.Array],
    states: Sequence[State],
    axis_name: str,
    limits: BucketLimits,
) -> tuple[list[jax.Array], list[State]]:
    """The sums over the axis on every device, and the new states of this device."""
    if isinstance(compressor, LinearCompressor):
        return _linear(compressor, values, states, axis_name, limits)
    groups = buckets.plan_of(values, limits) if compressor.elementwise else [(i,) for i in range(len(values))]
    flat = [jnp.concatenate([values[i].reshape(-1) for i in g]) for g in groups]
    joined = [_join([states[i] for i in g]) for g in groups]
    coded = [compressor.encode(v, s) for v, s in zip(flat, joined, strict=True)]
    gathered = _exchange([payload for payload, _ in coded], lambda x: collectives.gathered(x, axis_name), 0, limits)
    sums = [decode_sum(compressor, payloads, v.shape, v.dtype) for payloads, v in zip(gathered, flat, strict=True)]
    shapes = [v.shape for v in values]
    sums = [s.reshape(shapes[g[0]]) if len(g) == 1 else s for s, g in zip(sums, groups, strict=True)]
    new_states: list[State] = [None] * len(values)
    for (_, state), g in zip(coded, groups, strict=True):
        for i, part in zip(g, _split(state, [shapes[i] for i in g]), strict=True):
            new_states[i] = part
    return buckets.unpack(sums, shapes, groups), new_states


def reduce_scatter(
    compressor: Compressor | LinearCompressor,
    values: Sequence[jax.Array],
    states: Sequence[State],
    axis_name: str,
    limits: BucketLimits,
) -> tuple[list[jax.Array], list[State]]:
    """This device's (chunk,) of each sum over the axis; every row is encoded for the device that keeps it."""
    if isinstance(compressor, LinearCompressor):
        sums, states = _linear(compressor, values, states, axis_name, limits)
        return [collectives.own_chunk(s, axis_name) for s in sums], states
    shards = lax.axis_size(axis_name)
    rows = [collectives.to_rows(v, shards) for v in values]
    coded = [jax.vmap(compressor.encode)(r, s) if r.size else ({}, s) for r, s in zip(rows, states, strict=True)]
    exchanged = _exchange(
        [payload for payload, _ in coded],
        lambda x: lax.all_to_all(x, axis_name, split_axis=0, concat_axis=0, tiled=True),
        1,
        limits,
    )
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
) -> tuple[list[jax.Array], list[State]]:
    def psum(tree: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        return structure.unflatten(collectives.allreduce(leaves, axis_name, limits))

    both = [compressor.allreduce(v, s, psum) for v, s in zip(values, states, strict=True)]
    return [total for total, _ in both], [state for _, state in both]


def _exchange(
    payloads: list[Any], collective: Callable[[jax.Array], jax.Array], lead: int, limits: BucketLimits
) -> list[Any]:
    """The payloads with the devices as first axis, after one collective for each bucket of one dtype.

    `lead` 0: each array goes whole to every device. `lead` 1: row i of each array goes to device i.
    """
    leaves, structure = jax.tree.flatten(payloads)
    tails = [leaf.shape[lead:] for leaf in leaves]
    flat = [leaf.reshape(*leaf.shape[:lead], -1) for leaf in leaves]
    groups = buckets.plan_of(flat, limits)
    out: list[Any] = [None] * len(leaves)
    for group in groups:
        together = flat[group[0]] if len(group) == 1 else jnp.concatenate([flat[i] for i in group], axis=-1)
        arrived = collective(together)
        start = 0
        for i in group:
            width = flat[i].shape[-1]
            part = lax.slice_in_dim(arrived, start, start + width, axis=1)
            out[i] = part.reshape(arrived.shape[0], *tails[i])
            start += width
    return structure.unflatten(out)


def _join(states: Sequence[State]) -> State:
    """One state for a bucket: the residuals behind one another, the rest as the first one has it."""
    residual = jnp.concatenate([s["residual"].reshape(-1) for s in states])
    return {**states[0], "residual": residual}


def _split(state: State, shapes: Sequence[Shape]) -> list[State]:
    groups = [tuple(range(len(shapes)))]
    residual = state["residual"] if len(shapes) > 1 else state["residual"].reshape(shapes[0])
    parts = buckets.unpack([residual], shapes, groups)
    return [{**state, "residual": part} for part in parts]
