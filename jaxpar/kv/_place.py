"""A store on other devices, and how a store is spread over a mapped axis."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from .._core.arrays import Device
from .._core.calls import answers
from .._core.checks import check_stored
from .._devices import processes
from .._devices.mesh import auto_mesh, put_copy, split_over, to_host
from .._devices.shardings import ShardingRule, fsdp, shardings_of
from .._devices.user_mesh import in_user_mesh
from .._store import aggregate, placing, queue, tree_optimizer
from .._store.store import (
    KVStore,
    Layouts,
    Rows,
    Split,
    copies_for,
    is_on_mesh,
    kind_of,
    layouts_of,
    mesh_of_values,
    names,
    rows_of,
    specs_of,
)
from ..mxnet import _STORE_ARGUMENTS as MXNET_ARGUMENTS
from ._create import create, signature


@answers("kv.place", MXNET_ARGUMENTS)
@in_user_mesh
def place(
    store: KVStore,
    devices: Sequence[Device] | None = None,
    *,
    mesh: Mesh | None = None,
    sharding: Any = None,
) -> KVStore:
    """Copy a store to other devices, with its updater states.

    A store of kind `sharded` is cut into one row for each device. For the other kinds, also `local`, each device gets a
    copy, as a program over these devices needs. Residuals of a compressor belong to the devices that pushed. With the
    same number of devices they are kept, otherwise they start at zero. Pending pushes move to the new devices, so that
    later sums are the same.

    With a mesh, values keep their shapes and are split over the mesh, as the training step's engine `jit` needs. A
    store that is split over a mesh stays split on the same devices.

    Args:
        store: any store.
        devices: one or more distinct devices.
        mesh: a `jax.sharding.Mesh`, in place of `devices`.
        sharding: how values are split over `mesh`, as in `kv.from_params`. Without `mesh`, the store's own mesh is
            used.

    Returns:
        A new store that shares no memory with `store`.

    Raises:
        ValueError: the kind is `sharded` and the updater is not elementwise for shares of this many devices; values are
            split over a mesh of other devices; both `devices` and `mesh` are given, or `sharding` without a mesh.
        TypeError: `mesh` is not a mesh.
        RuntimeError: a stored value was deleted, for example by donating the store.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxpar import kv
        >>> store = kv.place(kv.from_params({"w": jnp.ones(2)}), jax.devices()[:1])
        >>> len(store.values[0].sharding.device_set)
        1
    """
    check_stored(store.values, store.values, "kv.place")
    if mesh is not None and devices is not None:
        raise ValueError("kv.place: give mesh= or devices=, not both")
    if mesh is None and sharding is not None:
        if devices is not None or not is_on_mesh(store):
            raise ValueError("kv.place: sharding= splits values over a mesh; give mesh= with it, not devices=")
        mesh = mesh_of_values(store)
    if mesh is not None:
        layouts = _layouts_on_mesh(store, mesh, sharding)
        target = tuple(mesh.devices.flat)
    else:
        target = create(store.kind, devices=devices).devices
        if target is None:
            raise ValueError("kv.place: give devices or mesh")
        if is_on_mesh(store) and target != store.devices:
            hint = "write kv.place(store, mesh=mesh, sharding=rule)"
            raise ValueError(f"kv.place: the values are split over a mesh with other devices; {hint}")
        rows = {k: Rows(layout.shape, len(target)) for k, layout in rows_of(store).items()}
        layouts = tuple({**dict(store.layouts), **rows}.items())
    store = _values_of_first(store, target)
    moved = _move(store, target, layouts)
    return _with_pending(_with_residuals(moved, store.residuals), store.pending)


def _layouts_on_mesh(store: KVStore, mesh: Mesh, sharding: Any) -> Layouts:
    """The layout of each value on a mesh, by a rule or a pytree. None: kind `sharded` splits, the others copy."""
    specs = specs_of(store)
    like: Any = {names(store)[k]: spec for k, spec in specs.items()}
    if store.treedef is not None:
        like = store.treedef.unflatten([specs[k] for k, _ in store.paths])
    if sharding is None:
        sharding = default_rule(store, mesh) if kind_of(store).in_rows else PartitionSpec()
    return split_layouts(store, sorted(specs), like, mesh, sharding, "kv.place")


def default_rule(store: KVStore, mesh: Mesh) -> ShardingRule:
    """How the values of kind `sharded` are split over a mesh: by `fsdp`, those that are frozen not at all."""
    split, frozen = fsdp(mesh.axis_names[0]), {dict(store.paths)[k] for k in store.frozen}
    return lambda path, shape, mesh: PartitionSpec() if path in frozen else split(path, shape, mesh)


def split_layouts(store: KVStore, keys: Iterable[int], params: Any, mesh: Mesh, sharding: Any, where: str) -> Layouts:
    """The layouts of a pytree of params that is split over a mesh, for the keys of its leaves."""
    check_mesh_options(store)
    found = jax.tree.leaves(shardings_of(params, sharding, auto_mesh(mesh), where=where))
    return tuple((k, Split(s)) for k, s in zip(keys, found, strict=True))


def _move(store: KVStore, target: tuple[Device, ...], layouts: Layouts) -> KVStore:
    """The values and the updater's states on other devices, in memory of their own."""
    bare = dataclasses.replace(store, devices=target, layouts=layouts, residuals={}, pending={})
    if store.devices is None or len(store.devices) != len(target):
        tree_optimizer.check_shares(bare, specs_of(store), "kv.place")
    before, after = layouts_of(store), layouts_of(bare)

    def value(k: int, leaf: jax.Array) -> jax.Array:
        return put_copy(after[k].stored(before[k].whole(leaf)), after[k].sharding(target))

    def state(k: int, leaf: jax.Array) -> jax.Array:
        """What has the shape of the value is kept as the value."""
        return value(k, leaf) if leaf.shape == store.values[k].shape else put_copy(leaf, copies_for(bare))

    keys = sorted(store.values)
    moved = dataclasses.replace(
        bare,
        values={k: value(k, store.values[k]) for k in keys},
        updater_state={k: jax.tree.map(functools.partial(state, k), store.updater_state[k]) for k in keys},
        optimizer_state=placing.whole_state(store),
    )
    leaves, structure = jax.tree.flatten(moved.optimizer_state)
    both = zip(placing.state_layouts(moved), leaves, strict=True)
    leaves = [put_copy(layout.stored(leaf), layout.sharding(target)) for layout, leaf in both]
    return dataclasses.replace(moved, optimizer_state=structure.unflatten(leaves))


def check_mesh_options(store: KVStore) -> None:
    """`ValueError` for a store whose values cannot be split over a mesh in their own shapes."""
    kind, fault = kind_of(store), ""
    if kind.on_one_device:
        fault = f"kind {kind.name!r} keeps a value on one device; use kind 'device', or 'sharded'"
    elif store.staleness:
        fault = "delayed pushes belong to the devices that pushed; use kind 'dist_sync', or engine 'shard_map'"
    elif store.compressor is not None:
        fault = "a compressor needs the gradient of each device; use engine 'pmap' or 'shard_map'"
    if fault:
        raise ValueError(f"a store whose values are split over a mesh: {fault}")


@answers("kv.partition_specs", MXNET_ARGUMENTS)
def partition_specs(store: KVStore, axis_name: str) -> KVStore:
    """The `PartitionSpec`s of a store, for `shard_map`'s in_specs and out_specs.

    Args:
        store: any store.
        axis_name: the mesh axis that splits values (kind `sharded`), residuals and pending pushes.

    Returns:
        The store with a `PartitionSpec` in place of each array: `P(axis_name)` for arrays that are split along the
        first axis, and `P()` for replicated arrays.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxpar import kv
        >>> kv.partition_specs(kv.init(kv.create("device"), 3, jnp.ones(2)), "data").values
        {3: P()}
    """
    return placing.partition_specs(store, axis_name)


def _values_of_first(store: KVStore, target: Sequence[Device]) -> KVStore:
    """The store with process 0's values and states, if they are local and go to devices of several processes."""
    arrays = (store.values, store.updater_state, store.optimizer_state)
    if not processes.to_share(arrays, target):
        return store
    processes.agree("kv.place: every process must hold the same keys, in the same shapes", signature(store.values))
    values, states, whole = processes.from_first(arrays)
    return dataclasses.replace(store, values=values, updater_state=states, optimizer_state=whole)


def _with_residuals(store: KVStore, before: dict[int, Any]) -> KVStore:
    """The store with a residual for each compressed key and each of its devices, so that a push makes none."""
    if store.compressor is None:
        return store
    assert store.devices is not None
    residuals = {}
    for k in sorted(aggregate.compressed_keys(store, store.values)):
        fresh = aggregate.start_residuals(store, k, len(store.devices))
        old = before.get(k)
        fits = old is not None and jax.tree.map(jnp.shape, old) == jax.tree.map(jnp.shape, fresh)
        residuals[k] = put_copy(old if fits else fresh, split_over(store.devices))
    return dataclasses.replace(store, residuals=residuals)


def _with_pending(store: KVStore, before: dict[int, queue.PendingPushes]) -> KVStore:
    """The store with the pending pushes of each of its devices, so that a push makes no room for them."""
    if not store.staleness:
        return store
    assert store.devices is not None
    count, pending = len(store.devices), {}
    for k in sorted(store.values):
        pushes = before.get(k)
        has_gradient = jnp.issubdtype(store.values[k].dtype, jnp.inexact) and k not in store.frozen
        if pushes is None and not has_gradient:
            continue
        if pushes is None:
            pushes = queue.start(store, k, count)
        elif processes.to_share(pushes.values, store.devices):
            which = f"pushes to key {k} are pending in this process only"
            raise ValueError(f"kv.place: {which}, but the devices belong to several processes; call kv.flush first")
        pushes = queue.regroup(jax.tree.map(to_host, pushes), count)
        values, number = put_copy(pushes.values, split_over(store.devices)), put_copy(pushes.count, copies_for(store))
        pending[k] = queue.PendingPushes(values, number)
    return dataclasses.replace(store, pending=pending)
