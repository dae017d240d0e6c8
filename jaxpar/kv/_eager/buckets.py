"""The buckets of one device, for a push at the prompt."""

from __future__ import annotations

import functools
from typing import Any

import jax

from ..._devices import buckets
from ..._devices.buckets import BucketLimits, Groups, Shape
from .._store import KVStore, Lists

_ALONE = BucketLimits(alone_bytes=0)


def shapes_of_lists(pushed: Lists) -> tuple[Shape, ...]:
    return tuple(vs[0].shape for vs in pushed.values())


def dtypes_of(store: KVStore, pushed: Lists) -> tuple[Any, ...]:
    return tuple(store.values[k].dtype for k in pushed)


def limits_of(store: KVStore) -> BucketLimits:
    """Which values share a bucket. With a compressor none do here: it has buckets of its own."""
    return store.limits if store.compressor is None else _ALONE


def pack(values: list[jax.Array], dtypes: tuple[Any, ...], groups: Groups) -> list[jax.Array]:
    """One device's buckets. A bucket of one value that has the right dtype and an axis is not copied."""
    ready = {g[0] for g in groups if len(g) == 1 and values[g[0]].ndim and values[g[0]].dtype == dtypes[g[0]]}
    rest = [g for g in groups if g[0] not in ready]
    if not rest:
        return [values[g[0]] for g in groups]
    order = [i for g in rest for i in g]
    packed = iter(_pack([values[i] for i in order], tuple(map(len, rest)), tuple(dtypes[i] for i in order)))
    return [values[g[0]] if g[0] in ready else next(packed) for g in groups]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _pack(values: list[jax.Array], lengths: tuple[int, ...], dtypes: tuple[Any, ...]) -> list[jax.Array]:
    """The program depends on the lengths of the groups, not on the positions of their values."""
    cast = [v.astype(dtype) for v, dtype in zip(values, dtypes, strict=True)]
    _, groups = buckets.consecutive([range(length) for length in lengths])
    return [array.reshape(-1) for array in buckets.pack(cast, groups)]
