"""Pooling and its gradients by slices that are compared and added as whole arrays.

XLA on CPUs goes from window to window. That takes 1 to 10 times as long forward, and 10 to 30 times as long for the
gradient of max pooling, where it searches each window. The first half are formulas for lax's primitives, the second
half is the pooling that models call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from . import primitive
from .problem import HALVES

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


def views(x: jax.Array, windows: Windows, fill: ArrayLike) -> Iterator[jax.Array]:
    """For each place of a window, in its order, the entry that each window has there.

    Args:
        x: the array.
        windows: over it.
        fill: what stands outside.
    """
    fill = jnp.asarray(fill, x.dtype)
    # XLA writes a padded array down. With strides it is larger than all results, so each view is padded in its place.
    # A size that an export leaves open has no such views.
    pad_at_once = [
        stride == 1 or not isinstance(size, int) for size, stride in zip(x.shape, windows.strides, strict=True)
    ]
    around = list(zip(windows.padding, pad_at_once, strict=True))
    x = lax.pad(x, fill, [(*pair, 0) if at_once else (0, 0, 0) for pair, at_once in around])
    padding = [(0, 0) if at_once else pair for pair, at_once in around]
    axes = list(zip(x.shape, windows.lengths, windows.strides, padding, strict=True))
    for place in product(*map(range, windows.lengths)):
        starts, stops, edges = zip(*(_inside(at, *axis) for at, axis in zip(place, axes, strict=True)), strict=True)
        view = lax.slice(x, starts, stops, windows.strides)
        yield lax.pad(view, fill, edges) if any(map(any, edges)) else view


def _inside(
    at: int, size: int, length: int, stride: int, padding: tuple[int, int]
) -> tuple[int, int, tuple[int, int, int]]:
    """From where to where one place of the windows is in an array's axis, and how many windows have it outside."""
    low, high = padding
    if low == high == 0:
        return at, size - (length - 1 - at), (0, 0, 0)
    count = (size + low + high - length) // stride + 1
    first = min(count, max(0, -((at - low) // stride)))
    last = max(first, min(count, (size - 1 - at + low) // stride + 1))
    start = first * stride + at - low if first < last else 0
    return start, start + (last - first - 1) * stride + 1 if first < last else 0, (first, count - last, 0)


def sum_windows(operand: jax.Array, *, place: primitive.Place, **params: Any) -> jax.Array:
    """lax's `reduce_window_sum`: the sum of each window.

    Args:
        operand: the array.
        place: makes no difference. Axes along which windows have a length of 1 are left whole.
        params: of the primitive.
    """
    if operand.dtype in HALVES:
        return sum_windows(operand.astype(jnp.float32), place=place, **params).astype(operand.dtype)
    if operand.dtype == jnp.float32 and _is_usual(operand, params) and {*params["window_dilation"]} <= {1}:
        if _has_few_places(params):
            return functools.reduce(jnp.add, views(operand, _windows(params), 0))
        if _spreads(params):
            lengths = params["window_dimensions"]
            high = [pair[1] - (length - 1) for pair, length in zip(params["padding"], lengths, strict=True)]
            return _pad(_spread(operand, lengths), [(0, more) for more in high])
    return lax.reduce_window_sum_p.bind(operand, **params)


def largest_of_windows(operand: jax.Array, *, place: primitive.Place, **params: Any) -> jax.Array:
    """lax's `reduce_window_max`: the largest entry of each window.

    Args:
        operand, place, params: as of `sum_windows`.
    """
    if operand.dtype in HALVES:
        return largest_of_windows(operand.astype(jnp.float32), place=place, **params).astype(operand.dtype)
    if _is_usual(operand, params) and {*params["window_dilation"]} <= {1} and _has_few_places(params):
        return functools.reduce(jnp.maximum, views(operand, _windows(params), _least(operand.dtype)))
    return lax.reduce_window_max_p.bind(operand, **params)


def _windows(params: Mapping[str, Any]) -> Windows:
    return Windows(params["window_dimensions"], params["window_strides"], params["padding"])


def _is_usual(x: jax.Array, params: Mapping[str, Any]) -> bool:
    """Whether sizes are known, nothing is cut off before the windows, and there is at least one."""
    if not all(isinstance(size, int) for size in x.shape) or 0 in x.shape:
        return False
    around = zip(x.shape, params["padding"], params["window_dimensions"], strict=True)
    return all(min(pair) >= 0 and size + sum(pair) >= length for size, pair, length in around)


def _has_few_places(params: Mapping[str, Any]) -> bool:
    return {*params["base_dilation"]} <= {1} and math.prod(params["window_dimensions"]) <= _MOST_FORWARD


def _spreads(params: Mapping[str, Any]) -> bool:
    """Whether windows do not overlap in a gradient of their sums, so that each entry fills one window."""
    lengths, padding = params["window_dimensions"], params["padding"]
    return (
        {*params["window_strides"]} <= {1}
        and tuple(params["base_dilation"]) == tuple(lengths)
        and all(low == length - 1 and high >= 0 for (low, high), length in zip(padding, lengths, strict=True))
    )


def _spread(x: jax.Array, lengths: Sequence[int]) -> jax.Array:
    """Each entry as often as a window is long."""
    sizes = [(size, length) for size, length in zip(x.shape, lengths, strict=True)]
    filled = lax.broadcast_in_dim(x, [n for pair in sizes for n in pair], tuple(range(0, 2 * x.ndim, 2)))
    return filled.reshape([math.prod(pair) for pair in sizes])


def _pad(x: jax.Array, edges: Sequence[tuple[int, int]]) -> jax.Array:
    """With so many zeros before and after. Of a negative number, so many entries are cut off."""
    return lax.pad(x, jnp.zeros((), x.dtype), [(low, high, 0) for low, high in edges])


def scatter_to_largest(source: jax.Array, operand: jax.Array, *, place: primitive.Place, **params: Any) -> jax.Array:
    """lax's `select_and_scatter_add`: each entry of the source goes to the largest entry of its window.

    Args:
        source, operand: the operands.
        place: makes no difference. Axes along which windows have a length of 1 are left whole.
        params: of the primitive.
    """
    if operand.dtype in HALVES:
        wide = scatter_to_largest(source.astype(jnp.float32), operand.astype(jnp.float32), place=place, **params)
        return wide.astype(operand.dtype)
    windows = _windows(params)
    usual = params["select_prim"] is lax.ge_p and _is_usual(operand, params)
    if not usual or math.prod(windows.lengths) > MOST_PLACES:
        return lax.select_and_scatter_add_p.bind(source, operand, **params)
    # Each entry asks the windows over it. Nothing of the operand's size comes in between: a sum of parts, each with
    # zeros at the other places, makes XLA write down the operand first where that is a relu's result.
    more = [-(-length // stride) - 1 for length, stride in zip(windows.lengths, windows.strides, strict=True)]
    around = [(n, n) for n in more]
    largest_place = lax.optimization_barrier(
        _pad(_first_of_largest(windows, operand), around)
    )  # or each term searches again
    source = _pad(source, around)
    terms = [
        _from_windows(largest_place, source, windows, more, back) for back in product(*(range(n + 1) for n in more))
    ]
    total = functools.reduce(jnp.add, terms)
    sizes = zip(windows.padding, operand.shape, total.shape, strict=True)
    return _pad(total, [(-low, low + size - covered) for (low, _), size, covered in sizes])


def _from_windows(
    largest_place: jax.Array, source: jax.Array, windows: Windows, more: Sequence[int], back: Sequence[int]
) -> jax.Array:
    """What each entry gets from the window that begins in its stride, or so many windows before along each axis."""
    starts = [most - n for most, n in zip(more, back, strict=True)]
    stops = [size - n for size, n in zip(largest_place.shape, back, strict=True)]
    number = np.zeros((), largest_place.dtype)  # of the entry's place in that window; negative where it is outside
    for n, length, stride in zip(back, windows.lengths, windows.strides, strict=True):
        at = np.arange(stride) + stride * n
        number = np.where((number[..., None] < 0) | (at >= length), -1, number[..., None] * length + at)
    own_place = jnp.tile(
        number.astype(largest_place.dtype), [stop - start for start, stop in zip(starts, stops, strict=True)]
    )
    spread = [_spread(lax.slice(x, starts, stops), windows.strides) for x in (largest_place, source)]
    return jnp.where(spread[0] == own_place, spread[1], 0)


def _first_of_largest(windows: Windows, x: jax.Array) -> jax.Array:
    """For each window, the number of the place that XLA's search finds. Outside of the array the least number is."""
    places = enumerate(views(x, windows, _least(x.dtype)))
    first, largest = jnp.int32(0), next(places)[1]
    for number, view in places:
        stays = largest >= view
        first, largest = jnp.where(stays, first, number), jnp.where(stays, largest, view)
    return jnp.broadcast_to(first, largest.shape)


def _least(dtype: np.dtype[Any]) -> bool | int | float:
    if dtype == jnp.bool_:
        return False
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


sum_p = primitive.make(lax.reduce_window_sum_p, sum_windows)
max_p = primitive.make(lax.reduce_window_max_p, largest_of_windows)
scatter_p = primitive.make(lax.select_and_scatter_add_p, scatter_to_largest)


Padding = str | Sequence[tuple[int, int]]


def max_pool(
    inputs: jax.Array, window_shape: Sequence[int], strides: Sequence[int] | None = None, padding: Padding = "VALID"
) -> jax.Array:
    """The largest entry of each window, with a fast gradient on CPUs.

    On CPUs the gradient is faster than the gradient of `jax.lax.reduce_window`, unless windows overlap in strides of 1.
    In a step and under `fast_on_cpus`, `jax.lax.reduce_window` is the faster one where windows overlap. The arguments
    are those of `flax.linen.max_pool` and `flax.nnx.max_pool`. If windows do not overlap, results and gradients are
    bit-equal to theirs: among equal entries, the first one gets the gradient. If windows overlap, gradients differ by
    rounding.

    Args:
        inputs: (..., spatial dimensions, features), floating or integer.
        window_shape: the lengths of a window, one for each spatial dimension.
        strides: the distances between windows, one for each spatial dimension. Each is 1 by default.
        padding: "VALID", "SAME", or (before, after) for each spatial dimension.

    Returns:
        (..., windows along each dimension, features), of the dtype of `inputs`.

    Raises:
        ValueError: the lengths do not match, a window is larger than the padded inputs, or a window has more than 64
            entries. Use `jax.lax.reduce_window` for such windows.

    Example:
        >>> import jax.numpy as jnp
        >>> max_pool(jnp.arange(16.0).reshape(1, 4, 4, 1), (2, 2), strides=(2, 2)).ravel().tolist()
        [5.0, 7.0, 13.0, 15.0]
    """
    inputs = jnp.asarray(inputs)
    least = -jnp.inf if jnp.issubdtype(inputs.dtype, jnp.floating) else jnp.iinfo(inputs.dtype).min
    return functools.reduce(_larger, _views("max_pool", inputs, window_shape, strides, padding, least))


def avg_pool(
    inputs: jax.Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
    count_include_pad: bool = True,
) -> jax.Array:
    """The mean of each window. The arguments are those of `flax.linen.avg_pool`.

    Args:
        inputs, window_shape, strides, padding: as for `max_pool`. The inputs must be floating.
        count_include_pad: whether the mean counts the zeros of the padding.

    Returns:
        (..., windows along each dimension, features), of the dtype of `inputs`.

    Raises:
        ValueError: as for `max_pool`.

    Example:
        >>> import jax.numpy as jnp
        >>> avg_pool(jnp.arange(16.0).reshape(1, 4, 4, 1), (2, 2), strides=(2, 2)).ravel().tolist()
        [2.5, 4.5, 10.5, 12.5]
    """
    inputs = jnp.asarray(inputs)

    def total(x: jax.Array) -> jax.Array:
        return functools.reduce(jnp.add, _views("avg_pool", x, window_shape, strides, padding, 0))

    if count_include_pad:
        return total(inputs) / math.prod(window_shape)
    around = inputs.ndim - 1 - len(window_shape)
    return total(inputs) / total(jnp.ones((*(1,) * around, *inputs.shape[around:-1], 1), inputs.dtype))


def _larger(a: jax.Array, b: jax.Array) -> jax.Array:
    """The first of the largest, and NaN where there is one."""
    return jnp.where((a >= b) | (a != a), a, b)


def _views(
    name: str,
    inputs: jax.Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None,
    padding: Padding,
    fill: float,
) -> list[jax.Array]:
    """For each place of the window the entry that each window has there."""
    window = tuple(window_shape)
    steps = (1,) * len(window) if strides is None else tuple(strides)
    first = inputs.ndim - 1 - len(window)  # the first spatial axis
    if math.prod(window) > MOST_PLACES:  # each is a slice of the program, which would take minutes to compile
        raise ValueError(
            f"{name}: a window of {window} has more than {MOST_PLACES} entries; take jax.lax.reduce_window, or the "
            f"{'maximum' if name == 'max_pool' else 'mean'} over the axes where it is the whole image"
        )
    spatial = inputs.shape[first:-1]
    pads = lax.padtype_to_pads(spatial, window, steps, padding) if isinstance(padding, str) else padding
    # Axes before and after the spatial ones have windows of one entry.
    windows = Windows((*(1,) * first, *window, 1), (*(1,) * first, *steps, 1), (*((0, 0),) * first, *pads, (0, 0)))
    for size, length, (low, high) in zip(window, spatial, pads, strict=True):
        # lax would give an array without elements, and the mean of it later is NaN.
        if isinstance(length, int) and size > low + length + high:
            raise ValueError(f"{name}: a window of {window} is larger than inputs of {inputs.shape} with their padding")
    return list(views(inputs, windows, fill))
