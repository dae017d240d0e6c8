"""The steps of MXNet's optimizers: what all of them share, the formula of each, and the updater that runs it.

`_optimizers` has the functions for users.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypedDict

import jax.numpy as jnp
from jax import Array, lax

from .._core import checks
from .._core.updater import Updater
from ._names import check_names

Rate = float | Callable[[Array], Any]
State = dict[str, Array]
_AT_LEAST_ZERO = "a number of 0 or more"


class Options(TypedDict, total=False):
    """Keyword arguments of every optimizer, described in `mxnet_sgd`."""

    rescale_grad: float
    clip_gradient: float | None
    lr_mult: Mapping[int, float] | None
    wd_mult: Mapping[int, float] | None
    multi_precision: bool
    begin_num_update: int
    rate_in_state: bool


class RMSPropOptions(Options, total=False):
    """Those of `mxnet_rmsprop`: `gamma` is another name of gamma1."""

    gamma: float


class AdaGradOptions(Options, total=False):
    """Those of `mxnet_adagrad`: `eps` is another name of epsilon, and the one that MXNet has."""

    eps: float


@dataclasses.dataclass(frozen=True)
class Common:
    """What every optimizer has. Multipliers are sorted pairs, so that equal ones are equal static fields."""

    where: str
    learning_rate: Rate
    wd: float
    rescale_grad: float
    clip_gradient: float | None
    lr_mult: tuple[tuple[int, float], ...]
    wd_mult: tuple[tuple[int, float], ...]
    multi_precision: bool
    begin_num_update: int
    rate_in_state: bool

    @functools.cached_property
    def factors(self) -> tuple[dict[int, float], dict[int, float]]:
        """The multipliers of rate and decay by key."""
        return dict(self.lr_mult), dict(self.wd_mult)

    def rate(self, key: int, state: State) -> Any:
        if self.rate_in_state:
            rate = state["learning_rate"]
        elif callable(self.learning_rate):
            rate = self.learning_rate(state.get("num_update", state["count"]))  # in a store that of all keys
        else:
            rate = self.learning_rate
        return rate * self.factors[0].get(key, 1.0)

    def decay(self, key: int) -> float:
        return self.wd * self.factors[1].get(key, 1.0)


def common_of(function: Callable[..., Any], learning_rate: Rate | None, wd: float, given: Mapping[str, Any]) -> Common:
    """The options that are common to all, checked. `function` is the optimizer that is called."""
    check_names(function, given, Options.__annotations__)
    where, rate_in_state = function.__name__, bool(given.get("rate_in_state", False))
    if callable(learning_rate) and rate_in_state:
        raise TypeError(f"{where}: rate_in_state takes a number to start with, got a schedule")
    if not callable(learning_rate):
        rate = 0.01 if learning_rate is None else learning_rate
        learning_rate = number(where, "learning_rate", rate, f"{_AT_LEAST_ZERO} or a schedule")
    limit = given.get("clip_gradient")
    return Common(
        where=where,
        learning_rate=learning_rate,
        wd=number(where, "wd", wd),
        rescale_grad=checks.number(given.get("rescale_grad", 1.0), where, "rescale_grad", "a number", lambda _: True),
        clip_gradient=None if limit is None else number(where, "clip_gradient", limit) or None,
        lr_mult=_factors(where, "lr_mult", given.get("lr_mult")),
        wd_mult=_factors(where, "wd_mult", given.get("wd_mult")),
        multi_precision=bool(given.get("multi_precision", False)),
        begin_num_update=checks.whole_number(given.get("begin_num_update", 0), where, "begin_num_update", 0),
        rate_in_state=rate_in_state,
    )


def number(where: str, name: str, value: Any, expected: str = _AT_LEAST_ZERO) -> float:
    """`value` as a float that is not negative."""
    return checks.number(value, where, name, expected, lambda n: n >= 0)


def _factors(where: str, name: str, factors: Mapping[int, float] | None) -> tuple[tuple[int, float], ...]:
    if factors is not None and not all(isinstance(key, numbers.Integral) for key in factors):
        hint = "multipliers(names, patterns) makes one"
        raise TypeError(f"{where}: {name} maps keys to factors, got {factors!r}; {hint}")
    return tuple(sorted((int(key), number(where, name, value)) for key, value in (factors or {}).items()))


_Rule = Callable[..., tuple[Array, State]]  # of a `Push` and the options, gives (new value, new slots)


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
            hint = "cast it before kv.init, or use an updater for this key"
            raise TypeError(f"key {key}: an optimizer needs a floating value, got {value.dtype}; {hint}")
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
        value = _master(state["master"], stored) if "master" in state else stored.astype(wide)
        push = Push(gradient, value, state, rate, self.common.decay(key), self.common.clip_gradient)
        value, slots = self.rule(push, **dict(self.options))
        state = {**state, **slots}
        if "master" in state:
            state["master"] = value
        if "count" in state:
            state["count"] = state["count"] + 1
        return value.astype(stored.dtype), state


class Push(NamedTuple):
    """What a rule is given: the scaled gradient, the value, its state, and the rate and decay of its key."""

    gradient: Array
    value: Array
    state: State
    rate: Array
    decay: float
    limit: float | None  # clip_gradient

    def clip(self, gradient: Array) -> Array:
        return gradient if self.limit is None else jnp.clip(gradient, -self.limit, self.limit)

    @property
    def decayed(self) -> Array:
        """The gradient with the decay, clipped together."""
        return self.clip(self.gradient + self.decay * self.value)


def sgd(push: Push, *, momentum: float) -> tuple[Array, State]:
    step = push.rate * (push.clip(push.gradient) + push.decay * push.value)
    if not momentum:
        return push.value - step, {}
    buffer = momentum * push.state["momentum"] - step
    return push.value + buffer, {"momentum": buffer}


def nag(push: Push, *, momentum: float) -> tuple[Array, State]:
    """MXNet's kernel writes the value first, so the decay in its momentum is that of the new value."""
    if not momentum:
        return sgd(push, momentum=0.0)
    gradient, slowed = push.clip(push.gradient), momentum * push.state["momentum"]
    new = push.value + momentum * slowed - (1 + momentum) * push.rate * (gradient + push.decay * push.value)
    return new, {"momentum": slowed - push.rate * (gradient + push.decay * new)}


def adam(push: Push, *, beta1: float, beta2: float, epsilon: float) -> tuple[Array, State]:
    gradient, dtype = push.decayed, push.value.dtype
    mean = beta1 * push.state["mean"] + _rest(beta1, dtype) * gradient
    variance = beta2 * push.state["variance"] + _rest(beta2, dtype) * gradient**2
    t = (push.state["count"] + 1).astype(dtype)
    rate = push.rate * jnp.sqrt(_one_less_power(beta2, t)) / _one_less_power(beta1, t)
    return push.value - rate * mean / (jnp.sqrt(variance) + epsilon), {"mean": mean, "variance": variance}


def rmsprop(push: Push, *, gamma1: float, epsilon: float, clip_weights: float) -> tuple[Array, State]:
    gradient = push.decayed
    square = _rest(gamma1, push.value.dtype) * gradient**2 + gamma1 * push.state["square"]
    value = push.value - push.rate * gradient / jnp.sqrt(square + epsilon)
    return _clip_weights(value, clip_weights), {"square": square}


def centered_rmsprop(
    push: Push, *, gamma1: float, gamma2: float, epsilon: float, clip_weights: float
) -> tuple[Array, State]:
    gradient, state, rest = push.decayed, push.state, _rest(gamma1, push.value.dtype)
    square = rest * gradient**2 + gamma1 * state["square"]
    mean = rest * gradient + gamma1 * state["mean"]
    delta = gamma2 * state["delta"] - push.rate * gradient / jnp.sqrt(square - mean**2 + epsilon)
    return _clip_weights(push.value + delta, clip_weights), {"square": square, "mean": mean, "delta": delta}


def adagrad(push: Push, *, epsilon: float) -> tuple[Array, State]:
    gradient = push.clip(push.gradient)
    history = push.state["history"] + gradient**2
    step = push.rate * (gradient / jnp.sqrt(history + epsilon) + push.decay * push.value)
    return push.value - step, {"history": history}


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
    """An updater out of a rule, the names of its arrays of state in the shape of the value, and its options.

    `rows` is what a push of rows updates, `counted` whether the rule needs the number of earlier pushes. A schedule
    needs it always.
    """
    checked = tuple((name, number(common.where, name, value)) for name, value in options.items())
    counted = counted or callable(common.learning_rate)
    return Updater(_Init(common, slots, counted), _Update(common, rule, checked, rows))


def _wide(dtype: Any) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)
