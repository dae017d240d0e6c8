"""The type of an updater. `jp.updaters` and `jp.mxnet` make them, `jp.kv` runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

from .arrays import PyTree

State = PyTree  # of arrays
Params = PyTree  # of arrays, with None in place of leaves that have no gradient
Grads = PyTree  # of the structure of the params
UpdateFn = Callable[[int, jax.Array, jax.Array], jax.Array]  # (key, pushed, stored) -> new_stored


class Updater(NamedTuple):
    """Two pure functions that define what a push does.

    Attributes:
        init: `init(key, value) -> state`, any pytree of arrays. `kv.init` calls it for each new key.
        update: `update(key, pushed, state, stored) -> (new_stored, new_state)`. `pushed` and `stored` have the shape
            and dtype of the stored value, and `new_stored` must have them too. In a store of kind `sharded`, both are
            one device's flat share of the value, so both functions must be elementwise. `kv.set_updater` checks that.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import kv, updaters
        >>> halve = updaters.Updater(
        ...     init=lambda key, value: (),
        ...     update=lambda key, pushed, state, stored: (stored + pushed / 2, state),
        ... )
        >>> store = kv.set_updater(kv.init(kv.create(), 3, jnp.ones(2)), halve)
        >>> kv.pull(kv.push(store, 3, jnp.full(2, 4.0)), 3).tolist()
        [3.0, 3.0]
    """

    init: Callable[[int, jax.Array], State]
    update: Callable[[int, jax.Array, State, jax.Array], tuple[jax.Array, State]]
