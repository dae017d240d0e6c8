"""Decoded copies of prepared data sets, so that the next process need not decode each picture again.

A copy of a split lies among TFDS's own files, `jaxpar-train.npz`: who deletes the data set deletes it too. It says of
which files, by which tensorflow-datasets, it was made; where that is no longer so, or its checksum is wrong, or it
could not be written, the split is decoded as if it were not there.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import zipfile
from pathlib import Path

import numpy as np

_MOST_BYTES = 1 << 30  # of the arrays of one split
_PREFIX = "jaxpar-"


def find(name: str, data_dir: Path) -> Path | None:
    """The folder of the prepared data set, where a copy in it tells; TFDS, slow to import, knows it anyway."""
    copies = Path(data_dir, name).glob(f"*/{_PREFIX}*.npz")
    found = {path.parent for path in copies if _arrays(path, "origin") is not None}
    return found.pop() if len(found) == 1 else None


def load(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Images and labels of a split of which there is a good copy."""
    found = _arrays(folder / f"{_PREFIX}{split}.npz", "images", "labels") if split.isidentifier() else None
    return None if found is None else (found[0], found[1])


def save(folder: Path, split: str, images: np.ndarray, labels: np.ndarray) -> None:
    """Keeps a copy of a whole split, where that is possible; one that is being written is never read."""
    origin = _origin(folder)
    if origin is None or not split.isidentifier() or images.nbytes + labels.nbytes > _MOST_BYTES:
        return
    unfinished = folder / f"{_PREFIX}{split}.{os.getpid()}.unfinished"
    try:
        with open(unfinished, "wb") as file:
            np.savez(file, images=images, labels=labels, origin=origin)
        os.replace(unfinished, folder / f"{_PREFIX}{split}.npz")
    except OSError:  # a read-only or a full disk
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _arrays(path: Path, *names: str) -> list[np.ndarray] | None:
    """These arrays of a copy, their checksums verified; None where it is damaged, or not of what lies beside it."""
    try:
        with np.load(path) as copy:
            return [copy[name] for name in names] if copy["origin"] == _origin(path.parent) else None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _origin(folder: Path) -> str | None:
    """What a copy is made of: TFDS's version, and the names, sizes and times of its files; None where unknown."""
    try:
        version = importlib.metadata.version("tensorflow-datasets")
        files = sorted(entry for entry in folder.iterdir() if not entry.name.startswith(_PREFIX))
        about = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    except (OSError, importlib.metadata.PackageNotFoundError):
        return None
    return json.dumps([version, about])
