"""A data set in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from .._core.arrays import check_plain
from .._core.calls import answers_class
from ._batches import Batch, dataset_batches, rows_of_parts


@answers_class("data.Dataset")
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Images and labels in host memory.

    `Dataset(images, labels)` takes your own arrays, of any shape and dtype. Do not change the arrays afterwards, since
    the devices may hold copies.

    Attributes:
        images: `(n, ...)`. `load` gives uint8 `(n, 28, 28, 1)` for Fashion-MNIST.
        labels: `(n, ...)`. Integers become int32.
        source: the origin: "prepared", "files", "debian", "download", or "arrays".
        name: the data set's name.
        part: the part of the data set, such as "train".

    Raises:
        ValueError: the numbers of images and labels differ, or int32 cannot hold a label.

    >>> import numpy as np
    >>> Dataset(np.zeros((6, 28, 28, 1), np.uint8), np.arange(6))
    Dataset(6 images uint8 (28, 28, 1), labels int32, source='arrays')
    """

    images: np.ndarray
    labels: np.ndarray
    source: str = "arrays"
    name: str = ""
    part: str = ""

    def __post_init__(self) -> None:
        check_plain(self.images, "Dataset: images")
        check_plain(self.labels, "Dataset: labels")
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
        return dataset_batches(self, batch_size, **options)

    def split(
        self, fraction: float | int, rng: jax.Array | int | None = None, *, shuffle: bool = True
    ) -> tuple[Dataset, Dataset]:
        """Split into two data sets, for example for training and validation.

        The same arguments give the same split on every machine. Each part keeps the stored order.

        Args:
            fraction: the share of examples in the first part, between 0 and 1, rounded to whole examples; or an int,
                their number.
            rng: a random key, or an int seed, that draws the examples of the first part. None is the seed 0.
            shuffle: False puts the first examples into the first part, as for a time series. Then the labels must not
                be sorted.

        Returns:
            (the first part, the rest). Neither is empty.

        Raises:
            TypeError: `fraction` is not a number, or `rng` is not a key.
            ValueError: a part would be empty.

        >>> import numpy as np
        >>> dataset = Dataset(np.zeros((10, 2)), np.arange(10))
        >>> some, rest = dataset.split(0.8)
        >>> len(some), len(rest), sorted([*some.labels.tolist(), *rest.labels.tolist()]) == list(range(10))
        (8, 2, True)
        """
        first, rest = rows_of_parts(len(self), fraction, rng, shuffle, "Dataset.split")
        return self._take(first), self._take(rest)

    def _take(self, rows: np.ndarray) -> Dataset:
        return dataclasses.replace(self, images=self.images[rows], labels=self.labels[rows])

    def __repr__(self) -> str:
        name = f"{self.name} {self.part}: " if self.name else ""
        return (
            f"Dataset({name}{len(self)} images {self.images.dtype} {self.images.shape[1:]}, "
            f"labels {self.labels.dtype}, source={self.source!r})"
        )
