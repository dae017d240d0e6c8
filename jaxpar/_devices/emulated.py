"""What is true of emulated CPU devices only: they share one memory, and older XLA can hang on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from .._core.arrays import Device, is_traced

_CAN_HANG = tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12)


def wait_before_collectives(tree: Any, devices: Sequence[Device]) -> None:
    """Waits for the arrays where a program over these devices could hang without it."""
    if can_hang(devices) and not is_traced(tree):
        jax.block_until_ready(tree)


def can_hang(devices: Sequence[Device]) -> bool:
    """Whether a program over these devices could."""
    return _CAN_HANG and len(devices) > 1 and devices[0].platform == "cpu"


def one_memory(devices: Iterable[Device]) -> bool:
    """Whether these are CPU devices of this process."""
    return all(d.platform == "cpu" and d.process_index == jax.process_index() for d in devices)


def put(arrays: Sequence[jax.Array], where: Sharding) -> list[jax.Array]:
    """The arrays with that sharding, as `jax.device_put`; what is in the same memory already is not copied.

    Shared is what lies whole in one memory and shall lie whole on one device or on each of several.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> first, second = jax.devices()[:2]
        >>> there = put([jax.device_put(jnp.ones(1 << 20), first)], SingleDeviceSharding(second))
        >>> there[0].devices() == {second}
        True
    """
    if not where.is_fully_replicated or not one_memory(where.device_set):
        return jax.device_put(list(arrays), where)
    return jax.device_put([_seen(a, where) for a in arrays], where)


def _seen(array: jax.Array, where: Sharding) -> jax.Array | np.ndarray:
    """The array's memory, where it lies on one CPU device of this process."""
    there = array.sharding
    if isinstance(there, SingleDeviceSharding) and there != where and one_memory(there.device_set):
        return np.asarray(array)
    return array


def views(arrays: Iterable[jax.Array]) -> list[np.ndarray]:
    """The arrays of devices of one memory as NumPy sees them, without a copy.

    A program takes these as arguments without a copy too, and faster than arrays put on its device first; run it
    `on` that device.
    """
    return [np.asarray(a) for a in arrays]


def bucketed(arrays: Iterable[jax.Array], dtypes: Iterable[Any], groups: Iterable[Sequence[int]]) -> list[np.ndarray]:
    """`buckets.pack` of views, cast to these dtypes: one array a group, a group of one not copied."""
    seen = [view.astype(dtype, copy=False) for view, dtype in zip(views(arrays), dtypes, strict=True)]
    return [
        seen[group[0]] if len(group) == 1 else np.concatenate([seen[i] for i in group], axis=None) for group in groups
    ]


def on(where: Sharding) -> contextlib.AbstractContextManager[Any]:
    """Programs whose arguments are views and uncommitted arrays run on this one device."""
    (device,) = where.device_set
    return jax.default_device(device)
