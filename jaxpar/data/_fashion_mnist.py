"""The four idx files of Fashion-MNIST: where they are, their published checksums, reading them without TensorFlow."""

from __future__ import annotations

import gzip
import hashlib
import os
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

FASHION_MNIST_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
DEBIAN_DIR = Path("/usr/share/datasets/fashion-mnist")


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

_BARE_HEADER = 10  # bytes of a gzip header without a file name, RFC 1952


def places() -> dict[str, Path | None]:
    """Folders of the four files, by the word for them, in the order of search."""
    given = os.environ.get("JAXPAR_DATA_DIR")
    return {"files": Path(given).expanduser() if given else None, "debian": DEBIAN_DIR}


def missing(folder: str | os.PathLike[str]) -> list[str]:
    """The missing names among the four files. All four if `folder` does not exist."""
    return [name for name in OFFICIAL if not (Path(folder) / name).is_file()]


def official_bytes(path: Path) -> bytes:
    """The published .gz file, byte for byte, which is what TFDS asks for."""
    # Debian's package has the same compressed bytes after a header without file name and time stamp. With the published
    # header they have the published sha256. `ValueError` for a file that is another one, half-written or damaged.
    sha256, mtime = OFFICIAL[path.name]
    raw = path.read_bytes()
    name = path.name.removesuffix(".gz").encode()
    header = struct.pack("<4BLBB", 0x1F, 0x8B, 8, 8, mtime, 0, 3) + name + b"\0"
    for candidate in (raw, header + raw[_BARE_HEADER:]):
        if hashlib.sha256(candidate).hexdigest() == sha256:
            return candidate
    raise ValueError(
        f"{path} is not the official Fashion-MNIST file, or is damaged: expected sha256 {sha256}, "
        f"got {hashlib.sha256(raw).hexdigest()} ({len(raw)} bytes). Nothing was written. "
        "Put the file there again (Debian: apt-get install --reinstall dataset-fashion-mnist)."
    )


def read(path: str | os.PathLike[str]) -> np.ndarray:
    """The uint8 array in a gzipped idx file: images `(n, rows, columns)` or labels `(n,)`."""
    with gzip.open(path, "rb") as file:
        content = file.read()
    ndim = content[3] if len(content) > 3 else 0
    start = 4 + 4 * ndim
    if content[:3] != b"\0\0\x08" or len(content) < start:
        raise ValueError(f"{path} is not an idx file of unsigned bytes: it begins with {content[:4]!r}")
    shape = struct.unpack(f">{ndim}I", content[4:start])
    if len(content) - start != int(np.prod(shape, dtype=np.int64)):
        raise ValueError(f"{path} says shape {shape} but holds {len(content) - start} bytes")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
