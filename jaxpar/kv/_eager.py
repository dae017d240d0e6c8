"""A push at the prompt: the same pure functions, as compiled programs.

Is there one value of each key on each of the same several devices? Then one program over these devices sums and
updates. Otherwise, and for kind `local`, the values are sent to where the stored ones are, and one program there sums
and updates.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec as P, Sharding, SingleDeviceSharding

from .._core.arrays import Device
from .._core.recent import Recent
from .._devices import emulated
from .._devices.mesh import STORE_AXIS, assemble, copies_on, mesh_of, put, split_over
from .._store import aggregate
from .._store.placing import partition_specs, state_layouts
from .._store.store import Changes, KVStore, Lists, home, is_on_mesh, is_split, kind_of, shapes_of
from ..updaters import Updater, _TreeOptimizer as TreeOptimizer, accumulate, assign

# XLA compiles a kernel for each value, so a program for thousands of keys would take minutes.
_MOST_KEYS = 256

Devices = tuple[Device, ...]


def push(store: KVStore, pushed: Lists) -> Changes:
    """What a push changes."""
    in_program = isinstance(store.updater, Updater)
    updater = store.updater if in_program else assign
    changes = Changes()
    for way, keys in _ways(store, pushed):
        for start in range(0, len(keys), _MOST_KEYS):
            changes |= way(store, updater, {k: pushed[k] for k in keys[start : start + _MOST_KEYS]})
    return changes if in_program else _update_by(store, changes)


def _ways(store: KVStore, pushed: Lists) -> list[tuple[Callable[..., Changes], list[int]]]:
    """How the keys are pushed: a function of store, updater and lists, and the keys that it gets."""
    devices = _pushing_devices(store, pushed)
    if devices is not None and not kind_of(store).on_one_device and store.devices in (None, devices):
        large = _keys_for_first(store, pushed, devices)
        return [
            (functools.partial(_push_on_first, devices), large),
            (functools.partial(push_over, devices), [k for k in pushed if k not in large]),
        ]
    if is_on_mesh(store):  # their shardings differ, and one program over their mesh has all keys
        return [(functools.partial(_push_at_home, None), list(pushed))]
    keys_at: dict[Sharding, list[int]] = {}
    for k in pushed:
        keys_at.setdefault(_target(store, k), []).append(k)
    return [(functools.partial(_push_at_home, devices), keys) for keys in keys_at.values()]


def _pushing_devices(store: KVStore, pushed: Lists) -> Devices | None:
    """The devices in their order, if each key has one value on each of the same several ones."""
    first = [v.sharding for v in next(iter(pushed.values()))]
    if len(first) < 2 or is_on_mesh(store) or {type(s) for s in first} != {SingleDeviceSharding}:
        return None
    devices = tuple(next(iter(s.device_set)) for s in first)
    if len(set(devices)) < len(devices) or any([v.sharding for v in vs] != first for vs in pushed.values()):
        return None
    return devices


def _keys_for_first(store: KVStore, keys: Iterable[int], devices: Devices) -> list[int]:
    """The keys of large values of which each device has a copy in one memory: there one device does the work of all."""
    large = [k for k in keys if store.values[k].nbytes >= emulated.LARGE]
    if not large or is_split(store) or not emulated.one_memory(devices):
        return []
    compressed = aggregate.compressed_keys(store, large)
    return [k for k in large if k not in compressed]


def _target(store: KVStore, key: int) -> Sharding:
    """Where the values of a key are sent that the devices which push do not sum themselves."""
    if is_split(store):
        assert store.devices is not None
        return copies_on(store.devices)
    return store.values[key].sharding


# The ways. Each is given a store, the updater of its program, and some keys' lists.


def push_over(devices: Devices, store: KVStore, updater: Updater, pushed: Lists) -> Changes:
    """A program over these devices sums what each of them pushed. Those of this process have one value of each key."""
    along = split_over(devices)
    before = _before(store, dict.fromkeys(pushed, len(devices)))
    if not is_split(store):
        values, states = _move((before.values, before.updater_state), copies_on(devices))
        before = before._replace(values=values, updater_state=states)
    before = before._replace(residuals=_move(before.residuals, along))
    # The arrays of the devices become one array over them, without a copy. Buckets are made inside of the program.
    sent = [assemble([_with_axis(v, store.values[k].dtype) for v in values], along) for k, values in pushed.items()]
    emulated.wait_before_collectives((before, sent), devices)
    return _run(store, updater, before, sent, devices)


def _push_at_home(devices: Devices | None, store: KVStore, updater: Updater, pushed: Lists) -> Changes:
    """A program where the stored values are sums what is sent there. `devices`: those that push one value each."""
    before = _before(store, {k: len(values) for k, values in pushed.items()})
    where = _target(store, next(iter(pushed)))
    # A program takes views of one memory without a copy, and faster than arrays that are put on its device first.
    if devices and isinstance(where, SingleDeviceSharding) and emulated.one_memory({*devices, *where.device_set}):
        sent = [emulated.views(values) for values in pushed.values()]
        with emulated.on(where):
            return _run(store, updater, before, sent, None)
    sent = [emulated.share_or_put(values, _target(store, k)) for k, values in pushed.items()]
    return _run(store, updater, before, sent, None)


def _push_on_first(devices: Devices, store: KVStore, updater: Updater, pushed: Lists) -> Changes:
    """The first device sums and updates in a memory that all of them share. The others share its results."""
    before = {k: store.values[k] for k in pushed}, {k: store.updater_state[k] for k in pushed}
    values, states = _move(before, SingleDeviceSharding(devices[0]))
    store = dataclasses.replace(store, values=values, updater_state=states)
    leaves, structure = jax.tree.flatten(_push_at_home(devices, store, updater, pushed))
    return structure.unflatten(emulated.share_or_put(leaves, copies_on(devices)))


def _before(store: KVStore, counts: Mapping[int, int]) -> Changes:
    """What a push of these keys changes, before it. `counts`: how many values of each are pushed."""
    values, states = {k: store.values[k] for k in counts}, {k: store.updater_state[k] for k in counts}
    if store.compressor is None:
        return Changes(values, states)
    compressed = aggregate.compressed_keys(store, counts)
    residuals = aggregate.residuals_for(store, {k: count for k, count in counts.items() if k in compressed})
    return Changes(values, states, residuals)


def _move(tree: Any, sharding: Sharding) -> Any:
    """The arrays on `sharding`'s devices. What is there already stays."""
    return tree if {leaf.sharding for leaf in jax.tree.leaves(tree)} <= {sharding} else put(tree, sharding)


def _with_axis(value: jax.Array, dtype: Any) -> jax.Array:
    """A pushed value in the stored dtype, with a first axis along which the devices can stand."""
    value = value if value.dtype == dtype else value.astype(dtype)
    return value if value.ndim else value.reshape(1)


# The programs.


def _run(store: KVStore, updater: Any, before: Changes, sent: Any, devices: Devices | None) -> Changes:
    """What the program of some keys changes. Where its updater does not see the keys, one program serves all keys.

    `sent` has a list of values for each key, or with `devices` one array, of which each of them has its value.
    """
    # With keys 0, 1, ... a loop over the keys of a model compiles one program for each shape, not one for each key.
    shared = updater in (assign, accumulate) or not getattr(updater.update, "uses_key", True)
    names = {k: n if shared else k for n, k in enumerate(before.values)}
    layouts = dict(store.layouts)
    part = dataclasses.replace(
        store,
        **_renamed(before, names)._asdict() | {"optimizer_state": ()},
        layouts=tuple((n, layouts[k]) for k, n in names.items()) if layouts else (),
        paths=(),
        treedef=None,
        updater=None,
        compressor=None,
    )
    changes = _programs(updater, store.compressor)(part, sent, devices)
    return _renamed(changes, {n: k for k, n in names.items()})


def _renamed(changes: Changes, names: Mapping[int, int]) -> Changes:
    return Changes(*[{names[k]: x for k, x in new.items()} for new in changes[:-1]])


def _make_program(updater: Any, compressor: Any) -> Any:
    """The program of a push. JAX keeps the structures of arguments forever, so the store comes without these two."""

    def run(store: KVStore, sent: list[Any], devices: Devices | None) -> Changes:
        store = dataclasses.replace(store, updater=updater, compressor=compressor)
        if devices is None:
            lists = {k: list(values) for k, values in zip(store.values, sent, strict=True) if values}
            return _at_home(store, aggregate.push(store, lists, None))
        shapes = shapes_of(store)

        def body(store: KVStore, own: list[jax.Array]) -> Changes:
            lists = {k: [value.reshape(shapes[k])] for k, value in zip(store.values, own, strict=True)}
            return aggregate.push(store, lists, STORE_AXIS)

        specs = partition_specs(store, STORE_AXIS)
        changes = Changes(specs.values, specs.updater_state, specs.residuals)
        mesh, args = mesh_of(devices), (specs, P(STORE_AXIS))
        return jax.shard_map(body, mesh=mesh, in_specs=args, out_specs=changes, check_vma=False)(store, sent)

    return jax.jit(run, static_argnums=2)


_programs = Recent(_make_program)


def _at_home(store: KVStore, changes: Changes) -> Changes:
    """The changes, with the shardings of what is split over devices."""
    if store.layouts:
        homes = {k: home(store, layout) for k, layout in store.layouts}
        values = {k: jax.lax.with_sharding_constraint(v, homes[k]) for k, v in changes.values.items()}
        changes = changes._replace(values=values)
    leaves, structure = jax.tree.flatten(changes.optimizer_state)
    homes = [home(store, layout) for layout in state_layouts(store)]
    leaves = [x if s is None else jax.lax.with_sharding_constraint(x, s) for x, s in zip(leaves, homes, strict=True)]
    return changes._replace(optimizer_state=structure.unflatten(leaves))


# An updater that runs after the sums.


def _update_by(store: KVStore, summed: Changes) -> Changes:
    """The changes by a Python function, or by an optimizer that sees the whole pytree, where the sums are."""
    sums = summed.values
    beside = {k: _move(store.values[k], v.sharding) for k, v in sums.items()}
    store = dataclasses.replace(store, values=store.values | beside)
    if not isinstance(store.updater, TreeOptimizer):
        return aggregate.update(store, sums)._replace(residuals=summed.residuals)
    state = store.optimizer_state
    if not store.layouts:
        state = _move(state, next(iter(sums.values())).sharding)
    part = dataclasses.replace(
        store, optimizer_state=state, updater_state={}, residuals={}, pending={}, updater=None, compressor=None
    )
    lists = [[sums[k]] if k in sums else [] for k in sorted(store.values)]
    return _programs(store.updater, None)(part, lists, None)._replace(residuals=summed.residuals)
