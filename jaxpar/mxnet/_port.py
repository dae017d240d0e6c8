"""A network of MXNet as the text of a Python module in plain JAX."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from .._core import files
from .._core.calls import answers
from . import _port_layers
from ._port_blocks import fold, functions_of
from ._port_calls import Line, lines_of
from ._symbol import load_symbol

_OWN = frozenset(
    "net params state train rng arrays shapes jax jnp lax math operator load_params network"
    " self rngs nnx outputs Network arrays_of".split()
)
_MODULE = '''"""{name}, a network of MXNet in {kind}, written by `jaxpar port`.

Arrays have MXNet's names and layout. `apply` is a pure function of them.
"""

{imports}


{text}


def apply(params, {inputs}, *, state=None, train=False, rng=None):
    """What the network gives. With `train=True`, (outputs, new running statistics)."""
    state = dict(state or {{}})
    arrays = {{**params, **state}}
    net = Net(lambda name, *shape: arrays[name], state, train, rng)
    outputs = network(net, {inputs})
    return (outputs, state) if train else outputs


def init(rng, {given}):
    """New (params, running statistics), for inputs of these shapes."""
    shapes = {{}}

    def array(name, *shape):
        shapes[name] = shape
        return jnp.zeros(shape)

    inputs = [jnp.zeros(shape) for shape in ({inputs},)]
    jax.eval_shape(lambda: network(Net(array, {{}}, False, None), *inputs))
    keys = dict(zip(shapes, jax.random.split(rng, len(shapes))))
    return split({{name: new_array(keys[name], name, shape) for name, shape in shapes.items()}})


{load}'''
_NNX = '''

class Network(nnx.Module):
    """The network with its arrays. `train()` and `eval()` switch it."""

    def __init__(self, params, state=None):
        self.params = nnx.Dict({{n: nnx.Param(jnp.asarray(a)) for n, a in params.items()}})
        statistics = {{n: nnx.BatchStat(jnp.asarray(a)) for n, a in (state or {{}}).items()}}
        self.statistics = nnx.Dict(statistics)
        self.deterministic = True

    def __call__(self, {inputs}, *, rngs=None):
        params, state = arrays_of(self)
        if self.deterministic:
            return apply(params, {inputs}, state=state, rng=rngs)
        outputs, new = apply(params, {inputs}, state=state, train=True, rng=rngs)
        for name, array in new.items():
            self.statistics[name][...] = array
        return outputs


def arrays_of(model):
    """(params, running statistics) of a model, by MXNet's names."""
    parts = model.params, model.statistics
    return tuple({{name: part[name][...] for name in part}} for part in parts)
'''


@answers("mxnet.port")
def port(
    symbol_file: str | Path,
    params_file: str | Path | None = None,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    nnx: bool = False,
) -> str:
    """The text of a Python module that computes a network of MXNet.

    The module has `apply(params, data, state=..., train=False, rng=None)`, which gives what `Model.apply` gives without
    labels, `init(rng)` for new arrays and `load(file)` for those of MXNet, all by MXNet's names. What repeats is
    written as functions and loops. With `nnx=True`, `Network(params, state)` is an `nnx.Module` of Flax. Rare
    operators come from `mxnet.operator`. `jaxpar port` writes the text to a file.

    Args:
        symbol_file: the graph, "lenet-symbol.json".
        params_file: its arrays, "lenet-0010.params". Rare operators need their shapes, or those of the inputs.
        shapes: of the inputs by name. They are the defaults of the module's `init`.
        nnx: whether the module has the network as an `nnx.Module` too.

    Raises:
        OSError, CheckpointError: as of `load_symbol`.
        ValueError: an operator is unknown, or a node cannot be written.

    Example:
        >>> from jaxpar import mxnet
        >>> text = mxnet.port("lenet-symbol.json", shapes={"data": (1, 1, 28, 28)})  # doctest: +SKIP
    """
    model = load_symbol(symbol_file, params_file)
    given = {name: tuple(shape) for name, shape in (shapes or {}).items()}
    known: dict[str, tuple[int, ...]] = {name: a.shape for name, a in {**model.params, **model.state}.items()}
    try:
        known |= model.shapes(**given)
    except ValueError:
        if given and params_file is None:
            raise
        known |= given
    lines, heads, rare = lines_of(model, known)
    lines = _needed(lines, heads)
    used = {value for value in [*heads, *(value for line in lines for value in line.inputs)] if value[1] == 0}
    inputs = {(n, 0): node.name for n, node in enumerate(model.symbol.nodes) if node.is_variable and (n, 0) in used}
    functions, items = fold(lines, list(inputs), heads)
    names: dict[tuple[int, int], str] = {}
    for value, name in inputs.items():
        names[value] = _identifier(name, [*names.values(), *(function.name for function in functions)])
    parts = functions_of(functions, items, names, heads)
    text = "\n\n\n".join([*_copied("\n".join(parts)), *parts])
    defaults = [names[v] + (f"={known[name]}" if name in known else "") for v, name in inputs.items()]
    arguments = ", ".join(names.values())
    return (_MODULE + (_NNX if nnx else "")).format(
        name=re.sub(r"[^\w.-]", "_", files.as_path(symbol_file, "mxnet.port: symbol_file").name),
        kind="Flax's nnx" if nnx else "plain JAX",
        imports=_imports(text, rare, nnx),
        text=text,
        inputs=arguments,
        given=", ".join(sorted(defaults, key=lambda default: "=" in default)),
        load=inspect.getsource(_port_layers.load),
    )


def _needed(lines: Sequence[Line], heads: Sequence[tuple[int, int]]) -> list[Line]:
    """The lines that the outputs need: labels, and what is computed of them, are left out."""
    kept: list[Line] = []
    needed = set(heads)
    for line in reversed(lines):
        if needed.intersection(line.outputs):
            kept.insert(0, line)
            needed.update(line.inputs)
    return kept


def _identifier(name: str, taken: Sequence[str]) -> str:
    """A name of an input that Python takes, and that nothing else in the module has."""
    text = re.sub(r"\W|^(?=\d)", "_", name, flags=re.ASCII)
    while keyword.iskeyword(text) or text in _OWN or text in taken or hasattr(_port_layers, text):
        text += "_"
    return text


def _copied(text: str) -> list[str]:
    """The source of the functions that a text calls, and of those that each module has."""
    found: list[str] = []
    for name, value in reversed(list(vars(_port_layers).items())):
        own = (inspect.isroutine(value) or inspect.isclass(value)) and value.__module__ == _port_layers.__name__
        used = name in ("Net", "new_array", "split") or re.search(rf"\b{name}[(,]", "\n".join([text, *found]))
        if own and used and name != "load":
            found.insert(0, inspect.getsource(value).strip())
    return found


def _imports(text: str, rare: Mapping[str, str], nnx: bool) -> str:
    lines = ["import math", "from typing import Any, NamedTuple", "", "import jax", "import jax.numpy as jnp"]
    lines += ["from flax import nnx"] if nnx else []
    lines += ["from jax import lax"] if "lax." in text else []
    lines += ["", f"from jaxpar.mxnet import load_params{', operator' if rare else ''}"]
    if rare:
        lines += ["", "# Operators that are rare: jaxpar's functions, with MXNet's arguments."]
    return "\n".join([*lines, *(f'{own} = operator("{op}")' for own, op in rare.items())])
