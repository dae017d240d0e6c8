"""Sums over devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import kv
from .._core import checks
from .._core.checks import check_own


def allreduce(values: Sequence[Any]) -> list[jax.Array]:
    """The sum of the values, once on the device of each of them.

    Args:
        values: arrays of one shape and dtype, on any devices of this process. (Over processes a store of kind
            `dist_sync` sums.)

    Returns:
        A list as long as `values`; entry i is the sum, on the device of `values[i]`. The given arrays stay as
        they are (MXNet's article changed them in place).

    Raises:
        ValueError: no values, or values of different shapes.
        TypeError: what is no array, or dtypes that differ.

    Example:
        >>> first, second = jax.devices()[:2]
        >>> a, b = allreduce([jax.device_put(jnp.ones(2), first), jax.device_put(jnp.ones(2), second)])
        >>> a.tolist(), b.devices() == {second}
        ([2.0, 2.0], True)
    """
    arrays = [checks.array(v, f"allreduce: value {i}") for i, v in enumerate(values)]
    if not arrays:
        raise ValueError("allreduce: give at least one value")
    for i, array in enumerate(arrays):
        check_own(array.devices(), f"allreduce: value {i}")
        checks.same_shape(array, arrays[0].shape, f"allreduce: value {i}")
        if array.dtype != arrays[0].dtype:
            raise TypeError(f"allreduce: value {i}: expected dtype {arrays[0].dtype}, got {array.dtype}")
    like = jax.device_put(jnp.zeros(arrays[0].shape, arrays[0].dtype), arrays[0].sharding)
    store = kv.push(kv.init(kv.create("device"), 0, like), 0, arrays)
    devices = [next(iter(a.devices())) for a in arrays]
    unique = list(dict.fromkeys(devices))
    copies = dict(zip(unique, kv.pull(store, 0, devices=unique), strict=True))
    return [copies[d] for d in devices]
