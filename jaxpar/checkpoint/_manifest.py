"""The JSON of checkpoints: read within bounds, and checked as a whole before anything in it is used.

The manifest is in each checkpoint:

    {"sha256": ..., "content": {"format": 1, "order": ..., "step": ..., "best": true, "info": {...},
                                "records": {"number", "at", "sha256"}, "files": {name: [size, sha256]},
                                "frozen": sha256 of the arrays that are not trained,
                                "leaves": [{"name", "words", "shape", "dtype", ...}]}}

What is written passes the same checks, so every saved checkpoint can be restored.

The records of the epochs of a run are beside its checkpoints, in `records.jsonl`, one a line:

    {"record": {...}, "before": {"at": ..., "sha256": ...}}
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._core import files
from .._core.files import CheckpointError as CheckpointError, append, flush_to_disk
from .._core.text import for_terminal

FORMAT = 1
NAME = "jaxpar.json"
MOST_BYTES = 64 << 20
MOST_SHOWN = 500  # characters of what a file says
Place = dict[str, Any]  # {"number": of records, "at": byte at which the last one begins, "sha256": of its line}
RECORDS = "records.jsonl"
INSIDE = 64  # of the last records, which a checkpoint holds itself
_LONGEST = 16 << 20  # bytes of the line of a record
_LINES = 1 << 18  # bytes up to which it is written in lines, for people. Longer ones take seconds so.
_MOST_DEPTH = 100  # of lists and objects in each other; Python's reader of JSON has a limit too
_MOST_INT = 1 << 62
_CHECKSUM = "it does not have the checksum it was saved with"
_SHA256 = re.compile(r"[0-9a-f]{64}")


def load(path: Path) -> dict[str, Any]:
    """What the checkpoint at a path says about itself. A `CheckpointError` says why it cannot be used."""
    try:
        raw = files.read(path / NAME, MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        other = " (an orbax checkpoint of another program)" if (path / "_CHECKPOINT_METADATA").exists() else ""
        raise CheckpointError(f"{path} is not a checkpoint of jaxpar{other}: it has no {NAME}") from None
    except OSError as error:
        raise CheckpointError(f"{path} is unreadable: {NAME}: {error.strerror or error}") from error
    try:
        outer = json.loads(raw)
        body = outer["content"]
        _expect(outer["sha256"] == digest(body), _CHECKSUM)
        check(body)
    except Exception as error:  # a forger may give anything the right checksum
        reason = for_terminal(f"{type(error).__name__}: {error}", MOST_SHOWN)
        raise CheckpointError(f"{path} is damaged: {NAME}: {reason}") from None
    if body["format"] > FORMAT:
        raise CheckpointError(f"{path} was saved by a newer jaxpar (format {body['format']}, this one has {FORMAT})")
    return body


def dumps(body: dict[str, Any]) -> str:
    """The text of a manifest. `ValueError` for one that `load` would refuse."""
    check(body)
    outer = {"sha256": digest(body), "content": body}
    text = json.dumps(outer)
    if len(text) < _LINES:
        text = json.dumps(outer, indent=1)
    if len(text) > MOST_BYTES:  # JSON is ASCII here
        raise ValueError(f"the manifest has {len(text)} bytes, more than {MOST_BYTES}; save less info with it")
    return text


def digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


# What is not as it must be raises: a `ValueError`, or what Python says of an entry that is missing or of another type.


def check(body: Any) -> None:
    """Check that each entry of a manifest is there, of its type and within bounds. Of a newer format only that."""
    _expect(_is_int(body["format"], 1), "wrong format")
    if body["format"] > FORMAT:
        return
    _expect(_is_int(body["order"], 1), "wrong order")
    _expect(_is_int(body.get("step", 0), -_MOST_INT), "wrong step")
    _expect(type(body.get("best", False)) is bool, "wrong best")
    _expect(type(body.get("info", {})) is dict, "wrong info")
    check_depth(body.get("info"))
    _expect("frozen" not in body or _is_sha256(body["frozen"]), "wrong frozen")
    if "records" in body:
        check_place(body["records"])
    for name, (size, checksum) in body["files"].items():
        is_inside = name.isprintable() and name != NAME and not {"", ".", ".."} & set(name.split("/"))
        _expect(is_inside and _is_int(size, 0) and _is_sha256(checksum), f"wrong files: {reprlib.repr(name)}")
    _expect(type(body["leaves"]) is list, "wrong leaves")
    names = [record["name"] for record in body["leaves"]]
    _expect(len(set(names)) == len(names), "two leaves have the same name")
    for i, record in enumerate(body["leaves"]):
        words = [record["name"], record["words"], record["dtype"], record.get("impl", ""), record.get("rule", "")]
        _expect(all(type(word) is str for word in words), f"wrong leaf {i}")
        _expect(type(record.get("frozen", False)) is bool, f"wrong leaf {i}: frozen")
        shape = record["shape"]
        _expect(type(shape) is list and all(_is_int(n, 0) for n in shape), f"wrong leaf {i}: shape")


def check_place(place: Any) -> None:
    """Check the place of a record."""
    is_good = set(place) == {"number", "at", "sha256"} and _is_int(place["number"], 1) and _is_int(place["at"], 0)
    words = f"a record must have a number, a place and a SHA-256, got {reprlib.repr(place)}"
    _expect(is_good and _is_sha256(place["sha256"]), words)


def check_depth(value: Any, left: int = _MOST_DEPTH) -> None:
    """Check that JSON has at most a hundred lists and objects in each other."""
    if not left:
        raise ValueError(f"lists and objects are nested more than {_MOST_DEPTH} deep; save a flatter info")
    inner: Any = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        check_depth(each, left - 1)


def _expect(is_good: bool, why: str) -> None:
    if not is_good:
        raise ValueError(why)


def _is_int(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= _MOST_INT


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


# Lines are only appended to the file of the records. A checkpoint knows its last record by the place and the SHA-256 of
# the line, and each line knows the one before it. So a save writes what is new only. A run that goes on from an older
# checkpoint appends lines too: the line after it has two followers then, and no checkpoint loses its records. A
# checkpoint holds its last records itself, for one that is moved elsewhere.


class RecordWriter:
    """Appends the new records of a run to the file of a directory."""

    def __init__(self, directory: Path):
        self._path = directory / RECORDS
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
            with files.opened(self._path) as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(size - 1, 0))
                if file.read(1) not in (b"\n", b""):  # a killed process left out the end of its line
                    text += b"\n"
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


def read_records(directory: Path, place: Place) -> list[dict[str, Any]]:
    """All records up to a place, the oldest first. A `CheckpointError` names the file that is missing or damaged."""
    path, found = directory / RECORDS, []
    try:
        with files.opened(path) as file:
            before: Place | None = place
            while before is not None and len(found) < place["number"]:
                entry = _record_at(file, before)
                found.append(entry["record"])
                before = entry["before"]
    except Exception as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path} is damaged: record {place['number'] - len(found)}: {reason}") from None
    if before is not None or len(found) != place["number"]:
        raise CheckpointError(f"{path} is damaged: it does not have the {place['number']} records that were saved")
    return found[::-1]


def _record_at(file: Any, place: Place) -> dict[str, Any]:
    """The line at a place, which was saved there."""
    file.seek(place["at"])
    line = file.readline(_LONGEST)
    _expect(hashlib.sha256(line).hexdigest() == place["sha256"], _CHECKSUM)
    entry = json.loads(line)
    check_depth(entry)
    _expect(type(entry["record"]) is dict, "it is not a record")
    if entry["before"] is not None:
        check_place({"number": 1, **entry["before"]})
        _expect(entry["before"]["at"] < place["at"], "the record before it comes later")
    return entry
