"""The command line: `python -m jaxpar train`, `python -m jaxpar plot`, `python -m jaxpar launch`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from ._launch import command


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command of the command line.

    Args:
        argv: the arguments. None takes those of this process.

    Returns:
        0 where it worked. 1 where it failed, with one line on standard error. Bad arguments end with status 2. `launch`
        has statuses of its own.
    """
    parser = argparse.ArgumentParser(prog="jaxpar", description="Data-parallel training and network plots in JAX.")
    commands = parser.add_subparsers(required=True, metavar="command")
    command.add_parser(commands)
    if (sys.argv[1:] if argv is None else list(argv))[:1] != ["launch"]:  # it needs no JAX
        _add_commands(commands)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except KeyboardInterrupt as interrupt:  # `fit` says at which step, and what was saved
        print(f"jaxpar: {interrupt or 'interrupted'}", file=sys.stderr)
        return 1
    except Exception as error:
        _wait_for_loss_report()
        print(f"jaxpar: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def _add_commands(commands: Any) -> None:
    from ._cli import plot, train

    train.add_parser(commands)
    parser = commands.add_parser("plot", help="draw a function", description=plot.__doc__)
    plot.add_arguments(parser)
    parser.set_defaults(run=plot.run)


def _wait_for_loss_report() -> None:
    """End with the report of a loss where another process is the cause of an error."""
    if "jaxpar.distributed" in sys.modules:
        from . import distributed

        distributed.wait_for_loss_report()


if __name__ == "__main__":
    sys.exit(main())
