"""Optax transforms as updaters."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from .._core import checks
from .._core.calls import answers
from .._core.recent import Recent
from ._base import State, Updater

if TYPE_CHECKING:
    import optax


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


@answers("updaters.from_optax")
def from_optax(tx: optax.GradientTransformation) -> Updater:
    """An updater for which what is pushed is the gradient of the stored value.

    Each key has its own optax state. A transform that couples keys (`optax.clip_by_global_norm`) sees one key at a
    time here. `kv.set_optimizer` refuses it. Give it to the training step as `grad_transform`.

    Args:
        tx: the transform. The same object makes an equal updater, another `optax.sgd(0.1)` does not.

    Returns:
        An `Updater`. The state of a key is that of `tx` for its value.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> updater = from_optax(optax.sgd(0.5))
        >>> value = jnp.array([1.0, 2.0])
        >>> updater.update(0, jnp.ones(2), updater.init(0, value), value)[0].tolist()
        [0.5, 1.5]
    """
    checks.transform(tx, "updaters.from_optax")
    return Updater(_OptaxInit(tx), _OptaxUpdate(tx))


def couples_keys(tx: optax.GradientTransformation) -> bool:
    """Whether the update of one value depends on the gradient of another, as with clipping by a global norm.

    `tx` is run on two vectors. The gradient of the second is ordinary, huge or NaN, and the update of the first must
    not change by a bit. A transform that cannot take two plain vectors is not judged (False).
    """
    return _couples_keys(tx)


def _is_coupling(tx: optax.GradientTransformation) -> bool:
    others = jnp.stack([jnp.ones(4), jnp.full(4, 1e30), jnp.full(4, jnp.nan)])

    def first_update(other: jax.Array) -> jax.Array:
        ones = jnp.ones(4)
        return tx.update((ones, other), tx.init((ones, ones)), (ones, ones))[0][0]  # pyright: ignore

    try:
        with jax.ensure_compile_time_eval(), jax.debug_nans(False), jax.debug_infs(False):
            first = jax.jit(jax.vmap(first_update))(others)
            return not bool((first == first[:1]).all())
    except Exception:  # an error here is about these two vectors, not about the user's values
        return False


_couples_keys = Recent(_is_coupling)  # the program is released, the answer stays for the same `tx`
