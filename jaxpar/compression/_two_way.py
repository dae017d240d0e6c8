"""Sums of small integers over devices: to the owner of each share, and back.

Every device owns 1/N of each value. Per value one scale is agreed on, of the largest magnitude, so what is added are
integers. The owner codes its sum in the same way and keeps what is left over.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from .._devices import buckets, collectives
from .._devices.buckets import BucketLimits
from ._base import Shape, State, with_residual
from ._bits import PLANE, words
from ._int3 import largest_step, pack_codes, split_codes, unpack_codes

OWNER = "owner_residual"  # float32 (chunk,) in the state of a value: what its owner did not send back

_SHORT = 8  # words

Arrays = Sequence[jax.Array]


def start_owner(shape: Shape, count: int) -> State:
    """The part of a state that belongs to the owner, one of `count` devices."""
    return {OWNER: jnp.zeros(words(shape, count), jnp.float32)}


def allreduce(
    values: Arrays, states: Sequence[State], axis_name: str, limits: BucketLimits
) -> tuple[list[jax.Array], list[State]]:
    """The sums over the axis, coded twice, equal on every device, and the new states of this device."""
    count, sizes = lax.axis_size(axis_name), [v.size for v in values]
    wanted = [with_residual(v, s) for v, s in zip(values, states, strict=True)]
    scales = _scales(wanted, axis_name)
    coded = [split_codes(w, s) for w, s in zip(wanted, scales, strict=True)]
    shares = _add_shares([collectives.to_rows(codes, count) for codes, _ in coded], axis_name, limits)
    totals = [
        jnp.where(_is_inside(size, share.size, axis_name), share * scale + state[OWNER], 0)
        for size, share, scale, state in zip(sizes, shares, scales, states, strict=True)
    ]
    back = _scales(totals, axis_name)
    sent = [split_codes(t, s) for t, s in zip(totals, back, strict=True)]
    whole = _gather_shares([codes for codes, _ in sent], axis_name, limits)
    sums = [
        (collectives.from_rows(rows, v.shape) * scale).astype(v.dtype)
        for rows, scale, v in zip(whole, back, values, strict=True)
    ]
    owners = [
        jnp.where(_is_inside(size, left.size, axis_name), left, 0) for size, (_, left) in zip(sizes, sent, strict=True)
    ]
    new = zip(states, coded, owners, strict=True)
    return sums, [{**state, "residual": left, OWNER: owner} for state, (_, left), owner in new]


def reduce_scatter(
    values: Arrays, states: Sequence[State], axis_name: str, limits: BucketLimits
) -> tuple[list[jax.Array], list[State]]:
    """This device's (chunk,) of each sum. It stays here, so it is not coded again."""
    count = lax.axis_size(axis_name)
    rows = [collectives.to_rows(v, count) for v in values]
    wanted = [with_residual(r, s) for r, s in zip(rows, states, strict=True)]
    scales = _scales(wanted, axis_name)
    coded = [split_codes(w, s) for w, s in zip(wanted, scales, strict=True)]
    shares = _add_shares([codes for codes, _ in coded], axis_name, limits)
    sums = [
        jnp.where(_is_inside(v.size, share.size, axis_name), share * scale, 0).astype(v.dtype)
        for v, share, scale in zip(values, shares, scales, strict=True)
    ]
    left = [
        jnp.where(jnp.arange(r.size).reshape(r.shape) < v.size, rest, 0)
        for v, r, (_, rest) in zip(values, rows, coded, strict=True)
    ]
    return sums, [{**state, "residual": rest} for state, rest in zip(states, left, strict=True)]


def _scales(values: Arrays, axis_name: str) -> list[jax.Array]:
    """The step of each value, which is the same on all devices."""
    if not values:
        return []
    return list(lax.pmax(jnp.stack([largest_step(v) for v in values]), axis_name))


def _add_shares(rows: Arrays, axis_name: str, limits: BucketLimits) -> list[jax.Array]:
    """The float32 (chunk,) sum over the devices of this device's rows (devices, chunk) of codes."""
    groups = _plan(rows, limits)
    shares: list[jax.Array] = []
    for joined in buckets.pack(rows, groups, axis=1):
        received = lax.all_to_all(pack_codes(joined), axis_name, split_axis=0, concat_axis=0, tiled=True)
        shares.append(unpack_codes(received, joined.shape[1]).sum(0, dtype=jnp.int32).astype(jnp.float32))
    return buckets.unpack(shares, [r.shape[1:] for r in rows], groups)


def _gather_shares(shares: Arrays, axis_name: str, limits: BucketLimits) -> list[jax.Array]:
    """The rows (devices, chunk) of codes, out of every device's (chunk,)."""
    count = lax.axis_size(axis_name)
    groups = _plan([jnp.broadcast_to(s, (count, s.size)) for s in shares], limits)
    whole = [
        unpack_codes(collectives.gather_stack(pack_codes(joined), axis_name), joined.size)
        for joined in buckets.pack(shares, groups)
    ]
    return buckets.unpack(whole, [s.shape for s in shares], groups, axis=1)


def _plan(rows: Arrays, limits: BucketLimits) -> buckets.Groups:
    """Which rows travel together, by the bytes of their bits. Short ones do, since a bucket ends with a whole word."""
    sizes = [words(r.shape[1:], PLANE) for r in rows]
    lead = [r.shape[0] if size >= _SHORT else 1 for r, size in zip(rows, sizes, strict=True)]
    return buckets.plan(tuple((shape, jnp.dtype("uint32")) for shape in zip(lead, sizes, strict=True)), limits)


def _is_inside(size: int, chunk: int, axis_name: str) -> jax.Array:
    """Which elements of this device's (chunk,) a value of `size` elements has."""
    return lax.axis_index(axis_name) * chunk + jnp.arange(chunk) < size
