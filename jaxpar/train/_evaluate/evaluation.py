"""What a run of `fit` evaluates: checked before the first step, scored when `fit` asks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from ... import data
from ..._core.arguments import check_takes
from .._step.state import TrainState
from .classification import check_classified, classification
from .every_example import has_model_state, model_of
from .labels import check_classes
from .measure import check, measure
from .values import add_scores


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The data and functions that scores come from.

    Attributes:
        test_data, apply_fn, eval_data, eval_fn, batch_size: as given to `fit`.
    """

    test_data: data.Dataset | None
    apply_fn: Callable[..., Any] | None
    eval_data: Any
    eval_fn: Callable[..., Any] | None
    batch_size: int

    @property
    def measures(self) -> dict[str, bool]:
        """For each beginning of a score's name, whether there are such scores."""
        return {"test_": self.test_data is not None, "eval_": self.eval_data is not None}

    def check(self, state: TrainState) -> list[str]:
        """Raise what `scores` would raise, as far as shapes are known. Return the names of the scores, if known."""
        if self.test_data is not None:
            check_classes("fit: test_data", self.apply_fn, model_of(state), self.test_data)
        return [
            f"{prefix}_{name}"
            for prefix, eval_fn, source in self._parts(state)
            for name in check("fit", state, eval_fn, source, self.batch_size)
        ]

    def scores(self, state: TrainState) -> dict[str, float]:
        """The scores as a record names them. Empty where there is nothing to evaluate."""
        found: dict[str, float] = {}
        for prefix, eval_fn, source in self._parts(state):
            for name, value in measure("fit", state, eval_fn, source, self.batch_size).items():
                add_scores(found, _numbers(f"{prefix}_{name}", value))
        return found

    def _parts(self, state: TrainState) -> list[tuple[str, Any, Any]]:
        parts: list[tuple[str, Any, Any]] = []
        if self.test_data is not None:
            parts.append(("test", classification(self.apply_fn, has_model_state(state), "fit"), self.test_data))
        if self.eval_data is not None:
            parts.append(("eval", self.eval_fn, self.eval_data))
        return parts


def plan_evaluation(*, test_data: Any, apply_fn: Any, eval_data: Any, eval_fn: Any, batch_size: int) -> Evaluation:
    """The evaluation of a run. The errors are those of `fit`."""
    if (test_data is None) != (apply_fn is None):
        raise ValueError("fit: evaluation takes both test_data and apply_fn, got only one of them")
    if (eval_data is None) != (eval_fn is None):
        raise ValueError(
            "fit: evaluation takes both eval_data and eval_fn, got only one of them; the loss and the accuracy of a "
            "classifier are test_data and apply_fn"
        )
    if test_data is not None:
        _check_test_data(test_data)
        if not callable(apply_fn):
            check_takes(apply_fn, ("params", "images"), "fit: apply_fn")
    if eval_data is not None:
        if not callable(eval_fn):
            check_takes(eval_fn, ("params", "batch"), "fit: eval_fn")
        _check_read_again(eval_data)
    return Evaluation(test_data, apply_fn, eval_data, eval_fn, batch_size)


def _check_test_data(test_data: Any) -> None:
    try:
        check_classified(test_data, "fit: test_data")
    except TypeError as error:
        raise TypeError(f"{error}; for all that is no classifier give eval_data and eval_fn") from None


def _check_read_again(eval_data: Any) -> None:
    """`TypeError` for an iterator, in which a second evaluation would find nothing."""
    source = eval_data if isinstance(eval_data, data.Source) else None
    once = source.is_read_once if isinstance(source, data.IterableSource) else hasattr(eval_data, "__next__")
    if once and getattr(source, "steps_per_epoch", None) is None:
        kind = type(getattr(source, "source", eval_data)).__name__
        raise TypeError(
            f"fit: eval_data is read after each epoch, and a {kind} is read only once; give a list, a loader, or a "
            "function that returns an iterator"
        )


def _numbers(name: str, value: Any) -> dict[str, float]:
    """The number, or one for each column."""
    if not np.ndim(value):
        return {name: float(value)}
    return {f"{name}/{i}": float(x) for i, x in enumerate(np.ravel(value))}
