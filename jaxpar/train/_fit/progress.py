"""What a running loop shows: a bar in a terminal or a notebook, and a line per epoch."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import jax

from ..._core.text import is_interactive
from .._callbacks.history import Record, number_text
from .._callbacks.line import line


class Progress:
    """A bar for each epoch, and a line after it.

    Args:
        show: whether to show anything. Of several processes only the first does.
        epochs: how many the run has.
        steps: of an epoch.
        unit: what the data consists of, "images" or "examples".
    """

    def __init__(self, show: bool, epochs: int, steps: int, unit: str = "images"):
        self._show = bool(show) and jax.process_index() == 0
        self._epochs, self._steps, self._unit = epochs, steps, unit
        self._bars = self._show and is_interactive()
        self._bar: Any = None

    def start(self, epoch: int, done: int) -> None:
        """Begin an epoch, of which `done` steps were made before."""
        if self._bars:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # tqdm warns if ipywidgets is missing, and shows its plain bar
                from tqdm.auto import tqdm
            self._bar = tqdm(
                total=self._steps,
                initial=done,
                desc=f"epoch {epoch}/{self._epochs}",
                unit="step",
                file=sys.stdout,
            )

    def step(self, metrics: dict[str, float], per_second: float) -> None:
        """Count a step. The metrics may be of an earlier one."""
        if self._bar is not None:
            words = {k: number_text(v) for k, v in metrics.items()}
            if per_second:
                words[f"{self._unit}/s"] = f"{per_second:,.0f}"
            self._bar.set_postfix(words, refresh=False)
            self._bar.update()

    def end(self, record: Record) -> None:
        """End an epoch: close its bar, print its line."""
        self.close()
        if self._show:
            print(line(record, self._epochs, self._unit), flush=True)

    def close(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.leave = False
            self._bar.total = self._bar.n  # a notebook keeps a bar that is not full, in red
            self._bar.close()
            self._bar = None
