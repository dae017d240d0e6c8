"""What stays the same while `fit` trains: its arguments, checked before any work."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax

from ... import data, distributed
from ..._core import checks
from ..._core.calls import check_takes
from ..._devices.user_mesh import outside_mesh
from ...updaters import assign
from .._callbacks.callbacks import Callbacks, OnStep, collect_callbacks
from .._callbacks.history import NO_METRICS
from .._evaluate.evaluate import Evaluation, check_training_classes, plan_evaluation
from .._step.state import TrainState, check_is_state
from .._step.train_step import TrainStep
from .certificate import Certificate
from .progress import BEHIND, Metrics, Profile

Made = tuple[TrainState, Metrics, range | None]
# What `fit` itself puts into records. The metric `skipped` is the step's own.
_TAKEN = {*NO_METRICS, "test_loss", "test_accuracy"} - {"skipped"}


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `fit` beside the state, the step and the data; see there."""

    test_data: Any
    apply_fn: Any
    eval_data: Any
    eval_fn: Any
    epochs: int | None
    batch_size: int
    max_steps: int | None
    eval_every: int | None
    progress: bool
    checkpoint_dir: str | os.PathLike[str] | None
    resume: bool | Literal["auto"]
    checkpoint_every: int | None
    keep: int
    certificate: str | os.PathLike[str] | None
    certificate_every: int
    metrics_file: str | os.PathLike[str] | None
    callbacks: Any
    on_step: OnStep | None
    profile: Profile | None
    steps_per_execution: int | Literal["auto"]
    on_interrupt: Literal["auto", "return", "raise"]


@dataclasses.dataclass(frozen=True)
class Run:
    """A call of `fit`, checked."""

    options: Options  # as given, with an `int` for each whole number
    step: TrainStep
    source: data.Source
    callbacks: Callbacks  # the metrics file and what was given
    evaluation: Evaluation  # where scores come from
    certificate: Certificate  # where hashes of the state go
    epochs: int  # how many the run goes into
    examples: int  # of an epoch
    steps: int  # of an epoch
    # How many steps one compiled program makes. "auto": as many as take a fifth of a second.
    per_program: int | Literal["auto"]
    # Opens a block with the steps of a `Loop`: a pair of the new state and its metrics for each, and the rows where
    # these are of several steps. None: the loop calls the step by itself.
    make_steps: Callable[[Any], contextlib.AbstractContextManager[Iterator[Made]]] | None = None
    behind: int = BEHIND  # how many steps later their metrics are read

    @property
    def num_steps(self) -> int:
        return min(self.epochs * self.steps, self.options.max_steps or sys.maxsize)

    @property
    def skips(self) -> bool:
        """Whether a step may leave its update out. A step of the user's own does not say so."""
        return getattr(self.step, "skips", False)

    @property
    def stops(self) -> bool:
        """Whether a step that is not finite ends the run."""
        return getattr(self.step, "nonfinite", "ignore") == "stop"

    @property
    def unit(self) -> str:
        """What the data consists of, for people."""
        return "images" if isinstance(self.source, data.DatasetSource) else "examples"

    def batches(self, rng: jax.Array, start: int, **where: Any) -> Iterator[data.Batch]:
        """The batches after the first `start` steps, without an end, in host memory or where `where` says."""
        batch_size = self.options.batch_size
        return iter(self.source.batches(batch_size, rng=shuffle_key(rng), epochs=None, start=start, **where))

    def check(self, state: TrainState) -> TrainState:
        """The state on the step's devices, checked with all that the run calls, as far as shapes are known."""
        metrics: list[str] = []
        if isinstance(self.step, TrainStep):
            state = self.step.complete(state)
            data._batch_options(self.source, state.store.devices, None, self.step.virtual_shards)
            shapes = getattr(self.source, "batch_shapes", lambda batch_size: None)(self.options.batch_size)
            metrics = self.step.check(state, shapes)
        scores = self.evaluation.check(state)
        own = ("eval_",) if self.evaluation.measures["eval_"] else ()
        taken = [name for name in metrics if name in _TAKEN or name.startswith(own)]
        if taken:
            raise ValueError(
                f"fit: aux of loss_fn has {', '.join(sorted(taken))}, which fit records itself; rename that value"
            )
        if metrics:
            self.callbacks.check_metrics(metrics, scores, self.evaluation.measures)
        return state


def plan_run(state: TrainState, step: TrainStep, train_data: Any, **given: Any) -> Run:
    """The run of a call of `fit`, from its arguments. The errors are those of `fit`."""
    options = Options(**given)
    # The order is that in which a user would mend them: what takes long to find out comes last.
    callbacks = collect_callbacks(options.metrics_file, options.callbacks, options.on_step)
    distributed.check_joined("fit", "each process would train its own model", launched=True)
    _check_inputs(state, step)
    source = data.as_source(train_data)
    batch_size = data._usual_batch_size(options.batch_size, source)
    options = _check_options(dataclasses.replace(options, batch_size=batch_size))
    certificate = Certificate(options.certificate, options.certificate_every)
    evaluated = {name: given[name] for name in ("test_data", "apply_fn", "eval_data", "eval_fn")}
    evaluation = plan_evaluation(**evaluated, batch_size=options.batch_size)
    examples = source.examples(options.batch_size)
    steps = examples // options.batch_size
    checks.whole_batch(examples, options.batch_size, "fit")
    epochs = sys.maxsize if options.epochs is None else options.epochs
    if options.max_steps is not None:
        epochs = min(epochs, -(-options.max_steps // steps))
    check_training_classes(step, state, source)
    per_program = _steps_per_program(options.steps_per_execution, step, source, state)
    callbacks.check(options.checkpoint_dir, certificate.path, evaluation.measures)
    return Run(options, step, source, callbacks, evaluation, certificate, epochs, examples, steps, per_program)


def shuffle_key(rng: jax.Array) -> jax.Array:
    """The key for the order of the examples, from that of the state."""
    with outside_mesh():
        return jax.random.fold_in(rng, 0x5FFE1E)


def _check_options(options: Options) -> Options:
    """The options with an `int` for each whole number."""
    numbers: dict[str, int | None] = {}
    for name in ("batch_size", "keep"):
        numbers[name] = checks.whole_number(getattr(options, name), "fit", name)
    for name in ("epochs", "max_steps", "eval_every", "checkpoint_every"):
        value = getattr(options, name)
        numbers[name] = None if value is None else checks.whole_number(value, "fit", name)
    if options.epochs is None and options.max_steps is None:
        raise ValueError("fit: the end of the training is not known; give epochs= or max_steps=, or both")
    if options.checkpoint_dir is None:
        numbers["checkpoint_every"] = None
    checks.choice(options.on_interrupt, "fit", "on_interrupt", ("auto", "return", "raise"))
    if options.progress == "plot":
        raise ValueError("fit: progress='plot' is now a callback: fit(..., callbacks=train.LivePlot(), progress=False)")
    if options.progress not in (True, False):
        raise ValueError(f"fit: progress must be True or False, got {options.progress!r}")
    if options.resume not in ("auto", True, False):
        raise ValueError(f"fit: resume must be 'auto', True or False, got {options.resume!r}")
    return dataclasses.replace(options, **numbers)


def _check_inputs(state: Any, step: Any) -> None:
    check_is_state(state, "fit")
    if state.store.updater is assign:
        raise ValueError(
            "fit: the store has no optimizer, so every step would replace the parameters by their gradients; "
            "make it by kv.from_params(params, optimizer=optax.sgd(0.1))"
        )
    check_takes(step, ("state", "batch"), "fit: the step", "; make one by train.make_train_step(loss_fn)")


def _steps_per_program(asked: Any, step: Any, source: data.Source, state: TrainState) -> int | Literal["auto"]:
    """How many steps one compiled program makes."""
    if asked != "auto":
        asked = checks.whole_number(asked, "fit", "steps_per_execution")
    if asked == 1:
        return 1
    devices = state.store.devices
    reasons = {
        "the step was not made by make_train_step": not isinstance(step, TrainStep),
        "a step with virtual_shards is several programs": getattr(step, "virtual_shards", None) is not None,
        "train_data is not a data.Dataset": not isinstance(source, data.DatasetSource),
        "there are several processes": jax.process_count() > 1,
        "the state does not know its devices, because create_state did not make it": not devices,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if asked == "auto":
        return "auto" if reason is None and all(d.platform == "cpu" for d in devices or ()) else 1
    if reason:
        raise ValueError(f"fit: steps_per_execution is {asked}, but {reason}; give 1, or leave it out")
    return asked
