"""`jaxpar port`: write a network of MXNet as a Python module."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from .. import mxnet
from .._core import files
from .arguments import fail, new_parser

_ABOUT = "Write a network of MXNet as a module in plain JAX, or of Flax. Nothing of the files is run."
_TEST = '''"""{module} gives what {symbol} gives, while it is trained and else."""

import jax
import numpy as np
import pytest
import {module}

from jaxpar import mxnet

SHAPES = {shapes}


@pytest.mark.parametrize("train", [False, True])
def test_the_module_gives_what_the_symbol_gives(train):
    model = mxnet.load_symbol({symbol!r})
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


def add_parser(commands: Any) -> None:
    """Add the command to those of the command line."""
    add = new_parser(commands, "port", "write a network of MXNet as a Python module", _ABOUT, run).add_argument
    add("symbol", help="the graph, x-symbol.json")
    add("params", nargs="?", help="its arrays, x-0000.params; rare operators need them, or the shapes of the inputs")
    add("-o", "--output", required=True, metavar="FILE", help="the module to write, such as model.py")
    shape = "the shape of an input, such as data=1x3x224x224, the default of the module's init"
    add("--shape", action="append", default=[], metavar="NAME=SHAPE", help=f"{shape}; once for each input")
    add("--nnx", action="store_true", help="add a module of flax.nnx (default: functions of plain JAX)")
    add("--test", action="store_true", help="write a test beside it, test_model.py; needs --shape")
    add("--force", action="store_true", help="replace files that exist (default: exit with an error)")


def run(args: argparse.Namespace) -> int:
    """Write the module. Return 0, or 2 for bad arguments, or 1 where a file cannot be read or written."""
    output = Path(args.output)
    try:
        if output.suffix != ".py" or not output.stem.isidentifier():
            raise ValueError(f"expected the name of a module such as model.py, got {args.output}")
        if args.test and not args.shape:
            raise ValueError("--test needs the shapes of the inputs; give --shape data=1x3x224x224")
        shapes = dict(map(_shape, args.shape))
        texts = {output: mxnet.port(args.symbol, args.params, shapes=shapes, nnx=args.nnx)}
        if args.test:
            arrays = f"{output.stem}.{f'load({args.params!r})' if args.params else 'init(jax.random.key(1))'}"
            found = _TEST.format(module=output.stem, symbol=args.symbol, shapes=shapes, arrays=arrays)
            texts[output.with_name(f"test_{output.name}")] = found
        if found := [str(path) for path in texts if path.exists() and not args.force]:
            raise FileExistsError(f"{' and '.join(found)} exists; choose another name, or give --force")
        for path, text in texts.items():
            files.replace(path, text.encode())
    except (ValueError, OSError) as error:
        return fail("port", 1 if isinstance(error, OSError) else 2, error)
    print(f"{' and '.join(map(str, texts))}: written from {args.symbol}")
    return 0


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    match = re.fullmatch(r"(.+)=(\d+(?:x\d+)*)", text)
    if match is None:
        raise ValueError(f"--shape {text!r}: expected NAME=SHAPE such as data=1x3x224x224")
    return match[1], tuple(map(int, match[2].split("x")))
