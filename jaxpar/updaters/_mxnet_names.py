"""Arguments of MXNet's optimizers under other names, and what to write in place of those that are not here."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping

from .._core import checks

# Arguments of MXNet's optimizers that have no counterpart, and what is written instead. None and {} are no error.
_BY_KEY = "write lr_mult= and wd_mult= by key; updaters.multipliers(names, patterns) makes them"
ABSENT = {
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


def renamed(
    function: Callable[..., object], name: str, value: float, second_name: str, second_value: float | None
) -> float:
    """The value of an argument that has two names."""
    if second_value is None:
        return value
    if value != inspect.signature(function).parameters[name].default:
        raise TypeError(f"{function.__name__}: {second_name} is another name of {name}; give one of them")
    return second_value


def check_names(function: Callable[..., object], keywords: Mapping[str, object], common: Iterable[str]) -> None:
    """`TypeError` for a keyword that the optimizer does not have, with what to write instead."""
    for name, value in keywords.items():
        if name in common or (name in ABSENT and (value is None or value == {})):
            continue
        accepted = [p.name for p in inspect.signature(function).parameters.values() if p.kind != p.VAR_KEYWORD]
        accepted += common
        raise TypeError(
            f"{function.__name__}: unknown argument {name!r}{_advice(name, value, accepted)}. "
            f"Accepted are {', '.join(accepted)}"
        )


def _advice(name: str, value: object, accepted: list[str]) -> str:
    if name in ABSENT or name in _OTHER:
        return f"; {ABSENT.get(name) or _OTHER[name]}"
    near = [_RENAMED[name]] if _RENAMED.get(name) in accepted else difflib.get_close_matches(name, accepted, 1)
    return f"; write {near[0]}={checks.describe(value)}" if near else ""
