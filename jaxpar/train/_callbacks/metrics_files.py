"""The records of a run in files: JSON lines, and what all such callbacks share."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import jax

from ..._core import files
from ..._core.calls import answers
from ..._core.files import as_path
from .history import Record

PathLike = str | os.PathLike[str]


class Sink:
    """A callback of `fit` that writes each record. Its `on_step` writes the metrics of steps."""

    def __call__(self, state: Any, record: Record) -> None:
        """Write the record of an epoch: `callback(state, record)`."""
        if jax.process_index() == 0:
            self._write(record if "step" in record else {"step": int(state.step), **record})

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of a step: `fit(..., on_step=sink.on_step)`. Use another file than for epochs."""
        if jax.process_index() == 0:
            self._write({"step": step, **metrics})

    def _write(self, record: Record) -> None:
        raise NotImplementedError


@contextlib.contextmanager
def explain_errors(path: Path, what: str = "metrics") -> Generator[None]:
    """A block whose `OSError` says what cannot be written, where, and what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(
            f"{what} cannot be written to {path} ({reason}); choose another place, or make room there"
        ) from error


@answers("to_jsonl")
def to_jsonl(path: PathLike) -> JsonLines:
    """A callback of `fit` that writes a line of JSON for each epoch.

    The lines are strict JSON, which has no NaN and no infinity. Such a value is the string "NaN", "Infinity" or
    "-Infinity", which `float` reads. What was not measured is null.

    Args:
        path: a file. Folders above it are made. Lines of earlier steps stay, as the step of each says. Lines of later
            steps go, so a resumed run has each epoch once.

    Raises:
        OSError: when it is called: the file cannot be written. The earlier lines are as before.
        ValueError: a path that ends as a table does, .csv. When it is called: the file holds something else.

    Example:
        >>> import pathlib, tempfile, types
        >>> path = tempfile.mkdtemp() + "/metrics.jsonl"
        >>> to_jsonl(path)(types.SimpleNamespace(step=3), {"epoch": 1, "loss": float("nan"), "accuracy": None})
        >>> print(pathlib.Path(path).read_text(), end="")
        {"step": 3, "epoch": 1, "loss": "NaN", "accuracy": null}
    """
    if as_path(path, "to_jsonl: path").suffix.lower() in (".csv", ".tsv"):
        raise ValueError(
            f"to_jsonl: {path} gets JSON lines, so name it .jsonl; train.to_pandas(history).to_csv(path) writes a table"
        )
    return JsonLines(path)


class JsonLines(Sink):
    """What `to_jsonl` returns. It reads the file once, before it first writes."""

    def __init__(self, path: PathLike):
        self.path: Path = Path(path)
        self._is_read = False

    def restart(self, history: Sequence[Record]) -> None:
        """Replace the file by these records."""
        if jax.process_index() == 0:
            with explain_errors(self.path):
                self._replace(history)

    def _write(self, record: Record) -> None:
        with explain_errors(self.path):
            if not self._is_read:
                self._replace([r for r in self._read() if int(r["step"]) < record["step"]])
            files.append(self.path, _lines([record]))

    def _read(self) -> list[Record]:
        """The records in the file, except a last one that a crash cut short."""
        if not self.path.is_file():
            return []
        text = self.path.read_text(encoding="utf-8")
        try:
            records = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
            if all(int(r["step"]) >= 0 for r in records):
                return records
        except (ValueError, KeyError, TypeError):
            pass
        raise ValueError(
            f"{self.path} holds something else than JSON lines of records with a step; choose another file, such as "
            "metrics.jsonl"
        )

    def _replace(self, records: Sequence[Record]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and not self.path.is_file() and not self.path.is_dir():  # /dev/stdout, a pipe
            files.append(self.path, _lines(records))
        else:
            files.replace(self.path, _lines(records))
        self._is_read = True


def _lines(records: Sequence[Record]) -> bytes:
    return "".join(json.dumps(_strict(record), allow_nan=False) + "\n" for record in records).encode()


def _strict(value: Any) -> Any:
    """The value with words for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {k: _strict(v) for k, v in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
