"""The compressors that a specification names.

All arithmetic is float32. With the pushed value g and the residual r, each encoder sends q = Q(r + g) and keeps
r' = r + g - q for the next push: error feedback (Seide et al. 2014, Karimireddy et al. 2019).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._core import checks
from .._core.arrays import PyTree
from . import _base, _codes
from ._base import Compressor, ElementCompressor, LinearCompressor, Payload, State
from ._codes import Shape
from ._grid import Grid

_INT8_BLOCK = 1024  # elements that share a scale: fewer cost bytes, more lose precision beside an outlier


def _check_number(compressor: Compressor, field: str, expected: str, allowed: Callable[[float], bool]) -> None:
    """The field as a float, for which `allowed` holds once it is a float32: that may give 0 or infinity."""

    def is_allowed(value: float) -> bool:
        with np.errstate(over="ignore", under="ignore"):
            return allowed(float(np.float32(value)))

    value = checks.number(getattr(compressor, field), f"compression {compressor.name!r}", field, expected, is_allowed)
    object.__setattr__(compressor, field, value)


# A few bits for each element.


@dataclasses.dataclass(frozen=True)
class TwoBit(_base.InWords):
    """MXNet's `2bit`: +threshold, -threshold or 0 for each element, 16 codes in a uint32.

    With a = residual + value, the code is 11 if a >= threshold, 10 if a <= -threshold, and 00 otherwise. The first of
    16 elements is in the top two bits of byte 0 of the little-endian word. Values, bytes and residuals equal MXNet's
    bit for bit. NaN is sent as 0 and stays in the residual.

    Attributes:
        threshold: the decoded magnitude, above 0, in the units of the gradient.

    Raises:
        ValueError: the threshold, as a float32, is not above 0 or not finite.

    Example:
        >>> compressor = TwoBit(0.5)
        >>> value = jnp.array([0.75, -0.5, 0.25])
        >>> payload, state = compressor.encode(value, compressor.init(value.shape, value.dtype))
        >>> bin(payload["codes"][0])
        '0b11100000'
        >>> compressor.decode(payload, (3,), "float32").tolist(), state["residual"].tolist()
        ([0.5, -0.5, 0.0], [0.25, 0.0, 0.25])
    """

    threshold: float = 0.5
    name: ClassVar[str] = "2bit"
    per_word: ClassVar[int] = 16

    def __post_init__(self) -> None:
        _check_number(self, "threshold", "a finite float32 > 0", lambda t: 0 < t < math.inf)

    def quantize(self, value: jax.Array, state: State) -> tuple[jax.Array, State]:
        wanted, t = _base.with_residual(value, state), np.float32(self.threshold)
        up, down = wanted >= t, wanted <= -t  # NaN is neither, so it is sent as 0 and stays in the residual
        residual = wanted - jnp.where(up, t, jnp.where(down, -t, np.float32(0)))
        codes = jnp.where(up, np.uint8(3), jnp.where(down, np.uint8(2), np.uint8(0)))
        return codes, {**state, "residual": residual}

    def dequantize(self, codes: jax.Array) -> jax.Array:
        t = np.float32(self.threshold)
        return jnp.where(codes == 3, t, jnp.where(codes == 2, -t, np.float32(0)))

    def grid(self, count: int) -> Grid:
        return Grid(self.threshold, count)


@dataclasses.dataclass(frozen=True)
class OneBit(_base.InWords):
    """MXNet 2's `1bit`: +1 or -1 for each element, 32 codes in a uint32.

    +1 is sent where residual + value > threshold. The first of 32 elements is in the top bit of byte 0 of the
    little-endian word. Decoded values are +1 and -1 for any threshold, so gradients need a scale near 1. NaN is sent as
    -1.

    Attributes:
        threshold: any finite number, in the units of the gradient.

    Raises:
        ValueError: the threshold, as a float32, is not finite.

    Example:
        >>> compressor = OneBit(0.5)
        >>> value = jnp.array([0.75, -0.5])
        >>> payload, state = compressor.encode(value, compressor.init(value.shape, value.dtype))
        >>> compressor.decode(payload, (2,), "float32").tolist(), state["residual"].tolist()
        ([1.0, -1.0], [-0.25, 0.5])
    """

    threshold: float = 0.5
    name: ClassVar[str] = "1bit"
    per_word: ClassVar[int] = 32

    def __post_init__(self) -> None:
        _check_number(self, "threshold", "a finite float32", math.isfinite)

    def quantize(self, value: jax.Array, state: State) -> tuple[jax.Array, State]:
        wanted = _base.with_residual(value, state)
        up = wanted > np.float32(self.threshold)
        residual = wanted - jnp.where(up, np.float32(1), np.float32(-1))
        return up.astype(jnp.uint8), {**state, "residual": residual}

    def dequantize(self, codes: jax.Array) -> jax.Array:
        return jnp.where(codes == 1, np.float32(1), np.float32(-1))

    def grid(self, count: int) -> Grid:
        return Grid(1.0, count, stride=2)


@dataclasses.dataclass(frozen=True)
class _Rounded(Compressor):
    """Rounds to the nearest code, or at random. Then the state has a stream: the seed and the number of pushes."""

    rounding: str = "nearest"

    def __post_init__(self) -> None:
        checks.choice(self.rounding, f"compression {self.name!r}", "rounding", ("nearest", "stochastic"))

    def init(self, shape: Shape, dtype: DTypeLike, *, seed: int | jax.Array = 0) -> State:
        state = super().init(shape, dtype)
        if self.rounding == "stochastic":
            state["stream"] = jnp.stack([jnp.asarray(seed, jnp.uint32), jnp.uint32(0)])
        return state


@dataclasses.dataclass(frozen=True)
class Int8(_Rounded):
    """Symmetric 8-bit integers with a float32 scale for each 1,024 elements.

    The scale is the largest magnitude of the block, divided by 127. The scales add 0.4 % to the bytes, and an outlier
    costs precision in its own block only. Blocks are counted from the start of each value, so this compressor is not
    elementwise.

    Attributes:
        rounding: `nearest`, or `stochastic`, which is unbiased.

    Raises:
        ValueError: an unknown rounding.

    Example:
        >>> compressor = Int8()
        >>> payload, state = compressor.encode(jnp.array([127.0, -2.25]), compressor.init((2,), "float32"))
        >>> payload["codes"].tolist(), payload["scales"].tolist(), state["residual"].tolist()
        ([127, -2], [1.0], [0.0, -0.25])
    """

    name: ClassVar[str] = "int8"

    def encode(self, value: jax.Array, state: State) -> tuple[Payload, State]:
        shape, size = state["residual"].shape, state["residual"].size
        wanted = _codes.pad(_base.with_residual(value, state), _INT8_BLOCK).reshape(-1, _INT8_BLOCK)  # (blocks, 1024)
        # A maximum may pass over NaN. An infinite scale makes codes * scale NaN, in the sum and in the residual.
        largest = jnp.where(jnp.isfinite(wanted).all(-1), jnp.abs(wanted).max(-1), np.float32(np.inf))
        scales = largest / 127  # (blocks,)
        # Subnormal scales may be flushed to 0 in the quotient. Such a block stays in the residual.
        scales = jnp.where(scales < np.finfo(np.float32).tiny, np.float32(0), scales)
        quotient = wanted / jnp.where(scales == 0, np.float32(1), scales)[:, None]
        quotient = jnp.where(scales[:, None] == 0, np.float32(0), quotient)
        # The rounding: floor(x + 1/2) is the nearest integer. With a random dither it is the upper one as often as the
        # fraction of x says, so that the mean of many is x.
        codes = jnp.clip(jnp.floor(quotient + self._dither(wanted.shape, state)), -127, 127)
        residual = wanted - codes * scales[:, None]
        payload = {"codes": codes.astype(jnp.int8).reshape(-1)[:size], "scales": scales}
        return payload, _advance({**state, "residual": residual.reshape(-1)[:size].reshape(shape)})

    def decode(self, payload: Payload, shape: Shape, dtype: DTypeLike) -> jax.Array:
        codes = _codes.pad(payload["codes"], _INT8_BLOCK).reshape(-1, _INT8_BLOCK).astype(jnp.float32)
        values = codes * payload["scales"][:, None]
        return values.reshape(-1)[: math.prod(shape)].reshape(shape).astype(dtype)

    def wire_bytes(self, shape: Shape, dtype: DTypeLike) -> int:
        return math.prod(shape) + 4 * _codes.words(shape, _INT8_BLOCK)

    def cut(self, payload: Payload, shape: Shape, count: int) -> Payload:
        """The payload, padded and cut into `count` rows of equal length, so that owners can decode their own."""
        chunk, blocks = _codes.words(shape, count), _codes.words(shape, _INT8_BLOCK)
        # Rows begin anywhere in a block. So each gets the scales of as many blocks as a row may touch.
        most = (_INT8_BLOCK - math.gcd(chunk, _INT8_BLOCK) + chunk - 1) // _INT8_BLOCK + 1
        first = jnp.arange(count, dtype=jnp.int32)[:, None] * chunk // _INT8_BLOCK
        scales = payload["scales"][jnp.minimum(first + jnp.arange(min(most, blocks))[None, :], blocks - 1)]
        return {"codes": _codes.pad(payload["codes"], count * chunk).reshape(count, chunk), "scales": scales}

    def decode_row(self, row: Payload, index: jax.Array) -> jax.Array:
        """The elements of row `index` of a payload, in float32."""
        codes, size = row["codes"].astype(jnp.float32), row["codes"].size
        if size % _INT8_BLOCK == 0:
            return (codes.reshape(-1, _INT8_BLOCK) * row["scales"][: size // _INT8_BLOCK, None]).reshape(-1)
        if _INT8_BLOCK % size == 0:  # a part of one block
            return codes * row["scales"][0]
        # A row may begin and end within a block. It ends beyond all scales only where there is one.
        scales = jnp.broadcast_to(row["scales"][:, None], (row["scales"].size, _INT8_BLOCK)).reshape(-1)
        return codes * jax.lax.dynamic_slice(scales, (index * size % _INT8_BLOCK,), (size,))

    def _dither(self, shape: Shape, state: State) -> jax.Array | np.float32:
        if self.rounding == "nearest":
            return np.float32(0.5)
        # From 2**-17 to 1 - 2**-17, with the mean 1/2: an integer stays as it is.
        return (_random_16_bits(state, shape).astype(jnp.float32) + 0.5) / 2**16


@dataclasses.dataclass(frozen=True)
class BFloat16(_Rounded, ElementCompressor):
    """The upper 16 bits of a float32, sent as uint16 so that no compiler widens them on the way.

    Attributes:
        rounding: `nearest`, with ties to even, or `stochastic`, which is unbiased.

    Raises:
        ValueError: an unknown rounding.

    Example:
        >>> compressor = BFloat16()
        >>> payload, state = compressor.encode(jnp.array([1 + 2**-9]), compressor.init((1,), "float32"))
        >>> compressor.decode(payload, (1,), "float32").tolist(), state["residual"].tolist()
        ([1.0], [0.001953125])
    """

    name: ClassVar[str] = "bf16"
    elementwise: ClassVar[bool] = True

    def quantize(self, value: jax.Array, state: State) -> tuple[jax.Array, State]:
        wanted = _base.with_residual(value, state)
        # In integers, since XLA may drop a float32 -> bfloat16 -> float32 pair, and with it the rounding error.
        bits = jax.lax.bitcast_convert_type(wanted, jnp.uint32)
        rounded = jnp.where(jnp.isfinite(wanted), bits + self._dither(bits, state), bits)
        rounded = rounded & np.uint32(0xFFFF0000)
        residual = wanted - jax.lax.bitcast_convert_type(rounded, jnp.float32)
        return (rounded >> 16).astype(jnp.uint16), _advance({**state, "residual": residual})

    def dequantize(self, codes: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(codes.astype(jnp.uint32) << 16, jnp.float32)

    def encode(self, value: jax.Array, state: State) -> tuple[Payload, State]:
        codes, state = self.quantize(value, state)
        return {"bits": codes.reshape(-1)}, state

    def decode(self, payload: Payload, shape: Shape, dtype: DTypeLike) -> jax.Array:
        return self.dequantize(payload["bits"]).reshape(shape).astype(dtype)

    def wire_bytes(self, shape: Shape, dtype: DTypeLike) -> int:
        return 2 * math.prod(shape)

    def _dither(self, bits: jax.Array, state: State) -> jax.Array:
        """What is added to the 32 bits before the lower 16 are cut off."""
        # Just below a half, and 1 more where the last bit that stays is odd: a tie goes to the even one.
        if self.rounding == "nearest":
            return np.uint32(0x7FFF) + ((bits >> 16) & 1)
        return _random_16_bits(state, bits.shape).astype(jnp.uint32)


def _random_16_bits(state: State, shape: Shape) -> jax.Array:
    """Random uint16 from the stream's seed and number of pushes. Both halves of each draw are used."""
    seed, pushes = state["stream"][0], state["stream"][1]
    rng = jax.random.fold_in(jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), seed), pushes)
    draws = jax.random.bits(rng, (_codes.words(shape, 2),), jnp.uint32)
    return jax.lax.bitcast_convert_type(draws, jnp.uint16).reshape(-1)[: math.prod(shape)].reshape(shape)


def _advance(state: State) -> State:
    """The state with one more push counted in its stream."""
    return {name: x + jnp.array([0, 1], jnp.uint32) if name == "stream" else x for name, x in state.items()}


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
        wanted = _base.with_residual(value, state)
        scale = _codes.largest_step(wanted)
        codes, residual = _codes.split_codes(wanted, scale)
        return {"codes": _codes.pack_codes(codes.reshape(-1)), "scales": scale[None]}, {**state, "residual": residual}

    def decode(self, payload: Payload, shape: Shape, dtype: DTypeLike) -> jax.Array:
        values = _codes.in_order(_codes.unpack_codes(payload["codes"]).astype(jnp.float32) * payload["scales"][0])
        return values[: math.prod(shape)].reshape(shape).astype(dtype)

    def wire_bytes(self, shape: Shape, dtype: DTypeLike) -> int:
        return 4 * _codes.BITS * _codes.words(shape, _codes.PLANE) + 4


# The largest elements, or the largest singular directions.


@dataclasses.dataclass(frozen=True)
class TopK(Compressor):
    """The k elements of largest magnitude, as int32 positions and float32 values.

    k is `ratio` times the number of elements, rounded, and at least 1. Among equal magnitudes, the first elements are
    sent. Source: Aji and Heafield 2017; Stich et al. 2018 for error feedback.

    Attributes:
        ratio: the fraction of the elements that is sent, in (0, 1].

    Raises:
        ValueError: the ratio is out of range.

    Example:
        >>> compressor = TopK(0.5)
        >>> value = jnp.array([1.0, -3.0, 0.5, 2.0])
        >>> payload, state = compressor.encode(value, compressor.init(value.shape, value.dtype))
        >>> payload["indices"].tolist(), payload["values"].tolist(), state["residual"].tolist()
        ([1, 3], [-3.0, 2.0], [1.0, 0.0, 0.5, 0.0])
    """

    ratio: float = 0.01
    name: ClassVar[str] = "topk"

    def __post_init__(self) -> None:
        _check_number(self, "ratio", "a float32 > 0 and <= 1", lambda r: 0 < r <= 1)

    def encode(self, value: jax.Array, state: State) -> tuple[Payload, State]:
        shape = state["residual"].shape
        wanted = _base.with_residual(value, state).reshape(-1)
        _, indices = jax.lax.top_k(jnp.abs(wanted), self._k(shape))
        payload = {"indices": indices.astype(jnp.int32), "values": wanted[indices]}
        residual = wanted.at[indices].set(0, unique_indices=True)
        return payload, {**state, "residual": residual.reshape(shape)}

    def decode(self, payload: Payload, shape: Shape, dtype: DTypeLike) -> jax.Array:
        flat = jnp.zeros(math.prod(shape), jnp.float32)
        flat = flat.at[payload["indices"]].set(payload["values"], unique_indices=True)
        return flat.reshape(shape).astype(dtype)

    def wire_bytes(self, shape: Shape, dtype: DTypeLike) -> int:
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

    Raises:
        ValueError: the rank is less than 1.

    Source: Vogels, Karimireddy and Jaggi 2019.

    Attributes:
        rank: an int of 1 or more. At most the rank of the matrix is used.

    Example:
        >>> compressor = PowerSGD(rank=1)
        >>> value = jnp.outer(jnp.array([1.0, 2.0]), jnp.array([3.0, 0.0, 4.0]))
        >>> total, state = compressor.allreduce(value, compressor.init((2, 3), "float32"), lambda tree: tree)
        >>> bool(jnp.allclose(total, value, atol=1e-5))
        True
    """

    rank: int = 2
    name: ClassVar[str] = "powersgd"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", checks.whole_number(self.rank, "compression 'powersgd'", "rank"))

    def init(self, shape: Shape, dtype: DTypeLike, *, seed: int | jax.Array = 0) -> State:
        """A residual of zeros, and a first `q` that is equal on every device for any seed."""
        state = super().init(shape, dtype)
        rows, columns = _matrix(shape)
        q = jax.random.normal(jax.random.key(0, impl="threefry2x32"), (columns, min(self.rank, rows, columns)))
        return {**state, "q": q.astype(jnp.float32)}

    def allreduce(self, value: jax.Array, state: State, psum: Callable[[PyTree], PyTree]) -> tuple[jax.Array, State]:
        """The compressed sum of `value` over the devices.

        Args:
            value: this device's floating array, of any shape.
            state: this device's state, from `init` or the previous call.
            psum: a function that sums a pytree over the devices, such as `lambda tree: jax.lax.psum(tree, "data")`.

        Returns:
            (the sum, the new state). The sum has the shape and dtype of `value` and is equal on every device.
        """
        value = jnp.asarray(value)
        m = _base.with_residual(value, state).reshape(_matrix(value.shape))  # (rows, columns)
        if 0 in m.shape:
            return value, state
        # One power iteration: it goes on from the `q` of the last push, so one a push is enough.
        p = psum(_product(m, state["q"]))  # (rows, rank)
        p, _ = jnp.linalg.qr(_scale(p))
        q = _product(m.T, p)  # (columns, rank) of this device
        # Before the sum of `q`: a device keeps what was lost of its own value.
        residual = (m - _product(p, q.T)).reshape(value.shape)
        q = psum(q)
        total = _product(p, q.T).reshape(value.shape).astype(value.dtype)
        # The next push begins with this q. A column that became zero, by a zero gradient, would stay zero forever: it
        # keeps its direction.
        vanished = jnp.abs(q).max(0, keepdims=True) < np.finfo(np.float32).tiny
        return total, {**state, "residual": residual, "q": jnp.where(vanished, state["q"], _scale(q))}

    def wire_bytes(self, shape: Shape, dtype: DTypeLike) -> int:
        rows, columns = _matrix(shape)
        return 4 * min(self.rank, rows, columns) * (rows + columns)

    def pays(self, shape: Shape, dtype: DTypeLike) -> bool:
        return len(shape) >= 2 and super().pays(shape, dtype)


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


_TYPES: dict[str, Any] = {c.name: c for c in (OneBit, TwoBit, BFloat16, Int3, Int8, PowerSGD, TopK)}
TYPES = ("none", *_TYPES)


def make(spec: Mapping[str, Any]) -> Compressor | LinearCompressor | None:
    """Make a compressor from a specification.

    Args:
        spec: `{"type": name, parameter: value, ...}`. The table of `jaxpar.compression` lists names and parameters.

    Returns:
        A compressor, or None for the type `none`.

    Raises:
        TypeError: `spec` is not a mapping, or a numeric parameter is not a number.
        ValueError: the type is missing or unknown, a parameter is unknown, or a value is out of range as a float32. The
            message lists the known types or parameters.

    Example:
        >>> make({"type": "2bit", "threshold": 0.5})
        TwoBit(threshold=0.5)
    """
    if not isinstance(spec, Mapping):
        raise TypeError(f'compression: the specification must be a dict, such as {{"type": "2bit"}}, got {spec!r}')
    parameters = dict(spec)
    name = checks.choice(parameters.pop("type", None), "compression", "type", TYPES)
    fields = [field.name for field in dataclasses.fields(_TYPES[name])] if name != "none" else []
    for parameter in parameters:
        checks.choice(parameter, f"compression {name!r}", "parameter", fields or ["none at all"])
    return _TYPES[name](**parameters) if name != "none" else None
