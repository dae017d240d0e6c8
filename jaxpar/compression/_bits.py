"""Codes of a few bits, packed in uint32 words."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

Shape = tuple[int, ...]


def words(shape: Shape, per_word: int) -> int:
    """How many words, or blocks, hold an array of this shape."""
    return -(-math.prod(shape) // per_word)


def pad(values: jax.Array, multiple: int) -> jax.Array:
    """The flat values, with zeros at the end up to a multiple of `multiple`."""
    flat = values.reshape(-1)
    return jnp.pad(flat, (0, -flat.size % multiple))


# MXNet's order: the first code of a byte is in its top bits.


def shifts(shape: Shape, bits: int) -> jax.Array:
    """By how many bits each code of a word is shifted to the left.

    Computed, because XLA does not vectorize the use of a table.
    """
    per_byte = 8 // bits
    place = jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    return 8 * (place // per_byte) + (8 - bits) - bits * (place % per_byte)


def pack_pairs(codes: jax.Array) -> jax.Array:
    """2-bit codes, given one in a uint8, 16 in a uint32. Four bytes at a time become one."""
    four = jax.lax.bitcast_convert_type(codes.reshape(-1, 4), jnp.uint32)
    byte = (four << 6) | (four >> 4) | (four >> 14) | (four >> 24)
    return jax.lax.bitcast_convert_type(byte.astype(jnp.uint8).reshape(-1, 4), jnp.uint32)


def unpack_words(words: jax.Array, bits: int) -> jax.Array:
    """The codes of uint32 words, flat, each as a uint32."""
    shape = (words.size, 32 // bits)
    return ((words[:, None] >> shifts(shape, bits)) & np.uint32(2**bits - 1)).reshape(-1)


# Any number of bits: 32 codes become `bits` words, one for each place of a bit.

PLANE = 32


def pack_planes(codes: jax.Array, bits: int) -> jax.Array:
    """uint32 codes (..., 32 m), each below 2**bits, in words (..., bits m).

    Example:
        >>> pack_planes(jnp.array([3] + 31 * [0] + [5] + 31 * [1], jnp.uint32), 3).tolist()
        [1, 1, 0, 4294967295, 0, 1]
    """
    lead, groups = codes.shape[:-1], codes.shape[-1] // PLANE
    plane, place = _planes((*lead, groups, bits, PLANE))
    split = (codes.reshape(*lead, groups, 1, PLANE) >> plane) & np.uint32(1)
    return (split << place).sum(-1, dtype=jnp.uint32).reshape(*lead, groups * bits)


def unpack_planes(packed: jax.Array, bits: int) -> jax.Array:
    """The inverse: words (..., bits m) as uint32 codes (..., 32 m)."""
    lead, groups = packed.shape[:-1], packed.shape[-1] // bits
    plane, place = _planes((*lead, groups, bits, PLANE))
    split = (packed.reshape(*lead, groups, bits, 1) >> place) & np.uint32(1)
    return (split << plane).sum(-2, dtype=jnp.uint32).reshape(*lead, groups * PLANE)


def _planes(shape: Shape) -> tuple[jax.Array, jax.Array]:
    """For (..., bits, place): which bit of a code, and which place of a word."""
    rank = len(shape)
    return jax.lax.broadcasted_iota(jnp.uint32, shape, rank - 2), jax.lax.broadcasted_iota(jnp.uint32, shape, rank - 1)


# Codes beside each other in a word, with room for the sum of several words.


def lanes(bits: int) -> int:
    """How many codes of so many bits a word holds beside each other."""
    return 32 // bits


def pack_lanes(codes: jax.Array, bits: int) -> jax.Array:
    """Flat uint32 codes in words that may be summed, as long as each sum of codes is below 2**bits.

    Example:
        >>> words = pack_lanes(jnp.array([1, 2, 3], jnp.uint32), 4)
        >>> unpack_lanes(words + words, 4, 3).tolist()
        [2, 4, 6]
    """
    rows = pad(codes, lanes(bits)).reshape(lanes(bits), -1)
    return (rows << _lane_shifts(bits)).sum(0, dtype=jnp.uint32)


def unpack_lanes(packed: jax.Array, bits: int, size: int) -> jax.Array:
    """The inverse: `size` codes out of words."""
    return ((packed[None, :] >> _lane_shifts(bits)) & np.uint32(2**bits - 1)).reshape(-1)[:size]


def _lane_shifts(bits: int) -> jax.Array:
    return np.uint32(bits) * jnp.arange(lanes(bits), dtype=jnp.uint32)[:, None]
