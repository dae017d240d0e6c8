"""Options of the command line in a TOML file."""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from typing import Any

from .._core.arguments import did_you_mean


def words(path: Path, parser: argparse.ArgumentParser) -> list[str]:
    """The options of a file as words of the command line.

    A key is the name of an option without the two dashes, with `-` or `_` in it. A switch is true or false. What the
    file says wrongly ends with status 2.
    """
    try:
        with path.open("rb") as file:
            options = tomllib.load(file)
    except OSError as error:
        parser.error(f"--config {path} cannot be read: {error.strerror}")
    except (ValueError, RecursionError) as error:  # of an int of 5,000 digits too
        parser.error(f"--config {path} is no TOML: {error}")
    return [_word(path, parser, name, value) for name, value in options.items()]


def _word(path: Path, parser: argparse.ArgumentParser, name: str, value: Any) -> str:
    known = {n[2:]: a for n, a in parser._option_string_actions.items() if n.startswith("--") and a.dest != "help"}
    option = name.replace("_", "-")
    if option not in known or option == "config":
        shown = [n for n in known if n != "config" and not n.startswith("no-")]
        parser.error(f"{path}: unknown option {name!r}{did_you_mean(option, shown)}")
    action = known[option]
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            parser.error(f"{path}: {name} must be true or false, got {value!r}")
        yes, no = action.option_strings
        return yes if value == (f"--{option}" == yes) else no  # `no-remat = true` is `remat = false`
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        parser.error(f"{path}: {name} must be a string or a number, got {value!r}")
    if isinstance(value, int) and value.bit_length() > 64:  # hexadecimal digits may be many
        parser.error(f"{path}: {name} must be a number of 64 bits")
    try:
        parser._check_value(action, parser._get_value(action, str(value)))  # here the file can be named
    except argparse.ArgumentError as error:
        parser.error(f"{path}: {error}")
    return f"--{option}={value}"
