"""`jaxpar verify`: compute a part of a certified run again."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .._core.text import number
from .arguments import fail, find_function, new_parser

_ABOUT = (
    "Compute a part of a run again, and compare it with its certificate. The run's files stay as they are. The exit "
    "status is 0 where all is the same, 1 where a step differs, 2 where the two cannot be compared."
)


def add_parser(commands: Any) -> None:
    """Add the command to those of the command line."""
    add = new_parser(commands, "verify", "compute a certified run again, and compare", _ABOUT, run).add_argument
    add("certificate", type=Path, help="the file that fit(certificate=...) wrote")
    add("function", help="MODULE:FUNCTION that returns the arguments of fit in a dict")
    start = "the first step to compare; what is before it is taken from a checkpoint"
    add("--from", type=number(int, 1), metavar="STEP", dest="first", help=f"{start} (default: 1)")
    add("--to", type=number(int, 1), metavar="STEP", dest="last", help="the last step (default: the last of the file)")
    add("--devices", type=number(int, 1), metavar="N", help="compute on so many emulated CPU devices (default: on all)")


def run(args: argparse.Namespace) -> int:
    """Compute and compare. Return the exit status, with one line printed."""
    try:
        from .. import parallel, train

        if args.devices is not None:
            parallel.use_cpu_devices(args.devices)
        found = train._verify(args.certificate, find_function(args.function)(), args.first, args.last)
    except Exception as error:  # whatever the user's function raises
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        return fail("verify", 2, f"{kind}{error}")
    start = "what the function returns" if found.start is None else found.start
    if found.differs is not None:
        return fail("verify", 1, f"step {found.differs} differs from {args.certificate}; started at {start}")
    count, at = len(found.steps), f"{found.steps[0]} to {found.steps[-1]}"
    print(f"{args.certificate}: {count} certified steps, {at}, are the same; started at {start}")
    return 0
