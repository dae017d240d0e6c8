"""Convolutions in groups of channels.

XLA on CPUs computes them number by number, at 0.3 to 5 GFLOP/s.

- With one channel a group (depthwise) the result is a sum of shifted images times weights, which is one loop over
  whole vectors. The gradient of the filter sums their products with the cotangent: a dozen rows are added as whole
  arrays before what is left is summed to a number a channel.
- With many channels a group each group is a convolution of its own.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .pooling import MOST_PLACES
from .problem import ConvProblem, as_result, filter_gradient, reorder, summed_axis_first

_Convolve = Callable[[jax.Array, jax.Array, dict[str, Any]], jax.Array]
_MOST_GROUPS = 64  # each is an operation of the program
_OF_GROUP = 128  # products of channels and features of a group, at least, for each group to be faster alone
_MOST_ROWS = 16  # that are added as whole arrays


def grouped(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any], convolve: _Convolve) -> jax.Array | None:
    """The convolution in groups, or None where XLA's is as fast or where no formula applies.

    Args:
        lhs, rhs: the operands, float32, of known sizes.
        params: of the primitive, with groups of features or of the batch.
        convolve: computes the convolution of one group.
    """
    numbers, by_batch = params["dimension_numbers"], params["batch_group_count"]
    if by_batch == 1:
        if rhs.shape[numbers.rhs_spec[1]] == 1:
            return _depthwise(lhs, rhs, params)
        of_group = rhs.shape[numbers.rhs_spec[1]] * rhs.shape[numbers.rhs_spec[0]] // params["feature_group_count"]
        return _each_group(lhs, rhs, params, convolve) if of_group >= _OF_GROUP else None
    problem = filter_gradient(lhs, rhs, params)
    if problem is None:
        return None
    if lhs.shape[numbers.lhs_spec[0]] == rhs.shape[numbers.rhs_spec[0]] == by_batch:
        return _filter_of_depthwise(lhs, rhs, numbers, problem)
    return _each_group(lhs, rhs, params, convolve)


def _each_group(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any], convolve: _Convolve) -> jax.Array | None:
    numbers, by_features = params["dimension_numbers"], params["feature_group_count"]
    count = by_features * params["batch_group_count"]
    if count > _MOST_GROUPS:
        return None
    split = numbers.lhs_spec[1 if by_features > 1 else 0]
    alone = {**params, "feature_group_count": 1, "batch_group_count": 1}
    groups = zip(jnp.split(lhs, count, split), jnp.split(rhs, count, numbers.rhs_spec[0]), strict=True)
    return jnp.concatenate([convolve(x, w, alone) for x, w in groups], numbers.out_spec[1])


def _depthwise(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any]) -> jax.Array | None:
    """The sum of what the images have at each place of the window, times its weights."""
    numbers = params["dimension_numbers"]
    channels, _, *window = (rhs.shape[axis] for axis in numbers.rhs_spec)
    if channels != lhs.shape[numbers.lhs_spec[1]] or math.prod(window) > MOST_PLACES:
        return None
    spatial = numbers.lhs_spec[2:]
    edges = [(0, 0, 0)] * lhs.ndim
    for axis, (low, high), between in zip(spatial, params["padding"], params["lhs_dilation"], strict=True):
        edges[axis] = (low, high, between - 1)
    padded = lax.pad(lhs, jnp.zeros((), lhs.dtype), edges)
    # A weight for each channel at each place of the window: places x C. Images keep their order of axes.
    weights = lax.transpose(rhs, (*numbers.rhs_spec[2:], numbers.rhs_spec[1], numbers.rhs_spec[0]))
    total = None
    for place, weight in zip(product(*map(range, window)), weights.reshape(-1, channels), strict=True):
        # The entry of the images that each result has at this place.
        view = padded
        for axis, at, size, dilation, stride in zip(
            spatial, place, window, params["rhs_dilation"], params["window_strides"], strict=True
        ):
            end = padded.shape[axis] - (size - 1 - at) * dilation
            view = lax.slice_in_dim(view, at * dilation, end, stride, axis)
        term = view * lax.broadcast_in_dim(weight, view.shape, (numbers.lhs_spec[1],))
        total = term if total is None else total + term
    assert total is not None
    return reorder(total, numbers.lhs_spec, numbers.out_spec)


def _filter_of_depthwise(
    lhs: jax.Array, rhs: jax.Array, numbers: lax.ConvDimensionNumbers, problem: ConvProblem
) -> jax.Array | None:
    """The sum of products of images and cotangent for each place of the window."""
    if problem.is_turned or math.prod(problem.window) > MOST_PLACES:
        return None
    images, cotangent = summed_axis_first(lhs, numbers.lhs_spec), summed_axis_first(rhs, numbers.rhs_spec)
    channels, (high, *sides) = images.shape[-1], problem.results
    # The images from the first entry under the window to the last one.
    edges = [(0, 0, 0)] * images.ndim
    for axis, (size, window, stride, dilation, low) in enumerate(
        zip(problem.results, problem.window, problem.strides, problem.dilation, problem.low, strict=True), start=1
    ):
        length = (size - 1) * stride + (window - 1) * dilation + 1
        edges[axis] = (low, length - low - images.shape[axis], 0)
    padded = lax.pad(images, jnp.zeros((), images.dtype), edges)

    # For a place of the window: the products of images and cotangent, N x results x C, summed to C. So many rows are
    # added as whole arrays first, since XLA's own sum goes number by number.
    rows = max(n for n in range(1, _MOST_ROWS + 1) if high % n == 0)

    def at(place: tuple[int, ...]) -> jax.Array:
        starts = [k * dilation for k, dilation in zip(place, problem.dilation, strict=True)]
        terms: list[jax.Array] = []
        for row in range(rows):
            first, by = starts[0] + row * problem.strides[0], rows * problem.strides[0]
            view = lax.slice_in_dim(padded, first, first + (high // rows - 1) * by + 1, by, 1)
            for axis, (start, size, stride) in enumerate(zip(starts[1:], sides, problem.strides[1:], strict=True), 2):
                view = lax.slice_in_dim(view, start, start + (size - 1) * stride + 1, stride, axis)
            terms.append(view * lax.slice_in_dim(cotangent, row, None, rows, 1))
        total = functools.reduce(operator.add, terms)
        return lax.optimization_barrier(total).sum(range(total.ndim - 1))  # or XLA computes it number by number

    sums = jnp.stack([at(place) for place in np.ndindex(*problem.window)])
    return as_result(sums.reshape(*problem.window, 1, channels), numbers.out_spec)
