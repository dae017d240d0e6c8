"""A push typed at the prompt: the same pure functions as compiled programs over the devices that push.

Three ways. Where every key comes with one value from each of the same several devices, the values are packed
into buckets on each device; one program over those devices sums, unpacks and updates, or, for kind `local`, the
buckets are moved to where the stored values are and one program there does so. Otherwise the values themselves
are moved to where the stored ones are. Large values of emulated devices go first, in a program of their own: it
runs while Python is busy with the many small ones. The programs of the last few updaters and compressors are kept:
a second push of values of the same shapes compiles nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

from .._core.arrays import Device, nbytes
from .._core.recent import Recent
from .._devices import buckets, emulated
from .._devices.emulated import wait_before_collectives
from .._devices.mesh import STORE_AXIS, mesh_of
from ..updaters import Updater, assign, ignores_key
from . import _aggregate, _update
from ._store import Changes, KVStore, home

# XLA compiles a kernel for each value, so a program for thousands of keys would take minutes.
_MOST_KEYS = 256

# Bytes. From here on, emulated devices that all copy the sum cost more than one that sums while the others look on.
_BY_ONE = 1 << 20

Devices = tuple[Device, ...]
Lists = dict[int, list[jax.Array]]


def push(store: KVStore, pushed: Lists) -> Changes:
    """What a push changes."""
    if len(pushed) > _MOST_KEYS:
        return _by_parts(store, pushed, _MOST_KEYS)
    if isinstance(store.updater, Updater):
        return _run(store, pushed)
    sums, _, residuals, _ = _run(dataclasses.replace(store, updater=assign), pushed)
    held = dataclasses.replace(store, values={k: _moved(store.values[k], v.sharding) for k, v in sums.items()})
    return Changes(*_update.update(held, sums), residuals)


def _by_parts(store: KVStore, pushed: Lists, most: int) -> Changes:
    """The push of a few keys at a time."""
    keys = list(pushed)
    return _merged(push(store, {k: pushed[k] for k in keys[i : i + most]}) for i in range(0, len(keys), most))


def _merged(parts: Iterable[Changes]) -> Changes:
    return Changes(*({k: v for part in each for k, v in part.items()} for each in zip(*parts, strict=True)))


def _run(store: KVStore, pushed: Lists) -> Changes:
    devices = _pushing_devices(store, pushed)
    in_place = devices is not None and store.kind != "local"
    if not in_place and len(pushed) > 1 and len({frozenset(_target(store, k).device_set) for k in pushed}) > 1:
        return _by_parts(store, pushed, 1)  # stored on different devices: no program can have them all
    compressed = _aggregate.compressed_keys(store, pushed)
    by_one = _summed_on_one_device(store, pushed, devices) - compressed if devices is not None else set()
    if 0 < len(by_one) < len(pushed):
        return _merged(_run(store, {k: vs for k, vs in pushed.items() if (k in by_one) is so}) for so in (True, False))
    residuals = {k: _aggregate.residual_for(store, k, len(pushed[k])) for k in compressed}
    # Where the updater does not look at the key, one program serves all keys with values of these shapes.
    names = dict(zip(pushed, range(len(pushed)) if ignores_key(store.updater) else pushed, strict=True))
    part = _substore(store, names, residuals)
    lists = {names[k]: vs for k, vs in pushed.items()}
    if devices is None or (store.kind == "local" and residuals):
        results = _moved_and_summed(part, lists)
    elif not in_place:
        results = _summed_at_home(part, lists, devices)
    elif by_one:
        results = _summed_by_one(part, lists, devices)
    else:
        results = _summed_in_place(part, lists, devices)
    return Changes(*({k: result[n] for k, n in names.items() if n in result} for result in results))


def _moved_and_summed(store: KVStore, pushed: Lists) -> Changes:
    return _gathered(store, {k: emulated.put(vs, _target(store, k)) for k, vs in pushed.items()})


def _summed_at_home(store: KVStore, pushed: Lists, devices: Devices) -> Changes:
    """Kind `local`: every device's buckets are moved to where the stored values are, and summed there."""
    groups, dtypes, shapes = _groups(store, pushed), _dtypes(store, pushed), _shapes(pushed)
    home = _target(store, next(iter(pushed)))
    each = [[vs[i] for vs in pushed.values()] for i in range(len(devices))]
    if isinstance(home, SingleDeviceSharding) and emulated.one_memory({*devices, *home.device_set}):
        packed = [emulated.bucketed(values, dtypes, groups) for values in each]
        with emulated.on(home):
            return _gather_and_update(store, packed, groups, shapes)
    return _gather_and_update(
        store, [emulated.put(_packed(values, dtypes, groups), home) for values in each], groups, shapes
    )


def _compiled(fn: Callable[..., Changes], **options: Any) -> Callable[..., Changes]:
    """`jax.jit` of a function of a store, with programs of their own for the last few updaters and compressors.

    The store goes in without these two, since JAX keeps the structures of arguments for ever.
    """

    def program(updater: Any, compressor: Any) -> Any:
        @functools.wraps(fn)
        def run(store: KVStore, *args: Any) -> Changes:
            return fn(dataclasses.replace(store, updater=updater, compressor=compressor), *args)

        return jax.jit(run, **options)

    programs = Recent(program)

    def call(store: KVStore, *args: Any) -> Changes:
        bare = dataclasses.replace(store, updater=None, compressor=None)
        return programs(store.updater, store.compressor)(bare, *args)

    return call


@functools.partial(_compiled, static_argnums=(2, 3))
def _gather_and_update(store: KVStore, each: list[list[Any]], groups: Any, shapes: Any) -> Changes:
    packed = [functools.reduce(operator.add, buckets_of_all) for buckets_of_all in zip(*each, strict=True)]
    sums = dict(zip(store.values, buckets.unpack(packed, shapes, groups), strict=True))
    return Changes(*_update.update(store, sums))


def _summed_on_one_device(store: KVStore, pushed: Lists, devices: Devices) -> set[int]:
    """The keys for which one device does the work of all: large values that each has a copy of, in one memory."""
    if store.kind == "sharded" or not emulated.one_memory(devices):
        return set()
    return {k for k in pushed if nbytes(store.values[k]) >= _BY_ONE}


def _summed_by_one(store: KVStore, pushed: Lists, devices: Devices) -> Changes:
    """The first device sums and updates what all of them see; the others see its results."""
    one, (everywhere, _) = SingleDeviceSharding(devices[0]), _shardings(devices)
    part = dataclasses.replace(store, values=_moved(store.values, one), updater_state=_moved(store.updater_state, one))
    with emulated.on(one):
        values, states, *_ = _gathered(part, {k: emulated.views(vs) for k, vs in pushed.items()})
    leaves, structure = jax.tree.flatten((values, states))
    return Changes(*structure.unflatten(emulated.put(leaves, everywhere)))


def _summed_in_place(store: KVStore, pushed: Lists, devices: Devices) -> Changes:
    on, along = _shardings(devices)
    if store.kind != "sharded":
        store = dataclasses.replace(
            store, values=_moved(store.values, on), updater_state=_moved(store.updater_state, on)
        )
    store = dataclasses.replace(store, residuals=_moved(store.residuals, along))
    groups = _groups(store, pushed)
    packed = _assembled(store, pushed, groups, devices)
    wait_before_collectives((store, packed), devices)
    return _program(devices)(store, packed, groups, _shapes(pushed))


@functools.lru_cache(maxsize=64)
def _shardings(devices: Devices) -> tuple[NamedSharding, NamedSharding]:
    """A copy on each of the devices; the first axis along them."""
    mesh = mesh_of(devices)
    return NamedSharding(mesh, P()), NamedSharding(mesh, P(STORE_AXIS))


def _groups(store: KVStore, pushed: Lists) -> tuple[tuple[int, ...], ...]:
    """Which values share a bucket; what is compressed travels by key."""
    if store.compressor is not None:
        return tuple((i,) for i in range(len(pushed)))
    return buckets.plan(tuple(zip(_shapes(pushed), _dtypes(store, pushed), strict=True)), store.limits)


def _dtypes(store: KVStore, pushed: Lists) -> tuple[Any, ...]:
    return tuple(store.values[k].dtype for k in pushed)


def _target(store: KVStore, key: int) -> jax.sharding.Sharding:
    """Where a pushed value goes that is not summed where it is."""
    if store.kind == "sharded":
        assert store.devices is not None
        return NamedSharding(mesh_of(store.devices), P())
    return store.values[key].sharding


def _shapes(pushed: Lists) -> tuple[tuple[int, ...], ...]:
    return tuple(vs[0].shape for vs in pushed.values())


def _substore(store: KVStore, names: dict[int, int], residuals: dict[int, Any]) -> KVStore:
    """The store with these keys alone, under other names and without paths: what a program depends on."""
    shapes = dict(store.shapes)
    return dataclasses.replace(
        store,
        values={n: store.values[k] for k, n in names.items()},
        updater_state={n: store.updater_state[k] for k, n in names.items()},
        residuals={names[k]: held for k, held in residuals.items()},
        shapes=tuple((n, shapes[k]) for k, n in names.items()) if shapes else (),
        paths=(),
        treedef=None,
    )


def _moved(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    """The arrays on `sharding`'s devices; what is there already is not touched."""
    if all(leaf.sharding == sharding for leaf in jax.tree.leaves(tree)):
        return tree
    return jax.device_put(tree, sharding)


def _pushing_devices(store: KVStore, pushed: Lists) -> Devices | None:
    """The devices in their order where each key has one value from each of the same several ones."""
    first = next(iter(pushed.values()))
    if len(first) < 2:
        return None
    shardings = [v.sharding for v in first]
    if not all(isinstance(s, SingleDeviceSharding) for s in shardings) or len(set(shardings)) < len(shardings):
        return None
    for values in pushed.values():
        if len(values) != len(first) or any(
            v.sharding is not s and v.sharding != s for v, s in zip(values, shardings, strict=True)
        ):
            return None
    devices = tuple(next(iter(s.device_set)) for s in shardings)
    if store.kind != "local" and store.devices is not None and devices != store.devices:
        return None
    return devices


def _assembled(store: KVStore, pushed: Lists, groups: Any, devices: Devices) -> list[jax.Array]:
    """For each bucket one array over the devices, along the first axis. Large values are not copied."""
    dtypes = _dtypes(store, pushed)
    each = [_packed([vs[i] for vs in pushed.values()], dtypes, groups) for i in range(len(devices))]
    _, along = _shardings(devices)
    return [
        jax.make_array_from_single_device_arrays(
            (len(devices) * shards[0].shape[0], *shards[0].shape[1:]), along, list(shards)
        )
        for shards in zip(*each, strict=True)
    ]


def _packed(values: list[jax.Array], dtypes: tuple[Any, ...], groups: Any) -> list[jax.Array]:
    """One device's buckets; a value that travels alone, has the right dtype and an axis is taken as it is."""
    as_is = {g[0] for g in groups if len(g) == 1 and values[g[0]].ndim and values[g[0]].dtype == dtypes[g[0]]}
    to_pack = tuple(g for g in groups if g[0] not in as_is)
    packed = iter(
        _pack(
            [values[i] for g in to_pack for i in g],
            tuple(map(len, to_pack)),
            tuple(dtypes[i] for g in to_pack for i in g),
        )
        if to_pack
        else ()
    )
    return [values[g[0]] if g[0] in as_is else next(packed) for g in groups]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _pack(values: list[jax.Array], lengths: tuple[int, ...], dtypes: tuple[Any, ...]) -> list[jax.Array]:
    cast = iter([v.astype(dtype).reshape(-1) for v, dtype in zip(values, dtypes, strict=True)])
    return [jnp.concatenate([next(cast) for _ in range(length)]) for length in lengths]


@functools.lru_cache(maxsize=64)
def _program(devices: Devices) -> Any:
    """The compiled push over several devices: (store, buckets) to (values, updater states, residuals)."""

    def run(store: KVStore, packed: list[jax.Array], groups: Any, shapes: Any) -> Any:
        specs = partition_specs(store, STORE_AXIS)

        def body(store: KVStore, packed: list[jax.Array]) -> Any:
            flat = [p.reshape(shapes[g[0]]) if len(g) == 1 else p for p, g in zip(packed, groups, strict=True)]
            values = buckets.unpack(flat, shapes, groups)
            pushed = {k: [v] for k, v in zip(store.values, values, strict=True)}
            return _aggregate.push(store, pushed, STORE_AXIS)

        residual_specs = {k: jax.tree.map(lambda _: P(STORE_AXIS), v) for k, v in specs.residuals.items()}
        return jax.shard_map(
            body,
            mesh=mesh_of(devices),
            in_specs=(specs, P(STORE_AXIS)),
            out_specs=Changes(specs.values, specs.updater_state, residual_specs),
            check_vma=False,
        )(store, packed)

    return _compiled(run, static_argnums=(2, 3))


@_compiled
def _gathered(store: KVStore, pushed: dict[int, list[Any]]) -> Changes:
    changes = _aggregate.push(store, pushed, None)
    if store.kind == "sharded":
        values = {k: jax.lax.with_sharding_constraint(v, home(store)) for k, v in changes.values.items()}
        changes = changes._replace(values=values)
    return changes


def partition_specs(store: KVStore, axis_name: str) -> KVStore:
    """A store of `PartitionSpec`s in place of its arrays, for `shard_map`'s in_specs and out_specs.

    Args:
        store: any store.
        axis_name: the axis of the mesh over which values (kind `sharded`), residuals and what waits are spread.

    Returns:
        The store's structure with `P(axis_name)` for what is spread over the devices along its first axis, and
        `P()` for what every device holds whole.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxpar import kv
        >>> kv.partition_specs(kv.init(kv.create("device"), 3, jnp.ones(2)), "data").values
        {3: P()}
    """
    sharded = store.kind == "sharded"
    values = {k: P(axis_name) if sharded else P() for k in store.values}
    states = {
        k: jax.tree.map(
            lambda leaf, k=k: P(axis_name) if sharded and leaf.shape == store.values[k].shape else P(), state
        )
        for k, state in store.updater_state.items()
    }
    residuals = jax.tree.map(lambda _: P(axis_name), store.residuals)
    pending = {k: w._replace(values=(P(axis_name),) * len(w.values), count=P()) for k, w in store.pending.items()}
    return dataclasses.replace(store, values=values, updater_state=states, residuals=residuals, pending=pending)
