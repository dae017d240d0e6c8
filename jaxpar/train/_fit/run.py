"""What stays the same while `fit` trains: its arguments, checked before any work."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import jax

from ... import data, distributed
from ..._core import checks
from ..._core.arguments import check_takes, did_you_mean
from ..._devices.user_mesh import outside_mesh
from ...updaters import assign
from .._callbacks.callbacks import Callbacks, OnStep
from .._callbacks.collect import check_files, collect_callbacks
from .._callbacks.history import Record
from .._evaluate.evaluation import Evaluation, plan_evaluation
from .._evaluate.labels import check_training_classes
from .._step.state import IN_STORE, TrainState, check_is_state
from .._step.train_step import TrainStep
from .certificate import Certificate
from .epoch import BEHIND, RECORD_NAMES, Metrics
from .profile import Profile

Made = tuple[TrainState, Metrics, range | None]


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
    """A call of `fit`, checked.

    Attributes:
        options: as given, with an `int` for each whole number.
        step: as given.
        source: the training data.
        callbacks: the metrics file and what was given.
        evaluation: where scores come from.
        certificate: where hashes of the state go.
        epochs: how many the run goes into.
        examples: of an epoch.
        steps: of an epoch.
        per_program: how many steps one compiled program makes. "auto": as many as take a fifth of a second.
        make_steps: opens a block with the steps of a `Loop`: a pair of the new state and its metrics for each, and the
            rows where these are of several steps. None: the loop calls the step by itself.
        behind: how many steps later their metrics are read.
    """

    options: Options
    step: TrainStep
    source: data.Source
    callbacks: Callbacks
    evaluation: Evaluation
    certificate: Certificate
    epochs: int
    examples: int
    steps: int
    per_program: int | Literal["auto"]
    make_steps: Callable[[Any], contextlib.AbstractContextManager[Iterator[Made]]] | None = None
    behind: int = BEHIND

    @property
    def num_steps(self) -> int:
        """How many steps the whole run has."""
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
        """The batches after the first `start` steps, without an end.

        Args:
            rng: of the state.
            where: the devices that they go to. Without it they are in host memory.
        """
        batch_size = self.options.batch_size
        return iter(self.source.batches(batch_size, rng=shuffle_key(rng), epochs=None, start=start, **where))

    def check(self, state: TrainState) -> TrainState:
        """The state on the step's devices, checked with all that the run calls, as far as shapes are known."""
        metrics: list[str] = []
        if isinstance(self.step, TrainStep):
            state = self.step.complete(state)
            data._virtual_options(self.source, self.step.virtual_shards, state.store.devices)
            shapes = getattr(self.source, "batch_shapes", lambda batch_size: None)(self.options.batch_size)
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


def plan_run(state: TrainState, step: TrainStep, train_data: Any, **given: Any) -> Run:
    """The run of a call of `fit`, from its arguments. The errors are those of `fit`."""
    options = Options(**given)
    callbacks = collect_callbacks(options.metrics_file, options.callbacks, options.on_step)
    distributed.check_joined("fit", "each would train a model of its own", launched=True)
    _check_inputs(state, step)
    options = _check_options(options)
    certificate = Certificate(options.certificate, options.certificate_every)
    check_files(callbacks, certificate.path)
    evaluated = {name: given[name] for name in ("test_data", "apply_fn", "eval_data", "eval_fn")}
    evaluation = plan_evaluation(**evaluated, batch_size=options.batch_size)
    source = data.as_source(train_data)
    examples = source.examples(options.batch_size)
    steps = examples // options.batch_size
    if not steps:
        raise ValueError(
            f"fit: {examples} examples make no whole batch of {options.batch_size}; use a smaller batch_size"
        )
    epochs = sys.maxsize if options.epochs is None else options.epochs
    if options.max_steps is not None:
        epochs = min(epochs, -(-options.max_steps // steps))
    check_training_classes(step, state, source)
    per_program = _steps_per_program(options.steps_per_execution, step, source, state)
    callbacks.check(options.checkpoint_dir, evaluation.measures)
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
        raise ValueError("fit: epochs= or max_steps= says when the training ends; give one of them, or both")
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


def refuse_unknown(unknown: dict[str, Any], function: Callable[..., Any]) -> None:
    """`TypeError` for an argument that `fit` does not have, with the nearest one that it has."""
    for name in unknown:
        known = [other for other in inspect.signature(function).parameters if other != "unknown"]
        hint = f"; {_HINTS[name]}" if name in _HINTS else did_you_mean(name, known)
        raise TypeError(f"fit: unknown argument {name}={hint}")


_VALIDATION = "evaluation data are test_data= with apply_fn=, or eval_data= with eval_fn="
_CALLBACK = "it is a callback, callbacks=train.EarlyStopping(patience=3)"
_HINTS = {
    "callback": "callbacks= takes a function or a sequence of functions",
    **dict.fromkeys(("early_stopping", "patience"), _CALLBACK),
    **dict.fromkeys(("validation_data", "val_data", "validation_split", "valid_data"), _VALIDATION),
    **dict.fromkeys(("optimizer", "learning_rate", "lr", "tx"), IN_STORE),
    **dict.fromkeys(("loss", "loss_fn", "grad_transform"), "it belongs to the step, train.make_train_step(loss_fn)"),
    "shuffle": "examples are shuffled by state.rng; data.from_iterable keeps an order of its own",
    "verbose": "call it progress, True or False",
    "devices": "they belong to the state, train.create_state(store, rng, devices=...)",
    "seed": "it belongs to the state, train.create_state(store, seed)",
    "rng": "it belongs to the state, train.create_state(store, rng)",
}


def _check_inputs(state: Any, step: Any) -> None:
    check_is_state(state, "fit")
    if state.store.updater is assign:
        raise ValueError(
            "fit: the store has no optimizer, so every step would replace the parameters by their gradients; "
            "make it by kv.from_params(params, optimizer=optax.sgd(0.1))"
        )
    if not callable(step):
        raise TypeError(f"fit: expected a step, train.make_train_step(loss_fn); got {checks.describe(step)}")
    check_takes(step, ("state", "batch"), "fit: the step", "; make one by train.make_train_step(loss_fn)")


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
