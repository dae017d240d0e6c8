"""The command line: `python -m jaxpar train`, `python -m jaxpar plot`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import _cli_train
from .viz import _cli as _cli_plot


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; 0 where it worked, 1 where it failed, with one line on standard error; 2: bad arguments."""
    parser = argparse.ArgumentParser(prog="jaxpar", description="Data-parallel training and network plots in JAX.")
    commands = parser.add_subparsers(required=True, metavar="command")
    _cli_train.add_parser(commands)
    plot = commands.add_parser("plot", help="draw a function", description=_cli_plot.__doc__)
    _cli_plot.add_arguments(plot)
    plot.set_defaults(run=_cli_plot.run)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("jaxpar: interrupted", file=sys.stderr)
        return 1
    except Exception as error:
        print(f"jaxpar: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
