"""Files that are written whole or not at all, and regular files that are read within a bound. No JAX here."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import io
import os
import re
import stat
import tempfile
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import process


class CheckpointError(ValueError):
    """The checkpoint is damaged, from another program, or of another state."""

    _is_misfit = False  # whether the checkpoint is good, and of another state


# Paths that a user gives. Each argument that takes one goes through `as_path` when the call begins.

# A drive of Windows has one letter. Two slashes become one in a pathlib.Path. fsspec chains: "simplecache::s3://x".
_SCHEME = re.compile(r"\s*(?:\w[\w+.-]*::)*([A-Za-z][A-Za-z0-9+.-]+):/")
_VARIABLE = re.compile(r"\$(?:\w+|\{)")


def as_path(path: Any, what: str) -> Path:
    """The absolute path that a user means, so that a later change of the working directory does not move it.

    `TypeError` for what is no path, `ValueError` as of `as_local`.
    """
    return Path(as_local(path, what)).absolute()


def shown(path: os.PathLike[str]) -> str:
    """The path as a person reads it: from the working directory on, if it is inside."""
    directory = Path.cwd()
    if isinstance(path, Path) and path.is_relative_to(directory):
        return str(path.relative_to(directory))
    return str(path)


def as_local(value: Any, what: str) -> str:
    """A path on this machine as text, with `~` as the home directory. A relative one stays relative.

    `file:///x` is /x. `ValueError` for a path on another system, such as `s3://bucket/x`, for one with a variable of
    the shell, such as `$HOME/x`, and for an empty one: as folders they would be made under these names.
    """
    scheme, written = address(value)
    if scheme not in ("", "file"):
        raise ValueError(
            f"{what} is {written!r}, on another system ({scheme}), and only local paths can be read and written; "
            "give a folder of a disk or mount of this machine, and copy to or from the other system before and after"
        )
    try:
        path = os.fsdecode(value)
    except TypeError:
        got = value if isinstance(value, (int, float)) else f"a {type(value).__name__}"
        raise TypeError(f"{what} must be a path, a string or a pathlib.Path, got {got}") from None
    if scheme:
        url = urllib.parse.urlsplit(path.strip())
        if not isinstance(value, (str, bytes)) or url.netloc not in ("", "localhost"):
            raise ValueError(f"{what} is {written!r}, which names no file of this machine; give the path itself")
        path = urllib.parse.unquote(url.path)
    home = os.path.expanduser(checked(path, what))
    if home.startswith("~"):
        who = home.split(os.sep)[0]
        raise ValueError(f"{what} is {path!r}, and there is no home directory {who}; a folder of that name is ./{who}")
    return home


def address(value: Any) -> tuple[str, str]:
    """The scheme of a path, such as "gs" of gs://bucket/x, in lower case, and its text. "" for a path without one."""
    # A path object of a bucket need not be an os.PathLike, and one that is may download its file for `os.fspath`. So
    # its text is looked at.
    is_object = isinstance(value, os.PathLike) or hasattr(value, "joinpath")
    written = os.fsdecode(value) if isinstance(value, (str, bytes)) else str(value) if is_object else ""
    scheme = _SCHEME.match(written)
    return ("" if scheme is None else scheme[1].lower()), written


def checked(path: str, what: str) -> str:
    """The path, or a `ValueError` for one that is empty or has a variable of the shell or a NUL in it."""
    if not path or "\0" in path:
        raise ValueError(f"{what} must not be empty or have a NUL in it, got {path!r}")
    if (variable := _VARIABLE.search(path)) is not None:
        raise ValueError(
            f"{what} is {path!r}, and Python does not replace {path[variable.start() :].split(os.sep)[0]} as a shell "
            "does; give os.path.expandvars(path)"
        )
    return path


def create(path: Path, content: bytes) -> None:
    """A new file, whole or not at all. `FileExistsError` where something has that name."""
    with open(path, "xb", buffering=0) as file:
        try:
            _write_all(file, content)
        except BaseException:  # the disk is full, or Ctrl-C
            path.unlink(missing_ok=True)
            raise


def append(path: Path, content: bytes) -> None:
    """Append bytes to a file, all of them or none."""
    with open(path, "ab", buffering=0) as file:
        size = file.tell()
        try:
            _write_all(file, content)
        except BaseException:
            with contextlib.suppress(OSError):
                file.truncate(size)
            raise


def _write_all(file: io.FileIO, content: bytes) -> None:
    unwritten = memoryview(content)
    while unwritten:
        unwritten = unwritten[file.write(unwritten) :]


def replace(path: Path, write: bytes | Callable[[io.BufferedWriter], None]) -> None:
    """Replace a file by the content, or by what a function writes to it. Readers see the old content or the new.

    A link is followed. Where the file cannot be written, the old one is as before.
    """
    target = path.resolve()
    # What processes that were killed meanwhile left. Each has its own, so several may remove it.
    for left in target.parent.glob(f".{glob.escape(target.name)}.*"):
        if process.has_ended(left.suffix[1:]):
            left.unlink(missing_ok=True)
    unfinished = target.with_name(f".{target.name}.{process.tag()}")
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


def clock_of(directory: Path) -> float:
    """The time by the clock of a directory's file system. `OSError` where no file can be made there."""
    with tempfile.TemporaryFile(dir=directory) as probe:
        return os.fstat(probe.fileno()).st_mtime


# A pipe would wait forever, and a device may never end. So only regular files are opened, also where a link leads.


def read(path: Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
        return file.read(size)


def fingerprint(path: Path, most: int) -> tuple[int, str]:
    """Number and SHA-256 of the bytes. Of a file of more than `most` bytes none is read. `OSError` as in `read`."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        return size, hashlib.file_digest(file, "sha256").hexdigest() if size <= most else ""


def opened(path: Path) -> io.BufferedReader:
    """The file, open for reading. `OSError` as in `read`."""
    # To open a device may do something, so it is looked at first. It may be replaced before it is open: then nothing
    # waits for a writer, and no terminal can send signals.
    error = OSError(errno.EINVAL, "it is not a regular file", str(path))
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise error
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise error
    return open(descriptor, "rb")
