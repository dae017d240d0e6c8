"""A push at the prompt: the same pure functions, as compiled programs.

Is there one value of each key on each of the same several devices? Then each device packs its values into buckets.
These are assembled to arrays over the devices, and one program over them sums, unpacks and updates. Otherwise, and for
kind `local`, the values are sent to where the stored ones are, and one program there sums and updates.

Emulated devices share one memory. There the first device sums large values for all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P, Sharding, SingleDeviceSharding

from .._core.arrays import Device
from .._core.recent import Recent
from .._devices import buckets, emulated
from .._devices.buckets import BucketLimits, Groups, Shape
from .._devices.mesh import STORE_AXIS, assemble, copies_on, mesh_of, split_over
from .._devices.placement import put
from .._store import aggregate, tree_optimizer
from .._store.store import Changes, KVStore, Lists, home, is_on_mesh, is_split, kind_of
from .._store.update import update
from ..updaters import Updater, _TreeOptimizer as TreeOptimizer, accumulate, assign
from ._place import partition_specs

# XLA compiles a kernel for each value, so a program for thousands of keys would take minutes.
_MOST_KEYS = 256

# A compressor has buckets of its own, so what it gets travels value by value.
_ONE_BY_ONE = BucketLimits(alone_bytes=0)

Devices = tuple[Device, ...]


def push(store: KVStore, pushed: Lists) -> Changes:
    """What a push changes."""
    in_program = isinstance(store.updater, Updater)
    updater = store.updater if in_program else assign
    parts = [
        way(store, updater, {k: pushed[k] for k in keys[start : start + _MOST_KEYS]})
        for way, keys in _ways(store, pushed)
        for start in range(0, len(keys), _MOST_KEYS)
    ]
    changes = parts[0] if len(parts) == 1 else _merge(parts)
    return changes if in_program else _update_by(store, changes)


def _ways(store: KVStore, pushed: Lists) -> list[tuple[Callable[..., Changes], list[int]]]:
    """How the keys are pushed: a function of store, updater and lists, and the keys that it gets."""
    devices = _pushing_devices(store, pushed)
    if devices is not None and not kind_of(store).on_one_device and store.devices in (None, devices):
        is_for_first = {k: _is_for_first(store, k, devices) for k in pushed}
        return [
            (functools.partial(_push_on_first, devices), [k for k in pushed if is_for_first[k]]),
            (functools.partial(push_over, devices), [k for k in pushed if not is_for_first[k]]),
        ]
    if is_on_mesh(store):  # their shardings differ, and one program over their mesh has all keys
        return [(functools.partial(_push_at_home, None), list(pushed))]
    keys_at: dict[Sharding, list[int]] = {}
    for k, target in _targets(store, pushed).items():
        keys_at.setdefault(target, []).append(k)
    return [(functools.partial(_push_at_home, devices), keys) for keys in keys_at.values()]


def _pushing_devices(store: KVStore, pushed: Lists) -> Devices | None:
    """The devices in their order, if each key has one value on each of the same several ones."""
    first = [v.sharding for v in next(iter(pushed.values()))]
    if len(first) < 2 or is_on_mesh(store) or not all(isinstance(s, SingleDeviceSharding) for s in first):
        return None
    devices = tuple(next(iter(s.device_set)) for s in first)
    if len(set(devices)) < len(devices) or any([v.sharding for v in vs] != first for vs in pushed.values()):
        return None
    return devices


def _is_for_first(store: KVStore, key: int, devices: Devices) -> bool:
    """Whether one device does the work of all: a large value of which each has a copy, in one memory."""
    if store.values[key].nbytes < emulated.LARGE or is_split(store) or not emulated.one_memory(devices):
        return False
    return not aggregate.compressed_keys(store, [key])


def _targets(store: KVStore, keys: Iterable[int]) -> dict[int, Sharding]:
    """Where the values of each key are sent that the devices which push do not sum themselves."""
    if is_split(store):
        assert store.devices is not None
        return dict.fromkeys(keys, copies_on(store.devices))
    return {k: store.values[k].sharding for k in keys}


def _merge(parts: Iterable[Changes]) -> Changes:
    by_key = zip(*(part[:-1] for part in parts), strict=True)  # no part has an optimizer_state
    return Changes(*({k: v for part in each for k, v in part.items()} for each in by_key))


# The ways. Each is given a store, the updater of its program, and some keys' lists.


def push_over(devices: Devices, store: KVStore, updater: Updater, pushed: Lists) -> Changes:
    """A program over these devices sums what each of them pushed. Those of this process have one value of each key."""
    before = _before(store, dict.fromkeys(pushed, len(devices)))
    if not is_split(store):
        values, states = _move((before.values, before.updater_state), copies_on(devices))
        before = before._replace(values=values, updater_state=states)
    along = split_over(devices)
    before = before._replace(residuals=_move(before.residuals, along))
    plan = _plan(store, pushed)._replace(devices=devices)
    packed = [_pack(values, plan) for values in zip(*pushed.values(), strict=True)]
    sent = [assemble(shards, along) for shards in zip(*packed, strict=True)]
    emulated.wait_before_collectives((before, sent), devices)
    return _run(store, updater, before, sent, plan)


def _push_at_home(devices: Devices | None, store: KVStore, updater: Updater, pushed: Lists) -> Changes:
    """A program where the stored values are sums what is sent there. It is sent in buckets if devices are given."""
    before = _before(store, {k: len(values) for k, values in pushed.items()})
    targets = _targets(store, pushed)
    if devices is None:
        sent = [emulated.share_or_put(values, targets[k]) for k, values in pushed.items()]
        return _run(store, updater, before, sent, _Plan())
    plan, (where, *_) = _plan(store, pushed), targets.values()
    of_devices = zip(*pushed.values(), strict=True)
    if isinstance(where, SingleDeviceSharding) and emulated.one_memory({*devices, *where.device_set}):
        sent = [emulated.pack_views(values, plan.dtypes, plan.groups) for values in of_devices]
        with emulated.on(where):
            return _run(store, updater, before, sent, plan)
    sent = [emulated.share_or_put(_pack(values, plan), where) for values in of_devices]
    return _run(store, updater, before, sent, plan)


def _push_on_first(devices: Devices, store: KVStore, updater: Updater, pushed: Lists) -> Changes:
    """The first device sums and updates in a memory that all of them share. The others share its results."""
    before = {k: store.values[k] for k in pushed}, {k: store.updater_state[k] for k in pushed}
    values, states = _move(before, SingleDeviceSharding(devices[0]))
    store = dataclasses.replace(store, values=values, updater_state=states)
    leaves, structure = jax.tree.flatten(_push_at_home(devices, store, updater, pushed))
    return structure.unflatten(emulated.share_or_put(leaves, copies_on(devices)))


# What goes into a program.


class _Plan(NamedTuple):
    """How the values of some keys travel, which their program depends on.

    Attributes:
        shapes, dtypes: of the stored values. None: each key has a list of values.
        groups: which values share a bucket.
        devices: those over which each bucket is spread and summed. None: the buckets of each device come one by one.
    """

    shapes: tuple[Shape, ...] | None = None
    dtypes: tuple[Any, ...] = ()
    groups: Groups = ()
    devices: Devices | None = None


def _plan(store: KVStore, pushed: Lists) -> _Plan:
    """Which values share a bucket."""
    shapes, dtypes = tuple([vs[0].shape for vs in pushed.values()]), tuple([store.values[k].dtype for k in pushed])
    limits = store.limits if store.compressor is None else _ONE_BY_ONE
    return _Plan(shapes, dtypes, buckets.plan(tuple(zip(shapes, dtypes, strict=True)), limits))


def _before(store: KVStore, counts: Mapping[int, int]) -> Changes:
    """What a push of these keys changes, before it. `counts`: how many values of each are pushed."""
    compressed = aggregate.compressed_keys(store, counts)
    return Changes(
        {k: store.values[k] for k in counts},
        {k: store.updater_state[k] for k in counts},
        aggregate.residuals_for(store, {k: count for k, count in counts.items() if k in compressed}),
    )


def _move(tree: Any, sharding: Sharding) -> Any:
    """The arrays on `sharding`'s devices. What is there already stays."""
    return tree if all(leaf.sharding == sharding for leaf in jax.tree.leaves(tree)) else put(tree, sharding)


def _pack(values: Sequence[jax.Array], plan: _Plan) -> list[jax.Array]:
    """One device's buckets. A value that travels alone, in the stored dtype and with an axis, is not copied."""
    packed: list[jax.Array] = []
    for group in plan.groups:
        value, dtype = values[group[0]], plan.dtypes[group[0]]
        is_ready = len(group) == 1 and value.ndim and value.dtype == dtype
        packed.append(value if is_ready else _join([values[i] for i in group], dtype))
    return packed


@functools.partial(jax.jit, static_argnums=1)
def _join(values: list[jax.Array], dtype: Any) -> jax.Array:
    return jnp.concatenate([v.astype(dtype).reshape(-1) for v in values])


# The programs.


def _run(store: KVStore, updater: Any, before: Changes, sent: Any, plan: _Plan) -> Changes:
    """What the program of some keys changes. Where its updater does not see the keys, one program serves all keys."""
    shared = updater in (assign, accumulate) or not getattr(updater.update, "uses_key", True)
    names = {k: n if shared else k for n, k in enumerate(before.values)}
    layouts = dict(store.layouts)
    part = dataclasses.replace(
        store,
        values={names[k]: x for k, x in before.values.items()},
        updater_state={names[k]: x for k, x in before.updater_state.items()},
        residuals={names[k]: x for k, x in before.residuals.items()},
        layouts=tuple((n, layouts[k]) for k, n in names.items()) if layouts else (),
        paths=(),
        treedef=None,
        optimizer_state=(),
        updater=None,
        compressor=None,
    )
    changes = _programs(updater, store.compressor)(part, sent, plan)
    return Changes(*[{k: new[n] for k, n in names.items() if n in new} for new in changes[:-1]])


def _make_program(updater: Any, compressor: Any) -> Any:
    """The program of a push. JAX keeps the structures of arguments forever, so the store comes without these two."""

    def run(store: KVStore, sent: Any, plan: _Plan) -> Changes:
        store = dataclasses.replace(store, updater=updater, compressor=compressor)
        if plan.devices is None:
            return _at_home(store, aggregate.push(store, _lists_of(store, sent, plan), None))

        def body(store: KVStore, packed: list[jax.Array]) -> Changes:
            return aggregate.push(store, _lists_of(store, [packed], plan), STORE_AXIS)

        specs, split = partition_specs(store, STORE_AXIS), P(STORE_AXIS)
        changes = Changes(specs.values, specs.updater_state, specs.residuals)
        mesh = mesh_of(plan.devices)
        over = jax.shard_map(body, mesh=mesh, in_specs=(specs, split), out_specs=changes, check_vma=False)
        return over(store, sent)

    return jax.jit(run, static_argnums=2)


_programs = Recent(_make_program)


def _lists_of(store: KVStore, sent: Any, plan: _Plan) -> Lists:
    """The values of each key in the order of the devices, out of what was sent."""
    if plan.shapes is not None:
        sent = zip(*[buckets.unpack(packed, plan.shapes, plan.groups) for packed in sent], strict=True)
    return {k: list(values) for k, values in zip(store.values, sent, strict=True) if values}


def _at_home(store: KVStore, changes: Changes) -> Changes:
    """The changes, with the shardings of what is split over devices."""
    if store.layouts:
        homes = {k: home(store, layout) for k, layout in store.layouts}
        values = {k: jax.lax.with_sharding_constraint(v, homes[k]) for k, v in changes.values.items()}
        changes = changes._replace(values=values)
    leaves, structure = jax.tree.flatten(changes.optimizer_state)
    homes = tree_optimizer.state_homes(store)
    leaves = [x if s is None else jax.lax.with_sharding_constraint(x, s) for x, s in zip(leaves, homes, strict=True)]
    return changes._replace(optimizer_state=structure.unflatten(leaves))


# An updater that runs after the sums.


def _update_by(store: KVStore, summed: Changes) -> Changes:
    """The changes by a Python function, or by an optimizer that sees the whole pytree, where the sums are."""
    sums = summed.values
    beside = {k: _move(store.values[k], v.sharding) for k, v in sums.items()}
    store = dataclasses.replace(store, values=store.values | beside)
    if not isinstance(store.updater, TreeOptimizer):
        return update(store, sums)._replace(residuals=summed.residuals)
    state = store.optimizer_state
    if not store.layouts:
        state = _move(state, next(iter(sums.values())).sharding)
    part = dataclasses.replace(
        store, optimizer_state=state, updater_state={}, residuals={}, pending={}, updater=None, compressor=None
    )
    lists = [[sums[k]] if k in sums else [] for k in sorted(store.values)]
    return _programs(store.updater, None)(part, lists, _Plan())._replace(residuals=summed.residuals)
