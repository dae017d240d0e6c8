"""The batch of a step: its sizes, and how its rows are dealt to devices."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from ..._core import checks
from ..._devices.fixed_tree import Deal
from ..._devices.padded import PaddedBatch
from ..._devices.placement import spans_processes
from ..._devices.user_mesh import without_types


def split_batch(batch: Any, count: int) -> Any:
    """The arrays of a batch with a new first axis of this length, as `pmap` takes them."""
    return jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), batch)


def check_batch(batch: Any, devices: int, parts: int, axis: int = 0) -> None:
    """`ValueError` where a batch cannot be divided by the devices, or a share by the microbatches.

    `TypeError` for a leaf that is no array of numbers.
    """
    checks.arrays_of_numbers(batch, "train step: batch")
    n = checks.batch_length(batch, "train step", axis)
    if parts == 1:
        checks.even_share(n, devices, "train step", ", or pad it")
    if n % (devices * parts) == 0:
        return
    size = n // (devices * parts) * devices * parts or devices * parts
    if n % devices:
        raise ValueError(
            f"train step: a batch of {n} cannot be divided by {devices} devices; use a batch of {size}, or pad it"
        )
    raise ValueError(
        f"train step: a batch of {n} gives each of {devices} devices {n // devices} examples, which cannot be cut "
        f"in accumulate={parts} microbatches; use a batch of {size}"
    )


def lay_out(batch: Any, deal: Deal, parts: int, along: NamedSharding, axis: int = 0) -> Any:
    """The arrays of a batch with as many rows for each device, the last ones of which may belong to no example.

    Args:
        batch: of the user, or a `PaddedBatch`.
        deal: how its shards are dealt.
        parts: the number of microbatches that a shard is cut in.
        along: the sharding of the result, where it is needed to make it.
        axis: that of the examples.

    Raises:
        ValueError: the batch cannot be cut in as many shards, or was padded for others.
    """
    if deal.is_even and not isinstance(batch, PaddedBatch):
        return batch
    if isinstance(batch, PaddedBatch):
        if batch.virtual_shards != deal.terms:
            raise ValueError(
                f"train step: this batch was padded for {batch.virtual_shards} virtual shards, and the step has "
                f"{deal.terms}; make batches by data.batches(..., virtual_shards={deal.terms})"
            )
        return batch.arrays
    check_shards(batch, deal, parts, axis)
    n = checks.batch_length(batch, "train step", axis)
    rows = (deal.slots * deal.devices - deal.terms) * (n // deal.terms)
    return jax.tree.map(lambda x: _pad(x, rows, axis, along), without_types(batch))


def check_shards(batch: Any, deal: Deal, parts: int, axis: int = 0) -> None:
    """`ValueError` where a batch cannot be cut in shards, or a shard in microbatches."""
    checks.arrays_of_numbers(batch, "train step: batch")
    n = checks.batch_length(batch, "train step", axis)
    if n % (deal.terms * parts) == 0:
        return
    size = n // (deal.terms * parts) * deal.terms * parts or deal.terms * parts
    each = f"each in accumulate={parts} microbatches" if parts > 1 else "which have as many examples each"
    raise ValueError(
        f"train step: a batch of {n} cannot be cut in {deal.terms} virtual shards, {each}; use a batch of {size}"
    )


def check_laid_out(batch: Any, deal: Deal, parts: int, axis: int = 0) -> None:
    """The same for a batch that is laid out."""
    check_shards(batch, Deal(deal.slots * deal.devices, deal.devices), parts, axis)


def _pad(array: Any, rows: int, axis: int, along: NamedSharding) -> Any:
    widths = tuple((0, rows if i == axis else 0) for i in range(np.ndim(array)))
    if isinstance(array, jax.ShapeDtypeStruct):
        shape = tuple(n + after for n, (_, after) in zip(array.shape, widths, strict=True))
        return jax.ShapeDtypeStruct(shape, array.dtype)
    if isinstance(array, jax.Array):
        return _padding(widths, along if spans_processes(array) else None)(array)
    return np.pad(np.asarray(array), widths)


@functools.lru_cache(maxsize=64)
def _padding(widths: tuple[tuple[int, int], ...], sharding: NamedSharding | None) -> Any:
    return jax.jit(lambda x: jnp.pad(x, widths), out_shardings=sharding)
