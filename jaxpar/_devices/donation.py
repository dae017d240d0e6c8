"""Whether a state was donated: whether a later state took its memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from .._core.arrays import is_prng_key
from .user_mesh import outside_mesh


def is_donated(state: Any) -> bool:
    """Whether the memory of any array of a pytree was donated.

    Example:
        >>> x = jnp.ones(3)
        >>> _ = jax.jit(lambda x: x + 1, donate_argnums=0)(x)
        >>> is_donated({"x": x}), is_donated({"x": jnp.ones(3)})
        (True, False)
    """
    return any(map(_is_deleted, jax.tree.leaves(state)))


def check_not_donated(state: Any, where: str) -> None:
    """`RuntimeError` for a state that was donated to a step."""
    if is_donated(state):
        raise RuntimeError(
            f"{where}: the memory of this state was given to the state that a step made of it. Go on with that one, "
            "state, metrics = step(state, batch), and keep what is needed of an old one by jax.device_get(state.params)"
        )


def zeros_if_donated(state: Any) -> Any:
    """The pytree with zeros in place of donated arrays, as a template to restore a checkpoint into.

    Example:
        >>> x = jnp.ones(3)
        >>> _ = jax.jit(lambda x: x + 1, donate_argnums=0)(x)
        >>> zeros_if_donated({"x": x})["x"].tolist()
        [0.0, 0.0, 0.0]
    """
    with outside_mesh():
        return jax.tree.map(lambda leaf: _zeros_like(leaf) if _is_deleted(leaf) else leaf, state)


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted()


def _zeros_like(leaf: jax.Array) -> jax.Array:
    """Zeros of the same shape, dtype and sharding, without a look at the values."""
    if not is_prng_key(leaf):
        return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
    bits = jax.eval_shape(jax.random.key_data, leaf)
    key = jax.random.wrap_key_data(jnp.zeros(bits.shape, bits.dtype), impl=jax.random.key_impl(leaf))
    return jax.device_put(key, leaf.sharding)
