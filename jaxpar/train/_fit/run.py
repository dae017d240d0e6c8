"""What stays the same while `fit` trains, checked before any work."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable
from typing import Any, Literal

import jax

from ... import data, distributed
from ..._core import checks
from ...updaters import assign
from .._callbacks.callbacks import Callbacks
from .._callbacks.history import Record
from .._evaluate.evaluate import evaluate
from .._evaluate.every_example import model_of
from .._evaluate.labels import check_classes, check_training_classes
from .._step.state import TrainState
from .._step.train_step import TrainStep
from .profile import Profile


@dataclasses.dataclass(frozen=True)
class Run:
    """The inputs of a call of `fit`.

    Attributes:
        step, epochs, batch_size, progress, profile, on_interrupt, test_data, apply_fn: as given to `fit`.
        source: the training data.
        examples: of an epoch.
        steps: of an epoch.
        per_program: how many steps one compiled program makes. "auto": as many as take a fifth of a second.
        checkpoint_every: save after each step whose number this divides. None: after epochs only.
    """

    step: TrainStep
    source: data.Source
    callbacks: Callbacks
    epochs: int
    batch_size: int
    examples: int
    steps: int
    per_program: int | Literal["auto"]
    checkpoint_every: int | None
    progress: bool
    profile: Profile | None
    on_interrupt: str
    test_data: data.Dataset | None
    apply_fn: Callable[..., jax.Array] | None

    @property
    def skips(self) -> bool:
        """Whether a step may leave its update out. A step of the user's own does not say so."""
        return getattr(self.step, "skips", False)

    @property
    def stops(self) -> bool:
        """Whether a step that is not finite ends the run."""
        return getattr(self.step, "nonfinite", "ignore") == "stop"

    def scores(self, state: TrainState) -> dict[str, float]:
        """Loss and accuracy of the test data, as a record names them. Empty without test data."""
        if self.test_data is None or self.apply_fn is None:
            return {}
        scores = evaluate(state, self.apply_fn, self.test_data, batch_size=self.batch_size)
        return {f"test_{name}": value for name, value in scores.items()}


@dataclasses.dataclass(frozen=True)
class RunHistory:
    """What happened before this call of `fit`.

    Attributes:
        first: the step at which the run began.
        history: the records of the epochs that are over.
        under_way: the sums of an epoch that is not.
        stopped: whether a callback ended the training.
    """

    first: int
    history: list[Record] = dataclasses.field(default_factory=list)
    under_way: dict[str, Any] = dataclasses.field(default_factory=dict)
    stopped: bool = False


def plan_run(
    state: TrainState,
    step: TrainStep,
    train_data: Any,
    callbacks: Callbacks,
    *,
    epochs: int,
    batch_size: int,
    progress: Any,
    test_data: data.Dataset | None,
    apply_fn: Callable[..., jax.Array] | None,
    checkpoint_dir: Any,
    checkpoint_every: int | None,
    keep: int,
    steps_per_execution: Any,
    **others: Any,
) -> Run:
    """The run of a call of `fit`. The errors are those of `fit`.

    Args:
        others: `profile` and `on_interrupt`.
    """
    distributed.check_joined("fit", "each would train a model of its own", launched=True)
    _check_updater(state)
    sizes = (checks.whole_number(epochs, "fit", "epochs"), checks.whole_number(batch_size, "fit", "batch_size"))
    checks.whole_number(keep, "fit", "keep")
    if checkpoint_every is not None:
        every = checks.whole_number(checkpoint_every, "fit", "checkpoint_every")
        checkpoint_every = None if checkpoint_dir is None else every
    if (test_data is None) != (apply_fn is None):
        raise ValueError("fit: evaluation takes both test_data and apply_fn, got only one of them")
    _check_progress(progress)
    checks.choice(others["on_interrupt"], "fit", "on_interrupt", ("auto", "return", "raise"))
    source = data.as_source(train_data)
    examples = source.examples(sizes[1])
    steps = examples // sizes[1]
    if not steps:
        raise ValueError(f"fit: {examples} examples make no whole batch of {sizes[1]}; use a smaller batch_size")
    check_training_classes(step, state, source)
    if test_data is not None:
        check_classes("fit: test_data", apply_fn, model_of, state, test_data)
    per_program = _steps_per_program(steps_per_execution, step, source, state)
    counts = (*sizes, examples, steps, per_program, checkpoint_every)
    return Run(step, source, callbacks, *counts, progress, **others, test_data=test_data, apply_fn=apply_fn)


def refuse_unknown(unknown: dict[str, Any], function: Callable[..., Any]) -> None:
    """`TypeError` for an argument that `fit` does not have, with the nearest one that it has."""
    for name in unknown:
        hint = "; callbacks= takes a function or a sequence of functions" if name == "callback" else ""
        near = difflib.get_close_matches(name, inspect.signature(function).parameters, 1)
        hint = f"; did you mean {near[0]}?" if near and not hint else hint
        raise TypeError(f"fit: unknown argument {name}={hint}")


def _check_updater(state: Any) -> None:
    if not isinstance(state, TrainState):
        raise TypeError(
            "fit: expected a state, train.create_state(kv.from_params(params, optimizer=...), rng); "
            f"got {checks.describe(state)}"
        )
    if state.store.updater is assign:
        raise ValueError(
            "fit: the store has no optimizer, so every step would replace the parameters by their gradients; "
            "make it by kv.from_params(params, optimizer=optax.sgd(0.1))"
        )


def _check_progress(progress: Any) -> None:
    if progress == "plot":
        raise ValueError(
            "fit: progress='plot' is now a callback: plot = train.LivePlot(), then "
            "fit(..., callbacks=plot, on_step=plot.on_step, progress=False)"
        )
    if progress not in (True, False):
        raise ValueError(f"fit: progress must be True or False, got {progress!r}")


def _steps_per_program(asked: Any, step: Any, source: data.Source, state: TrainState) -> int | Literal["auto"]:
    """How many steps one compiled program makes."""
    if asked != "auto":
        try:
            asked = checks.whole_number(asked, "fit", "steps_per_execution")
        except (TypeError, ValueError) as error:
            raise type(error)(f"{error}; or say 'auto'") from None
    if asked == 1:
        return 1
    devices = state.store.devices
    reasons = {
        "the step was not made by make_train_step": not isinstance(step, TrainStep),
        "the training data is no data.Dataset": not isinstance(source, data.DatasetSource),
        "there are several processes": jax.process_count() > 1,
        "the state was not made by create_state, so its devices are not known": not devices,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if asked == "auto":
        return "auto" if reason is None and all(d.platform == "cpu" for d in devices or ()) else 1
    if reason:
        raise ValueError(f"fit: steps_per_execution is {asked}, but {reason}; say 1, or leave it out")
    return asked
