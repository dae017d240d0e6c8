"""Optax transforms as updaters."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax

from ._base import State, Updater, _couples_keys

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


def couples_keys(tx: optax.GradientTransformation) -> bool:
    """Whether the update of one value depends on the gradient of another, as with clipping by a global norm.

    Found by trying: two values, the gradient of the second one ordinary, huge and NaN; the update of the
    first must not change by a bit. A transform that cannot take two plain vectors is not judged (False).
    """
    return _couples_keys(tx)
