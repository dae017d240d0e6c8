"""The options of a command as a frozen dataclass, from which its parser is made: each field is one option.

The name of a field is that of its option, and its type says how the text is read:

    str, int, float, Path    one value
    Literal["a", "b"]        one of these words
    bool                     `--name` and `--no-name`
    tuple[int, ...]          the option may be given several times, in place of all of the default

What argparse needs beyond that stands beside the default and the help:

    keep: int = option(3, "how many of the latest checkpoints stay", metavar="N")

No JAX here.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from . import files
from .text import did_you_mean

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")


def option(default: Any, help: str, *flags: str, group: str | None = None, **keywords: Any) -> Any:
    """A field of a dataclass that is an option of a command.

    Args:
        default: the value where it is not given.
        help: what it does. The default is added, unless the text has a "(default: ...)".
        flags: how it is written, where that is not `--name`.
        group: the title of a group of the help, which begins with this option.
        keywords: of `add_argument`, in place of those that follow from the type of the field.
    """
    return dataclasses.field(default=default, metadata={"help": help, "flags": flags, "group": group, **keywords})


def positional(help: str, default: Any = dataclasses.MISSING, **keywords: Any) -> Any:
    """A field of a dataclass that is an argument without dashes. One with a default needs `nargs="?"`."""
    return dataclasses.field(default=default, metadata={"help": help, **keywords})


def add_options(parser: argparse.ArgumentParser, options: type[DataclassInstance]) -> None:
    """Add an argument to the parser for each field of the dataclass."""
    hints = typing.get_type_hints(options)
    group: argparse._ActionsContainer = parser
    for field in dataclasses.fields(options):
        keywords = _keywords(hints[field.name]) | field.metadata
        if "flags" not in keywords:
            group.add_argument(field.name, **keywords)
            continue
        flags, title = keywords.pop("flags"), keywords.pop("group")
        if title is not None:
            group = parser.add_argument_group(title)
        default: Any = field.default
        if isinstance(default, tuple):
            # argparse would append what is given to the default. So it has none, and `read` fills it in.
            shown = f" (default: {' '.join(map(str, default)) or 'none'})"
            keywords["help"] += "" if "(default: " in keywords["help"] else shown
            default = None
        flags = flags or (f"--{field.name.replace('_', '-')}",)
        group.add_argument(*flags, dest=field.name, default=default, **keywords)


def read(args: argparse.Namespace, options: type[Options]) -> Options:
    """The options among the arguments that a parser read. One that is None has the default of its field."""
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(options)}
    not_none = {name: value for name, value in values.items() if value is not None}
    return options(**{name: tuple(value) if isinstance(value, list) else value for name, value in not_none.items()})


def number(kind: type[int] | type[float], least: float = 0, above: bool = False) -> Callable[[str], float]:
    """A parser of a finite number of at least `least`, or above it."""
    size = f"above {least}" if above else f"of {least} or more"
    expected = f"{'an int' if kind is int else 'a number'} {size}"
    most = 2**63 if kind is int else math.inf

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (value > least or (value == least and not above)) or value >= most:
            raise argparse.ArgumentTypeError(f"must be {expected}, got {text!r}")
        return value

    return parse


def path(text: str) -> Path:
    """The path of an option. One on another system is refused."""
    try:
        return Path(files.as_local(text, "it"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _keywords(hint: Any) -> dict[str, Any]:
    """What `add_argument` is told of a field of this type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):  # with None, where the option has no default
        return _keywords(next(arg for arg in args if arg is not types.NoneType))
    if origin is Literal:
        return {"choices": args}
    if origin is tuple:
        return {**_keywords(args[0]), "action": "append"}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {} if hint is str else {"type": path if hint is Path else hint}


class HelpFormatter(argparse.HelpFormatter):
    """Writes the default of an option after its help, unless the help has it or there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = (action.help or "").removesuffix(" (default: %(default)s)")  # as some versions of argparse write it
        shown = action.default is not None and action.default is not argparse.SUPPRESS and action.option_strings
        if not shown or "(default" in text:
            return text
        default = "%(default)s"
        if isinstance(action.default, bool):
            default = "yes" if action.default else "no"
        return f"{text} (default: {default})"


def parse(parser: argparse.ArgumentParser, command_line: Sequence[str]) -> argparse.Namespace:
    """The arguments. An option that a command does not have ends with status 2 and the nearest that it has."""
    arguments, unknown = parser.parse_known_args(command_line)
    if unknown:
        wrong = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
        # The parser of the command, which a parser of several commands leaves in the arguments.
        command: argparse.ArgumentParser = getattr(arguments, "parser", parser)
        hint = did_you_mean(wrong, command._option_string_actions)
        command.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return arguments
