"""Programs that the compiler keeps apart, so that they round alike whatever is before and after them.

XLA fuses a program with its surroundings, and a fused product and sum round once instead of twice. It fuses nothing
across the border of a loop's body, and it inlines a body only where it knows how often the loop runs. So each of these
is the body of a loop whose number of rounds is a value that only the running program knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def unknown_zero(step: jax.Array) -> jax.Array:
    """int32 0, which the compiler does not know to be 0. `step` is an int32 of 0 or more that it does not know."""
    return jnp.minimum(step, 0)


def run_apart(fn: Callable[[Any, Any], tuple[Any, Any]], state: Any, args: Any, zero: jax.Array) -> tuple[Any, Any]:
    """`fn(state, args)`, whose results are a new state, with the types of the old one, and anything else.

    What does not change in a loop may be computed before it. So the next round, which there is none of, gets a new
    state and zeros in place of `args`.
    """
    traced = jax.jit(fn, inline=True)  # so it is traced once
    _, rest = jax.eval_shape(traced, state, args)
    rest = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rest)

    def body(carry: Any) -> Any:
        i, state, args, _ = carry
        state, rest = traced(state, args)
        return i + 1, state, jax.tree.map(jnp.zeros_like, args), rest

    _, state, _, rest = lax.while_loop(lambda carry: carry[0] < 1 + zero, body, (zero, state, args, rest))
    return state, rest
