"""Integers of 3 bits and one scale: a compression whose sum is coded again, so that both ways are small."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ._base import Compressor, Payload, Shape, State, start_residual, with_residual
from ._bits import PLANE, pack_planes, unpack_planes, words


@dataclasses.dataclass(frozen=True)
class Int3(Compressor):
    """Integers from -3 to 3 and a scale for each value, with error feedback at both ends.

    The scale is a third of the largest magnitude on any device, so the owner of a share adds integers. It codes its sum
    in the same way and keeps what is left in a residual of its own (Tang et al. 2019, DoubleSqueeze). So 3/32 of the
    plain bytes are sent, on any number of devices.

    In a store of kind `sharded` the owner keeps its sum, so nothing is coded again. NaN and infinity make the sum of
    the whole value NaN, and its residuals too.

    Example:
        >>> compressor = Int3()
        >>> value = jnp.array([3.0, -1.0, 0.25, -1.75])
        >>> payload, state = compressor.encode(value, compressor.init(value.shape, value.dtype))
        >>> compressor.decode(payload, (4,), "float32").tolist(), state["residual"].tolist()
        ([3.0, -1.0, 0.0, -2.0], [0.0, 0.0, 0.25, 0.25])
    """

    elementwise: ClassVar[bool] = False
    linear: ClassVar[bool] = False
    two_way: ClassVar[bool] = True

    def init(self, shape: Shape, dtype: Any, *, seed: Any = 0) -> State:
        return start_residual("int3", shape, dtype)

    def encode(self, value: jax.Array, state: State) -> tuple[Payload, State]:
        wanted = with_residual(value, state)
        scale = largest_step(wanted)
        codes, residual = split_codes(wanted, scale)
        return {"codes": pack_codes(codes.reshape(-1)), "scales": scale[None]}, {**state, "residual": residual}

    def decode(self, payload: Payload, shape: Shape, dtype: Any) -> jax.Array:
        size = int(np.prod(shape, dtype=int))
        values = unpack_codes(payload["codes"], size).astype(jnp.float32) * payload["scales"][0]
        return values.reshape(shape).astype(dtype)

    def wire_bytes(self, shape: Shape, dtype: Any) -> int:
        return 4 * _BITS * words(shape, PLANE) + 4


_BITS = 3
_LARGEST = 3


def largest_step(values: jax.Array) -> jax.Array:
    """A third of the largest magnitude. Infinite if any is not finite, since a maximum may pass over NaN."""
    largest = jnp.abs(values).max(initial=0) / _LARGEST
    return jnp.where(jnp.isfinite(values).all(), largest, np.float32(np.inf))


def split_codes(wanted: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(int32 codes from -3 to 3, what they leave over). A value of zeros, or of subnormal steps, is left over."""
    none = scale < np.finfo(np.float32).tiny
    quotient = jnp.where(none, np.float32(0), wanted / jnp.where(none, np.float32(1), scale))
    codes = jnp.clip(jnp.round(quotient), -_LARGEST, _LARGEST)
    return codes.astype(jnp.int32), wanted - codes * scale


def pack_codes(codes: jax.Array) -> jax.Array:
    """int32 codes (..., n) as words (..., 3 ceil(n / 32))."""
    missing = -codes.shape[-1] % PLANE
    padded = jnp.pad(codes + _LARGEST, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    return pack_planes(padded.astype(jnp.uint32), _BITS)


def unpack_codes(packed: jax.Array, size: int) -> jax.Array:
    """The inverse: int32 (..., size)."""
    return unpack_planes(packed, _BITS)[..., :size].astype(jnp.int32) - _LARGEST
