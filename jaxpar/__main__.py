"""The command line: `jaxpar train`, `plot`, `plan`, `port`, `verify`, `launch`. `python -m jaxpar` is the same."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import jaxpar

from . import _launch
from ._core.options import HelpFormatter, parse

_MODULES = {  # of `_cli`, by the command that they add. `launch` needs no JAX.
    **dict.fromkeys(("launch", "--version"), ()),
    "train": ("train",),
    **dict.fromkeys(("plot", "plan", "port", "verify"), ("commands",)),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command of the command line. Return 0 where it worked, and 1 where it failed, with one line on standard
    error.

    Bad arguments end with status 2. `launch` and `verify` have statuses of their own.
    """
    args = _arguments(sys.argv[1:] if argv is None else list(argv))
    try:
        return args.run(args)
    except KeyboardInterrupt as interrupt:  # `fit` says at which step, and what was saved
        print(f"jaxpar: {interrupt or 'interrupted'}", file=sys.stderr)
        return 1
    except Exception as error:
        if "jaxpar.distributed" in sys.modules:
            # Where another process is the cause of this error, the process ends here with the report of its loss.
            jaxpar.distributed.wait_for_loss_report()
        print(f"jaxpar: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def _arguments(words: list[str]) -> argparse.Namespace:
    """The arguments, with those of a file of options before them."""
    parser = argparse.ArgumentParser(
        prog="jaxpar", description="Data-parallel training and network plots in JAX.", formatter_class=HelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"jaxpar {jaxpar.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    _launch.add_parser(commands)
    for module in _MODULES.get(" ".join(words[:1]), ("train", "commands")):  # their imports take a while
        importlib.import_module(f"jaxpar._cli.{module}").add_parsers(commands)
    args = parse(parser, words)
    if getattr(args, "config", None) is None:
        return args
    from ._cli import train

    name, *rest = words
    return parse(parser, [name, *train.words_of_file(args.config, args.parser), *rest])


if __name__ == "__main__":
    sys.exit(main())
