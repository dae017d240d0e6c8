"""The steps of MXNet's optimizers, and what they share. `_mxnet` has the functions for users."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import jax.numpy as jnp
from jax import Array

from .._core import checks
from ._base import Updater

Rate = float | Callable[[Array], Any]
State = dict[str, Array]


class Options(TypedDict, total=False):
    """Keyword arguments of every optimizer, described in `mxnet_sgd`."""

    rescale_grad: float
    clip_gradient: float | None
    lr_mult: Mapping[int, float] | None
    wd_mult: Mapping[int, float] | None
    rate_in_state: bool


@dataclasses.dataclass(frozen=True)
class _Common:
    """What every optimizer has. Multipliers are sorted pairs, so that equal ones are equal static fields."""

    learning_rate: Rate
    wd: float
    rescale_grad: float
    clip_gradient: float | None
    lr_mult: tuple[tuple[int, float], ...]
    wd_mult: tuple[tuple[int, float], ...]
    rate_in_state: bool

    @functools.cached_property
    def factors(self) -> tuple[dict[int, float], dict[int, float]]:
        """The multipliers of rate and decay by key."""
        return dict(self.lr_mult), dict(self.wd_mult)

    def rate(self, key: int, state: State) -> Any:
        if self.rate_in_state:
            rate = state["learning_rate"]
        elif callable(self.learning_rate):
            rate = self.learning_rate(state["count"])
        else:
            rate = self.learning_rate
        return rate * self.factors[0].get(key, 1.0)

    def decay(self, key: int) -> float:
        return self.wd * self.factors[1].get(key, 1.0)

    def clip(self, gradient: Array) -> Array:
        limit = self.clip_gradient
        return gradient if limit is None else jnp.clip(gradient, -limit, limit)


# rule(common, gradient, value, state, rate, decay) -> (new value, new slots)
_Rule = Callable[..., tuple[Array, State]]


@dataclasses.dataclass(frozen=True)
class _Init:
    common: _Common
    slots: tuple[str, ...]
    counted: bool
    uses_key = False

    def __call__(self, key: int, value: Array) -> State:
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(
                f"key {key}: an optimizer needs a floating value, got {value.dtype}; cast it before "
                "kv.init, or use an updater for this key"
            )
        state = {slot: jnp.zeros(value.shape, _wide(value.dtype)) for slot in self.slots}
        if self.counted:
            state["count"] = jnp.zeros((), jnp.int32)
        if self.common.rate_in_state:
            state["learning_rate"] = jnp.asarray(self.common.learning_rate, jnp.float32)
        return state


@dataclasses.dataclass(frozen=True)
class _Update:
    common: _Common
    rule: _Rule
    options: tuple[tuple[str, float], ...]

    @property
    def uses_key(self) -> bool:
        return bool(self.common.lr_mult or self.common.wd_mult)

    def program_of(self, key: int) -> tuple[float, ...]:
        """All that the update takes from the key."""
        return tuple(factors.get(key, 1.0) for factors in self.common.factors)

    def __call__(self, key: int, pushed: Array, state: State, stored: Array) -> tuple[Array, State]:
        wide = _wide(stored.dtype)
        gradient = pushed.astype(wide) * self.common.rescale_grad
        rate = jnp.asarray(self.common.rate(key, state), wide)
        rule = functools.partial(self.rule, **dict(self.options))
        value, slots = rule(self.common, gradient, stored.astype(wide), state, rate, self.common.decay(key))
        state = {**state, **slots}
        if "count" in state:
            state["count"] = state["count"] + 1
        return value.astype(stored.dtype), state


def sgd(
    common: _Common, gradient: Array, value: Array, state: State, rate: Array, decay: float, *, momentum: float
) -> tuple[Array, State]:
    step = rate * (common.clip(gradient) + decay * value)
    if not momentum:
        return value - step, {}
    buffer = momentum * state["momentum"] - step
    return value + buffer, {"momentum": buffer}


def nag(
    common: _Common, gradient: Array, value: Array, state: State, rate: Array, decay: float, *, momentum: float
) -> tuple[Array, State]:
    step = rate * (common.clip(gradient) + decay * value)
    if not momentum:
        return value - step, {}
    buffer = momentum * state["momentum"] - step
    return value + momentum * buffer - step, {"momentum": buffer}


def adam(
    common: _Common,
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
    common: _Common,
    gradient: Array,
    value: Array,
    state: State,
    rate: Array,
    decay: float,
    *,
    gamma: float,
    epsilon: float,
) -> tuple[Array, State]:
    gradient = common.clip(gradient + decay * value)
    square = _rest(gamma, value.dtype) * gradient**2 + gamma * state["square"]
    return value - rate * gradient / jnp.sqrt(square + epsilon), {"square": square}


def adagrad(
    common: _Common, gradient: Array, value: Array, state: State, rate: Array, decay: float, *, epsilon: float
) -> tuple[Array, State]:
    gradient = common.clip(gradient)
    history = state["history"] + gradient**2
    return value - rate * (gradient / jnp.sqrt(history + epsilon) + decay * value), {"history": history}


def _rest(factor: float, dtype: jnp.dtype) -> Any:
    """1 - factor, with the factor rounded first as MXNet's kernels do: 1 - 0.999f is 1.3e-5 below 0.001."""
    return dtype.type(1) - dtype.type(factor)


def _one_less_power(beta: float, t: Array) -> Array:
    """1 - beta^t, without the digits that a subtraction in float32 would lose."""
    return -jnp.expm1(t * (math.log(beta) if beta > 0 else -math.inf))


def make(
    rule: _Rule,
    slots: tuple[str, ...],
    options: Mapping[str, float],
    learning_rate: Rate,
    wd: float,
    common: Options,
    *,
    counted: bool = False,
) -> Updater:
    """An updater out of a rule, the names of its arrays of state, and its options.

    Args:
        slots: the names of the arrays of state that have the shape of the value.
        counted: whether the rule needs the number of earlier pushes. A schedule needs it always.
    """
    where = f"mxnet_{rule.__name__}"
    shared = _common(where, learning_rate, wd, **common)
    numbers_of = tuple((name, _number(where, name, value)) for name, value in options.items())
    counted = counted or callable(learning_rate)
    return Updater(_Init(shared, slots, counted), _Update(shared, rule, numbers_of))


def _common(
    where: str,
    learning_rate: Rate,
    wd: float,
    *,
    rescale_grad: float = 1.0,
    clip_gradient: float | None = None,
    lr_mult: Mapping[int, float] | None = None,
    wd_mult: Mapping[int, float] | None = None,
    rate_in_state: bool = False,
) -> _Common:
    if callable(learning_rate) and rate_in_state:
        raise TypeError(f"{where}: rate_in_state takes a number to start with, got a schedule")
    return _Common(
        learning_rate=learning_rate if callable(learning_rate) else _number(where, "learning_rate", learning_rate),
        wd=_number(where, "wd", wd),
        rescale_grad=checks.number(rescale_grad, where, "rescale_grad", "a number", lambda _: True),
        clip_gradient=None if clip_gradient is None else _number(where, "clip_gradient", clip_gradient),
        lr_mult=_factors(where, "lr_mult", lr_mult),
        wd_mult=_factors(where, "wd_mult", wd_mult),
        rate_in_state=bool(rate_in_state),
    )


def _number(where: str, name: str, value: Any) -> float:
    schedule = " or a schedule" if name == "learning_rate" else ""
    return checks.number(value, where, name, f"a number of 0 or more{schedule}", lambda n: n >= 0)


def _factors(where: str, name: str, factors: Mapping[int, float] | None) -> tuple[tuple[int, float], ...]:
    if factors is not None and not all(isinstance(key, numbers.Integral) for key in factors):
        raise TypeError(
            f"{where}: {name} maps keys to factors, got {factors!r}; multipliers(names, patterns) makes one"
        )
    return tuple(sorted((int(key), _number(where, name, value)) for key, value in (factors or {}).items()))


def _wide(dtype: Any) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)
