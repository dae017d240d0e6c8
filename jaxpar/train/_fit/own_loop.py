"""The parts of `fit` for a loop of one's own: progress, and interrupts."""

from __future__ import annotations

from typing import Any

import jax

from ..._core import checks
from ..._core.calls import answers
from . import interrupt
from .epoch import Epoch
from .progress import Bar, compiling
from .readings import BEHIND, Readings, Steps


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
        self._bar: Bar | None = None
        self._shows = show and jax.process_index() == 0
        self._readings, self._sums = Readings(), Epoch()
        self.made: int = done
        self._first = done

    def __enter__(self) -> StepProgress:
        if self._shows:
            self._bar = Bar(*self._about)
            self._bar.say(compiling())
        self._sums.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def step(self, metrics: dict[str, Any]) -> None:
        """Count a step. Metrics of an earlier one are read and shown."""
        if self.made == self._first and self._bar is not None:
            self._bar.say("")
        self.made += 1
        self._readings.add(Steps(metrics))
        self._read(BEHIND)

    def means(self) -> dict[str, float]:
        """The mean of each metric over the steps so far. Waits for them."""
        self._read(0)
        return {name: total / self._sums.counted for name, total in self._sums.sums.items()}

    def _read(self, behind: int) -> None:
        for rows in self._readings.read(behind):
            for row in rows:
                self._sums.add(row)
                if self._bar is not None:
                    self._bar.step(row)


@answers("train.interruptible")
def interruptible(on_interrupt: str = "auto") -> Interruptible:
    """A block that Ctrl-C, a notebook's interrupt and SIGTERM do not cut short, for a loop of one's own.

    They are recorded, and `should_stop` says so after a step. At the end of the block, when what is needed was saved,
    the interrupt takes effect as in `fit`. A second signal acts at once.

    Args:
        on_interrupt: as in `fit`. "raise": a KeyboardInterrupt at the end of the block. "return": none, and `asked` is
            True. "auto": return in a notebook or at a prompt, raise in a script. SIGTERM is SystemExit(143) with each.

    Returns:
        A context manager with `should_stop(state)`.

    Raises:
        ValueError: an unknown `on_interrupt`.

    Example:
        >>> from jaxpar import train
        >>> made = 0
        >>> with train.interruptible() as interrupt:
        ...     for batch in range(3):
        ...         made += 1
        ...         if interrupt.should_stop(made):
        ...             break
        ...     # save the state here
        >>> made, interrupt.asked
        (3, False)
    """
    checks.choice(on_interrupt, "train.interruptible", "on_interrupt", ("auto", "return", "raise"))
    return Interruptible(on_interrupt)


class Interruptible:
    """What `interruptible` returns."""

    def __init__(self, on_interrupt: str):
        self._on_interrupt, self._steps, self._state = on_interrupt, 0, None
        self._signals = interrupt.Signals(jax.process_count() > 1)

    @property
    def asked(self) -> bool:
        """Whether a signal came and `should_stop` has said so."""
        return self._signals.asked is not None

    def should_stop(self, state: Any) -> bool:
        """Whether to stop. Call it after each step, with the new state, in every process.

        Several processes exchange their signals every sixteen calls, and all stop after the same step.
        """
        self._steps, self._state = self._steps + 1, state
        return self._signals.should_stop(state, self._steps, False)

    def __enter__(self) -> Interruptible:
        self._signals.__enter__()
        return self

    def __exit__(self, kind: Any, *error: object) -> None:
        self._signals.__exit__(kind, *error)
        if kind is None and self._signals.asked is not None:
            step = getattr(self._state, "step", self._steps)
            where = f"after step {int(step)}"
            interrupt.finish_interrupted(self._signals.asked, self._state, None, where, self._on_interrupt, "train")
