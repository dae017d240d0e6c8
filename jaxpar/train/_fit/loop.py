"""The steps of a run in a row, several ahead of the host, with the metrics of the epoch they are in."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import jax

from ... import data
from ..._core.arrays import Device
from .._callbacks.history import History, Record, line
from .._step.nonfinite import check_finite
from .._step.state import TrainState
from .._step.train_step import TrainStep
from .epoch import Epoch, epoch_of
from .profile import Trace
from .progress import Progress
from .run import Made, Run, RunHistory, shuffle_key

_AT_ONCE = 0.2  # seconds that the steps of one program take. Ctrl-C waits for them.
_MEASURE_EVERY = 1.0  # seconds after which the bar shows another learning rate


class Loop:
    """The steps of a run, and where it is.

    Attributes:
        run: the inputs.
        state: the state after the last step.
        history: the records so far.
        at: the number of steps that were made.
        first: the value of `at` where the run began, before it was resumed.
        began: the value of `at` where this call of `fit` began.
        last: the value of `at` at the end.
        epoch: the sums of the epoch under way.
        memories: of the callbacks.
        signal: the one that ended the run, or None.
    """

    def __init__(self, run: Run, state: TrainState, past: RunHistory):
        self.run, self.state, self.history = run, state, History(past.history)
        self.first, self.epoch = past.first, epoch_of(past.under_way)
        self.at = self.began = int(state.step)
        self.last = self.began if past.stopped else max(self.began, past.first + run.num_steps)
        self.memories = self._before = run.callbacks.init(state, past.memories, past.resumed)
        self.signal: int | None = None
        self._progress = Progress(run.options.progress, run.unit)
        self._trace = Trace(run.options.profile, self.began, self.last)
        self._pace, self._read = float("inf"), 0.0  # seconds of a step, and when the last one was read
        self._wants_steps, self._checked = run.callbacks.wants_steps, False
        self._warned = False  # that a loss was not finite
        self._measured = run.callbacks.measure(state)  # what the bar shows of it
        self._measured_at = 0.0

    @property
    def number(self) -> int:
        """The number of the epoch of the last step, from 1."""
        return -(-(self.at - self.first) // self.run.steps)

    @property
    def between_epochs(self) -> bool:
        return (self.at - self.first) % self.run.steps == 0

    @property
    def is_recorded(self) -> bool:
        """Whether the history has a record of the last step."""
        return bool(self.history) and self.history[-1]["step"] == self.at

    @property
    def is_cut(self) -> bool:
        """Whether `max_steps` ends the run within an epoch."""
        return self.at == self.last and not self.between_epochs

    @property
    def must_evaluate(self) -> bool:
        """Whether an epoch was over and has no record, since the evaluation after it failed in an earlier call."""
        return self.between_epochs and self.epoch.counted > 0

    @contextlib.contextmanager
    def steps(self) -> Generator[Iterator[Record | None]]:
        """A block with the steps. There is a None after one or several, and a record where one is due."""
        own = contextlib.nullcontext(self._calls())
        with (
            own if self.run.make_steps is None else self.run.make_steps(self) as calls,
            contextlib.closing(self._records(calls)) as records,
        ):
            yield records

    def _records(self, calls: Iterator[Made]) -> Generator[Record | None]:
        try:
            if self.must_evaluate:
                self.epoch.start()
                self.epoch.pause()
                yield self._record()
                self.epoch = Epoch()
            self._start_epoch()
            self._progress.say_compiling()
            while self.at < self.last:
                self.state, metrics, part = next(calls)
                if self.at == self.began:
                    self._progress.say("")
                self.at += 1 if part is None else len(part)
                self.epoch.add(metrics, part)
                self.run.certificate.take(self.at, self.state)
                mark = self._due()
                self._count(self.run.behind if mark is None else 0)
                if mark is None:
                    yield None
                    continue
                self.epoch.pause()
                yield {**self._record(), **mark}
                if self.between_epochs:
                    self.epoch = Epoch()
                    self._start_epoch()
                else:
                    self.epoch.resume()
                    self._read = time.perf_counter()
        finally:
            self._trace.close(self.state)
            self._progress.close()

    def _due(self) -> dict[str, bool] | None:
        """The mark of the record that is due after this step. None: none is due."""
        every = self.run.options.eval_every
        if self.between_epochs:
            return {}
        if every and self.at % every == 0:
            return {"under_way": True}
        return {"interrupted": True} if self.is_cut else None

    def evaluate(self, record: Record) -> None:
        """Evaluate the state, show the record and keep it."""
        record |= {**self.run.evaluation.scores(self.state), **self.run.callbacks.measure(self.state)}
        if self.between_epochs:
            self._progress.close()
        if self._progress.is_shown:
            step = "" if self.between_epochs else f"step {record['step']}  "
            self._progress.print(step + line(record, self.run.epochs, self.run.unit))
        self.history.append(record)

    def run_callbacks(self, record: Record) -> bool:
        """Give the record to the callbacks. Return whether one asked to stop."""
        self._before = self.memories
        self.memories, stopped = self.run.callbacks.run(self.memories, self.state, record)
        return stopped and not record.get("interrupted")

    def to_save(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the state, as JSON. Waits for the steps of an epoch under way.

        The record of an epoch that `max_steps` cuts short, and what callbacks made of it, are not in it: a longer run
        has neither.
        """
        begins = self.between_epochs and (self.is_recorded or not self.epoch.counted)
        under_way = {} if begins else self._under_way()
        cut = self.is_recorded and self.history[-1].get("interrupted")
        history, memories = (self.history[:-1], self._before) if cut else (self.history, self.memories)
        return {
            **{"first": self.first, "history": history, **under_way},
            **{"callbacks": self.run.callbacks.to_json(memories)},
        }

    def _under_way(self) -> dict[str, Any]:
        self._count(0)
        return self.epoch.info()

    def end_interrupted(self) -> None:
        """Mark the record of an epoch that ends within it. An interrupt, a callback or `max_steps` can do that."""
        if self.between_epochs:
            return
        self._count(0)
        if self.is_recorded:
            self.history[-1] = {**self.history[-1], "interrupted": True}
            return
        scores = self.run.evaluation.scores(self.state) if self.is_cut else {}  # it was made by an earlier call
        self.history.append({**self._record(), **scores, "interrupted": True})

    def go_back(self, state: TrainState, step: int) -> None:
        """Go back to the state before a step that is not finite. No later step counts."""
        self.state, self.at = state, step
        self.epoch = dataclasses.replace(self.epoch, unread=collections.deque(), num_unread=0)
        self.run.certificate.go_back(step)

    def _calls(self) -> Iterator[Made]:
        """Call the step, or a program of several steps. `at` has changed when the next is asked for."""
        run, state = self.run, self.state
        where = self._where(state.store.devices)
        groups = self._groups(state.rng, where) if state.store.devices else None
        if groups is None:
            for batch in run.batches(state.rng, self.at, **where):
                with self._trace.step(self.at, state):
                    state, metrics = run.step(state, batch)
                yield state, metrics, None
            return
        for batches, number in groups:
            done = 0
            while done < number:
                end = min(number, done + self._next_number())
                with self._trace.step(self.at, state):
                    state, metrics = run.step.many(state, batches, done, end)
                yield state, metrics, range(done, end)
                done = end

    def _where(self, devices: Sequence[Device] | None) -> dict[str, Any]:
        """Where batches go: to all devices, or over those axes of a mesh that the step splits a batch over."""
        step = self.run.step
        sharding = step.batch_sharding(self.state) if isinstance(step, TrainStep) else None
        taken = sharding is not None and data._takes_sharding(self.run.source)
        virtual = data._virtual_options(self.run.source, getattr(step, "virtual_shards", None), devices)
        return {"sharding": sharding} if taken else {"devices": devices, **virtual}

    def _groups(self, rng: jax.Array, where: dict[str, Any]) -> Iterator[tuple[data.Batch, int]] | None:
        """Batches for programs of several steps. None where each step is a program."""
        run = self.run
        if run.per_program == 1:
            return None
        most = None if run.per_program == "auto" else run.per_program
        key = shuffle_key(rng)
        groups = data.batch_groups(run.source, run.options.batch_size, most, rng=key, start=self.at, **where)
        if most is not None and groups is None:
            raise ValueError(
                f"fit: steps_per_execution is {most}, but the devices have no room for the data set; "
                "say 1, or leave it out"
            )
        if most is not None or groups is None:
            return groups
        first = next(groups)
        return None if run.step.slow_in_a_loop(self.state, first[0]) else itertools.chain([first], groups)

    def _next_number(self) -> int:
        """How many steps the next program makes, if there are as many batches."""
        if self._trace.is_on:
            return 1
        run = self.run
        periods = (run.options.checkpoint_every, run.options.eval_every, run.certificate.every)
        most = max(1, int(_AT_ONCE / self._pace)) if run.per_program == "auto" else run.per_program
        return min(most, self.last - self.at, *(every - self.at % every for every in periods if every))

    def _start_epoch(self) -> None:
        if self.at < self.last:
            epoch, done = divmod(self.at - self.first, self.run.steps)
            self._progress.start(self.run.steps, f"epoch {epoch + 1}/{self.run.epochs}", done)
        self.epoch.start()
        self._read = self.epoch.started

    def _count(self, behind: int) -> None:
        """Read the metrics of all steps except the last few. Waits for these steps."""
        for rows in self.epoch.read(behind):
            now = time.perf_counter()
            self._pace, self._read = (now - self._read) / len(rows), now
            number = self.at - self.epoch.num_unread - len(rows)
            if not self._checked:
                self._checked = True
                self.run.check_monitors(rows[0])
            for i, metrics in enumerate(rows, 1):
                self._count_step(number + i, metrics)
        self.run.certificate.write(self.at - self.epoch.num_unread)

    def _count_step(self, number: int, metrics: dict[str, float]) -> None:
        run, skipped = self.run, self.run.skips and metrics["skipped"] > 0
        if skipped and run.stops:
            check_finite(metrics, self.state)
        if not (skipped or self._warned or math.isfinite(metrics.get("loss", 0.0))):
            self._warned = True
            warnings.warn(_not_finite(number, metrics["loss"]), stacklevel=2)
        self.epoch.count({"skipped": 1} if skipped else metrics)
        shown = {**metrics, **self._measure_again()} if self._measured else metrics
        self._progress.step(shown, self.epoch.counted * run.options.batch_size / self.epoch.elapsed())
        if self._wants_steps:
            self.memories = run.callbacks.step(self.memories, number, metrics)

    def _measure_again(self) -> dict[str, float]:
        """What the bar shows beside the metrics, not older than a second. To measure waits for the state."""
        if self._progress.has_bar and self._read - self._measured_at > _MEASURE_EVERY:
            self._measured, self._measured_at = self.run.callbacks.measure(self.state), time.perf_counter()
        return self._measured

    def _record(self) -> Record:
        return self.epoch.record(self.number, self.at, self.run.options.batch_size, self.run.skips)


def _not_finite(number: int, loss: float) -> str:
    """The warning about the first step whose loss is not finite, and whose update was made all the same."""
    return (
        f"fit: the loss of step {number} (the first is 1) is {loss}; its update was made, training goes on, and "
        "checkpoints after it take the place of earlier ones; look at that batch, its labels and the learning rate, or "
        "make the step with make_train_step(loss_fn, nonfinite='skip') to leave such updates out, or 'stop' to end "
        "before the first one"
    )
