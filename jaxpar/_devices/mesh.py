"""The mesh of a store's devices, and copies of arrays on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._core.arrays import Device
from .placement import put

STORE_AXIS = "data"


def mesh_of(devices: Sequence[Device]) -> Mesh:
    return Mesh(np.array(devices), (STORE_AXIS,))


def copied(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    """The arrays with that sharding in memory of their own, so that donating them harms nobody.

    `device_put(may_alias=False)` is not enough: going from one device to several it keeps the first one's buffer.
    """
    return put(jax.tree.map(jnp.copy, tree), sharding)


def copies_on(devices: Sequence[Device]) -> NamedSharding:
    """The sharding of a value with a whole copy on each device."""
    return NamedSharding(mesh_of(devices), PartitionSpec())


def split_over(devices: Sequence[Device], axis: int = 0) -> NamedSharding:
    """The sharding of a value of which each device has an equal part along one axis."""
    return NamedSharding(mesh_of(devices), PartitionSpec(*[None] * axis, STORE_AXIS))
