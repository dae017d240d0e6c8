"""Arguments under their old names, for one release."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def renamed(where: str, **names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for functions whose arguments have new names. A call with an old one warns and says the new one.

    Example:
        >>> @renamed("area", breadth="width")
        ... def area(width, height):
        ...     return width * height
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     print(area(breadth=2, height=3), caught[0].message)
        6 area: breadth= is now called width=
    """

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            given: dict[str, Any] = kwargs  # pyright: ignore[reportAssignmentType]
            for old in names.keys() & given.keys():
                new = names[old]
                if new in given:
                    raise TypeError(f"{where}: {old}= is now called {new}=; give only {new}=")
                warnings.warn(f"{where}: {old}= is now called {new}=", DeprecationWarning, stacklevel=2)
                given[new] = given.pop(old)
            return fn(*args, **kwargs)

        return call

    return decorate
