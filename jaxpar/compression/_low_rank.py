"""Compressors that send a part of a value: its largest elements or its largest singular directions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from .._core.checks import number, whole_number
from ._base import (
    Compressor,
    LinearCompressor,
    Payload,
    Shape,
    State,
    as_float32,
    is_floating,
    plain_bytes,
    start_residual,
)


@dataclasses.dataclass(frozen=True)
class TopK(Compressor):
    """The k elements of largest magnitude, as int32 positions and float32 values.

    k is `ratio` times the number of elements, rounded, and at least 1. Of equal magnitudes the first are sent. See Aji
    and Heafield 2017 and, for error feedback, Stich et al. 2018.

    Attributes:
        ratio: the part of the elements that is sent, in (0, 1].

    Raises:
        TypeError: the ratio is no number.
        ValueError: it is out of range.

    Example:
        >>> compressor = TopK(0.5)
        >>> value = jnp.array([1.0, -3.0, 0.5, 2.0])
        >>> payload, state = compressor.encode(value, compressor.init(value.shape, value.dtype))
        >>> payload["indices"].tolist(), payload["values"].tolist(), state["residual"].tolist()
        ([1, 3], [-3.0, 2.0], [1.0, 0.0, 0.5, 0.0])
    """

    ratio: float = 0.01
    elementwise: ClassVar[bool] = False
    linear: ClassVar[bool] = False

    def __post_init__(self) -> None:
        ratio = number(
            self.ratio, "compression 'topk'", "ratio", "a float32 > 0 and <= 1", lambda r: 0 < as_float32(r) <= 1
        )
        object.__setattr__(self, "ratio", ratio)

    def init(self, shape: Shape, dtype: Any, *, seed: Any = 0) -> State:
        return start_residual("topk", shape, dtype)

    def encode(self, value: jax.Array, state: State) -> tuple[Payload, State]:
        shape = state["residual"].shape
        wanted = (state["residual"] + jnp.asarray(value).astype(jnp.float32)).reshape(-1)
        _, indices = jax.lax.top_k(jnp.abs(wanted), self._k(shape))
        payload = {"indices": indices.astype(jnp.int32), "values": wanted[indices]}
        residual = wanted.at[indices].set(0, unique_indices=True)
        return payload, {**state, "residual": residual.reshape(shape)}

    def decode(self, payload: Payload, shape: Shape, dtype: Any) -> jax.Array:
        flat = jnp.zeros(math.prod(shape), jnp.float32)
        flat = flat.at[payload["indices"]].set(payload["values"], unique_indices=True)
        return flat.reshape(shape).astype(dtype)

    def wire_bytes(self, shape: Shape, dtype: Any) -> int:
        return 8 * self._k(shape)

    def _k(self, shape: Shape) -> int:
        size = math.prod(shape)
        return min(size, max(1, round(self.ratio * size)))


@dataclasses.dataclass(frozen=True)
class PowerSGD(LinearCompressor):
    """A matrix is sent as P Qᵀ of low rank, found by one power iteration for each push.

    See Vogels, Karimireddy and Jaggi 2019. A value is the matrix M (product of the other axes, last axis), which for
    the layers of JAX is inputs × outputs. P = M Q is summed over the devices and made orthonormal. Q = Mᵀ P is
    summed. The sum of the values is P Qᵀ. Q is kept for the next push, and the residual is the part of M outside of P.
    Two sums of rank × (rows + columns) float32 in all.

    Attributes:
        rank: an int of 1 or more. The rank of the matrix is used if it is smaller.

    Raises:
        TypeError: the rank is no int.
        ValueError: it is less than 1.

    Example:
        >>> compressor = PowerSGD(rank=1)
        >>> value = jnp.outer(jnp.array([1.0, 2.0]), jnp.array([3.0, 0.0, 4.0]))
        >>> total, state = compressor.allreduce(value, compressor.init((2, 3), "float32"), lambda tree: tree)
        >>> bool(jnp.allclose(total, value, atol=1e-5))
        True
    """

    rank: int = 2
    elementwise: ClassVar[bool] = False
    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", whole_number(self.rank, "compression 'powersgd'", "rank"))

    def init(self, shape: Shape, dtype: Any, *, seed: Any = 0) -> State:
        """The residual, and a first `q`, which is the same on every device whatever the seed."""
        state = start_residual("powersgd", shape, dtype)
        rows, columns = _matrix(shape)
        q = jax.random.normal(jax.random.key(0, impl="threefry2x32"), (columns, self._rank(rows, columns)))
        return {**state, "q": q.astype(jnp.float32)}

    def allreduce(self, value: jax.Array, state: State, psum: Callable[[Any], Any]) -> tuple[jax.Array, State]:
        """The compressed sum of `value` over the devices.

        Args:
            value: this device's share, floating, any shape.
            state: of this device, from `init` or an earlier call.
            psum: sums a pytree over the devices, such as `lambda tree: jax.lax.psum(tree, "data")`.

        Returns:
            (the sum, equal on every device, of the shape and dtype of `value`, and the new state).
        """
        value = jnp.asarray(value)
        m = (state["residual"] + value.astype(jnp.float32)).reshape(_matrix(value.shape))
        if 0 in m.shape:
            return value, state
        p = psum(_product(m, state["q"]))
        p, _ = jnp.linalg.qr(_scale(p))
        q = _product(m.T, p)
        residual = (m - _product(p, q.T)).reshape(value.shape)
        q = psum(q)
        total = _product(p, q.T).reshape(value.shape).astype(value.dtype)
        return total, {**state, "residual": residual, "q": _next_q(q, state["q"])}

    def wire_bytes(self, shape: Shape, dtype: Any) -> int:
        rows, columns = _matrix(shape)
        return 4 * self._rank(rows, columns) * (rows + columns)

    def pays(self, shape: Shape, dtype: Any) -> bool:
        smaller = self.wire_bytes(shape, dtype) < plain_bytes(shape, dtype)
        return is_floating(dtype) and len(shape) >= 2 and smaller

    def _rank(self, rows: int, columns: int) -> int:
        return min(self.rank, rows, columns)


def _matrix(shape: Shape) -> tuple[int, int]:
    """The shape as that of a matrix: (rows, columns)."""
    columns = shape[-1] if shape else 1
    return math.prod(shape[:-1]), columns


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    # Full precision: on GPUs the default would lose more than the compression does, and the residual would have it.
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _scale(columns: jax.Array) -> jax.Array:
    """Each column divided by its largest magnitude, so that the squares of gradients of 1e-20 do not underflow."""
    size = jnp.abs(columns).max(0, keepdims=True)
    return columns / jnp.where(size < np.finfo(np.float32).tiny, np.float32(1), size)


def _next_q(q: jax.Array, before: jax.Array) -> jax.Array:
    """The start of the next push. A column that vanished, by a gradient of zeros, keeps its direction."""
    vanished = jnp.abs(q).max(0, keepdims=True) < np.finfo(np.float32).tiny
    return jnp.where(vanished, before, _scale(q))
