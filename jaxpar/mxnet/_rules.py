"""The steps of MXNet's optimizers, and what runs them.

`_optimizers` has the functions for users, `_options` what their arguments have in common.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from .._core.updater import Updater
from ._options import Common, State, number

# rule(common, gradient, value, state, rate, decay) -> (new value, new slots)
_Rule = Callable[..., tuple[Array, State]]


@dataclasses.dataclass(frozen=True)
class Rows:
    """What a push of rows updates.

    Attributes:
        are_lazy: only the rows that are pushed. Otherwise the whole table, as a dense push with zeros does.
        with_master: the same for values with a float32 copy of their own.
        decay: whether there may be weight decay.
    """

    are_lazy: bool
    with_master: bool
    decay: bool = True


@dataclasses.dataclass(frozen=True)
class _Init:
    common: Common
    slots: tuple[str, ...]
    counted: bool
    uses_key = False

    def __call__(self, key: int, value: Array) -> State:
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(
                f"key {key}: an optimizer needs a floating value, got {value.dtype}; cast it before "
                "kv.init, or use an updater for this key"
            )
        wide = _wide(value.dtype)
        state = {slot: jnp.zeros(value.shape, wide) for slot in self.slots}
        if self.common.multi_precision and value.dtype != wide:
            state["master"] = value.astype(wide)
        if self.counted:
            state["count"] = jnp.asarray(self.common.begin_num_update, jnp.int32)
        if self.common.rate_in_state:
            state["learning_rate"] = jnp.asarray(self.common.learning_rate, jnp.float32)
        return state


@dataclasses.dataclass(frozen=True)
class _Update:
    common: Common
    rule: _Rule
    options: tuple[tuple[str, float], ...]
    rows: Rows

    @property
    def uses_key(self) -> bool:
        return bool(self.common.lr_mult or self.common.wd_mult)

    @property
    def asks_all_counts(self) -> bool:
        """Whether the rate follows the largest count of any key of the store."""
        return callable(self.common.learning_rate)

    def program_of(self, key: int) -> tuple[float, ...]:
        """All that the update takes from the key."""
        return tuple(factors.get(key, 1.0) for factors in self.common.factors)

    def is_lazy(self, state: State) -> bool:
        """Whether a push of rows updates these rows only."""
        return self.rows.with_master if "master" in state else self.rows.are_lazy

    def check_rows(self, key: int) -> None:
        """`ValueError` if the optimizer takes no rows of this key."""
        decay = self.common.decay(key)
        if decay and not self.rows.decay:
            raise ValueError(
                f"{self.common.where} takes no RowSparse with weight decay, as in MXNet, and that of this key is "
                f"{decay}; write wd=0 or wd_mult={{{key}: 0}}, or push dense values"
            )

    def __call__(self, key: int, pushed: Array, state: State, stored: Array) -> tuple[Array, State]:
        wide = _wide(stored.dtype)
        gradient = pushed.astype(wide) * self.common.rescale_grad
        rate = jnp.asarray(self.common.rate(key, state), wide)
        rule = functools.partial(self.rule, **dict(self.options))
        value = _master(state["master"], stored) if "master" in state else stored.astype(wide)
        value, slots = rule(self.common, gradient, value, state, rate, self.common.decay(key))
        state = {**state, **slots}
        if "master" in state:
            state["master"] = value
        if "count" in state:
            state["count"] = state["count"] + 1
        return value.astype(stored.dtype), state


def sgd(
    common: Common, gradient: Array, value: Array, state: State, rate: Array, decay: float, *, momentum: float
) -> tuple[Array, State]:
    step = rate * (common.clip(gradient) + decay * value)
    if not momentum:
        return value - step, {}
    buffer = momentum * state["momentum"] - step
    return value + buffer, {"momentum": buffer}


def nag(
    common: Common, gradient: Array, value: Array, state: State, rate: Array, decay: float, *, momentum: float
) -> tuple[Array, State]:
    """MXNet's kernel writes the value first, so the decay in its momentum is that of the new value."""
    if not momentum:
        return sgd(common, gradient, value, state, rate, decay, momentum=0.0)
    gradient, slowed = common.clip(gradient), momentum * state["momentum"]
    new = value + momentum * slowed - (1 + momentum) * rate * (gradient + decay * value)
    return new, {"momentum": slowed - rate * (gradient + decay * new)}


def adam(
    common: Common,
    gradient: Array,
    value: Array,
    state: State,
    rate: Array,
    decay: float,
    *,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> tuple[Array, State]:
    gradient = common.clip(gradient + decay * value)
    mean = beta1 * state["mean"] + _rest(beta1, value.dtype) * gradient
    variance = beta2 * state["variance"] + _rest(beta2, value.dtype) * gradient**2
    t = (state["count"] + 1).astype(value.dtype)
    rate = rate * jnp.sqrt(_one_less_power(beta2, t)) / _one_less_power(beta1, t)
    return value - rate * mean / (jnp.sqrt(variance) + epsilon), {"mean": mean, "variance": variance}


def rmsprop(
    common: Common,
    gradient: Array,
    value: Array,
    state: State,
    rate: Array,
    decay: float,
    *,
    gamma1: float,
    epsilon: float,
    clip_weights: float,
) -> tuple[Array, State]:
    gradient = common.clip(gradient + decay * value)
    square = _rest(gamma1, value.dtype) * gradient**2 + gamma1 * state["square"]
    value = value - rate * gradient / jnp.sqrt(square + epsilon)
    return _clip_weights(value, clip_weights), {"square": square}


def centered_rmsprop(
    common: Common,
    gradient: Array,
    value: Array,
    state: State,
    rate: Array,
    decay: float,
    *,
    gamma1: float,
    gamma2: float,
    epsilon: float,
    clip_weights: float,
) -> tuple[Array, State]:
    gradient = common.clip(gradient + decay * value)
    rest = _rest(gamma1, value.dtype)
    square = rest * gradient**2 + gamma1 * state["square"]
    mean = rest * gradient + gamma1 * state["mean"]
    delta = gamma2 * state["delta"] - rate * gradient / jnp.sqrt(square - mean**2 + epsilon)
    return _clip_weights(value + delta, clip_weights), {"square": square, "mean": mean, "delta": delta}


def adagrad(
    common: Common, gradient: Array, value: Array, state: State, rate: Array, decay: float, *, epsilon: float
) -> tuple[Array, State]:
    gradient = common.clip(gradient)
    history = state["history"] + gradient**2
    return value - rate * (gradient / jnp.sqrt(history + epsilon) + decay * value), {"history": history}


def _master(master: Array, stored: Array) -> Array:
    """The wide copy of a value. Where the value was changed from outside (averaged, assigned), it is the value's own.

    The bits are compared, since XLA may leave out a rounding that is only compared as a number.
    """
    bits = f"uint{8 * stored.dtype.itemsize}"
    rounded = lax.bitcast_convert_type(master.astype(stored.dtype), bits)
    return jnp.where(rounded == lax.bitcast_convert_type(stored, bits), master, stored.astype(master.dtype))


def _clip_weights(value: Array, limit: float) -> Array:
    return jnp.clip(value, -limit, limit) if limit else value


def _rest(factor: float, dtype: jnp.dtype) -> Any:
    """1 - factor, with the factor rounded first as MXNet's kernels do: 1 - 0.999f is 1.3e-5 below 0.001."""
    return dtype.type(1) - dtype.type(factor)


def _one_less_power(beta: float, t: Array) -> Array:
    """1 - beta^t, without the digits that a subtraction in float32 would lose."""
    return -jnp.expm1(t * (math.log(beta) if beta > 0 else -math.inf))


def make(
    common: Common,
    rule: _Rule,
    slots: tuple[str, ...],
    options: Mapping[str, float],
    rows: Rows,
    *,
    counted: bool = False,
) -> Updater:
    """An updater out of a rule, the names of its arrays of state, and its options.

    Args:
        slots: the names of the arrays of state that have the shape of the value.
        rows: what a push of rows updates.
        counted: whether the rule needs the number of earlier pushes. A schedule needs it always.
    """
    checked = tuple((name, number(common.where, name, value)) for name, value in options.items())
    counted = counted or callable(common.learning_rate)
    return Updater(_Init(common, slots, counted), _Update(common, rule, checked, rows))


def _wide(dtype: Any) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)
