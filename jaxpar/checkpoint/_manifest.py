"""The manifest of a checkpoint: read within bounds, and checked as a whole before anything in it is used.

    {"sha256": ..., "content": {"format": 1, "order": ..., "step": ..., "best": true, "info": {...},
                                "records": {"number", "at", "sha256"}, "files": {name: [size, sha256]},
                                "leaves": [{"name", "words", "shape", "dtype", ...}]}}

What is written passes the same checks, so every saved checkpoint can be restored.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._core import regular_file
from .._core.files import CheckpointError as CheckpointError
from .._core.text import for_terminal

FORMAT = 1
NAME = "jaxpar.json"
MOST_BYTES = 64 << 20
MOST_SHOWN = 500  # characters of what a file says
_LINES = 1 << 18  # bytes up to which it is written in lines, for people. Longer ones take seconds so.
_MOST_DEPTH = 100  # of lists and objects in each other; Python's reader of JSON has a limit too
_MOST_INT = 1 << 62
_MOST_AXES = 64
_DTYPE = re.compile(r"[<>]?[a-z][a-z0-9_]{0,40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def load(path: Path) -> dict[str, Any]:
    """What the checkpoint at a path says about itself.

    Raises:
        CheckpointError: it is no checkpoint of jaxpar, or the manifest is damaged or cannot be read.
    """
    try:
        raw = regular_file.read(path / NAME, MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        other = " (an orbax checkpoint of another program)" if (path / "_CHECKPOINT_METADATA").exists() else ""
        raise CheckpointError(f"{path} is no checkpoint of jaxpar{other}: it has no {NAME}") from None
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
        raise ValueError(f"the manifest has {len(text)} bytes, and {MOST_BYTES} at most; save less info with it")
    return text


def digest(body: dict[str, Any]) -> str:
    """The SHA-256 of the content of a manifest."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def check(body: Any) -> None:
    """Check the content of a manifest: each entry is there, of its type and within bounds.

    Raises:
        ValueError: the message names the entry, what was expected and what was found. Of a newer format only its
            number is checked.
    """
    if type(body) is not dict:
        raise ValueError(f"its content must be an object, got {_quote(body)}")
    _int(body, "format", 1)
    if body["format"] > FORMAT:
        return
    _int(body, "order", 1)
    if "step" in body:
        _int(body, "step", -_MOST_INT)
    _of(dict, body, "files")
    for name, entry in body["files"].items():
        _check_file(name, entry)
    _check_leaves(_of(list, body, "leaves"))
    if "best" in body:
        _of(bool, body, "best")
    if "info" in body:
        check_depth(_of(dict, body, "info"))
    if "records" in body:
        check_place(_of(dict, body, "records"))


def check_place(place: dict[str, Any]) -> None:
    """`ValueError` for what is no place of a record, see `_records`."""
    _int(place, "number", 1)
    _int(place, "at", 0)
    if not isinstance(place.get("sha256"), str) or not _SHA256.fullmatch(place["sha256"]) or len(place) != 3:
        raise ValueError(f"records must have a number, a place and a SHA-256, got {_quote(place)}")


def check_depth(value: Any) -> None:
    """`ValueError` for JSON with more than a hundred lists and objects in each other."""
    level = [value]
    for _ in range(_MOST_DEPTH):
        level = [inner for outer in level if isinstance(outer, dict | list) for inner in _inside(outer)]
        if not level:
            return
    raise ValueError(f"more than {_MOST_DEPTH} lists and objects are in each other; save a flatter info")


def layout(record: dict[str, Any]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of the array that is stored for a leaf. Random keys are stored as their data.

    Raises:
        ValueError: a shape or a dtype that no array has.
    """
    shape, dtype, impl = tuple(record["shape"]), record["dtype"], record.get("impl")
    if impl is not None:
        try:
            found, data = _key_format(impl)
        except Exception:
            raise ValueError(f"there are no random keys {_quote(impl)} in this process") from None
        if found != dtype:
            raise ValueError(f"the dtype must be {found} for random keys {impl}, got {_quote(dtype)}")
        shape, stored = (*shape, *data.shape), np.dtype(data.dtype)
    else:
        stored = _dtype(dtype)
    if math.prod(n for n in shape if n) * stored.itemsize > _MOST_INT or len(shape) > _MOST_AXES:
        raise ValueError(f"the shape {_quote(record['shape'])} is larger than any array")
    return shape, stored


def _check_file(name: str, entry: Any) -> None:
    if not name.isprintable() or name == NAME or {"", ".", ".."} & set(name.split("/")):
        raise ValueError(f"files: {_quote(name)} is no name of a file inside the checkpoint")
    pair = entry if type(entry) is list and len(entry) == 2 else [None, None]
    if not _is_int(pair[0], 0) or not isinstance(pair[1], str) or not _SHA256.fullmatch(pair[1]):
        raise ValueError(f"files: {_quote(name)} must have a size and a SHA-256, got {_quote(entry)}")


def _check_leaves(leaves: list[Any]) -> None:
    names: set[str] = set()
    for i, record in enumerate(leaves):
        if type(record) is not dict:
            raise ValueError(f"leaf {i} must be an object, got {_quote(record)}")
        try:
            name = _of(str, record, "name")
            _check_leaf(record)
            if name in names:
                raise ValueError("another leaf has the same name")
        except ValueError as error:
            raise ValueError(f"leaf {i} ({_quote(record.get('name'))}): {error}") from None
        names.add(name)


def _check_leaf(record: dict[str, Any]) -> None:
    _of(str, record, "words")
    _of(str, record, "dtype")
    if not all(_is_int(n, 0) for n in _of(list, record, "shape")):
        raise ValueError(f"the shape must be ints of 0 or more, got {_quote(record['shape'])}")
    for name in {"impl", "rule"} & record.keys():
        _of(str, record, name)
    layout(record)


@functools.lru_cache(maxsize=64)
def _dtype(name: str) -> np.dtype[Any]:
    try:
        found = np.dtype(name) if _DTYPE.fullmatch(name) else None
    except Exception:  # what NumPy raises for an unknown name, or warns of
        found = None
    if found is None or str(found) != name or found.kind in "OSUMm" or found.type is np.void:
        raise ValueError(f"the dtype must be one of numbers, got {_quote(name)}")
    return found


@functools.lru_cache(maxsize=16)
def _key_format(impl: str) -> tuple[str, jax.ShapeDtypeStruct]:
    """The dtype of random keys, and what the data of one is. jax raises where there are no such keys."""
    key = jax.eval_shape(lambda: jax.random.key(0, impl=impl))
    return str(key.dtype), jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))


def _int(body: dict[str, Any], name: str, least: int) -> None:
    if not _is_int(body.get(name), least):
        raise ValueError(f"{name} must be an int from {least} to {_MOST_INT}, got {_quote(body.get(name))}")


def _is_int(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= _MOST_INT


def _of(kind: type, body: dict[str, Any], name: str) -> Any:
    if type(body.get(name)) is not kind:
        raise ValueError(f"{name} must be of type {kind.__name__}, got {_quote(body.get(name))}")
    return body[name]


def _inside(value: dict[str, Any] | list[Any]) -> Any:
    return value.values() if isinstance(value, dict) else value


def _quote(value: Any) -> str:
    """A value for a message. Of a list or an object only the type, since its text may be long or deep."""
    if isinstance(value, dict | list):
        return f"a {type(value).__name__} of {len(value)}"
    if type(value) is int and abs(value) > _MOST_INT:
        return "an int beyond that"
    text = repr(value)
    return text if len(text) < 100 else text[:100] + "..."
