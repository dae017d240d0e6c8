"""A store on other devices, and how it is spread over a mapped axis."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from .._core import checks
from .._core.arrays import Device, PyTree
from .._core.transfers import allows_transfers
from .._devices import processes
from .._devices.mesh import auto_mesh, put_copy, split_over, to_host
from .._devices.shardings import ShardingRule, fsdp, shardings_of
from .._devices.user_mesh import in_user_mesh
from .._store import aggregate, queue, store as stores
from .._store.store import Form, KVStore, Layout, Layouts
from ._create import create, signature


@allows_transfers
@in_user_mesh
def place(
    store: KVStore,
    devices: Sequence[Device] | None = None,
    *,
    mesh: Mesh | None = None,
    sharding: PyTree = None,
) -> KVStore:
    """Copy a store to other devices, with its updater states.

    A store of kind `sharded` is cut into one row for each device. For the other kinds, also `local`, each device gets a
    copy, as a program over these devices needs. Residuals of a compressor are kept for the same number of devices,
    otherwise they start at zero. Pending pushes move to the new devices, so that later sums are the same.

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
        RuntimeError: a stored value was deleted, as by donating the store.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxpar import kv
        >>> store = kv.place(kv.from_params({"w": jnp.ones(2)}), jax.devices()[:1])
        >>> len(store.values[0].sharding.device_set)
        1
    """
    checks.find_keys([*store.values], "kv.place", store)
    checks.at_most_one("kv.place", mesh=mesh, devices=devices)
    if mesh is None and sharding is not None:
        if devices is not None or not stores.is_split(store):
            raise ValueError("kv.place: sharding= splits values over a mesh; give mesh= with it, not devices=")
        mesh = stores.mesh_of_values(store)
    # Where the store goes, and how each of its values lies there.
    if mesh is not None:
        specs, target = stores.specs_of(store), tuple(mesh.devices.flat)
        spec_tree = specs if store.treedef is None else store.treedef.unflatten([specs[k] for k, _ in store.paths])
        if sharding is None:
            sharding = default_rule(store, mesh) if stores.KINDS[store.kind].in_rows else PartitionSpec()
        layouts = split_layouts(store, sorted(specs), spec_tree, mesh, sharding, "kv.place")
    else:
        target = create(store.kind, devices=devices).devices
        if target is None:
            raise ValueError("kv.place: give devices or mesh")
        if stores.is_split(store) and target != store.devices:
            raise ValueError(
                "kv.place: the values are split over a mesh with other devices; write kv.place(store, mesh=mesh, "
                "sharding=rule)"
            )
        rows = {k: dataclasses.replace(layout, count=len(target)) for k, layout in stores.rows_of(store).items()}
        layouts = tuple({**dict(store.layouts), **rows}.items())

    # For devices of several processes, what process 0 has.
    arrays = (store.values, store.updater_state, store.optimizer_state)
    if processes.to_share(arrays, target):
        processes.agree("kv.place: every process must hold the same keys, in the same shapes", signature(store.values))
        arrays = processes.from_first(arrays)
    values, states, optimizer_state = arrays
    store = dataclasses.replace(store, values=values, updater_state=states, optimizer_state=optimizer_state)

    # Values and states, by way of the full value: rows of 3 devices are no rows of 4.
    moved = dataclasses.replace(store, devices=target, layouts=layouts, residuals={}, pending={})
    if store.devices is None or len(store.devices) != len(target):
        aggregate.check_shares(moved, stores.specs_of(store), "kv.place")

    def move(before: Layout, after: Layout, leaf: jax.Array) -> jax.Array:
        return put_copy(after.stored(before.full(leaf)), stores.sharding_of(moved, after))

    arrays_of = operator.attrgetter("values", "updater_state", "optimizer_state")
    layouts_before, layouts_after = stores.layout_of_each(store), stores.layout_of_each(moved)
    values, states, optimizer_state = jax.tree.map(move, *map(arrays_of, (layouts_before, layouts_after, store)))
    moved = dataclasses.replace(moved, values=values, updater_state=states, optimizer_state=optimizer_state)

    # A residual for each compressed key and each device, so that a push makes none.
    compressed, residuals = sorted(aggregate.compressed_keys(moved, moved.values)), dict[int, Any]()
    for k, initial in aggregate.start_residuals(moved, compressed, len(target)).items():
        before = store.residuals.get(k)
        fits = before is not None and jax.tree.map(jnp.shape, before) == jax.tree.map(jnp.shape, initial)
        residuals[k] = put_copy(before if fits else initial, split_over(target))

    # The pending pushes of each device, so that a push makes no room for them.
    pending: dict[int, queue.PendingPushes] = {}
    if store.staleness:
        if processes.to_share([pushes.values for pushes in store.pending.values()], target):
            raise ValueError("kv.place: pushes are pending in this process only; call kv.flush first")
        floating = {k for k, v in moved.values.items() if jnp.issubdtype(v.dtype, jnp.inexact)}
        for k in sorted(store.pending.keys() | floating - {*moved.frozen}):
            pushes = store.pending.get(k) or queue.start(moved, k, len(target))
            pushes = queue.regroup(jax.tree.map(to_host, pushes), len(target))
            counts = put_copy(pushes.count, stores.sharding_of(moved))
            pending[k] = queue.PendingPushes(put_copy(pushes.values, split_over(target)), counts)
    return dataclasses.replace(moved, residuals=residuals, pending=pending)


def default_rule(store: KVStore, mesh: Mesh) -> ShardingRule:
    """How the values of kind `sharded` are split over a mesh: by `fsdp`, those that are frozen not at all."""
    split, frozen = fsdp(mesh.axis_names[0]), {dict(store.paths)[k] for k in store.frozen}
    return lambda path, shape, mesh: PartitionSpec() if path in frozen else split(path, shape, mesh)


def split_layouts(
    store: KVStore, keys: Iterable[int], params: PyTree, mesh: Mesh, sharding: PyTree, caller: str
) -> Layouts:
    """The layouts of a pytree of params that is split over a mesh, for the keys of its leaves."""
    kind, fault = stores.KINDS[store.kind], ""
    if kind.on_one_device:
        fault = f"kind {kind.name!r} keeps a value on one device; use kind 'device', or 'sharded'"
    elif store.staleness:
        fault = "delayed pushes belong to the devices that pushed; use kind 'dist_sync', or engine 'shard_map'"
    elif store.compressor is not None:
        fault = "a compressor needs the gradient of each device; use engine 'pmap' or 'shard_map'"
    if fault:
        raise ValueError(f"a store whose values are split over a mesh: {fault}")
    shardings = jax.tree.leaves(shardings_of(params, sharding, auto_mesh(mesh), where=caller))
    return tuple((k, Layout(Form.SPLIT, sharding=s)) for k, s in zip(keys, shardings, strict=True))


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
    layouts = stores.layout_of_each(store)
    return jax.tree.map(lambda layout: PartitionSpec(axis_name) if layout.spec else PartitionSpec(), layouts)
