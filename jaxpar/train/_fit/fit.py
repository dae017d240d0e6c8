"""The training loop: epochs of steps, with progress, metrics, callbacks and checkpoints."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Literal, Never

import jax

from ... import data
from ..._core.calls import answers
from ..._devices import processes
from ..._devices.donation import is_donated
from .._callbacks.callbacks import Callback, OnStep, WithMemory
from .._callbacks.history import History, Record
from .._step.nonfinite import NonFiniteError
from .._step.state import TrainState
from .._step.train_step import TrainStep
from . import interrupt
from .loop import Loop
from .profile import Profile
from .resume import RunCheckpoints
from .role import take_role
from .run import Run, plan_run, refuse_unknown


@answers("fit")
def fit(
    state: TrainState,
    step: TrainStep,
    train_data: data.Dataset | data.Source | Iterable[Any],
    *,
    test_data: data.Dataset | None = None,
    apply_fn: Callable[..., jax.Array] | None = None,
    eval_data: Any = None,
    eval_fn: Callable[..., Any] | None = None,
    epochs: int | None = None,
    batch_size: int,
    max_steps: int | None = None,
    eval_every: int | None = None,
    progress: bool = True,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    resume: bool | Literal["auto"] = "auto",
    checkpoint_every: int | None = None,
    keep: int = 3,
    certificate: str | os.PathLike[str] | None = None,
    certificate_every: int = 100,
    metrics_file: str | os.PathLike[str] | None = None,
    callbacks: Callback | WithMemory | Sequence[Callback | WithMemory] = (),
    on_step: OnStep | None = None,
    profile: Profile | None = None,
    steps_per_execution: int | Literal["auto"] = "auto",
    on_interrupt: Literal["auto", "return", "raise"] = "auto",
    **unknown: Never,
) -> tuple[TrainState, History]:
    """Train for some epochs.

    The order of the examples depends on `state.rng` and the number of the step only. So a resumed run goes on as if it
    had never stopped, and the number of devices does not change the order. The host starts a few steps ahead of the
    devices.

    Ctrl-C, a notebook's interrupt and SIGTERM let the steps under way finish. With `checkpoint_dir` the state after
    them is saved, and the same call goes on from there, to the same last epoch. A second signal stops at once and saves
    nothing. Several processes stop after the same step, whichever got the signal. In threads other than the main one,
    signals are not handled.

    Args:
        state: from `create_state`. It is donated: go on with the state that is returned.
        step: from `make_train_step`.
        train_data: a `data.Dataset`, a dict of arrays, the result of `data.from_arrays` or `data.from_iterable`, or
            anything that the latter takes. Examples that fill no whole batch at the end of an epoch are left out.
        test_data: a `data.Dataset` with integer labels, evaluated after each epoch, with `apply_fn`. The record has
            `test_loss` and `test_accuracy`.
        apply_fn: `apply_fn(params, images) -> logits`, as in `evaluate`.
        eval_data: any data that is evaluated after each epoch, with `eval_fn`: what `evaluate` takes as its source,
            except an iterator, which is read only once.
        eval_fn: `eval_fn(params, batch) -> {name: values}`, as in `evaluate`. The record has them as `eval_<name>`, and
            columns as `eval_<name>/0`, `eval_<name>/1`, ...
        epochs: how many, from the step of `state`. None: as many as `max_steps` needs.
        batch_size: examples in a batch, over all devices. Under engine `jit` the axes of the mesh that split a batch
            must divide it, otherwise the number of devices.
        max_steps: the training ends after this many steps, from the step of `state`, also within an epoch. The same
            call with more steps goes on from the checkpoint, to the same numbers as a run that did not end.
        eval_every: also evaluate after each step whose number this divides. Such a record has `under_way` True, the
            means over the steps of its epoch so far, and is given to the callbacks and kept in the history too.
        progress: show a tqdm bar in a terminal or a notebook, and a line for each epoch.
        checkpoint_dir: where checkpoints are saved, one after each epoch.
        resume: "auto" goes on from the latest checkpoint in `checkpoint_dir` if it is after `state`, or of the run
            that was interrupted at it. False ignores it. True requires one.
        checkpoint_every: also save a checkpoint each time after this many steps.
        keep: how many of the latest checkpoints stay.
        certificate: a file for hashes of the state, as JSON lines: a header, then one line each time after
            `certificate_every` steps. `jaxpar verify` computes them again. A resumed run goes on with the file, and
            drops the lines of steps that it makes again. See docs/same_bits.md.
        certificate_every: after how many steps.
        metrics_file: a file for the history as JSON lines, as by `to_jsonl`. It holds this run only.
        callbacks: one or several, each called after an epoch and its evaluation. A function
            `callback(state, record)`, or an object with `init(state) -> memory` and
            `on_epoch(memory, state, record) -> (memory, stop)`, such as `EarlyStopping`. Its memory is a pytree of
            arrays, numbers and texts, which is saved with the checkpoints. It may have
            `on_step(memory, step, metrics) -> memory` too. One that returns True, or True as `stop`, ends the
            training. Do not keep the state: the next step takes its memory. A callback with a method
            `on_start(history)` or `on_end(history)` gets that call when `fit` begins or ends, one with
            `before_resume(directory)` before checkpoints are looked for, and one with `on_saved(record, written)` after
            a record. There `written()` waits for its checkpoint, in all processes, and gives its path in the first one.
        on_step: `on_step(step, metrics)`, called for each step in order, with its metrics as floats. `step` counts from
            1. The call comes up to sixteen steps late, so that nothing waits for it.
        profile: a directory for a trace of five steps, from the eleventh of this call on, by jax's profiler. Or
            (directory, first_step, num_steps).
        steps_per_execution: how many steps one compiled program makes, by `step.many`. It helps where steps are short.
            Ctrl-C waits for them. More than 1 needs a `data.Dataset` that the devices have room for, and a single
            process. An epoch, `checkpoint_every` and a profile cut programs shorter, so nothing else changes. "auto" is
            up to eight on CPUs, no more than take a fifth of a second. It is 1 on GPUs and TPUs, for a step with
            convolutions of XLA's (see `many`), and where more is not possible.
        on_interrupt: how `fit` ends after Ctrl-C. "return": by the state and the history so far. "raise": by a
            KeyboardInterrupt with both as attributes `state` and `history`. "auto": return in a notebook or at a
            prompt, raise in a script.

    Returns:
        (the trained state, a list with a dict for each epoch). A dict has `epoch` from 1, the `step` at its end, mean
        `loss` and whatever else the step reports, `accuracy` (None if it reports none), `test_loss` and `test_accuracy`
        (None without test data), `seconds` of training, `images_per_second` (examples, whatever they are), and
        `eval_<name>` of each value of `eval_fn`. A resumed run has the earlier epochs too. `skipped` is how many
        updates a step left out that may do so. The means are of the others. An epoch that ended within it comes last,
        with `interrupted` True and means over the steps that it had.

    Raises:
        TypeError: an argument of another type, or one that `fit` does not have.
        ValueError: a data set without one whole batch, numbers below 1, only one of `apply_fn` and `test_data`, or of
            `eval_fn` and `eval_data`, a donated state, a metric for a callback that there is not, a `KeepBest` without
            `checkpoint_dir`, a checkpoint of another model, optimizer, batch size or size of data set. Labels of a
            `data.Dataset` that are no classes of the model, in test data and for a loss of `classification_loss`.
        What shapes tell about `loss_fn`, `apply_fn` and `eval_fn` is checked before the first step, and the state stays
            valid. Of batches that an iterable gives, other than a list, the shapes are known when they come.
        RuntimeError: one of several processes of `python -m jaxpar launch` or Ray Train that has not joined.
        FileNotFoundError: `resume=True` and no checkpoint.
        NonFiniteError: a `FloatingPointError`: a step with `nonfinite="stop"` met a NaN or infinite loss or gradient.
            It names the step and the keys. Its `state`, which is saved too, is the one before that step.
        OSError: a checkpoint, a certificate or metrics that cannot be written. The earlier ones stay.
        KeyboardInterrupt: after Ctrl-C, see `on_interrupt`. SystemExit(143): after SIGTERM.
        An exception from the run itself, KeyboardInterrupt and SystemExit too, has `state` and `history` up to the last
        step as attributes, unless that step took the state with it.

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
    arguments = dict(locals())
    refuse_unknown(arguments.pop("unknown"), fit)
    return take_role(plan_run(**arguments), state, _fit)


def _fit(run: Run, state: TrainState) -> tuple[TrainState, History]:
    """Resume, make the steps, and return what `fit` returns."""
    checkpoints = RunCheckpoints(run)
    state, past = checkpoints.resume(state)
    loop = Loop(run, run.check(state), past)
    if checkpoints.directory is not None:
        run.callbacks.to_json(loop.memories)  # what cannot be saved is refused now
        checkpoints.claim()
    run.certificate.begin(run.step, loop.state, loop.at)
    run.callbacks.start(loop.history)  # after all that may refuse this call, so that the file of another run stays
    was_over = _train(loop, checkpoints)
    return _finish(loop, checkpoints, was_over)


def _train(loop: Loop, checkpoints: RunCheckpoints) -> bool:
    """Make the steps. Return whether the run was over before `loop.signal` came."""
    try:
        with (
            interrupt.Interrupts(jax.process_count() > 1) as signals,
            contextlib.closing(checkpoints),
            _save_if_not_finite(loop, checkpoints),
            loop.run.callbacks.end_after(loop.history),
            loop.steps() as records,
        ):
            for record in records:
                if _should_stop(loop, checkpoints, signals, record):
                    break
            loop.end_interrupted()
            loop.signal = signals.asked
        was_over = loop.signal is None
        loop.signal = signals.asked  # one may have come while the last checkpoint was written
        return was_over
    except BaseException as error:
        _attach_state(error, loop)
        raise


def _should_stop(loop: Loop, checkpoints: RunCheckpoints, signals: interrupt.Interrupts, record: Record | None) -> bool:
    """Evaluate and call the callbacks where there is a record, save if it is due. Return whether the run is to stop."""
    stopped = False
    if record is not None:
        _evaluate(loop, checkpoints, record)
    try:
        stopped = record is not None and loop.run_callbacks(record)
    finally:  # a callback that fails costs no steps
        interrupted = signals.should_stop(loop.state, loop.at, record is not None)
        checkpoints.save(loop, stopped=stopped, interrupted=interrupted)
    if record is not None:
        loop.run.callbacks.saved(record, lambda: checkpoints.written(loop.at))
    return stopped or interrupted


def _evaluate(loop: Loop, checkpoints: RunCheckpoints, record: Record) -> None:
    """Evaluate the state. Where that fails after an epoch, its steps are saved and the next call evaluates again."""
    try:
        loop.evaluate(record)
    except Exception as error:
        if loop.between_epochs and processes.is_in_all(error):  # others may still evaluate, and would not take part
            checkpoints.save(loop)
        raise


def _finish(loop: Loop, checkpoints: RunCheckpoints, was_over: bool) -> tuple[TrainState, History]:
    """The result of `fit`, or its exception after a signal."""
    if loop.signal is None:
        return loop.state, loop.history
    saved = checkpoints.path(loop.at)
    where = interrupt.where(loop.at, loop.number, loop.run.epochs, saved)
    if was_over:  # the signal came while the last checkpoint was written; the same call on this state trains on
        where = f"after the last step, {loop.at}; the run is complete" + (f", saved in {saved}" if saved else "")
    on_interrupt = loop.run.options.on_interrupt
    return interrupt.finish_interrupted(loop.signal, loop.state, loop.history, where, on_interrupt)


@contextlib.contextmanager
def _save_if_not_finite(loop: Loop, checkpoints: RunCheckpoints) -> Generator[None]:
    """Save the state before a step that is not finite."""
    try:
        yield
    except NonFiniteError as error:
        loop.go_back(error.state, error.step)
        if loop.at > loop.began:
            checkpoints.save(loop, interrupted=True)
        raise


def _attach_state(error: BaseException, loop: Loop) -> None:
    """Put the state and the history on an exception: the caller's own state was donated to the first step."""
    made = loop.at > loop.began or isinstance(error, NonFiniteError)
    if made and not is_donated(loop.state):
        error.state, error.history = loop.state, loop.history  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(error, Exception):
            return  # whoever stops the program does not read on
        error.add_note(
            f"fit: the state and the history up to step {int(loop.state.step)} are the attributes `state` and "
            "`history` of this exception; in a notebook: import sys; state = sys.last_value.state"
        )
