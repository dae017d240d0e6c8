"""Signs and one scale: a compression whose sum is coded again, so that both ways are small."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ._base import Compressor, Payload, Shape, State, start_residual, with_residual
from ._bits import PLANE, pack_planes, unpack_planes, words


@dataclasses.dataclass(frozen=True)
class EFSignSGD(Compressor):
    """The sign of each element and the mean magnitude of all, with error feedback at both ends.

    See Karimireddy et al. 2019 (EF-signSGD) and, for the second residual, Tang et al. 2019 (DoubleSqueeze). A store
    sends 1 bit for each element to the device that owns it, and 1 bit back. The scale of a value is the mean magnitude
    over all devices, so the owner adds integers. It codes its sum by sign and mean magnitude again and keeps what is
    left in a residual of its own. So 1/32 of the plain bytes are sent, on any number of devices.

    It needs a small learning rate and costs accuracy: docs/compression.md has numbers.

    In a store of kind `sharded` the owner keeps its sum, so nothing is coded again. NaN and infinity make the sum of
    the whole value NaN or infinite, and its residuals too.

    Example:
        >>> compressor = EFSignSGD()
        >>> value = jnp.array([3.0, -1.0, 0.5, -1.5])
        >>> payload, state = compressor.encode(value, compressor.init(value.shape, value.dtype))
        >>> compressor.decode(payload, (4,), "float32").tolist(), state["residual"].tolist()
        ([1.5, -1.5, 1.5, -1.5], [1.5, 0.5, -1.0, 0.0])
    """

    elementwise: ClassVar[bool] = False
    linear: ClassVar[bool] = False
    two_way: ClassVar[bool] = True

    def init(self, shape: Shape, dtype: Any, *, seed: Any = 0) -> State:
        return start_residual("efsignsgd", shape, dtype)

    def encode(self, value: jax.Array, state: State) -> tuple[Payload, State]:
        wanted = with_residual(value, state)
        scale = jnp.abs(wanted).sum() / max(1, wanted.size)
        signs, residual = split_signs(wanted, scale)
        return {"codes": pack_signs(signs.reshape(-1)), "scales": scale[None]}, {**state, "residual": residual}

    def decode(self, payload: Payload, shape: Shape, dtype: Any) -> jax.Array:
        size = int(np.prod(shape, dtype=int))
        signs = unpack_signs(payload["codes"], size).astype(jnp.float32) * payload["scales"][0]
        return signs.reshape(shape).astype(dtype)

    def wire_bytes(self, shape: Shape, dtype: Any) -> int:
        return 4 * words(shape, PLANE) + 4


def split_signs(wanted: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(whether the sign is +, what ± the scale leaves over)."""
    up = wanted >= 0
    return up, wanted - jnp.where(up, scale, -scale)


def pack_signs(up: jax.Array) -> jax.Array:
    """Bools (..., n) as bits of words (..., ceil(n / 32))."""
    missing = -up.shape[-1] % PLANE
    return pack_planes(jnp.pad(up, [(0, 0)] * (up.ndim - 1) + [(0, missing)]).astype(jnp.uint32), 1)


def unpack_signs(packed: jax.Array, size: int) -> jax.Array:
    """The inverse: int32 (..., size) of +1 and -1."""
    return 2 * unpack_planes(packed, 1)[..., :size].astype(jnp.int32) - 1
