"""The steps of MXNet's optimizers: what all of them share, the formula of each, and the updater that runs it.

`_mxnet` has the functions for users.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from .._core import checks
from .._core.updater import Updater
from ._mxnet_names import check_names

Rate = float | Callable[[Array], ArrayLike]  # a number, or a schedule `count -> rate`
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


Rule = Callable[..., tuple[Array, State]]  # of a `Push` and the options, gives (new value, new slots)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optimizer with its options: the `update` of its updater. Equal options make equal ones."""

    name: str  # that of its function, for messages
    rule: Rule
    slots: tuple[str, ...]  # the arrays of its state in the shape of the value
    options: tuple[tuple[str, float], ...]  # of the rule
    is_counted: bool  # whether the rule or a schedule needs the number of earlier pushes
    # Whether a push of rows updates these rows only, of a value and of one with a float32 copy. Otherwise it updates
    # the whole table, as a dense push with zeros does.
    lazy: bool
    lazy_with_master: bool
    takes_decay: bool  # whether rows may have weight decay
    learning_rate: Rate
    wd: float
    rescale_grad: float
    clip_gradient: float | None
    lr_mult: tuple[tuple[int, float], ...]  # sorted
    wd_mult: tuple[tuple[int, float], ...]
    multi_precision: bool
    begin_num_update: int
    rate_in_state: bool

    @property
    def uses_key(self) -> bool:
        return bool(self.lr_mult or self.wd_mult)

    @property
    def takes_num_updates(self) -> bool:
        """Whether an update is to be called with `num_updates`, the largest number of updates of any key of a store."""
        return callable(self.learning_rate)

    def program_of(self, key: int) -> tuple[float, float]:
        """All that the update takes from the key: its factors of rate and decay."""
        return dict(self.lr_mult).get(key, 1.0), dict(self.wd_mult).get(key, 1.0)

    def is_lazy(self, state: State) -> bool:
        """Whether a push of rows updates these rows only."""
        return self.lazy_with_master if "master" in state else self.lazy

    def check_rows(self, key: int) -> None:
        """`ValueError` if the optimizer takes no rows of this key."""
        decay = self.wd * self.program_of(key)[1]
        if decay and not self.takes_decay:
            raise ValueError(
                f"kv.push: key {key}: {self.name} takes no RowSparse with weight decay, as in MXNet, and that of this "
                f"key is {decay}; write wd=0 or wd_mult={{{key}: 0}}, or push dense values"
            )

    def __call__(
        self, key: int, pushed: Array, state: State, stored: Array, num_updates: Array | None = None
    ) -> tuple[Array, State]:
        # The rule computes in float32 or wider. A narrower value has a wide copy in the state, if the user wants one
        # (`multi_precision`): a step smaller than half a digit of the value would be lost without it.
        wide = _wide(stored.dtype)
        gradient = pushed.astype(wide) * self.rescale_grad

        # The rate is in the state, or of a schedule, or a number. Each key has a factor of it, and one of the decay.
        of_rate, of_decay = self.program_of(key)
        rate = self.learning_rate
        if self.rate_in_state:
            rate = state["learning_rate"]
        elif callable(rate):
            try:
                rate = rate(state["count"] if num_updates is None else num_updates)
            except jax.errors.TracerBoolConversionError as error:
                schedule = getattr(self.learning_rate, "__name__", type(self.learning_rate).__name__)
                raise TypeError(
                    f"{self.name}: the schedule {schedule} tests the count in Python, which a compiled step cannot; "
                    "write jnp.where(count < 100, 0.1, 0.01) in place of if"
                ) from error
        rate = jnp.asarray(rate * of_rate, wide)

        value = _master(state["master"], stored) if "master" in state else stored.astype(wide)
        push = Push(gradient, value, state, rate, self.wd * of_decay, self.clip_gradient)
        value, slots = self.rule(push, **dict(self.options))
        state = {**state, **slots}
        if "master" in state:
            state["master"] = value
        if "count" in state:
            state["count"] = state["count"] + 1
        return value.astype(stored.dtype), state


@dataclasses.dataclass(frozen=True)
class _Init:
    optimizer: Optimizer
    uses_key = False

    def __call__(self, key: int, value: Array | None = None) -> State:
        optimizer = self.optimizer
        if value is None:  # optax gives the params
            raise TypeError(
                f"{optimizer.name} is an updater with a state for each key, and no part of an optax transform; give it "
                "alone as optimizer=, or an optimizer of optax here"
            )
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(
                f"key {key}: an optimizer needs a floating value, got {value.dtype}; cast it before kv.init, or use an "
                "updater for this key"
            )
        wide = _wide(value.dtype)
        state = {slot: jnp.zeros(value.shape, wide) for slot in optimizer.slots}
        if optimizer.multi_precision and value.dtype != wide:
            state["master"] = value.astype(wide)
        if optimizer.is_counted:
            state["count"] = jnp.asarray(optimizer.begin_num_update, jnp.int32)
        if optimizer.rate_in_state:
            state["learning_rate"] = jnp.asarray(optimizer.learning_rate, jnp.float32)
        return state


def make(
    function: Callable[..., object],
    rule: Rule,
    learning_rate: Rate | None,
    wd: float,
    common: Mapping[str, Any],
    slots: tuple[str, ...],
    *,
    lazy: bool,
    lazy_with_master: bool = False,
    takes_decay: bool = True,
    is_counted: bool = False,
    **options: float,
) -> Updater:
    """The updater of the optimizer `function`. `common` are the options that all share, which are checked here."""
    check_names(function, common, Options.__annotations__)
    caller, rate_in_state = function.__name__, bool(common.get("rate_in_state", False))
    if rate_in_state or not callable(learning_rate):
        rate = 0.01 if learning_rate is None else learning_rate
        expected = f"{_AT_LEAST_ZERO}{' with rate_in_state' if rate_in_state else ' or a schedule'}"
        learning_rate = _number(caller, "learning_rate", rate, expected)
    limit = common.get("clip_gradient")
    optimizer = Optimizer(
        caller,
        rule,
        slots,
        options=tuple((name, _number(caller, name, value)) for name, value in options.items()),
        is_counted=is_counted or callable(learning_rate),
        lazy=lazy,
        lazy_with_master=lazy_with_master,
        takes_decay=takes_decay,
        learning_rate=learning_rate,
        wd=_number(caller, "wd", wd),
        rescale_grad=checks.number(common.get("rescale_grad", 1.0), caller, "rescale_grad", "a number", lambda _: True),
        clip_gradient=None if limit is None else _number(caller, "clip_gradient", limit) or None,
        lr_mult=_factors(caller, "lr_mult", common.get("lr_mult")),
        wd_mult=_factors(caller, "wd_mult", common.get("wd_mult")),
        multi_precision=bool(common.get("multi_precision", False)),
        begin_num_update=checks.whole_number(common.get("begin_num_update", 0), caller, "begin_num_update", 0),
        rate_in_state=rate_in_state,
    )
    return Updater(_Init(optimizer), optimizer)


def _number(caller: str, name: str, value: object, expected: str = _AT_LEAST_ZERO) -> float:
    """`value` as a float that is not negative."""
    return checks.number(value, caller, name, expected, lambda n: n >= 0)


def _factors(caller: str, name: str, factors: Mapping[int, float] | None) -> tuple[tuple[int, float], ...]:
    return tuple(sorted((operator.index(key), _number(caller, name, value)) for key, value in (factors or {}).items()))


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


# The rules. The table at the top of `_mxnet` has their formulas.


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
    mean = beta1 * push.state["mean"] + _one_minus(beta1, dtype) * gradient
    variance = beta2 * push.state["variance"] + _one_minus(beta2, dtype) * gradient**2
    t = (push.state["count"] + 1).astype(dtype)
    rate = push.rate * jnp.sqrt(_one_less_power(beta2, t)) / _one_less_power(beta1, t)
    return push.value - rate * mean / (jnp.sqrt(variance) + epsilon), {"mean": mean, "variance": variance}


def rmsprop(push: Push, *, gamma1: float, epsilon: float, clip_weights: float) -> tuple[Array, State]:
    gradient = push.decayed
    square = _one_minus(gamma1, push.value.dtype) * gradient**2 + gamma1 * push.state["square"]
    value = push.value - push.rate * gradient / jnp.sqrt(square + epsilon)
    return _clip_weights(value, clip_weights), {"square": square}


def centered_rmsprop(
    push: Push, *, gamma1: float, gamma2: float, epsilon: float, clip_weights: float
) -> tuple[Array, State]:
    gradient, state, weight = push.decayed, push.state, _one_minus(gamma1, push.value.dtype)
    square = weight * gradient**2 + gamma1 * state["square"]
    mean = weight * gradient + gamma1 * state["mean"]
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


def _one_minus(factor: float, dtype: jnp.dtype) -> Any:
    """1 - factor, with the factor rounded first as MXNet's kernels do: 1 - 0.999f is 1.3e-5 below 0.001."""
    return dtype.type(1) - dtype.type(factor)


def _one_less_power(beta: float, t: Array) -> Array:
    """1 - beta^t, without the digits that a subtraction in float32 would lose."""
    return -jnp.expm1(t * (math.log(beta) if beta > 0 else -math.inf))


def _wide(dtype: DTypeLike) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)
