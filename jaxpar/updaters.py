"""Updaters: what a push does to the stored value, as pure functions.

An `Updater` is a pair of pure functions, in the manner of optax: `init` makes the state that belongs to a key,
`update` turns what was pushed (summed over devices), that state and the stored value into the new stored value
and the new state. MXNet's updater mutated the stored array and its return value was ignored; here it is the
other way round. MXNet's own optimizers are here too (`mxnet_sgd`, ...; see `jaxpar.mxnet_optimizers`).

All of these compare equal when they are made from the same parts, so a store that carries one is a stable
static argument: the same `tx` object is one compiled program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from ._recent import Recent
from .mxnet_optimizers import (
    multipliers as multipliers,
    mxnet_adagrad as mxnet_adagrad,
    mxnet_adam as mxnet_adam,
    mxnet_nag as mxnet_nag,
    mxnet_rmsprop as mxnet_rmsprop,
    mxnet_sgd as mxnet_sgd,
    mxnet_wd_mult as mxnet_wd_mult,
    set_learning_rate as set_learning_rate,
)

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
"""The pushed sum replaces the stored value: MXNet's default."""

accumulate: Updater = Updater(_no_state, _accumulate)
"""The pushed sum is added to the stored value."""


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


@dataclasses.dataclass(frozen=True)
class _OptaxInit:
    tx: optax.GradientTransformation
    uses_key = False

    def __call__(self, key: int, value: jax.Array) -> State:
        del key
        return self.tx.init(value)


@dataclasses.dataclass(frozen=True)
class _OptaxUpdate:
    tx: optax.GradientTransformation
    uses_key = False

    def __call__(self, key: int, pushed: jax.Array, state: State, stored: jax.Array) -> tuple[jax.Array, State]:
        del key
        updates, state = self.tx.update(pushed, state, stored)
        return (stored + updates).astype(stored.dtype), state  # pyright: ignore[reportOperatorIssue]


def from_optax(tx: optax.GradientTransformation) -> Updater:
    """An updater that treats what is pushed as the gradient of the stored value.

    Each key has its own optax state. A transform that couples keys (`optax.clip_by_global_norm`) sees one key
    at a time here; give it to the training step as `grad_transform` instead. `kv.set_optimizer` refuses one.

    Args:
        tx: the transform; the same object makes an equal updater, another `optax.sgd(0.1)` does not.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> updater = from_optax(optax.sgd(0.5))
        >>> value = jnp.array([1.0, 2.0])
        >>> updater.update(0, jnp.ones(2), updater.init(0, value), value)[0].tolist()
        [0.5, 1.5]
    """
    return Updater(_OptaxInit(tx), _OptaxUpdate(tx))


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


def couples_keys(tx: optax.GradientTransformation) -> bool:
    """Whether the update of one value depends on the gradient of another, as with clipping by a global norm.

    Found by trying: two values, the gradient of the second one ordinary, huge and NaN; the update of the
    first must not change by a bit. A transform that cannot take two plain vectors is not judged (False).
    """
    return _couples_keys(tx)


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
