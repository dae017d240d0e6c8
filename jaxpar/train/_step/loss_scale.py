"""Loss scaling, which keeps the small gradients of float16 from becoming zero."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from ..._core import checks
from ..._core.calls import answers_class


@answers_class("train.DynamicLossScale")
@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that grows until gradients overflow and falls when they do.

    The loss is multiplied by the scale before it is differentiated and the gradients are divided by it. After
    `period` good steps in a row the scale is multiplied by `factor`. If a gradient overflows, it is divided by
    `factor` and that update is skipped. See Micikevicius et al. 2018, "Mixed precision training", section 3.2.

    Attributes:
        initial: the scale at the first step. Powers of two divide without rounding.
        period: good steps before it grows.
        factor: above 1.
        least, most: the bounds of the scale.

    Example:
        >>> scaling = DynamicLossScale(initial=8.0, period=2)
        >>> state = scaling.start()
        >>> for overflow in (False, False, True):
        ...     state = scaling.next_state(state, jnp.array(overflow))
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
        where = "train.DynamicLossScale"
        checks.whole_number(self.period, where, "period")
        checks.number(self.factor, where, "factor", "a number above 1", lambda n: 1 < n < math.inf)
        for name in ("initial", "least", "most"):
            checks.number(getattr(self, name), where, name, "a number above 0", lambda n: 0 < n < math.inf)
        if not self.least <= self.initial <= self.most:
            raise ValueError(f"{where}: expected least <= initial <= most, got {self}")

    def start(self) -> dict[str, jax.Array]:
        """The part `loss_scale` of a state before the first step: float32 `scale` and int32 `good_steps`."""
        return {"scale": jnp.float32(self.initial), "good_steps": jnp.int32(0)}

    def next_state(self, state: dict[str, jax.Array], overflow: jax.Array) -> dict[str, jax.Array]:
        """The same part after a step, of which `overflow` says whether a gradient was not finite."""
        scale, good = state["scale"], state["good_steps"] + 1
        full = good >= self.period
        grown = jnp.where(full, jnp.minimum(scale * self.factor, self.most), scale)
        return {
            "scale": jnp.where(overflow, jnp.maximum(scale / self.factor, self.least), grown),
            "good_steps": jnp.where(overflow | full, 0, good),
        }


def check_loss_scale(loss_scale: Any) -> float | DynamicLossScale | None:
    """The option as a float or a `DynamicLossScale`. `ValueError` or `TypeError` for anything else."""
    if loss_scale is None or isinstance(loss_scale, DynamicLossScale):
        return loss_scale
    if isinstance(loss_scale, str) and loss_scale == "dynamic":
        return DynamicLossScale()
    expected = "None, a number above 0, 'dynamic' or a train.DynamicLossScale"
    return checks.number(loss_scale, "make_train_step", "loss_scale", expected, lambda x: 0 < x < math.inf)
