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
from .._core.keys import check_stored
from .._devices import processes
from .._devices.mesh import auto_mesh, check_mesh, put_copy, split_over
from .._devices.placement import to_host
from .._devices.sharding_rules import fsdp
from .._devices.shardings import shardings_of
from .._devices.user_mesh import in_user_mesh
from .._store import aggregate, queue, tree_optimizer
from .._store.layouts import Rows, Split
from .._store.placing import for_each_array
from .._store.store import (
    KVStore,
    Layouts,
    copies_for,
    is_on_mesh,
    kind_of,
    layouts_of,
    mesh_of_values,
    names,
    rows_of,
    specs_of,
)
from ._create import create, signature
from ._mxnet import answers


@answers
@in_user_mesh
def place(
    store: KVStore,
    devices: Sequence[Device] | None = None,
    *,
    mesh: Mesh | None = None,
    sharding: Any = None,
) -> KVStore:
    """Copy a store to other devices, values and updater states with it.

    A store of kind `sharded` is cut into one row for each of the devices. Of the other kinds, `local` too, each device
    gets a copy, as a program over these devices needs it. The residuals of a compressor belong to the devices that
    pushed. They stay if their number is the same, and start from scratch otherwise. Pending pushes are handed to the
    new devices, so that the later sums are the same.

    With a mesh, values keep their shapes and are split over it, as the training step of engine `jit` has them. A store
    that is split over a mesh stays so on the same devices.

    Args:
        store: any store.
        devices: one or more different devices.
        mesh: in place of `devices`.
        sharding: how values are split over `mesh`: as in `kv.from_params`. None as `mesh` is then the store's own.

    Returns:
        A new store. Its arrays share no memory with those of `store`.

    Raises:
        ValueError: kind `sharded` and an updater that is not elementwise for shares of this many devices. Values that
            are split over a mesh, and other devices. Both `devices` and `mesh`, or `sharding` without a mesh.
        TypeError: a `mesh` that is none.
        RuntimeError: a stored value was deleted, as by donating the store.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxpar import kv
        >>> store = kv.place(kv.from_params({"w": jnp.ones(2)}), jax.devices()[:1])
        >>> len(store.values[0].sharding.device_set)
        1
    """
    check_stored(store.values, store.values, "kv.place")
    if mesh is not None and devices is not None:
        raise ValueError("kv.place: mesh= stands in place of devices=; give one of them")
    if mesh is None and sharding is not None:
        if devices is not None or not is_on_mesh(store):
            raise ValueError("kv.place: sharding= splits values over a mesh; give mesh=, and no devices=")
        mesh = mesh_of_values(store)
    if mesh is not None:
        layouts = _layouts_on_mesh(store, check_mesh(mesh, "kv.place"), sharding)
        target = tuple(mesh.devices.flat)
    else:
        target = create(store.kind, devices=devices).devices
        if target is None:
            raise ValueError("kv.place: give devices or mesh")
        if is_on_mesh(store) and target != store.devices:
            raise ValueError(
                "kv.place: values of this store are split over a mesh, and these are other devices; give the new mesh, "
                "as kv.place(store, mesh=mesh, sharding=rule)"
            )
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
        sharding = fsdp(mesh.axis_names[0]) if kind_of(store).in_rows else PartitionSpec()
    return split_layouts(store, sorted(specs), like, mesh, sharding, "kv.place")


def split_layouts(store: KVStore, keys: Iterable[int], params: Any, mesh: Mesh, sharding: Any, where: str) -> Layouts:
    """The layouts of a pytree of params that is split over a mesh, for the keys of its leaves.

    Raises:
        ValueError: the store has a compressor, a staleness or kind `local`.
    """
    check_mesh_options(store)
    found = jax.tree.leaves(shardings_of(params, sharding, auto_mesh(mesh), where=where))
    return tuple((k, Split(s)) for k, s in zip(keys, found, strict=True))


def _move(store: KVStore, target: tuple[Device, ...], layouts: Layouts) -> KVStore:
    """The values and the updater's states on other devices, in memory of their own.

    Raises:
        ValueError: an updater that is not elementwise, and another number of rows than before.
    """
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
        optimizer_state=tree_optimizer.whole_state(store),
    )
    leaves, structure = jax.tree.flatten(moved.optimizer_state)
    both = zip(tree_optimizer.state_layouts(moved), leaves, strict=True)
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


@answers
def partition_specs(store: KVStore, axis_name: str) -> KVStore:
    """How a store is spread over a mesh axis, for `shard_map`'s in_specs and out_specs.

    Args:
        store: any store.
        axis_name: the axis of the mesh over which values (kind `sharded`), residuals and pending pushes are spread.

    Returns:
        The store with a `PartitionSpec` in place of each array: `P(axis_name)` for what is spread over the devices
        along its first axis, and `P()` for what every device holds whole.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxpar import kv
        >>> kv.partition_specs(kv.init(kv.create("device"), 3, jnp.ones(2)), "data").values
        {3: P()}
    """
    split, whole = PartitionSpec(axis_name), PartitionSpec()
    return for_each_array(store, lambda layout: layout.spec(axis_name), split, whole)


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
    """The store with the pending pushes of each of its devices, so that a push makes no room for them.

    Raises:
        ValueError: pushes are pending in this process only, and the devices are of several.
    """
    if not store.staleness:
        return store
    assert store.devices is not None
    count, pending = len(store.devices), {}
    for k in sorted(store.values):
        pushes = before.get(k)
        if pushes is None and not jnp.issubdtype(store.values[k].dtype, jnp.inexact):
            continue  # a step pushes what has a gradient
        if pushes is None:
            pushes = queue.start(store, k, count)
        elif processes.to_share(pushes.values, store.devices):
            raise ValueError(
                f"kv.place: pushes to key {k} are pending in this process only, and the devices are of several "
                "processes; call kv.flush before"
            )
        pushes = queue.regroup(jax.tree.map(to_host, pushes), count)
        values, number = put_copy(pushes.values, split_over(store.devices)), put_copy(pushes.count, copies_for(store))
        pending[k] = queue.PendingPushes(values, number)
    return dataclasses.replace(store, pending=pending)
