"""Decoded copies of prepared data sets, so that the next process need not decode each picture again.

The copy of a split is among TFDS's own files, `jaxpar-train.npz`, and goes when they are deleted. It says of which
files, by which tensorflow-datasets, it was made. One that is damaged, or not of the files next to it, does not count.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
from pathlib import Path

import numpy as np

from .._core import files

_MOST_BYTES = 1 << 30  # of the arrays of one split
_PREFIX = "jaxpar-"


def find(name: str, data_dir: Path) -> Path | None:
    """The folder of the prepared data set, if a good copy is in it. This saves the slow import of TFDS."""
    copies = Path(data_dir, name).glob(f"*/{_PREFIX}*.npz")
    found = {path.parent for path in copies if _read(path) is not None}
    return found.pop() if len(found) == 1 else None


def load(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Images and labels of a whole split, if there is a good copy."""
    if not split.isidentifier():
        return None
    arrays = _read(folder / f"{_PREFIX}{split}.npz", "images", "labels")
    if arrays is None:
        return None
    images, labels = arrays
    return (images, labels) if _is_sound(images, labels, _num_examples(folder, split)) else None


def save(folder: Path, split: str, images: np.ndarray, labels: np.ndarray) -> None:
    """Keep a copy of a whole split, where that is possible."""
    origin = _origin(folder)
    if origin is None or not split.isidentifier() or images.nbytes + labels.nbytes > _MOST_BYTES:
        return
    with contextlib.suppress(OSError):  # a read-only or a full disk
        path = folder / f"{_PREFIX}{split}.npz"
        files.replace(path, lambda file: np.savez(file, images=images, labels=labels, origin=origin))


def _read(path: Path, *names: str) -> list[np.ndarray] | None:
    """These arrays of a copy, with their checksums verified. None for a copy that does not count."""
    try:
        with open(path, "rb") as file, np.load(file) as copy:
            return [copy[name] for name in names] if copy["origin"] == _origin(path.parent) else None
    except Exception:  # damaged headers raise almost anything: the split is decoded again
        return None


def _is_sound(images: np.ndarray, labels: np.ndarray, count: int | None) -> bool:
    """Whether these are as many images and labels as TFDS says, and numbers."""
    numbers = images.dtype.kind in "buif" and labels.dtype == np.int32
    return numbers and images.ndim > 0 and labels.ndim > 0 and len(images) == len(labels) == count


def _num_examples(folder: Path, split: str) -> int | None:
    """How many examples TFDS says that the split has. None where it does not say."""
    try:
        splits = json.loads((folder / "dataset_info.json").read_text())["splits"]
        return sum(int(length) for each in splits if each["name"] == split for length in each["shardLengths"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _origin(folder: Path) -> str | None:
    """What a copy is made of: TFDS's version, and the names, sizes and times of its files. None where unknown."""
    try:
        version = importlib.metadata.version("tensorflow-datasets")
        found = sorted(entry for entry in folder.iterdir() if not entry.name.lstrip(".").startswith(_PREFIX))
        about = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in found]
    except (OSError, importlib.metadata.PackageNotFoundError):
        return None
    return json.dumps([version, about])
