"""The order of an epoch's examples: `jax.random.permutation`, drawn where that is fastest."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

from .._core import checks
from .._core.arrays import is_prng_key
from .._devices.user_mesh import on_own_mesh
from ._device_copies import place

Order = Callable[[int], jax.Array]


def device_order(rng: jax.Array | None, size: int, mesh: Mesh | None) -> Order:
    """A function of the epoch: the order of its examples, int32 `(size,)`, on each device.

    Args:
        rng: a random key. Epoch e is in the order `permutation(fold_in(rng, e), size)`. None: the stored order.
    """
    if rng is None:
        identity = place(np.arange(size, dtype=np.int32), mesh)
        return lambda epoch: identity
    impl, words = _key_words(rng)
    if (jax.local_devices()[0] if mesh is None else mesh.local_devices[0]).platform == "cpu":
        return lambda epoch: place(_stable_order(np.asarray(_sort_bits(size, impl)(words, np.uint32(epoch)))), mesh)
    return lambda epoch: _permutation(size, impl, mesh)(words, np.uint32(epoch))


@on_own_mesh
def host_order(rng: jax.Array | None, epoch: int, size: int) -> np.ndarray:
    """The same order in host memory."""
    return np.asarray(device_order(rng, size, None)(epoch))


def _key_words(rng: Any) -> tuple[str | None, np.ndarray]:
    """The key's implementation and its words in host memory, from where they go to any device."""
    if not isinstance(rng, jax.Array | np.ndarray):
        raise TypeError(f"rng must be a random key, such as jax.random.key(0); got {type(rng).__name__}")
    checks.random_key(rng, "data.batches")
    if is_prng_key(rng):
        return str(jax.random.key_impl(rng)), np.asarray(jax.random.key_data(rng))
    return None, np.asarray(rng)


@functools.lru_cache(maxsize=32)
def _permutation(size: int, impl: str | None, mesh: Mesh | None) -> Callable[..., jax.Array]:
    """Each device draws the whole permutation by itself. The same words give the same order everywhere."""

    def draw(words: jax.Array, epoch: jax.Array) -> jax.Array:
        rng = jax.random.fold_in(jax.random.wrap_key_data(words, impl=impl), epoch)
        return jax.random.permutation(rng, size)

    return jax.jit(draw if mesh is None else jax.shard_map(draw, mesh=mesh, in_specs=P(), out_specs=P()))


@functools.lru_cache(maxsize=32)
def _sort_bits(size: int, impl: str | None) -> Callable[..., jax.Array]:
    """What `jax.random.permutation` sorts by: uint32 (rounds, size), fresh bits for each of its rounds.

    On a CPU the bits are XLA's and the sorting is NumPy's, which sorts faster. The emulated devices of a host would
    all sort the same.
    """
    rounds = math.ceil(3 * math.log(max(1, size)) / math.log(2**32 - 1))

    def draw(words: jax.Array, epoch: jax.Array) -> jax.Array:
        rng = jax.random.fold_in(jax.random.wrap_key_data(words, impl=impl), epoch)
        bits: list[Any] = []
        for _ in range(rounds):
            rng, sub = jax.random.split(rng)
            bits.append(jax.random.bits(sub, (size,), jnp.uint32))
        return jnp.stack(bits) if bits else jnp.zeros((0, size), jnp.uint32)

    return jax.jit(draw)


def _stable_order(bits: np.ndarray) -> np.ndarray:
    """0 to n-1, sorted by each row of bits in turn. Equal bits keep their order."""
    places = np.arange(bits.shape[1], dtype=np.uint64)
    order = places.astype(np.int32)
    for row in bits:  # bits and place in one number: much faster to sort than pairs, and stable
        order = order[np.sort(row.astype(np.uint64) << np.uint64(32) | places).astype(np.uint32)]
    return order
