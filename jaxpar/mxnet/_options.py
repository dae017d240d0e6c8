"""The options that all of MXNet's optimizers share, and what is answered to names that are none."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import numbers
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import jax.numpy as jnp
from jax import Array

from .._core import checks

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

    def clip(self, gradient: Array) -> Array:
        limit = self.clip_gradient
        return gradient if limit is None else jnp.clip(gradient, -limit, limit)


def common_of(function: Callable[..., Any], learning_rate: Rate | None, wd: float, given: Mapping[str, Any]) -> Common:
    """The options that are common to all, checked.

    Args:
        function: the optimizer that is called, for messages.
        given: the other keyword arguments.

    Raises:
        TypeError: an argument of the wrong kind or name.
        ValueError: a number out of range.
    """
    _check_names(function, given)
    return _checked(function.__name__, learning_rate, wd, **{k: v for k, v in given.items() if k not in _ABSENT})


def _checked(
    where: str,
    learning_rate: Rate | None,
    wd: float,
    *,
    rescale_grad: float = 1.0,
    clip_gradient: float | None = None,
    lr_mult: Mapping[int, float] | None = None,
    wd_mult: Mapping[int, float] | None = None,
    multi_precision: bool = False,
    begin_num_update: int = 0,
    rate_in_state: bool = False,
) -> Common:
    if callable(learning_rate) and rate_in_state:
        raise TypeError(f"{where}: rate_in_state takes a number to start with, got a schedule")
    if not callable(learning_rate):
        given = 0.01 if learning_rate is None else learning_rate
        learning_rate = number(where, "learning_rate", given, f"{_AT_LEAST_ZERO} or a schedule")
    return Common(
        where=where,
        learning_rate=learning_rate,
        wd=number(where, "wd", wd),
        rescale_grad=checks.number(rescale_grad, where, "rescale_grad", "a number", lambda _: True),
        clip_gradient=None if clip_gradient is None else number(where, "clip_gradient", clip_gradient) or None,
        lr_mult=_factors(where, "lr_mult", lr_mult),
        wd_mult=_factors(where, "wd_mult", wd_mult),
        multi_precision=bool(multi_precision),
        begin_num_update=checks.whole_number(begin_num_update, where, "begin_num_update", 0),
        rate_in_state=bool(rate_in_state),
    )


def number(where: str, name: str, value: Any, expected: str = _AT_LEAST_ZERO) -> float:
    """`value` as a float that is not negative."""
    return checks.number(value, where, name, expected, lambda n: n >= 0)


def _factors(where: str, name: str, factors: Mapping[int, float] | None) -> tuple[tuple[int, float], ...]:
    if factors is not None and not all(isinstance(key, numbers.Integral) for key in factors):
        raise TypeError(
            f"{where}: {name} maps keys to factors, got {factors!r}; multipliers(names, patterns) makes one"
        )
    return tuple(sorted((int(key), number(where, name, value)) for key, value in (factors or {}).items()))


# Names of arguments.

# MXNet's arguments that have no counterpart, and what is written instead. Nothing given for them is no error.
_BY_KEY = "write lr_mult= and wd_mult= by key; updaters.multipliers(names, patterns) makes them"
_ABSENT = {
    "lr_scheduler": "write learning_rate=lambda count: ..., a schedule of the earlier pushes. MXNet's scheduler "
    "gets the number of this push, so lr_scheduler=f is learning_rate=lambda count: f(count + 1)",
    "param_idx2name": "write wd_mult=updaters.mxnet_wd_mult(names), with kv.names(store) or this dict as names",
    "sym": _BY_KEY,
    "param_dict": _BY_KEY,
}
_RENAMED = {
    "lr": "learning_rate",
    "rate": "learning_rate",
    "eps": "epsilon",
    "weight_decay": "wd",
    "gamma": "gamma1",
    "decay": "gamma1",
    "clip_grad": "clip_gradient",
    "b1": "beta1",
    "b2": "beta2",
}
_OTHER = {
    "nesterov": "use mxnet_nag",
    "lazy_update": "MXNet has it for SGD and Adam only",
    "aggregate_num": "leave it out. The updates of all keys are one compiled program",
}


def renamed(function: Callable[..., Any], given: dict[str, Any], other: str, name: str, value: Any) -> Any:
    """The value of an argument that has another name too. That one is taken out of `given`.

    Raises:
        TypeError: both were given.
    """
    if other not in given:
        return value
    if value != inspect.signature(function).parameters[name].default:
        raise TypeError(f"{function.__name__}: {other} is another name of {name}; give one of them")
    return given.pop(other)


def _check_names(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """`TypeError` for a keyword that the optimizer does not have, with what to write instead."""
    for name, value in given.items():
        if name in Options.__annotations__ or (name in _ABSENT and (value is None or value == {})):
            continue
        accepted = [p.name for p in inspect.signature(function).parameters.values() if p.kind != p.VAR_KEYWORD]
        accepted += Options.__annotations__
        raise TypeError(
            f"{function.__name__}: unknown argument {name!r}{_advice(name, value, accepted)}. "
            f"Accepted are {', '.join(accepted)}"
        )


def _advice(name: str, value: Any, accepted: list[str]) -> str:
    if name in _ABSENT or name in _OTHER:
        return f"; {_ABSENT.get(name) or _OTHER[name]}"
    near = [_RENAMED[name]] if _RENAMED.get(name) in accepted else difflib.get_close_matches(name, accepted, 1)
    return f"; write {near[0]}={checks.describe(value)}" if near else ""
