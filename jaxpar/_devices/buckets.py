"""Buckets: many small values travel as one flat array, large ones alone and uncopied.

A collective costs a rendezvous of all devices whatever its size, so 256 values of 1 KB want one; copying
8 values of 4 MB into one buffer costs more than seven rendezvous. With four CPU devices the two costs are equal at
about 16 KB a value, which is the default.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class BucketLimits:
    """When values share a bucket.

    Attributes:
        bucket_bytes: a bucket is closed before it would grow past this.
        alone_bytes: a value of this many bytes or more never enters a bucket.
    """

    bucket_bytes: int = 4 << 20
    alone_bytes: int = 16 << 10

    def __post_init__(self) -> None:
        for name in ("bucket_bytes", "alone_bytes"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be a number of bytes of 0 or more, got {getattr(self, name)!r}")


@functools.lru_cache(maxsize=256)
def plan(avals: tuple[tuple[Shape, Any], ...], limits: BucketLimits = BucketLimits()) -> tuple[tuple[int, ...], ...]:
    """Which values travel together.

    Args:
        avals: (shape, dtype) of each value.
        limits: see `Limits`.

    Returns:
        Groups of positions in `avals`; every position is in exactly one group, the values of a group have one
        dtype, and a group of one travels in its own shape.

    Example:
        >>> plan((((2,), jnp.float32), ((1024, 1024), jnp.float32), ((3,), jnp.float32)))
        ((0, 2), (1,))
    """
    groups: list[list[int]] = []
    still_open: dict[Any, tuple[list[int], int]] = {}
    for position, (shape, dtype) in enumerate(avals):
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if nbytes >= limits.alone_bytes:
            groups.append([position])
            continue
        group, filled = still_open.get(dtype, (None, 0))
        if group is None or filled + nbytes > limits.bucket_bytes:
            group, filled = [], 0
            groups.append(group)
        group.append(position)
        still_open[dtype] = (group, filled + nbytes)
    return tuple(map(tuple, groups))


def plan_of(values: Sequence[Any], limits: BucketLimits) -> tuple[tuple[int, ...], ...]:
    """The plan for these arrays (or tracers)."""
    return plan(tuple((v.shape, v.dtype) for v in values), limits)


def pack(values: Sequence[jax.Array], groups: Sequence[Sequence[int]]) -> list[jax.Array]:
    """One array a group: the values behind one another, flat; a group of one as it is."""
    return [
        values[group[0]] if len(group) == 1 else jnp.concatenate([values[i].reshape(-1) for i in group])
        for group in groups
    ]


def unpack(packed: Sequence[jax.Array], shapes: Sequence[Shape], groups: Sequence[Sequence[int]]) -> list[jax.Array]:
    """The inverse of `pack`: the values again, in their first order and shapes."""
    values: list[Any] = [None] * len(shapes)
    for array, group in zip(packed, groups, strict=True):
        start = 0
        for i in group:
            size = math.prod(shapes[i])
            part = array if len(group) == 1 else jax.lax.slice(array, (start,), (start + size,))
            values[i] = part.reshape(shapes[i])
            start += size
    return values
