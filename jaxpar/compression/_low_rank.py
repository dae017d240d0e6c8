"""Compressors that send the largest elements or the largest singular directions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

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
    with_residual,
)


@dataclasses.dataclass(frozen=True)
class TopK(Compressor):
    """The k elements of largest magnitude, as int32 positions and float32 values.

    k is `ratio` times the number of elements, rounded, and at least 1. Among equal magnitudes, the first elements are
    sent. Source: Aji and Heafield 2017; Stich et al. 2018 for error feedback.

    Attributes:
        ratio: the fraction of the elements that is sent, in (0, 1].

    Raises:
        TypeError: the ratio is not a number.
        ValueError: the ratio is out of range.

    Example:
        >>> compressor = TopK(0.5)
        >>> value = jnp.array([1.0, -3.0, 0.5, 2.0])
        >>> payload, state = compressor.encode(value, compressor.init(value.shape, value.dtype))
        >>> payload["indices"].tolist(), payload["values"].tolist(), state["residual"].tolist()
        ([1, 3], [-3.0, 2.0], [1.0, 0.0, 0.5, 0.0])
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        ratio = number(
            self.ratio, "compression 'topk'", "ratio", "a float32 > 0 and <= 1", lambda r: 0 < as_float32(r) <= 1
        )
        object.__setattr__(self, "ratio", ratio)

    def init(self, shape: Shape, dtype: Any, *, seed: Any = 0) -> State:
        return start_residual("topk", shape, dtype)

    def encode(self, value: jax.Array, state: State) -> tuple[Payload, State]:
        shape = state["residual"].shape
        wanted = with_residual(value, state).reshape(-1)
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
    """Sends a matrix as P Qᵀ of low rank: one power iteration each push.

    A value is the matrix M (product of the other axes, last axis), which for the layers of JAX is inputs × outputs. P =
    M Q is summed over the devices and made orthonormal. Then Q = Mᵀ P is summed. The result is P Qᵀ. Q is kept for the
    next push, and the residual is the part of M outside of P. The two sums send rank × (rows + columns) float32.

    Source: Vogels, Karimireddy and Jaggi 2019.

    Attributes:
        rank: an int of 1 or more. At most the rank of the matrix is used.

    Raises:
        TypeError: the rank is not an int.
        ValueError: the rank is less than 1.

    Example:
        >>> compressor = PowerSGD(rank=1)
        >>> value = jnp.outer(jnp.array([1.0, 2.0]), jnp.array([3.0, 0.0, 4.0]))
        >>> total, state = compressor.allreduce(value, compressor.init((2, 3), "float32"), lambda tree: tree)
        >>> bool(jnp.allclose(total, value, atol=1e-5))
        True
    """

    rank: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", whole_number(self.rank, "compression 'powersgd'", "rank"))

    def init(self, shape: Shape, dtype: Any, *, seed: Any = 0) -> State:
        """A residual of zeros, and a first `q` that is equal on every device for any seed."""
        state = start_residual("powersgd", shape, dtype)
        rows, columns = _matrix(shape)
        q = jax.random.normal(jax.random.key(0, impl="threefry2x32"), (columns, self._rank(rows, columns)))
        return {**state, "q": q.astype(jnp.float32)}

    def allreduce(self, value: jax.Array, state: State, psum: Callable[[Any], Any]) -> tuple[jax.Array, State]:
        """The compressed sum of `value` over the devices.

        Args:
            value: this device's floating array, of any shape.
            state: this device's state, from `init` or the previous call.
            psum: a function that sums a pytree over the devices, such as `lambda tree: jax.lax.psum(tree, "data")`.

        Returns:
            (the sum, the new state). The sum has the shape and dtype of `value` and is equal on every device.
        """
        value = jnp.asarray(value)
        m = with_residual(value, state).reshape(_matrix(value.shape))
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
    """The first `q` of the next push. A column that became zero, by a zero gradient, keeps its direction."""
    vanished = jnp.abs(q).max(0, keepdims=True) < np.finfo(np.float32).tiny
    return jnp.where(vanished, before, _scale(q))
