"""Parsers of numbers on the command line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any


def number(kind: type, least: float = 0, above: bool = False) -> Callable[[str], Any]:
    """A parser of a finite number of at least `least`, or above it.

    Example:
        >>> number(int, 1)("3"), number(float, 0, above=True)("0.5")
        (3, 0.5)
    """
    size = f"above {least}" if above else f"of {least} or more"
    expected = f"{'an int' if kind is int else 'a number'} {size}"

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (value > least or (value == least and not above)) or math.isinf(value):
            raise argparse.ArgumentTypeError(f"must be {expected}, got {text!r}")
        return value

    return parse
