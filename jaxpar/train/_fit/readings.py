"""Metrics of steps, read on the host several steps late, so that nothing waits."""

from __future__ import annotations

import collections
import dataclasses
import warnings
from collections.abc import Iterator

import jax
import numpy as np

BEHIND = 8  # steps whose metrics are not read yet, so that the host need not wait


@dataclasses.dataclass(frozen=True)
class Steps:
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


class Readings:
    """The metrics that were not read yet, in the order of their steps."""

    def __init__(self):
        self._unread: collections.deque[Steps] = collections.deque()

    def add(self, made: Steps) -> None:
        """Take metrics, which may be under way."""
        self._unread.append(made)

    @property
    def number(self) -> int:
        """Of how many steps there are metrics."""
        return sum(made.number for made in self._unread)

    def read(self, behind: int = BEHIND) -> Iterator[list[dict[str, float]]]:
        """The metrics of all steps except the last few, program by program. Waits for these steps."""
        while self.number > behind:
            yield self._unread.popleft().rows()

    def clear(self) -> None:
        """Forget the metrics."""
        self._unread.clear()
