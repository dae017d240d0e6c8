"""`jaxpar plot`: draw a function named on the command line."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .. import models, viz
from .._core.parsers import HelpFormatter, number

_DTYPES: dict[str, str] = dict(
    zip(
        "f16 bf16 f32 f64 i8 i16 i32 i64 u8 u32 bool".split(),
        "float16 bfloat16 float32 float64 int8 int16 int32 int64 uint8 uint32 bool".split(),
        strict=True,
    )
)
_INPUT = re.compile(r"(?P<shape>(\d+(x\d+)*)?)(:(?P<dtype>\w+))?")


class ArgumentError(ValueError):
    """An argument does not name a function or an input."""


def add_parser(commands: Any) -> None:
    """Add the command to those of the command line."""
    parser = commands.add_parser("plot", help="draw a function", description=_ABOUT, formatter_class=HelpFormatter)
    add_arguments(parser)
    parser.set_defaults(run=run, parser=parser)


_ABOUT = "Draw a function as the network it computes. Nothing is run."
_FORMATS = "its ending is the format: .svg, .png, .pdf, .gif or another of Graphviz's, .dot for the text"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `plot`."""
    add = parser.add_argument
    add("function", help="MODULE:FUNCTION, or lenet or matrix_factorization")
    each = "one array argument, e.g. 256x28x28x1:f32, once for each in order (default: those of the two models)"
    add("--input", action="append", default=[], metavar="SHAPE:DTYPE", help=each)
    add("-o", "--output", metavar="FILE", help=f"what to write; {_FORMATS} (default: NAME.svg)")
    add("--title", help="the text below the picture (default: the name of the function)")
    add("--depth", type=number(int), metavar="N", help="how deep to unfold modules, 0 closes them all (default: all)")
    add("--theme", choices=("light", "dark"), default="light", help="colours for a page of this kind")
    add("--heat", choices=("flops", "bytes"), help="colour layers by their cost (default: by their kind)")
    add("--show-weights", action="store_true", help="draw the parameters too")
    add("--params", type=number(int), metavar="N", help="which --input is a parameter, from 0 (default: none)")
    add("--summary", action="store_true", help="print the table of layers too")


def run(args: argparse.Namespace) -> int:
    """Write the picture.

    Returns:
        0, or 2 for bad arguments, or 1 where tracing or drawing fails. An error is one line on standard error.
    """
    try:
        fn, arrays, params, title = _resolve(args)
    except ArgumentError as error:
        print(f"jaxpar plot: {error}", file=sys.stderr)
        return 2
    output = args.output or f"{title}.svg"
    try:
        options: dict[str, Any] = {
            "title": args.title or title,
            "depth": args.depth,
            "theme": args.theme,
            "heat": args.heat,
        }
        options |= {"hide_weights": not args.show_weights, "params_argnums": params}
        plot = viz.plot_network(fn, *arrays, **options)
        path = plot.save(output)
    except (viz.RenderError, OSError) as error:
        print(f"jaxpar plot: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        print(f"jaxpar plot: {args.function} cannot be traced: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if args.summary:
        viz.print_summary(fn, *arrays, params_argnums=params)
    print(f"{path}: {plot.network}")
    return 0


def _resolve(args: argparse.Namespace) -> tuple[Callable[..., Any], list[Any], int | None, str]:
    inputs = [parse_input(text) for text in args.input]
    if args.function in ("lenet", "matrix_factorization"):
        fn, arrays = _model(args.function, inputs)
        return fn, arrays, 0, args.function
    module_name, colon, name = args.function.partition(":")
    if not colon or not module_name or not name:
        raise ArgumentError(f"expected MODULE:FUNCTION, lenet or matrix_factorization, got {args.function!r}")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ArgumentError(f"cannot import {module_name}: {error}") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise ArgumentError(f"module {module_name} has no {name}")
        found = getattr(found, part)
    if not callable(found):
        raise ArgumentError(f"{args.function} is a {type(found).__name__}; expected a function")
    if args.params is not None and not 0 <= args.params < len(inputs):
        raise ArgumentError(f"--params {args.params}: there are {len(inputs)} inputs, counted from 0")
    return found, inputs, args.params, name


def _model(name: str, inputs: list[Any]) -> tuple[Callable[..., Any], list[Any]]:
    """A model of jaxpar and its arguments."""
    rng = jax.random.key(0)
    if name == "lenet":
        params = jax.eval_shape(models.lenet.init, rng)
        return models.lenet.apply, [params, *(inputs or [parse_input("256x28x28x1:f32")])]
    params = jax.eval_shape(lambda rng: models.matrix_factorization.init(rng, 943, 1682, 64), rng)
    return models.matrix_factorization.apply, [params, *(inputs or [parse_input("64:i32"), parse_input("64:i32")])]


def parse_input(text: str) -> jax.ShapeDtypeStruct:
    """The shape and dtype of "256x28x28x1:f32". Without a dtype float32, without a shape a scalar.

    >>> parse_input("2x3:bf16")
    ShapeDtypeStruct(shape=(2, 3), dtype=bfloat16)

    Raises:
        ArgumentError: it is none, or its dtype is unknown.
    """
    match = _INPUT.fullmatch(text)
    if match is None:
        raise ArgumentError(f"--input {text!r}: expected SHAPE:DTYPE such as 256x28x28x1:f32")
    given = match["dtype"] or "f32"
    try:
        dtype = jnp.dtype(_DTYPES.get(given, given))
    except TypeError:
        raise ArgumentError(f"--input {text!r}: unknown dtype {given!r}; known are {', '.join(_DTYPES)}") from None
    shape = tuple(int(length) for length in match["shape"].split("x") if length)
    return jax.ShapeDtypeStruct(shape, dtype)
