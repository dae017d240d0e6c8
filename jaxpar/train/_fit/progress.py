"""What a running loop shows: a bar in a terminal or a notebook, and lines. `progress` is the bar for your own loop."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import jax

from ..._core import checks
from ..._core.calls import answers
from ..._core.text import is_interactive
from .._callbacks.history import number_text
from .epoch import BEHIND, Epoch


class Progress:
    """Bars that count steps, in a terminal or a notebook, and lines above them. Elsewhere there are lines only.

    Args:
        show: whether to show anything. Of several processes only the first does.
        unit: what the data consists of, "images" or "examples".

    Attributes:
        is_shown: whether there is anything to see.
    """

    def __init__(self, show: bool, unit: str = "examples"):
        self.is_shown: bool = bool(show) and jax.process_index() == 0
        self._unit = unit
        self._bar: Any = None

    @property
    def has_bar(self) -> bool:
        return self._bar is not None

    def start(self, total: int | None, title: str, done: int) -> None:
        """Begin a bar of which `done` steps were made before. None: it is not known how many there are."""
        if self.is_shown and is_interactive():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # tqdm warns if ipywidgets is missing, and shows its plain bar
                from tqdm.auto import tqdm
            self._bar = tqdm(total=total, initial=done, desc=title, unit="step", file=sys.stdout)

    def say(self, words: str) -> None:
        """Show words in place of the metrics, at once."""
        if self._bar is not None:
            self._bar.set_postfix_str(words, refresh=True)

    def say_compiling(self) -> None:
        """Say that XLA compiles, in letters that standard output has."""
        try:
            "…".encode(getattr(sys.stdout, "encoding", None) or "ascii")
        except (UnicodeError, LookupError):
            return self.say("compiling...")
        self.say("compiling…")

    def step(self, metrics: dict[str, float], per_second: float = 0.0) -> None:
        """Count a step. The metrics may be of an earlier one."""
        if self._bar is not None:
            words = {k: number_text(v) for k, v in metrics.items()}
            if per_second:
                words[f"{self._unit}/s"] = f"{per_second:,.0f}"
            self._bar.set_postfix(words, refresh=False)
            self._bar.update()

    def print(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        elif self.is_shown:
            print(text, flush=True)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.leave = False
            self._bar.total = self._bar.n  # a notebook keeps a bar that is not full, in red
            self._bar.close()
            self._bar = None


@answers("train.progress")
def progress(total: int | None = None, *, title: str = "", done: int = 0, show: bool = True) -> StepProgress:
    """A bar with the metrics of the steps, as that of `fit`, for a loop of one's own.

    The metrics are read eight steps late, so the host can start steps ahead of the devices.

    Args:
        total: how many steps there will be. None: it is not known.
        title: what the bar is called.
        done: how many of them were made before, in a run that was resumed.
        show: whether to show it. Outside a terminal and a notebook, and in all processes except the first, nothing is
            shown.

    Returns:
        A context manager. Call its `step(metrics)` after each step. `means()` gives the means of the metrics.

    Raises:
        TypeError, ValueError: a number that is none, or is too small.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import train
        >>> with train.progress(3, title="epoch 1") as bar:
        ...     for loss in jnp.arange(3.0):
        ...         bar.step({"loss": loss})
        >>> bar.means()
        {'loss': 1.0}
    """
    where = "train.progress"
    total = None if total is None else checks.whole_number(total, where, "total", least=0)
    return StepProgress(total, title, checks.whole_number(done, where, "done", least=0), show)


class StepProgress:
    """What `progress` returns.

    Attributes:
        made: the number of steps, those before it included.
    """

    def __init__(self, total: int | None, title: str, done: int, show: bool):
        self._about = total, title, done
        self._progress, self._epoch = Progress(show), Epoch()
        self._is_compiling = True
        self.made: int = done

    def __enter__(self) -> StepProgress:
        self._progress.start(*self._about)
        self._progress.say_compiling()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.close()

    def step(self, metrics: dict[str, Any]) -> None:
        """Count a step. Metrics of an earlier one are read and shown."""
        if self._is_compiling:
            self._is_compiling = False
            self._progress.say("")
        self.made += 1
        self._epoch.add(metrics)
        self._read(BEHIND)

    def means(self) -> dict[str, float]:
        """The mean of each metric over the steps so far. Waits for them."""
        self._read(0)
        return {name: total / self._epoch.counted for name, total in self._epoch.sums.items()}

    def _read(self, behind: int) -> None:
        for rows in self._epoch.read(behind):
            for row in rows:
                self._epoch.count(row)
                self._progress.step(row)
