"""The four idx files of Fashion-MNIST: their official checksums, and reading them without TensorFlow."""

from __future__ import annotations

import gzip
import hashlib
import os
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Official(NamedTuple):
    """What the authors published: the sha256 of the .gz file and the time stamp in its gzip header."""

    sha256: str
    mtime: int


OFFICIAL = {
    "train-images-idx3-ubyte.gz": Official(
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84", 1504176606
    ),
    "train-labels-idx1-ubyte.gz": Official(
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845", 1504176606
    ),
    "t10k-images-idx3-ubyte.gz": Official(
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073", 1504176627
    ),
    "t10k-labels-idx1-ubyte.gz": Official(
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5", 1504176627
    ),
}

_FHCRC, _FEXTRA, _FNAME, _FCOMMENT = 2, 4, 8, 16  # flag bits of a gzip member, RFC 1952


def missing(folder: str | os.PathLike[str]) -> list[str]:
    """The names of the four files that `folder` lacks (all four where it is no folder)."""
    return [name for name in OFFICIAL if not (Path(folder) / name).is_file()]


def check(folder: Path) -> None:
    """Holds each of the four files against its published checksum; see `official_bytes`."""
    for name in OFFICIAL:
        official_bytes(folder / name)


def official_bytes(path: Path) -> bytes:
    """The published .gz file, byte for byte, from `path`, which may differ from it in the gzip header only.

    Debian's package stores the same compressed bytes under a header without file name and time stamp; with
    the published header put back they have the published sha256, so nothing is taken on trust.

    Raises:
      ValueError: the file is another one, half-written or damaged; the message has both checksums.
    """
    sha256, mtime = OFFICIAL[path.name]
    raw = path.read_bytes()
    name = path.name.removesuffix(".gz").encode()
    header = struct.pack("<4BLBB", 0x1F, 0x8B, 8, _FNAME, mtime, 0, 3) + name + b"\0"
    for candidate in (raw, header + raw[_header_size(raw) :]):
        if hashlib.sha256(candidate).hexdigest() == sha256:
            return candidate
    raise ValueError(
        f"{path} is not the official Fashion-MNIST file, or is damaged: expected sha256 {sha256}, "
        f"got {hashlib.sha256(raw).hexdigest()} ({len(raw)} bytes). Nothing was written. "
        "Put the file there again (Debian: apt-get install --reinstall dataset-fashion-mnist)."
    )


def _header_size(raw: bytes) -> int:
    """The length of the gzip header (RFC 1952, section 2.3); 0 where there is none."""
    if len(raw) < 10 or raw[:2] != b"\x1f\x8b":
        return 0
    flags, at = raw[3], 10
    if flags & _FEXTRA:
        at += 2 + int.from_bytes(raw[at : at + 2], "little")
    for flag in (_FNAME, _FCOMMENT):
        if flags & flag:
            at = raw.find(b"\0", at) + 1
    return at + (2 if flags & _FHCRC else 0)


def read(path: str | os.PathLike[str]) -> np.ndarray:
    """The uint8 array in a gzipped idx file: images `(n, rows, columns)` or labels `(n,)`.

    Raises:
      ValueError: no idx file of unsigned bytes, or not as many bytes as its header says.
    """
    with gzip.open(path, "rb") as file:
        content = file.read()
    ndim = content[3] if len(content) > 3 else 0
    start = 4 + 4 * ndim
    if content[:3] != b"\0\0\x08" or len(content) < start:
        raise ValueError(f"{path} is no idx file of unsigned bytes: it begins with {content[:4]!r}")
    shape = struct.unpack(f">{ndim}I", content[4:start])
    if len(content) - start != int(np.prod(shape, dtype=np.int64)):
        raise ValueError(f"{path} says shape {shape} but holds {len(content) - start} bytes")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
