"""Calls of the kernels in C++ of the distribution jaxpar-cpu, where it is installed.

XLA's partitioner does not split a call, and a file of `jax.export` may be read where the kernels are missing: formulas
ask `can_call` first. A kernel has no derivative and no batch: the primitive around it has these (see `primitive`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import primitive
from .problem import ConvProblem, Sizes, as_result, channels_last, reorder, result_sizes, summed_axis_first

_LOG = logging.getLogger("jaxpar")
_MOST_AXES = 3  # spatial


def can_call(place: primitive.Place) -> bool:
    """Whether a program may call the kernels at this place."""
    return not place.is_partitioned and not place.is_exported and are_loaded()


@functools.cache
def are_loaded() -> bool:
    """Whether there are kernels. A line of the log says once what is in the way."""
    try:
        import jaxpar_cpu  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        _LOG.info("jaxpar-cpu is not installed: convolutions on CPUs are XLA's own or jaxpar's formulas")
        return False
    reason = jaxpar_cpu.why_not()
    if reason is not None:
        level = logging.INFO if jaxpar_cpu.is_off() else logging.WARNING
        _LOG.log(level, "jaxpar-cpu's kernels are not used, but XLA's own or jaxpar's formulas: %s", reason)
    return reason is None


@functools.cache
def multiply_bfloat16() -> bool:
    """Whether there are kernels, and the processor multiplies bfloat16 faster than float32."""
    if not are_loaded():
        return False
    import jaxpar_cpu  # pyright: ignore[reportMissingImports]

    return getattr(jaxpar_cpu, "has_fast_bfloat16", bool)()  # older kernels have none


def call(name: str, shape: Sequence[int], *operands: jax.Array, **attributes: Any) -> jax.Array:
    """The result of a kernel.

    Args:
        name: of the handler for float32.
        shape: of the result.
        operands: of one dtype, float32 or bfloat16, as the kernel has them in memory. The result has the same.
        attributes: of the handler: bools, and arrays of int64.
    """
    dtype = operands[0].dtype
    handler = f"jaxpar_cpu.{name}" + ("Bf16" if dtype == jnp.bfloat16 else "")
    return jax.ffi.ffi_call(handler, jax.ShapeDtypeStruct(shape, dtype))(*operands, **attributes)


def convolution(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any]) -> jax.Array | None:
    """The result of lax's primitive, or None where the kernel has no such convolution.

    Args:
        lhs, rhs: the operands, both float32 or both bfloat16, of known sizes.
        params: of the primitive.
    """
    numbers = params["dimension_numbers"]
    if lhs.ndim - 2 > _MOST_AXES or params["batch_group_count"] != 1:
        return None
    out, inner, *spatial = numbers.rhs_spec
    x = channels_last(lhs, numbers.lhs_spec)
    w = lax.transpose(rhs, (*spatial, *sorted((out, inner))))  # nothing is moved where the window is first in memory
    shape = (x.shape[0], *result_sizes(lhs, rhs, params), rhs.shape[out])
    low = [low for low, _ in params["padding"]]
    axes = params["window_strides"], params["rhs_dilation"], params["lhs_dilation"], low
    is_turned = rhs.shape[inner] > 1 and out < inner
    if out < inner and not is_turned:
        w = w.reshape(*w.shape[:-2], 1, -1)
    attributes = {"numbers": _numbers(axes, params["feature_group_count"]), "turned": is_turned}
    y = call("Convolution", _images(shape), x.reshape(_images(x.shape)), w.reshape(_filter(w.shape)), **attributes)
    return reorder(y.reshape(shape), (0, len(shape) - 1, *range(1, len(shape) - 1)), numbers.out_spec)


def gradient_of_filter(
    lhs: jax.Array, rhs: jax.Array, params: dict[str, Any], problem: ConvProblem
) -> jax.Array | None:
    """The same of a primitive that is the gradient of a filter."""
    numbers = params["dimension_numbers"]
    if lhs.ndim - 2 > _MOST_AXES or problem.is_turned:
        return None
    x, dy = summed_axis_first(lhs, numbers.lhs_spec), summed_axis_first(rhs, numbers.rhs_spec)
    groups = params["batch_group_count"]
    shape = (*problem.window, x.shape[-1] // groups, dy.shape[-1])
    axes = problem.strides, problem.dilation, (1,) * len(problem.window), problem.low
    operands = x.reshape(_images(x.shape)), dy.reshape(_images(dy.shape))
    w = call("ConvolutionFilter", _filter(shape), *operands, numbers=_numbers(axes, groups))
    return as_result(w.reshape(shape), numbers.out_spec)


def _images(shape: Sequence[int]) -> Sizes:
    """N x depth x height x width x C of N x spatial x C."""
    first, *spatial, last = shape
    return (first, *_three(spatial, 1), last)


def _filter(shape: Sequence[int]) -> Sizes:
    """The same of window x C x O."""
    *window, channels, features = shape
    return (*_three(window, 1), channels, features)


def _three(values: Sequence[int], fill: int) -> Sizes:
    return (*[fill] * (_MOST_AXES - len(values)), *values)


def _numbers(axes: Sequence[Sequence[int]], groups: int) -> np.ndarray:
    """Strides, dilation of the window, of the images, and zeros before, of three axes each, and the groups."""
    fills = (1, 1, 1, 0)
    return np.array([*(n for values, fill in zip(axes, fills, strict=True) for n in _three(values, fill)), groups])
