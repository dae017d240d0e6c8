"""Sums of equal steps as integers: what an owner sends back in place of float32 numbers."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

_FLOAT = 32  # bits
_SMALLEST = -126  # the exponent of the smallest normal float32. What is smaller may be flushed to 0


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
