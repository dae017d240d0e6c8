"""A call of `fit`: its options, and the run that they and the other arguments make, checked before any work."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from ... import checkpoint, data, updaters
from ..._core import checks, files
from ..._core.functions import check_takes
from ..._devices import processes, user_mesh
from ..._store.store import specs_of
from .._callbacks.callback import CallbackFunction, OnStep, WithMemory
from .._callbacks.callbacks import Callbacks
from .._callbacks.history import NO_METRICS
from .._evaluate.evaluate import Evaluation, check_classes
from .._step.loss import ClassificationLoss, by_name, check_loss_takes
from .._step.modules import ModuleLoss
from .._step.state import TrainState, carries, check_is_state
from .._step.train_step import TrainStep
from .digest import digest_of_data
from .progress import Profile, Show, as_profile

# What `fit` itself puts into records. The metric `skipped` is the step's own.
_TAKEN = {*NO_METRICS, "test_loss", "test_accuracy"} - {"skipped"}


@dataclasses.dataclass(frozen=True)
class FitOptions:
    """The keyword arguments of `fit`, as they were given. Its docstring explains them."""

    # `fit` writes them out once more, for Tab, Shift-Tab and `help()`. A test asserts that the defaults are the same.
    test_data: data.Dataset | None = None
    apply_fn: Callable[..., jax.Array] | None = None
    eval_data: Any = None
    eval_fn: Callable[..., Any] | None = None
    epochs: int | None = None
    batch_size: int | None = None
    max_steps: int | None = None
    eval_every: int | None = None
    progress: Show = True
    checkpoint_dir: str | os.PathLike[str] | None = None
    resume: bool | Literal["auto"] = "auto"
    checkpoint_every: int | None = None
    keep: int = 3
    keep_every: int | None = None
    certificate: str | os.PathLike[str] | None = None
    certificate_every: int = 100
    metrics_file: str | os.PathLike[str] | None = None
    callbacks: CallbackFunction | WithMemory | Sequence[CallbackFunction | WithMemory] = ()
    on_step: OnStep | None = None
    profile: Profile | None = None
    steps_per_execution: int | Literal["auto"] = "auto"
    on_interrupt: Literal["auto", "return", "raise"] = "auto"


class Run:
    """A call of `fit`, checked. It does not change while it trains. The errors are those of `fit`."""

    def __init__(self, state: TrainState, step: TrainStep, train_data: Any, options: FitOptions):
        # The order is that in which a user would mend them: what takes long to find out comes last.
        self.certificate = _path(options.certificate, "certificate")
        directory = options.checkpoint_dir
        self.checkpoint_dir = None if directory is None else checkpoint._as_path(directory, "fit: checkpoint_dir")
        metrics_file = _path(options.metrics_file, "metrics_file")
        self.profile: Profile | None = as_profile(options.profile)
        places = self.checkpoint_dir, self.certificate
        self.callbacks = Callbacks(metrics_file, options.callbacks, options.on_step, *places)
        check_is_state(state, "fit")
        if state.store.updater is updaters.assign:
            raise ValueError(
                "fit: the store has no optimizer, so every step would replace the parameters by their gradients; "
                "make it by kv.from_params(params, optimizer=optax.sgd(0.1))"
            )
        check_takes(step, ("state", "batch"), "fit: the step", "; make one by train.make_train_step(loss_fn)")
        self.step: TrainStep = step
        self.source: data.Source = data.as_source(train_data)
        # For people: what the data consist of.
        self.unit = "images" if isinstance(self.source, data.DatasetSource) else "examples"

        # Numbers and choices.
        batch_size = data._usual_batch_size(self.source) if options.batch_size is None else options.batch_size
        self.batch_size = checks.whole_number(batch_size, "fit", "batch_size")
        self.keep = checks.whole_number(options.keep, "fit", "keep")
        self.certificate_every = checks.whole_number(options.certificate_every, "fit", "certificate_every")
        self.epochs = _count(options.epochs, "epochs")  # how many the run goes into, where that is known
        max_steps = _count(options.max_steps, "max_steps")
        self.eval_every = _count(options.eval_every, "eval_every")
        checkpoint_every = _count(options.checkpoint_every, "checkpoint_every")
        self.checkpoint_every = None if self.checkpoint_dir is None else checkpoint_every
        keep_every = _count(options.keep_every, "keep_every")
        self.keep_every = None if self.checkpoint_dir is None else keep_every
        if self.epochs is None and max_steps is None:
            raise ValueError("fit: the end of the training is not known; give epochs= or max_steps=, or both")
        # For people: the arguments that end the run.
        ends = {"epochs=": self.epochs, "max_steps=": max_steps}
        self.limits = " or ".join(name for name, number in ends.items() if number is not None)
        self.on_interrupt = options.on_interrupt
        checks.choice(options.on_interrupt, "fit", "on_interrupt", ("auto", "return", "raise"))
        self.progress: Show = options.progress
        is_number = isinstance(options.progress, int) and options.progress > 0
        if options.progress not in (True, False, "bar") and not is_number:
            raise ValueError(
                "fit: progress must be True, False, 'bar' for one bar of the whole run, or n for a line after every n "
                f"epochs, got {options.progress!r}"
            )
        self.resume = options.resume
        if options.resume not in ("auto", True, False):
            raise ValueError(f"fit: resume must be 'auto', True or False, got {options.resume!r}")

        loss_fn = getattr(step, "loss_fn", None)
        of_module = isinstance(loss_fn, ModuleLoss)
        loss_fn = loss_fn.loss_fn if of_module else loss_fn
        self.evaluation = Evaluation(
            test_data=options.test_data,
            apply_fn=options.apply_fn,
            eval_data=options.eval_data,
            eval_fn=options.eval_fn,
            loss_fn=loss_fn,
            batch_size=self.batch_size,
        )
        # Of an epoch. With `steps_per_epoch="all"` the steps are None, and epochs end where the data do.
        self.examples, self.steps = 0, None
        if isinstance(self.source, data.IterableSource) and self.source.steps_per_epoch == "all":
            self.source.check(self.batch_size)
        else:
            self.examples = self.source.examples(self.batch_size)
            checks.whole_batch(self.examples, self.batch_size, "fit")
            self.steps = self.examples // self.batch_size
        for source in data._sources_of(self.source):
            if isinstance(source, (data.DatasetSource, data.ArraySource)):
                data._agree_on_arrays(source.arrays, "fit: train_data")
        # One that has fewer would leave the others waiting in a collective.
        batches = f"{self.steps} of {self.batch_size} examples"
        processes.agree("fit: every process must have as many batches in an epoch", batches)
        self.num_steps: int = max_steps or sys.maxsize  # at most
        if self.steps is not None:
            self.num_steps = min((self.epochs or sys.maxsize) * self.steps, self.num_steps)
            self.epochs = -(-self.num_steps // self.steps)
        # Where the run is to end, for the one that a callback ends earlier: in steps, or in epochs of unknown length.
        self.limit: int = self.num_steps if self.steps is not None else min(self.epochs or sys.maxsize, self.num_steps)
        # Labels beyond the classes of the model: JAX would take another class for them, or give NaN.
        if isinstance(loss_fn, ClassificationLoss) and isinstance(self.source, data.DatasetSource):
            specs = specs_of(state.store)  # the state may be donated
            params = state.store.treedef.unflatten([specs[key] for key, _ in state.store.paths])
            model = state.module.arguments(params, state.model_state) if of_module else (params,)
            check_classes("fit: train_data", loss_fn.apply_fn, model, self.source.dataset)
        # How many steps one compiled program makes. "auto": as many as take a fifth of a second.
        self.per_program: int | Literal["auto"] = _steps_per_program(
            options.steps_per_execution, step, self.source, state
        )
        # Whether a step may leave its update out, and whether one that is not finite ends the run. A step of the user's
        # own does not say so.
        self.skips: bool = getattr(step, "skips", False) or self.callbacks.undo is not None
        self.left_out: frozenset[int] = getattr(step, "left_out", frozenset())
        self.stops: bool = getattr(step, "nonfinite", "ignore") == "stop"

    @functools.cached_property
    def data_digest(self) -> str | None:
        """A hash of the data, which is read once. None for data that are not known before."""
        return digest_of_data(self.source, self.examples)

    def is_epoch_over(self, steps: int) -> bool:
        """Whether an epoch is over after so many steps of it."""
        if self.steps is not None:
            return steps == self.steps
        return isinstance(self.source, data.IterableSource) and self.source.is_pass_over

    def is_evaluation_due(self, step: int) -> bool:
        """Whether there is an evaluation after this step, beside those at the end of an epoch."""
        return self.eval_every is not None and step % self.eval_every == 0

    def is_record_due(self, step: int, last: int, is_epoch_over: bool) -> bool:
        """Whether there is a record after this step. `max_steps` may end the run within an epoch, which has one too."""
        return is_epoch_over or self.is_evaluation_due(step) or step == last

    def batches(self, rng: jax.Array, start: int, **options: Any) -> Iterator[data.Batch]:
        """The batches after the first `start` steps, without an end. `options`: as of `data._batch_options`."""
        return iter(self.source.batches(self.batch_size, rng=shuffle_key(rng), epochs=None, start=start, **options))

    def check(self, state: TrainState) -> TrainState:
        """The state on the step's devices, checked with all that the run calls, as far as shapes are known."""
        metrics: list[str] = []
        if isinstance(self.step, TrainStep):
            state = self.step.complete(state)
            data._batch_options(self.source, state.store.devices, None, self.step.virtual_shards)
            # To trace the step tells the names of its metrics, and raises what the first step would raise. That comes
            # before a metrics file is made.
            shapes = getattr(self.source, "batch_shapes", lambda batch_size: None)(self.batch_size)
            if shapes is None:  # the step is traced after callbacks have begun, and a metrics file is new
                check_loss_takes(self.step.loss_fn, carries(state.model_state))
            else:
                *_, programs = self.step.parts(state, shapes)
                metrics = list(by_name(programs[-1].traced.out_info[1]))
        scores = self.evaluation.check(state)
        prefix = "eval_" if "eval_" in self.evaluation.parts else ()
        if taken := sorted([name for name in metrics if name in _TAKEN or name.startswith(prefix)]):
            raise ValueError(f"fit: aux of loss_fn has {', '.join(taken)}, which fit records itself; rename that value")
        self.callbacks.check_metrics(metrics, scores, self.evaluation.parts)
        return state


def shuffle_key(rng: jax.Array) -> jax.Array:
    """The key for the order of the examples, from that of the state."""
    # Step t draws from `fold_in(rng, t)`: this number is far beyond those of most runs. It never changes, or a resumed
    # run would see other batches.
    with user_mesh.outside_mesh():
        return jax.random.fold_in(rng, 0x5FFE1E)


def _path(value: str | os.PathLike[str] | None, name: str) -> Path | None:
    return None if value is None else files.as_path(value, f"fit: {name}")


def _count(value: int | None, name: str) -> int | None:
    return None if value is None else checks.whole_number(value, "fit", name)


def _steps_per_program(
    asked: int | Literal["auto"], step: TrainStep, source: data.Source, state: TrainState
) -> int | Literal["auto"]:
    if asked != "auto":
        asked = checks.whole_number(asked, "fit", "steps_per_execution")
    if asked == 1:
        return 1
    # `step.many` is one program over a stack of batches, which are gathered on the devices of one process.
    # "auto" leaves it where it cannot be. A number is the user's word, so it is refused with the reason.
    devices = state.store.devices
    reasons = {
        "the step was not made by make_train_step": not isinstance(step, TrainStep),
        "a step with virtual_shards is several programs": getattr(step, "virtual_shards", None) is not None,
        "train_data is not a data.Dataset": not isinstance(source, data.DatasetSource),
        "there are several processes": jax.process_count() > 1,
        "the state does not know its devices, because create_state did not make it": not devices,
    }
    against = [reason for reason, holds in reasons.items() if holds]
    if asked == "auto":
        return "auto" if not against and {d.platform for d in devices or ()} <= {"cpu", "gpu"} else 1
    if against:
        raise ValueError(f"fit: steps_per_execution is {asked}, but {against[0]}; give 1, or leave it out")
    return asked
