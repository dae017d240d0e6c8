"""Pushes, from top to bottom: the verbs, the request, how it is summed, the programs of a push at the prompt, rows.

A traced push is `_store.aggregate.push`. A push at the prompt runs the same pure functions as compiled programs. Is
there one value of each key on each of the same several devices? Then one program over these devices sums and updates.
Otherwise, and for kind `local`, the values are sent to where the stored ones are, and one program there does.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast, overload

import jax
import numpy as np
from jax.sharding import PartitionSpec as P, Sharding, SingleDeviceSharding

from .. import sparse, updaters
from .._core import calls, checks
from .._core.arrays import Device, Recent, is_tracing
from .._core.checks import Key, Keys
from .._devices import mesh, processes
from .._devices.mesh import assemble, copies_on, put, spans_processes, split_over, to_host
from .._devices.user_mesh import in_user_mesh_now
from .._store import aggregate, queue, store as stores
from .._store.mxnet_names import ARGUMENTS as MXNET_ARGUMENTS
from .._store.store import Arrays, Changes, KVStore, Lists
from ..updaters import Updater, _TreeOptimizer as TreeOptimizer, accumulate, assign
from ._create import signature
from ._pull import RETURNED, pull

Devices = tuple[Device, ...]
Way = Callable[[Any, KVStore, Lists, Arrays], Changes]  # what is given a program, and runs it where it belongs


@calls.answers("kv.push", MXNET_ARGUMENTS)
@in_user_mesh_now
def push(store: KVStore, key: Key | Keys, value: Any, *, axis_name: str | None = None) -> KVStore:
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
        again. Pass `check_vma=False`, or mark the params with `jax.lax.pcast(params, axis_name, to="varying")`, as
        `train.make_train_step` does.
    """
    pushed = _request(store, key, value)
    way = _way_of(store, axis_name, "kv.push")
    if way is _push_across:  # also where this process pushes nothing: others may wait for it
        _agree(store, pushed)
    elif axis_name is None and jax.process_count() > 1:
        for k in pushed:
            if spans_processes(store.values[k]):
                where = f"kv.push: key {k}: this store of kind {store.kind!r} is on devices of several processes"
                raise ValueError(f"{where}; push inside shard_map with axis_name, or use kind 'dist_sync'")
    if not pushed:
        return store
    rows = {k: vs for k, vs in pushed.items() if isinstance(vs[0], sparse.RowSparse)}
    dense = {k: vs for k, vs in pushed.items() if k not in rows}
    num_updates = aggregate.num_updates(store, pushed)
    changes = Changes()
    if rows:
        changes |= _push_rows(store, rows, num_updates, axis_name, across=way is _push_across)
    if dense:
        changes |= queue.push(store, dense, axis_name, way) if store.staleness else way(store, dense, num_updates)
    return stores.with_changes(store, changes)


@calls.answers("kv.flush", MXNET_ARGUMENTS)
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
    return queue.flush(store, axis_name, _way_of(store, axis_name, "kv.flush"))


@overload
def pushpull(
    store: KVStore, key: Key, value: Any, *, devices: None = None, axis_name: str | None = None
) -> tuple[KVStore, jax.Array]: ...
@overload
def pushpull(
    store: KVStore, key: Key, value: Any, *, devices: Sequence[Device], axis_name: str | None = None
) -> tuple[KVStore, list[jax.Array]]: ...
@overload
def pushpull(
    store: KVStore, key: Keys, value: Any, *, devices: None = None, axis_name: str | None = None
) -> tuple[KVStore, list[jax.Array]]: ...
@overload
def pushpull(
    store: KVStore, key: Keys, value: Any, *, devices: Sequence[Device], axis_name: str | None = None
) -> tuple[KVStore, list[list[jax.Array]]]: ...
@calls.answers("kv.pushpull", MXNET_ARGUMENTS, RETURNED)
def pushpull(
    store: KVStore,
    key: Key | Keys,
    value: Any,
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


# What is pushed, and by which way.


def _request(store: KVStore, key: Key | Keys, value: Any) -> dict[int, list[Any]]:
    """The values of each key, checked, in ascending order of the keys. Keys with no value are left out."""
    keys, many = checks.find_keys(key, "kv.push", store)
    if still := [k for k in keys if k in store.frozen]:
        raise ValueError(f"kv.push: key {still[0]} ({stores.names(store)[still[0]]!r}) is frozen; push the others only")
    given, shapes = checks.as_values(keys, value, "kv.push") if many else [value], stores.shapes_of(store)
    pushed: dict[int, list[Any]] = {}
    for k, values in zip(keys, given, strict=True):
        where, checked = f"kv.push: value for key {k}", pushed.setdefault(k, [])
        for v in values if isinstance(values, (list, tuple)) else [values]:
            if isinstance(v, sparse.RowSparse):
                for leaf in (v.indices, v.values):
                    checks.array(leaf, f"kv.push: rows for key {k}")
            else:
                v = checks.array(v, where)
            checks.storable(v, shapes[k], store.values[k].dtype, where)
            checked.append(v)
        if len({isinstance(v, sparse.RowSparse) for v in checked}) > 1:
            raise TypeError(f"kv.push: key {k}: RowSparse and dense values cannot be pushed together")
    pushed = {k: pushed[k] for k in sorted(pushed) if pushed[k]}
    if isinstance(store.updater, TreeOptimizer):
        _check_tree(store, pushed)
    return pushed


def _check_tree(store: KVStore, pushed: dict[int, list[Any]]) -> None:
    """An optimizer that sees the whole pytree needs all gradients at once, and whole ones."""
    trained = set(stores.trained_keys(store))
    rows = {k for k, values in pushed.items() if isinstance(values[0], sparse.RowSparse)}
    if not rows and trained == pushed.keys():
        return
    needs_all = "the optimizer of this store sees the whole pytree"
    per_key = "make the store with updater=jp.updaters.from_optax(tx), which keeps one state a key"
    also = ", and without mesh= and sharding=" if stores.is_split(store) else ""
    for keys, fault in (
        (rows, f"a RowSparse is a part of a value, and {needs_all}; {per_key}{also}"),
        (trained - pushed.keys(), f"nothing is pushed to them, and {needs_all}; push all at once, or {per_key}"),
        (pushed.keys() - trained, "they are not floating, so they have no gradient; push the floating ones only"),
    ):
        if keys:
            called = ", ".join(repr(stores.names(store)[k]) for k in sorted(keys)[:3])
            raise ValueError(f"kv.push: keys {checks.shorten(sorted(keys))} ({called}): {fault}")


def _way_of(store: KVStore, axis_name: str | None, where: str) -> queue.Send:
    kind, axes = stores.KINDS[store.kind], jax.sharding.get_abstract_mesh().manual_axes
    if axis_name is not None:
        aggregate.axis_size(axis_name, where)
    if not is_tracing():
        if not kind.over_processes or jax.process_count() == 1:
            return _push_here
        processes.refuse_elastic(f"{where}: kind {store.kind!r}")
        return _push_across
    if axis_name is None and axes and not kind.on_one_device:  # it is allowed, but rarely meant
        warnings.warn(
            f"{where}: inside a pmap or shard_map over {', '.join(map(repr, axes))}, without axis_name, nothing is "
            f"summed over the devices; give axis_name={axes[0]!r}, or use kind='local' for a separate store on each",
            stacklevel=calls.users_level(),
        )
    return functools.partial(aggregate.push, axis_name=axis_name)


def _agree(store: KVStore, pushed: dict[int, list[Any]]) -> None:
    """Compare what the processes push. With other keys in one of them, all would wait forever."""
    for k, values in pushed.items():
        if any(spans_processes(leaf) for leaf in jax.tree.leaves(values)):
            where = f"kv.push: key {k}: this value is on devices of several processes"
            raise ValueError(f"{where}; push value.addressable_data(i), or inside shard_map with axis_name")
    where = f"kv.push: kind {store.kind!r}: every process must push the same keys, in the same shapes"
    like = {k: jax.ShapeDtypeStruct(vs[0].shape, store.values[k].dtype) for k, vs in pushed.items()}
    rows = [k for k, vs in pushed.items() if isinstance(vs[0], sparse.RowSparse)]
    processes.agree(where, signature(like) + (f", of keys {rows} rows" if rows else ""))


# A push at the prompt: where its values are summed.


def _push_here(store: KVStore, pushed: Lists, num_updates: Arrays) -> Changes:
    """What a push by this process changes."""
    devices = mesh.one_on_each(pushed.values())
    is_on_each = not stores.is_split(store) and not stores.KINDS[store.kind].on_one_device
    if devices is not None and is_on_each and store.devices in (None, devices):
        # Of a large value each device has a copy. In one memory one device does the work of all.
        large = {k for k in pushed if store.values[k].nbytes >= mesh.LARGE}
        if stores.is_in_rows(store) or not large or not mesh.one_memory(devices):
            large = set[int]()
        large -= aggregate.compressed_keys(store, large)
        ways: list[tuple[Way, list[int]]] = [
            (functools.partial(_push_on_first, devices), [k for k in pushed if k in large]),
            (functools.partial(_push_over, devices), [k for k in pushed if k not in large]),
        ]
    else:
        # Where values are split over a mesh their shardings differ, and one program over the mesh has all keys.
        keys_at: dict[Sharding | None, list[int]] = {}
        for k in pushed:
            keys_at.setdefault(None if stores.is_split(store) else _target(store, k), []).append(k)
        ways = [(functools.partial(_push_at_home, devices), keys) for keys in keys_at.values()]
    parts: list[Changes] = []
    for way, keys in ways:
        for start in range(0, len(keys), mesh.MOST):
            some = {k: pushed[k] for k in keys[start : start + mesh.MOST]}
            parts.append(_push_part(way, store, some, {k: len(values) for k, values in some.items()}, num_updates))
    changes = functools.reduce(operator.or_, parts)
    return changes if isinstance(store.updater, Updater) else _update_by(store, changes)


def _push_across(store: KVStore, pushed: Lists, num_updates: Arrays) -> Changes:
    """What a push by all processes changes."""
    # Every process has its own copy of the stored values, as a store of kind `device`. It sums its own values first.
    # Then the first devices of the processes push, in buckets, and compressed if the store says so. At last every
    # process makes the same update.
    leaders = processes.leaders()
    leader = SingleDeviceSharding(leaders[jax.process_index()])
    # The program of the sum takes stored values as every program of a push does, on the same devices.
    here = {k: put(to_host(store.values[k]), leader) for k in pushed}
    several = {k: vs for k, vs in pushed.items() if len(vs) > 1}
    within, states = stores.KINDS[store.kind].within_process, dict.fromkeys(several, ())
    own = KVStore({k: here[k] for k in several}, states, {}, within, limits=store.limits)
    sums = _push_here(own, several, {}).values if several else {}
    # Of a sum that is on each device, JAX takes the copy that is there already.
    own_sums = {k: [jax.device_put(sums[k] if k in sums else vs[0], leader)] for k, vs in pushed.items()}
    values = {k: assemble([v], copies_on(leaders)) for k, v in here.items()}
    states, counts = dict.fromkeys(values, ()), dict.fromkeys(values, len(leaders))
    over = dataclasses.replace(store, values=values, updater_state=states, layouts=(), updater=assign)
    summed = mesh.run_by_itself(_push_part, functools.partial(_push_over, leaders), over, own_sums, counts, {})
    totals = {k: [put(v.addressable_data(0), store.values[k].sharding)] for k, v in summed.values.items()}
    changes = _push_here(dataclasses.replace(store, compressor=None, residuals={}), totals, num_updates)
    return changes._replace(residuals=summed.residuals)


def _target(store: KVStore, key: int) -> Sharding:
    """Where the values of a key are sent that the devices which push do not sum themselves."""
    return stores.sharding_of(store) if stores.is_in_rows(store) else store.values[key].sharding


def _push_part(way: Way, store: KVStore, pushed: Lists, counts: Mapping[int, int], num_updates: Arrays) -> Changes:
    """What a program of these keys changes. `counts`: how many residuals each of them has, if it is compressed."""
    # Where the updater does not see the keys they are 0, 1, ... in the program. So a loop over the keys of a model
    # compiles one program for each shape, not one for each key.
    updater = store.updater if isinstance(store.updater, Updater) else assign
    shared = updater in (assign, accumulate) or not getattr(updater.update, "uses_key", True)
    numbers, layouts = {k: n if shared else k for n, k in enumerate(pushed)}, dict(store.layouts)
    small = aggregate.compressed_keys(store, counts)
    residuals = aggregate.residuals_for(store, {k: n for k, n in counts.items() if k in small}) if small else {}
    part = KVStore(
        {n: store.values[k] for k, n in numbers.items()},
        {n: store.updater_state[k] for k, n in numbers.items()},
        {numbers[k]: state for k, state in residuals.items()},
        store.kind,
        devices=store.devices,
        limits=store.limits,
        layouts=tuple([(n, layouts[k]) for k, n in numbers.items() if k in layouts]),
    )
    run = aggregate.program(updater, store.compressor)
    asked = {n: num_updates[k] for k, n in numbers.items() if k in num_updates and updater is store.updater}
    changes = way(run, part, {n: pushed[k] for k, n in numbers.items()}, asked)
    keys = {n: k for k, n in numbers.items()}
    return Changes(*[{keys[n]: x for n, x in new.items()} for new in changes[:-1]])


# Where a program runs. It is given what `aggregate.program` takes: a store of some keys, and their lists.


def _push_over(devices: Devices, run: Any, store: KVStore, pushed: Lists, num_updates: Arrays) -> Changes:
    """A program over these devices sums what each of them pushed. Those of this process have one value of each key."""
    along, values, states = split_over(devices), store.values, store.updater_state
    if not stores.is_in_rows(store):
        values, states = put((values, states), copies_on(devices))
    residuals = put(store.residuals, along)
    store = dataclasses.replace(store, values=values, updater_state=states, residuals=residuals)
    # The arrays of the devices become one array over them, without a copy. Buckets are made inside of the program.
    sent: Lists = {}
    for k, each in pushed.items():
        dtype = values[k].dtype
        each = [v if v.dtype == dtype else v.astype(dtype) for v in each]
        sent[k] = [assemble([v if v.ndim else v.reshape(1) for v in each], along)]
    mesh.wait_before_collectives((store, sent), devices)
    return run(store, sent, num_updates, along.mesh)


def _push_at_home(devices: Devices | None, run: Any, store: KVStore, pushed: Lists, num_updates: Arrays) -> Changes:
    """A program where the stored values are sums what is sent there. `devices`: those that push one value each."""
    where = _target(store, next(iter(pushed)))
    # A program takes NumPy's views of one memory without a copy, and faster than arrays that are put on its device.
    if devices and isinstance(where, SingleDeviceSharding) and mesh.one_memory({*devices, *where.device_set}):
        sent: Any = {k: [np.asarray(v) for v in values] for k, values in pushed.items()}
        with jax.default_device(*where.device_set):
            return run(store, sent, num_updates, None)
    sent = {k: mesh.share_or_put(values, _target(store, k)) for k, values in pushed.items()}
    return run(store, sent, num_updates, None)


def _push_on_first(devices: Devices, run: Any, store: KVStore, pushed: Lists, num_updates: Arrays) -> Changes:
    """The first device sums and updates in a memory that all of them share. The others share its results."""
    # So one device does the work of all for large values, of which each device has a copy.
    values, states = put((store.values, store.updater_state), SingleDeviceSharding(devices[0]))
    store = dataclasses.replace(store, values=values, updater_state=states)
    leaves, structure = jax.tree.flatten(_push_at_home(devices, run, store, pushed, num_updates))
    return structure.unflatten(mesh.share_or_put(leaves, copies_on(devices)))


# An updater that runs after the sums.


def _update_by(store: KVStore, summed: Changes) -> Changes:
    """The changes by a Python function, or by an optimizer that sees the whole pytree, where the sums are."""
    sums = summed.values
    # What is there already may be uncommitted, and stays so.
    moved = {k: put(store.values[k], v.sharding) for k, v in sums.items() if store.values[k].sharding != v.sharding}
    store = dataclasses.replace(store, values=store.values | moved)
    if not isinstance(store.updater, TreeOptimizer):
        return aggregate.update(store, sums, {})._replace(residuals=summed.residuals)
    state, where = store.optimizer_state, next(iter(sums.values())).sharding
    if not store.layouts and any(leaf.sharding != where for leaf in jax.tree.leaves(state)):
        state = put(state, where)
    bare = {"updater": None, "compressor": None, "updater_state": {}, "residuals": {}, "pending": {}}
    part = dataclasses.replace(store, optimizer_state=state, **bare)
    lists = {k: [v] for k, v in sorted(sums.items())}
    return aggregate.program(store.updater, None)(part, lists, {}, None)._replace(residuals=summed.residuals)


# Rows of a table.


def _push_rows(
    store: KVStore,
    pushed: dict[int, list[sparse.RowSparse]],
    num_updates: Arrays,
    axis_name: str | None,
    across: bool,
) -> Changes:
    """What a push of rows changes, `across` all processes or in this one. It makes no residuals."""
    apart, dense = "keep this table in a separate store", "push dense values, or use kind 'dist_sync'"
    for is_refused, reason in (
        (stores.is_split(store), f"values are split over a mesh and take no RowSparse; {apart} without mesh="),
        (stores.is_in_rows(store), f"a store of kind {store.kind!r} takes none; use kind 'device' or 'local'"),
        (store.compressor, f"gradient compression does not take a RowSparse, as in MXNet; {apart}"),
        (store.staleness, f"a store of staleness {store.staleness} cannot delay it; {dense}"),
    ):
        if is_refused:
            raise ValueError(f"kv.push: a RowSparse for keys {sorted(pushed)}: {reason}")
    for key in pushed:
        try:
            updaters._said(store.updater, "check_rows", lambda key: None)(key)
        except ValueError as error:
            raise ValueError(f"kv.push: key {key}: {error}") from None
    changes = Changes({}, {})
    for key, rows in pushed.items():
        stored, state = store.values[key], store.updater_state[key]
        run = functools.partial(aggregate.add_rows, store.updater)
        if not is_tracing():
            rows = [_sum_over_processes(rows, stored.dtype)] if across else rows
            rows = put(rows, stored.sharding)
            run = _compiled(store.updater) if isinstance(store.updater, Updater) else run
        changes.values[key], changes.updater_state[key] = run(key, axis_name, rows, state, stored, num_updates.get(key))
    return changes


_compiled = Recent(lambda updater: jax.jit(functools.partial(aggregate.add_rows, updater), static_argnums=(0, 1)))


def _sum_over_processes(rows: list[sparse.RowSparse], dtype: Any) -> sparse.RowSparse:
    """The sum of the rows that all processes push, unique and sorted, in every process."""
    leaders = processes.leaders()
    own = jax.device_put(aggregate.cast_rows(rows, dtype), leaders[jax.process_index()])
    most = max(map(int, processes.exchange(str(sum(r.indices.shape[0] for r in own)))))
    mine = sparse.add(own, size=1 << (most - 1).bit_length() if most else 1)  # few sizes, so few programs
    ours = jax.tree.map(lambda leaf: assemble([leaf], split_over(leaders)), mine)
    total = mesh.run_by_itself(_sum_program(leaders), ours)
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), total)


@functools.lru_cache(maxsize=64)
def _sum_program(devices: Devices) -> Any:
    total = functools.partial(sparse.allreduce, axis_name=mesh.STORE_AXIS)
    over, along = mesh.mesh_of(devices), P(mesh.STORE_AXIS)
    return jax.jit(jax.shard_map(total, mesh=over, in_specs=along, out_specs=P(), check_vma=False))
