"""The type of a device, questions about arrays, and random keys as plain integers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import numpy as np

if TYPE_CHECKING:  # type checkers cannot see jax.Device
    Device = Any
else:
    Device = jax.Device


def nbytes(value: Any) -> int:
    """Bytes of an array, or of anything with a shape and a dtype."""
    return math.prod(value.shape) * np.dtype(value.dtype).itemsize


def is_traced(tree: Any) -> bool:
    """Whether some array of the pytree is a tracer, which has no values and no devices."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def is_prng_key(leaf: Any) -> bool:
    """Whether this is an array of typed random keys, as `jax.random.key` makes.

    Example:
        >>> is_prng_key(jax.random.key(0)), is_prng_key(jax.numpy.ones(2)), is_prng_key(3)
        (True, False, False)
    """
    return hasattr(leaf, "dtype") and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def without_keys(tree: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The pytree with random keys as plain integers, and a function to restore them.

    Returns:
        (the pytree with uint32 arrays in place of keys, a function of such a pytree that makes them keys again).

    Example:
        >>> plain, restore = without_keys({"rng": jax.random.key(0), "x": jax.numpy.ones(2)})
        >>> plain["rng"].dtype, restore(plain)["rng"].dtype
        (dtype('uint32'), key<fry>)
    """
    leaves, treedef = jax.tree.flatten(tree)
    impls = [jax.random.key_impl(leaf) if is_prng_key(leaf) else None for leaf in leaves]

    def restore(plain: Any) -> Any:
        wrapped = [
            leaf if impl is None else jax.random.wrap_key_data(jax.numpy.asarray(leaf), impl=impl)
            for leaf, impl in zip(treedef.flatten_up_to(plain), impls, strict=True)
        ]
        return treedef.unflatten(wrapped)

    plain = [leaf if impl is None else jax.random.key_data(leaf) for leaf, impl in zip(leaves, impls, strict=True)]
    return treedef.unflatten(plain), restore
