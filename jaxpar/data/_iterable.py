"""Data sets out of iterables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ._convert import as_dict, concatenate, stack
from ._dataset import Dataset


def collect(elements: Iterable[Any], *, batched: bool = True) -> Dataset:
    """Reads what another library iterates over into one `Dataset`, say test data for `train.evaluate`.

    Args:
        elements: dicts with "image" and "label", or pairs of these, as for `from_iterable`.
        batched: whether an element is a batch, of any length, or one example.

    Raises:
        KeyError: an element without "image" or "label".
        ValueError: no elements, or examples of different shapes.

    >>> import numpy as np
    >>> loader = [(np.zeros((4, 2)), np.arange(4)), (np.zeros((1, 2)), np.arange(1))]
    >>> collect(loader)
    Dataset(5 images float64 (2,), labels int32, source='arrays')
    """
    found = [as_dict(element, ("image", "label")) for element in elements]
    if not found:
        raise ValueError("data.collect: there are no elements")
    join = concatenate if batched else stack
    whole = join([{"image": each["image"], "label": each["label"]} for each in found])
    return Dataset(whole["image"], whole["label"])
