"""MXNet's RecordIO files: the records of a `.rec`, their places in a `.idx`, and `.lst`, the lists of images.

A record is one part or several. A part is a magic number, a word of its kind and its length, the bytes, and zeros up to
a multiple of four. Where the bytes of a record have the magic number, MXNet leaves it out and begins a part there.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from .._core import files
from .._core.calls import answers, answers_class
from .._core.files import CheckpointError

_MAGIC = 0xCED7230A
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)  # kinds of parts
_LENGTH_BITS = 29
_MOST_BYTES = 1 << 31  # of a .idx or .lst
_INDEX_LINE = re.compile(r"\s*(-?\d{1,18})\s+(\d{1,18})\s*", re.ASCII)
_HEADER = struct.Struct("<IfQQ")  # number of labels or 0, a label, id, id2


class ImageRecord(NamedTuple):
    """A record that `mx.recordio.pack` made, such as one of im2rec.

    Attributes:
        label: float32 (labels,), one or several.
        id, id2: as packed.
        content: what was packed, such as a JPEG file.
    """

    label: np.ndarray
    id: int
    id2: int
    content: bytes


@answers_class("mxnet.RecordFile")
class RecordFile(Sequence[bytes]):
    """The records of a RecordIO file of MXNet, by number.

    The file is opened for each read, so threads and processes may share an object. Nothing in the file is run.

    Args:
        rec: the `.rec` file.
        idx: the `.idx` file beside it. None: the headers of all records are read once, which gives the same records.

    Attributes:
        path: of the `.rec`.
        keys: int64 (records,), those of the `.idx`, else 0, 1, 2, ... A record's number is its line in the `.idx`.

    Raises:
        OSError: a file cannot be read.
        CheckpointError: a file is damaged or cut, or the `.idx` is of another file. The message names the byte.

    Example:
        >>> from jaxpar import mxnet
        >>> records = mxnet.RecordFile("train.rec", "train.idx")  # doctest: +SKIP
        >>> len(records), records[0], records.unpack(0).label  # doctest: +SKIP
    """

    path: Path
    keys: np.ndarray

    def __init__(self, rec: str | os.PathLike[str], idx: str | os.PathLike[str] | None = None):
        self.path = files.as_path(rec, "mxnet.RecordFile: rec")
        self._size = os.stat(self.path).st_size
        if idx is None:
            self._places = self._scan()
            self.keys = np.arange(len(self._places))
        else:
            self.keys, self._places = _read_index(files.as_path(idx, "mxnet.RecordFile: idx"))

    def __repr__(self) -> str:
        return f"RecordFile({len(self)} records of {self.path})"

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: Any) -> Any:
        """The bytes of a record, as `mx.recordio` reads them."""
        if isinstance(number, slice):
            return [self[i] for i in range(len(self))[number]]
        if not -len(self) <= number < len(self):
            raise IndexError(f"{self.path} has {len(self)} records, there is no record {number}")
        parts: list[bytes] = []
        with files.opened(self.path) as file:
            for length, end in self._parts(file, int(self._places[number])):
                parts.append(file.read(length))
                if len(parts[-1]) < length:
                    raise self._damaged(end, "the file was cut since it was opened")
        return struct.pack("<I", _MAGIC).join(parts)

    def unpack(self, number: int) -> ImageRecord:
        """The label, the ids and the content of an image's record.

        Raises:
            CheckpointError: the record is damaged, or not of this form.
        """
        record = self[number]
        count = label = id_ = id2 = 0
        if len(record) >= _HEADER.size:
            count, label, id_, id2 = _HEADER.unpack_from(record)
        if len(record) < (start := _HEADER.size + 4 * count):
            place = int(self._places[number])
            raise self._damaged(place, f"expected a header and {count} labels of an image, got {len(record)} bytes")
        labels = np.frombuffer(record, "<f4", count, _HEADER.size) if count else np.array([label])
        return ImageRecord(labels.astype(np.float32), id_, id2, record[start:])

    def _parts(self, file: BinaryIO, at: int) -> Iterator[tuple[int, int]]:
        """Of each part of the record at a byte the length, and the byte behind it. The file stands before its bytes."""
        kind = None
        while kind not in (_WHOLE, _LAST):
            file.seek(min(at, self._size))
            if len(head := file.read(8)) < 8:
                raise self._damaged(at, f"expected a record, the file ends at byte {self._size}")
            magic, word = struct.unpack("<II", head)
            if magic != _MAGIC:
                raise self._damaged(at, f"expected a record, which begins with {_MAGIC:#x}, got {magic:#x}")
            expected = (_WHOLE, _FIRST) if kind is None else (_MIDDLE, _LAST)
            kind, length = word >> _LENGTH_BITS, word & ((1 << _LENGTH_BITS) - 1)
            if kind not in expected:
                raise self._damaged(at, f"expected a part of kind {expected[0]} or {expected[1]}, got {kind}")
            if at + 8 + length > self._size:
                raise self._damaged(at, f"expected {length} bytes, the file ends at byte {self._size}")
            at += 8 + (length + 3) // 4 * 4
            yield length, at

    def _scan(self) -> np.ndarray:
        """Where the records begin."""
        places: list[int] = []
        at = 0
        with files.opened(self.path) as file:
            while at < self._size:
                places.append(at)
                *_, (_, at) = self._parts(file, at)
        return np.array(places, np.int64)

    def _damaged(self, at: int, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged at byte {at}, or its .idx is of another file: {reason}")


def _lines(path: Path) -> list[str]:
    return files.read(path, _MOST_BYTES).decode("utf-8", "replace").splitlines()


def _read_index(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Keys and places of the records."""
    found: list[tuple[int, int]] = []
    for number, line in enumerate(_lines(path), 1):
        match = _INDEX_LINE.fullmatch(line)
        if match is None:
            raise CheckpointError(f"{path}, line {number}: expected a key and a byte of the .rec, got {line[:100]!r}")
        found.append((int(match[1]), int(match[2])))
    table = np.array(found, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


@answers("mxnet.load_list")
def load_list(path: str | os.PathLike[str]) -> list[tuple[int, np.ndarray, str]]:
    """The lines of a `.lst`, the list of images that im2rec packs: (id, labels, path), labels float32 (labels,).

    Raises:
        OSError: the file cannot be read.
        CheckpointError: a line is not an id, finite labels and a path with tabs between them.

    Example:
        >>> from jaxpar import mxnet
        >>> mxnet.load_list("train.lst")[0]  # doctest: +SKIP
        (0, array([1.], dtype=float32), 'cats/1.jpg')
    """
    path = files.as_path(path, "mxnet.load_list: path")
    found: list[tuple[int, np.ndarray, str]] = []
    for number, line in enumerate(_lines(path), 1):
        try:
            id_, label, *more, name = line.rstrip("\r\n").split("\t")
            with np.errstate(over="ignore"):
                labels = np.array([label, *more], np.float32)
            if not np.isfinite(labels).all():
                raise ValueError
            found.append((int(id_), labels, name))
        except ValueError:
            words = "expected an id, labels and a path with tabs between them, and the labels finite float32"
            raise CheckpointError(f"{path}, line {number}: {words}, got {line[:100]!r}") from None
    return found
