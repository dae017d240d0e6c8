"""The command line's parsers: numbers, help that names defaults, and refusals that name the nearest option."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

from .text import did_you_mean


def number(kind: type, least: float = 0, above: bool = False) -> Callable[[str], Any]:
    """A parser of a finite number of at least `least`, or above it.

    Example:
        >>> number(int, 1)("3"), number(float, 0, above=True)("0.5")
        (3, 0.5)
    """
    size = f"above {least}" if above else f"of {least} or more"
    expected = f"{'an int' if kind is int else 'a number'} {size}"
    most = 2**63 if kind is int else math.inf

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (value > least or (value == least and not above)) or value >= most:
            raise argparse.ArgumentTypeError(f"must be {expected}, got {text!r}")
        return value

    return parse


class HelpFormatter(argparse.HelpFormatter):
    """Writes the default of an option after its help, unless the help has it or there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        shown = action.default is not None and action.default is not argparse.SUPPRESS and action.option_strings
        if not shown or "(default" in text:
            return text
        default = "%(default)s"
        if isinstance(action.default, bool):
            default = "yes" if action.default else "no"
        return f"{text} (default: {default})"


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """The arguments. An option that a command does not have ends with status 2 and the nearest that it has."""
    found, rest = parser.parse_known_args(words)
    if rest:
        wrong = next((word for word in rest if word.startswith("-")), rest[0]).partition("=")[0]
        asked: argparse.ArgumentParser = getattr(found, "parser", parser)
        asked.error(f"unrecognized arguments: {' '.join(rest)}{did_you_mean(wrong, asked._option_string_actions)}")
    return found
