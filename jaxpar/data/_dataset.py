"""A data set in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from ._batches import Batch, batches


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Images and labels in host memory, and where they came from.

    Make one of your own arrays by `Dataset(images, labels)`, of any shape and dtype. Do not change the arrays
    afterwards, since the devices may hold copies.

    Attributes:
        images: `(n, ...)`. From `load` uint8 `(n, 28, 28, 1)`.
        labels: `(n, ...)`. Integers become int32.
        source: where they came from: "prepared", "files", "debian", "download", or "arrays".
        name: the data set's name.
        split: the split's name.

    Raises:
        ValueError: not as many labels as images, or a label that int32 cannot hold.

    >>> import numpy as np
    >>> Dataset(np.zeros((6, 28, 28, 1), np.uint8), np.arange(6))
    Dataset(6 images uint8 (28, 28, 1), labels int32, source='arrays')
    """

    images: np.ndarray
    labels: np.ndarray
    source: str = "arrays"
    name: str = ""
    split: str = ""

    def __post_init__(self) -> None:
        images, labels = np.asarray(self.images), np.asarray(self.labels)
        if images.ndim == 0 or labels.ndim == 0 or len(images) != len(labels):
            raise ValueError(f"a data set needs one label per image: images {images.shape}, labels {labels.shape}")
        if np.issubdtype(labels.dtype, np.integer) and labels.dtype != np.int32:
            limits = np.iinfo(np.int32)
            if labels.size and not limits.min <= labels.min() <= labels.max() <= limits.max:
                raise ValueError(f"labels are stored as int32; these run from {labels.min()} to {labels.max()}")
            labels = labels.astype(np.int32)
        object.__setattr__(self, "images", images)
        object.__setattr__(self, "labels", labels)

    def __len__(self) -> int:
        return len(self.images)

    def batches(self, batch_size: int, **options: Any) -> Iterator[Batch]:
        """`data.batches(dataset, batch_size, **options)`."""
        return batches(self, batch_size, **options)

    def __repr__(self) -> str:
        name = f"{self.name} {self.split}: " if self.name else ""
        return (
            f"Dataset({name}{len(self)} images {self.images.dtype} {self.images.shape[1:]}, "
            f"labels {self.labels.dtype}, source={self.source!r})"
        )
