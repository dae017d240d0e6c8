"""The convolution that models call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from .._devices import formulas


def conv_general_dilated(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    **options: Any,
) -> jax.Array:
    """`jax.lax.conv_general_dilated`, faster on CPUs.

    The gradient of the filter is a matrix product of shifted views, where XLA computes a convolution with a window as
    large as the image. Small images are products too, and 3 × 3 windows with many channels take 16 multiplications in
    place of 36. Depthwise convolutions are sums of shifted images, and groups are taken apart. That is for float32 and
    sizes that are known, where it is faster. Everything else, and every other platform, is XLA's own. It works wherever
    that of `jax.lax` does: under `jit`, `vmap`, `scan`, `shard_map`, export, and in derivatives of any order. The step
    of `train.make_train_step` uses it for any model.

    Inside of a loop XLA has slow code only, and products are faster at any size. The step knows its loops. For loops of
    one's own give the function that has the loop to `fast_on_cpus`.

    Args:
        lhs: the images, (N, C, H, W) unless `dimension_numbers` says otherwise. Any number of spatial dimensions.
        rhs: the filter, (O, C, KH, KW) unless `dimension_numbers` says otherwise. Of the dtype of `lhs`.
        window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count,
            batch_group_count, precision, preferred_element_type, options: as of `jax.lax.conv_general_dilated`.

    Returns:
        What `jax.lax.conv_general_dilated` gives, to rounding of float32: sums have another order. Where images or
        gradients are not finite, more entries of a result or a gradient are NaN.

    Raises:
        TypeError, ValueError: those of `jax.lax.conv_general_dilated`.

    Source: the sums over shifted columns and rows follow Cho and Brand (2017), "MEC: memory-efficient convolution". 16
    multiplications are those of Winograd (1980), in the form of Lavin and Gray (2016).

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

    return formulas.bind_convolution(convolution, lhs, rhs)
