"""A push as a pure function of arrays: aggregate, then update. Runs under `jit`, `pmap`, `shard_map`, `vmap`."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._core import checks
from .._devices import collectives
from . import _compressed
from ._store import Arrays, Changes as Changes, KVStore, shapes_of, shards, with_changes as with_changes
from ._update import update

POSITION = "position"  # the axis along which a pushed list of values lies


def axis_size(axis_name: str, what: str) -> int:
    """The number of devices along a mapped axis; a clear error where there is no such axis."""
    try:
        return lax.axis_size(axis_name)
    except NameError as error:
        raise NameError(
            f"{what}: axis_name={axis_name!r} is the axis of no pmap or shard_map around this call; leave it out "
            "for values outside of them"
        ) from error


def compressed_keys(store: KVStore, keys: Iterable[int]) -> set[int]:
    """The keys whose values are smaller compressed than plain; the others are sent as they are."""
    if store.compressor is None:
        return set()
    shapes = shapes_of(store)
    return {k for k in keys if store.compressor.pays(shapes[k], store.values[k].dtype)}


def start_residual(store: KVStore, key: int, seed: Any) -> Any:
    """What the compressor remembers for a key on one device before the first push."""
    shape, dtype = shapes_of(store)[key], store.values[key].dtype
    assert store.compressor is not None
    rows = None
    if store.kind == "sharded" and not store.compressor.linear:
        rows = shards(store)
        shape = (collectives.chunk_size(math.prod(shape), rows),)
    return _compressed.start(store.compressor, shape, dtype, jnp.asarray(seed, jnp.uint32), rows)


def _seed(key: int, device: Any) -> Any:
    """Tells the random streams of keys and devices apart."""
    return jnp.uint32(key % (1 << 32)) * jnp.uint32(0x9E3779B1) + jnp.asarray(device, jnp.uint32)


def start_residuals(store: KVStore, key: int, count: int) -> Any:
    """The states of a key for `count` devices, the devices as first axis."""
    return jax.vmap(lambda device: start_residual(store, key, _seed(key, device)))(jnp.arange(count))


def reduce(store: KVStore, pushed: Arrays, axis_name: str) -> tuple[Arrays, dict[int, Any]]:
    """The sum of each value over the axis, and the new residuals of this device.

    Kind `sharded` gives this device's (chunk,) of the sum, the other kinds the whole sum. Residuals come back
    in the shapes they had in the store.
    """
    if store.kind == "sharded" and axis_size(axis_name, "kv.push") != shards(store):
        raise ValueError(
            f"kv.push: the axis {axis_name!r} has {lax.axis_size(axis_name)} devices, but the store of kind "
            f"'sharded' was made for {shards(store)}"
        )
    small = compressed_keys(store, pushed)
    plain = [k for k in pushed if k not in small]
    summed: Arrays = {}
    if plain:
        by_kind = {"local": collectives.gather_sum, "sharded": collectives.reduce_scatter}
        sums = by_kind.get(store.kind, collectives.allreduce)([pushed[k] for k in plain], axis_name, store.limits)
        summed.update(zip(plain, sums, strict=True))
    residuals: dict[int, Any] = {}
    packed = [k for k in pushed if k in small]
    if packed:
        assert store.compressor is not None
        own = [_own_residual(store, k, axis_name) for k in packed]
        send = _compressed.reduce_scatter if store.kind == "sharded" else _compressed.allreduce
        sums, states = send(store.compressor, [pushed[k] for k in packed], [s for s, _ in own], axis_name, store.limits)
        summed.update(zip(packed, sums, strict=True))
        for k, state, (_, like) in zip(packed, states, own, strict=True):
            residuals[k] = jax.tree.map(lambda new, old: new.reshape(old.shape), state, like)
    return {k: summed[k] for k in pushed}, residuals


def _own_residual(store: KVStore, key: int, axis_name: str) -> tuple[Any, Any]:
    """This device's state in the compressor's shapes, and the leaves as the store holds them.

    Under `shard_map` the first axis, the devices, is still there with length 1; under `pmap` it is gone.
    """
    fresh = start_residual(store, key, _seed(key, lax.axis_index(axis_name)))
    held = store.residuals.get(key)
    if held is None:
        return fresh, jax.tree.map(lambda leaf: leaf[None], fresh)
    return jax.tree.map(lambda leaf, shape: leaf.reshape(shape.shape), held, fresh), held


def held_residual(store: KVStore, key: int, axis_name: str) -> Any:
    """This device's state of a key before a push, as the store holds it or will hold it."""
    return _own_residual(store, key, axis_name)[1]


def local_sums(store: KVStore, pushed: dict[int, list[jax.Array]]) -> Arrays:
    """The sum of each key's own list of values, in the stored dtype and in the order of the list."""
    return {
        k: functools.reduce(operator.add, [v.astype(store.values[k].dtype) for v in values])
        for k, values in pushed.items()
    }


def push(store: KVStore, pushed: dict[int, list[jax.Array]], axis_name: str | None) -> Changes:
    """What a push changes."""
    if axis_name is None:
        sums, residuals = _sums_of_lists(store, pushed)
    else:
        axis_size(axis_name, "kv.push")
        sums, residuals = reduce(store, local_sums(store, pushed), axis_name)
    return Changes(*update(store, sums), residuals)


def _sums_of_lists(store: KVStore, pushed: dict[int, list[jax.Array]]) -> tuple[Arrays, dict[int, Any]]:
    """Sums without a mapped axis: each position of a list is a device with a residual of its own."""
    small = compressed_keys(store, pushed)
    sums = local_sums(store, {k: v for k, v in pushed.items() if k not in small})
    sharded = store.kind == "sharded"
    if sharded:
        sums = {k: collectives.to_rows(v, shards(store)) for k, v in sums.items()}
    residuals: dict[int, Any] = {}
    for count in sorted({len(pushed[k]) for k in small}):
        keys = [k for k in pushed if k in small and len(pushed[k]) == count]
        if sharded and count != shards(store):
            raise ValueError(
                f"kv.push: keys {checks.shorten(keys)} are compressed in a store of kind 'sharded'; push one "
                f"value for each of its {shards(store)} devices, got {count}"
            )
        stacked = {k: jnp.stack([v.astype(store.values[k].dtype) for v in pushed[k]]) for k in keys}
        held = {k: residual_for(store, k, count) for k in keys}
        summed, new = jax.vmap(
            lambda values, own: reduce(dataclasses.replace(store, residuals=own), values, POSITION),
            axis_name=POSITION,
            out_axes=(0 if sharded else None, 0),
        )(stacked, held)
        sums |= summed
        residuals |= new
    return sums, residuals


def residual_for(store: KVStore, key: int, count: int) -> Any:
    """The states of `count` pushed values; `ValueError` where the last push had another number of them."""
    held = store.residuals.get(key)
    if held is None:
        return start_residuals(store, key, count)
    before = jax.tree.leaves(held)[0].shape[0]
    if before != count:
        raise ValueError(
            f"kv.push: key {key} is compressed and was pushed with {before} values before, now with {count}; each "
            "position has a residual of its own (kv.set_gradient_compression starts them anew)"
        )
    return held
