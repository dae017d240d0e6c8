"""The names of arrays that a function captured."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

from .libraries import held_arrays, is_keras
from .paths import Argument

_DEPTH = 4  # functions that hold functions
_Held = Iterator[tuple[str, Any]]


def captured_arrays(fn: Any) -> dict[int, tuple[Any, Argument]]:
    """The arrays in modules and trees that a function holds, by their ids. The arrays are kept alive."""
    found: dict[int, tuple[Any, Argument]] = {}
    for name, value in _held(fn, _DEPTH):
        with contextlib.suppress(TypeError, ValueError):  # a tree that JAX cannot sort holds no arrays of a network
            for array, argument in held_arrays(name, value):
                found.setdefault(id(array), (array, argument))
    return found


def keras_models(fn: Any) -> list[Any]:
    """The models of Keras that a function holds."""
    return [value for _, value in _held(fn, _DEPTH) if is_keras(value)]


def _held(fn: Any, depth: int) -> _Held:
    """What a function holds: in its closure, as a method, as a partial application, by the names of its module."""
    if depth == 0 or isinstance(fn, (ModuleType, type)):
        return
    for name, value in _parts(fn):
        wraps = callable(getattr(value, "__wrapped__", None))  # a jitted function, or a jitted module
        if wraps or isinstance(value, (FunctionType, MethodType, functools.partial)):
            yield from _held(value, depth - 1)
        elif not isinstance(value, (ModuleType, type)):
            yield name, value


def _parts(fn: Any) -> _Held:
    if isinstance(fn, functools.partial):
        yield "fn", fn.func
        yield from ((f"arg{number}", value) for number, value in enumerate(fn.args))
        yield from fn.keywords.items()
    elif isinstance(fn, MethodType):
        yield "model", fn.__self__
        yield "fn", fn.__func__
    elif isinstance(fn, FunctionType):
        yield from _names(fn)
    elif callable(wrapped := getattr(fn, "__wrapped__", None)):
        yield "model", wrapped
    else:
        yield "model", fn


def _names(fn: FunctionType) -> _Held:
    """The variables of enclosing functions and of the module that a function reads, and its defaults."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in fn.__code__.co_names:
        if name in fn.__globals__:
            yield name, fn.__globals__[name]
    defaults = fn.__defaults__ or ()
    yield from zip(fn.__code__.co_varnames[fn.__code__.co_argcount - len(defaults) :], defaults, strict=False)
    yield from (fn.__kwdefaults__ or {}).items()
    if callable(wrapped := getattr(fn, "__wrapped__", None)):
        yield "fn", wrapped
