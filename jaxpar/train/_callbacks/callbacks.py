"""What `fit` calls after each step and each epoch: all of it is collected and called here."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Generator, Iterable
from typing import Any

import jax
import numpy as np

from ..._core import checks
from ..._core.arguments import check_takes
from ..._devices import processes
from .._step.state import TrainState
from .history import History, Record
from .metrics_files import JsonLines, to_jsonl

Callback = Callable[[TrainState, Record], Any]
OnStep = Callable[[int, dict[str, float]], Any]


@dataclasses.dataclass(frozen=True)
class Callbacks:
    """The callbacks of a run.

    Attributes:
        functions: called with the state and the record after each epoch, the metrics file first.
        on_step: called with the number and the metrics of each step.
    """

    functions: tuple[Callback, ...] = ()
    on_step: OnStep | None = None

    def start(self, history: History) -> None:
        """Begin the metrics file with the epochs before this call of `fit`."""
        with processes.raise_together():
            for function in self.functions:
                if isinstance(function, _MetricsFile):
                    function.sink.restart(history)

    def run(self, state: TrainState, record: Record) -> bool:
        """Call each function. Return whether one of them asked to stop by returning True, of Python, NumPy or JAX.

        With several processes, an error in one is raised in all, and one request to stop stops all.
        """
        with processes.raise_together():
            answers = [function(state, record) for function in self.functions]
        return not processes.all_true(not any(map(_is_true, answers)))

    @contextlib.contextmanager
    def end_after(self, history: History) -> Generator[None]:
        """A block after which each callback that has `on_end(history)` gets the call."""
        try:
            yield
        finally:
            for function in self.functions:
                on_end = getattr(function, "on_end", None)
                if on_end is not None:
                    on_end(history)


def collect_callbacks(metrics_file: str | os.PathLike[str] | None, callbacks: Any, on_step: Any) -> Callbacks:
    """All callbacks of a run.

    Raises:
        TypeError: a callback or `on_step` is no function.
    """
    given = [callbacks] if callable(callbacks) or not isinstance(callbacks, Iterable) else list(callbacks)
    for callback in given:
        _check_callback(callback)
    if on_step is not None and not callable(on_step):
        raise TypeError(f"fit: on_step must be a function of (step, metrics), got {checks.describe(on_step)}")
    files = [] if metrics_file is None else [_MetricsFile(to_jsonl(metrics_file))]
    return Callbacks((*files, *given), on_step)


def _check_callback(callback: Any) -> None:
    wanted = "fit: a callback must be a function of (state, record), or callbacks a sequence of them"
    if isinstance(callback, type):
        raise TypeError(f"{wanted}; got the class {callback.__name__}, so make one: {callback.__name__}(...)")
    if not callable(callback):
        raise TypeError(f"{wanted}; got {type(callback).__name__}")
    check_takes(callback, ("state", "record"), "fit: a callback")


@dataclasses.dataclass(frozen=True)
class _MetricsFile:
    """The file of `fit(metrics_file=)`: it holds the history of this run only."""

    sink: JsonLines

    def __call__(self, state: TrainState, record: Record) -> None:
        self.sink(state, record)


def _is_true(answer: Any) -> bool:
    return isinstance(answer, bool | np.bool_ | jax.Array) and np.shape(answer) == () and bool(answer)
