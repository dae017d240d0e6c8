"""Transfers between hosts and devices where the user has set `jax.transfer_guard("disallow")`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")

_WAYS = ("host_to_device", "device_to_host", "device_to_device")
_GUARDS = {f"jax_transfer_guard_{way}": getattr(jax, f"transfer_guard_{way}") for way in _WAYS}


def allows_transfers(fn: Callable[P, R]) -> Callable[P, R]:
    """The function, which puts what it is given on devices: that is its work, so a guard of implicit transfers is off.

    A guard that disallows explicit transfers too stays.
    """

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True  # IPython and pytest leave this frame out of a traceback
        guards = [guard for name, guard in _GUARDS.items() if getattr(jax.config, name) in ("disallow", "log")]
        if not guards:  # nothing runs after `fn`, where Ctrl-C would lose the state that `fit` returns
            return fn(*args, **kwargs)
        with contextlib.ExitStack() as block:
            for guard in guards:
                block.enter_context(guard("allow"))
            return fn(*args, **kwargs)

    return call
