"""The mesh of a store's devices: how arrays are laid out on it, and copies of them there."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._core import checks
from .._core.arrays import Device
from .placement import put

STORE_AXIS = "data"


def mesh_of(devices: Sequence[Device]) -> Mesh:
    """The mesh of these devices, with the one axis `STORE_AXIS`."""
    return Mesh(np.array(devices), (STORE_AXIS,))


def check_mesh(mesh: object, where: str) -> Mesh:
    """The mesh. `TypeError` for anything else."""
    if isinstance(mesh, Mesh):
        return mesh
    raise TypeError(f"{where}: mesh must be a jax.sharding.Mesh, got {checks.describe(mesh)}")


def auto_mesh(mesh: Mesh) -> Mesh:
    """The mesh with axes of type Auto, for programs that the compiler spreads. `jax.make_mesh` makes Explicit ones."""
    return Mesh(mesh.devices, mesh.axis_names)


def copies_on(devices: Sequence[Device]) -> NamedSharding:
    """The sharding of a value with a whole copy on each device."""
    return _sharding(tuple(devices), PartitionSpec())


def split_over(devices: Sequence[Device], axis: int = 0) -> NamedSharding:
    """The sharding of a value of which each device has an equal part along one axis."""
    return _sharding(tuple(devices), PartitionSpec(*[None] * axis, STORE_AXIS))


def are_on(tree: Any, devices: Sequence[Device]) -> bool:
    """Whether all arrays of a pytree are on these devices, so that a program over them, in this order, takes them."""

    def is_elsewhere(leaf: Any) -> bool:
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
            return False
        sharding = leaf.sharding
        if isinstance(sharding, NamedSharding):
            return tuple(np.ravel(np.asarray(sharding.mesh.devices))) != tuple(devices)
        return sharding.device_set != set(devices)

    return not any(map(is_elsewhere, jax.tree.leaves(tree)))


def put_copy(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    """The arrays with that sharding, in memory of their own: donating them leaves the given ones valid.

    `device_put(may_alias=False)` is not enough. From one device to several it keeps the buffer of the first.
    """
    return put(jax.tree.map(jnp.copy, tree), sharding)


def assemble(shards: Sequence[jax.Array], sharding: NamedSharding) -> jax.Array:
    """One array out of this process's, one on each of its devices: along the first axis, or all alike. Copies nothing.

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


@functools.lru_cache(maxsize=256)
def _sharding(devices: tuple[Device, ...], spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(mesh_of(devices), spec)
