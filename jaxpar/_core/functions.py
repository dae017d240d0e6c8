"""Functions that a user gives: whether they take what they will be given.

Checked before any work, since an epoch may be over before a callback is called, and since a function whose arguments
have another order, as MXNet's updaters, computes wrong numbers without an error.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence

from .text import describe


def takes(fn: Callable[..., object], count: int) -> bool:
    """Whether a call with so many positional arguments fits the function. True where Python does not know."""
    return _bind(fn, [str(i) for i in range(count)]) is not None


def check_takes(fn: object, names: Sequence[str], what: str, hint: str = "", also: Sequence[str] = ()) -> None:
    """`TypeError` unless a call by position with arguments of these names fits the function, as Python knows it.

    `what` and `hint` begin and end the message. `also`: arguments that follow by keyword where the function has them.
    """
    expected = f"{what} must be a function of ({', '.join(names)})"
    also = [name for name in also if callable(fn) and has_parameter(fn, name)]
    bound = _bind(fn, names, also) if callable(fn) else None
    if bound is None:
        after = f", and then {', '.join(also)}" if also else ""
        raise TypeError(f"{expected}{after}, got {_shown(fn)}{hint}")
    # `bound` has for each parameter the name of what it would get.
    if any(name in names and parameter in names and parameter != name for parameter, name in bound.items()):
        raise TypeError(f"{expected}, and {_shown(fn)} names them in another order; reorder them")


def has_parameter(fn: Callable[..., object], name: str) -> bool:
    """Whether a function has a parameter of this name that a keyword can give, and that `partial` has not given."""
    try:
        outer, inner = inspect.signature(fn, follow_wrapped=False), inspect.signature(fn)
    except (TypeError, ValueError):  # a builtin
        return False
    preset = fn.keywords if isinstance(fn, functools.partial) else ()
    # A wrapper with **kwargs passes the keyword on to the function inside.
    takes_any = inspect.Parameter.VAR_KEYWORD in [p.kind for p in outer.parameters.values()]
    return name in inner.parameters and name not in preset and (takes_any or name in outer.parameters)


def _bind(
    fn: Callable[..., object], values: Sequence[str], by_keyword: Sequence[str] = ()
) -> Mapping[str, object] | None:
    """The values by the names of the arguments that get them. None: the function does not take so many."""
    try:
        signature = inspect.signature(fn, follow_wrapped=False)  # a wrapper may take other arguments
    except (TypeError, ValueError):  # a builtin
        return {}
    try:
        return signature.bind(*values, **dict.fromkeys(by_keyword)).arguments
    except TypeError:
        return None


def _shown(fn: object) -> str:
    if not callable(fn):
        return describe(fn)
    return f"{getattr(fn, '__name__', type(fn).__name__)}{inspect.signature(fn, follow_wrapped=False)}"
