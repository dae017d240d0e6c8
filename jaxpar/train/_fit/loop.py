"""The steps of a run in a row, fed ahead of the devices, with the metrics of the epoch they are in."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np

from ... import data
from ..._core.arrays import Device
from .._step.nonfinite import check_finite
from .._step.state import TrainState
from .._step.train_step import TrainStep
from .profile import Trace
from .progress import Progress

Record = dict[str, Any]
OnStep = Callable[[int, dict[str, float]], Any]

_BEHIND = 8
_AT_ONCE = 0.2  # seconds that several steps take together; Ctrl-C waits for them
_SHUFFLE = 0x5FFE1E  # what tells the random key of the order of examples from those of the steps


@dataclasses.dataclass(frozen=True)
class _Made:
    """The metrics of one step; or, with `end`, of several, with the steps from `first` to `end` in their first axis."""

    metrics: dict[str, jax.Array]
    first: int = 0
    end: int = 0

    @property
    def steps(self) -> int:
        return self.end - self.first or 1

    def rows(self) -> list[dict[str, float]]:
        """Those that are numbers, for each step; waits for it."""
        if not self.end:
            return [{k: float(v) for k, v in self.metrics.items() if np.ndim(v) == 0}]
        columns = {k: np.asarray(v) for k, v in self.metrics.items() if np.ndim(v) == 1}
        return [{k: float(v[i]) for k, v in columns.items()} for i in range(self.first, self.end)]


class Loop:
    """The steps of a run.

    Args:
        first: the step at which the run began, before it was resumed.
        left: how many steps are still to be made.
        under_way: what `unfinished` said about the epoch in which it is resumed.
        on_step: gets the metrics of each step, a few steps later.
        together: how many steps a program makes; "auto": as many as take a fifth of a second, in the fast cases.
        every: a program ends with each step whose number this divides; None for none.
    """

    def __init__(
        self,
        step: TrainStep,
        source: data.Source,
        batch_size: int,
        first: int,
        left: int,
        progress: Progress,
        under_way: dict[str, Any],
        on_step: OnStep | None,
        trace: Trace,
        together: int | Literal["auto"] = 1,
        every: int | None = None,
    ):
        self.step, self.source, self.batch_size, self.first = step, source, batch_size, first
        self.steps = data.num_batches(source.examples(batch_size), batch_size)
        self.left, self.at = left, first
        self.nonfinite = getattr(step, "nonfinite", "ignore")  # a step of the user's own has none
        self.skips = getattr(step, "skips", False)
        self.state: TrainState | None = None
        self.progress, self.on_step, self.trace = progress, on_step, trace
        self.together, self.every, self.pace = together, every, float("inf")
        self.sums: collections.Counter[str] = collections.Counter(under_way.get("sums", {}))
        self.counted, self.seconds = under_way.get("counted", 0), under_way.get("seconds", 0.0)
        self.waiting: collections.deque[_Made] = collections.deque()  # metrics that were not read yet
        self.started = self.read = 0.0

    @property
    def epoch(self) -> int:
        """That of the last step, from 1."""
        return -(-(self.at - self.first) // self.steps)

    def unfinished(self) -> dict[str, Any]:
        """What the record of an epoch that is under way needs of it; waits for the steps made so far."""
        if (self.at - self.first) % self.steps == 0:
            return {}
        self._count(0)
        seconds = self.seconds + time.perf_counter() - self.started
        return {"sums": dict(self.sums), "counted": self.counted, "seconds": seconds}

    def stopped(self, step: int) -> None:
        """Goes back to the step that was not finite; nothing after it counts."""
        self.at = step
        self.waiting.clear()

    def cut(self) -> list[Record]:
        """The record of an epoch that an interrupt ends before its time; none between two epochs."""
        if (self.at - self.first) % self.steps == 0:
            return []
        self._count(0)
        self.seconds += time.perf_counter() - self.started
        return [{**self._record(), "interrupted": True}]

    def run(self, state: TrainState) -> Iterator[tuple[TrainState, Record | None]]:
        """The state after each step, or after several, with a record where an epoch is over."""
        self.at = int(state.step)
        last = self.at + self.left
        calls = self._calls(state, last)
        try:
            self._begin_epoch(last)
            while self.at < last:
                state, made = next(calls)
                self.state = state
                self.at += made.steps
                self.waiting.append(made)
                over = (self.at - self.first) % self.steps == 0
                self._count(0 if over else _BEHIND)
                if not over:
                    yield state, None
                    continue
                self.seconds += time.perf_counter() - self.started
                yield state, self._record()
                self.sums.clear()
                self.counted, self.seconds = 0, 0.0
                self._begin_epoch(last)
        finally:
            self.trace.close(state)
            self.progress.close()

    def _calls(self, state: TrainState, last: int) -> Iterator[tuple[TrainState, _Made]]:
        """Calls the step, or several at once; each time `at` has gone on when the next is asked for."""
        rng, devices = jax.random.fold_in(state.rng, _SHUFFLE), state.store.devices
        groups = self._groups(state, rng, devices) if devices else None
        if groups is None:
            source = self.source.batches(self.batch_size, rng=rng, epochs=None, start=self.at, devices=devices)
            for batch in source:
                with self.trace.step(self.at, state):
                    state, metrics = self.step(state, batch)
                yield state, _Made(metrics)
            return
        for batches, number in groups:
            done = 0
            while done < number:
                end = min(number, done + self._next(last))
                with self.trace.step(self.at, state):
                    state, metrics = self.step.many(state, batches, done, end)
                yield state, _Made(metrics, done, end)
                done = end

    def _groups(
        self, state: TrainState, rng: jax.Array, devices: Sequence[Device]
    ) -> Iterator[tuple[data.Batch, int]] | None:
        """Batches for several steps at once; None where the steps are to be made one by one."""
        if self.together == 1:
            return None
        most = None if isinstance(self.together, str) else self.together  # "auto"
        groups = data.batch_groups(self.source, self.batch_size, most, rng=rng, start=self.at, devices=devices)
        if most is not None and groups is None:
            raise ValueError(f"fit: steps_per_execution is {most}, but the devices have no room for the data set")
        if most is not None or groups is None:
            return groups
        first = next(groups)
        return None if self.step.slow_in_a_loop(state, first[0]) else itertools.chain([first], groups)

    def _next(self, last: int) -> int:
        """How many steps the next program is to make, if there are as many batches."""
        if self.trace.wanted:
            return 1
        most = max(1, int(_AT_ONCE / self.pace)) if isinstance(self.together, str) else self.together
        return min(most, last - self.at, self.every - self.at % self.every if self.every else most)

    def _begin_epoch(self, last: int) -> None:
        if self.at < last:
            epoch, done = divmod(self.at - self.first, self.steps)
            self.progress.start(epoch + 1, done)
        self.started = self.read = time.perf_counter()

    def _count(self, behind: int) -> None:
        """Reads the metrics of all steps but the last few, which waits for these steps."""
        while sum(made.steps for made in self.waiting) > behind:
            made = self.waiting.popleft()
            rows = made.rows()
            now = time.perf_counter()
            self.pace, self.read = (now - self.read) / made.steps, now
            number = self.at - sum(later.steps for later in self.waiting) - made.steps
            for i, row in enumerate(rows, 1):
                left_out = self.skips and row["skipped"] > 0
                if left_out and self.nonfinite == "stop":
                    assert self.state is not None
                    check_finite(row, self.state)
                self.sums.update({"skipped": 1} if left_out else row)
                self.counted += 1
                self.progress.step(row, self.counted * self.batch_size / (self.seconds + now - self.started))
                if self.on_step is not None:
                    self.on_step(number + i, row)

    def _record(self) -> Record:
        sums = dict(self.sums)
        left_out = int(sums.pop("skipped", 0)) if self.skips else 0
        made = self.counted - left_out
        means = {k: v / made for k, v in sums.items()} if made else {"loss": float("nan")}
        means |= {"skipped": left_out} if self.skips else {}
        return {
            "epoch": self.epoch,
            "step": self.at,
            "loss": None,
            "accuracy": None,
            **means,
            "test_loss": None,
            "test_accuracy": None,
            "seconds": self.seconds,
            "images_per_second": self.counted * self.batch_size / self.seconds,
        }
