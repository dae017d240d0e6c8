"""Which examples of a data set are in its two parts, such as for training and validation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from .._core import checks
from .._devices.user_mesh import outside_mesh
from ._shuffle import host_order


def rows_of_parts(size: int, fraction: Any, rng: Any, shuffle: bool, where: str) -> tuple[np.ndarray, np.ndarray]:
    """The rows of the two parts, each in ascending order. The options and errors are those of `data.split`.

    Args:
        size: how many rows there are.
        where: the function that asks, for messages.
    """
    count = _count_of(fraction, size, where)
    if rng is not None and not shuffle:
        raise ValueError(f"{where}: shuffle=False draws nothing, so it takes no rng")
    order = _order(rng, size, where) if shuffle else np.arange(size)
    return np.sort(order[:count]), np.sort(order[count:])


class Some:
    """The elements of a sequence at some places, in the order of these."""

    def __init__(self, elements: Any, places: np.ndarray):
        self._elements, self._places = elements, places.tolist()

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, i: int) -> Any:
        return self._elements[self._places[i]]

    def __iter__(self) -> Iterator[Any]:
        return map(self._elements.__getitem__, self._places)


def _count_of(fraction: Any, size: int, where: str) -> int:
    """How many examples of `size` a fraction, or their number, is."""
    if checks.is_int(fraction):
        count = int(fraction)
    else:
        count = round(size * checks.number(fraction, where, "fraction", "a number", lambda x: math.isfinite(size * x)))
    if not 0 < count < size:
        raise ValueError(
            f"{where}: {fraction} of {size} examples leaves one of the two empty; give a fraction between 0 and "
            f"1, or a number of examples from 1 to {size - 1}"
        )
    return count


def _order(rng: Any, size: int, where: str) -> np.ndarray:
    """An order of the examples that depends only on `rng`."""
    if rng is None or checks.is_int(rng):
        with outside_mesh():
            rng = jax.random.key(int(rng or 0))
    if not isinstance(rng, jax.Array):
        raise TypeError(f"{where}: rng must be a random key or an int, got {checks.describe(rng)}")
    return host_order(rng, 0, size)
