"""Loss scaling: what keeps the small gradients of float16 from becoming zero on their way back."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that is as large as it can be: it grows until gradients overflow, and falls where they do.

    The loss is multiplied by the scale before it is differentiated and the gradients are divided by it. After
    `period` good steps in a row the scale is multiplied by `factor`; where a gradient overflows, it is divided by
    `factor` and that update is skipped. Micikevicius et al. 2018, "Mixed precision training", section 3.2; the
    defaults are the usual ones of PyTorch's `GradScaler` and NVIDIA's apex.

    Attributes:
        initial: the scale at the first step. Powers of two divide without rounding.
        period: good steps before it grows.
        factor: above 1.
        least, most: it never leaves these bounds.

    Example:
        >>> scaling = DynamicLossScale(initial=8.0, period=2)
        >>> state = scaling.start()
        >>> for overflow in (False, False, True):
        ...     state = scaling.updated(state, jnp.array(overflow))
        ...     print(state["scale"], state["good_steps"])
        8.0 1
        16.0 0
        8.0 0
    """

    initial: float = 2.0**15
    period: int = 2000
    factor: float = 2.0
    least: float = 1.0
    most: float = 2.0**24

    def __post_init__(self) -> None:
        if not (0 < self.least <= self.initial <= self.most < math.inf and self.factor > 1 and self.period >= 1):
            raise ValueError(
                "train.DynamicLossScale: expected 0 < least <= initial <= most < inf, factor > 1 and period >= 1, "
                f"got {self}"
            )

    def start(self) -> dict[str, jax.Array]:
        return {"scale": jnp.float32(self.initial), "good_steps": jnp.int32(0)}

    def updated(self, state: dict[str, jax.Array], overflow: jax.Array) -> dict[str, jax.Array]:
        scale, good = state["scale"], state["good_steps"] + 1
        full = good >= self.period
        grown = jnp.where(full, jnp.minimum(scale * self.factor, self.most), scale)
        return {
            "scale": jnp.where(overflow, jnp.maximum(scale / self.factor, self.least), grown),
            "good_steps": jnp.where(overflow | full, 0, good),
        }


def check_loss_scale(loss_scale: Any) -> float | DynamicLossScale | None:
    """The option as it was meant; `ValueError` for what is none."""
    if loss_scale is None or isinstance(loss_scale, DynamicLossScale):
        return loss_scale
    if isinstance(loss_scale, str) and loss_scale == "dynamic":
        return DynamicLossScale()
    if isinstance(loss_scale, bool) or not isinstance(loss_scale, (int, float)) or not 0 < loss_scale < math.inf:
        raise ValueError(
            "make_train_step: loss_scale must be None, a number above 0, 'dynamic' or a train.DynamicLossScale, got "
            f"{loss_scale!r}"
        )
    return float(loss_scale)
