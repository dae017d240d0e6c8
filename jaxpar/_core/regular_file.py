"""Regular files, read within a bound.

A pipe would wait forever, and a device may never end. So neither is opened, also where a link leads to it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import BinaryIO

_CHUNK = 1 << 20


def read(path: Path, most: int) -> bytes:
    """The content of a file.

    Raises:
        OSError: it cannot be read, it is no regular file, or it has more than `most` bytes.
    """
    content = b"".join(_chunks(path, most + 1)) if os.stat(path).st_size <= most else None
    if content is None or len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return content


def fingerprint(path: Path, most: int) -> tuple[int, str]:
    """Number and SHA-256 of the bytes, at most the first `most + 1` of them. `OSError` as in `read`."""
    size, digest = 0, hashlib.sha256()
    for part in _chunks(path, most + 1):
        size += len(part)
        digest.update(part)
    return size, digest.hexdigest()


@contextlib.contextmanager
def opened(path: Path) -> Generator[BinaryIO]:
    """The file, open for reading. `OSError` as in `read`."""
    _check_regular(os.stat(path), path)
    with open(path, "rb", opener=_open) as file:
        _check_regular(os.fstat(file.fileno()), path)  # it may have been replaced since
        yield file


def _chunks(path: Path, most: int) -> Iterator[bytes]:
    with opened(path) as file:
        while most > 0 and (part := file.read(min(most, _CHUNK))):
            most -= len(part)
            yield part


def _open(path: str, flags: int) -> int:
    """Open a file without waiting for a writer, and without a terminal that could send signals."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))


def _check_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
