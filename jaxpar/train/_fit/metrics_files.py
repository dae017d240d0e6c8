"""Records of a run as lines in files."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
from collections.abc import Generator, Sequence
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


def to_jsonl(path: PathLike) -> JsonLines:
    """A sink that writes a line of JSON for each epoch.

    The lines are strict JSON, which has no NaN and no infinity: such a value is written as the string "NaN",
    "Infinity" or "-Infinity" (`float` reads them), and what was not measured as null.

    Args:
        path: a file; folders above it are made. Its lines of earlier steps stay, see the step of each.

    Raises:
        OSError: when it is called: the file cannot be written; the lines before are as they were.
        ValueError: when it is called: the file holds something else.

    Example:
        >>> import pathlib, tempfile, types
        >>> path = tempfile.mkdtemp() + "/metrics.jsonl"
        >>> to_jsonl(path)(types.SimpleNamespace(step=3), {"epoch": 1, "loss": float("nan"), "accuracy": None})
        >>> print(pathlib.Path(path).read_text(), end="")
        {"step": 3, "epoch": 1, "loss": "NaN", "accuracy": null}
    """
    return JsonLines(path)


def to_csv(path: PathLike) -> Csv:
    """A sink that writes a row for each epoch, under a row of names; what was not measured is an empty field.

    Args:
        path: as in `to_jsonl`. Where a record has a name that none had before, the file is written anew with it.

    Raises:
        OSError, ValueError: as in `to_jsonl`.

    Example:
        >>> import pathlib, tempfile, types
        >>> path = tempfile.mkdtemp() + "/metrics.csv"
        >>> to_csv(path)(types.SimpleNamespace(step=3), {"epoch": 1, "loss": 0.5, "accuracy": None})
        >>> print(pathlib.Path(path).read_text(), end="")
        step,epoch,loss,accuracy
        3,1,0.5,
    """
    return Csv(path)


class _File(Sink):
    """A sink of one text file, which it reads once, to see what is there."""

    def __init__(self, path: PathLike):
        self.path: Path = Path(path)
        self._begun = False

    def restart(self, history: Sequence[Record]) -> None:
        """The file with these records alone."""
        if jax.process_index() == 0:
            with named(self.path):
                self._replace(self._text(list(history)))
            self._begun = True

    def _write(self, record: Record) -> None:
        with named(self.path):
            if not self._begun:
                kept = [r for r in self._found() if int(r["step"]) < record["step"]]
                self._replace(self._text(kept))
                self._begun = True
            self._append(record)

    def _found(self) -> list[Record]:
        """The records in the file; the last one is left out where a crash cut it."""
        if not self.path.is_file():
            return []
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        try:
            records = self._records(whole)
            if all(int(r["step"]) >= 0 for r in records):
                return records
        except (ValueError, KeyError, TypeError):
            pass
        raise ValueError(f"{self.path} holds something else than records with a step; choose another file")

    def _append(self, record: Record) -> None:
        append(self.path, self._text([record]).encode())

    def _replace(self, text: str) -> None:
        """A new file in the place of the old one, whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and not self.path.is_file():  # /dev/stdout, a pipe
            return append(self.path, text.encode())
        target = self.path.resolve()
        new = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            new.write_bytes(text.encode())
            os.replace(new, target)
        finally:
            new.unlink(missing_ok=True)

    def _text(self, records: list[Record]) -> str:
        raise NotImplementedError

    def _records(self, text: str) -> list[Record]:
        raise NotImplementedError


class JsonLines(_File):
    """What `to_jsonl` returns."""

    def _text(self, records: list[Record]) -> str:
        return "".join(json.dumps(_strict(record), allow_nan=False) + "\n" for record in records)

    def _records(self, text: str) -> list[Record]:
        return [json.loads(line) for line in text.splitlines()]


class Csv(_File):
    """What `to_csv` returns."""

    def __init__(self, path: PathLike):
        super().__init__(path)
        self._names: list[str] = []

    def _append(self, record: Record) -> None:
        if set(record) <= set(self._names):
            append(self.path, self._rows([record]).encode())
        else:
            self._replace(self._text([*self._found(), record]))

    def _text(self, records: list[Record]) -> str:
        self._names = list(dict.fromkeys(name for record in records for name in record))
        return self._rows([dict(zip(self._names, self._names, strict=True)), *records]) if records else ""

    def _rows(self, records: list[Record]) -> str:
        out = io.StringIO()
        csv.DictWriter(out, self._names, restval="", lineterminator="\n").writerows(records)
        return out.getvalue()

    def _records(self, text: str) -> list[Record]:
        return list(csv.DictReader(io.StringIO(text)))


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _strict(v) for k, v in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
