"""Buckets: small values are sent as one flat array, large values one by one without a copy.

Each collective costs a rendezvous of all devices, so 256 values of 1 KB are best sent by one collective. Copying 8
values of 4 MB into one buffer costs more than seven rendezvous. With four CPU devices the two costs are equal at about
16 KB for each value, which is the default of `BucketLimits`.

`plan` decides which values share a bucket, `pack` joins them, and `unpack` splits the bucket again.
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

from .._core import checks

Shape = tuple[int, ...]
Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class BucketLimits:
    """The sizes that decide which values share a bucket."""

    bucket_bytes: int = 4 << 20  # no bucket of several values is larger than this
    alone_bytes: int = 16 << 10  # a value of this many bytes or more never shares a bucket

    def __post_init__(self) -> None:
        for name in ("bucket_bytes", "alone_bytes"):
            checks.number(getattr(self, name), "BucketLimits", name, "a number of bytes of 0 or more", lambda n: n >= 0)


@functools.lru_cache(maxsize=256)
def plan(avals: tuple[tuple[Shape, Any], ...], limits: BucketLimits = BucketLimits()) -> Groups:
    """Which values travel together: groups of positions in `avals`, the (shape, dtype) of each value.

    Every position is in exactly one group, and the values of a group have one dtype.

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


def plan_of(values: Sequence[Any], limits: BucketLimits) -> Groups:
    """The plan for these arrays or tracers."""
    return plan(tuple((v.shape, v.dtype) for v in values), limits)


def consecutive(groups: Sequence[Sequence[int]]) -> tuple[list[int], Groups]:
    """The positions in some groups of a plan, and these groups over them, counted from 0.

    So programs that pack and unpack some groups of a plan depend on their sizes only.

    Example:
        >>> consecutive([(0, 3), (5,)])
        ([0, 3, 5], ((0, 1), (2,)))
    """
    positions = [i for group in groups for i in group]
    count = iter(range(len(positions)))
    return positions, tuple(tuple(next(count) for _ in group) for group in groups)


def pack(values: Sequence[Any], groups: Sequence[Sequence[int]], axis: int = 0, xp: Any = jnp) -> list[Any]:
    """One array for each group: its values one after another along an axis.

    Args:
        values: the arrays of one group, all of one dtype.
        groups: positions in `values`, as from `plan`.
        axis: the values are joined along this axis. The axes before it are kept, and must be equal in a group. The
            axes from it on are flattened.
        xp: `jax.numpy`, or `numpy` for arrays in host memory.

    Returns:
        An array (*first axes, sum of the flattened sizes) for each group, and the value of a group of one as it is.

    Example:
        >>> values = [jnp.ones((2, 3)), jnp.zeros((2,)), jnp.ones((2, 1))]
        >>> [array.shape for array in pack(values, [(0, 1), (2,)])]
        [(8,), (2, 1)]
        >>> [array.shape for array in pack(values, [(0, 1), (2,)], axis=1)]
        [(2, 4), (2, 1)]
    """

    def flat(value: Any) -> Any:
        return value.reshape((*value.shape[:axis], math.prod(value.shape[axis:])))

    return [
        values[group[0]] if len(group) == 1 else xp.concatenate([flat(values[i]) for i in group], axis=axis)
        for group in groups
    ]


def unpack(
    packed: Sequence[jax.Array], shapes: Sequence[Shape], groups: Sequence[Sequence[int]], axis: int = 0
) -> list[jax.Array]:
    """Split buckets into values: the inverse of `pack`.

    Args:
        packed: an array for each group. That of a group of one may be flat or not.
        shapes: of each value, without the axes before `axis`. Those are taken from the packed array, which may have
            got them in between: a gather over devices adds one.
        groups, axis: as for `pack`.

    Returns:
        The values in their first order, of shape (*first axes, *shape).

    Example:
        >>> [value.tolist() for value in unpack([jnp.arange(4), jnp.array([7])], [(2,), (), (2,)], [(0, 2), (1,)])]
        [[0, 1], 7, [2, 3]]
        >>> unpack([jnp.zeros((5, 4))], [(3,), ()], [(0, 1)], axis=1)[1].shape
        (5,)
    """
    values: list[Any] = [None] * len(shapes)
    for array, group in zip(packed, groups, strict=True):
        start = 0
        for i in group:
            stop = start + math.prod(shapes[i])
            part = array if len(group) == 1 else jax.lax.slice_in_dim(array, start, stop, axis=axis)
            values[i] = part.reshape(array.shape[:axis] + tuple(shapes[i]))
            start = stop
    return values
