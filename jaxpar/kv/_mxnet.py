"""What MXNet's names are here: answers to arguments, methods and kinds that code written for MXNet has."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from .._core import calls

P = ParamSpec("P")
R = TypeVar("R")

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
OTHER_KINDS = {
    "p3": "use 'dist_sync', for XLA itself sends one gradient while it computes the next",
    "horovod": "use 'dist_sync', or 'device' in one process; both are all-reduces",
    "byteps": "use 'dist_sync', or 'device' in one process; both are all-reduces",
    "teststore": "use 'local'",
}

_ARGUMENTS = {
    "out": "arrays are not written to, so write value = kv.pull(store, key), or devices=[...] for a copy on each",
    "priority": "leave it out, for the compiler orders what is sent",
    "ignore_sparse": "leave it out; kv.row_sparse_pull reads some rows",
    "name": "call it kind",
    "compression_params": "give that dict as second argument, kv.set_gradient_compression(store, params)",
    "optimizer": "give it as second argument, kv.set_optimizer(store, tx)",
    "row_id": "call it row_ids",
}

_RETURN_VALUES = ("pull", "pushpull", "broadcast", "row_sparse_pull")

_METHODS = {
    **{name: f"store = kv.{name}(store, ...)" for name in ("init", "push", "flush", "place", "set_updater")},
    **{name: f"store = kv.{name}(store, ...)" for name in ("set_optimizer", "set_gradient_compression")},
    **{name: f"value = kv.{name}(store, ...)" for name in ("pull", "row_sparse_pull")},
    **{name: f"store, value = kv.{name}(store, ...)" for name in ("pushpull", "broadcast")},
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


def answers(fn: Callable[P, R]) -> Callable[P, R]:
    """A function of `jp.kv` that says what to write where it is called with wrong arguments."""
    many = "; the values are returned, there is no out=" if fn.__name__ in _RETURN_VALUES else ""
    return calls.answers(f"kv.{fn.__name__}", _ARGUMENTS, many)(fn)
