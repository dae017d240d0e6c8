"""The learning rate in the records of a run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from ... import updaters
from ..._core import checks
from ..._devices.user_mesh import outside_mesh
from .._step.state import TrainState
from .history import Record

_NAME = "learning_rate"


@dataclasses.dataclass(frozen=True)
class LearningRate:
    """A callback of `fit` that adds `learning_rate` to records and progress bar.

    The value is the rate of the last step. A rate in the state is read at most once a second, so that steps do not
    wait.

    Args:
        schedule: the optimizer's schedule: a function of the number of earlier updates, as in optax, or a number. None
            reads the rate from the state, which needs `optax.inject_hyperparams`, or an optimizer of `jp.updaters` with
            `rate_in_state=True`. With several rates, each gets its own name, such as `learning_rate_head`.

    Raises:
        TypeError: the schedule has another type. ValueError: raised by `fit` before the first step: the state has no
            rate.

    Example:
        >>> import optax
        >>> from jaxpar import train
        >>> rate = train.LearningRate(optax.linear_schedule(0.5, 0.0, 10))
        >>> # state, history = train.fit(..., callbacks=rate)
    """

    schedule: Callable[[Any], Any] | float | None = None

    def __post_init__(self) -> None:
        if self.schedule is not None and not callable(self.schedule):
            checks.number(
                self.schedule,
                "train.LearningRate",
                "schedule",
                "a function or a number of 0 or more",
                lambda x: 0 <= x < math.inf,
            )

    def __call__(self, state: TrainState, record: Record) -> None:
        """`fit` has put the rate in the record already."""

    def measure(self, state: TrainState) -> dict[str, float]:
        """The rates of the last step, {name in the record: rate}."""
        if self.schedule is None:
            return _rates(state)
        if not callable(self.schedule):
            return {_NAME: float(self.schedule)}
        with outside_mesh():
            return {_NAME: float(self.schedule(max(0, _updates(state) - 1)))}


def _updates(state: TrainState) -> int:
    """How many updates the optimizer has made. Steps that were skipped are none."""
    skipped = state.nonfinite["skipped"] if isinstance(state.nonfinite, dict) else 0
    return int(state.step) - int(skipped)


def _rates(state: TrainState) -> dict[str, float]:
    found = updaters.learning_rates(state)
    if not found:
        raise ValueError(
            "train.LearningRate: the optimizer's state has no learning rate; give the schedule, "
            "train.LearningRate(schedule), or make the optimizer by "
            "optax.inject_hyperparams(optax.adam)(learning_rate=schedule)"
        )
    if len(set(found.values())) == 1:
        return {_NAME: next(iter(found.values()))}
    paths = [path.split("/") for path in found]
    common = set.intersection(*map(set, paths))
    names = ["_".join(word for word in path if word not in common) for path in paths]
    return {f"{_NAME}_{name or i}": rate for i, (name, rate) in enumerate(zip(names, found.values(), strict=True))}
