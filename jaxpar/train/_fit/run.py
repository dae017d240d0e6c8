"""A call of `fit`, checked before any work, and the run that it continues. Neither changes while it trains."""

from __future__ import annotations

import collections
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from ... import checkpoint, data, updaters
from ..._core import calls, checks, files, text
from ..._devices import mesh, processes, user_mesh
from ..._store.store import specs_of
from .._callbacks.callbacks import Callback, Callbacks, OnStep, WithMemory, is_saved_memory
from .._callbacks.history import NO_METRICS, Record
from .._evaluate.evaluate import Evaluation, check_classes
from .._step.loss import ClassificationLoss, check_loss_takes
from .._step.state import TrainState, carries, check_is_state
from .._step.train_step import TrainStep
from .digest import digest_of_data
from .progress import Epoch, Profile, as_profile

# What `fit` itself puts into records. The metric `skipped` is the step's own.
_TAKEN = {*NO_METRICS, "test_loss", "test_accuracy"} - {"skipped"}


@dataclasses.dataclass(frozen=True)
class FitOptions:
    """The keyword arguments of `fit`, as they were given. Its docstring explains them."""

    test_data: data.Dataset | None
    apply_fn: Callable[..., jax.Array] | None
    eval_data: Any
    eval_fn: Callable[..., Any] | None
    epochs: int | None
    batch_size: int | None
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
    callbacks: Callback | WithMemory | Sequence[Callback | WithMemory]
    on_step: OnStep | None
    profile: Profile | None
    steps_per_execution: int | Literal["auto"]
    on_interrupt: Literal["auto", "return", "raise"]


class Run:
    """A call of `fit`, checked. It does not change while it trains. The errors are those of `fit`."""

    def __init__(self, state: TrainState, step: TrainStep, train_data: Any, options: FitOptions):
        # The order is that in which a user would mend them: what takes long to find out comes last.
        self.certificate = _path(options.certificate, "certificate")
        self.checkpoint_dir = _path(options.checkpoint_dir, "checkpoint_dir")
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
        calls.check_takes(step, ("state", "batch"), "fit: the step", "; make one by train.make_train_step(loss_fn)")
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
        if self.epochs is None and max_steps is None:
            raise ValueError("fit: the end of the training is not known; give epochs= or max_steps=, or both")
        # For people: the arguments that end the run.
        ends = {"epochs=": self.epochs, "max_steps=": max_steps}
        self.limits = " or ".join(name for name, number in ends.items() if number is not None)
        self.on_interrupt = options.on_interrupt
        checks.choice(options.on_interrupt, "fit", "on_interrupt", ("auto", "return", "raise"))
        self.progress = options.progress
        if options.progress not in (True, False):
            raise ValueError(f"fit: progress must be True or False, got {options.progress!r}")
        self.resume = options.resume
        if options.resume not in ("auto", True, False):
            raise ValueError(f"fit: resume must be 'auto', True or False, got {options.resume!r}")

        self.evaluation = Evaluation(
            test_data=options.test_data,
            apply_fn=options.apply_fn,
            eval_data=options.eval_data,
            eval_fn=options.eval_fn,
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
        if isinstance(self.source, (data.DatasetSource, data.ArraySource)):
            data._agree_on_arrays(self.source.arrays, "fit: train_data")
        words = f"{self.steps} of {self.batch_size} examples"
        processes.agree("fit: every process must have as many batches in an epoch", words)
        self.num_steps: int = max_steps or sys.maxsize  # at most
        if self.steps is not None:
            self.num_steps = min((self.epochs or sys.maxsize) * self.steps, self.num_steps)
            self.epochs = -(-self.num_steps // self.steps)
        # Where the run is to end, for the one that a callback ends earlier: in steps, or in epochs of unknown length.
        self.limit: int = self.num_steps if self.steps is not None else min(self.epochs or sys.maxsize, self.num_steps)
        loss_fn = getattr(step, "loss_fn", None)
        if isinstance(loss_fn, ClassificationLoss) and isinstance(self.source, data.DatasetSource):
            specs = specs_of(state.store)  # the state may be donated
            params = state.store.treedef.unflatten([specs[key] for key, _ in state.store.paths])
            check_classes("fit: train_data", loss_fn.apply_fn, (params,), self.source.dataset)
        # How many steps one compiled program makes. "auto": as many as take a fifth of a second.
        self.per_program: int | Literal["auto"] = _steps_per_program(
            options.steps_per_execution, step, self.source, state
        )
        # Whether a step may leave its update out, and whether one that is not finite ends the run. A step of the user's
        # own does not say so.
        self.skips: bool = getattr(step, "skips", False)
        self.stops: bool = getattr(step, "nonfinite", "ignore") == "stop"

    def batches(self, rng: jax.Array, start: int, **where: Any) -> Iterator[data.Batch]:
        """The batches after the first `start` steps, without an end, in host memory or where `where` says."""
        return iter(self.source.batches(self.batch_size, rng=shuffle_key(rng), epochs=None, start=start, **where))

    def check(self, state: TrainState) -> TrainState:
        """The state on the step's devices, checked with all that the run calls, as far as shapes are known."""
        metrics: list[str] = []
        if isinstance(self.step, TrainStep):
            state = self.step.complete(state)
            data._batch_options(self.source, state.store.devices, None, self.step.virtual_shards)
            shapes = getattr(self.source, "batch_shapes", lambda batch_size: None)(self.batch_size)
            if shapes is None:  # the step is traced after callbacks have begun, and a metrics file is new
                check_loss_takes(self.step.loss_fn, carries(state.model_state))
            else:
                *_, parts = self.step.parts(state, shapes)
                metrics = list(parts[-1].traced.out_info[1])
        scores = self.evaluation.check(state)
        own = "eval_" if "eval_" in self.evaluation.parts else ()
        if taken := sorted([name for name in metrics if name in _TAKEN or name.startswith(own)]):
            raise ValueError(f"fit: aux of loss_fn has {', '.join(taken)}, which fit records itself; rename that value")
        self.callbacks.check_metrics(metrics, scores, self.evaluation.parts)
        return state


def shuffle_key(rng: jax.Array) -> jax.Array:
    """The key for the order of the examples, from that of the state."""
    with user_mesh.outside_mesh():
        return jax.random.fold_in(rng, 0x5FFE1E)


def _path(given: str | os.PathLike[str] | None, name: str) -> Path | None:
    return None if given is None else files.as_path(given, f"fit: {name}")


def _count(given: int | None, name: str) -> int | None:
    return None if given is None else checks.whole_number(given, "fit", name)


def _steps_per_program(asked: Any, step: Any, source: data.Source, state: TrainState) -> int | Literal["auto"]:
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
    against = [reason for reason, holds in reasons.items() if holds]
    if asked == "auto":
        return "auto" if not against and {d.platform for d in devices or ()} <= {"cpu", "gpu"} else 1
    if against:
        raise ValueError(f"fit: steps_per_execution is {asked}, but {against[0]}; give 1, or leave it out")
    return asked


# Where it resumes.


_OF_EPOCHS = ("epochs_over", "epoch_began")


@dataclasses.dataclass(frozen=True)
class Past:
    """What happened before this call of `fit`."""

    first: int  # the step at which the run began
    rates: dict[str, float]  # the learning rates of the given state, where it has them
    history: list[Record] = dataclasses.field(default_factory=list)  # the records of the epochs that are over
    epoch: Epoch = dataclasses.field(default_factory=Epoch)  # the one that is not
    stopped: bool = False  # whether a callback ended the training, and would end it again
    memories: list[Any] | None = None  # of the callbacks, as `Callbacks.to_json` gave them. None: they were not saved.
    data: str | None = None  # a hash of those of this call, where they are arrays and checkpoints are written
    identity: str | None = None  # the name of the run in its logs, where it has any
    resumed: bool = False  # whether it goes on from a checkpoint of `fit`
    epochs_over: int = 0  # where epochs differ in length: how many are over,
    epoch_began: int | None = None  # and the step at which the next one began. None: at the first step.


def resume(run: Run, manager: checkpoint.Manager | None, state: TrainState) -> tuple[TrainState, Past]:
    """The state to resume from, and its run. A checkpoint of a run with other batches is refused."""
    found = None
    if manager is not None and run.resume:
        with processes.raise_together():
            run.callbacks.call("before_resume", manager.directory)
        found = manager._restore(lambda: like_saved(state, run.step), has_good_info)
    if found is None and run.resume is True:
        raise FileNotFoundError(f"fit: resume=True, but {run.checkpoint_dir} holds no checkpoint")
    # A call of `fit` that failed may have donated it: then a checkpoint is the only way on.
    given = None if mesh.is_donated(state) else int(state.step)
    rates = {} if given is None or manager is None else updaters.learning_rates(state)
    digest = None if manager is None else digest_of_data(run.source, run.examples)
    new, info = found or (state, {})
    at = given if found is None else int(new.step)
    if at is None:
        raise ValueError("fit: this state was donated to an earlier step; use the state that it returned")
    # A checkpoint of the same step goes on only where the run was interrupted at it.
    if given is not None and not (at > given or (at == given and info.get("interrupted"))):
        return state, Past(given, rates, data=digest)
    state = new
    if manager is not None and jax.process_index() == 0:
        text.say_news(f"resumed from step {at} in {files.shown(manager.directory)}")
        _say_other_rates(run, rates, info.get("rates", {}), state)
    if "first" not in info:  # the user saved it, so no epoch of that state is known
        return state, Past(at if given is None else given, rates, data=digest)
    data._go_to(run.source, info.get("place"))
    batch_size, examples = info["batch_size"], info["examples"]
    if (batch_size, examples) != (run.batch_size, run.examples):
        raise ValueError(
            f"fit: the checkpoint is from a run with batches of {batch_size} out of {examples or 'all'} examples, but "
            f"this run has {run.batch_size} out of {run.examples or 'all'}; give the same again, another "
            "checkpoint_dir, or resume=False"
        )
    if jax.process_index() == 0 and None not in (digest, info.get("data")) and digest != info["data"]:
        text.say(
            f"fit: train_data has other values than the run in {run.checkpoint_dir} had until step {at}. The resumed "
            "run goes on with the new ones. If that is not meant, give the same data again; resume=False or another "
            "checkpoint_dir begins a new run"
        )
    epoch = Epoch(collections.Counter(info.get("sums", {})), info.get("counted", 0), info.get("seconds", 0.0))
    history = list(filter(_is_record, info.get("history", [])))
    stopped, memories = info.get("stopped", False), info.get("callbacks")
    is_other = info.get("limit", run.limit) != run.limit  # where the run was to end
    if stopped and (is_other or not run.callbacks.stays_over(info.get("ended_by"))):
        stopped = False
        if jax.process_index() == 0:
            text.say_news(f"a callback ended this run at step {at}; other callbacks or limits are given, so it goes on")
    past = Past(info["first"], rates, history, epoch, stopped, memories, digest, info.get("run"), resumed=True)
    return state, dataclasses.replace(past, **{name: info[name] for name in _OF_EPOCHS if name in info})


def like_saved(state: TrainState, step: Any) -> TrainState:
    """A state with all parts that the step's checkpoints have. A step of the user's own has those of `state`."""
    with user_mesh.outside_mesh():
        state = mesh.zeros_if_donated(state)
    return step.complete(state) if hasattr(step, "complete") else state


def _say_other_rates(run: Run, given: dict[str, float], saved: dict[str, float], state: TrainState) -> None:
    """Say that a resumed run keeps the rate of its checkpoint, if `fit` is now given another rate than at first."""
    # Compares the rates given to the two calls of `fit`, because a callback may have changed the rate since.
    if saved and given and saved != given:
        now, before, kept = (
            ", ".join(f"{rate:g}" for rate in rates.values())
            for rates in (given, saved, updaters.learning_rates(state))
        )
        text.say(
            f"fit: the given state has the learning rate {now}, but the run in {run.checkpoint_dir} began with "
            f"{before}. The resumed run keeps the rate of the checkpoint, {kept}. To change it, call "
            "updaters.set_learning_rate on the state that checkpoint.restore returns; resume=False begins a new run"
        )


def has_good_info(path: Path, body: dict[str, Any]) -> bool:
    """True, or a `CheckpointError` for the info of a run that `fit` cannot have saved."""
    info, step = body.get("info", {}), body.get("step", 0)
    if "first" not in info:  # the user saved it
        return True
    history, sums, callbacks = info.get("history", []), info.get("sums", {}), info.get("callbacks", [])
    rates, ended_by = info.get("rates", {}), info.get("ended_by", [])
    good = {
        "first": _is_count(info["first"]) and info["first"] <= step,
        **{name: _is_count(info.get(name)) for name in ("batch_size", "examples")},
        **{name: isinstance(info.get(name, False), bool) for name in ("stopped", "interrupted")},
        "history": isinstance(history, list) and all(map(_is_record, history)),
        "sums": isinstance(sums, dict) and all(map(_is_number, sums.values())),
        **{name: _is_count(info.get(name, 0)) for name in ("counted", *_OF_EPOCHS)},
        "seconds": _is_number(info.get("seconds", 0.0)),
        "rates": isinstance(rates, dict) and all(map(_is_number, rates.values())),
        "callbacks": isinstance(callbacks, list) and all(map(is_saved_memory, callbacks)),
        "ended_by": isinstance(ended_by, list) and all(isinstance(each, str) and each.split() for each in ended_by),
        **{name: isinstance(info.get(name, ""), str) for name in ("run", "data")},
        "limit": _is_count(info.get("limit", 0)),
        "place": isinstance(info.get("place", []), list),
    }
    wrong = [name for name, holds in good.items() if not holds]
    if wrong:
        raise checkpoint.CheckpointError(f"{path} is damaged: wrong {' and '.join(wrong)} in the info of the run")
    return True


def _is_record(record: Any) -> bool:
    return isinstance(record, dict) and _is_count(record.get("epoch")) and _is_count(record.get("step"))


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_count(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
