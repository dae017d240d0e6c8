"""Sums over devices of compressed values: bucket, encode, exchange, decode and add.

Elementwise compressors encode whole buckets. The others encode value by value, and their payloads share buckets. Only
payloads are sent between devices.

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
from .._devices.buckets import BucketLimits, Shape
from .._devices.user_mesh import unsplit
from ..compression import (
    Compressor,
    LinearCompressor,
    _allreduce_two_way as allreduce_two_way,
    _Grid as Grid,
    _is_two_way as is_two_way,
    _pack_lanes as pack_lanes,
    _pack_planes as pack_planes,
    _reduce_scatter_two_way as reduce_scatter_two_way,
    _RowCompressor as RowCompressor,
    _start_owner as start_owner,
    _unpack_lanes as unpack_lanes,
    _unpack_planes as unpack_planes,
    decode_sum,
)

_PLANE = 32  # elements: the least of which an owner packs the sums
_FLOAT32 = 4  # bytes

State = Any
Sums = tuple[list[jax.Array], list[State]]
Payloads = Sequence[Any]


def start(
    compressor: Compressor | LinearCompressor,
    shapes: Sequence[Shape],
    dtypes: Sequence[Any],
    seeds: Sequence[Any],
    rows: int | None,
    count: int,
) -> list[State]:
    """The state for each value on a device that has pushed nothing.

    Args:
        rows: with a number, each state has one part for each row of a split value, and `shapes` are those of a row.
        count: the devices. Each owns a share of a value that is not split.
    """
    init = compressor.init if rows is None else functools.partial(_start_rows, compressor, rows)
    states = [init(shape, dtype, seed=seed) for shape, dtype, seed in zip(shapes, dtypes, seeds, strict=True)]
    if rows is None and is_two_way(compressor):
        states = [{**state, **start_owner(shape, count)} for state, shape in zip(states, shapes, strict=True)]
    return states


def _start_rows(compressor: Any, rows: int, shape: Shape, dtype: Any, *, seed: Any) -> State:
    seeds = seed * jnp.uint32(rows) + jnp.arange(rows, dtype=jnp.uint32)
    return jax.vmap(lambda s: compressor.init(shape, dtype, seed=s))(seeds)


def allreduce(
    compressor: Compressor | LinearCompressor,
    values: Sequence[jax.Array],
    states: Sequence[State],
    axis_name: str,
    limits: BucketLimits,
) -> Sums:
    """The sums over the axis on every device, and the new states of this device."""
    values = [unsplit(v) for v in values]
    if isinstance(compressor, LinearCompressor):
        return _linear(compressor, values, states, axis_name, limits)
    if is_two_way(compressor):
        return allreduce_two_way(values, states, axis_name, limits)
    shapes = [v.shape for v in values]
    groups = buckets.plan_of(values, limits) if compressor.elementwise else tuple((i,) for i in range(len(values)))
    flat = [array.reshape(-1) for array in buckets.pack(values, groups)]
    joined = [_join([states[i] for i in g]) for g in groups]
    coded = [compressor.encode(v, s) for v, s in zip(flat, joined, strict=True)]
    sums = _sum_payloads(compressor, [payload for payload, _ in coded], flat, axis_name, limits)
    return buckets.unpack(sums, shapes, groups), _split([state for _, state in coded], shapes, groups)


def reduce_scatter(
    compressor: Compressor | LinearCompressor,
    values: Sequence[jax.Array],
    states: Sequence[State],
    axis_name: str,
    limits: BucketLimits,
) -> Sums:
    """This device's (chunk,) of each sum over the axis. Every row is encoded for the device that keeps it."""
    values = [unsplit(v) for v in values]
    if isinstance(compressor, LinearCompressor):
        sums, states = _linear(compressor, values, states, axis_name, limits)
        return [collectives.own_chunk(s, axis_name) for s in sums], states
    if is_two_way(compressor):
        return reduce_scatter_two_way(values, states, axis_name, limits)
    shards = lax.axis_size(axis_name)
    rows = [collectives.to_rows(v, shards) for v in values]
    coded = [jax.vmap(compressor.encode)(r, s) if r.size else ({}, s) for r, s in zip(rows, states, strict=True)]
    send = functools.partial(_to_owners, axis_name=axis_name)
    exchanged = _exchange([payload for payload, _ in coded], send, 1, limits)
    sums = [
        decode_sum(compressor, payloads, r.shape[1:], r.dtype) if r.size else r[0]
        for payloads, r in zip(exchanged, rows, strict=True)
    ]
    return sums, [state for _, state in coded]


def _linear(
    compressor: LinearCompressor,
    values: Sequence[jax.Array],
    states: Sequence[State],
    axis_name: str,
    limits: BucketLimits,
) -> Sums:
    def psum(tree: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        return structure.unflatten(collectives.allreduce(leaves, axis_name, limits))

    both = [compressor.allreduce(v, s, psum) for v, s in zip(values, states, strict=True)]
    return [total for total, _ in both], [state for _, state in both]


def _join(states: Sequence[State]) -> State:
    """One state for a bucket: the residuals one after another, the rest as the first one has it."""
    (residual,) = buckets.pack([s["residual"] for s in states], [range(len(states))])
    return {**states[0], "residual": residual.reshape(-1)}


def _split(joined: Sequence[State], shapes: Sequence[Shape], groups: buckets.Groups) -> list[State]:
    """The inverse: the state of each value."""
    residuals = buckets.unpack([state["residual"] for state in joined], shapes, groups)
    rest = {i: state for state, group in zip(joined, groups, strict=True) for i in group}
    return [{**rest[i], "residual": residual} for i, residual in enumerate(residuals)]


# The exchange of payloads.


def _sum_payloads(
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


def _exchange(
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


def _to_owners(rows: jax.Array, axis_name: str) -> jax.Array:
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
    """The flat float32 sum of all elements of some words, in the way that sends least."""
    count, per_word = lax.axis_size(axis_name), compressor.per_word
    size, grid = words.size * per_word, compressor.grid(count)

    def decode(some: jax.Array) -> jax.Array:
        return compressor.decode(structure.unflatten([some]), (some.size * per_word,), "float32")

    way = way_of_words(words.size, words.dtype.itemsize, per_word, grid, count)
    if way == "gather":
        every = structure.unflatten([collectives.gather_stack(words, axis_name)])
        return decode_sum(compressor, every, (size,), "float32")
    if way == "lanes":
        return _sum_lanes(grid, compressor.grid(1), decode(words), axis_name)
    if way == "dense":
        return _sum_dense(decode(words), axis_name)
    # An owner's share is a row of whole words, of which the last ones are padded.
    words_of_share = chunk_of(size, per_word, grid, count) // per_word
    rows = jnp.pad(words, (0, count * words_of_share - words.size)).reshape(count, words_of_share)
    received = _to_owners(rows, axis_name)
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
    received = _to_owners(collectives.to_rows(value, lax.axis_size(axis_name)), axis_name)
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
    gathered = _exchange(payloads, functools.partial(collectives.gather_stack, axis_name=axis_name), 0, limits)
    return [decode_sum(compressor, p, v.shape, v.dtype) for p, v in zip(gathered, values, strict=True)]


def _own_values(
    compressor: Compressor, payloads: Payloads, values: Sequence[jax.Array], axis_name: str, limits: BucketLimits
) -> list[jax.Array]:
    count, mine = lax.axis_size(axis_name), lax.axis_index(axis_name)
    assert isinstance(compressor, RowCompressor)
    rows = [compressor.cut(p, v.shape, count) for p, v in zip(payloads, values, strict=True)]
    received = _exchange(rows, functools.partial(_to_owners, axis_name=axis_name), 1, limits)

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
