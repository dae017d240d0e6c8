"""Parsers of the values on the command line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any


def number(kind: type, least: float = 0, above: bool = False) -> Callable[[str], Any]:
    """A parser of a finite number of at least `least`, or above it.

    Example:
        >>> number(int, 1)("3"), number(float, 0, above=True)("0.5")
        (3, 0.5)
    """
    expected = f"{'an int' if kind is int else 'a number'} {'above' if above else 'of at least'} {least}"

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (value > least or (value == least and not above)) or math.isinf(value):
            raise argparse.ArgumentTypeError(f"must be {expected}, got {text!r}")
        return value

    return parse


def metrics_path(text: str) -> Path:
    """A path for JSON lines.

    Raises:
        argparse.ArgumentTypeError: its ending is that of a table.
    """
    if Path(text).suffix.lower() in (".csv", ".tsv"):
        raise argparse.ArgumentTypeError(
            f"{text} gets JSON lines; name it .jsonl, and make a table of it by pandas.read_json({text!r}, lines=True) "
            "or, of the history that train.fit returns, by train.to_pandas(history).to_csv()"
        )
    return Path(text)
