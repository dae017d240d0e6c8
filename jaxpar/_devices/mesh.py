"""Arrays on devices: the mesh of a store, its two shardings, and transfers, over several processes too."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from .._core.arrays import Device, is_tracing, without_keys

STORE_AXIS = "data"


def mesh_of(devices: Sequence[Device]) -> Mesh:
    """The mesh of these devices, with the one axis `STORE_AXIS`."""
    return Mesh(np.array(devices), (STORE_AXIS,))


def auto_mesh(mesh: Mesh) -> Mesh:
    """The mesh with axes of type Auto, for programs that the compiler spreads. `jax.make_mesh` makes Explicit ones."""
    return Mesh(mesh.devices, mesh.axis_names)


def copies_on(devices: Sequence[Device]) -> NamedSharding:
    """The sharding of a value with a whole copy on each device."""
    return _sharding(tuple(devices), PartitionSpec())


def split_over(devices: Sequence[Device]) -> NamedSharding:
    """The sharding that gives each device an equal part along the first axis."""
    return _sharding(tuple(devices), PartitionSpec(STORE_AXIS))


def are_on(tree: Any, devices: Sequence[Device]) -> bool:
    """Whether all arrays of a pytree are on these devices, so that a program over them, in this order, takes them."""
    for leaf in jax.tree.leaves(tree):
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
            continue
        sharding = leaf.sharding
        if isinstance(sharding, NamedSharding):
            if tuple(np.ravel(np.asarray(sharding.mesh.devices))) != tuple(devices):
                return False
        elif sharding.device_set != set(devices):
            return False
    return True


@functools.lru_cache(maxsize=256)
def _sharding(devices: tuple[Device, ...], spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(mesh_of(devices), spec)


def assemble(shards: Sequence[jax.Array], sharding: NamedSharding) -> jax.Array:
    """Make one array from this process's arrays, one on each device: stacked, or replicated. Copies nothing.

    Example:
        >>> devices = jax.devices()[:2]
        >>> shards = [jax.device_put(jnp.ones(3), device) for device in devices]
        >>> assemble(shards, split_over(devices)).shape, assemble(shards, copies_on(devices)).shape
        ((6,), (3,))
    """
    shape = shards[0].shape
    if not sharding.is_fully_replicated:
        shape = (sharding.num_devices * shape[0], *shape[1:])
    return jax.make_array_from_single_device_arrays(shape, sharding, list(shards))


def spans_processes(leaf: Any) -> bool:
    """Whether some of the array's devices are of another process."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and not leaf.is_fully_addressable


def put(tree: Any, sharding: Sharding | None) -> Any:
    """Arrays with that sharding, as `jax.device_put`, over the devices of several processes too.

    Nothing is sent between processes. Each process fills the part of its own devices, so every process must give the
    same arrays. An array that already spans processes is resharded by a program over its devices. Random keys work too.
    Inside a traced function arrays have no values, and the devices need not exist.
    """
    local = is_tracing() or sharding is None or sharding.is_fully_addressable
    if local and not any(map(spans_processes, jax.tree.leaves(tree))):
        return jax.device_put(tree, sharding)
    plain, restore = without_keys(tree)
    return restore(jax.tree.map(lambda leaf: _put(leaf, sharding), plain))


def put_copy(tree: Any, sharding: Sharding) -> Any:
    """Copies of the arrays with that sharding. Donating the copies leaves the given arrays valid."""
    # `device_put(may_alias=False)` is not enough. From one device to several it keeps the buffer of the first.
    return put(jax.tree.map(jnp.copy, tree), sharding)


def to_host(leaf: Any) -> Any:
    """Gather an array that spans processes into this process. Other leaves are returned unchanged.

    A replicated array is read from this process's copy. Any other is gathered, so every process must call this.
    """
    if not spans_processes(leaf):
        return leaf
    if leaf.is_fully_replicated:
        return leaf.addressable_data(0)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(leaf, tiled=True)


def _put(leaf: Any, sharding: Sharding | None) -> Any:
    if spans_processes(leaf):
        if leaf.sharding == sharding:
            return leaf
        if sharding is not None and leaf.sharding.device_set == sharding.device_set:
            return jax.device_put(leaf, sharding)  # in any order of the devices
        leaf = to_host(leaf)
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    if not sharding.addressable_devices:
        raise ValueError(f"the given devices all belong to other processes: {sorted(map(str, sharding.device_set))}")
    leaf = np.asarray(leaf)
    # np.array: jax shares memory between CPU devices and NumPy where it can, and each device needs its own.
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: np.array(leaf[index]))
