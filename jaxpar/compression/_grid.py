"""Sums of equal steps as integers: what an owner sends back in place of float32 numbers."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

_FLOAT = 32  # bits
_SMALLEST = -126  # the exponent of the smallest normal float32


@dataclasses.dataclass(frozen=True)
class Grid:
    """The sums of `count` numbers ±step (or 0), added in float32 from left to right.

    Such a sum is k * step, where k is from -count to count. If k * step is no float32, the order of the additions
    decides on the last bits. Then the code of a sum has its distance from k * step too. So every sum comes back bit
    for bit.

    Attributes:
        step: a float32 number above 0.
        count: how many numbers are added.
        stride: 2 where no number is 0, so that every other k only occurs.

    Example:
        >>> Grid(0.5, 8).bits, Grid(0.5, 512).bits, Grid(0.1, 8).bits
        (5, 11, 10)
        >>> grid = Grid(0.1, 3)
        >>> sums = jnp.float32(0.1) + jnp.array([-0.1, 0.1], jnp.float32) + jnp.float32(0.1)
        >>> bool((grid.decode(grid.encode(sums)) == sums).all())
        True
    """

    step: float
    count: int
    stride: int = 1

    @property
    def bits(self) -> int:
        """Bits of a code. 32 says that float32 numbers are no larger, and that there are no codes."""
        _, _, unit = _parts(self.step)
        highest = self.count * float(np.float32(self.step))
        if unit < _SMALLEST or highest > float(np.finfo(np.float32).max) or self.count >= 1 << 24:
            return _FLOAT
        return min(_FLOAT, (self._steps * self._places - 1).bit_length())

    @property
    def is_exact(self) -> bool:
        """Whether every k * step is a float32 number, so that the order of the additions does not matter."""
        return self.bits < _FLOAT and not self._slack

    def encode(self, total: jax.Array) -> jax.Array:
        """The uint32 code of each float32 sum."""
        upper, lower, unit = self._scaled()
        k = jnp.round(total / np.float32(self.step))
        # Each result is a float32 number, so nothing is rounded.
        distance = ((total - k * upper) - k * lower) / unit
        place = (distance + self._slack).astype(jnp.uint32)
        index = ((k + self.count) / self.stride).astype(jnp.uint32)
        return index * np.uint32(self._places) + place

    def decode(self, codes: jax.Array) -> jax.Array:
        """The float32 sums: the inverse."""
        upper, lower, unit = self._scaled()
        k = (codes // np.uint32(self._places)).astype(jnp.float32) * self.stride - self.count
        distance = (codes % np.uint32(self._places)).astype(jnp.float32) - self._slack
        return k * upper + (k * lower + distance * unit)

    @property
    def _slack(self) -> int:
        return _slack(self.step, self.count)

    @property
    def _places(self) -> int:
        return 2 * self._slack + 1

    @property
    def _steps(self) -> int:
        return 2 * self.count // self.stride + 1

    def _scaled(self) -> tuple[np.float32, np.float32, np.float32]:
        """The step as the sum of two numbers of 12 digits, whose multiples are exact, and the unit of its last one."""
        upper, lower, unit = _parts(self.step)
        return np.float32(math.ldexp(upper, unit)), np.float32(math.ldexp(lower, unit)), np.float32(2.0**unit)


def _parts(step: float) -> tuple[int, int, int]:
    """(upper, lower, unit): the step is (upper + lower) * 2**unit, upper + lower is odd, lower has 12 digits."""
    mantissa, exponent = math.frexp(float(np.float32(step)))
    digits, unit = int(mantissa * 2**24), exponent - 24
    while digits % 2 == 0:
        digits, unit = digits // 2, unit + 1
    return digits >> 12 << 12, digits & 0xFFF, unit


@functools.lru_cache(maxsize=1024)
def _slack(step: float, count: int) -> int:
    """The most units by which a sum of `count` steps, rounded after each, is away from the exact one."""
    upper, lower, _ = _parts(step)
    largest, slack = upper + lower, 0
    if count * largest < 1 << 24:
        return 0
    for terms in range(2, count + 1):
        extra = max(0, (largest + upper + lower).bit_length() - 24)
        slack += (1 << extra) >> 1 if terms > 2 else 0  # twice a float32 number is one
        largest = _rounded(largest + upper + lower, extra)
        if slack >= 1 << _FLOAT:
            break
    return slack


def _rounded(value: int, extra: int) -> int:
    """The integer without its last `extra` digits, rounded up: no less than float32 has it."""
    return -(-value >> extra) << extra
