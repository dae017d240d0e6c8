"""The loop of `fit`.

`train` opens what a run needs, and turns its end into what `fit` returns or raises. `train_loop` is the loop itself,
from top to bottom. `Training` is what changes while it runs.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from ... import checkpoint, data, distributed
from ..._core import files
from ..._core.text import say_news, warn
from ..._devices import mesh, processes, user_mesh
from .._callbacks.callbacks import CallbackState
from .._callbacks.history import History, Record, line
from .._callbacks.undo import Spike
from .._step.nonfinite import NonFiniteError, check_finite
from .._step.state import TrainState
from . import certificate
from .clock import Clock
from .identity import describe, identity
from .interrupt import Interrupts, delayed, describe_stop, finish_interrupted
from .progress import BEHIND, Epoch, Progress, Trace
from .run import Run
from .saved import RunInfo, resume, template
from .steps import StepResult, own_steps

# Opens a block with the steps of an elastic run, in place of those of this process.
OpenSteps = Callable[["Training", Interrupts], contextlib.AbstractContextManager[Iterator[StepResult]]]


def train(run: Run, state: TrainState, open_steps: OpenSteps | None = None) -> tuple[TrainState, History]:
    """Resume, train, and return what `fit` returns."""
    callbacks, manager = run.callbacks, None
    # What is open is closed too where this call is refused, or stopped before its steps.
    with contextlib.ExitStack() as opened:
        if run.checkpoint_dir is not None:

            def say_latest(path: checkpoint._AnyPath) -> None:  # where a process is lost, the others say how to go on
                distributed.set_resume_hint(files.shown(path))

            manager = checkpoint.Manager(run.checkpoint_dir, keep=run.keep, on_latest=say_latest)
            opened.enter_context(contextlib.closing(manager))

        # Resume. A signal waits meanwhile, since one in the midst of tracing could leave JAX tracing.
        with delayed():
            state, info, resumed = resume(run, manager, state)
            state = run.check(state)
            training = Training.begin(run, manager, state, info, resumed)
            if manager is not None:
                callbacks.to_json(training.callback_state)  # what cannot be saved is refused now
                processes.ask_first(manager._open)
            opened.callback(training.close_certificate)
            if run.certificate is not None or processes.count() > 1:  # several agree whether there is one
                training.certificate = certificate.begin(run, state, training.left_out)
            # After all that may refuse this call, so that the file of another run stays.
            with processes.raise_together():
                if manager is not None:
                    training.made_by = {**certificate.header_of(run.step, state), **describe(run, state)}
                    training.made_by["steps_per_execution"] = run.per_program
                has_name = manager is not None or bool(callbacks.loggers)
                if has_name:
                    training.identity = training.identity or identity(run, state)
                    for logger in callbacks.loggers:
                        logger.on_run(training.identity, resumed)
                callbacks.on_start(training.history)

        signals = Interrupts()
        try:
            with signals, opened.pop_all() as at_end:
                # They end in the reverse order: the steps, `on_end`, the certificate, the checkpoints, the signals.
                at_end.callback(callbacks.on_end, training.history)
                if run.keep_every is not None and not resumed:
                    training.save(is_due=True)  # the first state, from which any step can be computed again
                if open_steps is None:
                    at_end.callback(training.close_steps)
                    training.open_steps()
                    train_loop(training, signals, steps_behind=BEHIND)
                else:  # an elastic step is computed when it comes
                    training.steps = at_end.enter_context(open_steps(training, signals))
                    train_loop(training, signals, steps_behind=0)
                is_complete = signals.asked is None  # a signal may yet come while the last checkpoint is written
                if is_complete and callbacks.restores_best:
                    training.restore_best()

            if signals.asked is None:
                return training.state, training.history

            # A signal ended the run, or came behind its last step: then the same call on this state trains on.
            clock = training.clock
            path = None if run.checkpoint_dir is None else checkpoint._of_step(run.checkpoint_dir, clock.step)
            saved = None if path is None else files.shown(path)
            place = describe_stop(clock.step, clock.epoch, run.epochs, saved)
            if is_complete:
                saved_in = f", saved in {saved}" if saved else ""
                place = f"after the last step, {clock.step}; the run is complete{saved_in}"
            return finish_interrupted(signals.asked, training.state, training.history, place, run.on_interrupt)
        except BaseException as error:
            # The caller's own state was donated to the first step, so the exception has the last one. Before that step
            # the caller still has it, and a state whose memory a failed step took is of no use.
            state = training.state
            has_trained = training.clock.step > training.clock.began or isinstance(error, NonFiniteError)
            if has_trained and not mesh.is_donated(state):
                error.state, error.history = state, training.history  # pyright: ignore[reportAttributeAccessIssue]
                if isinstance(error, Exception):  # whoever stops the program does not read on
                    error.add_note(
                        f"fit: the state and the history up to step {int(state.step)} are the attributes `state` and "
                        "`history` of this exception; in a notebook: import sys; state = sys.last_value.state"
                    )
            raise


def train_loop(training: Training, signals: Interrupts, steps_behind: int) -> None:
    """Make the steps of a run until its last one, or until a callback or a signal ends it.

    After each step come, in this order: its metrics, the evaluation, the record, the callbacks, the checkpoint, and the
    decision whether to go on. The metrics of the last `steps_behind` steps are read later, so that the host need not
    wait for the devices.
    """
    run, clock, progress, trace = training.run, training.clock, training.progress, training.trace
    callbacks = run.callbacks
    # An epoch has sums and no record where its evaluation failed in an earlier call: it is evaluated before any step.
    makes_no_step = clock.is_between_epochs and training.epoch.counted > 0
    if training.resumed and clock.step == clock.last and not makes_no_step:
        _say_nothing_left(training)
    elif not training.resumed:
        _say_split_epochs(training)
    try:
        is_over = False
        if callbacks.undo is not None:
            training.copy_state()
        while not is_over and (makes_no_step or clock.step < clock.last):
            if not makes_no_step:
                # An epoch begins, or goes on after an evaluation. The seconds of training count from here.
                if training.epoch.since is None:
                    if clock.is_between_epochs or clock.step == clock.began:
                        title = f"epoch {clock.next_epoch}" + (f"/{run.epochs}" if run.epochs else "")
                        total, done = run.steps, clock.steps_of_epoch
                        if progress.is_of_run:
                            total, done = clock.steps_of_run, clock.step - clock.first
                        progress.start(total, title, done, compiles=clock.step == clock.began)
                    training.epoch.since = clock.read_at = time.perf_counter()

                # The next step, or a program of several, with its batch. The devices compute it behind the host.
                with trace.step(clock.step, training.state):
                    training.state, metrics, rows = next(training.steps)
                if clock.step == clock.began:
                    progress.say_compiled()
                clock.advance(run, rows)
                training.epoch.unread.append((metrics, rows))
                if training.certificate is not None:
                    training.certificate.take(clock.step, training.state)

            # What is due after this step.
            makes_no_step, last_made = False, clock.step
            is_epoch_over = clock.is_between_epochs
            is_evaluation_due = run.is_evaluation_due(clock.step)
            is_record_due = run.is_record_due(clock.step, clock.last, is_epoch_over)
            is_save_due, is_copy_due = training.is_save_due, training.is_copy_due

            # Metrics are read late. A record, a checkpoint and a copy for `Undo` have those of all steps, so they wait
            # for the devices. Where that leaves out a step that was made before, the run is back after that step, and
            # other things are due.
            training.read_metrics(0 if is_record_due or is_save_due or is_copy_due else steps_behind)
            if clock.step < last_made:
                makes_no_step = True
                continue
            if is_copy_due:
                training.copy_state()

            record, media, is_cut_short = None, {}, False
            callback_state_before = training.callback_state
            if is_record_due:
                training.epoch.pause()
                # Evaluate. After an error the next call evaluates again.
                try:
                    scores, media = run.evaluation.scores(training.state)
                    scores = {**scores, **training.measured()}
                except Exception as error:
                    # Other processes may still evaluate, and would not take part in a save.
                    if is_epoch_over and processes.is_in_all(error):
                        training.save()
                    raise

                # Record, and show the record.
                is_cut_short = not is_epoch_over and not is_evaluation_due
                under_way = not is_epoch_over and is_evaluation_due
                record = training.make_record(scores, under_way=under_way, interrupted=is_cut_short)
                if is_epoch_over and not progress.is_of_run:
                    progress.close()
                if progress.is_line_due(clock.epoch if is_epoch_over else None, run.epochs):
                    place = "" if is_epoch_over else f"step {clock.step}  "
                    progress.print(place + line(record, run.epochs))
                training.history.append(record)

            # Call the callbacks. One that fails costs no steps of an epoch: the state is saved without the record,
            # which the next call makes again, for all callbacks.
            stopped_by = list[str]()
            if record is not None:
                try:
                    training.callback_state, stopped_by = callbacks.after_record(
                        training.callback_state, training.state, record, media
                    )
                    training.keep_best()
                except BaseException as error:
                    # The processes exchange their signals here, as after any other record. But a second Ctrl-C is of
                    # this process alone: the others wait in the callbacks, and would take what is asked here for the
                    # answer to that.
                    if processes.is_in_all(error):
                        interrupted = signals.should_stop(training.state, clock.step, is_record_due)
                        if is_epoch_over:
                            training.save(is_save_due, (), interrupted, without_record=callback_state_before)
                    raise

            # Save the state, with what the callbacks remember and the metrics of all steps. The record of an epoch that
            # `max_steps` cuts short is not saved, nor what callbacks made of it, since a longer run has neither.
            interrupted = signals.should_stop(training.state, clock.step, is_record_due)
            if interrupted:
                training.read_metrics(0)
            if is_cut_short:
                stopped_by = []
            without_record = callback_state_before if is_cut_short else None
            training.save(is_save_due, stopped_by, interrupted, without_record)
            if record is not None:
                # All processes wait in `written`, and perhaps in the callback. So an error in one is not raised in
                # others.
                callbacks.on_saved(record, training.written)

            if is_epoch_over:  # not before: the checkpoint of an epoch whose record is left out has its sums
                training.epoch = Epoch()
            is_over = bool(stopped_by) or interrupted

        # The run ends within an epoch, by a signal, a callback or `max_steps`: its record is marked.
        if not clock.is_between_epochs:
            training.read_metrics(0)
            if training.is_recorded:
                training.history[-1] = {**training.history[-1], "interrupted": True}
            else:
                # At the end of `max_steps` an earlier call evaluated, and its checkpoint does not have the record.
                scores = run.evaluation.scores(training.state)[0] if clock.step == clock.last else {}
                scores = {**scores, **training.measured()}
                training.history.append(training.make_record(scores, interrupted=True))
    except NonFiniteError as error:
        if not run.stops:  # a callback has raised it, and the run is where it was
            raise
        # Back to the state before the step that is not finite. No later step counts.
        training.state = error.state
        clock.go_back(error.step)
        training.epoch.unread.clear()
        if training.certificate is not None:
            training.certificate.go_back(error.step)
        if clock.step > clock.began:
            training.save(interrupted=True)
        raise
    finally:
        trace.close(training.state)
        progress.close()


class GoodState(NamedTuple):
    """A state that no step to be left out is in, for `Undo` to go back to."""

    state: TrainState  # a copy
    step: int
    place: list[Any] | None  # where the data were


@dataclasses.dataclass
class Training:
    """A run while it trains: what changes from step to step, and what is open for it."""

    run: Run
    info: RunInfo  # of the checkpoint that it goes on from, or of a new run
    resumed: bool  # whether a checkpoint of `fit` said it
    state: TrainState
    clock: Clock
    epoch: Epoch  # the sums of the epoch under way
    history: History
    callback_state: CallbackState
    identity: str | None  # the name of the run in its logs
    manager: checkpoint.Manager | None
    progress: Progress
    trace: Trace
    certificate: certificate.Certificate | None = None
    best_state: TrainState | None = None  # a copy of the best state, where there are no checkpoints of it
    has_warned: bool = False  # that a loss was not finite
    left_out: frozenset[int] = frozenset()  # the numbers of the steps without an update
    steps: Iterator[StepResult] = dataclasses.field(default_factory=lambda: iter(()))
    good: GoodState | None = None  # where there is an `Undo`
    made_by: dict[str, Any] | None = None  # what decides the numbers of the run, as a checkpoint says it

    @classmethod
    def begin(
        cls, run: Run, manager: checkpoint.Manager | None, state: TrainState, info: RunInfo, resumed: bool
    ) -> Training:
        """A run that goes on after the step of `state`, or begins."""
        clock = Clock.resume(run, info, int(state.step))
        training = cls(
            run=run,
            info=info,
            resumed=resumed,
            state=state,
            clock=clock,
            epoch=Epoch(collections.Counter(info.sums or {}), info.counted or 0, info.seconds or 0.0),
            history=History(info.history or []),
            callback_state=run.callbacks.init(state, info.callbacks, resumed),
            identity=info.run,
            manager=manager,
            progress=Progress(run.progress, run.unit),
            trace=Trace(run.profile, clock.began, clock.last),
            left_out=run.left_out | frozenset(info.left_out or ()),
        )
        training.progress.measured = training.measured()
        return training

    @property
    def is_kept(self) -> bool:
        """Whether the checkpoint of this step stays for good. That of the first state does, too."""
        every = self.run.keep_every
        return every is not None and (self.clock.step % every == 0 or self.clock.step == self.clock.first)

    @property
    def is_save_due(self) -> bool:
        """Whether there is a checkpoint after this step, beside those of epochs and of the end."""
        every = self.run.checkpoint_every
        return self.is_kept or (every is not None and self.clock.step % every == 0)

    @property
    def is_copy_due(self) -> bool:
        """Whether `Undo` wants a copy of the state after this step."""
        undo = self.run.callbacks.undo
        return undo is not None and self.clock.step % undo.every == 0

    @property
    def is_recorded(self) -> bool:
        """Whether the history has a record of the last step."""
        return bool(self.history) and self.history[-1]["step"] == self.clock.step

    def read_metrics(self, behind: int) -> None:
        """Read the metrics of all steps except the last few, for all who want them. Waits for these steps."""
        run, clock, epoch, callbacks = self.run, self.clock, self.epoch, self.run.callbacks
        for rows in epoch.read(behind):
            # Between two reads the devices make the steps in between, however far ahead the host is.
            now = time.perf_counter()
            clock.step_time, clock.read_at = (now - clock.read_at) / len(rows), now
            before = clock.step - epoch.num_unread - len(rows)  # the number of steps before these
            # The metrics of a step of the user's own are known only now.
            if before == clock.began and clock.began + 1 not in self.left_out:
                callbacks.check_metrics(list(rows[0]), [], run.evaluation.parts)

            for step, metrics in enumerate(rows, before + 1):
                # A step that `Undo` leaves out is undone before anybody hears of it.
                is_skipped = run.skips and metrics.get("skipped", 0.0) > 0
                if not is_skipped:
                    try:
                        callbacks.check_step(self.callback_state, step, metrics)
                    except Spike as spike:
                        return self.undo(spike)
                    except FloatingPointError:  # too many were left out: the caller gets the last copy
                        assert self.good is not None
                        self.state = self.good.state
                        clock.go_back(self.good.step)
                        epoch.unread.clear()
                        raise

                # A loss that is not finite ends the run, or is warned of once.
                if is_skipped and run.stops and step not in self.left_out:
                    try:
                        check_finite(metrics, self.state)
                    except NonFiniteError as error:
                        # The state is of a later step, and may note a bad one after this. Then this one was an overflow
                        # that the loss scale has cured, and the steps up to the bad one count.
                        if error.step < step:
                            raise
                if not (is_skipped or self.has_warned or math.isfinite(metrics.get("loss", 0.0))):
                    self.has_warned = True
                    warn(
                        f"fit: the loss of step {step} (the first is 1) is {metrics['loss']}. The update was made, "
                        "the training continues, and new checkpoints replace earlier ones. Look at that batch, its "
                        "labels and the learning rate. make_train_step(loss_fn, nonfinite='skip') leaves out such "
                        "updates, and nonfinite='stop' ends the training before the first one"
                    )

                # Count the step, show it, and call what wants each step. One that was skipped has no metrics in the
                # sums.
                epoch.sums.update({"skipped": 1} if is_skipped else metrics)
                epoch.counted += 1
                # Seldom, since to measure waits for the state.
                if self.progress.is_measure_due:
                    self.progress.show_measured(self.measured())
                # The bar of one epoch shows the time left by itself.
                to_come = clock.last - step if (clock.steps_of_run or 0) > (run.steps or 0) else None
                self.progress.step(metrics, epoch.counted * run.batch_size / epoch.elapsed(), to_come)
                if callbacks.each or callbacks.on_step:
                    self.callback_state = callbacks.after_step(self.callback_state, step, metrics)
        # The devices have made these steps, so their hashes are there, or soon will be.
        if self.certificate is not None:
            self.certificate.write(clock.step - epoch.num_unread)

    def measured(self) -> dict[str, float]:
        """The learning rates of the last step, where a callback asks for them."""
        left_out = sum(number <= self.clock.step for number in self.left_out)
        return self.run.callbacks.measure(self.state, left_out)

    def open_steps(self) -> None:
        """Make the steps after the state."""
        self.steps = own_steps(self.run, self.clock, self.state, self.left_out, self.certificate)

    def close_steps(self) -> None:
        if isinstance(self.steps, Generator):
            self.steps.close()

    def copy_state(self) -> None:
        """Keep a copy of the state to go back to."""
        place = data._place_in(self.run.source)
        if place is None and getattr(self.run.source, "is_read_once", False):
            raise ValueError(
                "fit: train.Undo goes back in the data, and these can be read only once; give an iterator with "
                "get_state and set_state, a list, or a function of the epoch"
            )
        with user_mesh.outside_mesh():
            self.good = GoodState(mesh.own_copies(self.state), self.clock.step, place)

    def undo(self, spike: Spike) -> None:
        """Go back before a step, compute the steps up to it again, and leave it out. The run is after it then.

        The metrics of the steps before it were read, and their records and callbacks stay: they have the same bits.
        """
        run, clock = self.run, self.clock
        assert self.good is not None
        if jax.process_index() == 0:
            say_news(f"step {spike.step} is left out: {spike}")

        # Forget the later steps, whose metrics nobody has seen.
        self.left_out |= {spike.step}
        self.callback_state = run.callbacks.count_undone(self.callback_state)
        self.epoch.unread.clear()
        if self.certificate is not None:
            self.certificate.go_back(spike.step - 1)
        # Go back to a copy of the copy, since the steps take it, and there may be another spike.
        self.close_steps()
        with user_mesh.outside_mesh():
            self.state = mesh.own_copies(self.good.state)
        clock.go_back(self.good.step)
        data._go_to(run.source, self.good.place)

        # Make the steps again, with the same batches and keys. The last one is the one that makes no update.
        self.open_steps()
        while clock.step < spike.step:
            self.state, metrics, rows = next(self.steps)
            clock.advance(run, rows)
            if clock.step == spike.step:
                self.epoch.unread.append((metrics, rows))
        if self.certificate is not None:
            self.certificate.leave_out(spike.step)
            self.certificate.take(clock.step, self.state)

    def make_record(self, scores: dict[str, float], *, under_way: bool = False, interrupted: bool = False) -> Record:
        """What the steps of the epoch add up to so far. There is a key only for what has a value."""
        run, epoch = self.run, self.epoch
        sums, seconds = dict(epoch.sums), epoch.elapsed()
        skipped = int(sums.pop("skipped", 0)) if run.skips else 0
        updates = epoch.counted - skipped
        means = {name: value / updates for name, value in sums.items()} if updates else {"loss": float("nan")}
        # The order is that of a line, a table and a file: loss and accuracy before the other metrics.
        record: Record = {"epoch": self.clock.epoch, "step": self.clock.step}
        record |= {name: means[name] for name in ("loss", "accuracy") if name in means}
        record |= means
        if run.skips:
            record["skipped"] = skipped
        # The records that `mxnet.image_record_source` could not decode. A source of the user's has what it likes there.
        undecoded = getattr(run.source, "skipped", ())
        if isinstance(undecoded, tuple) and undecoded:
            record["bad_records"] = len(undecoded)
        record |= scores
        record |= {"seconds": seconds, f"{run.unit}_per_second": epoch.counted * run.batch_size / seconds}
        if under_way:
            record["under_way"] = True
        if interrupted:
            record["interrupted"] = True
        return record

    def save(
        self,
        is_due: bool = False,
        stopped_by: Sequence[str] = (),
        interrupted: bool = False,
        without_record: CallbackState | None = None,
    ) -> None:
        """Save the state after an epoch, at the end of the run, where it is the best, and where it is due otherwise.

        Args:
            stopped_by: the callbacks that end the run.
            without_record: leave out the last record. This is what callbacks remembered before it.
        """
        run, clock, callbacks, epoch = self.run, self.clock, self.run.callbacks, self.epoch
        if self.manager is None:
            return
        # Whether there is a checkpoint. `max_steps` may end a run within an epoch, as a signal does.
        interrupted = interrupted or (clock.step == clock.last and not clock.is_between_epochs)
        # A longer run does not know of a best state that was found where `max_steps` cut an epoch short.
        is_best = callbacks.best_step(self.callback_state) == clock.step
        is_best = is_best and not (callbacks.restores_best and without_record is not None)
        if not (is_due or clock.is_between_epochs or stopped_by or interrupted or is_best):
            return

        # What it says of the run. A record that is left out is made again by the run that goes on.
        place = data._place_in(run.source)
        history, callback_state = self.history, self.callback_state
        if without_record is not None:
            history, callback_state = self.history[:-1], without_record
        has_record = self.is_recorded and without_record is None
        # The sums of an epoch that has no record yet.
        has_sums = not clock.is_between_epochs or (epoch.counted > 0 and not has_record)
        info = RunInfo(
            first=clock.first,
            batch_size=run.batch_size,
            examples=run.examples,
            rates=self.info.rates,
            ended_by=list(stopped_by) if stopped_by else None,
            limit=run.limit if stopped_by else None,
            stopped=bool(stopped_by),
            interrupted=interrupted,
            callbacks=callbacks.to_json(callback_state),
            run=self.identity,
            data=self.info.data,
            sums=dict(epoch.sums) if has_sums else None,
            counted=epoch.counted if has_sums else None,
            seconds=epoch.elapsed() if has_sums else None,
            epochs_over=clock.epochs_over if run.steps is None else None,
            epoch_began=clock.epoch_starts[-1] if run.steps is None else None,
            place=place,
            made_by=self.made_by,
            certificate=None if run.certificate is None else str(run.certificate),
            left_out=sorted(self.left_out) or None,
            forked_from=self.info.forked_from,
        )
        self.manager._save(self.state, info.to_json(), best=is_best, kept=self.is_kept, records=history)

    def written(self) -> checkpoint._AnyPath | None:
        """Wait for the disk. Return what this run wrote or restored of the last step, in the process that writes."""
        if self.manager is None:
            return None
        self.manager.wait()
        latest = self.manager._latest
        return latest if latest is not None and latest.name.startswith(f"step_{self.clock.step:08d}") else None

    def keep_best(self) -> None:
        """Keep a copy of the state where the last record is the best, and no checkpoint has it."""
        callbacks = self.run.callbacks
        is_best = callbacks.restores_best and callbacks.best_step(self.callback_state) == self.clock.step
        if self.manager is None and is_best:
            with user_mesh.outside_mesh():  # a copy, since the next step takes the state
                self.best_state = mesh.own_copies(self.state)

    def restore_best(self) -> None:
        """Take the state of the best record. The run is over."""
        best_step = self.run.callbacks.best_step(self.callback_state)
        if not best_step or best_step == self.clock.step:
            return
        if self.manager is not None:
            restored = self.manager._restore(
                lambda: template(self.state, self.run.step), lambda _, body: body.get("step") == best_step
            )
            if restored is None:
                raise checkpoint.CheckpointError(
                    f"fit: {self.run.checkpoint_dir} has no good checkpoint of the best state, of step {best_step}"
                )
            self.state = restored[0]
        elif self.best_state is not None:
            self.state = self.best_state
        if jax.process_index() == 0:
            say_news(f"restored the best state, of step {best_step}")

    def close_certificate(self) -> None:
        """Write the lines up to the state that is left, and let another run write the certificate, if there is one."""
        if self.certificate is not None:
            with contextlib.closing(self.certificate):
                # After an error or a second Ctrl-C, the caller may go on from this state. Several processes do not wait
                # for each other's hashes here, since one of them may be lost.
                if processes.count() == 1 and not mesh.is_donated(self.state):
                    self.certificate.go_back(int(self.state.step))


def _say_nothing_left(training: Training) -> None:
    """Say that the run was complete before this call, and what trains it further."""
    step, limits = training.clock.step, training.run.limits
    if training.info.stopped:
        news = (
            f"a callback ended this run at step {step}: 0 steps trained; resume=False for a new run, or other settings "
            f"of the callback or of {limits} to go on"
        )
    else:
        news = f"complete at step {step}: 0 steps trained; raise {limits}, or resume=False for a new run"
    if jax.process_index() == 0:
        say_news(news)


def _say_split_epochs(training: Training) -> None:
    """Say that no epoch of this call is a pass over its data, where the state comes from the middle of a pass.

    The step of the state says which batch comes next. That is right for a run that was stopped and goes on. After other
    data or another batch size it is a surprise: some examples come twice in an epoch, others not at all.
    """
    run, first = training.run, training.clock.first
    source: Any = run.source
    # What is read once goes on where it is. Of combined data, and with `steps_per_epoch`, no epoch is a pass anyway.
    if getattr(source, "is_read_once", False) or getattr(source, "steps_per_epoch", None) is not None:
        return
    if run.steps is None or isinstance(source, data.CombinedSource):
        return
    if (behind := first % run.steps) and jax.process_index() == 0:
        say_news(
            f"the state is at step {first}, and a pass over these data has {run.steps} batches: each epoch of this "
            f"call begins behind {behind} batches of a pass, and ends in the next one"
        )
