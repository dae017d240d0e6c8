"""Answers to the arguments that code written for MXNet gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from .._core import calls
from ..mxnet import _STORE_ARGUMENTS

P = ParamSpec("P")
R = TypeVar("R")

_RETURN_VALUES = ("pull", "pushpull", "broadcast", "row_sparse_pull")


def answers(fn: Callable[P, R]) -> Callable[P, R]:
    """A function of `jp.kv` that says what to write where it is called with wrong arguments."""
    many = "; the values are returned, there is no out=" if fn.__name__ in _RETURN_VALUES else ""
    return calls.answers(f"kv.{fn.__name__}", _STORE_ARGUMENTS, many)(fn)
