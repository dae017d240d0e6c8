"""The JSON of checkpoints: read within bounds, and checked as a whole before anything in it is used.

The manifest is in each checkpoint:

    {"sha256": ..., "content": {"format": 1, "order": ..., "step": ..., "best": true, "info": {...},
                                "records": {"number", "at", "sha256"}, "files": {name: [size, sha256]},
                                "frozen": sha256 of the arrays that are not trained,
                                "leaves": [{"name", "words", "shape", "dtype", ...}]}}

What is written passes the same checks, so every saved checkpoint can be restored.

The records of the epochs of a run are beside its checkpoints, in `records.jsonl`. Lines are only appended to it:

    {"record": {...}, "before": {"at": ..., "sha256": ...}}

A checkpoint knows its last record by the place and the SHA-256 of the line, and each line knows the one before it. So a
save writes what is new only. A run that goes on from an older checkpoint appends lines too: the line after it has two
followers then, and no checkpoint loses its records. A checkpoint holds its last records itself, for one that is moved
elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import reprlib
from collections.abc import Callable, Sequence
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
_SHA256 = re.compile(r"[0-9a-f]{64}")


def load(path: Path) -> dict[str, Any]:
    """What the checkpoint at a path says about itself.

    Raises:
        CheckpointError: the path is not a jaxpar checkpoint, or the manifest is damaged or unreadable.
    """
    try:
        raw = files.read(path / NAME, MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        other = " (an orbax checkpoint of another program)" if (path / "_CHECKPOINT_METADATA").exists() else ""
        raise CheckpointError(f"{path} is not a checkpoint of jaxpar{other}: it has no {NAME}") from None
    except OSError as error:
        raise CheckpointError(f"{path} is unreadable: {NAME}: {error.strerror or error}") from error
    try:
        outer = json.loads(raw)
        body, good = outer["content"], outer["sha256"] == digest(outer["content"])
    except (ValueError, KeyError, TypeError, RecursionError, MemoryError) as error:
        reason = for_terminal(f"{type(error).__name__}: {error}", MOST_SHOWN)
        raise CheckpointError(f"{path} is damaged: {NAME} cannot be read ({reason})") from None
    if not good:
        raise CheckpointError(f"{path} is damaged: {NAME} does not have the checksum it was saved with")
    try:
        check(body)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {NAME}: {error}") from None
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


def check(body: Any) -> None:
    """Check the content of a manifest: each entry is there, of its type and within bounds.

    The `ValueError` names the entry, what was expected and what was found. Of a newer format only its number is
    checked.
    """
    _expect(body, {"format": _from(1)}, "its content")
    if body["format"] > FORMAT:
        return
    _expect(body, _BODY, "its content")
    check_depth(body.get("info"))
    if "records" in body:
        check_place(body["records"])
    for name, entry in body["files"].items():
        if not name.isprintable() or name == NAME or {"", ".", ".."} & set(name.split("/")):
            raise ValueError(f"files: {reprlib.repr(name)} is not the name of a file inside the checkpoint")
        _expect(entry, _PRINT, f"files: {reprlib.repr(name)}")
    names = [record["name"] for record in body["leaves"]]
    if len(set(names)) < len(names):
        raise ValueError("two leaves have the same name")


def check_place(place: Any) -> None:
    """Check the place of a record."""
    _expect(place, _PLACE, "records")
    if len(place) != 3:
        raise ValueError(f"records must have a number, a place and a SHA-256, got {reprlib.repr(place)}")


def check_depth(value: Any) -> None:
    """`ValueError` for JSON with more than a hundred lists and objects in each other."""
    level = [value]
    for _ in range(_MOST_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise ValueError(f"lists and objects are nested more than {_MOST_DEPTH} deep; save a flatter info")


# What is expected: a type; a function that tells whether a value is good, and words; or a dict or a list of these. In a
# dict, "?" marks an entry that may be left out.


def _expect(value: Any, expected: Any, name: str) -> None:
    if isinstance(expected, dict):
        _expect(value, dict, name)
        for key, inner in expected.items():
            if key.rstrip("?") in value or not key.endswith("?"):
                _expect(value.get(key.rstrip("?")), inner, f"{name}: {key.rstrip('?')}")
    elif isinstance(expected, list):
        _expect(value, list, name)
        for i, item in enumerate(value):
            _expect(item, expected[0], f"{name}: {i}")
    else:
        is_good, words = expected if isinstance(expected, tuple) else (lambda x: type(x) is expected, _WORDS[expected])
        if not is_good(value):
            raise ValueError(f"{name} must be {words}, got {reprlib.repr(value)}")


def _is_int(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= _MOST_INT


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _is_print(value: Any) -> bool:
    return type(value) is list and len(value) == 2 and _is_int(value[0], 0) and _is_sha256(value[1])


def _from(least: int) -> tuple[Callable[[Any], bool], str]:
    return lambda value: _is_int(value, least), f"an int from {least} to {_MOST_INT}"


_WORDS = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
_PRINT = _is_print, "a size and a SHA-256"
_PLACE = {"number": _from(1), "at": _from(0), "sha256": (_is_sha256, "a SHA-256")}
_LEAF = {"name": str, "words": str, "dtype": str, "impl?": str, "rule?": str, "frozen?": bool, "shape": [_from(0)]}
_BODY = {
    **{"order": _from(1), "step?": _from(-_MOST_INT), "best?": bool, "info?": dict},
    **{"frozen?": (_is_sha256, "a SHA-256"), "files": dict, "leaves": [_LEAF]},
}


# Records.


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
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path} is damaged: record {place['number'] - len(found)}: {reason}") from None
    if before is not None or len(found) != place["number"]:
        raise CheckpointError(f"{path} is damaged: it does not have the {place['number']} records that were saved")
    return found[::-1]


def _record_at(file: Any, place: Place) -> dict[str, Any]:
    """The line at a place. `ValueError` where another one is there."""
    file.seek(place["at"])
    line = file.readline(_LONGEST)
    if hashlib.sha256(line).hexdigest() != place["sha256"]:
        raise ValueError("it does not have the checksum it was saved with")
    try:
        entry = json.loads(line)
        check_depth(entry)
        before = entry["before"]
        if type(entry["record"]) is not dict:
            raise ValueError
        if before is not None:
            check_place({"number": 1, **before})
            if before["at"] >= place["at"]:
                raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError("it is not a record") from None
    return entry
