"""Pooling as strided slices, whose gradients are fast on CPUs.

XLA computes the gradient of its own max pooling by a search in one window after the other. Slices are compared and
added as whole arrays.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from .._core.calls import answers
from .._devices.formulas import MOST_PLACES, Windows, views

Padding = str | Sequence[tuple[int, int]]


@answers("max_pool")
def max_pool(
    inputs: jax.Array, window_shape: Sequence[int], strides: Sequence[int] | None = None, padding: Padding = "VALID"
) -> jax.Array:
    """The largest entry of each window, with a faster gradient than that of `jax.lax.reduce_window` on CPUs.

    The arguments are those of `flax.linen.max_pool` and `flax.nnx.max_pool`. The results and the gradients are the same
    to the bit where windows do not overlap: of equal entries the first one has the gradient. Where they overlap the
    gradient differs by rounding.

    Args:
        inputs: (..., spatial dimensions, features), floating or integer.
        window_shape: the lengths of a window, one for each spatial dimension.
        strides: the distances of windows, likewise. 1 each by default.
        padding: "VALID", "SAME", or (before, after) for each spatial dimension.

    Returns:
        (..., windows along each dimension, features), of the dtype of `inputs`.

    Raises:
        ValueError: lengths do not match, a window is larger than the inputs with their padding, or it has more than 64
            entries, where `jax.lax.reduce_window` is right.

    Example:
        >>> import jax.numpy as jnp
        >>> max_pool(jnp.arange(16.0).reshape(1, 4, 4, 1), (2, 2), strides=(2, 2)).ravel().tolist()
        [5.0, 7.0, 13.0, 15.0]
    """
    inputs = jnp.asarray(inputs)
    least = -jnp.inf if jnp.issubdtype(inputs.dtype, jnp.floating) else jnp.iinfo(inputs.dtype).min
    return functools.reduce(_larger, _views("max_pool", inputs, window_shape, strides, padding, least))


@answers("avg_pool")
def avg_pool(
    inputs: jax.Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
    count_include_pad: bool = True,
) -> jax.Array:
    """The mean of each window. The arguments are those of `flax.linen.avg_pool`.

    Args:
        inputs, window_shape, strides, padding: as of `max_pool`, floating.
        count_include_pad: whether the zeros of the padding count.

    Returns:
        (..., windows along each dimension, features), of the dtype of `inputs`.

    Raises:
        ValueError: as of `max_pool`.

    Example:
        >>> import jax.numpy as jnp
        >>> avg_pool(jnp.arange(16.0).reshape(1, 4, 4, 1), (2, 2), strides=(2, 2)).ravel().tolist()
        [2.5, 4.5, 10.5, 12.5]
    """
    inputs = jnp.asarray(inputs)

    def total(x: jax.Array) -> jax.Array:
        return functools.reduce(operator.add, _views("avg_pool", x, window_shape, strides, padding, 0))

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
    _check(name, inputs.shape, window, steps)
    first = inputs.ndim - 1 - len(window)
    spatial = inputs.shape[first:-1]
    pads = lax.padtype_to_pads(spatial, window, steps, padding) if isinstance(padding, str) else padding
    if len(pads) != len(window):
        raise ValueError(f"{name}: padding must have a pair for each of the {len(window)} dimensions, got {padding!r}")
    windows = Windows((*(1,) * first, *window, 1), (*(1,) * first, *steps, 1), (*((0, 0),) * first, *pads, (0, 0)))
    for size, length, (low, high) in zip(window, spatial, pads, strict=True):
        if isinstance(length, int) and size > low + length + high:
            raise ValueError(f"{name}: a window of {window} is larger than inputs of {inputs.shape} with their padding")
    return list(views(inputs, windows, fill))


def _check(name: str, shape: tuple[int, ...], window: tuple[int, ...], steps: tuple[int, ...]) -> None:
    if len(shape) < len(window) + 1 or len(steps) != len(window) or not window or min(*window, *steps) < 1:
        raise ValueError(
            f"{name}: inputs must be (..., {len(window)} spatial dimensions, features), and window_shape and strides "
            f"positive and as many, got inputs of {shape}, window_shape {window}, strides {steps}"
        )
    if math.prod(window) > MOST_PLACES:
        raise ValueError(
            f"{name}: a window of {window} has more than {MOST_PLACES} entries; take jax.lax.reduce_window, or the "
            f"{'maximum' if name == 'max_pool' else 'mean'} over the axes where it is the whole image"
        )
