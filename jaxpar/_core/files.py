"""Files that are written whole or not at all. No JAX here."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


class CheckpointError(ValueError):
    """A checkpoint that is damaged, of another program, or not of the state that was asked for."""


def as_path(given: Any, where: str) -> Path:
    """A path. `TypeError` for what is none."""
    try:
        return Path(given)
    except TypeError:
        shown = given if isinstance(given, (int, float)) else f"a {type(given).__name__}"
        raise TypeError(f"{where} must be a path, a string or a pathlib.Path, got {shown}") from None


def create(path: Path, content: bytes) -> None:
    """A new file, whole or not at all. `FileExistsError` where something has that name."""
    with open(path, "xb", buffering=0) as file:
        try:
            _write_all(file, content)
        except OSError:  # the disk is full
            path.unlink(missing_ok=True)
            raise


def append(path: Path, content: bytes) -> None:
    """Append bytes to a file, all of them or none.

    Raises:
        OSError: the file cannot be written. Its content is as before.
    """
    with open(path, "ab", buffering=0) as file:
        size = file.tell()
        try:
            _write_all(file, content)
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(size)
            raise


def _write_all(file: io.FileIO, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


def replace(path: Path, write: bytes | Callable[[Any], None]) -> None:
    """Replace a file. Readers see the old content or the new, never a part.

    Args:
        path: the file. A link is followed.
        write: the content, or a function that writes it to an open binary file.

    Raises:
        OSError: the file cannot be written. The old one is as before.
    """
    target = path.resolve()
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(unfinished, "wb") as file:
            if isinstance(write, bytes):
                file.write(write)
            else:
                write(file)
        os.replace(unfinished, target)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def flush_to_disk(path: Path) -> None:
    """Wait until the disk has a file, or the entries of a folder. An `OSError` names it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(handle)
