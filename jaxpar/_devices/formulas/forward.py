"""Convolutions with many channels as matrix products.

XLA on CPUs computes them place by place. That is slower than a product where rows of an image are short: by a factor of
90 for 2 × 2 with 512 channels.

- `_by_columns` puts the columns under a window beside each other. It multiplies once for each row of the window.
- `winograd.convolution` needs less than half of the products for a window of 3 × 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import winograd
from .filter_gradient import FilterGradient
from .filter_products import view_at
from .orders import channels_last, reordered
from .pooling import MOST_PLACES

_Edges = Sequence[tuple[int, int, int]]  # zeros before and after each spatial axis, and between its entries
_CHANNELS_LAST = (0, 3, 1, 2)
# By columns: at most so many places of a result, and then at least so many products of channels and features.
_TINY, _SMALL, _OF_SMALL = 4, 16, 256 * 256
_WINDOW = 25  # places of a window at most: larger ones have few results, and XLA's own is a product there


def forward(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any]) -> jax.Array | None:
    """The convolution, or None where XLA's is as fast or where no formula applies.

    Args:
        lhs, rhs: the operands, float32, of known sizes.
        params: of the primitive, without groups.
    """
    numbers = params["dimension_numbers"]
    if numbers.lhs_spec != _CHANNELS_LAST or numbers.out_spec != _CHANNELS_LAST:
        return None
    if {*params["window_strides"], *params["rhs_dilation"]} != {1}:
        return None
    out, inner, *window = numbers.rhs_spec
    axes = (*window, inner, out)
    edges = [(*edge, between - 1) for edge, between in zip(params["padding"], params["lhs_dilation"], strict=True)]
    formula = _choose(lhs.shape, [rhs.shape[axis] for axis in axes], edges)
    if formula is winograd.convolution:
        in_order = lax.transpose(rhs, (*window, *sorted((inner, out))))  # nothing is moved in memory
        return winograd.convolution(lhs, in_order, params["padding"], is_turned=out < inner)
    return formula and formula(lhs, lax.transpose(rhs, axes), edges)


def forward_in_loop(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any]) -> jax.Array | None:
    """The convolution as products, where XLA's own is number by number. None where the window is too large.

    Args:
        lhs, rhs: the operands, float32, of known sizes.
        params: of the primitive, without groups.
    """
    numbers = params["dimension_numbers"]
    out, inner, *window = numbers.rhs_spec
    weight = lax.transpose(rhs, (*window, inner, out))
    if math.prod(weight.shape[:-2]) > MOST_PLACES:
        return None
    edges = [(*edge, between - 1) for edge, between in zip(params["padding"], params["lhs_dilation"], strict=True)]
    x = _pad(channels_last(lhs, numbers.lhs_spec), edges)
    strides, dilation = params["window_strides"], params["rhs_dilation"]
    lengths = [(size - 1) * by + 1 for size, by in zip(weight.shape, dilation, strict=False)]
    sizes = [(size - length) // by + 1 for size, length, by in zip(x.shape[1:], lengths, strides, strict=False)]
    if min(sizes) < 1:
        return None
    if len(window) == 2 and {*strides, *dilation} == {1} and weight.shape[1] > 1:
        y = _by_columns(x, weight, [(0, 0, 0)] * 2)
    else:
        y = _by_patches(
            x, weight, FilterGradient(weight.shape[:-2], tuple(strides), tuple(dilation), (0,) * len(sizes)), sizes
        )
    return reordered(y, (0, y.ndim - 1, *range(1, y.ndim - 1)), numbers.out_spec)


def _by_patches(x: jax.Array, w: jax.Array, problem: FilterGradient, sizes: Sequence[int]) -> jax.Array:
    """N x spatial x O from N x spatial x C and a filter, window x C x O. All that is under the window is copied."""
    views = [view_at(x, tuple(sizes), place, problem) for place in np.ndindex(*problem.window)]
    patches = jnp.concatenate(views, -1)
    y = patches.reshape(-1, patches.shape[-1]) @ w.reshape(-1, w.shape[-1])
    return y.reshape(*patches.shape[:-1], w.shape[-1])


def _choose(images: Sequence[int], weight: Sequence[int], edges: _Edges) -> Callable[..., jax.Array] | None:
    """By the shapes, NHWC and HWIO. The limits were measured against XLA's own (benchmarks/NOTES.md)."""
    high, wide = (
        size + (size - 1) * between + low + up - length + 1
        for size, (low, up, between), length in zip(images[1:3], edges, weight, strict=False)
    )
    if min(high, wide) < 1 or not 1 < math.prod(weight[:2]) <= _WINDOW:
        return None
    is_dilated, places = any(between for _, _, between in edges), high * wide
    if tuple(weight[:2]) == (3, 3) and not is_dilated and winograd.pays(images[0], (high, wide), *weight[2:]):
        return winograd.convolution
    is_small = places <= _SMALL and (weight[2] * weight[3] >= _OF_SMALL or is_dilated)
    return _by_columns if is_small or places <= _TINY else None


def _by_columns(x: jax.Array, w: jax.Array, edges: _Edges) -> jax.Array:
    """NHWC from NHWC and HWIO, with strides of 1."""
    rows, columns, channels, features = w.shape
    x = _pad(x, edges)
    wide = x.shape[2] - columns + 1
    beside = jnp.concatenate([x[:, :, at : at + wide] for at in range(columns)], -1)
    high = x.shape[1] - rows + 1
    of_rows = [
        jnp.einsum("nhwk,ko->nhwo", beside[:, at : at + high], w[at].reshape(columns * channels, features))
        for at in range(rows)
    ]
    return sum(of_rows[1:], of_rows[0])


def _pad(x: jax.Array, edges: _Edges) -> jax.Array:
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *edges, (0, 0, 0)])
