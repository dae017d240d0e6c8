"""The steps of a run in a row, fed ahead of the devices, with the metrics of the epoch they are in."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from . import data
from ._finite import check_finite
from ._profile import Trace
from ._progress import Progress
from ._state import TrainState
from ._step import TrainStep

Record = dict[str, Any]
OnStep = Callable[[int, dict[str, float]], Any]

_BEHIND = 8
_SHUFFLE = 0x5FFE1E  # what tells the random key of the order of examples from those of the steps


class Loop:
    """The steps of a run.

    Args:
        first: the step at which the run began, before it was resumed.
        left: how many steps are still to be made.
        under_way: what `unfinished` said about the epoch in which it is resumed.
        on_step: gets the metrics of each step, a few steps later.
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
    ):
        self.step, self.source, self.batch_size, self.first = step, source, batch_size, first
        self.steps = data.num_batches(source.examples(batch_size), batch_size)
        self.left, self.at = left, first
        self.nonfinite = getattr(step, "nonfinite", "ignore")  # a step of the user's own has none
        self.skips = getattr(step, "skips", False)
        self.state: TrainState | None = None
        self.progress, self.on_step, self.trace = progress, on_step, trace
        self.sums: collections.Counter[str] = collections.Counter(under_way.get("sums", {}))
        self.counted, self.seconds = under_way.get("counted", 0), under_way.get("seconds", 0.0)
        self.waiting: collections.deque[dict[str, jax.Array]] = collections.deque()  # metrics that were not read yet
        self.started = 0.0

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
        """The state after each step, with a record where an epoch is over."""
        self.at = int(state.step)
        rng = jax.random.fold_in(state.rng, _SHUFFLE)
        last = self.at + self.left
        batches = self.source.batches(self.batch_size, rng=rng, epochs=None, start=self.at, devices=state.store.devices)
        try:
            self._begin_epoch(last)
            while self.at < last:
                batch = next(batches)
                with self.trace.step(self.at, state):
                    state, metrics = self.step(state, batch)
                self.state = state
                self.at += 1
                self.waiting.append(metrics)
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

    def _begin_epoch(self, last: int) -> None:
        if self.at < last:
            epoch, done = divmod(self.at - self.first, self.steps)
            self.progress.start(epoch + 1, done)
        self.started = time.perf_counter()

    def _count(self, behind: int) -> None:
        """Reads the metrics of all steps but the last few, which waits for these steps."""
        while len(self.waiting) > behind:
            metrics = self.waiting.popleft()
            read = {k: float(v) for k, v in metrics.items() if np.ndim(v) == 0}
            left_out = self.skips and read["skipped"] > 0
            if left_out and self.nonfinite == "stop":
                assert self.state is not None
                check_finite(metrics, self.state)
            self.sums.update({"skipped": 1} if left_out else read)
            self.counted += 1
            seconds = self.seconds + time.perf_counter() - self.started
            self.progress.step(read, self.counted * self.batch_size / seconds)
            if self.on_step is not None:
                self.on_step(self.at - len(self.waiting), read)

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
