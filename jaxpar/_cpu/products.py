"""Convolutions as products of matrices, and products over several axes as products of two matrices.

The gradient of a filter sums over all examples and all results (see `problem`). There are two ways:

- By patches: the views of the images for all places of the window beside each other, and one product.
- By shifted columns of the images and shifted rows of the cotangent: the product has the same terms, and fewer copies
  are made where there are many channels. It needs strides and dilation of 1 and two spatial axes.

Copies that leave the cache cost more than the products, so a few examples are computed at a time.

XLA on CPUs computes a convolution with many channels place by place. That is slower than a product where rows of an
image are short: by a factor of 90 for 2 x 2 with 512 channels. `by_columns` and `by_patches` are for these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from . import primitive
from .problem import HALVES, ConvProblem, Sizes

_BLOCK_BYTES = 1 << 20  # of the copies that are made at a time: they stay in the cache of a core

Edges = Sequence[tuple[int, int, int]]
"""Zeros before and after each spatial axis, and between its entries."""


# The gradient of a filter.


class _Formula(NamedTuple):
    """One of the two ways.

    Attributes:
        sides: `sides(images, cotangent)`: the views that are put beside each other on the left, and on the right. The
            product of both is the gradient.
        lengths: of the left and of the right side.
        arranged: the gradient, window x C x O, from that product.
        copied: how many numbers `sides` copies for an example.
    """

    sides: Callable[[jax.Array, jax.Array], tuple[list[jax.Array], list[jax.Array]]]
    lengths: tuple[int, int]
    arranged: Callable[[jax.Array], jax.Array]
    copied: int


def gradient_of_filter(images: jax.Array, cotangent: jax.Array, problem: ConvProblem, in_blocks: bool) -> jax.Array:
    """The gradient of the filter, window x C x O.

    Args:
        images: N x spatial x C.
        cotangent: of the results, N x spatial x O.
        problem: how they lie over each other.
        in_blocks: whether to take a few examples at a time, in a loop.
    """
    formula = _choose(images.shape, cotangent.shape[-1], problem)
    left_length, right_length = formula.lengths
    is_swapped = left_length > right_length  # a product is fastest where its last axis is the longer one

    def product(images: jax.Array, cotangent: jax.Array) -> jax.Array:
        left, right = formula.sides(images, cotangent)
        return _product(right, left) if is_swapped else _product(left, right)

    examples = images.shape[0]
    size = _block_size(examples, formula)
    if in_blocks and 2 * size <= examples:
        total = _in_blocks(product, size, images, cotangent)
    else:
        total = lax.optimization_barrier(product(images, cotangent))  # or XLA turns the factors and not the result
    return formula.arranged(total.T if is_swapped else total)


def numbers_copied(images: Sizes, features: int, problem: ConvProblem) -> int:
    """How many numbers are copied for an example, for images of this shape."""
    return _choose(images, features, problem).copied


def _choose(images: Sizes, features: int, problem: ConvProblem) -> _Formula:
    """The formula that copies less."""
    channels, window = images[-1], problem.window
    is_plain = {*problem.strides, *problem.dilation} == {1}
    copied = math.prod(problem.results) * math.prod(window) * channels
    copied = 0 if is_plain and math.prod(window) == 1 else copied

    def patches(images: jax.Array, cotangent: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        return [view_at(images, place, problem) for place in np.ndindex(*window)], [cotangent]

    lengths = math.prod(window) * channels, features
    by_patches = _Formula(patches, lengths, lambda product: product.reshape(*window, channels, features), copied)
    if len(window) != 2 or not is_plain:
        return by_patches
    rows, columns = window
    shifted = images[1] * problem.results[1] * (columns * channels + rows * features)
    if copied < shifted:
        return by_patches

    def arranged(product: jax.Array) -> jax.Array:
        return product.reshape(columns, channels, rows, features).transpose(2, 0, 1, 3)

    def sides(images: jax.Array, cotangent: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        (top, left), (high, wide) = problem.low, (images.shape[1], cotangent.shape[2])
        of_images = [entries_from(images, 2, column - left, wide) for column in range(columns)]
        return of_images, [entries_from(cotangent, 1, top - row, high) for row in range(rows)]

    return _Formula(sides, (columns * channels, rows * features), arranged, shifted)


def view_at(images: jax.Array, place: Sizes, problem: ConvProblem) -> jax.Array:
    """The entry of the images that each result has at one place of the window: N x results x C."""
    for axis, (size, at, stride, dilation, low) in enumerate(
        zip(problem.results, place, problem.strides, problem.dilation, problem.low, strict=True), start=1
    ):
        images = entries_from(images, axis, at * dilation - low, (size - 1) * stride + 1)
        images = lax.slice_in_dim(images, 0, None, stride, axis)
    return images


def entries_from(x: jax.Array, axis: int, start: int, size: int) -> jax.Array:
    """As many entries of an axis from `start` on. Those outside are zeros."""
    edges = [(0, 0, 0)] * x.ndim
    edges[axis] = (-start, start + size - x.shape[axis], 0)
    return lax.pad(x, jnp.zeros((), x.dtype), edges)


def _product(left: list[jax.Array], right: list[jax.Array]) -> jax.Array:
    """The sum over all axes but the last, along which the views of each side are put beside each other."""
    a, b = (jnp.concatenate(views, axis=-1) for views in (left, right))
    a, b = (x.reshape(-1, x.shape[-1]) for x in (a, b))
    return lax.dot_general(a, b, (((0,), (0,)), ((), ())))


def _block_size(examples: int, formula: _Formula) -> int:
    """How many examples to take at a time: as many as leave their copies in the cache, and divide their number."""
    result = math.prod(formula.lengths)
    most = max(_BLOCK_BYTES, 8 * result) // max(1, 4 * formula.copied)  # a result is read and written each time
    return max((n for n in range(1, examples + 1) if examples % n == 0 and n <= most), default=1)


def _in_blocks(
    product: Callable[[jax.Array, jax.Array], jax.Array], size: int, images: jax.Array, cotangent: jax.Array
) -> jax.Array:
    """The sum of the products of `size` examples at a time."""
    blocks = images.reshape(-1, size, *images.shape[1:]), cotangent.reshape(-1, size, *cotangent.shape[1:])
    shape = jax.eval_shape(product, blocks[0][0], blocks[1][0]).shape

    def add(total: jax.Array, block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + product(*block), None

    return lax.scan(add, jnp.zeros(shape, images.dtype), blocks)[0]


# The convolution itself.


def by_columns(x: jax.Array, w: jax.Array, edges: Edges) -> jax.Array:
    """NHWC from NHWC and HWIO, with strides of 1: the columns under the window beside each other, a product a row."""
    rows, columns, channels, features = w.shape
    x = pad(x, edges)
    wide = x.shape[2] - columns + 1
    beside = jnp.concatenate([x[:, :, at : at + wide] for at in range(columns)], -1)
    high = x.shape[1] - rows + 1
    of_rows = [
        jnp.einsum("nhwk,ko->nhwo", beside[:, at : at + high], w[at].reshape(columns * channels, features))
        for at in range(rows)
    ]
    return sum(of_rows[1:], of_rows[0])


def by_patches(x: jax.Array, w: jax.Array, problem: ConvProblem) -> jax.Array:
    """N x spatial x O from N x spatial x C and window x C x O. All that is under the window is copied."""
    patches = jnp.concatenate([view_at(x, place, problem) for place in np.ndindex(*problem.window)], -1)
    y = patches.reshape(-1, patches.shape[-1]) @ w.reshape(-1, w.shape[-1])
    return y.reshape(*patches.shape[:-1], w.shape[-1])


def pad(x: jax.Array, edges: Edges) -> jax.Array:
    """N x spatial x C with zeros around and between its entries."""
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *edges, (0, 0, 0)])


# Products over several axes. The gradient of a weight by a batch of texts is a sum over texts and over their tokens.
# XLA on CPUs transposes one operand in memory for that, and multiplies at a third of the speed that the same matrices
# have with one summed axis.


def multiply(lhs: jax.Array, rhs: jax.Array, *, place: primitive.Place, **params: Any) -> jax.Array:
    """`lax.dot_general`, with summed axes that are next to each other in both operands made one.

    Args:
        lhs, rhs: the operands.
        place: where it is. A partitioner may have split the axes, so they stay apart where there is one.
        params: of the primitive.
    """
    (left, right), batched = params["dimension_numbers"]
    if place.is_partitioned or len(left) < 2 or any(batched) or not (_are_next(left) and _are_next(right)):
        return lax.dot_general_p.bind(lhs, rhs, **params)
    a, b = _merge(lhs, left), _merge(rhs, right)
    numbers = (((left[0],), (right[0],)), batched)
    return lax.dot_general_p.bind(a, b, **{**params, "dimension_numbers": numbers})


def _are_next(axes: Sizes) -> bool:
    return list(axes) == list(range(axes[0], axes[0] + len(axes)))


def _merge(x: jax.Array, axes: Sizes) -> jax.Array:
    """The array with these axes as one."""
    first, after = axes[0], axes[-1] + 1
    return lax.reshape(x, (*x.shape[:first], math.prod(x.shape[first:after]), *x.shape[after:]))


product_p = primitive.make(lax.dot_general_p, multiply, bilinear=True)


# Sums of half precision, such as the gradient of a bias. XLA on CPUs computes one in float32 too, but in one loop with
# what it is a sum of, number by number. The sum of an array of float32 takes a tenth of that.


def _sum_in_float32(operand: jax.Array, *, place: primitive.Place, **params: Any) -> jax.Array:
    del place
    return lax.reduce_sum_p.bind(operand.astype(jnp.float32), **params).astype(operand.dtype)


_half_sum_p = primitive.make(lax.reduce_sum_p, _sum_in_float32)


def half_sum(eqn: JaxprEqn) -> JaxprEqn | None:
    """The equation of `reduce_sum` with its sum in float32, or None if its operand is not of half precision."""
    operand: Any = eqn.invars[0].aval
    return eqn.replace(primitive=_half_sum_p) if operand.dtype in HALVES else None
