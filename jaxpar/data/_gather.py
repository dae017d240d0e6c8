"""Programs that gather batches on the devices, several at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from ._convert import convert_image
from ._device_copies import Examples
from ._split import Split

_MOST_BATCHES = 8  # of one program,
_MOST_BYTES = 16 << 20  # and their size on all devices together, except for one batch


def batches_per_program(dataset: Examples, count: int, dtype: Any) -> int:
    """How many batches of `count` one program gathers: starting it costs as much as a small batch."""
    size = dataset.images[:1].size * (dataset.images.dtype if dtype is None else dtype).itemsize
    return max(1, min(_MOST_BATCHES, _MOST_BYTES // max(1, count * size)))


@functools.lru_cache(maxsize=32)
def gather(
    count: int, several: int, split: Split | None, dtype: Any, stacked: bool = False
) -> Callable[..., tuple[Any, jax.Array]]:
    """The program `(images, labels, rows, cursor) -> (the next batches, the new cursor)`.

    Each device gathers its share. The cursor stays on the devices, so that a batch needs nothing from the host. Past
    the end of the order comes its last example, again and again. The rows of a padding are any examples.

    Args:
        count: examples in a batch, over all devices.
        several: how many batches.
        split: how a batch is split over devices. None: it is on the default device.
        stacked: the batches are one pytree with one more axis in front. Otherwise they are a list.
    """

    def local(
        images: jax.Array,
        labels: jax.Array,
        rows: jax.Array,
        cursor: jax.Array,
        *,
        share: int = count,
        rank: jax.Array | int = 0,
    ) -> tuple[Any, jax.Array]:
        def batch(at: Any) -> dict[str, jax.Array]:
            mine = rows.at[cursor + rank * share + (at + np.arange(share, dtype=np.int32))].get(mode="clip")
            image, label = (x.at[mine].get(mode="promise_in_bounds") for x in (images, labels))
            image = lax.optimization_barrier(image)  # XLA on a CPU takes three times as long for both in one loop
            return {"image": convert_image(image, dtype), "label": label}

        firsts = np.arange(several, dtype=np.int32) * count
        found = batch(firsts[:, None]) if stacked else [batch(first) for first in firsts]
        return found, cursor + several * count

    if split is None:
        return jax.jit(local)

    def local_share(*args: jax.Array) -> tuple[Any, jax.Array]:
        rank = lax.axis_index(split.axes) if split.axes else 0
        return local(*args, share=split.rows(count) // split.parts, rank=rank)

    mesh, spec = split.mesh, P(None, split.axes) if stacked else P(split.axes)
    shards = jax.shard_map(local_share, mesh=mesh, in_specs=P(), out_specs=(spec, P()))
    return jax.jit(shards, out_shardings=(NamedSharding(mesh, spec), NamedSharding(mesh, P())))
