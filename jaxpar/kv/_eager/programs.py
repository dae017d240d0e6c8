"""A push at the prompt: the same pure functions as compiled programs over the devices that push.

There are three ways. If every key comes with one value from each of the same several devices, each device packs its
values into buckets. Then one program over these devices sums, unpacks and updates. For kind `local`, the buckets are
sent to where the stored values are, and one program there does the same. Otherwise the values themselves are sent.

Large values of emulated devices go first, in a program of their own. It runs while Python is busy with the small ones.
The programs of the last few updaters and compressors are kept, so a second push of the same shapes compiles nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec as P, Sharding, SingleDeviceSharding

from ..._core.arrays import Device
from ..._core.recent import Recent
from ..._devices import buckets, emulated
from ..._devices.buckets import Groups
from ..._devices.mesh import STORE_AXIS, copies_on, split_over
from ...updaters import Updater, _TreeOptimizer as TreeOptimizer, accumulate, assign
from .. import _aggregate, _tree, _update
from .._place import partition_specs
from .._store import Changes, KVStore, Lists, home, kind_of, layout_of
from .buckets import dtypes_of, limits_of, pack, shapes_of_lists

# XLA compiles a kernel for each value, so a program for thousands of keys would take minutes.
_MOST_KEYS = 256

# Bytes. From here on, a sum on one emulated device costs less than copies of the sum on all.
_LARGE = 1 << 20

Devices = tuple[Device, ...]


def push(store: KVStore, pushed: Lists) -> Changes:
    """What a push changes."""
    if isinstance(store.updater, Updater):
        return _push_any_number(store, pushed)
    sums, _, residuals, *_ = _push_any_number(dataclasses.replace(store, updater=assign, optimizer_state=()), pushed)
    if isinstance(store.updater, TreeOptimizer):
        return _update_tree(store, sums)._replace(residuals=residuals)
    held = dataclasses.replace(store, values={k: _move(store.values[k], v.sharding) for k, v in sums.items()})
    return _update.update(held, sums)._replace(residuals=residuals)


def _push_any_number(store: KVStore, pushed: Lists) -> Changes:
    """A push to any number of keys."""
    return _push(store, pushed) if len(pushed) <= _MOST_KEYS else _push_parts(store, pushed, _MOST_KEYS)


def _push_parts(store: KVStore, pushed: Lists, most: int) -> Changes:
    """The push of a few keys at a time."""
    keys = list(pushed)
    return _merge(_push(store, {k: pushed[k] for k in keys[i : i + most]}) for i in range(0, len(keys), most))


def _merge(parts: Iterable[Changes]) -> Changes:
    by_key = zip(*(part[:-1] for part in parts), strict=True)  # no part has an optimizer_state
    return Changes(*({k: v for part in each for k, v in part.items()} for each in by_key))


def _push(store: KVStore, pushed: Lists) -> Changes:
    devices = _pushing_devices(store, pushed)
    in_place = devices is not None and not kind_of(store).on_one_device
    if not in_place and len(pushed) > 1 and len({frozenset(_target(store, k).device_set) for k in pushed}) > 1:
        return _push_parts(store, pushed, 1)  # stored on different devices: no program can have them all
    compressed = _aggregate.compressed_keys(store, pushed)
    large = _large_keys(store, pushed, devices) - compressed if devices is not None else set()
    if 0 < len(large) < len(pushed):
        return _merge(_push(store, {k: vs for k, vs in pushed.items() if (k in large) is so}) for so in (True, False))
    residuals = _aggregate.residuals_for(store, {k: len(pushed[k]) for k in compressed})
    names = names_of(store, list(pushed))
    part = _substore(store, names, residuals)
    lists = {names[k]: vs for k, vs in pushed.items()}
    if devices is None or (not in_place and residuals):
        changes = _sum_lists(part, {k: emulated.share_or_put(vs, _target(part, k)) for k, vs in lists.items()})
    elif not in_place:
        changes = _sum_at_home(part, lists, devices)
    elif large:
        changes = _sum_on_first(part, lists, devices)
    else:
        changes = _sum_in_place(part, lists, devices)
    return Changes(*({k: change[n] for k, n in names.items() if n in change} for change in changes[:-1]))


def names_of(store: KVStore, keys: Sequence[int]) -> dict[int, int]:
    """What a program calls each key. If the updater does not depend on it, one program serves all keys."""
    shared = store.updater in (assign, accumulate) or not getattr(store.updater.update, "uses_key", True)
    return dict(zip(keys, range(len(keys)) if shared else keys, strict=True))


def _pushing_devices(store: KVStore, pushed: Lists) -> Devices | None:
    """The devices in their order, if each key has one value from each of the same several ones."""
    first = next(iter(pushed.values()))
    if len(first) < 2 or store.shardings:
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
    if not kind_of(store).on_one_device and store.devices is not None and devices != store.devices:
        return None
    return devices


def _large_keys(store: KVStore, pushed: Lists, devices: Devices) -> set[int]:
    """The keys for which one device does the work of all: large values of which each has a copy, in one memory."""
    if layout_of(store).is_split:
        return set()
    large = {k for k in pushed if store.values[k].nbytes >= _LARGE}
    return large if large and emulated.one_memory(devices) else set()


def _substore(store: KVStore, names: dict[int, int], residuals: dict[int, Any]) -> KVStore:
    """The store with these keys only, under other names and without paths: what a program depends on."""
    shapes, shardings = dict(store.shapes), dict(store.shardings)
    return dataclasses.replace(
        store,
        values={n: store.values[k] for k, n in names.items()},
        updater_state={n: store.updater_state[k] for k, n in names.items()},
        residuals={names[k]: held for k, held in residuals.items()},
        shapes=tuple((n, shapes[k]) for k, n in names.items()) if shapes else (),
        shardings=tuple((n, shardings[k]) for k, n in names.items()) if shardings else (),
        paths=(),
        treedef=None,
    )


def _target(store: KVStore, key: int) -> Sharding:
    """Where a pushed value is sent that is not summed where it is."""
    if layout_of(store).is_split:
        assert store.devices is not None
        return copies_on(store.devices)
    return store.values[key].sharding


def _move(tree: Any, sharding: Sharding) -> Any:
    """The arrays on `sharding`'s devices. What is there already stays."""
    if all(leaf.sharding == sharding for leaf in jax.tree.leaves(tree)):
        return tree
    return jax.device_put(tree, sharding)


def _compile(fn: Callable[..., Changes], **options: Any) -> Callable[..., Changes]:
    """`jax.jit` of a function of a store, with programs of their own for the last few updaters and compressors.

    The store goes in without these two, since JAX keeps the structures of arguments forever.
    """

    def program(updater: Any, compressor: Any) -> Any:
        @functools.wraps(fn)
        def run(store: KVStore, *args: Any) -> Changes:
            return fn(dataclasses.replace(store, updater=updater, compressor=compressor), *args)

        return jax.jit(run, **options)

    programs = Recent(program)

    def call(store: KVStore, *args: Any) -> Changes:
        bare = object.__new__(KVStore)  # `dataclasses.replace` takes forty microseconds
        vars(bare).update(vars(store), updater=None, compressor=None)
        return programs(store.updater, store.compressor)(bare, *args)

    return call


# Sum where the stored values are.


@_compile
def _sum_lists(store: KVStore, pushed: dict[int, list[Any]]) -> Changes:
    changes = _aggregate.push(store, pushed, None)
    return changes._replace(values=_at_home(store, changes.values))


def _at_home(store: KVStore, values: dict[int, jax.Array]) -> dict[int, jax.Array]:
    """Values that are split over devices, with their shardings. Others are returned as they are."""
    if not layout_of(store).is_split and not store.shardings:
        return values
    return {k: jax.lax.with_sharding_constraint(v, home(store, k)) for k, v in values.items()}


def _sum_at_home(store: KVStore, pushed: Lists, devices: Devices) -> Changes:
    """Send every device's buckets to where the stored values are, and sum them there."""
    shapes, dtypes = shapes_of_lists(pushed), dtypes_of(store, pushed)
    groups = buckets.plan(tuple(zip(shapes, dtypes, strict=True)), limits_of(store))
    where = _target(store, next(iter(pushed)))
    each = [[vs[i] for vs in pushed.values()] for i in range(len(devices))]
    if isinstance(where, SingleDeviceSharding) and emulated.one_memory({*devices, *where.device_set}):
        packed = [emulated.pack_views(values, dtypes, groups) for values in each]
        with emulated.on(where):
            return _sum_buckets(store, packed, groups, shapes)
    packed = [emulated.share_or_put(pack(values, dtypes, groups), where) for values in each]
    return _sum_buckets(store, packed, groups, shapes)


@functools.partial(_compile, static_argnums=(2, 3))
def _sum_buckets(store: KVStore, each: list[list[Any]], groups: Groups, shapes: Any) -> Changes:
    packed = [functools.reduce(operator.add, of_all_devices) for of_all_devices in zip(*each, strict=True)]
    sums = dict(zip(store.values, buckets.unpack(packed, shapes, groups), strict=True))
    return _update.update(store, sums)


# Update the whole pytree, after the sums.


def _update_tree(store: KVStore, sums: dict[int, jax.Array]) -> Changes:
    """The update of all params at once, where the sums are."""
    where = next(iter(sums.values())).sharding
    held = {k: _move(store.values[k], v.sharding) for k, v in sums.items()}
    split = layout_of(store).is_split or store.shardings
    state = store.optimizer_state if split else _move(store.optimizer_state, where)
    others = {k: v for k, v in store.values.items() if k not in sums}  # without a gradient
    store = dataclasses.replace(store, values=held, optimizer_state=state, updater_state={}, residuals={}, pending={})
    return _update_tree_program(dataclasses.replace(store, values={**others, **held}), sums)


@_compile
def _update_tree_program(store: KVStore, sums: dict[int, jax.Array]) -> Changes:
    changes = _tree.update(store, sums, None)
    leaves, structure = jax.tree.flatten(changes.optimizer_state)
    homes = _tree.state_homes(store)
    leaves = [x if s is None else jax.lax.with_sharding_constraint(x, s) for x, s in zip(leaves, homes, strict=True)]
    return changes._replace(values=_at_home(store, changes.values), optimizer_state=structure.unflatten(leaves))


# Sum on the devices that push.


class _Across(NamedTuple):
    """How arrays are laid out on the devices that push."""

    copies: NamedSharding
    split: NamedSharding
    can_hang: bool


@functools.lru_cache(maxsize=64)
def _across(devices: Devices) -> _Across:
    return _Across(copies_on(devices), split_over(devices), emulated.can_hang(devices))


def _sum_on_first(store: KVStore, pushed: Lists, devices: Devices) -> Changes:
    """The first device sums and updates in a memory that all of them share. The others share its results."""
    first = SingleDeviceSharding(devices[0])
    held, states = _move(store.values, first), _move(store.updater_state, first)
    part = dataclasses.replace(store, values=held, updater_state=states)
    with emulated.on(first):
        values, states, *_ = _sum_lists(part, {k: emulated.views(vs) for k, vs in pushed.items()})
    leaves, structure = jax.tree.flatten((values, states))
    return Changes(*structure.unflatten(emulated.share_or_put(leaves, _across(devices).copies)))


def _sum_in_place(store: KVStore, pushed: Lists, devices: Devices) -> Changes:
    shapes, dtypes, limits = shapes_of_lists(pushed), dtypes_of(store, pushed), limits_of(store)
    across = _across(devices)
    groups = buckets.plan(tuple(zip(shapes, dtypes, strict=True)), limits)
    if not layout_of(store).is_split:
        values, states = _move(store.values, across.copies), _move(store.updater_state, across.copies)
        store = dataclasses.replace(store, values=values, updater_state=states)
    store = dataclasses.replace(store, residuals=_move(store.residuals, across.split))
    each = [pack([vs[i] for vs in pushed.values()], dtypes, groups) for i in range(len(devices))]
    packed = [_assemble(shards, across.split) for shards in zip(*each, strict=True)]
    if across.can_hang:
        jax.block_until_ready((store, packed))
    return _sum_across(store, packed, groups, shapes, across.split.mesh)


def _assemble(shards: tuple[jax.Array, ...], split: NamedSharding) -> jax.Array:
    """One array over the devices, along the first axis, out of one on each. Nothing is copied."""
    shape = (len(shards) * shards[0].shape[0], *shards[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, split, list(shards))


@functools.partial(_compile, static_argnums=(2, 3, 4))
def _sum_across(store: KVStore, packed: list[jax.Array], groups: Groups, shapes: Any, mesh: Any) -> Changes:
    specs, split = partition_specs(store, STORE_AXIS), P(STORE_AXIS)

    def body(store: KVStore, packed: list[jax.Array]) -> Changes:
        values = buckets.unpack(packed, shapes, groups)
        pushed = {k: [v] for k, v in zip(store.values, values, strict=True)}
        return _aggregate.push(store, pushed, STORE_AXIS)

    changes = Changes(specs.values, specs.updater_state, jax.tree.map(lambda _: split, store.residuals))
    run = jax.shard_map(body, mesh=mesh, in_specs=(specs, split), out_specs=changes, check_vma=False)
    return run(store, packed)
