"""Emulated devices. Batches and params on devices."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from .._core import checks, memory
from .._core.arrays import Device
from .._core.calls import answers
from .._devices.mesh import copies_on, put_copy
from .._devices.user_mesh import in_user_mesh

_MOST = 4096  # emulated devices, which take 1.4 GB and half a minute to start


@answers("use_cpu_devices")
def use_cpu_devices(n: int, *, keep_memory: bool = False) -> None:
    """Run JAX on `n` emulated CPU devices. Call it before the first use of JAX.

    In a notebook this belongs in the first cell, which may be run again. Other platforms are switched off, so leave the
    call out to train on GPUs.

    Args:
        n: how many, 1 to 4,096. They share the cores of the machine.
        keep_memory: whether the whole process keeps the memory that it frees, for the next step. A step whose
            intermediate values take more than 32 MB is 1.1 to 1.4 times as fast, and the process takes up to three
            times as much memory. It needs the GNU C library, as most Linux systems have it. A call after the first
            use of JAX changes nothing.

    Raises:
        TypeError: `n` is no int.
        ValueError: `n` is less than 1 or more than 4,096.
        RuntimeError: JAX runs already, with other devices.

    Warns:
        RuntimeWarning: `keep_memory`, and the C library of this system cannot be told to.

    Example:
        >>> use_cpu_devices(8)
        >>> len(jax.devices())
        8
    """
    n = checks.whole_number(n, "use_cpu_devices", "n", most=_MOST)
    try:
        jax.config.update("jax_num_cpu_devices", n)
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError as error:
        devices = jax.devices()
        if len(devices) == n and devices[0].platform == "cpu":
            return
        raise RuntimeError(
            f"use_cpu_devices({n}): JAX runs already, on {len(devices)} {devices[0].platform} device(s), and their "
            "number is fixed; restart the Python process or the notebook's kernel and call this first"
        ) from error
    if keep_memory and not memory.keep_freed_memory():
        warnings.warn("use_cpu_devices: keep_memory needs the GNU C library; nothing is kept", RuntimeWarning, 2)


@answers("split_and_load")
@in_user_mesh
def split_and_load(data: Any, devices: Sequence[Device], *, even_split: bool = True) -> list[Any]:
    """Split a batch along its first axis, and put one part on each device.

    The function of this name in gluon, for pytrees.

    Args:
        data: an array with a first axis of n examples, or a pytree of such arrays. In several processes each
            gives what it has loaded for its own devices.
        devices: k devices of this process.
        even_split: whether n must be divisible by k. If False, the first n % k parts are one example larger: 10
            examples on 4 devices are 3, 3, 2 and 2.

    Returns:
        A list of k parts, part i on device i.

    Raises:
        TypeError: `devices` is no list of devices.
        ValueError: n is not divisible by k and `even_split`, arrays of different length, no device, one that appears
            twice or is of another process.

    Example:
        >>> import jax.numpy as jnp
        >>> [part.shape for part in split_and_load(jnp.zeros((8, 3)), jax.devices()[:4])]
        [(2, 3), (2, 3), (2, 3), (2, 3)]
    """
    devices = checks.devices(devices, "split_and_load")
    checks.check_own(devices, "split_and_load")
    n, k = checks.batch_length(data, "split_and_load"), len(devices)
    if even_split:
        checks.even_share(n, k, "split_and_load", ", or even_split=False")
    ends = np.cumsum([n // k + (i < n % k) for i in range(k)])
    parts = [jax.tree.map(lambda x, i=i: x[ends[i - 1] if i else 0 : ends[i]], data) for i in range(k)]
    return [jax.device_put(part, device) for part, device in zip(parts, devices, strict=True)]


@answers("copy_to")
@in_user_mesh
def copy_to(params: Any, device: Device) -> Any:
    """A copy of a pytree of arrays on one device of this process.

    Args:
        params: a pytree of arrays.
        device: of this process.

    Returns:
        The pytree on that device, in memory of its own.

    Raises:
        ValueError: the device is of another process.

    Example:
        >>> import jax.numpy as jnp
        >>> copy_to({"w": jnp.ones(2)}, jax.devices()[0])["w"].tolist()
        [1.0, 1.0]
    """
    if not hasattr(device, "process_index"):
        given = "a list; parallel.replicate copies to several" if isinstance(device, (list, tuple)) else repr(device)
        raise TypeError(f"copy_to: expected a device such as jax.devices()[0], got {given}")
    checks.check_own([device], "copy_to")
    return put_copy(params, SingleDeviceSharding(device))


@answers("replicate")
@in_user_mesh
def replicate(tree: Any, devices: Sequence[Device]) -> Any:
    """A pytree of arrays with a whole copy on each device.

    Args:
        tree: a pytree of arrays.
        devices: one or more different devices. They may belong to several processes, which must then all call
            this with the same arrays.

    Returns:
        The pytree as fully replicated arrays over all the devices.

    Raises:
        TypeError: `devices` is no list of devices.
        ValueError: no device, or one appears twice.

    Example:
        >>> import jax.numpy as jnp
        >>> replicate({"w": jnp.ones(2)}, jax.devices()[:2])["w"].sharding.is_fully_replicated
        True
    """
    return put_copy(tree, copies_on(checks.devices(devices, "replicate")))
