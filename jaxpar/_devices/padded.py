"""Batches for virtual shards that the devices cannot share evenly: rows of padding, and the mark of padded batches."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from .fixed_tree import Deal
from .placement import spans_processes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PaddedBatch:
    """A batch with rows at its end that belong to no example, so that each device has room for as many shards.

    `data.batches(..., virtual_shards=V)` gives it where V is no multiple of the number of devices D. The shards of
    B / V rows are dealt to the devices in order, ceil(V / D) to each. A step with `virtual_shards=V` counts B rows.

    Attributes:
        arrays: a pytree of arrays (D * ceil(V / D) * B / V, ...).
        virtual_shards: V.
    """

    arrays: Any
    virtual_shards: int = dataclasses.field(metadata={"static": True})

    def __getitem__(self, name: Any) -> Any:
        """One of the arrays, with the rows of the padding."""
        return self.arrays[name]


def padded_rows(count: int, virtual_shards: int, parts: int) -> int:
    """The rows of a batch of `count` examples in which each part has room for as many shards.

    >>> padded_rows(64, 8, 3), padded_rows(64, 8, 4)
    (72, 64)
    """
    return Deal(virtual_shards, parts).slots * parts * (count // virtual_shards)


def pad_rows(batch: Any, rows: int, axis: int = 0, along: NamedSharding | None = None) -> Any:
    """The batch, or its shapes, with so many rows at its end that belong to no example.

    Args:
        axis: that of the examples.
        along: the sharding of the results for arrays that span processes.
    """

    def pad(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((*x.shape[:axis], x.shape[axis] + rows, *x.shape[axis + 1 :]), x.dtype)
        widths = [(0, rows if i == axis else 0) for i in range(np.ndim(x))]
        if isinstance(x, jax.Array):
            return _padding(tuple(widths), along if spans_processes(x) else None)(x)
        return np.pad(np.asarray(x), np.array(widths))

    return jax.tree.map(pad, batch) if rows else batch


@functools.lru_cache(maxsize=64)
def _padding(widths: tuple[tuple[int, int], ...], sharding: NamedSharding | None) -> Any:
    return jax.jit(lambda x: jnp.pad(x, widths), out_shardings=sharding)
