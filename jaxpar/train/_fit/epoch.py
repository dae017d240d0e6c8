"""What the steps of one epoch add up to: their metrics, read several steps late, and the record that `fit` makes."""

from __future__ import annotations

import collections
import dataclasses
import time
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from .._callbacks.history import Record

BEHIND = 8  # steps whose metrics are not read yet, so that the host need not wait

# What a record has next to the metrics of the steps and the scores.
RECORD_NAMES = (
    "epoch",
    "step",
    "test_loss",
    "test_accuracy",
    "seconds",
    "images_per_second",
    "interrupted",
    "under_way",
)

Metrics = dict[str, jax.Array]


@dataclasses.dataclass
class Epoch:
    """The steps of one epoch.

    Attributes:
        sums: of each metric. A step that left its update out counts under `skipped` only.
        counted: how many steps were read and counted.
        seconds: of training in earlier calls of `fit`.
        started: the time at which training went on, by `time.perf_counter`.
        paused: the time since which it does not, during an evaluation. None: it does.
        unread: the metrics of the other steps. With a range they are those of several steps along their first axis.
        num_unread: how many these steps are.
    """

    sums: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    counted: int = 0
    seconds: float = 0.0
    started: float = 0.0
    paused: float | None = None
    unread: collections.deque[tuple[Metrics, range | None]] = dataclasses.field(default_factory=collections.deque)
    num_unread: int = 0

    def start(self) -> None:
        """Start the clock."""
        self.started = time.perf_counter()

    def pause(self) -> None:
        """Stop the clock."""
        self.paused = time.perf_counter()

    def resume(self) -> None:
        """Start the clock again after `pause`."""
        if self.paused is not None:
            self.started += time.perf_counter() - self.paused
            self.paused = None

    def elapsed(self) -> float:
        """Seconds of training in this epoch."""
        return self.seconds + (time.perf_counter() if self.paused is None else self.paused) - self.started

    def add(self, metrics: Metrics, part: range | None = None) -> None:
        """Take the metrics of a step, or of a part of several steps. They may still be computed."""
        self.unread.append((metrics, part))
        self.num_unread += 1 if part is None else len(part)

    def read(self, behind: int = BEHIND) -> Iterator[list[dict[str, float]]]:
        """The metrics of all steps except the last few, program by program. Waits for these steps."""
        while self.num_unread > behind:
            rows = _rows(*self.unread.popleft())
            self.num_unread -= len(rows)
            yield rows

    def count(self, metrics: dict[str, float]) -> None:
        """Count one step."""
        self.sums.update(metrics)
        self.counted += 1

    def info(self) -> dict[str, Any]:
        """What a checkpoint keeps of an epoch under way, as JSON. `epoch_of` reads it."""
        return {"sums": dict(self.sums), "counted": self.counted, "seconds": self.elapsed()}

    def record(self, number: int, step: int, batch_size: int, skips: bool) -> Record:
        """The record of the epoch.

        Args:
            number: of the epoch, from 1.
            step: the number of its last step.
            skips: whether steps may leave their updates out. Then the record has their number, `skipped`.
        """
        sums, seconds = dict(self.sums), self.elapsed()
        skipped = int(sums.pop("skipped", 0)) if skips else 0
        updates = self.counted - skipped
        means = {name: value / updates for name, value in sums.items()} if updates else {"loss": float("nan")}
        return {
            **{"epoch": number, "step": step, "loss": None, "accuracy": None},
            **means,
            **({"skipped": skipped} if skips else {}),
            **{"test_loss": None, "test_accuracy": None},
            **{"seconds": seconds, "images_per_second": self.counted * batch_size / seconds},
        }


def epoch_of(info: dict[str, Any]) -> Epoch:
    """The epoch that a checkpoint's info tells of. A new one for an empty info."""
    return Epoch(collections.Counter(info.get("sums", {})), info.get("counted", 0), info.get("seconds", 0.0))


def _rows(metrics: Metrics, part: range | None) -> list[dict[str, float]]:
    """The metrics that are numbers, for each step. Waits for them. A warning names those that are not."""
    axes = 0 if part is None else 1
    others = {k: np.shape(v)[axes:] for k, v in metrics.items() if np.ndim(v) != axes}
    if others:
        words = ", ".join(f"{k!r} of shape {shape}" for k, shape in others.items())
        warnings.warn(
            f"fit: the history holds numbers, and aux of loss_fn has {words}; return a mean or another number",
            stacklevel=2,
        )
    if part is None:
        return [{k: float(v) for k, v in metrics.items() if k not in others}]
    columns = {k: np.asarray(v) for k, v in metrics.items() if k not in others}
    return [{k: float(v[i]) for k, v in columns.items()} for i in part]
