"""A push, from top to bottom: check -> sum within the process -> sum over the processes -> update.

`push` checks, and asks `_apply_of` for the function that sums and updates:

- Inside of a user's `jit`: `_store.aggregate.push`, pure functions of arrays. All below are programs of the same ones.
- At the prompt, in one process: `_apply_in_process`. One program sums and updates. An updater that cannot be a part of
  it, as a Python function, runs after it.
- At the prompt, in several processes: `_apply_over_processes`. Each process sums its own values on its leader, its
  first device. The leaders sum over the processes. Then each process updates its own copy of the store.

`_sum_and_update` says on which devices a program runs:

    what is pushed                                             where a program sums and updates
    one value of each key on each of the same several devices  over these devices             `_over_devices`
    the same, of large values in one memory (emulated CPUs)    on the first of them           `_on_first`
    anything else, or kind `local`, or a store over a mesh     where the stored values are    `_at_home`
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast, overload

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P, Sharding, SingleDeviceSharding

from .. import compression, sparse, updaters
from .._core import checks
from .._core.arguments import no_such_arguments
from .._core.arrays import Device, PyTree, is_tracing
from .._core.checks import Key, Keys
from .._core.recent import Recent
from .._core.text import warn
from .._core.transfers import allows_transfers
from .._devices import mesh, processes
from .._devices.mesh import assemble, copies_on, put, spans_processes, split_over, to_host
from .._devices.user_mesh import in_user_mesh_now
from .._store import aggregate, queue, store as stores
from .._store.aggregate import Entry, Setting, Updated
from .._store.mxnet_names import ARGUMENTS as MXNET_ARGUMENTS
from .._store.store import Arrays, Changes, KVStore, Lists
from ..updaters import Updater, _TreeOptimizer as TreeOptimizer, accumulate, assign
from ._create import signature
from ._pull import pull

Devices = tuple[Device, ...]
# A program of a push. It is given the entries of some keys, and the mesh over whose devices they are, or None.
Run = Callable[[Mapping[int, Entry], Mesh | None], dict[int, Updated]]


@no_such_arguments(MXNET_ARGUMENTS)
@allows_transfers
@in_user_mesh_now
def push(store: KVStore, key: Key | Keys, value: PyTree, *, axis_name: str | None = None) -> KVStore:
    """Sum the values of each key and apply the updater.

    Without an updater, the sum replaces the stored value.

    Args:
        store: any store.
        key: an int, the name of a parameter in a store of `from_params`, or a list of both. The values of a repeated
            key are summed.
        value: an array of the stored shape, or a list of such arrays on any devices, which are summed; for a list of
            keys, a list with one such entry for each key. An empty list pushes nothing. A `RowSparse`, or a list of
            them, changes only its own rows if the store has an updater. Without one the other rows become zeros.
            Floating values are cast to a stored floating dtype.
        axis_name: the mapped axis to sum over, inside `pmap` or `shard_map`, where `value` is this device's share. See
            "Gradients under shard_map" below.

    Raises:
        KeyError: a key was never initialised, or no parameter has that name.
        ValueError: a shape or the length of a list is wrong; processes push different keys; outside `jit`, a store of
            another kind than `dist_*` has devices of several processes; a `RowSparse` is pushed to a store with
            compression, staleness or kind `sharded`.
        TypeError: a dtype cannot be cast safely.
        RuntimeError: a pushed or stored array was deleted, for example by donation.
        NameError: no axis has that name.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import kv
        >>> store = kv.init(kv.create("device"), [3, 5], [jnp.zeros(2), jnp.zeros(())])
        >>> store = kv.push(store, [3, 5], [[jnp.ones(2), jnp.ones(2)], jnp.ones(())])
        >>> kv.pull(store, 3).tolist(), kv.pull(store, 5).tolist()
        ([2.0, 2.0], 1.0)

    Several processes:
        Outside `jit`, each process pushes the values of its own devices to a store of a kind `dist_*`, and every
        process gets the same result. All must push the same keys in the same order, which every push checks. Only the
        sums between processes are compressed. Inside `pmap` and `shard_map`, all kinds sum over the axis.

    Gradients under shard_map:
        With `check_vma=True`, the default, jax already sums the gradient of replicated params, and a push would sum it
        again, which it warns of. Pass `check_vma=False`, or mark the params with
        `jax.lax.pcast(params, axis_name, to="varying")`, as `train.make_train_step` does.
    """
    # All is checked before any work, so a wrong call leaves no process waiting for the others.
    # 1. The values of each key: one for each device, and those of a key that is given again.
    stores.check_is_store(store, "kv.push")
    keys, many = checks.find_keys(key, "kv.push", store)
    if frozen := [k for k in keys if k in store.frozen]:
        name = stores.names(store)[frozen[0]]
        raise ValueError(f"kv.push: key {frozen[0]} ({name!r}) is frozen; push the others only")
    values_of_keys, layouts = checks.as_values(keys, value, "kv.push") if many else [value], stores.rows_of(store)
    pushed: dict[int, list[Any]] = {}
    for k, values in zip(keys, values_of_keys, strict=True):
        what, checked = f"kv.push: value for key {k}", pushed.setdefault(k, [])
        shape = layouts[k].shape if k in layouts else store.values[k].shape
        for v in values if isinstance(values, (list, tuple)) else [values]:
            if isinstance(v, sparse.RowSparse):
                for leaf in (v.indices, v.values):
                    checks.array(leaf, f"kv.push: rows for key {k}")
            else:
                v = checks.array(v, what)
            checks.storable(v, shape, store.values[k].dtype, what)
            checked.append(v)
        if len({isinstance(v, sparse.RowSparse) for v in checked}) > 1:
            raise TypeError(f"kv.push: key {k}: RowSparse and dense values cannot be pushed together")
    pushed = {k: pushed[k] for k in sorted(pushed) if pushed[k]}  # an empty list pushes nothing
    rows = {k: values for k, values in pushed.items() if isinstance(values[0], sparse.RowSparse)}
    dense = {k: values for k, values in pushed.items() if k not in rows}

    # 2. Who sums. With other keys in one of the processes all would wait forever, so they compare what they push, also
    #    where this one pushes nothing.
    apply = _apply_of(store, axis_name, "kv.push")
    if apply is _apply_over_processes:
        for k, values in pushed.items():
            if any(spans_processes(leaf) for leaf in jax.tree.leaves(values)):
                raise ValueError(
                    f"kv.push: key {k}: this value is on devices of several processes; push value.addressable_data(i), "
                    "or inside shard_map with axis_name"
                )
        specs = {k: jax.ShapeDtypeStruct(values[0].shape, store.values[k].dtype) for k, values in pushed.items()}
        same = f"kv.push: kind {store.kind!r}: every process must push the same keys, in the same shapes"
        processes.agree(same, signature(specs) + (f", of keys {list(rows)} rows" if rows else ""))
    elif axis_name is None and jax.process_count() > 1:
        for k in pushed:
            if spans_processes(store.values[k]):
                raise ValueError(
                    f"kv.push: key {k}: this store of kind {store.kind!r} is on devices of several processes; push "
                    "inside shard_map with axis_name, or use kind 'dist_sync'"
                )
    # With check_vma=True the types say that jax has summed a gradient already. The sum of the equal ones is n times it.
    varies = functools.partial(_varies_over, axis_name)
    summed = [k for k, values in dense.items() if axis_name is not None and not all(map(varies, values))]
    if summed and varies(jax.lax.axis_index(axis_name)):
        warn(
            f"kv.push: key {summed[0]}: this value is the same on all devices of {axis_name!r}, and the sum counts it "
            "once for each. If it is the gradient of replicated params, jax has summed it already: pass "
            f"check_vma=False to shard_map, or mark the params by jax.lax.pcast(params, {axis_name!r}, to='varying'). "
            "If it is not, mark the value so"
        )

    # 3. An optimizer that sees the whole pytree needs the gradients of all trained params at once, and whole ones.
    if isinstance(store.updater, TreeOptimizer):
        trained = set(stores.trained_keys(store))
        but = ", but without mesh= and sharding=" if rows and stores.is_split(store) else ""
        for refused, fault in (
            (rows.keys(), "a RowSparse is only some rows of a value"),
            (trained - pushed.keys(), "nothing is pushed to them"),
            (pushed.keys() - trained, "they are not floating, so they have no gradient"),
        ):
            if refused:
                names = ", ".join(repr(stores.names(store)[k]) for k in sorted(refused)[:3])
                raise ValueError(
                    f"kv.push: keys {checks.shorten(sorted(refused))} ({names}): {fault}, and the optimizer of this "
                    "store sees the whole pytree; push whole gradients of all floating params that are not frozen at "
                    f"once, or make the store with updater=jp.updaters.from_optax(tx), one state a key{but}"
                )
    if not pushed:
        return store

    # 4. The sums and the updates. A schedule of MXNet's asks for the updates of all keys, also of those that another
    #    program updates, so they are counted once. With staleness, what was pushed before is sent, and this waits.
    num_updates, changes = aggregate.num_updates(store, pushed), Changes()
    if rows:
        changes |= _push_rows(store, rows, num_updates, axis_name, over_processes=apply is _apply_over_processes)
    if dense and store.staleness:
        changes |= queue.push(store, dense, axis_name, apply)
    elif dense:
        changes |= apply(store, dense, num_updates)
    return stores.with_changes(store, changes)


@allows_transfers
@in_user_mesh_now
def flush(store: KVStore, *, axis_name: str | None = None) -> KVStore:
    """The store after all pending pushes, oldest first, at the end of training.

    Args:
        store: any store. A store without staleness stays unchanged.
        axis_name: inside `pmap` or `shard_map`, the axis that splits the store.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import kv, updaters
        >>> store = kv.init(kv.create("dist_async", staleness=2), 3, jnp.zeros(2))
        >>> store = kv.set_updater(store, updaters.accumulate)
        >>> for number in (1.0, 10.0, 100.0):
        ...     store = kv.push(store, 3, jnp.full(2, number))
        >>> kv.pull(store, 3).tolist(), kv.pull(kv.flush(store), 3).tolist()
        ([1.0, 1.0], [111.0, 111.0])
    """
    if not store.pending:
        return store
    return queue.flush(store, axis_name, _apply_of(store, axis_name, "kv.flush"))


@overload
def pushpull(
    store: KVStore, key: Key, value: PyTree, *, devices: None = None, axis_name: str | None = None
) -> tuple[KVStore, jax.Array]: ...
@overload
def pushpull(
    store: KVStore, key: Key, value: PyTree, *, devices: Sequence[Device], axis_name: str | None = None
) -> tuple[KVStore, list[jax.Array]]: ...
@overload
def pushpull(
    store: KVStore, key: Keys, value: PyTree, *, devices: None = None, axis_name: str | None = None
) -> tuple[KVStore, list[jax.Array]]: ...
@overload
def pushpull(
    store: KVStore, key: Keys, value: PyTree, *, devices: Sequence[Device], axis_name: str | None = None
) -> tuple[KVStore, list[list[jax.Array]]]: ...
@no_such_arguments(MXNET_ARGUMENTS)
@allows_transfers
def pushpull(
    store: KVStore,
    key: Key | Keys,
    value: PyTree,
    *,
    devices: Sequence[Device] | None = None,
    axis_name: str | None = None,
) -> tuple[KVStore, Any]:
    """Call `push`, then `pull` of the same keys.

    Args:
        store, key, value, axis_name: as in `push`.
        devices: as in `pull`.

    Returns:
        (the next store, the pulled values). Without an updater these are the sums.

    Raises:
        KeyError, TypeError, ValueError, NameError, RuntimeError: as for `push` and `pull`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import kv
        >>> store = kv.init(kv.create("device"), 0, jnp.zeros(2))
        >>> store, total = kv.pushpull(store, 0, [jnp.ones(2), jnp.ones(2)])
        >>> total.tolist()
        [2.0, 2.0]
    """
    store, read = push(store, key, value, axis_name=axis_name), cast(Any, pull)
    return store, read(store, key, devices=devices, axis_name=axis_name)


# Who sums.


def _apply_of(store: KVStore, axis_name: str | None, caller: str) -> queue.Apply:
    """The function that sums lists and updates by the sums: in a traced function, in this process, or in all."""
    kind, axes = stores.KINDS[store.kind], jax.sharding.get_abstract_mesh().manual_axes
    if axis_name is not None:
        aggregate.axis_size(axis_name, caller)
    if not is_tracing():
        if not kind.over_processes or jax.process_count() == 1:
            return _apply_in_process
        processes.refuse_elastic(f"{caller}: kind {store.kind!r}")
        return _apply_over_processes
    if axis_name is None and axes and not kind.on_one_device:  # it is allowed, but rarely meant
        warn(
            f"{caller}: inside a pmap or shard_map over {', '.join(map(repr, axes))}, without axis_name, nothing is "
            f"summed over the devices; give axis_name={axes[0]!r}, or use kind='local' for a separate store on each"
        )
    return functools.partial(aggregate.push, axis_name=axis_name)


def _varies_over(axis_name: str | None, value: Any) -> bool:
    """Whether the type of a value says that it differs by device. Without check_vma=True no type does."""
    return axis_name in jax.typeof(value).manual_axis_type.varying


# A push at the prompt: sum within the process, sum over the processes, update.


def _apply_in_process(store: KVStore, pushed: Lists, num_updates: Arrays) -> Changes:
    """Sum within this process and update: what a push by one process changes."""
    # 1. Each key with all that its sum and its update need. A compressed key has a residual for each pushed value. A
    #    program gives its results where the stored values are, and those in rows are over all devices of the store.
    residuals = aggregate.residuals_for(store, {k: len(pushed[k]) for k in aggregate.compressed_keys(store, pushed)})
    states = store.updater_state
    entries = {
        k: Entry(store.values[k], states[k], values, residuals.get(k), num_updates.get(k))
        for k, values in pushed.items()
    }
    homes: dict[int, Sharding] = {k: store.values[k].sharding for k in pushed}
    if stores.is_in_rows(store):
        homes = dict.fromkeys(pushed, stores.sharding_of(store))
    setting = Setting(store.kind, store.limits, store.devices, store.layouts)

    # 2. An `Updater` is a part of the programs that sum.
    if isinstance(store.updater, Updater):
        return _sum_and_update(setting, store.updater, store.compressor, entries, homes)

    # 3. A Python function, and an optimizer that sees the whole pytree, run where the sums are: `assign` gives the sums
    #    themselves. A stored value that is there already may be uncommitted, and stays so.
    summed = _sum_and_update(setting, assign, store.compressor, entries, homes)
    sums = summed.values
    moved = {k: put(store.values[k], v.sharding) for k, v in sums.items() if store.values[k].sharding != v.sharding}
    store = dataclasses.replace(store, values=store.values | moved)
    if not isinstance(store.updater, TreeOptimizer):
        return aggregate.update(store, sums, {})._replace(residuals=summed.residuals)
    # One program updates all params, so its arrays must be on the same devices. A store over a mesh has them there.
    optimizer_state, sharding = store.optimizer_state, next(iter(sums.values())).sharding
    if not store.layouts and any(leaf.sharding != sharding for leaf in jax.tree.leaves(optimizer_state)):
        optimizer_state = put(optimizer_state, sharding)
    # Without what the program does not read, since JAX keeps the structure of what it was called with forever.
    bare = {"updater": None, "compressor": None, "updater_state": {}, "residuals": {}, "pending": {}}
    taken = dataclasses.replace(store, optimizer_state=optimizer_state, **bare)
    return aggregate.tree_program(store.updater)(taken, sums)._replace(residuals=summed.residuals)


def _apply_over_processes(store: KVStore, pushed: Lists, num_updates: Arrays) -> Changes:
    """Sum within each process, then over the processes, then update: what a push by all processes changes."""
    leaders = processes.leaders()
    own_leader = SingleDeviceSharding(leaders[jax.process_index()])
    # Every process has its own copy of the stored values. Sums do not read it, but take shapes and dtypes from it.
    stored = put({k: to_host(store.values[k]) for k in pushed}, own_leader)

    # 1. Within this process, if it has several values of a key: gathered on its leader, or by an all-reduce.
    several = {k: Entry(stored[k], (), values) for k, values in pushed.items() if len(values) > 1}
    setting = Setting(stores.KINDS[store.kind].within_process, store.limits)
    within = _sum_and_update(setting, assign, None, several, dict.fromkeys(several, own_leader)).values
    # Of a sum that is on each device, JAX takes the copy that is there already.
    sums = {k: jax.device_put(within[k] if k in within else pushed[k][0], own_leader) for k in pushed}

    # 2. Over the leaders of the processes: all that is sent between them, in buckets, compressed if the store says so.
    #    The residuals (processes, *shape) are over the leaders too: what a process did not send stays with it.
    compressed = aggregate.compressed_keys(store, pushed)
    residuals = aggregate.residuals_for(store, dict.fromkeys(compressed, len(leaders)))
    entries = {k: Entry(assemble([stored[k]], copies_on(leaders)), (), [sums[k]], residuals.get(k)) for k in pushed}
    run = functools.partial(_run_program, Setting(store.kind, store.limits), assign, store.compressor)
    across = mesh.run_by_itself(_over_devices, run, leaders, False, entries)

    # 3. The update, the same in every process, where the values are: as by a push of one value, which is the sum. It
    #    was compressed on its way here, so now it must not be.
    totals = {k: [put(total.value.addressable_data(0), store.values[k].sharding)] for k, total in across.items()}
    changes = _apply_in_process(dataclasses.replace(store, compressor=None), totals, num_updates)
    return changes._replace(residuals={k: across[k].residual for k in residuals})


# Which programs compute it, and on which devices.


def _sum_and_update(
    setting: Setting,
    updater: Updater,
    compressor: compression.Compressor | None,
    entries: Mapping[int, Entry],
    homes: Mapping[int, Sharding],
) -> Changes:
    """The sums and updates of some keys, by programs over the devices that push, or at the homes of stored values."""
    if not entries:
        return Changes()
    kind = stores.KINDS[setting.kind]
    is_split = any(layout.sharding is not None for _, layout in setting.layouts)
    run = functools.partial(_run_program, setting, updater, compressor)
    updated: dict[int, Updated] = {}

    # One value of each key on each device, where the stored ones are too: each device sums its part, in place.
    devices = mesh.one_on_each([entry.pushed for entry in entries.values()])
    if devices is not None and not is_split and not kind.on_one_device and setting.devices in (None, devices):
        # Of a large value each device has a copy. In one memory one device does the work of all. A value that is
        # compressed has a residual on each device, so it is summed there.
        large, small = list[int](), list[int]()
        shares_memory = not kind.in_rows and mesh.one_memory(devices)
        for k, entry in entries.items():
            is_large = shares_memory and entry.stored.nbytes >= mesh.LARGE and entry.residual is None
            (large if is_large else small).append(k)
        for keys in mesh.for_programs(large):
            updated |= _on_first(run, devices, {k: entries[k] for k in keys})
        for keys in mesh.for_programs(small):
            updated |= _over_devices(run, devices, kind.in_rows, {k: entries[k] for k in keys})
    else:
        # Keys that are at the same place share a program. Where values are split over a mesh their shardings differ,
        # and one program over the mesh has all keys.
        keys_at: dict[Sharding | None, list[int]] = {}
        for k in entries:
            keys_at.setdefault(None if is_split else homes[k], []).append(k)
        for keys_there in keys_at.values():
            for keys in mesh.for_programs(keys_there):
                updated |= _at_home(run, devices, homes, {k: entries[k] for k in keys})
    return Changes(
        {k: new.value for k, new in updated.items()},
        {k: new.state for k, new in updated.items()},
        {k: new.residual for k, new in updated.items() if new.residual is not None},
    )


def _run_program(
    setting: Setting,
    updater: Updater,
    compressor: compression.Compressor | None,
    entries: Mapping[int, Entry],
    devices_mesh: Mesh | None,
) -> dict[int, Updated]:
    """What one program computes from entries that are where it runs."""
    # Where the updater does not look at keys, they are counted from 0: pushes of other keys in the same shapes, dtypes
    # and layouts then share a program.
    sees_keys = updater not in (assign, accumulate) and getattr(updater.update, "uses_key", True)
    keys, layouts = tuple(entries) if sees_keys else tuple(range(len(entries))), dict(setting.layouts)
    if layouts:
        layouts = {n: layouts[k] for n, k in zip(keys, entries, strict=True)}
    setting = dataclasses.replace(setting, keys=keys, layouts=tuple(layouts.items()))
    updated = aggregate.program(updater, compressor)(setting, list(entries.values()), devices_mesh)
    return dict(zip(entries, updated, strict=True))


def _over_devices(run: Run, devices: Devices, in_rows: bool, entries: Mapping[int, Entry]) -> dict[int, Updated]:
    """A program over these devices sums what each of them pushed. Those of this process have one value of each key."""
    along = split_over(devices)
    stored_and_state = {k: (entry.stored, entry.state) for k, entry in entries.items()}
    if not in_rows:  # rows are there already
        stored_and_state = put(stored_and_state, copies_on(devices))
    residuals = put({k: entry.residual for k, entry in entries.items()}, along)
    taken: dict[int, Entry] = {}
    for k, entry in entries.items():
        stored, state = stored_and_state[k]
        dtype = stored.dtype
        # The arrays of the devices become one array over them, (devices * n, ...) of (n, ...) each, without a copy.
        # One without axes could not be split, so it becomes (1,). Buckets are made inside of the program.
        values = [v if v.dtype == dtype else v.astype(dtype) for v in entry.pushed]
        pushed = [assemble([v if v.ndim else v.reshape(1) for v in values], along)]
        taken[k] = Entry(stored, state, pushed, residuals[k], entry.num_updates)
    mesh.wait_before_collectives(taken, devices)
    return run(taken, mesh.mesh_of(devices))


def _at_home(
    run: Run, devices: Devices | None, homes: Mapping[int, Sharding], entries: Mapping[int, Entry]
) -> dict[int, Updated]:
    """A program where the stored values are sums what is sent there. `devices`: those that push one value each."""
    home = homes[next(iter(entries))]
    # A program takes NumPy's views of one memory without a copy, and faster than arrays that are put on its device.
    if devices and isinstance(home, SingleDeviceSharding) and mesh.one_memory({*devices, *home.device_set}):
        views: Any = {k: entry._replace(pushed=[np.asarray(v) for v in entry.pushed]) for k, entry in entries.items()}
        with jax.default_device(*home.device_set):
            return run(views, None)
    sent = {k: entry._replace(pushed=mesh.share_or_put(entry.pushed, homes[k])) for k, entry in entries.items()}
    return run(sent, None)


def _on_first(run: Run, devices: Devices, entries: Mapping[int, Entry]) -> dict[int, Updated]:
    """The first device sums and updates in a memory that all of them share. The others share its results."""
    first = SingleDeviceSharding(devices[0])
    moved = put({k: (entry.stored, entry.state) for k, entry in entries.items()}, first)
    on_first = {k: entry._replace(stored=moved[k][0], state=moved[k][1]) for k, entry in entries.items()}
    leaves, structure = jax.tree.flatten(_at_home(run, devices, dict.fromkeys(on_first, first), on_first))
    return structure.unflatten(mesh.share_or_put(leaves, copies_on(devices)))


# Rows of a table.


def _push_rows(
    store: KVStore,
    pushed: dict[int, list[sparse.RowSparse]],
    num_updates: Arrays,
    axis_name: str | None,
    over_processes: bool,
) -> Changes:
    """What a push of rows changes. It makes no residuals."""
    # What takes no rows is refused before any row is added.
    apart, reason = "keep this table in a separate store", ""
    if stores.is_split(store):
        reason = f"values are split over a mesh and take no RowSparse; {apart} without mesh="
    elif stores.is_in_rows(store):
        reason = f"a store of kind {store.kind!r} takes none; use kind 'device' or 'local'"
    elif store.compressor is not None:
        reason = f"gradient compression does not take a RowSparse, as in MXNet; {apart}"
    elif store.staleness:
        reason = f"a store of staleness {store.staleness} cannot delay it; push dense values, or use kind 'dist_sync'"
    if reason:
        raise ValueError(f"kv.push: a RowSparse for keys {sorted(pushed)}: {reason}")
    for key in pushed:
        updaters._check_rows(store.updater, key)

    changes = Changes({}, {})
    for key, rows in pushed.items():
        stored, state = store.values[key], store.updater_state[key]
        run = functools.partial(aggregate.update_by_rows, store.updater)
        if not is_tracing():
            # Each batch has another number of rows, and each number would be another program.
            by_row = updaters._takes_padding(store.updater)
            rows = [sparse._padded(r) for r in rows] if by_row else rows
            # Rows go to the table, which stays where it is: it may be much larger.
            rows = [_sum_over_processes(rows, stored.dtype)] if over_processes else rows
            rows = put(rows, stored.sharding)
            # An updater that may look at all rows gets each once, and no padding. How many there are is known here.
            rows = rows if by_row else [sparse.add(aggregate.cast_rows(rows, stored.dtype))]
            run = _compiled(store.updater) if isinstance(store.updater, Updater) else run
        changes.values[key], changes.updater_state[key] = run(key, axis_name, rows, state, stored, num_updates.get(key))
    return changes


_compiled = Recent(lambda updater: jax.jit(functools.partial(aggregate.update_by_rows, updater), static_argnums=(0, 1)))


def _sum_over_processes(rows: list[sparse.RowSparse], dtype: np.dtype[Any]) -> sparse.RowSparse:
    """The sum of the rows that all processes push, unique and sorted, in every process."""
    leaders = processes.leaders()
    own_rows = jax.device_put(aggregate.cast_rows(rows, dtype), leaders[jax.process_index()])
    # One program over all processes needs one shape in each, so they agree on a size that has room for the longest.
    most = max(map(int, processes.exchange(str(sum(r.indices.shape[0] for r in own_rows)))))
    own_sum = sparse.add(own_rows, size=1 << (most - 1).bit_length() if most else 1)  # few sizes, so few programs
    sum_of_each = jax.tree.map(lambda leaf: assemble([leaf], split_over(leaders)), own_sum)
    total = mesh.run_by_itself(_sum_program(leaders), sum_of_each)
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), total)


@functools.lru_cache(maxsize=64)
def _sum_program(devices: Devices) -> Callable[[sparse.RowSparse], sparse.RowSparse]:
    total = functools.partial(sparse.allreduce, axis_name=mesh.STORE_AXIS)
    leaders_mesh, per_leader = mesh.mesh_of(devices), P(mesh.STORE_AXIS)
    return jax.jit(jax.shard_map(total, mesh=leaders_mesh, in_specs=per_leader, out_specs=P(), check_vma=False))
