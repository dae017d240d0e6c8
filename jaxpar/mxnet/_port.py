"""A network of MXNet as the text of a Python module in plain JAX.

Read `port` first. Each node becomes a `Line`, an assignment whose numbers and names are still open (`_lines_of`, with
the table at the end of the file). `_port_blocks.fold` finds what repeats among the lines, and writes the text. The
layers that the text calls are copied from `_port_layers`, so the module needs jaxpar for rare operators only.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._core import files
from .._core.files import CheckpointError
from . import _port_layers
from ._layers import ACTIVATIONS
from ._operators import ARITHMETIC, Operator
from ._port_blocks import KEYWORD, POSITION, Line, Slot, Value, fold, free_name, functions_of, number_text
from ._symbol import Model, load_symbol

_MOST_OUTPUTS = 10_000  # of a node
_OF_IMAGES = ("kernel", "stride", "pad", "dilate")  # one number where it is the same for all axes

# Names of the module itself, which no input may have.
_RESERVED = (
    "net params state train rng arrays array shapes jax jnp lax math operator load_params network apply init Any"
    " NamedTuple self rngs nnx outputs Network arrays_of dict zip len range tuple float isinstance _ __debug__"
).split() + list(vars(_port_layers))
_MODULE = '''"""{name}, a network of MXNet in {kind}, written by `jaxpar port`.

Arrays have MXNet's names and layout. `apply` is a pure function of them.
"""

{imports}


{text}


def apply(params, {inputs}*, state=None, train=False, rng=None):
    """What the network gives. With `train=True`, (outputs, new running statistics)."""
    state = dict(state or {{}})
    arrays = {{**params, **state}}
    net = Net(lambda name, *shape: jnp.asarray(arrays[name]), state, train, rng)
    outputs = network(net{after})
    return (outputs, state) if train else outputs


def init(rng{given}):
    """New (params, running statistics), for inputs of these shapes."""
    shapes = {{}}

    def array(name, *shape):
        shapes[name] = shape
        return jnp.zeros(shape)

    inputs = [jnp.zeros(shape) for shape in ({each})]
    jax.eval_shape(lambda: network(Net(array, {{}}, False, None), *inputs))
    keys = dict(zip(shapes, jax.random.split(rng, len(shapes))))
    return split({{name: new_array(keys[name], name, shape) for name, shape in shapes.items()}})


{load}'''
_SPLIT = '''def split(arrays):
    """(params, running statistics)"""
    statistics = {{{names}}}
    state = {{name: array for name, array in arrays.items() if name in statistics}}
    return {{name: array for name, array in arrays.items() if name not in state}}, state'''
_NNX = '''

class Network(nnx.Module):
    """The network with its arrays. `train()` and `eval()` switch it."""

    def __init__(self, params, state=None):
        self.params = nnx.Dict({{n: nnx.Param(jnp.asarray(a)) for n, a in params.items()}})
        statistics = {{n: nnx.BatchStat(jnp.asarray(a)) for n, a in (state or {{}}).items()}}
        self.statistics = nnx.Dict(statistics)
        self.deterministic = True

    def __call__(self, {inputs}*, rngs=None):
        params, state = arrays_of(self)
        if self.deterministic:
            return apply(params, {inputs}state=state, rng=rngs)
        outputs, new = apply(params, {inputs}state=state, train=True, rng=rngs)
        for name, array in new.items():
            self.statistics[name][...] = array
        return outputs


def arrays_of(model):
    """(params, running statistics) of a model, by MXNet's names."""
    parts = model.params, model.statistics
    return tuple({{name: part[name][...] for name in part}} for part in parts)
'''


def port(
    symbol_file: str | Path,
    params_file: str | Path | None = None,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    nnx: bool = False,
    operators: Mapping[str, Callable[..., Any]] | None = None,
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
        operators: as of `load_symbol`. The module imports such a function from where it is defined. It has a copy of
            one that cannot be imported, such as a lambda or one of a notebook, if that uses nothing but modules.

    Raises:
        OSError, CheckpointError: as of `load_symbol`.
        ValueError: an operator is unknown, the shape of an array is, or one of `operators` can be neither imported nor
            copied.

    Example:
        >>> from jaxpar import mxnet
        >>> text = mxnet.port("lenet-symbol.json", shapes={"data": (1, 1, 28, 28)})  # doctest: +SKIP
    """
    user_operators = dict(operators or {})
    model = load_symbol(symbol_file, params_file, operators=user_operators)

    # The shapes of all arrays, as far as they follow from the params and from the inputs.
    input_shapes = {name: tuple(shape) for name, shape in (shapes or {}).items()}
    all_shapes: dict[str, tuple[int, ...]] = {name: a.shape for name, a in {**model.params, **model.state}.items()}
    try:
        all_shapes |= model.shapes(**input_shapes)
    except ValueError:
        if input_shapes and params_file is None:
            raise
        all_shapes |= input_shapes

    # The nodes as lines, and what repeats as functions and loops.
    taken = dict.fromkeys(_RESERVED, 1)
    lines, heads, rare = _lines_of(model, all_shapes, user_operators, taken)
    lines = _needed(lines, heads)
    used = {value for value in [*heads, *(value for line in lines for value in line.inputs)] if value[1] == 0}
    variables = [(number, node.name) for number, node in enumerate(model.symbol.nodes) if node.is_variable]
    inputs = {(n, 0): name for n, name in variables if (n, 0) in used and name not in model._arrays}
    functions, items = fold(lines, list(inputs), heads, taken)
    names = {value: _identifier(name, taken) for value, name in inputs.items()}
    function_texts = functions_of(functions, items, names, heads)

    # With what they call of jaxpar's layers.
    copied = _copied("\n".join(function_texts))
    statistics = {name for name, kind in model._arrays.items() if kind == "aux"}
    _, by_ending = _port_layers.split(dict.fromkeys(model._arrays))
    if set(by_ending) != statistics:  # the endings of their names do not tell running statistics
        copied = [text for text in copied if not text.startswith("def split(")]
        copied.append(_SPLIT.format(names=", ".join(f"{name!r}" for name in sorted(statistics))))
    text = "\n\n\n".join([*copied, *function_texts])
    defaults = [names[v] + (f"={all_shapes[name]}" if name in all_shapes else "") for v, name in inputs.items()]
    return (_MODULE + (_NNX if nnx else "")).format(
        name=re.sub(r"[^\w.-]", "_", files.as_path(symbol_file, "mxnet.port: symbol_file").name),
        kind="Flax's nnx" if nnx else "plain JAX",
        imports=_imports(text, rare, user_operators, nnx),
        text=text,
        inputs="".join(f"{name}, " for name in names.values()),
        after="".join(f", jnp.asarray({name})" for name in names.values()),
        each=", ".join(names.values()) + "," * bool(names),
        given="".join(f", {default}" for default in sorted(defaults, key=lambda default: "=" in default)),
        load=inspect.getsource(_port_layers.load),
    )


def _needed(lines: Sequence[Line], heads: Sequence[tuple[int, int]]) -> list[Line]:
    """The lines that the outputs need: labels, and what is computed of them, are left out."""
    kept: list[Line] = []
    needed = set(heads)
    for line in reversed(lines):
        if needed.intersection(line.outputs):
            kept.append(line)
            needed.update(line.inputs)
    return kept[::-1]


def _identifier(name: str, taken: dict[str, int]) -> str:
    """A name of an input that Python takes, and that nothing else in the module has."""
    text = re.sub(r"\W|^(?=\d)", "_", name, flags=re.ASCII) or "_"
    return free_name(f"{text}_" if keyword.iskeyword(text) or text in taken else text, taken)


def _copied(text: str) -> list[str]:
    """The source of the functions that a text calls, and of those that each module has."""
    sources: list[str] = []
    for name, value in reversed(list(vars(_port_layers).items())):
        is_defined = (inspect.isroutine(value) or inspect.isclass(value)) and value.__module__ == _port_layers.__name__
        is_used = name in ("Net", "new_array", "split") or re.search(rf"\b{name}[(,]", "\n".join([text, *sources]))
        if is_defined and is_used and name != "load":
            sources.insert(0, inspect.getsource(value).strip())
    return sources


def _imports(text: str, rare: Mapping[str, str], user_operators: Mapping[str, Callable[..., Any]], nnx: bool) -> str:
    lines = ["import math", "from typing import Any, NamedTuple", "", "import jax", "import jax.numpy as jnp"]
    lines += ["from flax import nnx"] if nnx else []
    lines += ["from jax import lax"] if "lax." in text else []
    ours = {op: name for op, name in rare.items() if op not in user_operators}
    lines += ["", f"from jaxpar.mxnet import load_params{', operator' if ours else ''}"]
    if ours:
        lines += ["", "# Operators that are rare: jaxpar's functions, with MXNet's arguments."]
        lines += [f"{name} = operator({op!r})".replace("'", '"') for op, name in ours.items()]
    if len(ours) < len(rare):
        lines += ["", "# Operators of one's own."]
        lines += [_source(op, user_operators[op], name) for op, name in rare.items() if op in user_operators]
    return "\n".join(lines)


def _source(op: str, fn: Callable[..., Any], name: str) -> str:
    """The lines that give a module a function: its import, or a copy."""
    module, path = getattr(fn, "__module__", None) or "__main__", getattr(fn, "__qualname__", "").split(".")
    if module != "__main__" and all(word.isidentifier() for word in path):
        imported: Any = importlib.import_module(module)
        for word in path:
            imported = getattr(imported, word, None)
        if imported is fn:
            first, *attributes = path
            more = f"\n{name} = {'.'.join([name, *attributes])}" if attributes else ""
            return f"from {module} import {first} as {name}{more}"

    # It cannot be imported, so its definition is copied, if that uses nothing of its file but modules. Several lambdas
    # may stand in one line: the places of its instructions in the source say which of them it is.
    hint = "define it at the top of a module that can be imported"
    try:
        tree, code = ast.parse("".join(inspect.findsource(fn)[0])), inspect.unwrap(fn).__code__
    except (OSError, TypeError, AttributeError, SyntaxError):  # no function of Python, or one without its file
        raise ValueError(f"mxnet.port: operators[{op!r}] has no source that can be copied; {hint}") from None
    places = {(line, column) for line, _, column, _ in code.co_positions()}
    definition = None
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda) and (node.body.lineno, node.body.col_offset) in places:
            is_it = code.co_name == "<lambda>" and node.lineno == code.co_firstlineno
            definition = node if is_it else definition
        elif isinstance(node, ast.FunctionDef) and node.name == code.co_name and node.lineno == code.co_firstlineno:
            definition = node
    if definition is None:
        raise ValueError(f"mxnet.port: operators[{op!r}] cannot be found in its file; {hint}")
    # Annotations do not count, and are left out of the copy: what they name need not be there when it runs.
    inside = list(ast.walk(definition))
    local_names = {each.arg for each in inside if isinstance(each, ast.arg)}
    local_names |= {each.id for each in inside if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    annotations = [each.annotation for each in inside if isinstance(each, ast.arg) and each.annotation]
    left_out = {id(node) for annotation in annotations for node in ast.walk(annotation)}
    names = {each.id for each in inside if isinstance(each, ast.Name) and id(each) not in left_out} - local_names
    around: dict[str, Any] = getattr(fn, "__globals__", {})
    modules = {each: around[each] for each in sorted(names) if inspect.ismodule(around.get(each))}
    of_file = {each for each in names - modules.keys() if each in around or not hasattr(builtins, each)}
    if of_file := sorted(of_file | (names & {*code.co_freevars})):
        raise ValueError(
            f"mxnet.port: operators[{op!r}] is no function that can be imported, and uses {', '.join(of_file)} of its "
            f"own file; {hint}"
        )
    for argument in ast.walk(definition.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    if isinstance(definition, ast.FunctionDef):
        definition.name, definition.returns = name, None
        text = ast.unparse(definition)
    else:
        text = f"{name} = {ast.unparse(definition)}"
    return "\n".join([*(f"import {value.__name__} as {each}" for each, value in modules.items()), text])


# The nodes of a symbol as lines: which function of JAX, or of the written module, each of them calls.


def _lines_of(
    model: Model,
    shapes: Mapping[str, tuple[int, ...]],
    user_operators: Mapping[str, Callable[..., Any]],
    taken: dict[str, int],
) -> tuple[list[Line], tuple[Value, ...], dict[str, str]]:
    """The lines of a network, its outputs, and the rare operators: {MXNet's name: name in the module}.

    `shapes` are those of the arrays that no common layer makes, by name. Names of the module are added to `taken`.
    """
    nodes = model.symbol.nodes
    lines: list[Line] = []
    rare: dict[str, str] = {}
    # A node that computes nothing here, such as `identity`, has no line: its output is that of the node before. And a
    # variable that is there twice is one value.
    same: dict[Value, Value] = {}
    variables: dict[str, int] = {}
    outputs_used: dict[int, int] = {}  # how many outputs of each node are used, counted from the first
    for number, place in [*model.symbol.heads, *(value for node in nodes for value in node.inputs)]:
        outputs_used[number] = max(outputs_used.get(number, 1), place + 1)
    # Plain arithmetic has other dtypes than MXNet's where arrays are integers.
    has_integers = any("int" in node.attrs.get("dtype", "") or "bool" in node.attrs.get("dtype", "") for node in nodes)
    for number, node in enumerate(nodes):
        if node.is_variable:
            same[number, 0] = variables.setdefault(node.name, number), 0
            continue
        call = _Call(model, number, shapes, same)
        is_common = node.op in _COMMON and not (has_integers and node.op in _OF_FLOATS)
        is_common = is_common and node.op not in user_operators
        form = _COMMON[node.op](call) if is_common else None
        if form is None:
            if node.op not in rare:
                word = re.sub(r"\W", "_", node.op.strip("_").lower(), flags=re.ASCII)
                rare[node.op] = free_name(f"mx_{word}", taken)
            count = min(outputs_used.get(number, 1), _MOST_OUTPUTS) if node.op in user_operators else 0
            form = _rare(call, rare[node.op], count)
        else:
            count = 0
        if isinstance(form, str):
            count = count or min(call.operator.outputs(call.attrs), _MOST_OUTPUTS)
            outputs = tuple((number, place) for place in range(count))
            lines.append(Line(form, tuple(call.inputs), outputs, tuple(call.slots), node.op))
        else:
            same[number, 0] = form
    heads = tuple(same.get(head, head) for head in model.symbol.heads)
    for number, place in dict.fromkeys(heads):
        if nodes[number].is_variable and nodes[number].name in model._arrays:  # an array itself is an output
            call = _Call(model, number, shapes, same)
            lines.append(Line(call.array(nodes[number].name), (), ((number, place),), tuple(call.slots), "null"))
    made = {value for line in lines for value in line.outputs}
    for number, place in {*heads, *(value for line in lines for value in line.inputs)} - made:
        if not (node := nodes[number]).is_variable:
            raise CheckpointError(f"the symbol is damaged: {node} has no output {place}")
    return lines, heads, rare


class _Call:
    """A node that becomes a line. Its methods give the texts of the form, and collect the inputs and slots."""

    def __init__(self, model: Model, number: int, shapes: Mapping[str, tuple[int, ...]], same: Mapping[Value, Value]):
        self.node, self.number, self._shapes = model.symbol.nodes[number], number, shapes
        self.operator, attrs = model._operators.get(number, (_VARIABLE, {}))
        defaults = {name: parameter.default for name, parameter in self.operator.attributes.items()}
        self.attrs = {**defaults, **attrs}
        if self.attrs.get("layout") in ("None", "NCW", "NCHW", "NCDHW"):
            self.attrs["layout"] = None
        # Of the attributes of the file those that are no defaults.
        self.non_default = {
            key: self.attrs[key] for key in attrs if key not in defaults or repr(self.attrs[key]) != repr(defaults[key])
        }
        self.refs = [same.get(ref, ref) for ref in self.node.inputs]
        named = [model.symbol.nodes[i] for i, _ in self.node.inputs]
        self.arrays = [node.name if node.is_variable and node.name in model._arrays else None for node in named]
        self.before = named[0] if named else None
        self.inputs: list[Value] = []
        self.slots: list[Slot] = []

    def slot(self, kind: str, key: str, value: object, default: object = POSITION) -> str:
        self.slots.append(Slot(kind, key, value, default))
        return f"{{s[{len(self.slots) - 1}]}}"

    def value(self, place: int = 0) -> str:
        name = self.arrays[place]
        if name is not None:
            return self.array(name)
        self.inputs.append(self.refs[place])
        return f"{{v[{len(self.inputs) - 1}]}}"

    def array(self, name: str) -> str:
        if name not in self._shapes:
            raise ValueError(f"the shape of {name!r} is unknown; give the params file too, or the shapes of the inputs")
        return f"net.array({self.slot('name', 'name', name)}, *{self.slot('value', 'shape', self._shapes[name])})"

    def values(self, between: str = ", ") -> str:
        return between.join(self.value(place) for place in range(len(self.refs)))

    def layer(self, function: str, endings: str = "", without: tuple[str, ...] = (), by: str = "") -> str | None:
        """A call of a layer of `_port_layers`. None where it cannot say what the node does, which is a rare one then.

        Args:
            endings: of the names of its arrays.
            without: attributes that say nothing here.
            by: what the layer is told so.
        """
        # A layer has one name for its arrays: "conv1" for "conv1_weight" and "conv1_bias".
        expected = [ending for ending in endings.split() if not (ending == "bias" and self.attrs["no_bias"])]
        weights = self.arrays[1:]
        name = (weights[0] or "").removesuffix(f"_{expected[0]}") if weights else ""
        if weights != [f"{name}_{ending}" for ending in expected]:
            return None
        # And it must have all attributes that the file sets.
        parameters = inspect.signature(getattr(_port_layers, function)).parameters
        if not parameters.keys() >= self.non_default.keys() - {*without}:
            return None

        # Its arguments, in its own order. Each text but the first begins with a comma, for a slot that has its default
        # is left out with its comma.
        text = ""
        value: Any
        for key, parameter in parameters.items():
            match key:
                case "net":
                    text += ", net"
                    continue
                case "x":
                    text += f", {self.value()}"
                    continue
                case "name":
                    kind, value = "name", name
                case "key":  # of the random numbers of this node
                    kind, value = "index", self.number
                case "by":
                    kind, value = "value", by
                case _:
                    is_size = key.startswith("num_") or key.endswith("_dim")
                    kind, value = "size" if is_size else "value", self.attrs[key]
            has_default = parameter.default is not parameter.empty
            if key in _OF_IMAGES and len(set(value)) < 2 and (value or has_default):
                value = value[0] if value else parameter.default  # one number for all axes is written once
            if parameter.kind == parameter.POSITIONAL_OR_KEYWORD:
                text += f", {self.slot(kind, key, value)}"
            else:
                text += self.slot(kind, key, value, parameter.default if has_default else KEYWORD)
        return f"{function}({text.removeprefix(', ')})"


_Form = str | Value | None  # None: the operator of jaxpar is called
_VARIABLE = Operator(lambda: None)


def _batch_norm(call: _Call) -> _Form:
    by = "moving" if (call.arrays[3] or "").endswith("moving_mean") else "running"
    return call.layer("batch_norm", f"gamma beta {by}_mean {by}_var", by=by)


def _pooling(call: _Call) -> _Form:
    a, kind = call.attrs, call.attrs["pool_type"]
    if kind not in ("max", "avg") or a["layout"]:
        return None
    if a["global_pool"]:
        value = call.value()
        axes = "(2, 3)" if len(a["kernel"]) == 2 else f"range(2, {value}.ndim)"
        return f"{value}.{kind.replace('avg', 'mean')}({axes}, keepdims=True)"
    uncounted = kind == "avg" and any(a["pad"])
    return call.layer(f"{kind}_pool", without=("pool_type", *(() if uncounted else ("count_include_pad",))))


_ACTIVATIONS = {
    **{name: f"jax.nn.{of_jax}({{}})" for name, of_jax in ACTIVATIONS.items()},
    "leaky": "jnp.where({0} > 0, {0}, {slope} * {0})",
    "elu": "jax.nn.elu({}, {slope})",
    "selu": "jax.nn.selu({})",
    "gelu": "jax.nn.gelu({}, approximate=False)",
}


def _activation(call: _Call) -> _Form:
    form = _ACTIVATIONS.get(call.attrs["act_type"])
    return form and form.format(call.value(), slope=number_text(call.attrs.get("slope")))


def _softmax_output(call: _Call) -> _Form:
    """Its prediction. The label is left out, for it acts on the gradient only."""
    a, value = call.attrs, call.value()
    if a["multi_output"] or a["preserve_shape"]:
        return f"jax.nn.softmax({value}, axis={1 if a['multi_output'] else -1})"
    before = call.before
    if before and (before.op == "Flatten" or (before.op == "FullyConnected" and "flatten" not in before.attrs)):
        return f"jax.nn.softmax({value})"
    return f"jax.nn.softmax({value}.reshape({value}.shape[0], -1)).reshape({value}.shape)"


def _reshape(call: _Call) -> _Form:
    shape = call.attrs["shape"]
    if call.attrs["reverse"] or min(shape, default=-2) < -1:
        return None
    value = call.value()
    return f"{value}.reshape({', '.join(str(n) if n else f'{value}.shape[{i}]' for i, n in enumerate(shape))})"


def _reduction(call: _Call) -> _Form:
    """MXNet gives an array of one number in place of a scalar, so the first axis must be left."""
    axes = call.attrs["axis"] or (0,)
    if not call.non_default.keys() <= {"axis"} or min(axes) < 1:
        return None
    return f"{call.value()}.{call.node.op.removesuffix('_axis')}({axes[0] if len(axes) == 1 else axes})"


def _same(call: _Call) -> _Form:
    """A node that computes nothing."""
    return call.refs[0] if call.arrays[0] is None else call.value()


def _infix(sign: str) -> Callable[[_Call], _Form]:
    return lambda call: call.values(f" {sign} ")


def _plain(form: str, *attributes: str) -> Callable[[_Call], _Form]:
    """A form of one value, {x}, and of attributes. With attributes, None for a node that has others."""

    def plain(call: _Call) -> _Form:
        if attributes and not call.non_default.keys() <= {*attributes}:
            return None
        texts = {name: number_text(value) for name, value in call.attrs.items()}
        return form.format(x=call.value(), op=call.node.op, **texts)

    return plain


def _rare(call: _Call, name: str, outputs: int) -> str:
    """A call of jaxpar's function, without labels; or of one's own, which gives so many outputs, or more."""
    places = [call.value(place) for place in range(1 if call.operator.labels else len(call.refs))]
    more: list[str] = []  # attributes that are no names
    for key, value in call.non_default.items():
        text = call.slot("value", "value" if outputs else key, value)
        if key.isidentifier() and not keyword.iskeyword(key):
            places.append(f"{key}={text}")
        else:
            more.append(f"{key.replace('{', '{{').replace('}', '}}')!r}: {text}")
    places += ["train=net.train"] if "train" in call.operator.by_model else []
    places += [f"rng=net.key({call.slot('index', 'key', call.number)})"] if "rng" in call.operator.by_model else []
    places += [f"**{{{{{', '.join(more)}}}}}"] if more else []
    form = f"{name}({', '.join(places)})"
    if call.operator.state:
        count = len(call.operator.state)
        names = [call.slot("name", "name", array) for array in call.arrays[-count:]]
        return f"with_statistics(net, {form}, {', '.join(names)})"
    return f"first_outputs({form}, {outputs})" if outputs else form


_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_TABLE: dict[str, Callable[[_Call], _Form]] = {
    "Convolution Convolution_v1": lambda call: call.layer("convolution", "weight bias"),
    "FullyConnected": lambda call: call.layer("dense", "weight bias"),
    "BatchNorm": _batch_norm,
    "Pooling": _pooling,
    "Dropout": lambda call: call.layer("dropout") if call.attrs["p"] else _same(call),
    "Embedding": lambda call: call.layer("embedding", "weight"),
    "Activation LeakyReLU": _activation,
    "SoftmaxOutput Softmax": _softmax_output,
    "LinearRegressionOutput MAERegressionOutput identity _copy": _same,
    "LogisticRegressionOutput sigmoid": _plain("jax.nn.sigmoid({x})"),
    "relu": _plain("jax.nn.relu({x})"),
    "BlockGrad stop_gradient": _plain("lax.stop_gradient({x})"),
    "softmax log_softmax": _plain("jax.nn.{op}({x}, axis={axis})", "axis"),
    "Flatten flatten": _plain("{x}.reshape({x}.shape[0], -1)"),
    "Reshape reshape": _reshape,
    "transpose": lambda call: f"{call.value()}.transpose({', '.join(map(str, call.attrs['axes']))})",
    "SwapAxis swapaxes": _plain("{x}.swapaxes({dim1}, {dim2})"),
    "expand_dims": _plain("jnp.expand_dims({x}, {axis})"),
    "Concat concat": lambda call: f"jnp.concatenate([{call.values()}], axis={call.attrs['dim']})",
    "sum sum_axis mean": _reduction,
    **{f"broadcast_{name} {ARITHMETIC[name][1]}": _infix(sign) for name, sign in _SIGNS.items()},
    **{ARITHMETIC[name][2]: _plain(f"{{x}} {sign} {{scalar}}") for name, sign in _SIGNS.items()},
    "_rminus_scalar _RMinusScalar": _plain("{scalar} - {x}"),
    "_rdiv_scalar _RDivScalar": _plain("{scalar} / {x}"),
}
_COMMON = {name: form for names, form in _TABLE.items() for name in names.split()}
# Where arrays are integers, MXNet cuts numbers to whole ones, and keeps the dtype.
_OF_FLOATS = frozenset(
    name
    for names in _TABLE
    for name in names.split()
    if names.startswith(("broadcast_", "_", "sum", "LogisticRegressionOutput", "softmax", "Activation", "relu"))
)
