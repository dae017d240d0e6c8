"""Arrays onto devices, those of other processes too."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from .._core.arrays import is_traced


def put(tree: Any, sharding: Sharding | None) -> Any:
    """`jax.device_put`, where arrays or sharding span processes too.

    Each process then fills in the part of its own devices, and nothing is sent: every process must give the same
    arrays. An array that is spread over the devices of several processes is taken along by a program over them.
    """
    local = sharding is None or sharding.is_fully_addressable
    if local and all(_addressable(leaf) for leaf in jax.tree.leaves(tree)):
        return jax.device_put(tree, sharding)
    return jax.tree.map(lambda leaf: _put(leaf, sharding), tree)


def spans_processes(leaf: Any) -> bool:
    """Whether some of the array's devices are of another process."""
    return not _addressable(leaf)


def _addressable(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array) or is_traced(leaf) or leaf.is_fully_addressable


def _put(leaf: Any, sharding: Sharding | None) -> Any:
    if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_put(jax.random.key_data(leaf), sharding), impl=jax.random.key_impl(leaf))
    if spans_processes(leaf):
        if leaf.sharding == sharding:
            return leaf
        if sharding is not None and leaf.sharding.device_set == sharding.device_set:
            return _resharded(sharding)(leaf)
        leaf = to_host(leaf)
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    if not sharding.addressable_devices:
        raise ValueError(f"the devices asked for are all of other processes: {sorted(map(str, sharding.device_set))}")
    leaf = np.asarray(leaf)
    # np.array: on CPU devices memory is shared with NumPy where it can be, and each device needs its own.
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: np.array(leaf[index]))


def to_host(leaf: Any) -> Any:
    """An array that spans processes, whole in this one: its own copy where it has one, else gathered by all."""
    if not spans_processes(leaf):
        return leaf
    if leaf.is_fully_replicated:
        return leaf.addressable_data(0)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(leaf, tiled=True)


@functools.lru_cache(maxsize=64)
def _resharded(sharding: Sharding) -> Any:
    return jax.jit(lambda x: x, out_shardings=sharding)
