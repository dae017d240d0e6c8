"""What the steps of a loop report: read late, added up, shown, and traced by jax's profiler.

`progress` shows it for your own loop.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any, Literal

import jax
import numpy as np

from ..._core import checks, files, process
from ..._core.text import in_notebook, warn
from ..._devices.mesh import is_donated
from .._callbacks.history import number_text
from .._step.loss import by_name
from .._step.state import TrainState

BEHIND = 8  # steps whose metrics are not read yet, so that the host need not wait
_TICK = 0.5  # seconds between two pictures of a bar while XLA compiles
_MEASURE_EVERY = 1.0  # seconds after which the bar shows another learning rate

Metrics = dict[str, jax.Array]
Show = bool | int | Literal["bar"]
Profile = str | os.PathLike[str] | tuple[str | os.PathLike[str], int, int]

_FIRST_TRACED, _NUM_TRACED = 10, 5  # the first ones compile, and fill the queue of the devices


@dataclasses.dataclass
class Epoch:
    """What the steps of one epoch add up to. Their metrics are read several steps late."""

    # Of each metric. A step that left its update out counts under `skipped` only.
    sums: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    counted: int = 0  # how many steps were read and counted
    seconds: float = 0.0  # of training, before `since`
    # The time at which training went on, by `time.perf_counter`. None: it pauses, as during an evaluation.
    since: float | None = None
    # The metrics of the other steps, perhaps still computed. With a range they are those of several steps along their
    # first axis.
    unread: collections.deque[tuple[Metrics, range | None]] = dataclasses.field(default_factory=collections.deque)

    def elapsed(self) -> float:
        return self.seconds + (0.0 if self.since is None else time.perf_counter() - self.since)

    def pause(self) -> None:
        """Count no time until `since` is set again."""
        self.seconds, self.since = self.elapsed(), None

    @property
    def num_unread(self) -> int:
        """The number of these other steps."""
        return sum([1 if rows is None else len(rows) for _, rows in self.unread])

    def read(self, behind: int = BEHIND) -> Iterator[list[dict[str, float]]]:
        """The metrics of all steps except the last few, program by program. Waits for these steps."""
        while self.num_unread > behind:
            metrics, rows = self.unread.popleft()
            metrics = by_name(metrics)
            ndim = 0 if rows is None else 1  # of a metric that is a number in each step
            arrays = {k: np.shape(v)[ndim:] for k, v in metrics.items() if np.ndim(v) != ndim}
            if arrays:
                shapes = ", ".join(f"{k!r} of shape {shape}" for k, shape in arrays.items())
                warn(
                    f"fit: the history keeps only numbers, but aux of loss_fn has {shapes}; return a mean or another "
                    "number"
                )
            # All of them are copied at once: on a GPU each copy is waited for.
            numbers = jax.device_get({k: v for k, v in metrics.items() if k not in arrays})
            yield [{k: float(v if rows is None else v[i]) for k, v in numbers.items()} for i in rows or (0,)]


class Progress:
    """Bars that count steps, in a terminal or a notebook, and lines above them. Elsewhere there are lines only.

    Of several processes only the first shows something. `show` and `unit` are `progress` of `fit` and what the data
    consists of: "images" or "examples".
    """

    def __init__(self, show: Show, unit: str = "examples"):
        self.is_shown: bool = bool(show) and jax.process_index() == 0
        self.is_of_run: bool = show == "bar"  # one bar for all epochs, without a line for each
        self._every = 1 if isinstance(show, str) else int(show)  # epochs of which there is one line
        self._unit = unit
        self.bar: Any = None  # of tqdm
        self._compiled = threading.Event()  # the first step, or the bar is closed
        self._first_read: tuple[float, int] | None = None  # when the first step was read, and how many were to come
        self.measured: dict[str, float] = {}  # what is shown beside the metrics of a step, such as the learning rate
        self._measured_at = 0.0

    @property
    def is_measure_due(self) -> bool:
        """Whether what was measured is shown, and is of more than a second ago."""
        if not self.measured or self.bar is None:
            return False
        return time.perf_counter() - self._measured_at > _MEASURE_EVERY

    def show_measured(self, measured: dict[str, float]) -> None:
        """Show this from the next step on."""
        self.measured, self._measured_at = measured, time.perf_counter()

    def start(self, total: int | None, title: str, done: int, compiles: bool = False) -> None:
        """Begin a bar of which `done` steps were made before. `compiles`: it says that XLA compiles the first step."""
        if self.bar is not None:  # that of the run
            self.bar.set_description(title, refresh=False)
        elif self.is_shown and (sys.stdout.isatty() or in_notebook()):
            with warnings.catch_warnings(action="ignore"):  # without ipywidgets tqdm shows its plain bar
                from tqdm.auto import tqdm
            self.bar = tqdm(total=total, initial=done, desc=title, unit="step", file=sys.stdout, leave=False)
            if compiles:
                has_dots = "utf" in (getattr(sys.stdout, "encoding", None) or "").lower()
                self.bar.set_postfix_str("compiling…" if has_dots else "compiling...")
                # XLA compiles in one call, and a bar shows the time when it is drawn. So a thread draws it.
                self._compiled.clear()
                process.daemon("jaxpar-clock", self._run_clock, "the bar shows no time until the first step").start()

    def _run_clock(self) -> None:
        while not self._compiled.wait(_TICK):
            if (bar := self.bar) is not None:
                bar.refresh()

    def say_compiled(self) -> None:
        """The first step was started, and its metrics are not read yet."""
        self._compiled.set()
        if self.bar is not None:
            self.bar.set_postfix_str("")

    def step(self, metrics: dict[str, float], per_second: float = 0.0, to_come: int | None = None) -> None:
        """Count a step. The metrics may be of an earlier one. `to_come` is the number of later steps of the run."""
        if self.bar is not None:
            texts = {k: number_text(v) for k, v in {**metrics, **self.measured}.items()}
            if per_second:
                texts[f"{self._unit}/s"] = f"{per_second:,.0f}"
            # The time left of the run, evaluations included, by the steps since the first one, which was compiled. That
            # of the bar itself is beside it.
            now = time.perf_counter()
            if to_come is not None and self._first_read is None:
                self._first_read = now, to_come
            elif to_come is not None and self._first_read is not None and not self.is_of_run:
                began, at_first = self._first_read
                seconds = (now - began) / max(1, at_first - to_come) * to_come
                texts["run left"] = self.bar.format_interval(seconds)
            self.bar.set_postfix(texts, refresh=False)
            self.bar.update()

    def is_line_due(self, epoch: int | None, epochs: int | None) -> bool:
        """Whether there is a line for the record of an epoch, which is the last of so many, or within one: None."""
        return self.is_shown and not self.is_of_run and (epoch in (None, epochs) or epoch % self._every == 0)

    def print(self, text: str) -> None:
        """Print a line, above the bar where there is one. Call it if `is_shown`."""
        if self.bar is not None:
            self.bar.write(text, file=sys.stdout)
        else:
            print(text, flush=True)

    def close(self) -> None:
        self._compiled.set()  # ends the thread of the clock, where no step was made
        if self.bar is not None:
            self.bar.total = self.bar.n  # a notebook keeps a bar that is not full, in red
            self.bar.close()
            self.bar = None


def as_profile(profile: Profile | None) -> Profile | None:
    """`profile` of `fit` with an absolute path: a callback may change the working directory before the trace begins."""
    if isinstance(profile, tuple):
        directory, first, number = profile
        return files.as_path(directory, "fit: profile"), first, number
    return None if profile is None else files.as_path(profile, "fit: profile")


class Trace:
    """Traces some of the steps of a run by jax's profiler. `ValueError` if the run does not have them.

    `profile` is a directory, or (directory, first step, number of steps) with steps counted from 0 at the start of this
    call of `fit`. `began` steps were made there, and `last` will be at the end. None: nothing is traced.
    """

    def __init__(self, profile: Profile | None, began: int, last: int):
        self._is_tracing = False
        self._traced: range | None = None
        if profile is None:
            return
        # Found out at the start: a run that is over without a trace would have to be made again.
        steps = last - began
        if isinstance(profile, tuple):
            directory, first, num = profile
            if first < 0 or num < 1 or first + num > steps:
                raise ValueError(
                    f"fit: profile asks for {num} steps from step {first} on, but this call has {steps} steps, counted "
                    "from 0"
                )
        else:  # in the steady state: compiled, and the device is fed ahead
            directory, first, num = profile, min(_FIRST_TRACED, max(0, steps - _NUM_TRACED)), _NUM_TRACED
        self._directory = os.fspath(directory)
        self._traced = range(began + first, began + first + num)

    def step(self, at: int, state: TrainState) -> contextlib.AbstractContextManager[object]:
        """A block for the step after `at` others. `state` is the one before it."""
        if self._traced is None:
            return contextlib.nullcontext()
        if at == self._traced.start:
            jax.block_until_ready(state)  # the devices may be steps behind, and those would be in the trace
            jax.profiler.start_trace(self._directory)
            self._is_tracing = True
        if at == self._traced.stop:
            self.close(state)
        return jax.profiler.StepTraceAnnotation("train", step_num=at) if self._is_tracing else contextlib.nullcontext()

    def close(self, state: TrainState) -> None:
        """End a trace under way, when the state is computed."""
        if self._is_tracing:
            self._is_tracing = False
            try:
                if not is_donated(state):  # a step that failed may have taken its memory
                    jax.block_until_ready(state)
            finally:
                jax.profiler.stop_trace()


def progress(total: int | None = None, *, title: str = "", done: int = 0, show: bool = True) -> StepProgress:
    """A progress bar with metrics, as in `fit`, for your own loop.

    Metrics are read eight steps late, so that the host can start steps ahead of the devices.

    Args:
        total: the number of steps. None if unknown.
        title: the title of the bar.
        done: the number of steps before a resumed run.
        show: whether to show the bar. It is shown only in a terminal or notebook, and only by the first process.

    Returns:
        A context manager. Call its `step(metrics)` after each step. `means()` returns the means of the metrics.

    Raises:
        ValueError: `total` or `done` is too small.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import train
        >>> with train.progress(3, title="epoch 1") as bar:
        ...     for loss in jnp.arange(3.0):
        ...         bar.step({"loss": loss})
        >>> bar.means()
        {'loss': 1.0}
    """
    caller = "train.progress"
    total = None if total is None else checks.whole_number(total, caller, "total", least=0)
    return StepProgress(total, title, checks.whole_number(done, caller, "done", least=0), show)


class StepProgress:
    """The context manager of `progress`."""

    def __init__(self, total: int | None, title: str, done: int, show: bool):
        self._total, self._title, self._done = total, title, done
        self._progress, self._epoch = Progress(show), Epoch()

    @property
    def made(self) -> int:
        """The number of steps so far, including `done`."""
        return self._done + self._epoch.counted + self._epoch.num_unread

    def __enter__(self) -> StepProgress:
        self._progress.start(self._total, self._title, self._done, compiles=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.close()

    def step(self, metrics: dict[str, Any]) -> None:
        """Count a step, and show the metrics of an earlier step."""
        if self.made == self._done:
            self._progress.say_compiled()
        self._epoch.unread.append((metrics, None))
        self._read(BEHIND)

    def means(self) -> dict[str, float]:
        """The mean of each metric over all steps so far. Waits for them."""
        self._read(0)
        return {name: total / self._epoch.counted for name, total in self._epoch.sums.items()}

    def _read(self, behind: int) -> None:
        for rows in self._epoch.read(behind):
            for row in rows:
                self._epoch.sums.update(row)
                self._epoch.counted += 1
                self._progress.step(row)
