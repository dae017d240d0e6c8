"""The records of a run, in a file beside its checkpoints to which lines are appended.

    records.jsonl     a line for each record: {"record": {...}, "before": {"at": ..., "sha256": ...}}

A checkpoint knows its last record by the place and the SHA-256 of the line, and each line knows the one before it. So a
save writes what is new only. A run that goes on from an older checkpoint appends lines too: the line after it has two
followers then, and no checkpoint loses its records.

A checkpoint holds its last records itself, for one that is moved elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._core import files
from .._core.files import append, flush_to_disk
from . import _manifest
from ._manifest import CheckpointError

Place = dict[str, Any]  # {"number": of records, "at": byte at which the last one begins, "sha256": of its line}

INSIDE = 64  # of the last records, which a checkpoint holds itself
NAME = "records.jsonl"
_LONGEST = 16 << 20  # bytes of a line


class RecordWriter:
    """Appends the new records of a run to the file of a directory."""

    def __init__(self, directory: Path):
        self._path = directory / NAME
        self.place: Place | None = None  # of the last record
        self._last = ""  # the record there, as JSON

    def resume(self, place: Place, records: Sequence[dict[str, Any]]) -> None:
        """Assume that the file holds the records of a checkpoint."""
        self.place, self._last = place, json.dumps(records[-1])

    def new(self, records: Sequence[dict[str, Any]]) -> list[str]:
        """Those of a run's records that are not in the file yet, as JSON. All, where they begin otherwise."""
        try:
            number = 0 if self.place is None else self.place["number"]
            if number > len(records) or (number and json.dumps(records[number - 1]) != self._last):
                self.place, number = None, 0
            return [json.dumps(record) for record in records[number:]]
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"checkpoint: the record of an epoch must be JSON ({error})") from error

    def append(self, records: Sequence[str]) -> Place | None:
        """Append records, as JSON, and return the place of the last one. The disk has them on return.

        After an `OSError` the file is as before.
        """
        if not records:
            return self.place
        size, text = 0, bytearray()
        place: Place | None = self.place
        if os.path.lexists(self._path):
            size, text = self._end()
        for record in records:
            before = None if place is None else {name: place[name] for name in ("at", "sha256")}
            line = f'{{"record": {record}, "before": {json.dumps(before)}}}\n'.encode()
            if len(line) > _LONGEST:
                raise OSError(f"a record has {len(line)} bytes, more than {_LONGEST}; record fewer values in an epoch")
            number = 1 if place is None else place["number"] + 1
            place = {"number": number, "at": size + len(text), "sha256": hashlib.sha256(line).hexdigest()}
            text += line
        append(self._path, bytes(text))
        flush_to_disk(self._path)
        if not size:  # the file may be new
            flush_to_disk(self._path.parent)
        self.place, self._last = place, records[-1]
        return place

    def _end(self) -> tuple[int, bytearray]:
        """How many bytes the file has, and the end of its last line, which a killed process may have left out."""
        with files.opened(self._path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(size - 1, 0))
            return size, bytearray() if file.read(1) in (b"\n", b"") else bytearray(b"\n")


def read(directory: Path, place: Place) -> list[dict[str, Any]]:
    """All records up to a place, the oldest first. A `CheckpointError` names the file that is missing or damaged."""
    path, found = directory / NAME, []
    try:
        with files.opened(path) as file:
            before: Place | None = place
            while before is not None and len(found) < place["number"]:
                entry = _entry(file, before)
                found.append(entry["record"])
                before = entry["before"]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path} is damaged: record {place['number'] - len(found)}: {reason}") from None
    if before is not None or len(found) != place["number"]:
        raise CheckpointError(f"{path} is damaged: it does not have the {place['number']} records that were saved")
    return found[::-1]


def _entry(file: Any, place: Place) -> dict[str, Any]:
    """The line at a place. `ValueError` where another one is there."""
    file.seek(place["at"])
    line = file.readline(_LONGEST)
    if hashlib.sha256(line).hexdigest() != place["sha256"]:
        raise ValueError("it does not have the checksum it was saved with")
    try:
        entry = json.loads(line)
        _manifest.check_depth(entry)
        before = entry["before"]
        if type(entry["record"]) is not dict:
            raise ValueError
        if before is not None:
            _manifest.check_place({"number": 1, **before})
            if before["at"] >= place["at"]:
                raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError("it is not a record") from None
    return entry
