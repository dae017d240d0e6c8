"""What one epoch adds up, and the record that `fit` makes of it."""

from __future__ import annotations

import collections
import dataclasses
import time
from typing import Any

from .._callbacks.history import Record

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


@dataclasses.dataclass
class Epoch:
    """Sums over the steps of one epoch.

    Attributes:
        sums: of each metric. A step that left its update out counts under `skipped` only.
        counted: how many steps were read.
        seconds: of training in earlier calls of `fit`.
        started: the time at which training went on, by `time.perf_counter`.
        paused: the time since which it does not, during an evaluation. None: it does.
    """

    sums: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    counted: int = 0
    seconds: float = 0.0
    started: float = 0.0
    paused: float | None = None

    def start(self) -> None:
        """Start the clock."""
        self.started = time.perf_counter()

    def pause(self) -> None:
        """Stop the clock."""
        self.paused = time.perf_counter()

    def go_on(self) -> None:
        """Start the clock again after `pause`."""
        if self.paused is not None:
            self.started += time.perf_counter() - self.paused
            self.paused = None

    def add(self, metrics: dict[str, float]) -> None:
        """Count one step."""
        self.sums.update(metrics)
        self.counted += 1

    def elapsed(self) -> float:
        """Seconds of training in this epoch."""
        return self.seconds + (time.perf_counter() if self.paused is None else self.paused) - self.started

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
