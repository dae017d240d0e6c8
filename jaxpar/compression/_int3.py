"""3-bit integers and one scale: values and their sum are both compressed.

Every device owns 1/N of each value. All devices use one scale for each value, from the largest magnitude, so the owner
adds integers. The owner codes its sum in the same way and keeps the rest in a residual.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._devices import collectives
from ._base import PLANE, Compressor, Payload, Shape, State, in_order, pack_planes, unpack_planes, with_residual, words

OWNER = "owner_residual"  # float32 (chunk,) in the state of a value: what its owner did not send back

_BITS = 3
_LARGEST = 3
_SHORT = 8  # words

Arrays = Sequence[jax.Array]


@dataclasses.dataclass(frozen=True)
class Int3(Compressor):
    """Integers from -3 to 3 and a scale for each value, with error feedback at both ends.

    The scale is a third of the largest magnitude on any device, so the owner of a share adds integers. The owner codes
    its sum in the same way, with a second residual (Tang et al. 2019, DoubleSqueeze). So 3/32 of the plain bytes are
    sent, on any number of devices.

    In a store of kind `sharded`, the owner keeps its sum, so the sum is not coded. NaN or infinity in any element makes
    the whole sum NaN, and its residuals too.

    Example:
        >>> compressor = Int3()
        >>> value = jnp.array([3.0, -1.0, 0.25, -1.75])
        >>> payload, state = compressor.encode(value, compressor.init(value.shape, value.dtype))
        >>> compressor.decode(payload, (4,), "float32").tolist(), state["residual"].tolist()
        ([3.0, -1.0, 0.0, -2.0], [0.0, 0.0, 0.25, 0.25])
    """

    name: ClassVar[str] = "int3"
    two_way: ClassVar[bool] = True

    def encode(self, value: jax.Array, state: State) -> tuple[Payload, State]:
        wanted = with_residual(value, state)
        scale = largest_step(wanted)
        codes, residual = split_codes(wanted, scale)
        return {"codes": pack_codes(codes.reshape(-1)), "scales": scale[None]}, {**state, "residual": residual}

    def decode(self, payload: Payload, shape: Shape, dtype: Any) -> jax.Array:
        values = in_order(unpack_codes(payload["codes"]).astype(jnp.float32) * payload["scales"][0])
        return values[: math.prod(shape)].reshape(shape).astype(dtype)

    def wire_bytes(self, shape: Shape, dtype: Any) -> int:
        return 4 * _BITS * words(shape, PLANE) + 4


def largest_step(values: jax.Array) -> jax.Array:
    """A third of the largest magnitude. Infinite if any is not finite, since a maximum may pass over NaN."""
    largest = jnp.abs(values).max(initial=0) / _LARGEST
    return jnp.where(jnp.isfinite(values).all(), largest, np.float32(np.inf))


def split_codes(wanted: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(int32 codes from -3 to 3, the residual). A value of zeros, or of subnormal steps, stays in the residual."""
    none = scale < np.finfo(np.float32).tiny
    quotient = jnp.where(none, np.float32(0), wanted / jnp.where(none, np.float32(1), scale))
    codes = jnp.clip(jnp.round(quotient), -_LARGEST, _LARGEST)
    return codes.astype(jnp.int32), wanted - codes * scale


def pack_codes(codes: jax.Array) -> jax.Array:
    """int32 codes (..., n) as words (..., 3 ceil(n / 32))."""
    missing = -codes.shape[-1] % PLANE
    padded = jnp.pad(codes + _LARGEST, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    # A barrier, since each plane would compute the codes again.
    return pack_planes(lax.optimization_barrier(padded.astype(jnp.uint8)).astype(jnp.uint32), _BITS)


def unpack_codes(packed: jax.Array) -> jax.Array:
    """The inverse: int32 codes with what was padded, for `in_order`."""
    return unpack_planes(packed, _BITS).astype(jnp.int32) - _LARGEST


# Sums over devices: to the owner of each share, and back.


def start_owner(shape: Shape, count: int) -> State:
    """The part of a state that belongs to the owner, one of `count` devices."""
    return {OWNER: jnp.zeros(words(shape, count), jnp.float32)}


def allreduce(
    values: Arrays, states: Sequence[State], axis_name: str, limits: collectives.BucketLimits
) -> tuple[list[jax.Array], list[State]]:
    """(the twice-coded sums over the axis, equal on every device; the new states of this device)."""
    count = lax.axis_size(axis_name)
    wanted = [with_residual(v, s) for v, s in zip(values, states, strict=True)]
    codes, left, steps = _code(wanted, axis_name)
    shares = _add_shares([collectives.to_rows(c, count) for c in codes], axis_name, limits)
    # The owner of a share adds what it did not send back at the last push.
    totals = [
        _within(share * step + state[OWNER], v.size, axis_name)
        for v, share, step, state in zip(values, shares, steps, states, strict=True)
    ]
    codes, owner_left, steps = _code(totals, axis_name)
    whole = _gather_shares(codes, axis_name, limits)
    sums = [
        (collectives.from_rows(rows, v.shape) * step).astype(v.dtype)
        for rows, step, v in zip(whole, steps, values, strict=True)
    ]
    owners = [_within(rest, v.size, axis_name) for v, rest in zip(values, owner_left, strict=True)]
    new = zip(states, left, owners, strict=True)
    return sums, [{**state, "residual": rest, OWNER: owner} for state, rest, owner in new]


def reduce_scatter(
    values: Arrays, states: Sequence[State], axis_name: str, limits: collectives.BucketLimits
) -> tuple[list[jax.Array], list[State]]:
    """This device's (chunk,) of each sum. It stays here, so it is not coded again."""
    count = lax.axis_size(axis_name)
    rows = [collectives.to_rows(v, count) for v in values]
    codes, left, steps = _code([with_residual(r, s) for r, s in zip(rows, states, strict=True)], axis_name)
    shares = _add_shares(codes, axis_name, limits)
    sums = [
        _within(share * step, v.size, axis_name).astype(v.dtype)
        for v, share, step in zip(values, shares, steps, strict=True)
    ]
    left = [
        jnp.where(jnp.arange(r.size).reshape(r.shape) < v.size, rest, 0)
        for v, r, rest in zip(values, rows, left, strict=True)
    ]
    return sums, [{**state, "residual": rest} for state, rest in zip(states, left, strict=True)]


def _code(values: Arrays, axis_name: str) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    """The codes of each value, its residual, and its step, which is equal on all devices."""
    if not values:
        return [], [], []
    steps = list(lax.pmax(jnp.stack([largest_step(v) for v in values]), axis_name))
    coded = [split_codes(v, step) for v, step in zip(values, steps, strict=True)]
    return [codes for codes, _ in coded], [left for _, left in coded], steps


def _add_shares(rows: Arrays, axis_name: str, limits: collectives.BucketLimits) -> list[jax.Array]:
    """The float32 (chunk,) sum over the devices of this device's rows (devices, chunk) of codes."""
    groups = _plan(rows, limits)
    shares: list[jax.Array] = []
    for joined in collectives.pack(rows, groups, axis=1):
        received = collectives.send_rows(pack_codes(joined), axis_name)
        total = unpack_codes(received).sum(0, dtype=jnp.int32).astype(jnp.float32)
        shares.append(in_order(total)[: joined.shape[1]])
    return collectives.unpack(shares, [r.shape[1:] for r in rows], groups)


def _gather_shares(shares: Arrays, axis_name: str, limits: collectives.BucketLimits) -> list[jax.Array]:
    """The rows (devices, chunk) of codes, from every device's (chunk,)."""
    count = lax.axis_size(axis_name)
    groups = _plan([jnp.broadcast_to(s, (count, s.size)) for s in shares], limits)
    whole: list[jax.Array] = []
    for joined in collectives.pack(shares, groups):
        packed = collectives.gather_stack(pack_codes(joined), axis_name)
        whole.append(in_order(unpack_codes(packed).astype(jnp.int8), 1)[:, : joined.size])
    return collectives.unpack(whole, [s.shape for s in shares], groups, axis=1)


def _plan(rows: Arrays, limits: collectives.BucketLimits) -> collectives.Groups:
    """Which rows travel together, by the bytes of their bits. Short ones do, since a bucket ends with a whole word."""
    sizes = [words(r.shape[1:], PLANE) for r in rows]
    lead = [r.shape[0] if size >= _SHORT else 1 for r, size in zip(rows, sizes, strict=True)]
    return collectives.plan([jax.ShapeDtypeStruct(shape, "uint32") for shape in zip(lead, sizes, strict=True)], limits)


def _within(share: jax.Array, size: int, axis_name: str) -> jax.Array:
    """This device's (chunk,) of a value of `size` elements, with zeros beyond its end: padding may be NaN there."""
    return jnp.where(lax.axis_index(axis_name) * share.size + jnp.arange(share.size) < size, share, 0)
