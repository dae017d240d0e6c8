"""The gradient of a filter as matrix products of shifted views.

With images x, the cotangent g of the result and a window of places k, it is

    w[k, c, o] = sum over examples f and places p of x[f, strides * p + dilation * k - low, c] * g[f, p, o]

- `_patches` puts the views of x for all k beside each other and multiplies once.
- `_shifted_columns_and_rows` does so for the columns of x and the rows of g: its product has the same terms, and fewer
  copies are made where there are many channels. It needs strides and dilation of 1 and two spatial axes.

Copies that leave the cache cost more than the products, so a few examples are computed at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import primitive
from .filter_gradient import FilterGradient, filter_gradient, is_plain
from .forward import forward

_BLOCK_BYTES = 1 << 20  # of the copies that are made at a time: they stay in the cache of a core
_Formula = Callable[[jax.Array, jax.Array, FilterGradient], jax.Array]


def convolve(lhs: jax.Array, rhs: jax.Array, *, is_partitioned: bool, **params: Any) -> jax.Array:
    """The convolution of lax's primitive, by the formula that is fastest on a CPU.

    Args:
        lhs, rhs: the operands.
        is_partitioned: whether XLA splits this program over devices. A loop over the examples would be in its way.
        params: of the primitive.
    """
    result = None
    if is_plain(lhs, rhs, params):
        problem = filter_gradient(lhs, rhs, params)
        if problem is not None:
            return _gradient_of_filter(lhs, rhs, params["dimension_numbers"], problem, is_partitioned)
        result = None if is_partitioned else forward(lhs, rhs, params)
    return lax.conv_general_dilated_p.bind(lhs, rhs, **params) if result is None else result


def _gradient_of_filter(
    lhs: jax.Array, rhs: jax.Array, numbers: Any, problem: FilterGradient, is_partitioned: bool
) -> jax.Array:
    images, cotangent = (_summed_axis_first(x, spec) for x, spec in ((lhs, numbers.lhs_spec), (rhs, numbers.rhs_spec)))
    formula, copied = _choose(images, cotangent, problem)
    if not is_partitioned:
        formula = partial(_in_blocks, formula, copied)
    return _in_order(formula(images, cotangent, problem), numbers.out_spec)


def _summed_axis_first(x: jax.Array, spec: tuple[int, ...]) -> jax.Array:
    """F x spatial x channels. That is how both lie in memory, where the images of the model have channels last."""
    kept, summed, *spatial = spec
    return lax.transpose(x, (summed, *spatial, kept))


def _in_order(w: jax.Array, spec: tuple[int, ...]) -> jax.Array:
    """A result, window x C x O, with its axes where the primitive wants them."""
    axes = (w.ndim - 2, w.ndim - 1, *range(w.ndim - 2))  # of what it calls batch, features, spatial
    return lax.transpose(w, tuple(np.array(axes)[np.argsort(spec)].tolist()))


def _choose(images: jax.Array, cotangent: jax.Array, problem: FilterGradient) -> tuple[_Formula, int]:
    """The formula that copies less, and the bytes that it copies for one example."""
    channels, features = images.shape[-1], cotangent.shape[-1]
    places = math.prod(cotangent.shape[1:-1])
    patches = places * math.prod(problem.window) * channels
    if len(problem.window) != 2 or {*problem.strides, *problem.dilation} != {1}:
        return _patches, 4 * patches
    rows, columns = problem.window
    shifted = images.shape[1] * cotangent.shape[2] * (columns * channels + rows * features)
    return (_patches, 4 * patches) if patches < shifted else (_shifted_columns_and_rows, 4 * shifted)


def _patches(images: jax.Array, cotangent: jax.Array, problem: FilterGradient) -> jax.Array:
    """The result, window x C x O."""
    views = [_view(images, cotangent.shape[1:-1], place, problem) for place in np.ndindex(*problem.window)]
    return _product(views, [cotangent]).reshape(*problem.window, images.shape[-1], cotangent.shape[-1])


def _view(images: jax.Array, sizes: tuple[int, ...], place: tuple[int, ...], problem: FilterGradient) -> jax.Array:
    """What the images have at one place of the window: as many entries as the cotangent has."""
    for axis, (size, at, stride, dilation, low) in enumerate(
        zip(sizes, place, problem.strides, problem.dilation, problem.low, strict=True), start=1
    ):
        images = _from(images, axis, at * dilation - low, (size - 1) * stride + 1)
        images = lax.slice_in_dim(images, 0, None, stride, axis)
    return images


def _shifted_columns_and_rows(images: jax.Array, cotangent: jax.Array, problem: FilterGradient) -> jax.Array:
    """The result, rows x columns x C x O."""
    (rows, columns), (top, left) = problem.window, problem.low
    high, wide = images.shape[1], cotangent.shape[2]
    of_images = [_from(images, 2, column - left, wide) for column in range(columns)]
    of_cotangent = [_from(cotangent, 1, top - row, high) for row in range(rows)]
    y = _product(of_images, of_cotangent).reshape(columns, images.shape[-1], rows, cotangent.shape[-1])
    return y.transpose(2, 0, 1, 3)


def _from(x: jax.Array, axis: int, start: int, size: int) -> jax.Array:
    """As many entries of an axis from `start` on. Those outside are zeros."""
    edges = [(0, 0, 0)] * x.ndim
    edges[axis] = (-start, start + size - x.shape[axis], 0)
    return lax.pad(x, jnp.zeros((), x.dtype), edges)


def _product(left: list[jax.Array], right: list[jax.Array]) -> jax.Array:
    """The sum over all axes but the last, which are put beside each other."""
    a, b = (jnp.concatenate(views, axis=-1) for views in (left, right))
    a, b = (x.reshape(-1, x.shape[-1]) for x in (a, b))
    return lax.dot_general(a, b, (((0,), (0,)), ((), ())))


def _in_blocks(
    formula: _Formula, copied: int, images: jax.Array, cotangent: jax.Array, problem: FilterGradient
) -> jax.Array:
    """A formula for a few examples at a time, whose results are added."""
    examples = images.shape[0]
    result = 4 * math.prod(problem.window) * images.shape[-1] * cotangent.shape[-1]
    most = max(_BLOCK_BYTES, 2 * result) // copied  # a result is read and written each time
    size = max((n for n in range(1, examples + 1) if examples % n == 0 and n <= most), default=1)
    if 2 * size > examples:
        return formula(images, cotangent, problem)

    def add(total: jax.Array, block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + formula(*block, problem), None

    blocks = images.reshape(-1, size, *images.shape[1:]), cotangent.reshape(-1, size, *cotangent.shape[1:])
    shape = (*problem.window, images.shape[-1], cotangent.shape[-1])
    return lax.scan(add, jnp.zeros(shape, images.dtype), blocks)[0]


conv_p = primitive.make(lax.conv_general_dilated_p, convolve, bilinear=True)


def bind_convolution(function: Callable[..., Any], *args: Any) -> Any:
    """What a function of arrays computes, with this convolution in place of lax's."""
    return primitive.bind_like({lax.conv_general_dilated_p: conv_p}, function, *args)
