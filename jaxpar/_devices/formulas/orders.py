"""The axes of a convolution's operands, as its primitive names them, in the order of a formula."""

from __future__ import annotations

import jax
import numpy as np
from jax import lax

Spec = tuple[int, ...]
"""Which axis is what the primitive calls batch, features, and each spatial axis; of a filter: out, in, spatial."""


def summed_first(spec: Spec) -> Spec:
    """F x spatial x channels. So the operands of a filter's gradient lie in memory where images have channels last."""
    kept, summed, *spatial = spec
    return (summed, *spatial, kept)


def summed_axis_first(x: jax.Array, spec: Spec) -> jax.Array:
    """An operand of a filter's gradient as F x spatial x channels."""
    return lax.transpose(x, summed_first(spec))


def in_order(w: jax.Array, spec: Spec) -> jax.Array:
    """A result, window x C x O, with its axes where the primitive wants them."""
    axes = (w.ndim - 2, w.ndim - 1, *range(w.ndim - 2))  # of what it calls batch, features, spatial
    return lax.transpose(w, tuple(np.array(axes)[np.argsort(spec)].tolist()))


def channels_last(x: jax.Array, spec: Spec) -> jax.Array:
    """Images as N x spatial x C."""
    batch, features, *spatial = spec
    return lax.transpose(x, (batch, *spatial, features))


def reordered(x: jax.Array, spec: Spec, wanted: Spec) -> jax.Array:
    """Images of one order of axes in another one."""
    axes = [0] * x.ndim
    for axis, place in zip(spec, wanted, strict=True):
        axes[place] = axis
    return lax.transpose(x, axes)
