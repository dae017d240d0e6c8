"""Emulated CPU devices: older XLA can hang, programs of different device counts run at once, memory is shared.

The hang. Before jax 0.12, a program with collectives over several CPU devices could hang forever when it was started
while its inputs were still being computed. XLA has as many threads as there are devices. They wait in the collective
for a device whose inputs need one of these threads. So with older jax, `wait_before_collectives` comes before each such
program. The devices are the host's own cores, so the wait costs little.

Programs at the same time. A process starts a program over several of its CPU devices after the previous one has ended.
It starts a program over one device at once. Gloo has one connection for each group of devices in several processes. Two
programs that use the connection at the same time receive each other's messages. So `run_by_itself` runs programs over
one device of each process.

The memory. A jax array never changes, and jax copies a donated array whose memory is in use elsewhere. So the same
bytes can be the value on every CPU device of this process. `share_or_put` and `views` share memory where
`jax.device_put` would copy.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from .._core.arrays import Device, is_prng_key, is_traced

Result = TypeVar("Result")

# Bytes. From here on, a copy on one emulated device costs more than a second array of the same memory.
LARGE = 1 << 20

_CAN_HANG = tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12)


def can_hang(devices: Sequence[Device]) -> bool:
    """Whether a program with collectives over these devices can hang."""
    return _CAN_HANG and len(devices) > 1 and devices[0].platform == "cpu"


def wait_before_collectives(tree: Any, devices: Sequence[Device]) -> None:
    """Wait for the arrays of a pytree if a program over these devices can hang otherwise."""
    if can_hang(devices) and not is_traced(tree):
        jax.block_until_ready(tree)


def run_by_itself(program: Callable[..., Result], *args: Any) -> Result:
    """The results of a program over one device of each process, while no other program runs."""
    here = tuple(jax.local_devices())
    if len(here) == 1 or here[0].platform != "cpu":
        return program(*args)
    wait_for_all, number = _after_all_programs(here)
    wait_for_all(number).block_until_ready()
    return jax.block_until_ready(program(*args))


@functools.cache
def _after_all_programs(devices: tuple[Device, ...]) -> tuple[Any, jax.Array]:
    """A program that XLA starts after all other programs over several of these devices, and its argument."""
    copies = NamedSharding(Mesh(np.array(devices), ("here",)), PartitionSpec())
    return jax.jit(lambda x: x + 1), jax.device_put(np.int32(0), copies)


def one_memory(devices: Iterable[Device]) -> bool:
    """Whether all these devices are CPU devices of this process."""
    return all(d.platform == "cpu" and d.process_index == jax.process_index() for d in devices)


def share_or_put(arrays: Sequence[jax.Array], where: Sharding) -> list[jax.Array]:
    """Arrays with that sharding, as `jax.device_put`, without copies inside one memory.

    Shared is an array on one device that goes whole to devices of its memory. The call waits until it is computed.
    """
    if not where.is_fully_replicated or not one_memory(where.device_set):
        return jax.device_put(list(arrays), where)
    return jax.device_put([_shareable(a, where) for a in arrays], where)


def views(arrays: Iterable[jax.Array]) -> list[np.ndarray]:
    """The arrays of devices of one memory as NumPy arrays, without copies."""
    # A program takes them as arguments without copies too, faster than arrays that are put on its device first. Call it
    # inside `on` that device. The call waits until the arrays are computed.
    return [np.asarray(a) for a in arrays]


def on(where: Sharding) -> contextlib.AbstractContextManager[Any]:
    """A context in which programs with views and uncommitted arrays as arguments run on this one device."""
    (device,) = where.device_set
    return jax.default_device(device)


def _shareable(array: jax.Array, where: Sharding) -> jax.Array | np.ndarray:
    """A view of an array on another CPU device of this process. Others, and random keys, are returned as they are."""
    sharding = array.sharding
    if is_prng_key(array):
        return array
    if isinstance(sharding, SingleDeviceSharding) and sharding != where and one_memory(sharding.device_set):
        return np.asarray(array)
    return array
