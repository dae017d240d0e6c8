"""What a running loop shows: a bar in a terminal or a notebook, and a line per epoch."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import jax

from ..._core.text import is_interactive
from .._callbacks.history import Record, number_text
from .._callbacks.line import line


class Bar:
    """A bar that counts steps, in a terminal or a notebook. Elsewhere nothing is shown.

    Args:
        total: how many steps there are.
        done: how many of them were made before.
        unit: what the data consists of, "images" or "examples".
    """

    def __init__(self, total: int | None, title: str, done: int = 0, unit: str = "examples"):
        self._unit = unit
        self._bar: Any = None
        if is_interactive():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # tqdm warns if ipywidgets is missing, and shows its plain bar
                from tqdm.auto import tqdm
            self._bar = tqdm(total=total, initial=done, desc=title, unit="step", file=sys.stdout)

    def say(self, words: str) -> None:
        """Show words in place of the metrics, at once."""
        if self._bar is not None:
            self._bar.set_postfix_str(words, refresh=True)

    def step(self, metrics: dict[str, float], per_second: float = 0.0) -> None:
        """Count a step. The metrics may be of an earlier one."""
        if self._bar is not None:
            words = {k: number_text(v) for k, v in metrics.items()}
            if per_second:
                words[f"{self._unit}/s"] = f"{per_second:,.0f}"
            self._bar.set_postfix(words, refresh=False)
            self._bar.update()

    def print(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.write(text, file=sys.stdout)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.leave = False
            self._bar.total = self._bar.n  # a notebook keeps a bar that is not full, in red
            self._bar.close()
            self._bar = None


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
        self._bar: Bar | None = None

    @property
    def has_bar(self) -> bool:
        return self._bar is not None

    def start(self, epoch: int, done: int) -> None:
        """Begin an epoch, of which `done` steps were made before."""
        if self._show:
            self._bar = Bar(self._steps, f"epoch {epoch}/{self._epochs}", done, self._unit)

    def say(self, words: str) -> None:
        """Show words in place of the metrics, at once."""
        if self._bar is not None:
            self._bar.say(words)

    def step(self, metrics: dict[str, float], per_second: float) -> None:
        """Count a step. The metrics may be of an earlier one."""
        if self._bar is not None:
            self._bar.step(metrics, per_second)

    def end(self, record: Record) -> None:
        """Show the record of an epoch: close its bar, print its line."""
        self.close()
        if self._show:
            print(line(record, self._epochs, self._unit), flush=True)

    def show(self, record: Record) -> None:
        """Show the record of an evaluation within an epoch."""
        if self._bar is not None:
            self._bar.print(f"step {record['step']}  {line(record, self._epochs, self._unit)}")

    def close(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def compiling() -> str:
    """What is shown while XLA compiles, in letters that standard output has."""
    try:
        "…".encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeError, LookupError):
        return "compiling..."
    return "compiling…"
