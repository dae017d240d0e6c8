"""Keyword arguments that a public function does not have: old names, and names that other libraries use."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from .text import warn

P = ParamSpec("P")
R = TypeVar("R")


def renamed_arguments(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: old names of arguments work, and warn at the line of the caller. Written old="new"."""

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        caller = _public_name(fn)

        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            __tracebackhide__ = True  # IPython and pytest leave this frame out of a traceback
            for old in names.keys() & kwargs.keys():
                if (new := names[old]) in kwargs:
                    raise TypeError(f"{caller}: {old}= is now called {new}=; give only {new}=")
                warn(f"{caller}: {old}= is now called {new}=", DeprecationWarning)
                kwargs[new] = kwargs.pop(old)
            return fn(*args, **kwargs)

        return call

    return decorate


def no_such_arguments(
    hints: Mapping[str, str], *, too_many: str | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: `TypeError` for arguments of other libraries, with what to write here, by their names.

    One table serves several functions: a name that a function has is no mistake there. `too_many` is what to write in
    place of more arguments without a name than there are.
    """

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(fn).parameters
        caller, wrong = _public_name(fn), hints.keys() - parameters.keys()
        most = sum(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters.values())

        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            __tracebackhide__ = True  # IPython and pytest leave this frame out of a traceback
            for name in wrong & kwargs.keys():
                raise TypeError(f"{caller}: there is no argument {name!r}; {hints[name]}")
            if too_many is not None and len(args) > most:
                raise TypeError(f"{caller}: expected {most} arguments without a name, got {len(args)}; {too_many}")
            return fn(*args, **kwargs)

        return call

    return decorate


def _public_name(fn: Callable[..., object]) -> str:
    """The room and the name of a function, as a user writes them: `train.fit`."""
    return f"{fn.__module__.split('.')[1]}.{fn.__name__}"
