"""Checks of calls: arguments that a function does not have, functions that take others. Words of messages.

No JAX here.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_MOST_SHOWN = 8  # options in a message
_NONE: Mapping[str, str] = {}


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
    text = repr(value)
    return text if len(text) < 40 else f"a {type(value).__name__}"


def shorten(items: Sequence[Any], most: int = 8) -> str:
    """The items as a list, cut after `most`."""
    shown = ", ".join(map(str, items[:most]))
    return f"[{shown}, ... {len(items)} in all]" if len(items) > most else f"[{shown}]"


def answers(
    where: str, hints: Mapping[str, str] = _NONE, many: str = "", first: Callable[[Any], None] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for functions whose calls with other arguments than they have are answered in words.

    Args:
        where: the name of the function, for messages.
        hints: what to do instead, by the name of an argument that it does not have.
        many: the end of the message where too many arguments come without a name.
        first: a check of the first argument.

    Example:
        >>> @answers("area", {"x": "call it width"})
        ... def area(width, *, height=1):
        ...     return width * height
        >>> area(2, heigth=3)
        Traceback (most recent call last):
        TypeError: area: there is no argument 'heigth'; did you mean height?
        >>> area()
        Traceback (most recent call last):
        TypeError: area: width is missing; write area(width)
    """

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        call = _Call(where, fn, hints, many)

        @functools.wraps(fn)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if not call.is_complete(len(args), kwargs):
                call.refuse(len(args), kwargs)
            if first is not None and args:
                first(args[0])
            return fn(*args, **kwargs)

        return checked

    return decorate


class _Call:
    """What a call of a function may have."""

    def __init__(self, where: str, fn: Callable[..., Any], hints: Mapping[str, str], many: str):
        parameters = inspect.signature(fn).parameters
        given = [name for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD]
        self.where, self.hints, self.many = where, hints, many
        self.first = [name for name in given if parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        self.rest = [name for name in given if name not in self.first]
        self.most = len(self.first)
        self.names = frozenset(given)
        self.takes_any = len(given) < len(parameters)
        self._needed = [name for name in given if parameters[name].default is inspect.Parameter.empty]
        self._needed_first = len([name for name in self._needed if name in self.first])

    def is_complete(self, count: int, kwargs: Mapping[str, Any]) -> bool:
        """Whether a call with so many arguments without a name, and these, has all that it needs and no others."""
        if count > self.most or not (self.takes_any or self.names.issuperset(kwargs)):
            return False
        if count >= self._needed_first and len(self._needed) == self._needed_first:
            return True
        return not self._missing(count, kwargs)

    def _missing(self, count: int, kwargs: Mapping[str, Any]) -> list[str]:
        return [name for name in self._needed if name not in kwargs and name not in self.first[:count]]

    def refuse(self, count: int, kwargs: Mapping[str, Any]) -> None:
        """Raise the `TypeError` for a call."""
        shown = ", ".join([*self.first, *(f"{name}=..." for name in self.rest[:_MOST_SHOWN])])
        if count > self.most:
            raise TypeError(
                f"{self.where}: got {count} arguments without a name, expected at most {self.most}; write "
                f"{self.where}({shown}){self.many}"
            )
        wrong = next((name for name in kwargs if name not in self.names), "")
        if not wrong or self.takes_any:
            missing = " and ".join(self._missing(count, kwargs))
            needed = ", ".join(name if name in self.first else f"{name}=..." for name in self._needed)
            raise TypeError(f"{self.where}: {missing} is missing; write {self.where}({needed})")
        known = [*self.first, *self.rest]
        hint = f"; {self.hints[wrong]}" if wrong in self.hints else did_you_mean(wrong, known)
        raise TypeError(f"{self.where}: there is no argument {wrong!r}{hint or '; known are ' + ', '.join(known)}")


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
