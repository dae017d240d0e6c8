"""What MXNet's names are here: kinds, arguments and methods of its KVStore, arguments of its optimizers."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .._core import checks

ALIASES = {
    "local_update_cpu": "local",
    "local_allreduce_cpu": "local",
    "nccl": "device",
    "local_allreduce_device": "device",
    "dist": "dist_sync",
    "dist_sync_device": "dist_device_sync",
    "dist_device_async": "dist_async",
}

# Kinds that have no equal here, and which one to use.
_ALL_REDUCE = "use 'dist_sync', or 'device' in one process; both are all-reduces"
OTHER_KINDS = {
    "p3": "use 'dist_sync', for XLA itself sends one gradient while it computes the next",
    "horovod": _ALL_REDUCE,
    "byteps": _ALL_REDUCE,
    "teststore": "use 'local'",
}

ARGUMENTS = {
    "out": "arrays are not written to, so write value = kv.pull(store, key), or devices=[...] for a copy on each",
    "priority": "leave it out, for the compiler orders what is sent",
    "ignore_sparse": "leave it out; kv.row_sparse_pull reads some rows",
    "name": "call it kind",
    "compression_params": "give that dict as second argument, kv.set_gradient_compression(store, params)",
    "optimizer": "give it as second argument, kv.set_optimizer(store, tx)",
    "row_id": "call it row_ids",
}

_RETURNS = {
    "store": "init push flush place set_updater set_optimizer set_gradient_compression",
    "value": "pull row_sparse_pull",
    "store, value": "pushpull broadcast",
}
_METHODS = {
    **{name: f"{result} = kv.{name}(store, ...)" for result, names in _RETURNS.items() for name in names.split()},
    "_set_updater": "store = kv.set_updater(store, updater)",
    "type": "store.kind",
    "rank": "kv.rank()",
    "num_workers": "kv.num_workers()",
    "_barrier": "kv.barrier(name)",
    "barrier": "kv.barrier(name)",
    "save_optimizer_states": "jp.checkpoint.save(path, store)",
    "load_optimizer_states": "store = jp.checkpoint.restore(path, store)",
    "is_capable": "nothing, every kind takes an optimizer",
    "_send_command_to_servers": "nothing, there are no servers",
}


def line_for(method: str) -> str | None:
    """What to write in place of a method of MXNet's store. None: it has no such method."""
    return _METHODS.get(method)


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


def renamed(function: Callable[..., Any], name: str, value: float, other: str, given: float | None) -> float:
    """The value of an argument that has two names."""
    if given is None:
        return value
    if value != inspect.signature(function).parameters[name].default:
        raise TypeError(f"{function.__name__}: {other} is another name of {name}; give one of them")
    return given


def check_names(function: Callable[..., Any], given: Mapping[str, Any], common: Iterable[str]) -> None:
    """`TypeError` for a keyword that the optimizer does not have, with what to write instead."""
    for name, value in given.items():
        if name in common or (name in ABSENT and (value is None or value == {})):
            continue
        accepted = [p.name for p in inspect.signature(function).parameters.values() if p.kind != p.VAR_KEYWORD]
        accepted += common
        raise TypeError(
            f"{function.__name__}: unknown argument {name!r}{_advice(name, value, accepted)}. "
            f"Accepted are {', '.join(accepted)}"
        )


def _advice(name: str, value: Any, accepted: list[str]) -> str:
    if name in ABSENT or name in _OTHER:
        return f"; {ABSENT.get(name) or _OTHER[name]}"
    near = [_RENAMED[name]] if _RENAMED.get(name) in accepted else difflib.get_close_matches(name, accepted, 1)
    return f"; write {near[0]}={checks.describe(value)}" if near else ""
