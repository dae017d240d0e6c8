"""The loop of `fit` from top to bottom.

`train` resumes, makes the steps, and after them evaluates, calls the callbacks and saves. `Loop` is where it is: the
state, the epoch under way, and the history. Its steps run several ahead of the host, which reads their metrics late.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from ... import checkpoint, data, distributed
from ..._core import files
from ..._core.text import say_news
from ..._cpu import is_slow_in_a_loop
from ..._devices import mesh, processes, user_mesh
from .._callbacks.history import History, Record, line
from .._step.nonfinite import NonFiniteError, check_finite
from .._step.state import TrainState
from .._step.train_step import TrainStep
from . import certificate
from .identity import identity
from .interrupt import Interrupts, delayed, describe_stop, finish_interrupted
from .progress import BEHIND, Epoch, Metrics, Progress, Trace
from .run import Past, Run, like_saved, resume, shuffle_key

Made = tuple[TrainState, Metrics, range | None]  # the rows of the metrics, where these are of several steps
MakeSteps = Callable[["Loop"], contextlib.AbstractContextManager[Iterator[Made]]]

_AT_ONCE = 0.2  # seconds that the steps of one program take. Ctrl-C waits for them.
_MEASURE_EVERY = 1.0  # seconds after which the bar shows another learning rate


def train(run: Run, state: TrainState, make_steps: MakeSteps | None = None) -> tuple[TrainState, History]:
    """Resume, make the steps, and return what `fit` returns. `make_steps` opens a block with the steps of a loop."""
    # What is open is closed too where this call is refused, or stopped before its steps.
    with contextlib.ExitStack() as begun:
        manager = None
        if run.checkpoint_dir is not None:
            hint = lambda path: distributed.set_resume_hint(files.shown(path))  # noqa: E731
            manager = checkpoint.Manager(run.checkpoint_dir, keep=run.keep, on_latest=hint)
            begun.enter_context(contextlib.closing(manager))
        with delayed():
            state, past = resume(run, manager, state)
            loop = Loop(run, manager, run.check(state), past, behind=BEHIND if make_steps is None else 0)
            if manager is not None:
                run.callbacks.to_json(loop.memories)  # what cannot be saved is refused now
                processes.ask_first(manager._open)
            begun.callback(loop.close_certificate)
            if run.certificate is not None or processes.count() > 1:  # several agree whether there is one
                loop.certificate = certificate.begin(run, loop.state)
            # After all that may refuse this call, so that the file of another run stays.
            with processes.raise_together():
                if any(hasattr(callback, "on_run") for callback in run.callbacks.each):
                    loop.identity = loop.identity or identity(run, loop.state)
                    run.callbacks.call("on_run", loop.identity, past.resumed)
                run.callbacks.call("on_start", loop.history)
        loop.signals = Interrupts()
        try:
            with loop.signals, begun.pop_all() as at_end:
                # They end in the reverse order: the steps, `on_end`, the checkpoints, and last the signals.
                at_end.callback(run.callbacks.call, "on_end", loop.history)
                calls = contextlib.closing(loop.calls()) if make_steps is None else make_steps(loop)
                steps = loop.steps(at_end.enter_context(calls))
                at_end.enter_context(contextlib.closing(steps))
                try:
                    for due in steps:
                        if loop.should_stop(due):
                            break
                    if not loop.between_epochs:
                        loop.end_interrupted()
                except NonFiniteError as error:
                    loop.go_back(error.state, error.step)
                    if loop.at > loop.began:
                        loop.save(interrupted=True)
                    raise
                was_over = loop.signals.asked is None  # one may yet come while the last checkpoint is written
                if was_over and run.callbacks.restores_best:
                    loop.restore_best()
            if loop.signals.asked is None:
                return loop.state, loop.history
            found = None if run.checkpoint_dir is None else checkpoint._of_step(run.checkpoint_dir, loop.at)
            saved = None if found is None else files.shown(found)
            place = describe_stop(loop.at, loop.number, run.epochs, saved)
            if was_over:  # the same call on this state trains on
                where = f", saved in {saved}" if saved else ""
                place = f"after the last step, {loop.at}; the run is complete{where}"
            return finish_interrupted(loop.signals.asked, loop.state, loop.history, place, run.on_interrupt)
        except BaseException as error:
            _attach_state(error, loop)
            raise


def _attach_state(error: BaseException, loop: Loop) -> None:
    """Put the state and the history on an exception: the caller's own state was donated to the first step."""
    made = loop.at > loop.began or isinstance(error, NonFiniteError)
    if made and not mesh.is_donated(loop.state):
        error.state, error.history = loop.state, loop.history  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(error, Exception):  # whoever stops the program does not read on
            error.add_note(
                f"fit: the state and the history up to step {int(loop.state.step)} are the attributes `state` and "
                "`history` of this exception; in a notebook: import sys; state = sys.last_value.state"
            )


class Loop:
    """The steps of a run, and where it is."""

    def __init__(self, run: Run, manager: checkpoint.Manager | None, state: TrainState, past: Past, behind: int):
        self.run, self.state, self.history = run, state, History(past.history)
        self.certificate: certificate.Certificate | None = None
        self.identity = past.identity
        self.first, self.epoch = past.first, past.epoch  # the first step of the run, the sums of the epoch under way
        self.at = self.began = int(state.step)  # steps that were made, and before this call of `fit`
        # The steps at which epochs began, the one under way last. Where epochs differ in length, those of earlier calls
        # of `fit` are not known.
        over, epoch_began = past.epochs_over, past.first if past.epoch_began is None else past.epoch_began
        if run.steps is not None:
            over, done = divmod(self.at - self.first, run.steps)
            epoch_began = self.at - done
        self._starts = [*[self.first] * over, epoch_began]
        is_over = past.stopped or (run.steps is None and over == run.epochs)
        self.last = self.began if is_over else max(self.began, past.first + run.num_steps)
        self.memories = self._before = run.callbacks.init(state, past.memories, past.resumed)
        self.signals: Interrupts  # of the run, once its steps begin
        self._manager, self._past, self._behind = manager, past, behind  # steps whose metrics are not read yet
        self._progress = Progress(run.progress, run.unit)
        self._trace = None if run.profile is None else Trace(run.profile, self.began, self.last)
        self._pace, self._read = float("inf"), 0.0  # seconds of a step, and when the last one was read
        self._warned = False  # that a loss was not finite
        self._measured = run.callbacks.measure(state)  # what the bar shows of it
        self._measured_at = 0.0
        self._best: TrainState | None = None  # a copy of the best state, where there are no checkpoints of it

    @property
    def number(self) -> int:
        """The number of the epoch of the last step, from 1."""
        return len(self._starts) - self.between_epochs

    @property
    def between_epochs(self) -> bool:
        return self.at == self._starts[-1]

    @property
    def is_recorded(self) -> bool:
        """Whether the history has a record of the last step."""
        return bool(self.history) and self.history[-1]["step"] == self.at

    def calls(self) -> Generator[Made]:
        """Call the step, or a program of several steps. `at` has changed when the next is asked for."""
        run, state, step = self.run, self.state, self.run.step
        devices = state.store.devices
        # Batches go to all devices, or over those axes of a mesh that the step splits a batch over.
        sharding = step.batch_sharding(state) if isinstance(step, TrainStep) else None
        place = data._batch_options(run.source, devices, sharding, getattr(step, "virtual_shards", None))
        groups = self._groups(state.rng, place)
        if groups is None:
            for batch in run.batches(state.rng, self.at, **place):
                state, metrics = step(state, batch)
                yield state, metrics, None
            return
        # A program must not step over a step after which something is due.
        hashes = None if self.certificate is None else run.certificate_every
        traced = None if self._trace is None else 1
        periods = [every for every in (run.checkpoint_every, run.eval_every, hashes, traced) if every]
        for batches, number in groups:
            done = 0
            while done < number:
                most = max(1, int(_AT_ONCE / self._pace)) if run.per_program == "auto" else run.per_program
                left = number - done, self.last - self.at, *[every - self.at % every for every in periods]
                end = done + min(most, *left)
                state, metrics = step.many(state, batches, done, end)
                yield state, metrics, range(done, end)
                done = end

    def _groups(self, rng: jax.Array, place: dict[str, Any]) -> Iterator[tuple[data.Batch, int]] | None:
        """Batches for programs of several steps. None where each step is a program."""
        run = self.run
        if run.per_program == 1:
            return None
        most = None if run.per_program == "auto" else run.per_program
        groups = data.batch_groups(run.source, run.batch_size, most, rng=shuffle_key(rng), start=self.at, **place)
        if most is not None and groups is None:
            raise ValueError(
                f"fit: steps_per_execution is {most}, but the devices have no room for the data set; leave it out"
            )
        if most is not None or groups is None:
            return groups
        batches, number = next(groups)
        several = len(jax.tree.leaves(batches)[0]) > 1  # one step needs no loop
        if several and "cpu" in {d.platform for d in self.state.store.devices or ()}:
            # XLA's convolutions are slow in a loop on CPUs.
            several = not is_slow_in_a_loop(run.step.lower(self.state, batches, many=True).as_text())
        return itertools.chain([(batches, number)], groups) if several else None

    def steps(self, calls: Iterator[Made]) -> Generator[dict[str, bool] | None]:
        """Take the steps that `calls` makes. After each: the mark of the record that is due, or None if none is."""
        every, run = self.run.eval_every, self.run
        try:
            if self.between_epochs and self.epoch.counted:  # the evaluation after it failed in an earlier call
                yield {}
                self.epoch = Epoch()
            elif self._past.resumed and self.at == self.last and jax.process_index() == 0:
                what = "a callback ended this run" if self._past.stopped else "complete"
                more, or_so = f"raise {self.run.limits}, or ", ""
                if self._past.stopped:
                    more, or_so = "", f", or other settings of the callback or of {self.run.limits} to go on"
                say_news(f"{what} at step {self.at}: 0 steps trained; {more}resume=False for a new run{or_so}")
            while self.at < self.last:
                if self.epoch.since is None:  # an epoch begins, or goes on after an evaluation
                    if self.between_epochs or self.at == self.began:
                        title = f"epoch {len(self._starts)}" + (f"/{run.epochs}" if run.epochs else "")
                        done = self.at - self._starts[-1]
                        self._progress.start(run.steps, title, done, compiles=self.at == self.began)
                    self.epoch.since = self._read = time.perf_counter()
                with contextlib.nullcontext() if self._trace is None else self._trace.step(self.at, self.state):
                    self.state, metrics, part = next(calls)
                if self.at == self.began:
                    self._progress.say_compiled()
                self.at += 1 if part is None else len(part)
                self._note_end_of_epoch()
                self.epoch.unread.append((metrics, part))
                if self.certificate is not None:
                    self.certificate.take(self.at, self.state)
                due: dict[str, bool] | None = None
                if is_over := self.between_epochs:
                    due = {}
                elif every and self.at % every == 0:
                    due = {"under_way": True}
                elif self.at == self.last:
                    due = {"interrupted": True}
                # A record has all of its steps. Else the last ones are not read yet, so the host starts steps ahead.
                self._count(self._behind if due is None else 0)
                if due is not None:
                    self.epoch.seconds, self.epoch.since = self.epoch.elapsed(), None
                yield due
                if is_over:
                    self.epoch = Epoch()
        finally:
            if self._trace is not None:
                self._trace.close(self.state)
            self._progress.close()

    def _note_end_of_epoch(self) -> None:
        """Note whether an epoch has ended with the last step."""
        if self.run.steps is not None:
            if self.at - self._starts[-1] == self.run.steps:
                self._starts.append(self.at)
        elif isinstance(self.run.source, data.IterableSource) and self.run.source.is_pass_over:
            self._starts.append(self.at)
            if len(self._starts) - 1 == self.run.epochs:
                self.last = self.at

    def _count(self, behind: int) -> None:
        """Read the metrics of all steps except the last few. Waits for these steps."""
        run = self.run
        for rows in self.epoch.read(behind):
            now = time.perf_counter()
            self._pace, self._read = (now - self._read) / len(rows), now
            before = self.at - self.epoch.num_unread - len(rows)
            if before == self.began:  # the metrics of a step of the user's own are known only now
                run.callbacks.check_metrics(list(rows[0]), [], run.evaluation.parts)
            for number, metrics in enumerate(rows, before + 1):
                skipped = run.skips and metrics["skipped"] > 0
                if skipped and run.stops:
                    check_finite(metrics, self.state)
                if not (skipped or self._warned or math.isfinite(metrics.get("loss", 0.0))):
                    self._warned = True
                    warnings.warn(
                        f"fit: the loss of step {number} (the first is 1) is {metrics['loss']}. The update was made, "
                        "the training continues, and new checkpoints replace earlier ones. Look at that batch, its "
                        "labels and the learning rate. make_train_step(loss_fn, nonfinite='skip') leaves out such "
                        "updates, and nonfinite='stop' ends the training before the first one",
                        stacklevel=2,
                    )
                self.epoch.sums.update({"skipped": 1} if skipped else metrics)
                self.epoch.counted += 1
                # The bar shows what was measured at most a second ago: to measure waits for the state.
                is_old = self._read - self._measured_at > _MEASURE_EVERY
                if self._measured and self._progress.bar is not None and is_old:
                    self._measured, self._measured_at = run.callbacks.measure(self.state), time.perf_counter()
                per_second = self.epoch.counted * run.batch_size / self.epoch.elapsed()
                self._progress.step({**metrics, **self._measured} if self._measured else metrics, per_second)
                if self.memories or run.callbacks.on_step is not None:
                    self.memories = run.callbacks.step(self.memories, number, metrics)
        if self.certificate is not None:
            self.certificate.write(self.at - self.epoch.num_unread)

    def should_stop(self, due: dict[str, bool] | None) -> bool:
        """Evaluate and call the callbacks where a record is due, save if that is. Return whether the run is to stop."""
        callbacks, record, stopped, failed = self.run.callbacks, None, list[str](), True
        if due is not None:
            try:
                scores = {**self.run.evaluation.scores(self.state), **callbacks.measure(self.state)}
            except Exception as error:
                # The next call evaluates again. Other processes may still evaluate, and would not take part in a save.
                if self.between_epochs and processes.is_in_all(error):
                    self.save()
                raise
            record = self._record(scores, due)
            if self.between_epochs:
                self._progress.close()
            if self._progress.is_shown:
                step = "" if self.between_epochs else f"step {self.at}  "
                self._progress.print(step + line(record, self.run.epochs))
            self.history.append(record)
        try:
            if record is not None:
                self._before = self.memories  # those that a checkpoint of a run cut by `max_steps` has
                self.memories, stopped = callbacks.run(self.memories, self.state, record)
                stopped = [] if record.get("interrupted") else stopped
                if self._manager is None and callbacks.restores_best and callbacks.best_step(self.memories) == self.at:
                    with user_mesh.outside_mesh():  # a copy, since the next step takes the state
                        self._best = mesh.own_copies(self.state)
            failed = False
        finally:  # a callback that fails costs no steps of an epoch
            interrupted = self.signals.should_stop(self.state, self.at, record is not None)
            self.save(stopped=stopped, interrupted=interrupted, failed=failed)
        if record is not None:
            # All processes wait in `written`, and perhaps in the callback. So an error in one is not raised in others.
            callbacks.call("on_saved", record, self._written)
        return bool(stopped) or interrupted

    def _record(self, scores: dict[str, float], mark: dict[str, bool]) -> Record:
        """What the steps of the epoch add up to so far. There is a key only for what has a value."""
        run, epoch = self.run, self.epoch
        sums, seconds = dict(epoch.sums), epoch.elapsed()
        skipped = int(sums.pop("skipped", 0)) if run.skips else 0
        updates = epoch.counted - skipped
        # A step that was skipped has no metrics in the sums.
        means = {name: value / updates for name, value in sums.items()} if updates else {"loss": float("nan")}
        return {
            **{"epoch": self.number, "step": self.at},
            **{name: means[name] for name in ("loss", "accuracy") if name in means},  # before the others
            **means,
            **({"skipped": skipped} if run.skips else {}),
            **scores,
            **{"seconds": seconds, f"{run.unit}_per_second": epoch.counted * run.batch_size / seconds},
            **mark,
        }

    def save(self, *, stopped: Sequence[str] = (), interrupted: bool = False, failed: bool = False) -> None:
        """Save the state if it is due, with what `fit` needs to go on. Waits for the steps of an epoch under way.

        `stopped`: which callbacks end the run.
        """
        # The record of an epoch that `max_steps` cuts short, and what callbacks made of it, are not saved: a longer run
        # has neither. Nor is a record that a callback `failed` at: the next call makes it again, for all callbacks.
        if self._manager is None or (failed and not self.between_epochs):
            return
        run, every = self.run, self.run.checkpoint_every
        interrupted = interrupted or (self.at == self.last and not self.between_epochs)  # the latter by `max_steps`
        cut = failed or (self.is_recorded and self.history[-1].get("interrupted"))
        # A longer run does not know of a best state that was found where `max_steps` cut an epoch short.
        best = run.callbacks.best_step(self.memories) == self.at and not (cut and run.callbacks.restores_best)
        if not (self.between_epochs or stopped or interrupted or best or (every and self.at % every == 0)):
            return
        under_way: dict[str, Any] = {}
        if not self.between_epochs or failed or (self.epoch.counted and not self.is_recorded):
            self._count(0)
            epoch = self.epoch
            under_way = {"sums": dict(epoch.sums), "counted": epoch.counted, "seconds": epoch.elapsed()}
        place = data._place_in(run.source)
        history, memories = (self.history[:-1], self._before) if cut else (self.history, self.memories)
        info = {
            **{"first": self.first, "batch_size": run.batch_size, "examples": run.examples, "rates": self._past.rates},
            **({"ended_by": list(stopped), "limit": run.limit} if stopped else {}),
            **{"stopped": bool(stopped), "interrupted": interrupted, "callbacks": run.callbacks.to_json(memories)},
            **({} if self.identity is None else {"run": self.identity}),
            **({} if self._past.data is None else {"data": self._past.data}),
            **under_way,
            **({} if run.steps else {"epochs_over": len(self._starts) - 1, "epoch_began": self._starts[-1]}),
            **({} if place is None else {"place": place}),
        }
        self._manager._save(self.state, info, best=best, records=history)

    def _written(self) -> Path | None:
        """Wait for the disk. Return what this run wrote or restored of the last step, in the process that writes."""
        if self._manager is None:
            return None
        self._manager.wait()
        latest = self._manager._latest
        return latest if latest is not None and latest.name.startswith(f"step_{self.at:08d}") else None

    def restore_best(self) -> None:
        """Take the state of the best record. The run is over."""
        step = self.run.callbacks.best_step(self.memories)
        if not step or step == self.at:
            return
        if self._manager is not None:
            found = self._manager._restore(
                lambda: like_saved(self.state, self.run.step), lambda _, body: body.get("step") == step
            )
            if found is None:
                words = f"{self.run.checkpoint_dir} has no good checkpoint of the best state, of step {step}"
                raise checkpoint.CheckpointError(f"fit: {words}")
            self.state = found[0]
        elif self._best is not None:
            self.state = self._best
        if jax.process_index() == 0:
            say_news(f"restored the best state, of step {step}")

    def end_interrupted(self) -> None:
        """Mark the record of an epoch that ends within it. An interrupt, a callback or `max_steps` can do that."""
        self._count(0)
        if self.is_recorded:
            self.history[-1] = {**self.history[-1], "interrupted": True}
            return
        # At the end of `max_steps` an earlier call made it, and its checkpoint does not have it.
        scores = self.run.evaluation.scores(self.state) if self.at == self.last else {}
        self.history.append(self._record(scores, {"interrupted": True}))

    def close_certificate(self) -> None:
        """Write the lines up to the state that is left, and let another run write the certificate, if there is one."""
        if self.certificate is not None:
            with contextlib.closing(self.certificate):
                # After an error or a second Ctrl-C, the caller may go on from this state. Several processes do not wait
                # for each other's hashes here, since one of them may be lost.
                if processes.count() == 1 and not mesh.is_donated(self.state):
                    self.certificate.go_back(int(self.state.step))

    def go_back(self, state: TrainState, step: int) -> None:
        """Go back to the state before a step that is not finite. No later step counts."""
        self.state, self.at = state, step
        while self._starts[-1] > step:
            self._starts.pop()
        self.epoch.unread.clear()
        if self.certificate is not None:
            self.certificate.go_back(step)
