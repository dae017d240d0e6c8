"""Emulated devices, batches and params on devices, and sums over them: what MXNet's `gluon.utils` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from .. import kv
from .._core import checks, host
from .._core.arrays import Device, PyTree
from .._core.process import keep_freed_memory
from .._core.text import warn
from .._core.transfers import allows_transfers
from .._devices.mesh import copies_on, put_copy
from .._devices.user_mesh import in_user_mesh

_MOST = 4096  # emulated devices, which take 1.4 GB and half a minute to start


def use_cpu_devices(n: int, *, keep_memory: bool = False) -> None:
    """Run JAX on `n` emulated CPU devices. Call it before the first use of JAX.

    In a notebook, put the call into the first cell. Running it again does no harm. Other platforms are disabled, so
    remove the call to train on GPUs.

    Args:
        n: the number of devices, 1 to 4,096. They share the cores of the machine.
        keep_memory: whether the process keeps all freed memory for the next step. A step keeps most of it anyway: not
            values of more than 30 MB, as the gradient of a large table, and on one device not the values of a model
            for which they take more than 4 GB in all. Such a step is then 1.1 to 4 times as fast, and the process
            takes up to three times as much memory. The option needs the GNU C library, as on most Linux systems.
            After the first use of JAX it has no effect.

    Raises:
        RuntimeError: JAX already runs with other devices.
        ValueError: `n` is less than 1 or more than 4,096.

    Warns:
        RuntimeWarning: the C library of this system does not support `keep_memory`.

    Example:
        >>> use_cpu_devices(8)
        >>> len(jax.devices())
        8
    """
    n = checks.whole_number(n, "use_cpu_devices", "n", most=_MOST)
    try:
        jax.config.update("jax_num_cpu_devices", n)
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError:  # JAX runs already, which does no harm if it has these devices
        devices = jax.devices()
        if len(devices) == n and devices[0].platform == "cpu":
            return
        raise RuntimeError(
            f"use_cpu_devices({n}): JAX runs already, on {len(devices)} {devices[0].platform} device(s); restart the "
            "Python process (or the kernel) and call this first"
        ) from None
    if keep_memory and not keep_freed_memory():
        warn("use_cpu_devices: keep_memory needs the GNU C library; nothing is kept", RuntimeWarning)


@allows_transfers
@in_user_mesh
def split_and_load(data: PyTree, devices: Sequence[Device], *, even_split: bool = True) -> list[PyTree]:
    """Split a batch along its first axis, and put one part on each device.

    As `gluon.utils.split_and_load`, for pytrees.

    Args:
        data: an array with a first axis of n examples, or a pytree of such arrays. With several processes, each process
            gives the examples of its own devices.
        devices: k devices of this process.
        even_split: True: k must divide n. False: the first n % k parts get one example more: 10 examples on 4 devices
            are split 3, 3, 2, 2.

    Raises:
        ValueError: k does not divide n with `even_split`; arrays differ in length; `devices` is empty, repeats a
            device, or has a device of another process.

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
    # The first n % k devices have one example more, so that the lengths differ by at most one.
    ends = np.cumsum([n // k + (i < n % k) for i in range(k)])
    data = host.own_copies(data, "split_and_load: data")
    shards = [jax.tree.map(lambda x, i=i: x[ends[i - 1] if i else 0 : ends[i]], data) for i in range(k)]
    return [jax.device_put(shard, device) for shard, device in zip(shards, devices, strict=True)]


@allows_transfers
@in_user_mesh
def copy_to(params: PyTree, device: Device) -> PyTree:
    """A copy of a pytree of arrays on one device of this process.

    Args:
        params: a pytree of arrays.
        device: a device of this process.

    Returns:
        The pytree on that device. It shares no memory with `params`.

    Raises:
        ValueError: the device belongs to another process.

    Example:
        >>> import jax.numpy as jnp
        >>> copy_to({"w": jnp.ones(2)}, jax.devices()[0])["w"].tolist()
        [1.0, 1.0]
    """
    checks.check_own([device], "copy_to")
    return put_copy(host.own_copies(params, "copy_to: params"), SingleDeviceSharding(device))


@allows_transfers
@in_user_mesh
def replicate(tree: PyTree, devices: Sequence[Device]) -> PyTree:
    """The pytree as fully replicated arrays, with a copy on each device.

    Args:
        tree: a pytree of arrays.
        devices: one or more distinct devices. If they belong to several processes, all processes must call this with
            the same arrays.

    Raises:
        ValueError: `devices` is empty or repeats a device.

    Example:
        >>> import jax.numpy as jnp
        >>> replicate({"w": jnp.ones(2)}, jax.devices()[:2])["w"].sharding.is_fully_replicated
        True
    """
    return put_copy(host.own_copies(tree, "replicate: tree"), copies_on(checks.devices(devices, "replicate")))


@allows_transfers
@in_user_mesh
def allreduce(values: Sequence[Any]) -> list[jax.Array]:
    """The sum of the values, on the device of each value.

    In MXNet's tutorial `allreduce` changes the values in place. Here the values stay unchanged.

    Args:
        values: arrays of one shape and dtype, on any devices of this process. To sum over several processes, push to a
            store of kind `dist_sync`.

    Raises:
        TypeError: dtypes differ.
        ValueError: there are no values, shapes differ, or a value is on a device of another process.

    Example:
        >>> first, second = jax.devices()[:2]
        >>> a, b = allreduce([jax.device_put(jnp.ones(2), first), jax.device_put(jnp.ones(2), second)])
        >>> a.tolist(), b.devices() == {second}
        ([2.0, 2.0], True)
    """
    if not isinstance(values, (list, tuple)) or not values:
        kind = ValueError if isinstance(values, (list, tuple)) else TypeError
        raise kind(
            f"allreduce: values must be a list of arrays, one a device, got {checks.describe(values)}; inside pmap or "
            "shard_map write jax.lax.psum(value, axis_name)"
        )
    arrays = [checks.array(v, f"allreduce: value {i}") for i, v in enumerate(values)]
    for i, array in enumerate(arrays):
        checks.check_own(array.devices(), f"allreduce: value {i}")
        # A push would cast to the first dtype. Of shapes it says itself which is wrong.
        if array.dtype != arrays[0].dtype:
            raise TypeError(f"allreduce: value {i}: expected dtype {arrays[0].dtype}, got {array.dtype}")
    # A store of this one sum, so that it is a push like any other: the same programs, the same bits.
    zeros = jax.device_put(jnp.zeros(arrays[0].shape, arrays[0].dtype), arrays[0].sharding)
    store = kv.push(kv.init(kv.create("device"), 0, zeros), 0, arrays)
    return kv.pull(store, 0, devices=[next(iter(a.devices())) for a in arrays])
