"""Words of messages, and checks of functions that are given.

No JAX here.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def is_int(value: Any) -> bool:
    """Whether this is an int of Python or of NumPy. A bool is none.

    Example:
        >>> is_int(3), is_int(True), is_int(3.0)
        (True, False, False)
    """
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def did_you_mean(word: Any, known: Iterable[str]) -> str:
    """The end of a message: the nearest known word, or nothing.

    Example:
        >>> did_you_mean("--epocks", ["--epochs", "--seed"])
        '; did you mean --epochs?'
    """
    near = difflib.get_close_matches(str(word), list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def describe(value: Any) -> str:
    """What came, in a few words: `float32[2,3]`, `a list of 3`, `None`."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    try:
        text = repr(value)
    except Exception:  # as of an int of 5,000 digits
        text = ""
    return text if 0 < len(text) < 40 else f"a {type(value).__name__}"


def shorten(items: Sequence[Any], most: int = 8) -> str:
    """The items as a list, cut after `most`."""
    shown = ", ".join(map(str, items[:most]))
    return f"[{shown}, ... {len(items)} in all]" if len(items) > most else f"[{shown}]"


def takes(fn: Callable[..., Any], count: int) -> bool:
    """Whether a call with so many positional arguments fits the function. True where Python does not know.

    Example:
        >>> takes(lambda a, b: None, 2), takes(lambda a, b: None, 3), takes(lambda *rest: None, 3)
        (True, False, True)
    """
    return _bind(fn, [str(i) for i in range(count)]) is not None


def check_takes(fn: Any, names: Sequence[str], what: str, hint: str = "", also: Sequence[str] = ()) -> None:
    """`TypeError` unless this is a function that can be called with arguments of these names, in their order.

    A function that Python cannot inspect is taken.

    Args:
        what: whose argument it is and which, such as "fit: eval_fn".
        hint: further words, with what separates them from the message.
        also: names of arguments that follow by keyword where the function has them.

    Example:
        >>> check_takes(lambda b, a: a, ("a", "b"), "it")
        Traceback (most recent call last):
        TypeError: it must be a function of (a, b), and <lambda>(b, a) names them in another order; reorder them
    """
    words = f"{what} must be a function of ({', '.join(names)})"
    if not callable(fn):
        raise TypeError(f"{words}, got {type(fn).__name__}{hint}")
    also = [name for name in also if has_parameter(fn, name)]
    bound = _bind(fn, names, also)
    if bound is None:
        after = f", and then {', '.join(also)}" if also else ""
        raise TypeError(f"{words}{after}, got {_shown(fn)}{hint}")
    if any(isinstance(name, str) and own != name and own in names for own, name in bound.items()):
        raise TypeError(f"{words}, and {_shown(fn)} names them in another order; reorder them")


def has_parameter(fn: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of this name that a keyword can give, and that `partial` has not given.

    Example:
        >>> has_parameter(lambda a, step: a, "step"), has_parameter(lambda a, **rest: a, "step")
        (True, False)
    """
    try:
        own, inner = (inspect.signature(fn, follow_wrapped=wrapped) for wrapped in (False, True))
    except (TypeError, ValueError):  # a builtin
        return False
    given = fn.keywords if isinstance(fn, functools.partial) else ()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in own.parameters.values())
    return name in inner.parameters and name not in given and (takes_any or name in own.parameters)


def _bind(fn: Callable[..., Any], values: Sequence[str], by_keyword: Sequence[str] = ()) -> Mapping[str, Any] | None:
    """The values by the names of the arguments that get them. None: the function does not take so many."""
    try:
        signature = inspect.signature(fn, follow_wrapped=False)  # a wrapper may take other arguments
    except (TypeError, ValueError):  # a builtin
        return {}
    try:
        return signature.bind(*values, **dict.fromkeys(by_keyword)).arguments
    except TypeError:
        return None


def _shown(fn: Any) -> str:
    return f"{getattr(fn, '__name__', type(fn).__name__)}{inspect.signature(fn, follow_wrapped=False)}"
