"""Pooling and its gradients by slices that are compared and added as whole arrays.

XLA on CPUs goes from window to window. That takes 1 to 10 times as long forward, and 10 to 30 times as long for the
gradient of max pooling, where it searches each window.
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
_MOST_FORWARD = 25  # places of a window where slices are as fast forward as XLA's loop


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


def sum_windows(operand: jax.Array, *, is_partitioned: bool, **params: Any) -> jax.Array:
    """lax's `reduce_window_sum`: the sum of each window.

    Args:
        operand: the array.
        is_partitioned: makes no difference. Axes along which windows have a length of 1 are left whole.
        params: of the primitive.
    """
    del is_partitioned
    if operand.dtype == jnp.float32 and _is_usual(operand, params) and {*params["window_dilation"]} <= {1}:
        if _has_few_places(params):
            return functools.reduce(jnp.add, views(operand, _windows(params), 0))
        if _spreads(params):
            return _spread(operand, params["window_dimensions"], params["padding"])
    return lax.reduce_window_sum_p.bind(operand, **params)


def largest_of_windows(operand: jax.Array, *, is_partitioned: bool, **params: Any) -> jax.Array:
    """lax's `reduce_window_max`: the largest entry of each window.

    Args:
        operand, is_partitioned, params: as of `sum_windows`.
    """
    del is_partitioned
    if _is_usual(operand, params) and {*params["window_dilation"]} <= {1} and _has_few_places(params):
        return functools.reduce(jnp.maximum, views(operand, _windows(params), _least(operand.dtype)))
    return lax.reduce_window_max_p.bind(operand, **params)


def _windows(params: Any) -> Windows:
    return Windows(params["window_dimensions"], params["window_strides"], params["padding"])


def _is_usual(x: jax.Array, params: Any) -> bool:
    """Whether sizes are known, nothing is cut off before the windows, and there is at least one."""
    if not all(isinstance(size, int) for size in x.shape) or 0 in x.shape:
        return False
    around = zip(x.shape, params["padding"], params["window_dimensions"], strict=True)
    return all(min(pair) >= 0 and size + sum(pair) >= length for size, pair, length in around)


def _has_few_places(params: Any) -> bool:
    return {*params["base_dilation"]} <= {1} and math.prod(params["window_dimensions"]) <= _MOST_FORWARD


def _spreads(params: Any) -> bool:
    """Whether it is the gradient of the sums of windows side by side: each entry fills a window."""
    lengths, padding = params["window_dimensions"], params["padding"]
    return (
        {*params["window_strides"]} <= {1}
        and tuple(params["base_dilation"]) == tuple(lengths)
        and all(low == length - 1 and high >= 0 for (low, high), length in zip(padding, lengths, strict=True))
    )


def _spread(x: jax.Array, lengths: Sequence[int], padding: Sequence[tuple[int, int]]) -> jax.Array:
    """Each entry as often as a window is long, with zeros after them."""
    sizes = [(size, length) for size, length in zip(x.shape, lengths, strict=True)]
    kept = tuple(2 * axis for axis in range(x.ndim))
    filled = lax.broadcast_in_dim(x, [n for pair in sizes for n in pair], kept)
    edges = [(0, high - (length - 1), 0) for (_, high), length in zip(padding, lengths, strict=True)]
    return lax.pad(filled.reshape([math.prod(pair) for pair in sizes]), jnp.zeros((), x.dtype), edges)


def scatter_to_largest(source: jax.Array, operand: jax.Array, *, is_partitioned: bool, **params: Any) -> jax.Array:
    """lax's `select_and_scatter_add`: each entry of the source goes to the largest entry of its window.

    Args:
        source, operand: the operands.
        is_partitioned: makes no difference. Axes along which windows have a length of 1 are left whole.
        params: of the primitive.
    """
    del is_partitioned
    windows = _windows(params)
    usual = params["select_prim"] is lax.ge_p and _is_usual(operand, params)
    if not usual or math.prod(windows.lengths) > MOST_PLACES:
        return lax.select_and_scatter_add_p.bind(source, operand, **params)
    _, transposed = jax.vjp(partial(_first_of_largest, windows), operand)
    return transposed(source)[0]


def _first_of_largest(windows: Windows, x: jax.Array) -> jax.Array:
    """The entry of each window that XLA's search finds, outside of the array too, where it pads with the least."""
    fills = views(x, windows, _least(x.dtype))
    return functools.reduce(lambda found, view: jnp.where(found >= view, found, view), fills)


def _least(dtype: Any) -> Any:
    if dtype == jnp.bool_:
        return False
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


sum_p = primitive.make(lax.reduce_window_sum_p, sum_windows)
max_p = primitive.make(lax.reduce_window_max_p, largest_of_windows)
scatter_p = primitive.make(lax.select_and_scatter_add_p, scatter_to_largest)
