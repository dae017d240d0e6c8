"""One convolution, read from the parameters of its primitive."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Sizes = tuple[int, ...]


class FilterGradient(NamedTuple):
    """A convolution with a large window and a small result, as the gradient of a filter is one.

    The names are those of the convolution that it is the gradient of. `images` are F x spatial x C and `cotangent` is
    F x spatial x O, where F is the axis that is summed over.

    Attributes:
        window: the spatial shape of the result.
        strides, dilation: of the convolution that it is the gradient of.
        low: how many zeros stand before the images on each spatial axis. May be negative.
        is_turned: whether images and cotangent have changed their roles. So they do for a convolution that enlarges
            images: its strides are those of the cotangent. The result is then window x O x C.
    """

    window: Sizes
    strides: Sizes
    dilation: Sizes
    low: Sizes
    is_turned: bool = False


def has_formulas(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any]) -> bool:
    """Whether formulas are for such operands: float32, of known sizes, of which none is 0, nor one of the result."""
    sizes = (*lhs.shape, *rhs.shape)
    if not all(isinstance(size, int) for size in sizes) or 0 in sizes or lhs.ndim < 3:
        return False  # symbolic sizes are compared to nothing
    return min(params["window_strides"]) > 0 and min(_result(lhs, rhs, params)) > 0 and _is_float32(lhs, rhs, params)


def filter_gradient(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any]) -> FilterGradient | None:
    """The convolution as the gradient of a filter. None where it is another one, or where no formula applies.

    Args:
        lhs, rhs: the operands, of any layout, for which `has_formulas` holds.
        params: of the primitive.
    """
    numbers = params["dimension_numbers"]
    (kept, summed, *_), (features, examples, *_) = numbers.lhs_spec, numbers.rhs_spec
    if summed > kept:
        return None  # the axis of the examples is the first in memory, so this is no gradient, or a slow one
    result, places = _result(lhs, rhs, params), _spatial(rhs, numbers.rhs_spec)
    is_certain = summed == examples == 0 < features
    if not is_certain and _LARGER * math.prod(result) > math.prod(places):
        return None
    low = tuple(before for before, _ in params["padding"])
    enlarged, strides, dilation = (tuple(params[name]) for name in ("lhs_dilation", "rhs_dilation", "window_strides"))
    if {*enlarged} == {1}:
        return FilterGradient(result, strides, dilation, low)
    if {*strides} != {1}:
        return None
    turned = (tuple(-x for x in sizes) for sizes in (dilation, low))
    return FilterGradient(result, enlarged, *turned, is_turned=True)


_LARGER = 4
"""How many times as many places the window must have as the result, where the layouts may be those of images."""


def _is_float32(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any]) -> bool:
    float32 = jnp.dtype("float32")
    return lhs.dtype == rhs.dtype == float32 and params["preferred_element_type"] in (None, float32)


def _spatial(array: jax.Array, spec: Sizes) -> Sizes:
    return tuple(array.shape[axis] for axis in spec[2:])


def _result(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any]) -> Sizes:
    """The spatial shape of the result."""
    numbers = params["dimension_numbers"]
    return tuple(
        ((image - 1) * between + 1 + low + high - (window - 1) * dilation - 1) // stride + 1
        for image, window, (low, high), between, dilation, stride in zip(
            _spatial(lhs, numbers.lhs_spec),
            _spatial(rhs, numbers.rhs_spec),
            params["padding"],
            params["lhs_dilation"],
            params["rhs_dilation"],
            params["window_strides"],
            strict=True,
        )
    )
