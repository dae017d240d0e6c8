"""Sums of compressed values that come back to every device, in the way that sends least.

Each of N devices owns 1/N of what is summed. It gets the codes of its share from all, decodes and adds them in the
order of the devices, and its sum goes to all. Four ways give the same sums, and the bytes decide:

- `gather`: every device gets all codes and adds them itself. Best for few devices.
- `owners`: codes to the owners, their sums to all: as integers where the compressor has a `Grid`, else as numbers.
- `lanes`: one sum of integers, several in a word. For exact grids and small values, which owners would pad.
- `dense`: decoded values to the owners, their sums to all. For codes that are more than that, or cannot be cut.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._devices import buckets, collectives
from .._devices.buckets import BucketLimits
from ..compression import (
    Compressor,
    _Grid as Grid,
    _pack_lanes as pack_lanes,
    _pack_planes as pack_planes,
    _RowCompressor as RowCompressor,
    _unpack_lanes as unpack_lanes,
    _unpack_planes as unpack_planes,
    decode_sum,
)

_PLANE = 32  # elements: the least of which an owner packs the sums
_FLOAT32 = 4  # bytes

Payloads = Sequence[Any]


def sum_payloads(
    compressor: Compressor, payloads: Payloads, values: Sequence[jax.Array], axis_name: str, limits: BucketLimits
) -> list[jax.Array]:
    """The sums over the axis of what was encoded as these payloads, on every device.

    Args:
        payloads: of this device, one for each value.
        values: flat, of which shapes and dtypes are used.
    """
    if compressor.elementwise:
        return _sum_words(compressor, payloads, values, axis_name, limits)
    count = lax.axis_size(axis_name)
    ways = [_way_of_value(compressor, p, v, count) for p, v in zip(payloads, values, strict=True)]
    sums: list[Any] = [None] * len(values)
    for way, run in (("gather", _gather_values), ("owners", _own_values), ("dense", _dense_values)):
        chosen = [i for i, w in enumerate(ways) if w == way]
        if chosen:
            found = run(compressor, [payloads[i] for i in chosen], [values[i] for i in chosen], axis_name, limits)
            for i, total in zip(chosen, found, strict=True):
                sums[i] = total
    return sums


def exchange(
    payloads: Payloads, collective: Callable[[jax.Array], jax.Array], lead: int, limits: BucketLimits
) -> list[Any]:
    """The payloads with the devices as first axis, after one collective for each bucket of one dtype.

    `lead` 0: each array goes whole to every device. `lead` 1: row i of each array goes to device i.
    """
    leaves, structure = jax.tree.flatten(list(payloads))
    shapes = [leaf.shape[lead:] for leaf in leaves]
    groups = buckets.plan_of(leaves, limits)
    received = [collective(array) for array in buckets.pack(leaves, groups, axis=lead)]
    return structure.unflatten(buckets.unpack(received, shapes, groups, axis=1))


def to_owners(rows: jax.Array, axis_name: str) -> jax.Array:
    """(devices, ...): row i of every device, on device i."""
    return lax.all_to_all(rows, axis_name, split_axis=0, concat_axis=0, tiled=True)


# Values whose codes may be joined and cut anywhere.


def _sum_words(
    compressor: Compressor, payloads: Payloads, values: Sequence[jax.Array], axis_name: str, limits: BucketLimits
) -> list[jax.Array]:
    leaves, structure = jax.tree.flatten(list(payloads))
    groups = buckets.plan_of(leaves, limits)
    one = jax.tree.structure(payloads[0]) if payloads else structure
    sums = [_sum_of_words(compressor, w, one, axis_name) for w in buckets.pack(leaves, groups)]
    parts = buckets.unpack(sums, [(leaf.size * compressor.per_word,) for leaf in leaves], groups)
    return [part[: v.size].astype(v.dtype) for part, v in zip(parts, values, strict=True)]


def _sum_of_words(compressor: Compressor, words: jax.Array, structure: Any, axis_name: str) -> jax.Array:
    """The flat float32 sum of all elements of some words."""
    count, size = lax.axis_size(axis_name), words.size * compressor.per_word

    def decode(some: jax.Array) -> jax.Array:
        return compressor.decode(structure.unflatten([some]), (some.size * compressor.per_word,), "float32")

    grid = compressor.grid(count)
    way = way_of_words(words.size, words.dtype.itemsize, compressor.per_word, grid, count)
    if way == "gather":
        return decode_sum(
            compressor, structure.unflatten([collectives.gather_stack(words, axis_name)]), (size,), "float32"
        )
    if way == "lanes":
        return _sum_lanes(grid, compressor.grid(1), decode(words), axis_name)
    if way == "dense":
        return _sum_dense(decode(words), axis_name)
    per_row = chunk_of(size, compressor.per_word, grid, count) // compressor.per_word
    rows = jnp.pad(words, (0, count * per_row - words.size)).reshape(count, per_row)
    received = to_owners(rows, axis_name)
    with jax.named_scope("decode and sum"):
        share = collectives.sum_by_loop(lambda i: decode(received[i]), count)
    return _gather_share(grid, share, axis_name)[:size]


def _gather_share(grid: Grid | None, share: jax.Array, axis_name: str) -> jax.Array:
    """The shares of all owners one after another."""
    if grid is None or grid.bits >= 8 * _FLOAT32:
        return collectives.gather_stack(share, axis_name).reshape(-1)
    with jax.named_scope("encode the sum"):
        own = pack_planes(grid.encode(share), grid.bits)
    packed = collectives.gather_stack(own, axis_name)
    with jax.named_scope("decode the sums"):
        return grid.decode(unpack_planes(packed.reshape(-1), grid.bits))


def _sum_lanes(grid: Any, one: Any, value: jax.Array, axis_name: str) -> jax.Array:
    """The sum by integers of which several share a word. The code of a sum is the sum of the codes."""
    packed = lax.psum(pack_lanes(one.encode(value), grid.bits), axis_name)
    return grid.decode(unpack_lanes(packed, grid.bits, value.size))


def _sum_dense(value: jax.Array, axis_name: str) -> jax.Array:
    """The sum of flat values, added in the order of the devices."""
    received = to_owners(collectives.to_rows(value, lax.axis_size(axis_name)), axis_name)
    share = collectives.sum_by_loop(lambda i: received[i], received.shape[0])
    return collectives.gather_stack(share, axis_name).reshape(-1)[: value.size]


def way_of_words(words: int, itemsize: int, per_word: int, grid: Grid | None, count: int) -> str:
    """The way by which a device sends least."""
    cost = bytes_of_words(words, itemsize, per_word, grid, count)
    return min(cost, key=lambda way: cost[way])


def bytes_of_words(words: int, itemsize: int, per_word: int, grid: Grid | None, count: int) -> dict[str, float]:
    """What each way sends: bytes of the whole, of which a device sends (N-1)/N."""
    size = words * per_word
    chunk = chunk_of(size, per_word, grid, count)
    back = min(32, grid.bits if grid is not None else 32) / 8
    cost = {
        "gather": count * words * itemsize,
        "owners": count * (chunk // per_word * itemsize + chunk * back),
        "dense": count * 2 * _FLOAT32 * collectives.chunk_size(size, count),
    }
    if grid is not None and grid.is_exact:
        cost["lanes"] = 2 * 4 * -(-size // (32 // grid.bits))
    return cost


def chunk_of(size: int, per_word: int, grid: Grid | None, count: int) -> int:
    """Elements of an owner's share: whole words, and whole groups of sums."""
    unit = per_word if grid is None else max(per_word, _PLANE)
    return unit * collectives.chunk_size(size, unit * count)


# Values that are encoded one by one.


def _way_of_value(compressor: Compressor, payload: Any, value: jax.Array, count: int) -> str:
    chunk = collectives.chunk_size(value.size, count)
    cost = {
        "gather": count * _nbytes(payload),
        "dense": count * 2 * _FLOAT32 * chunk,
    }
    if isinstance(compressor, RowCompressor):
        rows = jax.eval_shape(functools.partial(compressor.cut, shape=value.shape, count=count), payload)
        cost["owners"] = _nbytes(rows) + count * chunk * value.dtype.itemsize
    return min(cost, key=lambda way: cost[way])


def _nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _gather_values(
    compressor: Compressor, payloads: Payloads, values: Sequence[jax.Array], axis_name: str, limits: BucketLimits
) -> list[jax.Array]:
    gathered = exchange(payloads, functools.partial(collectives.gather_stack, axis_name=axis_name), 0, limits)
    return [decode_sum(compressor, p, v.shape, v.dtype) for p, v in zip(gathered, values, strict=True)]


def _own_values(
    compressor: Compressor, payloads: Payloads, values: Sequence[jax.Array], axis_name: str, limits: BucketLimits
) -> list[jax.Array]:
    count, mine = lax.axis_size(axis_name), lax.axis_index(axis_name)
    assert isinstance(compressor, RowCompressor)
    rows = [compressor.cut(p, v.shape, count) for p, v in zip(payloads, values, strict=True)]
    received = exchange(rows, functools.partial(to_owners, axis_name=axis_name), 1, limits)

    def share(of_all: Any, value: jax.Array) -> jax.Array:
        decode = lambda i: compressor.decode_row(jax.tree.map(lambda x: x[i], of_all), mine)  # noqa: E731
        return collectives.sum_by_loop(decode, count).astype(value.dtype)

    shares = [share(r, v) for r, v in zip(received, values, strict=True)]
    return collectives.all_gather(shares, [v.shape for v in values], axis_name, limits)


def _dense_values(
    compressor: Compressor, payloads: Payloads, values: Sequence[jax.Array], axis_name: str, limits: BucketLimits
) -> list[jax.Array]:
    whole = [compressor.decode(p, v.shape, "float32") for p, v in zip(payloads, values, strict=True)]
    sums = collectives.map_buckets(functools.partial(_sum_dense, axis_name=axis_name), whole, limits)
    return [s.astype(v.dtype) for s, v in zip(sums, values, strict=True)]
