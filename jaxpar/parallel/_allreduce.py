"""The sum of arrays on several devices, on each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import kv
from .._core import checks
from .._core.calls import answers
from .._devices.user_mesh import in_user_mesh


@answers("allreduce")
@in_user_mesh
def allreduce(values: Sequence[Any]) -> list[jax.Array]:
    """The sum of the values, on the device of each of them.

    MXNet's article changes the values in place. Here they stay as they are.

    Args:
        values: arrays of one shape and dtype, on any devices of this process. Over several processes, push to a store
            of kind `dist_sync`.

    Returns:
        A list as long as `values`. Entry i is the sum, on the device of `values[i]`.

    Raises:
        TypeError: a value is no array, or dtypes differ.
        ValueError: no values, values of different shapes, or one on a device of another process.

    Example:
        >>> first, second = jax.devices()[:2]
        >>> a, b = allreduce([jax.device_put(jnp.ones(2), first), jax.device_put(jnp.ones(2), second)])
        >>> a.tolist(), b.devices() == {second}
        ([2.0, 2.0], True)
    """
    if not isinstance(values, (list, tuple)):
        hint = "; inside pmap or shard_map it is jax.lax.psum(value, axis_name)"
        raise TypeError(
            f"allreduce: expected a list of arrays, one for each device, got {checks.describe(values)}{hint}"
        )
    arrays = [checks.array(v, f"allreduce: value {i}") for i, v in enumerate(values)]
    if not arrays:
        raise ValueError("allreduce: give at least one value")
    for i, array in enumerate(arrays):
        checks.check_own(array.devices(), f"allreduce: value {i}")
        checks.same_shape(array, arrays[0].shape, f"allreduce: value {i}")
        if array.dtype != arrays[0].dtype:
            raise TypeError(f"allreduce: value {i}: expected dtype {arrays[0].dtype}, got {array.dtype}")
    like = jax.device_put(jnp.zeros(arrays[0].shape, arrays[0].dtype), arrays[0].sharding)
    store = kv.push(kv.init(kv.create("device"), 0, like), 0, arrays)
    devices = [next(iter(a.devices())) for a in arrays]
    unique = list(dict.fromkeys(devices))
    copies = dict(zip(unique, kv.pull(store, 0, devices=unique), strict=True))
    return [copies[d] for d in devices]
