"""Emulated devices, and batches and params on devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

from .._core import checks
from .._core.arrays import Device
from .._core.checks import batch_length, check_devices, check_own
from .._devices.mesh import copied, mesh_of


def use_cpu_devices(n: int) -> None:
    """Makes JAX run on `n` emulated CPU devices. To be called before the first use of JAX.

    In a notebook this belongs into the first cell; running that cell again does no harm. Other platforms are
    switched off: leave the call out where there are GPUs to train on.

    Args:
        n: how many, at least 1. They share the cores of the machine.

    Raises:
        ValueError: `n` is no positive int.
        RuntimeError: JAX runs already, with other devices.

    Example:
        >>> use_cpu_devices(8)
        >>> len(jax.devices())
        8
    """
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
        raise ValueError(f"use_cpu_devices: the number of devices must be an int of 1 or more, got {n!r}")
    try:
        jax.config.update("jax_num_cpu_devices", int(n))
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError as error:
        devices = jax.devices()
        if len(devices) == n and devices[0].platform == "cpu":
            return
        raise RuntimeError(
            f"use_cpu_devices({n}): JAX runs already, on {len(devices)} {devices[0].platform} device(s), and takes "
            "no other number now; restart the Python process or the notebook's kernel and call this first"
        ) from error


def split_and_load(data: Any, devices: Sequence[Device], *, even_split: bool = True) -> list[Any]:
    """Splits a batch along its first axis and puts one part on each device, as gluon's function of this name.

    Args:
        data: an array with a first axis of n examples, or a pytree of such arrays. In several processes each
            gives what it has loaded for its own devices.
        devices: k devices, of this process.
        even_split: whether n must be divisible by k. False: the first n % k parts are one example larger
            (10 on 4 devices: 3, 3, 2, 2).

    Returns:
        A list of k parts, part i on device i.

    Raises:
        ValueError: n is not divisible by k and `even_split`; arrays of different length; a device of another
            process.

    Example:
        >>> [part.shape for part in split_and_load(jnp.zeros((8, 3)), jax.devices()[:4])]
        [(2, 3), (2, 3), (2, 3), (2, 3)]
    """
    devices = checks.devices(devices, "split_and_load")
    check_own(devices, "split_and_load")
    n, k = batch_length(data, "split_and_load"), len(devices)
    if even_split and n % k:
        raise ValueError(
            f"split_and_load: a batch of {n} cannot be divided by {k} devices; use a batch of {n // k * k or k} or "
            f"{-(-n // k) * k}, or even_split=False"
        )
    ends = np.cumsum([n // k + (i < n % k) for i in range(k)])
    parts = [jax.tree.map(lambda x, i=i: x[ends[i - 1] if i else 0 : ends[i]], data) for i in range(k)]
    return [jax.device_put(part, device) for part, device in zip(parts, devices, strict=True)]


def copy_to(params: Any, device: Device) -> Any:
    """A copy of a pytree of arrays on one device, of this process: the articles' `get_params`.

    Example:
        >>> copy_to({"w": jnp.ones(2)}, jax.devices()[0])["w"].tolist()
        [1.0, 1.0]
    """
    check_own([device], "copy_to")
    return copied(params, SingleDeviceSharding(device))


def replicate(tree: Any, devices: Sequence[Device]) -> Any:
    """A pytree with a copy of every array on each device, as arrays over all of them.

    Args:
        tree: a pytree of arrays.
        devices: one or more different devices. They may belong to several processes, which must then all call
            this with the same arrays.

    Returns:
        The pytree as fully replicated arrays, ready for a program over these devices.

    Example:
        >>> replicate({"w": jnp.ones(2)}, jax.devices()[:2])["w"].sharding.is_fully_replicated
        True
    """
    return copied(tree, NamedSharding(mesh_of(check_devices(devices, "replicate")), P()))
