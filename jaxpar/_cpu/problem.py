"""One convolution: how its window lies over the images, read from the parameters of lax's primitive.

A convolution of images x with a filter w has the results

    y[n, p, o] = sum over places k and channels c of x[n, strides * p + dilation * k - low, c] * w[k, c, o]

A `ConvProblem` is what stands in these brackets. A forward formula computes y from x and w. The gradient of the filter
computes w from x and the cotangent of y: it sums over n and p instead.

Formulas take images as N x spatial x C and filters as window x C x O. The functions at the end bring the operands of
the primitive into this order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Sizes = tuple[int, ...]
Spec = Sequence[int]
"""Which axis is what the primitive calls batch, features, and each spatial axis; of a filter: out, in, spatial."""

HALVES = jnp.bfloat16, jnp.float16
"""The dtypes of half precision. Sums of them are computed in float32."""

# The gradient of a filter has a window so many times as large as its result, where its layouts may be those of images.
_LARGER = 4


class ConvProblem(NamedTuple):
    """How the window of a convolution lies over its images. Each attribute has an entry for each spatial axis.

    Attributes:
        window: the sizes of the filter.
        results: the sizes of what the convolution gives.
        strides: the distances of neighbouring results in the images.
        dilation: the distances of neighbouring places of the window in the images.
        low: how many zeros stand before the images. May be negative.
        is_turned: of a gradient of a filter: whether the primitive has the cotangent first and the images second. So it
            is for a convolution that enlarges images. The primitive's result is then window x O x C.
    """

    window: Sizes
    results: Sizes
    strides: Sizes
    dilation: Sizes
    low: Sizes
    is_turned: bool = False


def has_formulas(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any]) -> bool:
    """Whether formulas are for such operands: of known sizes, of which none is 0, nor one of the result.

    Operands and result are float32, or all of them of one of `HALVES`.
    """
    sizes = (*lhs.shape, *rhs.shape)
    # A symbolic size of `jax.export` cannot be compared with a limit.
    if not all(isinstance(size, int) for size in sizes) or 0 in sizes or lhs.ndim < 3:
        return False
    result = params["preferred_element_type"] or lhs.dtype
    if lhs.dtype not in (jnp.float32, *HALVES) or not rhs.dtype == lhs.dtype == result:
        return False
    return min(params["window_strides"]) > 0 and min(result_sizes(lhs, rhs, params)) > 0


def result_sizes(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any]) -> Sizes:
    """The spatial sizes of the primitive's result."""
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


def filter_gradient(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any]) -> ConvProblem | None:
    """The problem whose filter's gradient the primitive computes, or None if it computes something else.

    Such a primitive has a large window, which is the cotangent, and a small result, which is the gradient. Its strides
    are the dilation of the problem, and its dilation of the window are the strides.

    Args:
        lhs, rhs: the operands, of any layout, for which `has_formulas` holds.
        params: of the primitive.
    """
    numbers = params["dimension_numbers"]
    (kept, summed, *_), (features, examples, *_) = numbers.lhs_spec, numbers.rhs_spec
    if summed > kept:
        return None  # the axis of the examples is the first in memory, so this is no gradient, or a slow one
    window, second = result_sizes(lhs, rhs, params), _spatial(rhs, numbers.rhs_spec)
    is_certain = summed == examples == 0 < features
    if not is_certain and _LARGER * math.prod(window) > math.prod(second):
        return None
    low = tuple(before for before, _ in params["padding"])
    between, strides, dilation = (tuple(params[name]) for name in ("lhs_dilation", "rhs_dilation", "window_strides"))
    if {*between} == {1}:
        return ConvProblem(window, second, strides, dilation, low)
    if {*strides} != {1}:
        return None
    # The first operand has gaps, as a cotangent has them where images are enlarged. So the second one has the images,
    # and places count from their other end.
    dilation, low = (tuple(-x for x in sizes) for sizes in (dilation, low))
    return ConvProblem(window, _spatial(lhs, numbers.lhs_spec), between, dilation, low, is_turned=True)


def _spatial(array: jax.Array, spec: Spec) -> Sizes:
    return tuple(array.shape[axis] for axis in spec[2:])


def summed_axis_first(x: jax.Array, spec: Spec) -> jax.Array:
    """An operand of a filter's gradient as N x spatial x channels. N, which is summed over, is its feature axis."""
    return lax.transpose(x, _summed_first(spec))


def shape_summed_first(x: jax.Array, spec: Spec) -> Sizes:
    """The shape of `summed_axis_first`."""
    return tuple(x.shape[axis] for axis in _summed_first(spec))


def _summed_first(spec: Spec) -> Spec:
    kept, summed, *spatial = spec
    return (summed, *spatial, kept)


def channels_last(x: jax.Array, spec: Spec) -> jax.Array:
    """Images as N x spatial x C."""
    batch, features, *spatial = spec
    return lax.transpose(x, (batch, *spatial, features))


def as_result(w: jax.Array, spec: Spec) -> jax.Array:
    """The gradient of a filter, window x C x O, with its axes where the primitive has them in its result."""
    axes = (w.ndim - 2, w.ndim - 1, *range(w.ndim - 2))  # of what the primitive calls batch, features, spatial
    return lax.transpose(w, tuple(np.array(axes)[np.argsort(spec)].tolist()))


def reorder(x: jax.Array, spec: Spec, wanted: Spec) -> jax.Array:
    """Images of one order of axes in another one."""
    axes = [0] * x.ndim
    for axis, place in zip(spec, wanted, strict=True):
        axes[place] = axis
    return lax.transpose(x, axes)
