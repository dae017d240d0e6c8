"""What sinks of records share: each is a callback of `fit`, and what it adds to a file is there whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax

Record = dict[str, Any]
PathLike = str | os.PathLike[str]


class Sink:
    """A callback of `fit` that writes each record somewhere; its `on_step` writes those of steps instead."""

    def __call__(self, state: Any, record: Record) -> None:
        """Writes the record of an epoch; `callback(state, record)`."""
        if jax.process_index() == 0:
            self._write(record if "step" in record else {"step": int(state.step), **record})

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        """Writes the metrics of a step: `fit(..., on_step=sink.on_step)`; a file of its own, please."""
        if jax.process_index() == 0:
            self._write({"step": step, **metrics})

    def _write(self, record: Record) -> None:
        raise NotImplementedError


def append(path: Path, content: bytes) -> None:
    """Adds to a file, all or nothing."""
    with open(path, "ab", buffering=0) as file:
        size, rest = file.tell(), memoryview(content)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(size)
            raise


@contextlib.contextmanager
def named(path: Path) -> Generator[None]:
    """An OSError in this block says what could not be written, and where."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(
            f"metrics cannot be written to {path} ({reason}); choose another place, or make room there"
        ) from error
