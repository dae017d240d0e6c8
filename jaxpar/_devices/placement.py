"""Arrays onto devices and back to the host, also where devices belong to other processes."""

from __future__ import annotations

from typing import Any

import jax
import jax.core
import numpy as np
from jax.sharding import Sharding

from .._core.arrays import without_keys


def put(tree: Any, sharding: Sharding | None) -> Any:
    """Arrays with that sharding, as `jax.device_put`, over the devices of several processes too.

    Nothing is sent between processes. Each fills in the part of its own devices, so every process must give the same
    arrays. An array that spans processes already is resharded by a program over its devices.

    Args:
        tree: a pytree of arrays. Random keys are put as well.
        sharding: of the results. None leaves it to jax.

    Raises:
        ValueError: no device of the sharding is of this process.
    """
    local = sharding is None or sharding.is_fully_addressable
    if local and not any(map(spans_processes, jax.tree.leaves(tree))):
        return jax.device_put(tree, sharding)
    plain, restore = without_keys(tree)
    return restore(jax.tree.map(lambda leaf: _put(leaf, sharding), plain))


def spans_processes(leaf: Any) -> bool:
    """Whether some of the array's devices are of another process."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and not leaf.is_fully_addressable


def to_host(leaf: Any) -> Any:
    """An array that spans processes, whole in this one. Other leaves are returned as they are.

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
        raise ValueError(f"the devices asked for are all of other processes: {sorted(map(str, sharding.device_set))}")
    leaf = np.asarray(leaf)
    # np.array: jax shares memory between CPU devices and NumPy where it can, and each device needs its own.
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: np.array(leaf[index]))
