"""Donated memory: checks for donated states, and copies that can be donated."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from .._core.arrays import is_prng_key, is_traced
from . import emulated
from .mesh import spans_processes
from .user_mesh import outside_mesh

# XLA compiles a kernel for each array, so a program that copies thousands of them would take long.
_MOST = 256


def is_donated(state: Any) -> bool:
    """Whether the memory of any array of a pytree was donated."""
    return any(map(_is_deleted, jax.tree.leaves(state)))


def check_not_donated(state: Any, where: str) -> None:
    """`RuntimeError` for a state that was donated to a step."""
    if is_donated(state):
        hint = "state, metrics = step(state, batch). To keep old params, copy them before: jax.device_get(state.params)"
        raise RuntimeError(f"{where}: this state was donated to a step; use the state that it returned: {hint}")


def zeros_if_donated(state: Any) -> Any:
    """The pytree with zeros in place of donated arrays, as a template to restore a checkpoint into."""
    with outside_mesh():
        return jax.tree.map(lambda leaf: _zeros_like(leaf) if _is_deleted(leaf) else leaf, state)


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted()


def _zeros_like(leaf: jax.Array) -> jax.Array:
    """Zeros of the same shape, dtype and sharding. The values are not read."""
    if not is_prng_key(leaf):
        return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
    bits = jax.eval_shape(jax.random.key_data, leaf)
    key = jax.random.wrap_key_data(jnp.zeros(bits.shape, bits.dtype), impl=jax.random.key_impl(leaf))
    return jax.device_put(key, leaf.sharding)


def own_copies(tree: Any) -> Any:
    """Copies of the arrays of a pytree on the same devices. Tracers stay unchanged. Nothing is compiled."""
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
