"""The command line: `jaxpar train`, `plot`, `verify`, `launch`. `python -m jaxpar` is the same."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import jaxpar

from ._core.parsers import HelpFormatter, parse
from ._launch import command


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command of the command line.

    Args:
        argv: the arguments. None takes those of this process.

    Returns:
        0 where it worked. 1 where it failed, with one line on standard error. Bad arguments end with status 2. `launch`
        and `verify` have statuses of their own.
    """
    args = _arguments(sys.argv[1:] if argv is None else list(argv))
    try:
        return args.run(args)
    except KeyboardInterrupt as interrupt:  # `fit` says at which step, and what was saved
        print(f"jaxpar: {interrupt or 'interrupted'}", file=sys.stderr)
        return 1
    except Exception as error:
        _wait_for_loss_report()
        print(f"jaxpar: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def _arguments(words: list[str]) -> argparse.Namespace:
    """The arguments, with those of a file of options before them."""
    parser = argparse.ArgumentParser(
        prog="jaxpar", description="Data-parallel training and network plots in JAX.", formatter_class=HelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"jaxpar {jaxpar.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    command.add_parser(commands)
    if words[:1] not in (["launch"], ["--version"]):  # they need no JAX
        _add_commands(commands, *words[:1])
    args = parse(parser, words)
    if getattr(args, "config", None) is None:
        return args
    from ._cli import config

    name, *rest = words
    return parse(parser, [name, *config.words(args.config, args.parser), *rest])


def _add_commands(commands: Any, asked: str = "") -> None:
    """Add the command that is asked for, whose imports take a while, or else all of them."""
    every = asked not in ("train", "plot", "verify")
    if every or asked == "train":
        from ._cli import train

        train.add_parser(commands)
    if every or asked == "plot":
        from ._cli import plot

        plot.add_parser(commands)
    if every or asked == "verify":
        from ._cli import verify

        verify.add_parser(commands)


def _wait_for_loss_report() -> None:
    """End with the report of a loss where another process is the cause of an error."""
    if "jaxpar.distributed" in sys.modules:
        from . import distributed

        distributed.wait_for_loss_report()


if __name__ == "__main__":
    sys.exit(main())
