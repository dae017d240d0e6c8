"""The command line: `python -m jaxpar train`, `python -m jaxpar plot`, `python -m jaxpar launch`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from ._launch import command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; 0 where it worked, 1 where it failed, with one line on standard error; 2: bad arguments."""
    parser = argparse.ArgumentParser(prog="jaxpar", description="Data-parallel training and network plots in JAX.")
    commands = parser.add_subparsers(required=True, metavar="command")
    command.add_parser(commands)
    if (sys.argv[1:] if argv is None else list(argv))[:1] != ["launch"]:  # which has no need of JAX
        _add_commands(commands)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except KeyboardInterrupt as interrupt:  # of `fit` it says at which step, and what was saved
        print(f"jaxpar: {interrupt or 'interrupted'}", file=sys.stderr)
        return 1
    except Exception as error:
        _hear_of_losses()
        print(f"jaxpar: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def _add_commands(commands: Any) -> None:
    from ._cli import plot as _cli_plot, plot as _plot, train

    train.add_parser(commands)
    plot = commands.add_parser("plot", help="draw a function", description=_plot.__doc__)
    _cli_plot.add_arguments(plot)
    plot.set_defaults(run=_plot.run)


def _hear_of_losses() -> None:
    """One of several processes that fails because another was lost says so, and nothing else."""
    if "jaxpar.distributed" in sys.modules:
        from .distributed import _initialize

        _initialize.hear_of_losses()


if __name__ == "__main__":
    sys.exit(main())
