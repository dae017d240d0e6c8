"""The gradient of max pooling by slices that are compared and added as whole arrays.

XLA on CPUs searches one window after the other, which takes 10 to 30 times as long.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from . import primitive

MOST_PLACES = 64
"""The largest window: each of its places is a slice of its own in the program."""


class Windows(NamedTuple):
    """Where windows lie over an array, with an entry for each of its axes.

    Attributes:
        lengths: of a window.
        strides: the distances of windows.
        padding: (before, after).
    """

    lengths: Sequence[int]
    strides: Sequence[int]
    padding: Sequence[tuple[int, int]]


def views(x: jax.Array, windows: Windows, fill: Any) -> Iterator[jax.Array]:
    """For each place of a window, in its order, the entry that each window has there.

    Args:
        x: the array.
        windows: over it.
        fill: what stands outside.
    """
    padded = lax.pad(x, jnp.asarray(fill, x.dtype), [(low, high, 0) for low, high in windows.padding])
    for place in product(*map(range, windows.lengths)):
        view = padded
        for axis, (at, length, stride) in enumerate(zip(place, windows.lengths, windows.strides, strict=True)):
            if (length, stride) != (1, 1):
                view = lax.slice_in_dim(view, at, padded.shape[axis] - (length - 1 - at), stride, axis)
        yield view


def scatter_to_largest(source: jax.Array, operand: jax.Array, *, is_partitioned: bool, **params: Any) -> jax.Array:
    """lax's `select_and_scatter_add`: each entry of the source goes to the largest entry of its window.

    Args:
        source, operand: the operands.
        is_partitioned: makes no difference. Axes along which windows have a length of 1 are left whole.
        params: of the primitive.
    """
    del is_partitioned
    windows = Windows(params["window_dimensions"], params["window_strides"], params["padding"])
    static = all(isinstance(size, int) for size in operand.shape)
    if params["select_prim"] is not lax.ge_p or not static or math.prod(windows.lengths) > MOST_PLACES:
        return lax.select_and_scatter_add_p.bind(source, operand, **params)
    _, transposed = jax.vjp(partial(_first_of_largest, windows), operand)
    return transposed(source)[0]


def _first_of_largest(windows: Windows, x: jax.Array) -> jax.Array:
    """The entry of each window that XLA's search finds, outside of the array too, where it pads with the least."""
    least = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    return functools.reduce(lambda found, view: jnp.where(found >= view, found, view), views(x, windows, least))


scatter_p = primitive.make(lax.select_and_scatter_add_p, scatter_to_largest)
