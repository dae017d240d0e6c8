"""What stays the same while `fit` trains, checked before any work."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax

from ... import data, distributed
from ..._core import checks
from ..._core.arguments import check_takes, did_you_mean
from ...updaters import assign
from .._callbacks.callbacks import Callbacks
from .._callbacks.history import Record
from .._evaluate.evaluation import Evaluation, plan_evaluation
from .._evaluate.labels import check_training_classes
from .._step.state import TrainState, check_is_state
from .._step.train_step import TrainStep
from .certificate import Certificate
from .epoch import RECORD_NAMES
from .profile import Profile


@dataclasses.dataclass(frozen=True)
class Run:
    """The inputs of a call of `fit`.

    Attributes:
        step, epochs, batch_size, progress, profile, on_interrupt, max_steps: as given to `fit`.
        source: the training data.
        evaluation: where scores come from.
        certificate: where hashes of the state go.
        examples: of an epoch.
        steps: of an epoch.
        per_program: how many steps one compiled program makes. "auto": as many as take a fifth of a second.
        checkpoint_every: save after each step whose number this divides. None: after epochs only.
        eval_every: evaluate after each step whose number this divides. None: after epochs only.
        elastic: makes the steps where processes may be lost and may join. None: they may not.
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
    eval_every: int | None
    max_steps: int | None
    progress: bool
    profile: Profile | None
    on_interrupt: str
    evaluation: Evaluation
    certificate: Certificate
    elastic: Any = None

    @property
    def num_steps(self) -> int:
        """How many steps the whole run has."""
        return min(self.epochs * self.steps, self.max_steps or sys.maxsize)

    @property
    def skips(self) -> bool:
        """Whether a step may leave its update out. A step of the user's own does not say so."""
        return getattr(self.step, "skips", False)

    @property
    def stops(self) -> bool:
        """Whether a step that is not finite ends the run."""
        return getattr(self.step, "nonfinite", "ignore") == "stop"

    def scores(self, state: TrainState) -> dict[str, float]:
        """The scores of the evaluation, as a record names them."""
        return self.evaluation.scores(state)

    @property
    def unit(self) -> str:
        """What the data consists of, for people."""
        return "images" if isinstance(self.source, data.DatasetSource) else "examples"

    def check(self, state: TrainState) -> TrainState:
        """The state on the step's devices, checked with all that the run calls, as far as shapes are known."""
        metrics: list[str] = []
        if isinstance(self.step, TrainStep):
            state = self.step.complete(state)
            data._virtual_options(self.source, self.step.virtual_shards, state.store.devices)
            shapes = getattr(self.source, "batch_shapes", lambda batch_size: None)(self.batch_size)
            metrics = self.step.check(state, shapes)
        scores = self.evaluation.check(state)
        own = ("eval_",) if self.evaluation.eval_fn is not None else ()
        taken = [name for name in metrics if name in RECORD_NAMES or name.startswith(own)]
        if taken:
            raise ValueError(
                f"fit: the record of an epoch has {', '.join(sorted(taken))} of its own; rename that value in the aux "
                "of loss_fn"
            )
        if metrics:
            self.check_monitors(metrics, scores)
        return state

    def check_monitors(self, metrics: Iterable[str], scores: Sequence[str] = ()) -> None:
        """`ValueError` for a callback that looks at what is never measured, when the names of metrics are known."""
        unknown = [
            start
            for start, are_measured in self.evaluation.measures.items()
            if are_measured and not any(name.startswith(start) for name in scores)
        ]
        self.callbacks.check_metrics([*metrics, *scores], unknown)


@dataclasses.dataclass(frozen=True)
class RunHistory:
    """What happened before this call of `fit`.

    Attributes:
        first: the step at which the run began.
        history: the records of the epochs that are over.
        under_way: the sums of an epoch that is not.
        stopped: whether a callback ended the training.
        memories: of the callbacks, as `Callbacks.to_json` gave them. None: they were not saved.
        resumed: whether it goes on from a checkpoint of `fit`.
    """

    first: int
    history: list[Record] = dataclasses.field(default_factory=list)
    under_way: dict[str, Any] = dataclasses.field(default_factory=dict)
    stopped: bool = False
    memories: list[Any] | None = None
    resumed: bool = False


def plan_run(
    state: TrainState,
    step: TrainStep,
    train_data: Any,
    callbacks: Callbacks,
    *,
    epochs: int | None,
    batch_size: int,
    max_steps: int | None,
    eval_every: int | None,
    progress: Any,
    evaluated: dict[str, Any],
    checkpoint_dir: Any,
    checkpoint_every: int | None,
    keep: int,
    steps_per_execution: Any,
    certificate: Any,
    certificate_every: Any,
    **others: Any,
) -> Run:
    """The run of a call of `fit`. The errors are those of `fit`.

    Args:
        evaluated: `test_data`, `apply_fn`, `eval_data` and `eval_fn`.
        others: `profile` and `on_interrupt`.
    """
    distributed.check_joined("fit", "each would train a model of its own", launched=True)
    _check_updater(state)
    _check_step(step)
    batch_size = checks.whole_number(batch_size, "fit", "batch_size")
    checks.whole_number(keep, "fit", "keep")
    checkpoint_every = _whole_or_none(checkpoint_every, "checkpoint_every")
    certified = Certificate(certificate, certificate_every)
    max_steps, eval_every = _whole_or_none(max_steps, "max_steps"), _whole_or_none(eval_every, "eval_every")
    evaluation = plan_evaluation(**evaluated, batch_size=batch_size)
    epochs = _whole_or_none(epochs, "epochs")
    checks.choice(others["on_interrupt"], "fit", "on_interrupt", ("auto", "return", "raise"))
    _check_progress(progress)
    source = data.as_source(train_data)
    examples = source.examples(batch_size)
    steps = examples // batch_size
    if not steps:
        raise ValueError(f"fit: {examples} examples make no whole batch of {batch_size}; use a smaller batch_size")
    epochs = _epochs(epochs, max_steps, steps)
    check_training_classes(step, state, source)
    per_program = _steps_per_program(steps_per_execution, step, source, state)
    checkpoint_every = None if checkpoint_dir is None else checkpoint_every
    counts = (epochs, batch_size, examples, steps, per_program, checkpoint_every, eval_every, max_steps)
    run = Run(step, source, callbacks, *counts, progress, **others, evaluation=evaluation, certificate=certified)
    callbacks.check(checkpoint_dir, evaluation.measures)
    return run


def _whole_or_none(value: Any, name: str) -> int | None:
    return None if value is None else checks.whole_number(value, "fit", name)


def _epochs(epochs: int | None, max_steps: int | None, steps: int) -> int:
    """How many epochs the run goes into."""
    if epochs is None and max_steps is None:
        raise ValueError("fit: epochs= or max_steps= says when the training ends; give one of them, or both")
    most = sys.maxsize if epochs is None else epochs
    return most if max_steps is None else min(most, -(-max_steps // steps))


def refuse_unknown(unknown: dict[str, Any], function: Callable[..., Any]) -> None:
    """`TypeError` for an argument that `fit` does not have, with the nearest one that it has."""
    for name in unknown:
        known = [other for other in inspect.signature(function).parameters if other != "unknown"]
        hint = f"; {_HINTS[name]}" if name in _HINTS else did_you_mean(name, known)
        raise TypeError(f"fit: unknown argument {name}={hint}")


_VALIDATION = "evaluation data are test_data= with apply_fn=, or eval_data= with eval_fn="
_CALLBACK = "it is a callback, callbacks=train.EarlyStopping(patience=3)"
_STORE = "it belongs to the store, kv.from_params(params, optimizer=optax.sgd(0.1))"
_HINTS = {
    "callback": "callbacks= takes a function or a sequence of functions",
    **dict.fromkeys(("early_stopping", "patience"), _CALLBACK),
    **dict.fromkeys(("validation_data", "val_data", "validation_split", "valid_data"), _VALIDATION),
    **dict.fromkeys(("optimizer", "learning_rate", "lr", "tx"), _STORE),
    **dict.fromkeys(("loss", "loss_fn", "grad_transform"), "it belongs to the step, train.make_train_step(loss_fn)"),
    "shuffle": "examples are shuffled by state.rng; data.from_iterable keeps an order of its own",
    "verbose": "call it progress, True or False",
    "devices": "they belong to the state, train.create_state(store, rng, devices=...)",
    "seed": "it belongs to the state, train.create_state(store, seed)",
    "rng": "it belongs to the state, train.create_state(store, rng)",
}


def _check_step(step: Any) -> None:
    if callable(step):
        return check_takes(step, ("state", "batch"), "fit: the step", "; make one by train.make_train_step(loss_fn)")
    raise TypeError(f"fit: expected a step, train.make_train_step(loss_fn); got {checks.describe(step)}")


def _check_updater(state: Any) -> None:
    check_is_state(state, "fit")
    if state.store.updater is assign:
        raise ValueError(
            "fit: the store has no optimizer, so every step would replace the parameters by their gradients; "
            "make it by kv.from_params(params, optimizer=optax.sgd(0.1))"
        )


def _check_progress(progress: Any) -> None:
    if progress == "plot":
        raise ValueError("fit: progress='plot' is now a callback: fit(..., callbacks=train.LivePlot(), progress=False)")
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
        "a step with virtual_shards is several programs": getattr(step, "virtual_shards", None) is not None,
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
