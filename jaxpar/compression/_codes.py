"""Codes in words: a code has a few bits, a word 32.

The order of the codes suits the hardware (`pack_planes`) or sums of words (`pack_lanes`). That of MXNet's bytes is in
`_base.InWords`.
"""

from __future__ import annotations

import functools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np

Shape = tuple[int, ...]

PLANE = 32  # codes that fill words of any number of bits, see `pack_planes`
BITS = 3  # of a code from -3 to 3
_LARGEST = 3
_LINE = 128  # numbers that a TPU computes on at once


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
