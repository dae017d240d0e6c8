"""The manifest of a checkpoint: read within bounds, and checked as a whole before anything in it is used.

    {"sha256": ..., "content": {"format": 1, "order": ..., "step": ..., "best": true, "info": {...},
                                "records": {"number", "at", "sha256"}, "files": {name: [size, sha256]},
                                "frozen": sha256 of the arrays that are not trained,
                                "leaves": [{"name", "words", "shape", "dtype", ...}]}}

What is written passes the same checks, so every saved checkpoint can be restored.
"""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from pathlib import Path
from typing import Any

from .._core import files
from .._core.files import CheckpointError as CheckpointError
from .._core.text import for_terminal

FORMAT = 1
NAME = "jaxpar.json"
MOST_BYTES = 64 << 20
MOST_SHOWN = 500  # characters of what a file says
_LINES = 1 << 18  # bytes up to which it is written in lines, for people. Longer ones take seconds so.
_MOST_DEPTH = 100  # of lists and objects in each other; Python's reader of JSON has a limit too
_MOST_INT = 1 << 62
_SHA256 = re.compile(r"[0-9a-f]{64}")
_EXPECTED = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}


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
    _expect(type(body) is dict, "its content", "an object", body)
    _int(body, "format", 1)
    if body["format"] > FORMAT:
        return
    _int(body, "order", 1)
    if "step" in body:
        _int(body, "step", -_MOST_INT)
    if "best" in body:
        _entry(body, "best", bool)
    if "info" in body:
        check_depth(_entry(body, "info", dict))
    if "records" in body:
        check_place(_entry(body, "records", dict))
    if "frozen" in body:
        _expect(_is_sha256(body["frozen"]), "frozen", "a SHA-256", body["frozen"])
    for name, entry in _entry(body, "files", dict).items():
        if not name.isprintable() or name == NAME or {"", ".", ".."} & set(name.split("/")):
            raise ValueError(f"files: {reprlib.repr(name)} is not the name of a file inside the checkpoint")
        pair = entry if type(entry) is list and len(entry) == 2 else [None, None]
        if not _is_int(pair[0], 0) or not _is_sha256(pair[1]):
            raise ValueError(f"files: {reprlib.repr(name)} must have a size and a SHA-256, got {reprlib.repr(entry)}")
    names: set[str] = set()
    for i, record in enumerate(_entry(body, "leaves", list)):
        _expect(type(record) is dict, f"leaf {i}", "an object", record)
        try:
            for name in ("name", "words", "dtype", *({"impl", "rule"} & record.keys())):
                _entry(record, name, str)
            if "frozen" in record:
                _entry(record, "frozen", bool)
            lengths = _entry(record, "shape", list)
            _expect(all(_is_int(n, 0) for n in lengths), "the shape", "ints of 0 or more", lengths)
            if record["name"] in names:
                raise ValueError("another leaf has the same name")
        except ValueError as error:
            raise ValueError(f"leaf {i} ({reprlib.repr(record.get('name'))}): {error}") from None
        names.add(record["name"])


def check_place(place: dict[str, Any]) -> None:
    """Check the place of a record, see `_records`."""
    _int(place, "number", 1)
    _int(place, "at", 0)
    if not _is_sha256(place.get("sha256")) or len(place) != 3:
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


def _entry(body: dict[str, Any], name: str, kind: type) -> Any:
    _expect(type(body.get(name)) is kind, name, _EXPECTED[kind], body.get(name))
    return body[name]


def _int(body: dict[str, Any], name: str, least: int) -> None:
    _expect(_is_int(body.get(name), least), name, f"an int from {least} to {_MOST_INT}", body.get(name))


def _expect(holds: bool, name: str, expected: str, found: Any) -> None:
    if not holds:
        raise ValueError(f"{name} must be {expected}, got {reprlib.repr(found)}")


def _is_int(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= _MOST_INT


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None
