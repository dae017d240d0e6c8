"""The steps of a run in a row, several ahead of the host, with the metrics of the epoch they are in."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ... import data
from ..._core.arrays import Device
from ..._devices.user_mesh import outside_mesh
from .._callbacks.history import History, Record
from .._step.nonfinite import check_finite
from .._step.state import TrainState
from .._step.train_step import TrainStep
from .epoch import Epoch, epoch_of
from .profile import Trace
from .progress import Progress
from .run import Run, RunHistory

_BEHIND = 8  # steps whose metrics are not read yet, so that the host need not wait
_AT_ONCE = 0.2  # seconds that the steps of one program take. Ctrl-C waits for them.
_SHUFFLE = 0x5FFE1E  # folded into the key of the run, for the order of the examples


@dataclasses.dataclass(frozen=True)
class _Steps:
    """The metrics of one step. With `end`, those of steps `first` to `end` along their first axis."""

    metrics: dict[str, jax.Array]
    first: int = 0
    end: int = 0

    @property
    def number(self) -> int:
        return self.end - self.first or 1

    def rows(self) -> list[dict[str, float]]:
        """The metrics that are numbers, for each step. Waits for them. A warning names those that are not."""
        axes = 1 if self.end else 0
        others = {k: np.shape(v)[axes:] for k, v in self.metrics.items() if np.ndim(v) != axes}
        if others:
            words = ", ".join(f"{k!r} of shape {shape}" for k, shape in others.items())
            warnings.warn(
                f"fit: the history holds numbers, and aux of loss_fn has {words}; return a mean or another number",
                stacklevel=2,
            )
        if not self.end:
            return [{k: float(v) for k, v in self.metrics.items() if k not in others}]
        columns = {k: np.asarray(v) for k, v in self.metrics.items() if k not in others}
        return [{k: float(v[i]) for k, v in columns.items()} for i in range(self.first, self.end)]


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
    """

    def __init__(self, run: Run, state: TrainState, past: RunHistory):
        self.run, self.state, self.history = run, state, History(past.history)
        self.first, self.epoch = past.first, epoch_of(past.under_way)
        self.at = self.began = int(state.step)
        self.last = self.began if past.stopped else max(self.began, past.first + run.epochs * run.steps)
        self._progress = Progress(run.progress, run.epochs, run.steps)
        self._trace = Trace(run.profile, self.last - self.began)
        self._pace, self._read = float("inf"), 0.0  # seconds of a step, and when the last one was read
        self._unread: collections.deque[_Steps] = collections.deque()
        self._warned = False  # that a loss was not finite

    @property
    def number(self) -> int:
        """The number of the epoch of the last step, from 1."""
        return -(-(self.at - self.first) // self.run.steps)

    @property
    def between_epochs(self) -> bool:
        return (self.at - self.first) % self.run.steps == 0

    def steps(self) -> Generator[Record | None]:
        """Make the steps. Give None after one or several, and the record where an epoch is over."""
        calls = self._calls()
        try:
            self._start_epoch()
            while self.at < self.last:
                self.state, made = next(calls)
                self.at += made.number
                self._unread.append(made)
                self._count(0 if self.between_epochs else _BEHIND)
                if not self.between_epochs:
                    yield None
                    continue
                record = self._record()
                yield record
                self.epoch = Epoch()
                self._start_epoch()
        finally:
            self._trace.close(self.state)
            self._progress.close()

    def end_epoch(self, record: Record) -> None:
        """Evaluate the state, show the record and keep it."""
        record |= self.run.scores(self.state)
        self._progress.end(record)
        self.history.append(record)

    def under_way(self) -> dict[str, Any]:
        """What a checkpoint keeps of an epoch under way. Waits for its steps. Empty between epochs."""
        if self.between_epochs:
            return {}
        self._count(0)
        return self.epoch.info()

    def end_interrupted(self) -> None:
        """Keep the record of an epoch that an interrupt ends."""
        if not self.between_epochs:
            self._count(0)
            self.history.append({**self._record(), "interrupted": True})

    def go_back(self, state: TrainState, step: int) -> None:
        """Go back to the state before a step that is not finite. No later step counts."""
        self.state, self.at = state, step
        self._unread.clear()

    def _calls(self) -> Iterator[tuple[TrainState, _Steps]]:
        """Call the step, or a program of several steps. `at` has changed when the next is asked for."""
        run, state = self.run, self.state
        with outside_mesh():
            rng, devices = jax.random.fold_in(state.rng, _SHUFFLE), state.store.devices
        where = self._where(devices)
        groups = self._groups(rng, where) if devices else None
        if groups is None:
            for batch in run.source.batches(run.batch_size, rng=rng, epochs=None, start=self.at, **where):
                with self._trace.step(self.at, state):
                    state, metrics = run.step(state, batch)
                yield state, _Steps(metrics)
            return
        for batches, number in groups:
            done = 0
            while done < number:
                end = min(number, done + self._next_number())
                with self._trace.step(self.at, state):
                    state, metrics = run.step.many(state, batches, done, end)
                yield state, _Steps(metrics, done, end)
                done = end

    def _where(self, devices: Sequence[Device] | None) -> dict[str, Any]:
        """Where batches go: to all devices, or over those axes of a mesh that the step splits a batch over."""
        sharding = self.run.step.batch_sharding(self.state) if isinstance(self.run.step, TrainStep) else None
        taken = sharding is not None and data.takes_sharding(self.run.source)
        return {"sharding": sharding} if taken else {"devices": devices}

    def _groups(self, rng: jax.Array, where: dict[str, Any]) -> Iterator[tuple[data.Batch, int]] | None:
        """Batches for programs of several steps. None where each step is a program."""
        run = self.run
        if run.per_program == 1:
            return None
        most = None if run.per_program == "auto" else run.per_program
        groups = data.batch_groups(run.source, run.batch_size, most, rng=rng, start=self.at, **where)
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
        per_program, every = self.run.per_program, self.run.checkpoint_every
        most = max(1, int(_AT_ONCE / self._pace)) if per_program == "auto" else per_program
        return min(most, self.last - self.at, every - self.at % every if every else most)

    def _start_epoch(self) -> None:
        if self.at < self.last:
            epoch, done = divmod(self.at - self.first, self.run.steps)
            self._progress.start(epoch + 1, done)
        self.epoch.start()
        self._read = self.epoch.started

    def _count(self, behind: int) -> None:
        """Read the metrics of all steps except the last few. Waits for these steps."""
        while sum(made.number for made in self._unread) > behind:
            made = self._unread.popleft()
            rows = made.rows()
            now = time.perf_counter()
            self._pace, self._read = (now - self._read) / made.number, now
            number = self.at - sum(later.number for later in self._unread) - made.number
            for i, metrics in enumerate(rows, 1):
                self._count_step(number + i, metrics)

    def _count_step(self, number: int, metrics: dict[str, float]) -> None:
        run, skipped = self.run, self.run.skips and metrics["skipped"] > 0
        if skipped and run.stops:
            check_finite(metrics, self.state)
        if not (skipped or self._warned or math.isfinite(metrics.get("loss", 0.0))):
            self._warned = True
            warnings.warn(_not_finite(number, metrics["loss"]), stacklevel=2)
        self.epoch.add({"skipped": 1} if skipped else metrics)
        self._progress.step(metrics, self.epoch.counted * run.batch_size / self.epoch.elapsed())
        if run.callbacks.on_step is not None:
            run.callbacks.on_step(number, metrics)

    def _record(self) -> Record:
        return self.epoch.record(self.number, self.at, self.run.batch_size, self.run.skips)


def _not_finite(number: int, loss: float) -> str:
    """The warning about the first step whose loss is not finite, and whose update was made all the same."""
    return (
        f"fit: the loss of step {number} (the first is 1) is {loss}; its update was made, training goes on, and "
        "checkpoints after it take the place of earlier ones; look at that batch, its labels and the learning rate, or "
        "make the step with make_train_step(loss_fn, nonfinite='skip') to leave such updates out, or 'stop' to end "
        "before the first one"
    )
