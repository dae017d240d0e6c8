"""A push as a pure function of arrays: sum, then update. Runs under `jit`, `pmap`, `shard_map` and `vmap`."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._core import checks
from .._devices import collectives
from .._devices.user_mesh import split_like, unsplit
from . import compressed
from .store import (
    Arrays,
    Changes,
    KVStore,
    Lists,
    has_types,
    is_on_mesh,
    is_split,
    kind_of,
    layout_of,
    rows_of,
    shapes_of,
    shards,
)
from .update import update

POSITION = "position"  # the axis of a pushed list of values


def push(store: KVStore, pushed: Lists, axis_name: str | None) -> Changes:
    """What a push changes."""
    if axis_name is None:
        sums, residuals = _sums_of_lists(store, pushed)
    else:
        axis_size(axis_name, "kv.push")
        sums, residuals = reduce(store, local_sums(store, pushed), axis_name)
    return update(store, sums)._replace(residuals=residuals)


def axis_size(axis_name: str, what: str) -> int:
    """The number of devices along a mapped axis. `NameError` if there is no such axis."""
    try:
        return lax.axis_size(axis_name)
    except NameError as error:
        raise NameError(
            f"{what}: axis_name={axis_name!r} is the axis of no pmap or shard_map around this call; leave it out "
            "for values outside of them"
        ) from error


def reduce(store: KVStore, pushed: Arrays, axis_name: str) -> tuple[Arrays, dict[int, Any]]:
    """The sum of each value over the axis, and the new residuals of this device.

    Kind `sharded` gives this device's (chunk,) of the sum, the other kinds the whole sum. Residuals have the shapes
    that they have in the store.
    """
    kind = kind_of(store)
    if is_on_mesh(store):  # a mapped axis would give a device parts of them that fit no push
        raise ValueError(
            "kv.push: values of this store are split over a mesh in their own shapes; push without axis_name, at the "
            'prompt or under jit, or train by make_train_step(loss_fn, engine="jit")'
        )
    if is_split(store) and axis_size(axis_name, "kv.push") != shards(store):
        raise ValueError(
            f"kv.push: the axis {axis_name!r} has {lax.axis_size(axis_name)} devices, but the store of kind "
            f"{store.kind!r} was made for {shards(store)}"
        )
    small = compressed_keys(store, pushed)
    plain, packed = [k for k in pushed if k not in small], [k for k in pushed if k in small]
    summed: Arrays = {}
    residuals: dict[int, Any] = {}
    if plain:
        sums = kind.reduce([pushed[k] for k in plain], axis_name, store.limits)
        summed.update(zip(plain, sums, strict=True))
    if packed:
        own, held = _own_residuals(store, packed, axis_name)
        values = [pushed[k] for k in packed]
        sums, states = kind.reduce_compressed(store.compressor, values, own, axis_name, store.limits)
        summed.update(zip(packed, sums, strict=True))
        for k, state, like in zip(packed, states, held, strict=True):
            residuals[k] = jax.tree.map(lambda new, old: new.reshape(old.shape), state, like)
    return {k: summed[k] for k in pushed}, residuals


def local_sums(store: KVStore, pushed: Lists) -> Arrays:
    """The sum of each key's own list of values, in the stored dtype and in the order of the list."""
    return {k: functools.reduce(operator.add, [as_stored(store, k, v) for v in values]) for k, values in pushed.items()}


def as_stored(store: KVStore, key: int, value: jax.Array) -> jax.Array:
    """A pushed value in the stored dtype, split over a user's mesh as the stored value is."""
    value = value.astype(store.values[key].dtype)
    if not has_types((value, store.values[key])):
        return value
    return unsplit(value) if is_split(store) else split_like(value, store.values[key])


def _sums_of_lists(store: KVStore, pushed: Lists) -> tuple[Arrays, dict[int, Any]]:
    """Sums without a mapped axis. Each position of a list is a device with a residual of its own."""
    small = compressed_keys(store, pushed)
    sums = local_sums(store, {k: v for k, v in pushed.items() if k not in small})
    sums = {k: layout_of(store, k).stored(v) for k, v in sums.items()}
    residuals: dict[int, Any] = {}
    for count in sorted({len(pushed[k]) for k in small}):
        keys = [k for k in pushed if k in small and len(pushed[k]) == count]
        if is_split(store) and count != shards(store):
            raise ValueError(
                f"kv.push: keys {checks.shorten(keys)} are compressed in a store of kind {store.kind!r}; push one "
                f"value for each of its {shards(store)} devices, got {count}"
            )
        stacked = {k: jnp.stack([as_stored(store, k, v) for v in pushed[k]]) for k in keys}
        held = residuals_for(store, dict.fromkeys(keys, count))
        summed, new = jax.vmap(
            lambda values, own: reduce(dataclasses.replace(store, residuals=own), values, POSITION),
            axis_name=POSITION,
            out_axes=(0 if is_split(store) else None, 0),
        )(stacked, held)
        sums |= summed
        residuals |= new
    return sums, residuals


# Values of which each device has a part.


def gather(store: KVStore, parts: Arrays, axis_name: str) -> Arrays:
    """The whole values, out of what every device has of each."""
    if not is_split(store):
        return parts
    shapes = shapes_of(store)
    whole = collectives.all_gather(list(parts.values()), [shapes[k] for k in parts], axis_name, store.limits)
    return dict(zip(parts, whole, strict=True))


def own_parts(store: KVStore, values: Arrays, axis_name: str) -> Arrays:
    """What this device stores of whole values: the inverse of `gather`."""
    return {k: collectives.own_chunk(v, axis_name) for k, v in values.items()} if is_split(store) else values


# Residuals.


def compressed_keys(store: KVStore, keys: Iterable[int]) -> set[int]:
    """The keys whose values are smaller compressed than plain. The others are sent as they are."""
    if store.compressor is None:
        return set()
    shapes = shapes_of(store)
    return {k for k in keys if store.compressor.pays(shapes[k], store.values[k].dtype)}


def start_residuals(store: KVStore, key: int, count: int) -> Any:
    """The states of a key for `count` devices, the devices as first axis."""
    (states,) = _start_all(store, [key], count)
    return states


def residuals_for(store: KVStore, counts: Mapping[int, int]) -> dict[int, Any]:
    """The states of as many pushed values of each key as `counts` says.

    Raises:
        ValueError: the last push of a key had another number of values.
    """
    residuals: dict[int, Any] = {}
    for k, count in counts.items():
        held = store.residuals.get(k)
        if held is None:
            continue
        before = jax.tree.leaves(held)[0].shape[0]
        if before != count:
            raise ValueError(
                f"kv.push: key {k} is compressed and was pushed with {before} values before, now with {count}; each "
                "position has a residual of its own (kv.set_gradient_compression starts them from scratch)"
            )
        residuals[k] = held
    for count in set(counts.values()):
        keys = [k for k in counts if k not in residuals and counts[k] == count]
        residuals.update(zip(keys, _start_all(store, keys, count) if keys else [], strict=True))
    return residuals


def held_residual(store: KVStore, key: int, axis_name: str) -> Any:
    """This device's state of a key before a push, as the store holds it or will hold it."""
    _, (held,) = _own_residuals(store, [key], axis_name)
    return held


def _own_residuals(store: KVStore, keys: list[int], axis_name: str) -> tuple[list[Any], list[Any]]:
    """This device's states in the compressor's shapes, and the same as the store holds them.

    Under `shard_map` the first axis, the devices, is there with length 1. Under `pmap` it is gone.
    """
    own, held = _start_on_device(store, keys, lax.axis_index(axis_name), lax.axis_size(axis_name)), []
    for i, k in enumerate(keys):
        if k in store.residuals:
            held.append(store.residuals[k])
            own[i] = jax.tree.map(lambda leaf, fresh: leaf.reshape(fresh.shape), store.residuals[k], own[i])
        else:
            held.append(jax.tree.map(lambda leaf: leaf[None], own[i]))
    return own, held


def _start_all(store: KVStore, keys: list[int], count: int) -> list[Any]:
    return jax.vmap(lambda device: _start_on_device(store, keys, device, count))(jnp.arange(count))


def _start_on_device(store: KVStore, keys: list[int], device: Any, count: int) -> list[Any]:
    """What the compressor remembers for these keys on one of `count` devices before the first push."""
    assert store.compressor is not None
    own, rows = shapes_of(store), None
    shapes = [own[k] for k in keys]
    if is_split(store) and not store.compressor.linear:
        cut = rows_of(store)
        rows, shapes = shards(store), [(cut[k].chunk,) for k in keys]
    dtypes = [store.values[k].dtype for k in keys]
    return compressed.start(store.compressor, shapes, dtypes, [_seed(k, device) for k in keys], rows, count)


def _seed(key: int, device: Any) -> jax.Array:
    """A number that separates the random streams of keys and devices."""
    return jnp.uint32(key % (1 << 32)) * jnp.uint32(0x9E3779B1) + jnp.asarray(device, jnp.uint32)
