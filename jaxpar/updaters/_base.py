"""What a push does to a stored value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from .._core.recent import Recent

if TYPE_CHECKING:
    import optax


State = Any


UpdateFn = Callable[[int, jax.Array, jax.Array], jax.Array]  # (key, pushed, stored) -> new_stored


class Updater(NamedTuple):
    """A pair of pure functions that says what a push does.

    Attributes:
        init: `init(key, value) -> state`, any pytree of arrays, made when the key is initialised.
        update: `update(key, pushed, state, stored) -> (new_stored, new_state)`; `pushed` and `stored` have the
            shape and dtype of the stored value, and `new_stored` must have them too. In a store of kind
            `sharded` both are one device's flat share of the value, so both functions must be elementwise there;
            `kv.set_updater` traces them on the whole value and on a share to see that.

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


def _no_state(key: int, value: jax.Array) -> State:
    del key, value
    return ()


def _assign(key: int, pushed: jax.Array, state: State, stored: jax.Array) -> tuple[jax.Array, State]:
    del key, stored
    return pushed, state


def _accumulate(key: int, pushed: jax.Array, state: State, stored: jax.Array) -> tuple[jax.Array, State]:
    del key
    return stored + pushed, state


assign: Updater = Updater(_no_state, _assign)


accumulate: Updater = Updater(_no_state, _accumulate)


@dataclasses.dataclass(frozen=True)
class _Stateless:
    fn: UpdateFn

    def __call__(self, key: int, pushed: jax.Array, state: State, stored: jax.Array) -> tuple[jax.Array, State]:
        return self.fn(key, pushed, stored), state


def stateless(fn: UpdateFn) -> Updater:
    """An updater out of `fn(key, pushed, stored) -> new_stored`, a pure function.

    As an `Updater` it is compiled into the push; the bare function given to `kv.set_updater` runs in Python
    on every push instead, so that a `print` in it prints.

    Example:
        >>> import jax.numpy as jnp
        >>> updater = stateless(lambda key, pushed, stored: stored + 2 * pushed)
        >>> updater.update(3, jnp.ones(2), (), jnp.ones(2))[0].tolist()
        [3.0, 3.0]
    """
    return Updater(_no_state, _Stateless(fn))


def ignores_key(updater: Any) -> bool:
    """Whether it is known that an updater does the same for every key, so that keys can share a program."""
    return updater in (assign, accumulate) or not getattr(getattr(updater, "update", None), "uses_key", True)


def program_of(updater: Updater, key: int) -> Any:
    """What of a key the programs of `init` and `update` depend on; keys of equal answers share them."""
    if updater.init is not _no_state and getattr(updater.init, "uses_key", True):
        return key
    if ignores_key(updater):
        return None
    return getattr(updater.update, "program_of", int)(key)


def _is_coupling(tx: optax.GradientTransformation) -> bool:
    import jax.numpy as jnp

    others = jnp.stack([jnp.ones(4), jnp.full(4, 1e30), jnp.full(4, jnp.nan)])

    def first_update(other: jax.Array) -> jax.Array:
        ones = jnp.ones(4)
        return tx.update((ones, other), tx.init((ones, ones)), (ones, ones))[0][0]  # pyright: ignore

    try:
        with jax.ensure_compile_time_eval(), jax.debug_nans(False), jax.debug_infs(False):
            first = jax.jit(jax.vmap(first_update))(others)
            return not bool((first == first[:1]).all())
    except Exception:  # any error here is about our two vectors, not about the user's values
        return False


_couples_keys = Recent(_is_coupling)  # the program goes, the answer stays for the same `tx`
