"""Copies that can be donated, while what they were copied from stays valid. And the other way round."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from .._core.arrays import is_traced
from . import emulated
from .placement import spans_processes

# XLA compiles a kernel for each array, so a program that copies thousands of them would take long.
_MOST = 256


def own_copies(tree: Any) -> Any:
    """The arrays of a pytree where they are, in memory of their own. Tracers stay as they are. Nothing is compiled.

    Example:
        >>> x = jnp.ones(3)
        >>> own_copies([x])[0].unsafe_buffer_pointer() == x.unsafe_buffer_pointer()
        False
    """
    leaves, treedef = jax.tree.flatten(tree)
    here = [i for i, leaf in enumerate(leaves) if not is_traced(leaf) and not spans_processes(leaf)]
    for i, copy in zip(here, jax.device_put([leaves[i] for i in here], may_alias=False), strict=True):
        leaves[i] = copy
    return treedef.unflatten([_of_shards(leaf) if spans_processes(leaf) else leaf for leaf in leaves])


def donatable(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Arrays of the same values, where the given ones are, for a user who may donate them.

    Large values of emulated devices share the memory of the given ones. XLA does not write to such memory. All others
    are copied by a program, one for each place and list of shapes.

    Example:
        >>> x = jnp.ones(3)
        >>> _ = jax.jit(lambda x: x + 1, donate_argnums=0)(donatable([x])[0])
        >>> x.tolist()
        [1.0, 1.0, 1.0]
    """
    copies: list[Any] = [None] * len(arrays)
    small: dict[Sharding, list[int]] = {}
    several = jax.process_count() > 1
    for i, array in enumerate(arrays):
        if several and spans_processes(array):
            copies[i] = _of_shards(array)
        elif array.nbytes >= emulated.LARGE and _can_share(array):
            copies[i] = _shared(array)
        else:
            small.setdefault(array.sharding, []).append(i)
    for sharding, places in small.items():
        program = _program(None if isinstance(sharding, SingleDeviceSharding) else sharding)
        for start in range(0, len(places), _MOST):
            some = places[start : start + _MOST]
            for i, copy in zip(some, program([arrays[i] for i in some]), strict=True):
                copies[i] = copy
    return copies


def _of_shards(array: jax.Array) -> jax.Array:
    """A copy of an array that spans processes. Each process copies its own shards."""
    shards = jax.device_put([shard.data for shard in array.addressable_shards], may_alias=False)
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def _can_share(array: jax.Array) -> bool:
    plain = not jnp.issubdtype(array.dtype, jax.dtypes.extended)
    return plain and array.is_fully_replicated and emulated.one_memory(array.sharding.device_set)


def _shared(array: jax.Array) -> jax.Array:
    view = np.asarray(array)
    if array.committed:
        return jax.device_put(view, array.sharding)
    with emulated.on(array.sharding):
        return jnp.asarray(view)


@functools.lru_cache(maxsize=64)
def _program(sharding: Sharding | None) -> Any:
    def run(arrays: Iterable[jax.Array]) -> list[jax.Array]:
        return [jnp.copy(a) for a in arrays]

    return jax.jit(run) if sharding is None else jax.jit(run, out_shardings=sharding)
