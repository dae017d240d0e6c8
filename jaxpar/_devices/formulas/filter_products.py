"""The gradient of a filter as matrix products of shifted views.

With images x, the cotangent g of the result and a window of places k, it is

    w[k, c, o] = sum over examples f and places p of x[f, strides * p + dilation * k - low, c] * g[f, p, o]

- By patches: the views of x for all k beside each other, and one product.
- By shifted columns of x and shifted rows of g: the product has the same terms, and fewer copies are made where there
  are many channels. It needs strides and dilation of 1 and two spatial axes.

Copies that leave the cache cost more than the products, so a few examples are computed at a time. A product is fastest
where its last axis is the longer one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .filter_gradient import FilterGradient

_BLOCK_BYTES = 1 << 20  # of the copies that are made at a time: they stay in the cache of a core


class _Formula(NamedTuple):
    """How a gradient is computed.

    Attributes:
        sides: what is put beside each other on the left and on the right, whose product is the result.
        lengths: of the left and of the right side.
        arranged: the result, window x C x O, from that product.
        copied: how many numbers `sides` copies for an example.
    """

    sides: Callable[[jax.Array, jax.Array], tuple[list[jax.Array], list[jax.Array]]]
    lengths: tuple[int, int]
    arranged: Callable[[jax.Array], jax.Array]
    copied: int


def gradient_of_filter(images: jax.Array, cotangent: jax.Array, problem: FilterGradient, in_blocks: bool) -> jax.Array:
    """The gradient, window x C x O.

    Args:
        images: F x spatial x C, where F is summed over.
        cotangent: F x spatial x O.
        problem: how they lie over each other.
        in_blocks: whether to take a few examples at a time, in a loop.
    """
    formula = _choose(images.shape, cotangent.shape, problem)
    examples = images.shape[0]
    result = math.prod(problem.window) * images.shape[-1] * cotangent.shape[-1]
    most = max(_BLOCK_BYTES, 8 * result) // max(1, 4 * formula.copied)  # a result is read and written each time
    size = max((n for n in range(1, examples + 1) if examples % n == 0 and n <= most), default=1)
    is_turned = formula.lengths[0] > formula.lengths[1]

    def product(images: jax.Array, cotangent: jax.Array) -> jax.Array:
        left, right = formula.sides(images, cotangent)
        return _product(right, left) if is_turned else _product(left, right)

    if in_blocks and 2 * size <= examples:
        total = _in_blocks(product, size, images, cotangent)
    else:
        total = lax.optimization_barrier(product(images, cotangent))  # or XLA turns the factors and not the result
    return formula.arranged(total.T if is_turned else total)


def numbers_copied(images: tuple[int, ...], cotangent: tuple[int, ...], problem: FilterGradient) -> int:
    """How many numbers are copied for an example, by the shapes."""
    return _choose(images, cotangent, problem).copied


def _choose(images: tuple[int, ...], cotangent: tuple[int, ...], problem: FilterGradient) -> _Formula:
    """The formula that copies less."""
    channels, features, window = images[-1], cotangent[-1], problem.window
    is_plain = {*problem.strides, *problem.dilation} == {1}
    copied = math.prod(cotangent[1:-1]) * math.prod(window) * channels
    copied = 0 if is_plain and math.prod(window) == 1 else copied

    def patches(images: jax.Array, cotangent: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        places = np.ndindex(*window)
        return [view_at(images, cotangent.shape[1:-1], place, problem) for place in places], [cotangent]

    lengths = math.prod(window) * channels, features
    by_patches = _Formula(patches, lengths, lambda product: product.reshape(*window, channels, features), copied)
    if len(window) != 2 or not is_plain:
        return by_patches
    rows, columns = window
    shifted = images[1] * cotangent[2] * (columns * channels + rows * features)
    if copied < shifted:
        return by_patches

    def arranged(product: jax.Array) -> jax.Array:
        return product.reshape(columns, channels, rows, features).transpose(2, 0, 1, 3)

    def sides(images: jax.Array, cotangent: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        return _shifted_columns_and_rows(images, cotangent, problem)

    return _Formula(sides, (columns * channels, rows * features), arranged, shifted)


def view_at(images: jax.Array, sizes: tuple[int, ...], place: tuple[int, ...], problem: FilterGradient) -> jax.Array:
    """What the images have at one place of the window: as many entries as the cotangent has."""
    for axis, (size, at, stride, dilation, low) in enumerate(
        zip(sizes, place, problem.strides, problem.dilation, problem.low, strict=True), start=1
    ):
        images = entries_from(images, axis, at * dilation - low, (size - 1) * stride + 1)
        images = lax.slice_in_dim(images, 0, None, stride, axis)
    return images


def _shifted_columns_and_rows(
    images: jax.Array, cotangent: jax.Array, problem: FilterGradient
) -> tuple[list[jax.Array], list[jax.Array]]:
    (rows, columns), (top, left) = problem.window, problem.low
    high, wide = images.shape[1], cotangent.shape[2]
    of_images = [entries_from(images, 2, column - left, wide) for column in range(columns)]
    return of_images, [entries_from(cotangent, 1, top - row, high) for row in range(rows)]


def entries_from(x: jax.Array, axis: int, start: int, size: int) -> jax.Array:
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
    product: Callable[[jax.Array, jax.Array], jax.Array], size: int, images: jax.Array, cotangent: jax.Array
) -> jax.Array:
    """The sum of the products of `size` examples at a time."""
    blocks = images.reshape(-1, size, *images.shape[1:]), cotangent.reshape(-1, size, *cotangent.shape[1:])
    shape = jax.eval_shape(product, blocks[0][0], blocks[1][0]).shape

    def add(total: jax.Array, block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + product(*block), None

    return lax.scan(add, jnp.zeros(shape, images.dtype), blocks)[0]
