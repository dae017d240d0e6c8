"""Emulated CPU devices share one memory, so an array need not be copied to be on another of them.

A jax array never changes, and jax does not reuse the memory of one that somebody else looks at (a donated array
is then copied), so the same bytes can stand for a value on every CPU device of this process. That makes moving a
large value free, where `jax.device_put` between two CPU devices copies it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from ._types import Device


def one_memory(devices: Iterable[Device]) -> bool:
    """Whether these are CPU devices of this process."""
    return all(d.platform == "cpu" and d.process_index == jax.process_index() for d in devices)


def put(arrays: Sequence[jax.Array], where: Sharding) -> list[jax.Array]:
    """The arrays with that sharding, as `jax.device_put`; what is in one device's memory already is not copied.

    Where it shares, it waits for the arrays.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> first, second = jax.devices()[:2]
        >>> there = put([jax.device_put(jnp.ones(1 << 20), first)], SingleDeviceSharding(second))
        >>> there[0].devices() == {second}
        True
    """
    if len(where.device_set) > 1 or not one_memory(where.device_set):
        return jax.device_put(list(arrays), where)
    (device,) = where.device_set
    return jax.device_put([_seen(a, device) for a in arrays], device)


def replicated(arrays: Sequence[jax.Array], where: NamedSharding) -> list[jax.Array]:
    """Arrays of one device as fully replicated ones over devices of the same memory."""
    each = [put(arrays, SingleDeviceSharding(device)) for device in np.ravel(where.mesh.devices)]
    return [
        jax.make_array_from_single_device_arrays(copies[0].shape, where, list(copies))
        for copies in zip(*each, strict=True)
    ]


def _seen(array: jax.Array, device: Device) -> jax.Array | np.ndarray:
    """The array's memory, where it lies on one other CPU device of this process."""
    sharding = array.sharding
    if isinstance(sharding, SingleDeviceSharding):
        (there,) = sharding.device_set
        if there != device and one_memory([there]):
            return np.asarray(array)
    return array
