"""A store on other devices, and how a store is spread over a mapped axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._core.arrays import Device
from .._core.keys import check_stored
from .._devices import processes
from .._devices.mesh import STORE_AXIS, auto_mesh, check_mesh, copies_on, mesh_of, put_copy, split_over
from .._devices.placement import to_host
from .._devices.sharding_rules import fsdp
from .._devices.shardings import shardings_of
from .._devices.user_mesh import in_user_mesh
from . import _aggregate, _staleness, _tree
from ._create import create
from ._mxnet import answers
from ._new_values import signature
from ._store import KVStore, check_shares, copies_for, kind_of, layout_of, mesh_of_values, names, shapes_of, specs_of


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
    mesh = _target_mesh(store, devices, mesh, sharding)
    if mesh is not None:
        shardings = mesh_shardings(store, mesh, sharding)
        return on_mesh(_values_of_first(store, tuple(mesh.devices.flat)), mesh, shardings)
    target = create(store.kind, devices=devices).devices
    if target is None:
        raise ValueError("kv.place: give devices or mesh")
    if store.shardings:
        if target != store.devices:
            raise ValueError(
                "kv.place: values of this store are split over a mesh, and these are other devices; give the new mesh, "
                "as kv.place(store, mesh=mesh, sharding=rule)"
            )
        return on_mesh(store, mesh_of_values(store), dict(store.shardings))
    store = _values_of_first(store, target)
    empty = dataclasses.replace(store, devices=target, values={}, updater_state={}, residuals={}, pending={})
    if store.devices is None or len(store.devices) != len(target):
        check_shares(empty, specs_of(store), "kv.place")
        _tree.check_shares(store, len(target), "kv.place")
    layout, shapes, keys = layout_of(store), shapes_of(store), sorted(store.values)

    def move(k: int, leaf: jax.Array) -> jax.Array:
        """A value, or a leaf of an updater's state. That is laid out as the value if it has its shape."""
        if leaf.shape != store.values[k].shape:
            return put_copy(leaf, copies_on(target))
        return put_copy(layout.stored(layout.whole(leaf, shapes[k]), target), layout.sharding(target))

    on_target = dataclasses.replace(
        empty,
        values={k: move(k, store.values[k]) for k in keys},
        updater_state={k: jax.tree.map(lambda leaf, k=k: move(k, leaf), store.updater_state[k]) for k in keys},
        optimizer_state=_moved_state(store, target),
    )
    return _with_pending(_with_residuals(on_target, store.residuals), store.pending)


def _target_mesh(store: KVStore, devices: Any, mesh: Any, sharding: Any) -> Mesh | None:
    """The mesh to split values over. None: they go to `devices`."""
    if mesh is not None:
        if devices is not None:
            raise ValueError("kv.place: mesh= stands in place of devices=; give one of them")
        return check_mesh(mesh, "kv.place")
    if sharding is None:
        return None
    if devices is not None or not store.shardings:
        raise ValueError("kv.place: sharding= splits values over a mesh; give mesh=, and no devices=")
    return mesh_of_values(store)


def _moved_state(store: KVStore, target: Sequence[Device]) -> Any:
    """The state of an optimizer of the whole pytree, on other devices."""
    layout = layout_of(store)
    leaves, structure = jax.tree.flatten(store.optimizer_state)
    moved: list[Any] = []
    for leaf, shape in zip(leaves, _tree.state_shapes(store), strict=True):
        if shape is None:
            moved.append(put_copy(leaf, copies_on(target)))
        else:
            moved.append(put_copy(layout.stored(layout.whole(leaf, shape), target), layout.sharding(target)))
    return structure.unflatten(moved)


def mesh_shardings(store: KVStore, mesh: Mesh, sharding: Any) -> dict[int, NamedSharding]:
    """The sharding of each value on a mesh, by a rule or a pytree. None: kind `sharded` splits, the others copy."""
    mesh = auto_mesh(mesh)
    if sharding is None and kind_of(store).layout.is_split:
        sharding = fsdp(mesh.axis_names[0])
    specs = specs_of(store)
    like: Any = {names(store)[k]: spec for k, spec in specs.items()} if store.treedef is None else None
    if store.treedef is not None:
        like = store.treedef.unflatten([specs[k] for k, _ in store.paths])
    found = shardings_of(like, PartitionSpec() if sharding is None else sharding, mesh, where="kv.place")
    return dict(zip(sorted(specs), jax.tree.leaves(found), strict=True))


def on_mesh(store: KVStore, mesh: Mesh, shardings: dict[int, NamedSharding]) -> KVStore:
    """The store with values that are split over a mesh in their own shapes, in memory of their own.

    Raises:
        ValueError: a compressor, a staleness or kind `local`.
    """
    check_mesh_options(store)
    layout, shapes = layout_of(store), shapes_of(store)
    target = dataclasses.replace(
        store,
        devices=tuple(mesh.devices.flat),
        shapes=(),
        shardings=tuple(sorted(shardings.items())),
        values={k: put_copy(layout.whole(v, shapes[k]), shardings[k]) for k, v in store.values.items()},
        optimizer_state=_tree.whole_state(store),
    )
    homes = _tree.state_homes(target)
    leaves, structure = jax.tree.flatten(target.optimizer_state)

    def state(k: int, leaf: jax.Array) -> jax.Array:
        if leaf.shape != store.values[k].shape:
            return put_copy(leaf, copies_for(target))
        return put_copy(layout.whole(leaf, shapes[k]), shardings[k])

    return dataclasses.replace(
        target,
        updater_state={k: jax.tree.map(lambda x, k=k: state(k, x), s) for k, s in store.updater_state.items()},
        optimizer_state=structure.unflatten(
            [put_copy(x, home or copies_for(target)) for x, home in zip(leaves, homes, strict=True)]
        ),
    )


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
    layout, split, whole = layout_of(store), PartitionSpec(axis_name), PartitionSpec()

    def spec(leaf: Any, k: int) -> PartitionSpec:
        """Of a leaf of an updater's state, which is spread as the value if it has its shape."""
        return layout.spec(axis_name) if layout.is_split and leaf.shape == store.values[k].shape else whole

    return dataclasses.replace(
        store,
        values=dict.fromkeys(store.values, layout.spec(axis_name)),
        updater_state={k: jax.tree.map(lambda leaf, k=k: spec(leaf, k), v) for k, v in store.updater_state.items()},
        optimizer_state=jax.tree.map(lambda x: split if _tree.is_rows(store, x) else whole, store.optimizer_state),
        residuals=jax.tree.map(lambda _: split, store.residuals),
        pending={k: p._replace(values=(split,) * len(p.values), count=whole) for k, p in store.pending.items()},
    )


def leaf_shardings(store: KVStore) -> KVStore:
    """The store, which has devices, with the `NamedSharding` of each array in place of it."""
    assert store.devices is not None
    if not store.shardings:
        mesh = mesh_of(store.devices)
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), partition_specs(store, STORE_AXIS))
    places, copies = dict(store.shardings), copies_for(store)
    return dataclasses.replace(
        store,
        values=places,
        updater_state={
            k: jax.tree.map(lambda x, k=k: places[k] if x.shape == store.values[k].shape else copies, state)
            for k, state in store.updater_state.items()
        },
        optimizer_state=jax.tree.structure(store.optimizer_state).unflatten(_tree.state_homes(store)),
    )


def _values_of_first(store: KVStore, target: Sequence[Device]) -> KVStore:
    """The store with process 0's values and states, if they are local and go to devices of several processes."""
    held = (store.values, store.updater_state, store.optimizer_state)
    if not processes.to_share(held, target):
        return store
    processes.agree("kv.place: every process must hold the same keys, in the same shapes", signature(store.values))
    values, states, whole = processes.from_first(held)
    return dataclasses.replace(store, values=values, updater_state=states, optimizer_state=whole)


def _with_residuals(store: KVStore, before: dict[int, Any]) -> KVStore:
    """The store with a residual for each compressed key and each of its devices, so that a push makes none."""
    if store.compressor is None:
        return store
    assert store.devices is not None
    residuals = {}
    for k in sorted(_aggregate.compressed_keys(store, store.values)):
        fresh = _aggregate.start_residuals(store, k, len(store.devices))
        held = before.get(k)
        same = held is not None and jax.tree.map(jnp.shape, held) == jax.tree.map(jnp.shape, fresh)
        residuals[k] = put_copy(held if same else fresh, split_over(store.devices))
    return dataclasses.replace(store, residuals=residuals)


def _with_pending(store: KVStore, before: dict[int, _staleness.PendingPushes]) -> KVStore:
    """The store with the pending pushes of each of its devices, so that a push makes no room for them.

    Raises:
        ValueError: pushes are pending in this process only, and the devices are of several.
    """
    if not store.staleness:
        return store
    assert store.devices is not None
    count, pending = len(store.devices), {}
    for k in sorted(store.values):
        held = before.get(k)
        if held is None and not jnp.issubdtype(store.values[k].dtype, jnp.inexact):
            continue  # a step pushes what has a gradient
        if held is None:
            held = _staleness.start(store, k, count)
        elif processes.to_share(held.values, store.devices):
            raise ValueError(
                f"kv.place: pushes to key {k} are pending in this process only, and the devices are of several "
                "processes; call kv.flush before"
            )
        held = _staleness.regroup(jax.tree.map(to_host, held), count)
        values = put_copy(held.values, split_over(store.devices))
        number = put_copy(held.count, copies_on(store.devices))
        pending[k] = _staleness.PendingPushes(values, number)
    return dataclasses.replace(store, pending=pending)
