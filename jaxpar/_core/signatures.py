"""Whether a user's function takes the arguments that it will get, known before it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any


def takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a call with so many positional arguments fits the function. True where Python does not know.

    Example:
        >>> takes(lambda a, b: None, 2), takes(lambda a, b: None, 3), takes(lambda *rest: None, 3)
        (True, False, True)
    """
    try:
        signature = inspect.signature(function, follow_wrapped=False)  # a wrapper may take other arguments
    except (TypeError, ValueError):  # a builtin
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def check_takes(function: Any, names: Sequence[str], where: str, hint: str = "") -> None:
    """`TypeError` unless this is a function that can be called with one argument for each name.

    Args:
        names: of the arguments, for the message.
        where: the function's name and whose argument it is, such as "fit: eval_fn".
        hint: further words, with what separates them from the message.
    """
    words = f"{where} must be a function of ({', '.join(names)})"
    if not callable(function):
        raise TypeError(f"{words}, got {type(function).__name__}{hint}")
    if not takes(function, len(names)):
        raise TypeError(f"{words}, got {_name(function)}{inspect.signature(function)}{hint}")


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
