"""What the commands share: their parser and how they fail, functions by name, and shapes as text."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._core.text import HelpFormatter, did_you_mean

_SHORT = "f16 bf16 f32 f64 i4 i8 i16 i32 i64 u8 u16 u32 u64 c64 bool key".split()
_LONG = (
    "float16 bfloat16 float32 float64 int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64 complex64 bool key".split()
)
DTYPES: dict[str, str] = dict(zip(_SHORT, _LONG, strict=True))
_SHAPE = re.compile(r"(?P<shape>(\d+(x\d+)*)?)(:(?P<dtype>\w+))?")


class ArgumentError(ValueError):
    """An argument does not name a function or an array."""


def new_parser(commands: Any, name: str, help: str, about: str, run: Callable[..., int]) -> argparse.ArgumentParser:
    """Add a command to those of the command line, and return its parser."""
    parser = commands.add_parser(name, help=help, description=about, formatter_class=HelpFormatter)
    parser.set_defaults(run=run, parser=parser)
    return parser


def fail(command: str, status: int, why: BaseException | str) -> int:
    """Write in one line on standard error why a command ends. Return its status."""
    print(f"jaxpar {command}: {one_line(why)}", file=sys.stderr)
    return status


def find_function(text: str, others: str = "") -> Callable[..., Any]:
    """The function of "module:function", or an `ArgumentError` that names the `others` too."""
    module_name, colon, name = text.partition(":")
    if not colon or not module_name or not name:
        raise ArgumentError(f"expected MODULE:FUNCTION{others}, got {text!r}")
    if module_name.endswith(".py"):
        path = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise ArgumentError(f"expected the name of a module, got the file {module_name}; write {path}:{name}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises
        raise ArgumentError(f"cannot import {module_name}: {type(error).__name__}: {one_line(error)}") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise ArgumentError(
                f"module {module_name} has no {name}{did_you_mean(part, [n for n in dir(found) if n[0] != '_'])}"
            )
        found = getattr(found, part)
    if not callable(found):
        raise ArgumentError(f"{text} is a {type(found).__name__}; expected a function")
    return found


def one_line(error: BaseException | str) -> str:
    return " ".join(str(error).split())


def parse_shape(text: str) -> Any:
    """The shape and dtype of "256x28x28x1:f32", or a pytree of them in JSON.

    Without a dtype it is float32, without a shape a scalar. The dtype `key` is that of a random key.

    >>> parse_shape("2x3:bf16")
    ShapeDtypeStruct(shape=(2, 3), dtype=bfloat16)
    >>> parse_shape('{"w": "4x3", "b": "3"}')["w"].shape
    (4, 3)
    """
    if text.lstrip()[:1] not in ("{", "["):
        return _parse_one(text)
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise ArgumentError(f"--shape {text!r} is not JSON: {error}") from None
    return jax.tree.map(_parse_one, tree)


def _parse_one(text: Any) -> jax.ShapeDtypeStruct:
    match = _SHAPE.fullmatch(text) if isinstance(text, str) else None
    if match is None or not text:
        raise ArgumentError(f"--shape {text!r}: expected SHAPE:DTYPE such as 256x28x28x1:f32, or JSON of such texts")
    given = match["dtype"] or "f32"
    shape = tuple(int(length) for length in match["shape"].split("x") if length)
    if given == "key":
        return jax.ShapeDtypeStruct(shape, jax.eval_shape(lambda: jax.random.key(0)).dtype)
    try:
        dtype = jnp.dtype(DTYPES.get(given, given))
    except TypeError:
        known = ", ".join(DTYPES)
        raise ArgumentError(f"--shape {text!r}: unknown dtype {given!r}; known are {known} and NumPy's names") from None
    return jax.ShapeDtypeStruct(shape, dtype)


def make_params(text: str, shapes: list[Any]) -> Any:
    """The shapes of the parameters that the init function of "module:function" makes. Nothing is computed.

    It takes nothing, a random key, or a key and what the network takes, of these shapes.
    """
    init, key = find_function(text), jax.eval_shape(lambda: jax.random.key(0))
    choices: list[list[Any]] = [[key], [key, *shapes], []]
    if takes(init, [key, *shapes, *shapes]):  # any number, as the `init` of a Flax module
        choices = [[key, *shapes]]
    args = next((args for args in choices if takes(init, args)), None)
    if args is None:
        raise ArgumentError(f"--params {text} must take nothing, a random key, or a key and the {len(shapes)} --shape")
    try:
        return jax.eval_shape(init, *args)
    except Exception as error:
        raise ArgumentError(f"--params {text} fails: {type(error).__name__}: {one_line(error)}") from None


def takes(fn: Callable[..., Any], args: list[Any]) -> bool:
    """Whether a function can be called with these arguments. True where Python cannot say."""
    try:
        inspect.signature(fn).bind(*args)
    except TypeError:
        return False
    except ValueError:  # some builtins have no signature
        return True
    return True


def check_takes(text: str, fn: Callable[..., Any], args: list[Any]) -> None:
    """`ArgumentError` for a function that takes another number of arguments."""
    if not takes(fn, args):
        count = f"{len(args)} argument{'' if len(args) == 1 else 's'}"
        raise ArgumentError(
            f"{text} takes {inspect.signature(fn)}, and there {'is' if len(args) == 1 else 'are'} {count}; give one "
            "--shape for each, and --params MODULE:INIT for the first where that makes it"
        )
