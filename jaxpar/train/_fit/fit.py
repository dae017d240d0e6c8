"""The training loop as people call it: epochs of steps, with progress, metrics, callbacks and checkpoints."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from ... import data, distributed
from ..._devices import processes
from ..._devices.donation import is_donated
from ...updaters import assign
from .._step.nonfinite import NonFiniteError
from .._step.state import TrainState
from .._step.train_step import TrainStep
from . import interrupt
from .evaluate import evaluate
from .history import History
from .loop import Loop, OnStep, Record
from .metrics_files import to_jsonl
from .profile import Profile, Trace
from .progress import Progress
from .resume import RunCheckpoints

Callback = Callable[[TrainState, Record], Any]


def fit(
    state: TrainState,
    step: TrainStep,
    train_data: data.Dataset | data.Source | Iterable[Any],
    *,
    test_data: data.Dataset | None = None,
    apply_fn: Callable[[Any, jax.Array], jax.Array] | None = None,
    epochs: int,
    batch_size: int,
    progress: bool | Literal["plot"] = True,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    resume: bool | Literal["auto"] = "auto",
    checkpoint_every: int | None = None,
    keep: int = 3,
    metrics_file: str | os.PathLike[str] | None = None,
    callback: Callback | Sequence[Callback] = (),
    callbacks: Callback | Sequence[Callback] = (),
    on_step: OnStep | None = None,
    profile: Profile | None = None,
    steps_per_execution: int | Literal["auto"] = "auto",
    on_interrupt: Literal["auto", "return", "raise"] = "auto",
) -> tuple[TrainState, History]:
    """Trains for some epochs.

    The order of the examples follows from `state.rng` and the number of the step alone, so a run that is
    resumed goes on as if it had never stopped, and the number of devices does not change it. The host feeds the
    devices a few steps ahead and never waits for the step it has just begun.

    Ctrl-C, a notebook's interrupt and SIGTERM let the steps that are under way finish; with `checkpoint_dir` the
    state after it is saved, and the same call goes on from there, to the epoch it was going to. A second one
    stops at once, without that. Of several processes all stop after the same step, whichever got the signal; signals
    are left alone in threads other than the main one.

    Args:
        state: from `create_state`; its memory is given to the new states, so go on with the one returned.
        step: from `make_train_step`.
        train_data: a `data.Dataset`; the examples that fill no whole batch at the end of an epoch are left out. Or
            what `data.from_arrays` or `data.from_iterable` makes; anything else is given to the latter.
        test_data: where given, with `apply_fn`, evaluated after each epoch.
        apply_fn: as in `evaluate`.
        epochs: how many, from the step at which `state` is.
        batch_size: examples in a global batch.
        progress: a tqdm bar in a terminal or a notebook, and a line for each epoch. "plot": a picture of the
            losses in a notebook, drawn anew about once a second (elsewhere the same as True). False: nothing.
        checkpoint_dir: where to keep checkpoints, by orbax; one after each epoch.
        resume: "auto" goes on from the latest checkpoint in `checkpoint_dir` if it is further than `state`, or
            of the run that was interrupted there; False ignores it; True insists on one.
        checkpoint_every: a checkpoint after so many steps too.
        keep: how many of the latest checkpoints stay.
        metrics_file: a file that gets the history as JSON lines, one after each epoch, as by `to_jsonl`; written
            anew.
        callbacks: a function or several, each called as `callback(state, record)` after an epoch, when it is
            evaluated; one that returns True ends the training. Do not keep the state, the next step takes it.
        callback: the same.
        on_step: `on_step(step, metrics)` for each step, in order, with its metrics as floats; `step` counts from
            1 as `state.step` does. It is called up to sixteen steps late, so that nothing waits for it.
        profile: a directory for a trace of five steps, from the eleventh of this call on, by jax's profiler; or
            (directory, first_step, num_steps).
        steps_per_execution: how many steps the host starts at once, by `step.many`, which helps where a step is short;
            Ctrl-C waits for them. More than 1 needs a `data.Dataset` with room on the devices, and a
            single process. An epoch, `checkpoint_every` and a profile cut them shorter, so nothing else is different.
            "auto" is up to eight on CPUs, no more than take a fifth of a second; 1 on GPUs and TPUs, for a step with
            convolutions of XLA's (see `many`), and where more is not possible.
        on_interrupt: what Ctrl-C does in the end. "return": `fit` returns the state and the history so far.
            "raise": it raises a KeyboardInterrupt with both as attributes `state` and `history`. "auto": return
            in a notebook or at a prompt, raise in a script.

    Returns:
        (the trained state, a list with a dict for each epoch: `epoch` from 1, the `step` at its end, mean `loss`
        and whatever else the step reports, `accuracy` (None where it reports none), `test_loss` and
        `test_accuracy` (None without test data), `seconds` of training and `images_per_second`). A resumed run
        has the earlier epochs in it. `skipped`, of a step that may leave updates out, is how many it left out,
        and the means are of the others. An epoch that was interrupted comes last, with `interrupted` True and the
        means over the steps that it had.

    Raises:
        ValueError: a data set without one whole batch, numbers below 1, `apply_fn` without `test_data` or the
            other way round; a state whose memory was given away; a checkpoint of another model, optimizer, batch
            size or size of data set.
        RuntimeError: one of several processes of `python -m jaxpar launch` that has not joined the others.
        FileNotFoundError: `resume=True` and no checkpoint.
        NonFiniteError: a `FloatingPointError`: a step with `nonfinite="stop"` met a NaN or infinite loss or gradient;
            it names the step and the keys, and its `state`, which is saved too, is the one before that step.
        OSError: a checkpoint or metrics that cannot be written; the earlier ones stay.
        KeyboardInterrupt: after Ctrl-C, see `on_interrupt`. SystemExit(143): after SIGTERM.
        An exception that comes out of the run itself has `state` and `history` up to the last step as attributes,
        unless that step took the state with it.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optax
        >>> from jaxpar import data, kv, train
        >>> def loss_fn(params, batch, rng):
        ...     return ((batch["image"] @ params["w"] - batch["label"]) ** 2).mean(), {}
        >>> lines = data.Dataset(np.ones((8, 2), np.float32), np.ones(8, np.float32))
        >>> state = train.create_state(kv.from_params({"w": jnp.zeros(2)}, optimizer=optax.sgd(0.1)), 0)
        >>> state, history = train.fit(
        ...     state, train.make_train_step(loss_fn), lines, epochs=2, batch_size=8, progress=False)
        >>> [round(record["loss"], 2) for record in history]
        [1.0, 0.36]
    """
    distributed.check_joined("fit", "each would train a model of its own", launched=True)
    _check_updater(state)
    train_data = data.as_source(train_data)
    _check(train_data, test_data, apply_fn, epochs, batch_size, keep, checkpoint_every, resume)
    _check_modes(progress, on_interrupt)
    saves = RunCheckpoints(checkpoint_dir, keep, checkpoint_every, batch_size, train_data.examples(batch_size))
    state, past = saves.resumed(state, resume, step)
    history = History(past.history)
    told = _callbacks(callback, callbacks)
    began = int(state.step)
    steps = data.num_batches(train_data.examples(batch_size), batch_size)
    left = 0 if past.stopped else max(0, past.first + epochs * steps - began)
    loop = Loop(
        step,
        train_data,
        batch_size,
        past.first,
        left,
        Progress(progress, epochs, steps),
        past.under_way,
        on_step,
        Trace(profile, left),
        _steps_per_program(steps_per_execution, step, train_data, state),
        checkpoint_every if checkpoint_dir is not None else None,
    )
    told = [*_restarted(metrics_file, history), *told]  # now: a call that is refused leaves another run's file as it is
    try:
        with (
            interrupt.Signals(jax.process_count() > 1) as signals,
            contextlib.closing(saves),
            _saved(saves, loop, history, began),
        ):
            made = loop.run(state)
            for state, done in made:
                if done is not None:
                    _evaluated(done, state, apply_fn, test_data, batch_size)
                    loop.progress.end(done)
                    history.append(done)
                stop = asked = False
                try:
                    stop = done is not None and _run_callbacks(told, state, done)
                finally:  # a callback that fails costs no steps
                    asked = signals.look(state, loop.at, done is not None)
                    saves.save(state, loop, history, over=done is not None, stopped=stop, interrupted=asked)
                if stop or asked:
                    history += loop.cut()
                    break
    except Exception as error:
        _attach_state(error, state, history, loop.at > began)
        raise
    if signals.asked is not None:
        where = interrupt.where(loop.at, loop.epoch, epochs, saves.path(loop.at))
        return interrupt.leave(signals.asked, state, history, where, on_interrupt)
    return state, history


def _steps_per_program(asked: Any, step: Any, source: data.Source, state: TrainState) -> int | Literal["auto"]:
    """How many steps the host starts at once."""
    if asked != "auto" and (isinstance(asked, bool) or not isinstance(asked, int | np.integer) or asked < 1):
        raise ValueError(f"fit: steps_per_execution must be 'auto', or an int of 1 or more, got {asked!r}")
    if asked == 1:
        return 1
    reasons = {
        "the step was not made by make_train_step": not isinstance(step, TrainStep),
        "the training data is no data.Dataset": not isinstance(source, data.DatasetSource),
        "there are several processes": jax.process_count() > 1,
        "the state was not made by create_state, so its devices are not known": not state.store.devices,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if asked == "auto":
        return "auto" if reason is None and all(d.platform == "cpu" for d in state.store.devices or ()) else 1
    if reason:
        raise ValueError(f"fit: steps_per_execution is {asked}, but {reason}; say 1, or leave it out")
    return int(asked)


def _restarted(metrics_file: Any, history: History) -> list[Callback]:
    """The sink of the metrics file, if there is one; the file then has these records."""
    sinks = [] if metrics_file is None else [to_jsonl(metrics_file)]
    with processes.raise_together():
        for sink in sinks:
            sink.restart(history)
    return [*sinks]


def _callbacks(*callbacks: Any) -> list[Callback]:
    """Whom to tell about each epoch."""
    told: list[Callback] = [tell for given in callbacks for tell in ([given] if callable(given) else given)]
    for tell in told:
        if not callable(tell):
            raise TypeError(f"fit: a callback must be a function of (state, record), got {type(tell).__name__}")
    return told


def _run_callbacks(told: list[Callback], state: TrainState, record: Record) -> bool:
    """Calls the callbacks; whether one of them ends the training by returning True, of Python, NumPy or JAX.

    In several processes each calls its own; where one fails all fail, and where one ends the training all end it.
    """
    with processes.raise_together():
        answers = [tell(state, record) for tell in told]
    stop = any(isinstance(a, bool | np.bool_ | jax.Array) and np.shape(a) == () and bool(a) for a in answers)
    return not processes.all_true(not stop)


@contextlib.contextmanager
def _saved(saves: RunCheckpoints, loop: Loop, history: History, began: int) -> Generator[None]:
    """Where a step stops because it is not finite, the state before it is saved."""
    try:
        yield
    except NonFiniteError as error:
        loop.stopped(error.step)
        if error.step > began:
            saves.save(error.state, loop, history, over=False, stopped=False, interrupted=True)
        raise


def _attach_state(error: Exception, state: TrainState, history: History, made: bool) -> None:
    """Leaves what was computed with an exception; the caller's own state was given to the first step."""
    if isinstance(error, NonFiniteError):
        state, made = error.state, True
    if made and not is_donated(state):
        error.state, error.history = state, history  # pyright: ignore[reportAttributeAccessIssue]
        error.add_note(
            f"fit: the state and the history up to step {int(state.step)} are the attributes `state` and `history` "
            "of this exception; in a notebook: import sys; state = sys.last_value.state"
        )


def _evaluated(record: Record, state: TrainState, apply_fn: Any, test_data: Any, batch_size: int) -> None:
    if test_data is not None:
        scores = evaluate(state, apply_fn, test_data, batch_size=batch_size)
        record["test_loss"], record["test_accuracy"] = scores["loss"], scores["accuracy"]


def _check(
    train_data: Any,
    test_data: Any,
    apply_fn: Any,
    epochs: int,
    batch_size: int,
    keep: int,
    checkpoint_every: int | None,
    resume: Any,
) -> None:
    for name, value in (("epochs", epochs), ("batch_size", batch_size), ("keep", keep)):
        if value < 1:
            raise ValueError(f"fit: {name} must be 1 or more, got {value!r}")
    if checkpoint_every is not None and checkpoint_every < 1:
        raise ValueError(f"fit: checkpoint_every must be 1 or more, got {checkpoint_every!r}")
    if resume not in ("auto", True, False):
        raise ValueError(f"fit: resume must be 'auto', True or False, got {resume!r}")
    if (test_data is None) != (apply_fn is None):
        raise ValueError("fit: evaluation takes both test_data and apply_fn, got only one of them")
    examples = train_data.examples(batch_size)
    if not data.num_batches(examples, batch_size):
        raise ValueError(f"fit: {examples} examples make no whole batch of {batch_size}")


def _check_updater(state: TrainState) -> None:
    if state.store.updater is assign:
        raise ValueError(
            "fit: the store has no optimizer, so every step would replace the parameters by their gradients; "
            "make it by kv.from_params(params, optimizer=optax.sgd(0.1))"
        )


def _check_modes(progress: Any, on_interrupt: Any) -> None:
    if progress not in (True, False, "plot"):
        raise ValueError(f"fit: progress must be True, False or 'plot', got {progress!r}")
    if on_interrupt not in ("auto", "return", "raise"):
        raise ValueError(f"fit: on_interrupt must be 'auto', 'return' or 'raise', got {on_interrupt!r}")
