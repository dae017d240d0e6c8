"""`jaxpar plot`: draw a function named on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from .. import models, viz
from .._core.text import number
from .arguments import ArgumentError, check_takes, fail, find_function, make_params, new_parser, one_line, parse_shape

_ABOUT = "Draw a function as the network it computes. Nothing is run."
_FORMATS = (
    "its ending is the format: .html for the interactive page, .svg, .png, .pdf, .gif or another of Graphviz's, .dot "
    "for the text"
)
_MODELS: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[str]]] = {
    # apply, init, and the shapes of what the network takes after its parameters
    "lenet": (models.lenet.apply, models.lenet.init, ["256x28x28x1:f32"]),
    "matrix_factorization": (
        models.matrix_factorization.apply,
        lambda rng: models.matrix_factorization.init(rng, 943, 1682, 64),
        ["64:i32", "64:i32"],
    ),
}


@dataclass(frozen=True)
class Request:
    """What to draw."""

    fn: Callable[..., Any]
    args: list[Any]
    params_argnums: int | None  # which of the arguments holds the parameters
    name: str  # of the function, for the title and the file


def add_parser(commands: Any) -> None:
    """Add the command to those of the command line."""
    add = new_parser(commands, "plot", "draw a function", _ABOUT, run).add_argument
    add("function", help="MODULE:FUNCTION, or lenet or matrix_factorization")
    each = (
        "an argument, once for each in order: 256x28x28x1:f32, or a pytree in JSON such as "
        '{"w": "4x3", "b": "3"} (default: those of the two models)'
    )
    weights = (
        "MODULE:FUNCTION that makes the parameters, which are the first argument then; it takes nothing, a random key, "
        "or a key and the shapes. Or which --shape holds them, from 0 (default: none)"
    )
    add("--shape", "--input", action="append", default=[], metavar="SHAPE:DTYPE", dest="shape", help=each)
    add("--params", metavar="INIT", help=weights)
    add("-o", "--output", metavar="FILE", help=f"what to write; {_FORMATS} (default: NAME.svg)")
    add("--title", help="the text below the picture (default: the name of the function)")
    add("--depth", type=number(int), metavar="N", help="how deep to unfold modules, 0 closes them all (default: all)")
    add("--theme", choices=("light", "dark"), default="light", help="colours for a page of this kind")
    add("--heat", choices=("flops", "bytes"), help="colour layers by their cost (default: by their kind)")
    add("--show-weights", action="store_true", help="draw the parameters too")
    add("--summary", action="store_true", help="print the table of layers too")


def run(args: argparse.Namespace) -> int:
    """Write the picture. Return 0, or 2 for bad arguments, or 1 where tracing or drawing fails."""
    try:
        request = _request(args)
        path = viz.Plot.check_path(args.output or f"{request.name}.svg")
    except (ArgumentError, viz.RenderError, ValueError) as error:
        return fail("plot", 2, error)
    except OSError as error:
        return fail("plot", 1, error)
    try:
        plot = viz.plot_network(
            request.fn,
            *request.args,
            title=request.name if args.title is None else args.title,
            depth=args.depth,
            theme=args.theme,
            heat=args.heat,
            hide_weights=not args.show_weights,
            params_argnums=request.params_argnums,
        )
        if args.summary:
            viz.print_summary(request.fn, *request.args, params_argnums=request.params_argnums, depth=args.depth)
    except Exception as error:
        return fail("plot", 1, f"{args.function} cannot be traced: {type(error).__name__}: {one_line(error)}")
    try:
        plot.save(path)
    except (viz.RenderError, OSError) as error:
        return fail("plot", 1, error)
    print(f"{path}: {plot.network}")
    return 0


def _request(args: argparse.Namespace) -> Request:
    """The function and its arguments. Raises `ArgumentError`."""
    shapes = [parse_shape(text) for text in args.shape]
    if args.function in _MODELS:
        fn, init, usual = _MODELS[args.function]
        arrays = [jax.eval_shape(init, jax.random.key(0)), *(shapes or map(parse_shape, usual))]
        check_takes(args.function, fn, arrays)
        return Request(fn, arrays, 0, args.function)
    fn, argnums = find_function(args.function, f", {' or '.join(_MODELS)}"), None
    if args.params is not None and ":" in args.params:
        shapes, argnums = [make_params(args.params, shapes), *shapes], 0
    elif args.params is not None:
        argnums = _argnum(args.params, len(shapes))
    check_takes(args.function, fn, shapes)
    return Request(fn, shapes, argnums, args.function.partition(":")[2])


def _argnum(text: str, count: int) -> int:
    """The position of the parameters."""
    if not text.isdecimal():
        raise ArgumentError(f"--params {text!r}: expected MODULE:FUNCTION, or the number of a --shape, from 0")
    if int(text) >= count:
        raise ArgumentError(f"--params {text}: --shape is given {count} times, counted from 0")
    return int(text)
