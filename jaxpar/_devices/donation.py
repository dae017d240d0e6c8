"""Whether the memory of a state was given to a later one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._core.arrays import is_traced


def is_donated(state: Any) -> bool:
    """Whether a step took the memory of any of its arrays.

    >>> x = jax.numpy.ones(3)
    >>> _ = jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    >>> given_away({"x": x}), given_away({"x": jax.numpy.ones(3)})
    (True, False)
    """
    leaves = jax.tree.leaves(state)
    return any(isinstance(leaf, jax.Array) and not is_traced(leaf) and leaf.is_deleted() for leaf in leaves)


def check_not_donated(state: Any, where: str) -> None:
    """`RuntimeError` for a state whose memory a step took."""
    if is_donated(state):
        raise RuntimeError(
            f"{where}: the memory of this state was given to the state that a step made of it; go on with that one, "
            "state, metrics = step(state, batch), and keep what is needed of an old one by jax.device_get(state.params)"
        )


def zeros_if_donated(state: Any) -> Any:
    """Zeros in place of the arrays whose memory was given away: something to restore a checkpoint into.

    >>> x = jax.numpy.ones(3)
    >>> _ = jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    >>> blank({"x": x})["x"].tolist()
    [0.0, 0.0, 0.0]
    """

    def alive(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or not leaf.is_deleted():
            return leaf
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
        bits = jax.eval_shape(jax.random.key_data, leaf)
        key = jax.random.wrap_key_data(jnp.zeros(bits.shape, bits.dtype), impl=jax.random.key_impl(leaf))
        return jax.device_put(key, leaf.sharding)

    return jax.tree.map(alive, state)
