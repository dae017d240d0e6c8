"""`jaxpar plot`, `plan`, `port` and `verify`: their parsers, functions by name, shapes as text.

Each imports what it needs when it runs, since that takes a while.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import importlib
import inspect
import json
import operator
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .._core import files
from .._core.text import HelpFormatter, number, plural
from .options import Options, add_options, option, positional, read


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    def add(name: str, help: str, about: str, kind: type[Options], run: Callable[[Options], None]) -> None:
        def answered(args: argparse.Namespace) -> int:
            try:
                run(read(args, kind))
                sys.stdout.flush()
            except BrokenPipeError:  # the reader, such as `head`, has read enough
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end of Python
                return 1
            except (ValueError, TypeError, OSError, RuntimeError) as error:
                print(f"jaxpar {name}: {' '.join(str(error).split())}", file=sys.stderr)
                return 2 if isinstance(error, (ValueError, TypeError)) else 1
            return 0

        parser = commands.add_parser(name, help=help, description=about, formatter_class=HelpFormatter)
        add_options(parser, kind)
        parser.set_defaults(run=answered, parser=parser)

    # The status of a command is 2 for bad arguments, and 1 where it fails.
    add("plot", "draw a function", _PLOT, PlotOptions, _plot)
    add("plan", "know before you rent: memory and traffic on TPUs and GPUs", _PLAN, PlanOptions, _plan)
    add("port", "write a network of MXNet as a Python module", _PORT, PortOptions, _port)
    add("verify", "compute a certified run again, and compare", _VERIFY, VerifyOptions, _verify)


def find_function(text: str, or_else: str = "") -> Callable[..., Any]:
    """The function of "module:function", or a `ValueError`. `or_else`: what else is taken, in its words."""
    module_name, colon, name = text.partition(":")
    if not colon or not module_name or not name:
        raise ValueError(f"expected MODULE:FUNCTION{or_else}, got {text!r}")
    if module_name.endswith(".py"):
        path = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise ValueError(f"expected the name of a module, got the file {module_name}; write {path}:{name}")
    if os.getcwd() not in sys.path:  # where the script `jaxpar` has its own folder
        sys.path.insert(0, os.getcwd())
    try:
        return operator.attrgetter(name)(importlib.import_module(module_name))
    except Exception as error:  # whatever the user's module raises
        raise ValueError(f"cannot import {text}: {type(error).__name__}: {error}") from None


# `jaxpar plot`: draw a function.

_SHORT = "f16 bf16 f32 f64 i4 i8 i16 i32 i64 u8 u16 u32 u64 c64 bool key".split()
_LONG = (
    "float16 bfloat16 float32 float64 int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64 complex64 bool key".split()
)
DTYPES: dict[str, str] = dict(zip(_SHORT, _LONG, strict=True))
_SHAPE = re.compile(r"(?P<shape>(\d+(x\d+)*)?)(:(?P<dtype>\w+))?")
_PLOT = "Draw a function as the network it computes. Nothing is run."


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlotOptions:
    """What `jaxpar plot` is told."""

    function: str = positional("MODULE:FUNCTION, or lenet or matrix_factorization")
    shape: tuple[str, ...] = option(
        (),
        "an argument, once for each in order: 256x28x28x1:f32, or a pytree in JSON such as "
        '{"w": "4x3", "b": "3"} (default: those of the two models)',
        "--shape",
        "--input",
        metavar="SHAPE:DTYPE",
    )
    params: str | None = option(
        None,
        "MODULE:FUNCTION that makes the parameters, which are the first argument then; it takes nothing, a random key, "
        "or a key and the shapes. Or which --shape holds them, from 0 (default: none)",
        metavar="INIT",
    )
    output: Path | None = option(
        None,
        "what to write; its ending is the format: .html for the interactive page, .svg, .png, .pdf, .gif or another of "
        "Graphviz's, .dot for the text (default: NAME.svg)",
        "-o",
        "--output",
        metavar="FILE",
    )
    title: str | None = option(None, "the text below the picture (default: the name of the function)")
    depth: int | None = option(
        None, "how deep to unfold modules, 0 closes them all (default: all)", type=number(int), metavar="N"
    )
    theme: Literal["light", "dark"] = option("light", "colours for a page of this kind")
    heat: Literal["flops", "bytes"] | None = option(None, "colour layers by their cost (default: by their kind)")
    show_weights: bool = option(False, "draw the parameters too", action="store_true")
    summary: bool = option(False, "print the table of layers too", action="store_true")


def _plot(options: PlotOptions) -> None:
    from .. import models, viz

    # Code of the user, which comes next, may change the directory.
    output = options.output and options.output.absolute()

    # The function, its arguments, which of them has the params, and its name.
    lenet, factors = models.lenet, models.matrix_factorization
    networks = {  # apply, init, and the shapes of what the network takes after its params
        "lenet": (lenet.apply, lenet.init, ["256x28x28x1:f32"]),
        "matrix_factorization": (factors.apply, lambda rng: factors.init(rng, 943, 1682, 64), ["64:i32", "64:i32"]),
    }
    arguments, argnums = [parse_shape(text) for text in options.shape], None
    if options.function in networks:
        fn, init, usual_shapes = networks[options.function]
        arguments, argnums = (
            [jax.eval_shape(init, jax.random.key(0)), *(arguments or map(parse_shape, usual_shapes))],
            0,
        )
        name = options.function
    else:
        fn, name = find_function(options.function, f", {' or '.join(networks)}"), options.function.partition(":")[2]
        if options.params is not None and ":" in options.params:
            arguments, argnums = [make_params(options.params, arguments), *arguments], 0
        elif options.params is not None:
            if not options.params.isdecimal():
                hint = "expected MODULE:FUNCTION, or the number of a --shape, from 0"
                raise ValueError(f"--params {options.params!r}: {hint}")
            argnums = int(options.params)
    check_takes(options.function, fn, arguments)

    # What would be written is checked before the function is traced, which may take minutes.
    try:
        target = viz.Plot.check_path(output or f"{name}.svg")
    except viz.RenderError as error:
        raise ValueError(str(error)) from None
    try:
        picture = viz.plot_network(
            fn,
            *arguments,
            title=name if options.title is None else options.title,
            depth=options.depth,
            theme=options.theme,
            heat=options.heat,
            hide_weights=not options.show_weights,
            params_argnums=argnums,
        )
        if options.summary:
            viz.print_summary(fn, *arguments, params_argnums=argnums, depth=options.depth)
    except BrokenPipeError:
        raise
    except Exception as error:  # whatever the user's function raises
        raise RuntimeError(f"{options.function} cannot be traced: {type(error).__name__}: {error}") from error
    picture.save(target)
    print(f"{options.output or target}: {picture.network}")


# Shapes as text.


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
        raise ValueError(f"--shape {text!r} is not JSON: {error}") from None
    return jax.tree.map(_parse_one, tree)


def _parse_one(text: object) -> jax.ShapeDtypeStruct:
    match = _SHAPE.fullmatch(text) if isinstance(text, str) else None
    if match is None or not text:
        raise ValueError(f"--shape {text!r}: expected SHAPE:DTYPE such as 256x28x28x1:f32, or JSON of such texts")
    name = match["dtype"] or "f32"
    shape = tuple(int(length) for length in match["shape"].split("x") if length)
    if name == "key":
        return jax.ShapeDtypeStruct(shape, jax.eval_shape(lambda: jax.random.key(0)).dtype)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(DTYPES.get(name, name)))


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
        raise ValueError(f"--params {text} must take nothing, a random key, or a key and the {len(shapes)} --shape")
    try:
        return jax.eval_shape(init, *args)
    except Exception as error:
        raise ValueError(f"--params {text} fails: {type(error).__name__}: {error}") from None


def takes(fn: Callable[..., Any], args: list[Any]) -> bool:
    """Whether a function can be called with these arguments. True where Python cannot say."""
    try:
        inspect.signature(fn).bind(*args)
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)  # some builtins have no signature
    return True


def check_takes(text: str, fn: Callable[..., Any], args: list[Any]) -> None:
    """`ValueError` for a function that takes another number of arguments."""
    # Else the traceback would be one of the tracing, and speak of arguments that nobody wrote.
    if not takes(fn, args):
        count = f"there {'is' if len(args) == 1 else 'are'} {plural(len(args), 'argument')}"
        hint = "give one --shape for each, and --params MODULE:INIT for the first where that makes it"
        raise ValueError(f"{text} takes {inspect.signature(fn)}, and {count}; {hint}")


# `jaxpar plan`: what a training step would be on accelerators that are not there.

_PLAN = (
    "Compile a training step for TPUs or GPUs that are not there: does it fit, what does each device send. The "
    "compiler is in this Python or in the one that JAXPAR_PLAN_PYTHON names. `make plan-env` sets one up."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What `jaxpar plan` is told."""

    function: str = positional("MODULE:FUNCTION, make(devices, **choices) -> (step, state, batch)")
    on: tuple[str, ...] = option(
        None, "v5e:2x4, v5p:4x4x4, h100:8, h100:4x8; again for more", required=True, metavar="DEVICES"
    )
    choose: tuple[str, ...] = option(
        (),
        "a keyword of the function, with one value, such as (2,4), or several to compare; again for more",
        metavar="NAME=VALUE[,VALUE]",
    )
    json: bool = option(False, "print JSON", action="store_true")
    output: Path | None = option(
        None,
        "draw the step there, .svg or .html, from the program of the devices (default: none)",
        "-o",
        "--output",
        metavar="FILE",
    )


def _plan(options: PlanOptions) -> None:
    from .. import train

    choices = dict(map(parse_choice, options.choose))
    # Code of the user, which comes next, may change the directory.
    output = options.output and options.output.absolute()
    make = find_function(options.function)
    if len(options.on) == 1 and all(len(values) == 1 for values in choices.values()):
        plan: Any = train.plan(make, options.on[0], **{name: values[0] for name, values in choices.items()})
    elif options.output:
        raise ValueError("-o draws one plan; give one --on and one value of each --choose")
    else:
        plan = train.compare_plans(make, options.on, **choices)
    print(json.dumps(plan.to_dict(), indent=2) if options.json else plan)
    if options.output:
        plan.plot().save(output)


def parse_choice(text: str) -> tuple[str, list[Any]]:
    """The name and the values of "mesh=(2,4),(8,1)".

    >>> parse_choice("mesh=(2,4),(8,1)"), parse_choice("kind=device,sharded")
    (('mesh', [(2, 4), (8, 1)]), ('kind', ['device', 'sharded']))
    """
    name, equals, values = text.partition("=")
    if not name.isidentifier() or not equals:
        raise ValueError(f"--choose {text!r}: expected NAME=VALUE or NAME=VALUE,VALUE")
    # A value ends at the first comma where Python can read it, else, as plain text, at the next comma. To split at each
    # comma would cut a tuple in two.
    parsed, pieces = [], values.split(",")
    while pieces:
        for count in range(1, len(pieces) + 1):
            with contextlib.suppress(ValueError, SyntaxError):
                parsed.append(ast.literal_eval(",".join(pieces[:count]).strip()))
                break
        else:
            count, plain = 1, pieces[0].strip()
            if any(plain.count(opened) != plain.count(closed) for opened, closed in ("()", "[]", "{}")):
                remainder = ",".join(pieces)
                raise ValueError(
                    f"--choose {text!r}: {remainder!r} does not begin with a value of Python, such as (2,4)"
                )
            parsed.append(plain)
        del pieces[:count]
    return name, parsed


# `jaxpar port`: write a network of MXNet as a Python module.

_PORT = "Write a network of MXNet as a module in plain JAX, or of Flax. Nothing of the files is run."
_TEST = '''"""{module} gives what {symbol} gives, while it is trained and else."""

import jax
import numpy as np
import pytest
import {module}
{imports}
from jaxpar import mxnet

SHAPES = {shapes}


@pytest.mark.parametrize("train", [False, True])
def test_the_module_gives_what_the_symbol_gives(train):
    model = mxnet.load_symbol({symbol!r}, operators={{{operators}}})
    params, state = {arrays}
    random, key = np.random.default_rng(0), jax.random.key(0)
    names = [name for name in model.inputs if name in SHAPES]
    inputs = {{name: np.float32(random.integers(10, size=SHAPES[name])) for name in names}}
    options = {{"state": state, "train": train, "rng": key}}
    expected = model.apply(params, inputs, **options)
    found = {module}.apply(params, *inputs.values(), **options)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * np.abs(b).max())
'''


@dataclasses.dataclass(frozen=True, kw_only=True)
class PortOptions:
    """What `jaxpar port` is told."""

    symbol: str = positional("the graph, x-symbol.json")
    params: str | None = positional(
        "its arrays, x-0000.params; rare operators need them, or the shapes of the inputs", default=None, nargs="?"
    )
    output: str = option(None, "the module to write, such as model.py", "-o", "--output", required=True, metavar="FILE")
    shape: tuple[str, ...] = option(
        (),
        "the shape of an input, such as data=1x3x224x224, the default of the module's init; once for each input",
        metavar="NAME=SHAPE",
    )
    operator: tuple[str, ...] = option(
        (),
        "a function for an operator that is unknown, or another one for one that is not; once for each",
        metavar="NAME=MODULE:FUNCTION",
    )
    nnx: bool = option(False, "add a module of flax.nnx (default: functions of plain JAX)", action="store_true")
    test: bool = option(False, "write a test beside it, test_model.py; needs --shape", action="store_true")
    force: bool = option(False, "replace files that exist (default: exit with an error)", action="store_true")


def _port(options: PortOptions) -> None:
    from .. import mxnet

    output = Path(files.as_local(options.output, "--output"))
    if output.suffix != ".py" or not output.stem.isidentifier():
        raise ValueError(f"expected the name of a module such as model.py, got {options.output}")
    if options.test and not options.shape:
        raise ValueError("--test needs the shapes of the inputs; give --shape data=1x3x224x224")
    shapes: dict[str, tuple[int, ...]] = {}
    for text in options.shape:
        match = re.fullmatch(r"(.+)=(\d+(?:x\d+)*)", text)
        if match is None:
            raise ValueError(f"--shape {text!r}: expected NAME=SHAPE such as data=1x3x224x224")
        shapes[match[1]] = tuple(map(int, match[2].split("x")))
    named: dict[str, str] = {}
    for text in options.operator:
        name, _, function = text.partition("=")
        if not name or not function:
            raise ValueError(f"--operator {text!r}: expected NAME=MODULE:FUNCTION such as MyOp=my_ops:my_op")
        named[name] = function
    operators = {name: find_function(text) for name, text in named.items()}
    texts = {output: mxnet.port(options.symbol, options.params, shapes=shapes, nnx=options.nnx, operators=operators)}
    if options.test:
        arrays = f"{output.stem}.{f'load({options.params!r})' if options.params else 'init(jax.random.key(1))'}"
        modules = sorted({text.partition(":")[0] for text in named.values()})
        test = _TEST.format(
            module=output.stem,
            symbol=options.symbol,
            shapes=shapes,
            arrays=arrays,
            imports="".join(f"import {module}\n" for module in modules),
            operators=", ".join(f"{name!r}: {text.replace(':', '.')}" for name, text in named.items()),
        )
        texts[output.with_name(f"test_{output.name}")] = test
    if existing := [str(path) for path in texts if path.exists() and not options.force]:
        raise FileExistsError(f"{' and '.join(existing)} exists; choose another name, or give --force")
    for path, text in texts.items():
        files.replace(path, text.encode())
    print(f"{' and '.join(map(str, texts))}: written from {options.symbol}")


# `jaxpar verify`: compute a part of a certified run again.

_VERIFY = (
    "Compute a part of a run again, and compare it with its certificate. The run's files stay as they are. The exit "
    "status is 0 where all is the same, 1 where a step differs, 2 where the two cannot be compared."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """What `jaxpar verify` is told."""

    certificate: str = positional("the file that fit(certificate=...) wrote")
    function: str = positional("MODULE:FUNCTION that returns the arguments of fit in a dict")
    first: int | None = option(
        None,
        "the first step to compare; what is before it is taken from a checkpoint (default: 1)",
        "--from",
        type=number(int, 1),
        metavar="STEP",
    )
    last: int | None = option(
        None, "the last step (default: the last of the file)", "--to", type=number(int, 1), metavar="STEP"
    )
    devices: int | None = option(
        None, "compute on so many emulated CPU devices (default: on all)", type=number(int, 1), metavar="N"
    )
    blame: bool = option(
        False, "name the step, the virtual shard and the leaf that were wrong first", action="store_true"
    )
    picture: Path | None = option(
        None,
        "where a step differs, draw the network, with the layers whose leaves were wrong in red; its ending is the "
        "format: .svg, .png, .pdf, .html (default: none)",
        metavar="FILE",
    )


def _verify(options: VerifyOptions) -> None:
    picture = options.picture and options.picture.absolute()  # code of the user may change the directory
    try:
        from .. import parallel, train, viz

        if picture is not None:
            viz.Plot.check_path(picture)
        if options.devices is not None:
            parallel.use_cpu_devices(options.devices)
        certified = train._read_certificate(options.certificate)
        arguments = find_function(options.function)()
        result = train._verify(options.certificate, certified, arguments, options.first, options.last)
    except Exception as error:  # whatever the user's function raises
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{kind}{error}") from error
    start = "what the function returns" if result.start is None else files.shown(result.start)
    if result.differs is not None:
        fault = f"; {result.fault}" if options.blame else ""
        if picture is not None and result.fault is not None:
            try:
                fault += f"; drawn in {files.shown(Path(result.fault.plot().save(picture)))}"
            except (ValueError, RuntimeError, OSError) as error:  # that a step differs matters more
                fault += f"; {error}"
        raise RuntimeError(f"step {result.differs} differs from {options.certificate}; started at {start}{fault}")
    steps = f"{len(result.steps)} certified steps, {result.steps[0]} to {result.steps[-1]}"
    print(f"{options.certificate}: {steps}, are the same; started at {start}")
