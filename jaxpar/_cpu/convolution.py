"""Which kernel or formula computes a convolution on a CPU, and the convolution that models call.

The limits below were measured against XLA's own convolution (benchmarks/NOTES.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from . import kernels, primitive, products, winograd
from .grouped import grouped
from .pooling import MOST_PLACES
from .problem import (
    ConvProblem,
    Sizes,
    as_result,
    channels_last,
    filter_gradient,
    has_formulas,
    reorder,
    result_sizes,
    shape_summed_first,
    summed_axis_first,
)

# Of the gradient of a filter: at least so many operations for a number that is copied. XLA's own has all threads, and
# copies have one. With several devices each has about one core, and XLA's own is slower.
_ALONE, _SHARED = 600, 120
_MOST_COPIED = 2 << 20  # numbers of one example: more are not in the cache when they are multiplied
_WINDOW = 64  # places of a window at most: each is a copy
_FEW, _MANY_EXAMPLES = 32, 128  # products for an output, of examples: XLA's own takes three times as long

# Of a convolution by columns: at most so many places of a result, and then at least so many products of channels and
# features.
_TINY, _SMALL, _OF_SMALL = 4, 16, 256 * 256
_FORWARD_WINDOW = 25  # places of a window at most: larger ones have few results, and XLA's own is a product there

# Beside the kernels: tiles win from so many products for a number of channels on, forward and of a filter, on
# processors of two makes. XLA's own wins with so few features.
_TILES, _TILES_OF_FILTER = 64, 100
_FEW_FEATURES = 6

_CHANNELS_LAST = (0, 3, 1, 2)


def convolve(lhs: jax.Array, rhs: jax.Array, *, place: primitive.Place, **params: Any) -> jax.Array:
    """The convolution of lax's primitive, by the kernel or the formula that is fastest on a CPU.

    Args:
        lhs, rhs: the operands.
        place: where it is. A loop over the examples would be in the way of a partitioner.
        params: of the primitive.
    """
    if has_formulas(lhs, rhs, params):
        if lhs.dtype != jnp.float32:
            return _convolve_halves(lhs, rhs, params, place)
        # The kernel first where there is one, unless a formula is faster. What neither has is left to XLA.
        ways = [_by_formula]
        if kernels.can_call(place):
            ways.insert(1 if _is_faster_by_formula(lhs, rhs, params) else 0, _by_kernel)
        for way in ways:
            result = way(lhs, rhs, params, place)
            if result is not None:
                return result
    return lax.conv_general_dilated_p.bind(lhs, rhs, **params)


def _convolve_halves(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any], place: primitive.Place) -> jax.Array:
    """The same of half precision, with sums in float32: by a kernel of bfloat16, or as float32, as XLA's own is too."""
    # A kernel of bfloat16 pays only on processors that multiply it faster than float32. Groups are computed as float32.
    is_whole = params["feature_group_count"] == params["batch_group_count"] == 1
    if lhs.dtype == jnp.bfloat16 and is_whole and kernels.can_call(place) and kernels.multiply_bfloat16():
        result = _by_kernel(lhs, rhs, params, place)
        if result is not None:
            return result
    wide = params | {"preferred_element_type": jnp.dtype("float32")}
    return convolve(lhs.astype(jnp.float32), rhs.astype(jnp.float32), place=place, **wide).astype(lhs.dtype)


def _is_faster_by_formula(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any]) -> bool:
    """Whether a formula is faster than a kernel, if there is one."""
    # By two rules: results so few that a convolution is one product of matrices, and windows of 3 x 3, whose tiles take
    # fewer multiplications than the kernel and pay from so many of them for each number that is copied.
    numbers = params["dimension_numbers"]
    problem = filter_gradient(lhs, rhs, params)
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        return problem is not None and params["batch_group_count"] == 1  # filters of a batch, by vmap
    if problem is None:
        window = tuple(rhs.shape[axis] for axis in numbers.rhs_spec[2:])
        results, channels, limit = result_sizes(lhs, rhs, params), rhs.shape[numbers.rhs_spec[1]], _TILES
        by_tiles = window == (3, 3)
    else:
        results, channels, limit = problem.results, lhs.shape[numbers.lhs_spec[0]], _TILES_OF_FILTER
        by_tiles = winograd.is_gradient(problem)
    features = rhs.shape[numbers.rhs_spec[0]]
    return math.prod(results) <= _TINY or (by_tiles and channels * features >= limit * (channels + features))


def _by_kernel(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any], place: primitive.Place) -> jax.Array | None:
    """The convolution, or None where XLA's own is as fast, or there is no such kernel."""
    problem = filter_gradient(lhs, rhs, params)
    if problem is not None and params["feature_group_count"] == 1:
        return kernels.gradient_of_filter(lhs, rhs, params, problem)
    is_alone = params["feature_group_count"] == 1 and not place.is_in_loop
    if is_alone and rhs.shape[params["dimension_numbers"].rhs_spec[0]] < _FEW_FEATURES:
        return None
    return kernels.convolution(lhs, rhs, params)


def _by_formula(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any], place: primitive.Place) -> jax.Array | None:
    """The convolution, or None where XLA's is as fast or where no formula applies."""
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        if place.is_partitioned:
            return None
        return grouped(lhs, rhs, params, lambda x, w, of_one: convolve(x, w, place=place, **of_one))
    problem = filter_gradient(lhs, rhs, params)
    if problem is not None:
        return _gradient_of_filter(lhs, rhs, params["dimension_numbers"], problem, place)
    if place.is_partitioned:
        return None
    result = _forward(lhs, rhs, params)
    if result is None and place.is_in_loop:
        return _forward_in_loop(lhs, rhs, params)
    return result


def _gradient_of_filter(
    lhs: jax.Array, rhs: jax.Array, numbers: lax.ConvDimensionNumbers, problem: ConvProblem, place: primitive.Place
) -> jax.Array | None:
    # N x spatial x C and N x spatial x O. Only shapes at first: where no formula pays, nothing is transposed.
    operands = (lhs, numbers.lhs_spec), (rhs, numbers.rhs_spec)
    images, cotangent = operands[::-1] if problem.is_turned else operands
    (examples, *sizes, channels), (*_, features) = shape_summed_first(*images), shape_summed_first(*cotangent)
    by_tiles = winograd.is_gradient(problem) and winograd.pays(examples, problem.results, channels, features)
    by_tiles = by_tiles and not place.is_partitioned
    if not by_tiles and not _is_faster_by_product((examples, *sizes, channels), features, problem, place):
        return None
    x, g = summed_axis_first(*images), summed_axis_first(*cotangent)
    if by_tiles:
        result = winograd.gradient(x, g, problem)
    else:
        result = products.gradient_of_filter(x, g, problem, in_blocks=not place.is_partitioned)
    return as_result(result.swapaxes(-1, -2) if problem.is_turned else result, numbers.out_spec)


def _is_faster_by_product(images: Sizes, features: int, problem: ConvProblem, place: primitive.Place) -> bool:
    """Whether the gradient of the filter is, for images of this shape."""
    places = math.prod(problem.window)
    # Whatever the sizes: in a loop, where XLA's own goes number by number, where images are enlarged, where nothing is
    # copied (1 x 1), and in three dimensions.
    if place.is_in_loop or problem.is_turned or places == 1 or len(problem.window) > 2:
        return True
    sums = places * images[-1]  # products for an output
    if sums <= _FEW and images[0] >= _MANY_EXAMPLES:
        return True
    if len(problem.window) == 1 or places > _WINDOW:
        return False
    # Else products pay for the copies that they need, if there are enough of them.
    copied = products.numbers_copied(images, features, problem)
    operations = 2 * math.prod(problem.results) * features * sums
    limit = _SHARED if place.is_shared else _ALONE
    return copied <= _MOST_COPIED and operations >= limit * copied


def _forward(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any]) -> jax.Array | None:
    """A convolution of strides 1 with many channels or few results, or None where XLA's is as fast."""
    numbers = params["dimension_numbers"]
    if numbers.lhs_spec != _CHANNELS_LAST or numbers.out_spec != _CHANNELS_LAST:
        return None
    if {*params["window_strides"], *params["rhs_dilation"]} != {1}:
        return None
    out, inner, *spatial = numbers.rhs_spec
    *window, channels, features = (rhs.shape[axis] for axis in (*spatial, inner, out))
    if not 1 < math.prod(window) <= _FORWARD_WINDOW:
        return None
    # Tiles of 3 x 3 windows, or one product of few results by all that is under their windows.
    results, is_dilated = result_sizes(lhs, rhs, params), {*params["lhs_dilation"]} != {1}
    if window == [3, 3] and not is_dilated and winograd.pays(lhs.shape[0], results, channels, features):
        in_memory = lax.transpose(rhs, (*spatial, *sorted((inner, out))))  # nothing is moved
        return winograd.convolution(lhs, in_memory, params["padding"], is_turned=out < inner)
    places = math.prod(results)
    is_small = places <= _SMALL and (channels * features >= _OF_SMALL or is_dilated)
    if is_small or places <= _TINY:
        return products.by_columns(lhs, lax.transpose(rhs, (*spatial, inner, out)), _edges(params))
    return None


def _forward_in_loop(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any]) -> jax.Array | None:
    """Any convolution as products. XLA's own is number by number in a loop. None where the window is too large."""
    numbers = params["dimension_numbers"]
    out, inner, *spatial = numbers.rhs_spec
    weight = lax.transpose(rhs, (*spatial, inner, out))
    window = weight.shape[:-2]
    if math.prod(window) > MOST_PLACES:
        return None
    # N x spatial x C with its zeros, so that the window never leaves it. By columns copies less and needs strides of 1.
    x = products.pad(channels_last(lhs, numbers.lhs_spec), _edges(params))
    strides, dilation = tuple(params["window_strides"]), tuple(params["rhs_dilation"])
    if len(window) == 2 and {*strides, *dilation} == {1} and window[1] > 1:
        y = products.by_columns(x, weight, [(0, 0, 0)] * 2)
    else:
        results = result_sizes(lhs, rhs, params)
        y = products.by_patches(x, weight, ConvProblem(window, results, strides, dilation, (0,) * len(window)))
    return reorder(y, (0, y.ndim - 1, *range(1, y.ndim - 1)), numbers.out_spec)


def _edges(params: dict[str, Any]) -> products.Edges:
    return [(low, high, by - 1) for (low, high), by in zip(params["padding"], params["lhs_dilation"], strict=True)]


CONVOLUTION_IN_LOOP = "convolution_in_loop"
"""The name of the function, in a lowered program, that is a convolution in the body of a loop."""


def _convolve_in_loop(lhs: jax.Array, rhs: jax.Array, *, place: primitive.Place, **params: Any) -> jax.Array:
    place = place._replace(is_in_loop=True)
    if kernels.can_call(place):
        return convolve(lhs, rhs, place=place, **params)
    # As a function with a name, by which `is_slow_in_a_loop` finds it in the text of a program.

    def convolution(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return convolve(lhs, rhs, place=place, **params)

    convolution.__name__ = CONVOLUTION_IN_LOOP
    return jax.jit(convolution)(lhs, rhs)


conv_p = primitive.make(lax.conv_general_dilated_p, convolve, bilinear=True)
conv_in_loop_p = primitive.make(lax.conv_general_dilated_p, _convolve_in_loop, bilinear=True)
"""The same in the body of a loop, for where the lowering cannot see the loop: `scan` lowers its body apart."""


def conv_general_dilated(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: tuple[str, str, str] | lax.ConvDimensionNumbers | None = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    **options: Any,
) -> jax.Array:
    """`jax.lax.conv_general_dilated`, faster on CPUs.

    The gradient of the filter is computed as a matrix product of shifted views. XLA computes it as a convolution with a
    window as large as the image. Convolutions of small images are matrix products too. 3 × 3 windows with many channels
    take 16 multiplications in place of 36. Depthwise convolutions are sums of shifted images. Grouped convolutions are
    computed group by group. These formulas are used for static shapes and float32, where they are faster. bfloat16 and
    float16 are computed in float32 and rounded once. XLA computes everything else, and everything on other platforms.
    The function works under `jit`, `vmap`, `scan`, `shard_map`, export, and in derivatives of any order, as `jax.lax`
    does. The step of `train.make_train_step` uses it for any model.

    Inside a loop, XLA's convolutions are slow, and matrix products are faster at any size. The step finds the loops of
    its loss function. For a loop outside of a step, give the function that contains the loop to `fast_on_cpus`.

    Args:
        lhs: the images, (N, C, H, W) unless `dimension_numbers` says otherwise. Any number of spatial dimensions.
        rhs: the filter, (O, C, KH, KW) unless `dimension_numbers` says otherwise. Of the dtype of `lhs`.
        window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count,
            batch_group_count, precision, preferred_element_type, options: as for `jax.lax.conv_general_dilated`.

    Returns:
        The result of `jax.lax.conv_general_dilated`, up to rounding: sums have another order. Where images or
        gradients are not finite, more entries of a result or a gradient are NaN.

    Raises:
        TypeError, ValueError: as `jax.lax.conv_general_dilated` raises them.

    Source: the sums over shifted columns and rows follow Cho and Brand (2017), "MEC: memory-efficient convolution". The
    16 multiplications follow Winograd (1980), in the form of Lavin and Gray (2016).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> images, weight = jnp.ones((8, 16, 16, 3)), jnp.ones((3, 3, 3, 4))
        >>> def total(weight):
        ...     numbers = ("NHWC", "HWIO", "NHWC")
        ...     return conv_general_dilated(images, weight, (1, 1), "SAME", dimension_numbers=numbers).sum()
        >>> jax.grad(total)(weight).shape
        (3, 3, 3, 4)
    """

    def convolution(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            lhs,
            rhs,
            window_strides,
            padding,
            lhs_dilation,
            rhs_dilation,
            dimension_numbers,
            feature_group_count,
            batch_group_count,
            precision,
            preferred_element_type,
            **options,
        )

    return primitive.bind_like({lax.conv_general_dilated_p: conv_p}, convolution, lhs, rhs)
