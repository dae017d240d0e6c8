"""A hash of the data of a run, as far as they can be known before they are read."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np

from ... import data

_WHOLE = 64 << 20  # bytes of an array that are hashed whole. Of a larger one, as many blocks over all of it
_BLOCK = 1 << 20


def digest_of_data(source: data.Source, examples: int) -> str | None:
    """A hash of arrays and of lists of batches. None for data that are only known when they are read."""
    if isinstance(source, data.CombinedSource):
        digests = [digest_of_data(each, examples) for each in source.sources.values()]
        if None in digests:
            return None
        combined = f"{dict(zip(source.sources, digests, strict=True))} {source.batch_sizes} {source.until}"
        return hashlib.sha256(combined.encode()).hexdigest()[:16]
    arrays: Any = getattr(source, "arrays", None)
    if isinstance(source, data.IterableSource) and isinstance(source.source, (list, tuple)):
        arrays = source.source
    if arrays is None:
        return None
    hasher = hashlib.sha256(str(examples).encode())
    leaves, structure = jax.tree.flatten(arrays)
    hasher.update(str(structure).encode())
    for leaf in leaves:
        if hasattr(leaf, "shape") and not hasattr(leaf, "nbytes"):
            return None  # the images of a record file, each of which is decoded when it is asked for
        array = np.asarray(leaf)
        if array.dtype.hasobject:
            return None
        hasher.update(f"{array.dtype} {array.shape} ".encode())
        blocks = [array]
        if array.nbytes > _WHOLE and array.ndim:
            # Blocks of its rows, evenly spread, the first and the last one among them.
            rows = max(1, _BLOCK * len(array) // array.nbytes)
            starts = np.linspace(0, len(array) - rows, _WHOLE // _BLOCK, dtype=np.int64)
            blocks = [array[start : start + rows] for start in starts]
        for block in blocks:
            hasher.update(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()[:16]
