"""The convolution by the formula that is fastest on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax

from . import primitive, winograd
from .filter_gradient import FilterGradient, filter_gradient, has_formulas
from .filter_products import gradient_of_filter, numbers_copied
from .forward import forward, forward_in_loop
from .grouped import grouped
from .orders import in_order, summed_axis_first, summed_first

# Of the gradient of a filter: at least so many operations for a number that is copied. XLA's own has all threads, and
# copies have one. With several devices each has about one core, and XLA's own is slower.
_ALONE, _SHARED = 600, 120
_MOST_COPIED = 2 << 20  # numbers of one example: more are not in the cache when they are multiplied
_WINDOW = 64  # places of a window at most: each is a copy
_FEW, _MANY_EXAMPLES = 32, 128  # products for an output, of examples: XLA's own takes three times as long


def convolve(lhs: jax.Array, rhs: jax.Array, *, place: primitive.Place, **params: Any) -> jax.Array:
    """The convolution of lax's primitive, by the formula that is fastest on a CPU.

    Args:
        lhs, rhs: the operands.
        place: where it is. A loop over the examples would be in the way of a partitioner.
        params: of the primitive.
    """
    result = _by_formula(lhs, rhs, params, place) if has_formulas(lhs, rhs, params) else None
    return lax.conv_general_dilated_p.bind(lhs, rhs, **params) if result is None else result


def _by_formula(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any], place: primitive.Place) -> jax.Array | None:
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        alone = partial(convolve, place=place)
        return None if place.is_partitioned else grouped(lhs, rhs, params, lambda x, w, of_one: alone(x, w, **of_one))
    problem = filter_gradient(lhs, rhs, params)
    if problem is not None:
        return _gradient_of_filter(lhs, rhs, params["dimension_numbers"], problem, place)
    if place.is_partitioned:
        return None
    result = forward(lhs, rhs, params)
    return forward_in_loop(lhs, rhs, params) if result is None and place.is_in_loop else result


def _gradient_of_filter(
    lhs: jax.Array, rhs: jax.Array, numbers: Any, problem: FilterGradient, place: primitive.Place
) -> jax.Array | None:
    """The gradient, or None where XLA's is as fast."""
    operands = (lhs, numbers.lhs_spec), (rhs, numbers.rhs_spec)
    images, cotangent = operands[::-1] if problem.is_turned else operands
    shapes = [tuple(x.shape[axis] for axis in summed_first(spec)) for x, spec in (images, cotangent)]
    (examples, *sizes, features), channels = shapes[1], shapes[0][-1]
    by_tiles = (
        not place.is_partitioned
        and winograd.is_gradient(problem)
        and winograd.pays(examples, sizes, channels, features)
    )
    if not by_tiles and not _is_faster(shapes[0], shapes[1], problem, place):
        return None
    sides = summed_axis_first(*images), summed_axis_first(*cotangent)
    if by_tiles:
        result = winograd.gradient(*sides, problem)
    else:
        result = gradient_of_filter(*sides, problem, in_blocks=not place.is_partitioned)
    return in_order(result.swapaxes(-1, -2) if problem.is_turned else result, numbers.out_spec)


def _is_faster(
    images: tuple[int, ...], cotangent: tuple[int, ...], problem: FilterGradient, place: primitive.Place
) -> bool:
    """By the shapes, F x spatial x channels. The limits were measured against XLA's own (benchmarks/NOTES.md)."""
    sums = math.prod(problem.window) * images[-1]
    copied = numbers_copied(images, cotangent, problem)
    places = math.prod(problem.window)
    if place.is_in_loop or problem.is_turned or places == 1 or len(problem.window) > 2:
        return True
    if sums <= _FEW and images[0] >= _MANY_EXAMPLES:
        return True
    if len(problem.window) == 1 or places > _WINDOW:
        return False
    operations = 2 * math.prod(cotangent[1:]) * sums
    limit = _SHARED if place.is_shared else _ALONE
    return copied <= _MOST_COPIED and operations >= limit * copied


CONVOLUTION_IN_LOOP = "convolution_in_loop"
"""The name of the function, in a lowered program, that is a convolution in the body of a loop."""


def _convolve_in_loop(lhs: jax.Array, rhs: jax.Array, *, place: primitive.Place, **params: Any) -> jax.Array:
    def convolution(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return convolve(lhs, rhs, place=place._replace(is_in_loop=True), **params)

    convolution.__name__ = CONVOLUTION_IN_LOOP
    return jax.jit(convolution)(lhs, rhs)


conv_p = primitive.make(lax.conv_general_dilated_p, convolve, bilinear=True, is_told_place=True)
conv_in_loop_p = primitive.make(lax.conv_general_dilated_p, _convolve_in_loop, bilinear=True, is_told_place=True)
"""The same in the body of a loop, for where the lowering cannot see the loop: `scan` lowers its body apart."""


def bind_convolution(function: Callable[..., Any], *args: Any) -> Any:
    """What a function of arrays computes, with this convolution in place of lax's."""
    return primitive.bind_like({lax.conv_general_dilated_p: conv_p}, function, *args)
