"""`jaxpar plan`: what a training step would be on accelerators that are not there."""

from __future__ import annotations

import argparse
import ast
import json
from typing import Any

from .arguments import ArgumentError, fail, find_function, new_parser

_ABOUT = (
    "Compile a training step for TPUs or GPUs that are not there: does it fit, what does each device send. The "
    "compiler is in this Python or in the one that JAXPAR_PLAN_PYTHON names. `make plan-env` sets one up."
)


def add_parser(commands: Any) -> None:
    """Add the command to those of the command line."""
    parser = new_parser(commands, "plan", "know before you rent: memory and traffic on TPUs and GPUs", _ABOUT, run)
    add = parser.add_argument
    add("function", help="MODULE:FUNCTION, make(devices, **choices) -> (step, state, batch)")
    names = "v5e:2x4, v5p:4x4x4, h100:8, h100:4x8; again for more"
    add("--on", action="append", required=True, metavar="DEVICES", help=names)
    choose = "a keyword of the function, with one value or several to compare; again for more"
    add("--choose", action="append", default=[], metavar="NAME=VALUE[,VALUE]", help=choose)
    add("--json", action="store_true", help="print JSON")
    add("-o", "--output", metavar="FILE", help="draw the step there, .svg or .html, from the program of the devices")


def run(args: argparse.Namespace) -> int:
    """Print the plan, or the table of several. Return 0, or 2 for bad arguments, or 1 where there is no compiler."""
    from .. import train

    try:
        choices = dict(map(_choice, args.choose))
        make = find_function(args.function)
        if len(args.on) == 1 and all(len(values) == 1 for values in choices.values()):
            found: Any = train.plan(make, args.on[0], **{name: values[0] for name, values in choices.items()})
        elif args.output:
            raise ArgumentError("-o draws one plan; give one --on and one value of each --choose")
        else:
            found = train.compare_plans(make, args.on, **choices)
        print(json.dumps(found.to_dict(), indent=2) if args.json else found)
        if args.output:
            found.plot().save(args.output)
    except (ArgumentError, ValueError, TypeError) as error:
        return fail("plan", 2, error)
    except RuntimeError as error:
        return fail("plan", 1, error)
    return 0


def _choice(text: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    if not name.isidentifier() or not equals:
        raise ArgumentError(f"--choose {text!r}: expected NAME=VALUE or NAME=VALUE,VALUE")
    return name, [_value(value) for value in values.split(",")]


def _value(text: str) -> Any:
    """A Python literal, or else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
