"""The callbacks that a user gave, checked."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..._core import checks
from ..._core.arguments import check_takes
from .._step.state import TrainState
from .callbacks import Callbacks, has_memory, name_of
from .history import History, Record
from .live_plot import LivePlot
from .loggers import JsonLines, to_jsonl


def collect_callbacks(metrics_file: str | os.PathLike[str] | None, callbacks: Any, on_step: Any) -> Callbacks:
    """All callbacks of a run.

    Raises:
        TypeError: a callback is neither a function nor an object with a memory, or `on_step` is no function.
    """
    given = [callbacks] if _is_one(callbacks) else list(callbacks)
    for callback in given:
        _check_callback(callback)
    if on_step is not None and not callable(on_step):
        raise TypeError(f"fit: on_step must be a function of (step, metrics), got {checks.describe(on_step)}")
    owner = getattr(on_step, "__self__", None)
    if has_memory(owner):
        raise TypeError(
            f"fit: {name_of(owner)}.on_step takes a memory, so fit calls it itself; give the object in callbacks= only"
        )
    if isinstance(owner, LivePlot) and owner in given:
        on_step = None  # it gets the steps by itself
    files = [] if metrics_file is None else [_MetricsFile(to_jsonl(metrics_file))]
    return Callbacks((*files, *given), on_step)


def check_files(callbacks: Callbacks, certificate: Path | None) -> None:
    """`ValueError` if two of a run would write one file."""
    sinks = [callback.sink if isinstance(callback, _MetricsFile) else callback for callback in callbacks.each]
    paths = [sink.path for sink in sinks if isinstance(sink, JsonLines)]
    seen = set() if certificate is None else {certificate.absolute()}
    for path in paths:
        if path.absolute() in seen:
            raise ValueError(
                f"fit: {path} is given twice; metrics_file=, certificate= and each to_jsonl callback write a file of "
                "their own"
            )
        seen.add(path.absolute())


def _is_one(callbacks: Any) -> bool:
    return callable(callbacks) or has_memory(callbacks) or not isinstance(callbacks, Iterable)


def _check_callback(callback: Any) -> None:
    parts = [name for name in ("init", "on_epoch") if callable(getattr(callback, name, None))]
    if isinstance(callback, type):
        raise TypeError(f"fit: a callback must be an object, not a class; write {callback.__name__}(...)")
    if len(parts) == 1 and not callable(callback):
        raise TypeError(
            f"fit: {name_of(callback)} has {parts[0]} only; a callback with a memory has init(state) and "
            "on_epoch(memory, state, record) -> (memory, stop)"
        )
    if not callable(callback) and not parts:
        raise TypeError(
            "fit: a callback must be a function of (state, record), an object with init and on_epoch, or callbacks a "
            f"sequence of them; got {type(callback).__name__}"
        )
    if not has_memory(callback):
        return check_takes(callback, ("state", "record"), "fit: a callback")
    on_step = getattr(callback, "on_step", None)
    if on_step is not None:
        try:
            inspect.signature(on_step).bind(None, 1, {})
        except TypeError:
            raise TypeError(
                f"fit: {name_of(callback)} has a memory, so its on_step must be on_step(memory, step, metrics)"
            ) from None


@dataclasses.dataclass(frozen=True)
class _MetricsFile:
    """The file of `fit(metrics_file=)`: it holds the history of this run only."""

    sink: JsonLines

    def __call__(self, state: TrainState, record: Record) -> None:
        self.sink(state, record)

    def on_start(self, history: History) -> None:
        self.sink.restart(history)
