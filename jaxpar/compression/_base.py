"""What compressors are made of: the base classes, codes of a few bits, and sums of equal steps as such codes.

`Compressor` is the interface. Read one compressor of `_compressors` beside it, then the packing: a code has a few bits,
a word 32, and the order of the codes in a word suits either MXNet's bytes (`InWords`) or the hardware (`pack_planes`).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from .._core.arrays import PyTree
from .._devices import collectives

if TYPE_CHECKING:
    from jax.typing import ArrayLike, DTypeLike

Shape = tuple[int, ...]
State = dict[str, jax.Array]
Payload = dict[str, jax.Array]

PLANE = 32  # codes that fill words of any number of bits, see `pack_planes`
BITS = 3  # of a code from -3 to 3
_LARGEST = 3
_LINE = 128  # numbers that a TPU computes on at once
_FLOAT = 32  # bits
_SMALLEST = -126  # the exponent of the smallest normal float32. What is smaller may be flushed to 0


class Compressor(Protocol):
    """A frozen, hashable compressor. Its residual between pushes is a separate `State`.

    Attributes:
        name: the type in a specification, see `make`.
        elementwise: whether encoding a concatenation gives the concatenated encodings, up to padding. If so, a store
            may compress whole flat buckets.
        linear: whether the codes themselves are summed, as in `LinearCompressor.allreduce`.
        two_way: whether the sum is compressed too, with a residual on the summing device. See `Int3`.
        per_word: how many elements one word of the payload has, for an elementwise compressor.
    """

    name: ClassVar[str] = ""
    elementwise: ClassVar[bool] = False
    linear: ClassVar[bool] = False
    two_way: ClassVar[bool] = False
    per_word: ClassVar[int] = 1

    def init(self, shape: Shape, dtype: DTypeLike, *, seed: int | jax.Array = 0) -> State:
        """The state before the first push: a float32 `residual` of zeros, and a key for stochastic rounding.

        Args:
            shape, dtype: the shape and dtype of the pushed values. The dtype must be floating.
            seed: an integer, which may be traced. Devices and keys need different seeds for independent random numbers.

        Raises:
            TypeError: the dtype is not floating.
        """
        if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
            raise TypeError(
                f"compression {self.name!r} takes floating values, got dtype {jnp.dtype(dtype).name}; push this key "
                "uncompressed"
            )
        return {"residual": jnp.zeros(shape, jnp.float32)}

    def encode(self, value: jax.Array, state: State) -> tuple[Payload, State]:
        """The payload for `value` plus the residual, and the state for the next push."""
        ...

    def decode(self, payload: Payload, shape: Shape, dtype: DTypeLike) -> jax.Array:
        """The decoded value. The residual does not include the error of rounding to a narrower `dtype`."""
        ...

    def wire_bytes(self, shape: Shape, dtype: DTypeLike) -> int:
        """The bytes of a payload."""
        ...

    def grid(self, count: int) -> Grid | None:
        """A lossless code for the sum of `count` decoded payloads. None: send float32."""
        return None

    def pays(self, shape: Shape, dtype: DTypeLike) -> bool:
        """Whether the payload is smaller than the value. False for a dtype that is not floating."""
        dtype = jnp.dtype(dtype)
        is_floating = jnp.issubdtype(dtype, jnp.floating)
        return is_floating and self.wire_bytes(shape, dtype) < math.prod(shape) * dtype.itemsize


@runtime_checkable
class ElementCompressor(Compressor, Protocol):
    """An elementwise compressor whose codes a store packs by itself, in an order that suits the devices."""

    def quantize(self, value: jax.Array, state: State) -> tuple[jax.Array, State]:
        """The code of each element, an unsigned integer of which `per_word` fill a word, and the state."""
        ...

    def dequantize(self, codes: jax.Array) -> jax.Array:
        """The float32 element of each code."""
        ...


class InWords(ElementCompressor, Protocol):
    """Codes that fill uint32 words, in MXNet's order: the first code of a byte is in its top bits."""

    elementwise: ClassVar[bool] = True

    def encode(self, value: jax.Array, state: State) -> tuple[Payload, State]:
        codes, state = self.quantize(value, state)
        # The codes of a word have no bit in common, so their sum is their union.
        lanes = pad(codes.astype(jnp.uint32), self.per_word).reshape(-1, self.per_word)  # (words, codes of a word)
        return {"codes": (lanes << self._shifts()).sum(-1, dtype=jnp.uint32)}, state

    def decode(self, payload: Payload, shape: Shape, dtype: DTypeLike) -> jax.Array:
        codes = payload["codes"][:, None] >> self._shifts() & np.uint32(2 ** (32 // self.per_word) - 1)
        return self.dequantize(codes.reshape(-1))[: math.prod(shape)].reshape(shape).astype(dtype)

    def wire_bytes(self, shape: Shape, dtype: DTypeLike) -> int:
        return 4 * words(shape, self.per_word)

    def _shifts(self) -> np.ndarray:
        """By how many bits each code of a word is shifted to the left."""
        bits, place = 32 // self.per_word, np.arange(self.per_word, dtype=np.uint32)[None]
        per_byte = 8 // bits
        return 8 * (place // per_byte) + (8 - bits) - bits * (place % per_byte)


@runtime_checkable
class LinearCompressor(Compressor, Protocol):
    """A compressor whose codes can be summed: `allreduce` replaces encode and decode."""

    linear: ClassVar[bool] = True

    def allreduce(
        self, value: jax.Array, state: State, psum: Callable[[PyTree], PyTree]
    ) -> tuple[jax.Array, State]: ...

    def encode(self, value: jax.Array, state: State) -> tuple[Payload, State]:
        raise TypeError(f"compression {self.name!r} has no payload of one device; its sum is `allreduce`")

    def decode(self, payload: Payload, shape: Shape, dtype: DTypeLike) -> jax.Array:
        raise TypeError(f"compression {self.name!r} has no payload of one device; its sum is `allreduce`")


def decode_sum(compressor: Compressor, payloads: Payload, shape: Shape, dtype: DTypeLike) -> jax.Array:
    """Decode several payloads and sum them, in the order of the devices.

    The sum is a compiled loop, so that program size and compile time do not grow with the number of devices.

    Args:
        compressor: the compressor that encoded the payloads.
        payloads: a payload whose arrays have one row for each device, as an all-gather returns it.
        shape, dtype: the shape and dtype of a value. The sum is taken in float32 and rounded to `dtype` once.

    Example:
        >>> from jaxpar import compression
        >>> two_bit = compression.make({"type": "2bit", "threshold": 0.5})
        >>> payload, _ = two_bit.encode(jnp.ones(3), two_bit.init((3,), "float32"))
        >>> both = jax.tree.map(lambda x: jnp.stack([x, x]), payload)
        >>> decode_sum(two_bit, both, (3,), "float32").tolist()
        [1.0, 1.0, 1.0]
    """

    def decode_one(i: ArrayLike) -> jax.Array:
        return compressor.decode(jax.tree.map(operator.itemgetter(i), payloads), shape, "float32")

    return collectives.sum_by_loop(decode_one, jax.tree.leaves(payloads)[0].shape[0]).astype(dtype)


def with_residual(value: jax.Array, state: State) -> jax.Array:
    """The float32 value to send: the pushed value plus the residual."""
    return state["residual"] + jnp.asarray(value).astype(jnp.float32)


# Codes in words.


def words(shape: Shape, per_word: int) -> int:
    """How many words, or blocks, hold an array of this shape."""
    return -(-math.prod(shape) // per_word)


def pad(values: jax.Array, multiple: int) -> jax.Array:
    """The flat values, with zeros at the end up to a multiple of `multiple`."""
    flat = values.reshape(-1)
    return jnp.pad(flat, (0, -flat.size % multiple))


# Any number of bits. A code is cut in digits of as many bits as divide both it and a word, so that no digit is in two
# words. A plane has one digit of each code:
#
#     bits of a code   digit     a word has   so
#     2                2 bits    16 digits    16 codes fill one word: one plane
#     3                1 bit     32 digits    32 codes fill three words: plane p has bit p of each code
#     12               4 bits    8 digits     8 codes fill three words
#
# The codes of a word are not beside each other: a TPU computes on lines of 128 numbers, and no shape may end with the
# 16 or 32 codes of a word. So a block is a line of words, and digit k of its words has codes beside each other.


def pack_planes(codes: jax.Array, bits: int) -> jax.Array:
    """uint32 codes (..., 32 m), each below 2**bits, in words (..., bits m). The order of the codes is no format.

    If `bits` divides 32, the length may be any multiple of 32 / bits.
    """
    digit, per_word, planes = _digits(bits)
    line = _line(codes.shape[-1] // per_word)
    split = codes.reshape(*codes.shape[:-1], -1, 1, per_word, line)  # (..., blocks, 1, digits of a word, line)
    if planes > 1:  # (..., blocks, planes, digits of a word, line)
        split = split >> _shifts(split, -3, planes, digit) & np.uint32(2**digit - 1)
    packed = (split << _shifts(split, -2, per_word, digit)).sum(-2, dtype=jnp.uint32)  # (..., blocks, planes, line)
    return in_order(packed, codes.ndim - 1)


def unpack_planes(packed: jax.Array, bits: int) -> jax.Array:
    """The inverse: codes (..., blocks, codes of a block, line). `in_order` makes flat what is computed of each."""
    digit, per_word, planes = _digits(bits)
    line = _line(packed.shape[-1] // planes)
    split = packed.reshape(*packed.shape[:-1], -1, planes, line)
    shifts, mask = _shifts(split, -2, per_word, digit), np.uint32(2**digit - 1)
    # Of each plane the digits of the codes, (..., blocks, digits of a word, line), at their place in the code.
    digits = [(split[..., p, None, :] >> shifts & mask) << np.uint32(p * digit) for p in range(planes)]
    return functools.reduce(operator.or_, digits)


def in_order(values: jax.Array, lead: int = 0) -> jax.Array:
    """The values flat behind `lead` axes."""
    # They are computed in their own shape: XLA's loops for CPUs are four times slower over a flat one.
    return jax.lax.optimization_barrier(values).reshape(*values.shape[:lead], -1)


def _digits(bits: int) -> tuple[int, int, int]:
    """Bits of a digit, digits in a word, digits of a code."""
    digit = math.gcd(bits, 32)
    return digit, 32 // digit, bits // digit


def _line(size: int) -> int:
    """The last axis for planes of so many words: whole lines, or all of them as one."""
    return _LINE if size % _LINE == 0 and size else max(size, 1)


def _shifts(values: jax.Array, axis: int, count: int, bits: int) -> np.ndarray:
    """0, bits, 2 bits, ... along an axis of the values."""
    shape = [1] * values.ndim
    shape[axis] = count
    return np.arange(0, count * bits, bits, dtype=np.uint32).reshape(shape)


# Codes from -3 to 3 in planes of 3 bits, with one scale.


def largest_step(values: jax.Array) -> jax.Array:
    """A third of the largest magnitude. Infinite if any is not finite, since a maximum may pass over NaN."""
    largest = jnp.abs(values).max(initial=0) / _LARGEST
    return jnp.where(jnp.isfinite(values).all(), largest, np.float32(np.inf))


def split_codes(wanted: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(int32 codes from -3 to 3, the residual). A value of zeros, or of subnormal steps, stays in the residual."""
    # XLA may flush a subnormal scale to 0, and the quotient would be infinite. Of a value that is not finite the scale
    # is infinite, and codes * scale is NaN, in the sum and in the residual.
    none = scale < np.finfo(np.float32).tiny
    quotient = jnp.where(none, np.float32(0), wanted / jnp.where(none, np.float32(1), scale))
    codes = jnp.clip(jnp.round(quotient), -_LARGEST, _LARGEST)
    return codes.astype(jnp.int32), wanted - codes * scale


def pack_codes(codes: jax.Array) -> jax.Array:
    """int32 codes (..., n) as words (..., 3 ceil(n / 32))."""
    missing = -codes.shape[-1] % PLANE
    padded = jnp.pad(codes + _LARGEST, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    # A barrier, since each plane would compute the codes again.
    return pack_planes(jax.lax.optimization_barrier(padded.astype(jnp.uint8)).astype(jnp.uint32), BITS)


def unpack_codes(packed: jax.Array) -> jax.Array:
    """The inverse: int32 codes with what was padded, for `in_order`."""
    return unpack_planes(packed, BITS).astype(jnp.int32) - _LARGEST


# Codes beside each other in a word, with room for the sum of several words.


def pack_lanes(codes: jax.Array, bits: int) -> jax.Array:
    """Flat uint32 codes in words that may be summed, as long as each sum of codes is below 2**bits."""
    rows = pad(codes, 32 // bits).reshape(32 // bits, -1)
    return (rows << _lane_shifts(bits)).sum(0, dtype=jnp.uint32)


def unpack_lanes(packed: jax.Array, bits: int, size: int) -> jax.Array:
    """The inverse of `pack_lanes`: `size` codes from words."""
    return ((packed[None, :] >> _lane_shifts(bits)) & np.uint32(2**bits - 1)).reshape(-1)[:size]


def _lane_shifts(bits: int) -> jax.Array:
    return np.uint32(bits) * jnp.arange(32 // bits, dtype=jnp.uint32)[:, None]


# Sums of equal steps as integers: what an owner sends back in place of float32 numbers.


class Grid:
    """The sums of `count` numbers ±step (or 0), added in float32 from left to right.

    Such a sum is k * step, where k is from -count to count. If k * step is no float32, the order of the additions
    decides on the last bits. Then the code of a sum has its distance from k * step too. So every sum comes back bit
    for bit.

    With step 0.5 and 4 devices a sum is one of -2, -1.5, ... 2: a code of 9, in 4 bits. With 0.1 the float32 sums of
    0.1 + 0.1 + 0.1 and of 0.1 + 0.1 - 0.1 + ... may be off by some units of the last digit of the step, in either
    direction. A code has a place for each of these distances: code = index of k * places + place.
    """

    def __init__(self, step: float, count: int, stride: int = 1):
        """`step`: a float32 number above 0. `stride`: 2 where no number is 0, so that every other k only occurs."""
        self._step, self._count, self._stride = np.float32(step), count, stride
        # step = digits * 2**unit, where digits is odd: a float32 has 24 binary digits.
        mantissa, exponent = math.frexp(float(self._step))
        digits, unit = int(mantissa * 2**24), exponent - 24
        while digits % 2 == 0:
            digits, unit = digits // 2, unit + 1
        # The step as the sum of two numbers of 12 digits, whose multiples are exact, and the unit of its last digit.
        upper, lower = math.ldexp(digits >> 12 << 12, unit), math.ldexp(digits & 0xFFF, unit)
        self._scaled = np.float32(upper), np.float32(lower), np.float32(2.0**unit)
        # No codes where a unit is subnormal, a sum is infinite, or k has more digits than a float32.
        is_beyond = unit < _SMALLEST or count * float(self._step) > float(np.finfo(np.float32).max) or count >= 1 << 24
        self._slack = 0 if is_beyond else _largest_error(digits, count)  # units that a sum may be off, either way
        self._places = 2 * self._slack + 1  # the codes for each k
        steps = 2 * count // stride + 1
        # The bits of a code. 32 means float32 numbers without codes.
        self.bits: int = _FLOAT if is_beyond else min(_FLOAT, (steps * self._places - 1).bit_length())
        # Whether every k * step is a float32 number, so that the order of the additions does not matter.
        self.is_exact: bool = self.bits < _FLOAT and not self._slack

    def encode(self, total: jax.Array) -> jax.Array:
        """The uint32 code of each float32 sum."""
        upper, lower, unit = self._scaled
        k = jnp.round(total / self._step)
        # Each result is a float32 number, so nothing is rounded. `total - k * step` would be.
        distance = ((total - k * upper) - k * lower) / unit
        place = (distance + self._slack).astype(jnp.uint32)
        index = ((k + self._count) / self._stride).astype(jnp.uint32)
        return index * np.uint32(self._places) + place

    def decode(self, codes: jax.Array) -> jax.Array:
        """The float32 sums: the inverse of `encode`."""
        upper, lower, unit = self._scaled
        k = (codes // np.uint32(self._places)).astype(jnp.float32) * self._stride - self._count
        distance = (codes % np.uint32(self._places)).astype(jnp.float32) - self._slack
        return k * upper + (k * lower + distance * unit)


def _largest_error(step: int, count: int) -> int:
    """The largest error of a sum of `count` steps, an odd integer, that is rounded to 24 digits after each step."""
    largest, slack = step, 0
    if count * step < 1 << 24:
        return 0
    for terms in range(2, count + 1):
        extra = max(0, (largest + step).bit_length() - 24)
        slack += (1 << extra) >> 1 if terms > 2 else 0  # twice a float32 number is one
        largest = -(-(largest + step) >> extra) << extra  # rounded up: no less than float32 has it
        if slack >= 1 << _FLOAT:
            break
    return slack
