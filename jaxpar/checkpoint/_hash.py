"""A hash of a state as checkpoints see it, computed where the arrays are.

Each array is taken as 32-bit words, in the order of its elements. A word is mixed with its place, and the mixed words
are added modulo 2**32, which no order changes. So devices, layouts and engines do not change the hash. Two such sums of
each array come to the host, and are hashed together with the names, shapes and dtypes.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.arrays import is_prng_key
from .._core.portable import SavedArray
from .._devices.emulated import wait_before_collectives
from .._devices.mesh import to_host
from .._devices.user_mesh import on_own_mesh
from ._leaves import slots_of

_BITS = 128  # of the hash
_SAID = ("name", "shape", "dtype", "impl")  # what the hash takes of what a checkpoint says of an array


@dataclasses.dataclass(frozen=True)
class StateHash:
    """A hash that the devices may still compute. `str` waits for it. The state can be donated meanwhile."""

    records: list[dict[str, Any]]  # what a checkpoint says of each array
    groups: list[tuple[list[int], Any]]  # the numbers of arrays, and two sums of each of them

    def __str__(self) -> str:
        sums = np.zeros((len(self.records), 2), np.uint32)
        for numbers, found in self.groups:
            sums[numbers] = np.asarray(to_host(found))
        about = [{name: r[name] for name in _SAID if name in r} for r in self.records]
        found = hashlib.sha256(json.dumps([about, sums.tolist()], sort_keys=True).encode())
        return found.hexdigest()[: _BITS // 4]


@on_own_mesh
def hash_of(tree: Any) -> StateHash:
    """The hash of a state. In several processes all call it."""
    slots = slots_of(tree)
    leaves = [_whole(slot.leaf) for slot in slots]
    split = [isinstance(leaf, jax.Array) and not leaf.is_fully_replicated for leaf in leaves]
    groups: list[tuple[list[int], Any]] = []
    for is_split in (False, True):
        numbers = [i for i, s in enumerate(split) if s is is_split]
        if not numbers:
            continue
        chosen = [leaves[i] for i in numbers]
        if is_split:
            wait_before_collectives(chosen, tuple(chosen[0].sharding.device_set))
        groups.append((numbers, _sums(chosen, tuple(_size(slots[i]) for i in numbers))))
    return StateHash([slot.record() for slot in slots], groups)


def _whole(leaf: Any) -> Any:
    """What one device has of an array, where that is all of it. 64 bits of the host as jax may take them."""
    if isinstance(leaf, jax.Array):
        return leaf.addressable_data(0) if leaf.is_fully_replicated else leaf
    found = np.asarray(leaf)
    return found if found.itemsize < 8 else np.ascontiguousarray(found).reshape(-1).view(np.uint32)


def _size(slot: SavedArray) -> int | None:
    """The number of elements of a flat leaf before its padding. None: no padding."""
    return math.prod(slot.shape) if slot.rows else None


@functools.partial(jax.jit, static_argnums=1)
def _sums(leaves: Sequence[jax.Array], sizes: tuple[int | None, ...]) -> jax.Array:
    """(leaves, 2): two sums of the mixed words of each array."""
    return jnp.stack([_sums_of(leaf, size) for leaf, size in zip(leaves, sizes, strict=True)])


def _sums_of(leaf: jax.Array, size: int | None) -> jax.Array:
    words = _words(jax.random.key_data(leaf) if is_prng_key(leaf) else leaf)
    place = _place(words.shape)
    mixed = _mix(words ^ _mix(place + np.uint32(0x9E3779B9))), _mix(words + _mix(place ^ np.uint32(0x7FEB352D)))
    if size is not None:
        counts = _is_counted(leaf.shape, size).reshape(leaf.shape + (1,) * (words.ndim - leaf.ndim))
        mixed = tuple(jnp.where(counts, x, np.uint32(0)) for x in mixed)
    zero = np.uint32(0)  # two sums in one pass: XLA's loops for one each take ten times as long on CPUs
    return jnp.stack(jax.lax.reduce(mixed, (zero, zero), _add, range(words.ndim)))


def _add(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return a[0] + b[0], a[1] + b[1]


def _words(leaf: jax.Array) -> jax.Array:
    """The bits of each element as 32-bit words, with a last axis where it has several."""
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        parts = jnp.stack([_words(leaf.real), _words(leaf.imag)], leaf.ndim)
        return parts.reshape(*leaf.shape, -1)
    if leaf.dtype == bool:
        return leaf.astype(np.uint32)
    about = jnp.finfo if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.iinfo
    bits = about(leaf.dtype).bits
    same = jax.lax.bitcast_convert_type(leaf, jnp.uint32 if bits > 16 else f"uint{bits}")
    return same.astype(np.uint32)


def _place(shape: Sequence[int]) -> jax.Array:
    """The number of each element, modulo 2**32."""
    found, step = jnp.zeros(shape, np.uint32), 1
    for axis in reversed(range(len(shape))):
        found += jax.lax.broadcasted_iota(np.uint32, shape, axis) * np.uint32(step % (1 << 32))
        step *= shape[axis]
    return found


def _is_counted(shape: Sequence[int], size: int) -> jax.Array:
    """Which elements of rows are among the first so many."""
    row, column = (jax.lax.broadcasted_iota(np.uint32, shape, axis) for axis in (0, 1))
    full, rest = divmod(size, shape[1])
    return (row < full) | ((row == full) & (column < rest))


def _mix(x: jax.Array) -> jax.Array:
    """A permutation of 32 bits in which each bit of the argument changes half of the bits: MurmurHash3's last lines."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
