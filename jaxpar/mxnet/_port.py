"""A network of MXNet as the text of a Python module in plain JAX.

Read `port` first. Each node becomes a `Line`, an assignment whose numbers and names are still open (`_lines_of`, with
the table at the end of the file). `_port_blocks.fold` finds what repeats among the lines, and writes the text. The
layers that the text calls are copied from `_port_layers`, so the module needs jaxpar for rare operators only.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import importlib
import inspect
import itertools
import keyword
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._core import files
from .._core.files import CheckpointError
from . import _port_layers
from ._control import LOCATIONS
from ._graph import Graph, Node
from ._layers import ACTIVATIONS
from ._operators import ARITHMETIC
from ._port_blocks import KEYWORD, POSITION, Line, Slot, Value, fold, free_name, functions_of
from ._port_text import formatted, text_of
from ._symbol import Model, Subgraph, load_symbol

_MOST_OUTPUTS = 10_000  # of a node
_LONGEST_IDENTIFIER = 36  # two of them and an operator fit in a line
_OF_IMAGES = ("kernel", "stride", "pad", "dilate")  # one number where it is the same for all axes

# Names of the module itself, which no input may have.
_RESERVED = (
    "net params state train rng arrays array shapes jax jnp lax math operator load_params network apply init Any"
    " NamedTuple self rngs nnx outputs Network arrays_of dict zip len range tuple float isinstance _ __debug__ l I O"
).split() + list(vars(_port_layers))
# Modules that the written one has by these names; functions that are copied may use them.
_MODULES = {"jax": "jax", "jnp": "jax.numpy", "lax": "jax.lax", "math": "math", "nnx": "flax.nnx"}
_MODULE = '''"""{name} in {kind}, written by `jaxpar port`.

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

    inputs = [{each}]
    jax.eval_shape(lambda: network(Net(array, {{}}, False, None), *inputs))
    keys = dict(zip(shapes, jax.random.split(rng, len(shapes))))
    new = {{name: new_array(keys[name], name, shape) for name, shape in shapes.items()}}
    return split(new)


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
        self.params = nnx.Dict(
            {{name: nnx.Param(jnp.asarray(array)) for name, array in params.items()}}
        )
        state = state or {{}}
        self.statistics = nnx.Dict(
            {{name: nnx.BatchStat(jnp.asarray(array)) for name, array in state.items()}}
        )
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
    operators come from `mxnet.operator`. `jaxpar port` writes the text to a file. It is as `ruff format` writes it, in
    lines of 88 characters, but for a function of `operators` that is copied.

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

    # The nodes as lines. Operators that no line of JAX says are jaxpar's, or one's own.
    taken = dict.fromkeys(_RESERVED, 1)
    shared = _Shared(user_operators, taken, any(map(_is_of_integers, _all_nodes(model.symbol))))
    lines, heads = _lines_of(model, all_shapes, shared)
    # The graphs inside of nodes are functions of the arrays of their node. The list grows by the graphs inside of them.
    graphs = [(name, graph, *_lines_of(graph.model, {}, shared)) for name, graph in shared.graphs]
    forms = " ".join({line.form for of_graph in (lines, *(each[2] for each in graphs)) for line in of_graph})
    rare = {op: name for op, name in shared.rare.items() if f"{name}(" in forms}  # else of labels alone
    imports, assignments, own_functions = _rare_operators(rare, user_operators)
    taken |= dict.fromkeys(imports, 1)

    # What repeats among the lines as functions and loops, and what they call of jaxpar's layers.
    used = {value for value in [*heads, *(value for line in lines for value in line.inputs)] if value[1] == 0}
    variables = [(number, node.name) for number, node in enumerate(model.symbol.nodes) if node.is_variable]
    inputs = {(n, 0): name for n, name in variables if (n, 0) in used and name not in model._arrays}
    functions, items = fold(lines, list(inputs), heads, taken)
    graph_texts = [_texts_of_graph(*each, taken) for each in reversed(graphs)]  # the innermost first
    names = {value: _identifier(name, taken) for value, name in inputs.items()}
    function_texts = [*itertools.chain(*graph_texts), *functions_of(functions, items, names, heads)]
    copied = _copied("\n".join(function_texts))
    statistics = {name for name, kind in model._arrays.items() if kind == "aux"}
    _, by_ending = _port_layers.split(dict.fromkeys(model._arrays))
    if set(by_ending) != statistics:  # the endings of their names do not tell running statistics
        copied = [text for text in copied if not text.startswith("def split(")]
        copied.append(_SPLIT.format(names=", ".join(map(text_of, sorted(statistics)))))

    # The module around them.
    text = "\n\n\n".join([*copied, *function_texts])
    needed = ["import math", "from typing import Any, NamedTuple", "import jax", "import jax.numpy as jnp"]
    needed += ["from jax import lax"] if "lax." in "".join([text, *own_functions]) else []
    needed += ["from flax import nnx"] if nnx or "nnx." in "".join(own_functions) else []
    needed += [f"from jaxpar.mxnet import load_params{', operator' if rare.keys() - user_operators else ''}"]
    defaults = [
        names[v] + (f"={text_of(all_shapes[name])}" if name in all_shapes else "") for v, name in inputs.items()
    ]
    module = (_MODULE + (_NNX if nnx else "")).format(
        name=re.sub(r"[^\w.-]", "_", files.as_path(symbol_file, "mxnet.port: symbol_file").name),
        kind="Flax's nnx" if nnx else "plain JAX",
        imports="\n".join([_import_block([*needed, *imports.values()]), *assignments]),
        text=text,
        inputs="".join(f"{name}, " for name in names.values()),
        after="".join(f", jnp.asarray({name})" for name in names.values()),
        each=", ".join(f"jnp.zeros({name})" for name in names.values()),
        given="".join(f", {default}" for default in sorted(defaults, key=lambda default: "=" in default)),
        load=inspect.getsource(_port_layers.load),
    )
    return "\n\n".join([formatted(module), *(f"{function}\n" for function in own_functions)])


def _texts_of_graph(
    name: str, graph: Subgraph, lines: list[Line], heads: Sequence[Value], taken: dict[str, int]
) -> list[str]:
    """The functions of a graph inside of a node. The last one takes the values of its variables."""
    nodes = enumerate(graph.model.symbol.nodes)
    inputs = {(number, 0): node.name for number, node in nodes if node.is_variable}
    functions, items = fold(lines, list(inputs), heads, taken)
    local = dict(taken)  # other functions may have such names too
    names = {value: _identifier(of_value, local) for value, of_value in inputs.items()}
    return functions_of(functions, items, names, heads, name)


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
    text = re.sub(r"\W|^(?=\d)", "_", name, flags=re.ASCII)[:_LONGEST_IDENTIFIER] or "_"
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


def _rare_operators(
    rare: Mapping[str, str], user_operators: Mapping[str, Callable[..., Any]]
) -> tuple[dict[str, str], list[str], list[str]]:
    """What gives a module its rare operators: imports by the names that they bind, assignments, and functions."""
    imports: dict[str, str] = {}
    ours: list[str] = []
    own: list[str] = []
    functions: list[str] = []
    for op, name in rare.items():
        if op not in user_operators:
            ours.append(f"{name} = operator({text_of(op)})")
        elif (path := _import_path(user_operators[op])) is not None:
            module, first, *attributes = path
            imports[name] = f"from {module} import {first} as {name}"
            own += [f"{name} = {'.'.join([name, *attributes])}"] if attributes else []
        else:
            text, modules = _copy_of(op, user_operators[op], name)
            functions.append(text)
            for alias, module in modules.items():
                line = f"import {module}" if alias == module else f"import {module} as {alias}"
                if imports.setdefault(alias, line) != line:
                    raise ValueError(f"mxnet.port: functions of `operators` mean several modules by {alias}")
    assignments = ["", "# Operators that are rare: jaxpar's functions, with MXNet's arguments.", *ours] if ours else []
    return imports, [*assignments, *(["", "# Operators of one's own.", *own] if own else [])], functions


def _import_block(imports: Iterable[str]) -> str:
    """Imports in the order of isort: the standard library first, `import x` before `from x`, each by name."""

    def place(line: str) -> tuple[bool, bool, str, str]:
        word, module, *_ = line.split()
        return module.partition(".")[0] not in sys.stdlib_module_names, word == "from", module.lower(), line

    sections = itertools.groupby(sorted({*imports}, key=place), key=lambda line: place(line)[0])
    return "\n\n".join("\n".join(section) for _, section in sections)


def _import_path(fn: Callable[..., Any]) -> list[str] | None:
    """The module of a function, and the names that lead to it there. None: it cannot be imported."""
    module, path = getattr(fn, "__module__", None) or "__main__", getattr(fn, "__qualname__", "").split(".")
    if module == "__main__" or not all(word.isidentifier() for word in path):
        return None
    found: Any = importlib.import_module(module)
    for word in path:
        found = getattr(found, word, None)
    return [module, *path] if found is fn else None


def _copy_of(op: str, fn: Callable[..., Any], name: str) -> tuple[str, dict[str, str]]:
    """The definition of a function under another name, and the modules that it uses by its names for them."""
    # It may use nothing of its file but modules. Several lambdas may stand in one line: the places of its instructions
    # in the source say which of them it is.
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
    modules = {each: around[each].__name__ for each in sorted(names) if inspect.ismodule(around.get(each))}
    ours = {each for each, module in modules.items() if _MODULES.get(each) == module}
    modules = {each: module for each, module in modules.items() if each not in _RESERVED}
    of_file = {n for n in names - modules.keys() - ours if n in around or not hasattr(builtins, n)}
    if of_file := sorted(of_file | (names & {*code.co_freevars})):
        raise ValueError(
            f"mxnet.port: operators[{op!r}] is no function that can be imported, and uses {', '.join(of_file)} of its "
            f"own file; {hint}"
        )
    for argument in ast.walk(definition.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    if isinstance(definition, ast.Lambda):
        function = ast.FunctionDef(name, definition.args, [ast.Return(definition.body)], [])
    else:
        function, definition.name, definition.returns = definition, name, None
    return ast.unparse(ast.fix_missing_locations(function)), modules


# The nodes of a symbol as lines: which function of JAX, or of the written module, each of them calls.


@dataclasses.dataclass
class _Shared:
    """What all lines of a module have in common.

    Attributes:
        taken: the names of the module, to which those of operators and graphs are added.
        has_integers: plain arithmetic has other dtypes than MXNet's where arrays are integers.
        rare: the names of rare operators by MXNet's.
        graphs: those inside of nodes, by the names of their functions.
    """

    user_operators: Mapping[str, Callable[..., Any]]
    taken: dict[str, int]
    has_integers: bool
    rare: dict[str, str] = dataclasses.field(default_factory=dict)
    graphs: list[tuple[str, Subgraph]] = dataclasses.field(default_factory=list)

    def text_of_graph(self, node: Node, graph: Subgraph) -> str:
        """A graph as an argument of the operator that runs it."""
        inside = (each.attrs.get("__subgraph_name__") for each in graph.model.symbol.nodes)  # as the script called it
        name = _identifier(next(filter(None, inside), node.name), self.taken)
        self.graphs.append((name, graph))
        return f"part({', '.join(['net', name, *map(str, graph.places)])})"


def _all_nodes(graph: Graph) -> Iterator[Node]:
    for node in graph.nodes:
        yield node
        for subgraph in node.subgraphs:
            yield from _all_nodes(subgraph)


def _is_of_integers(node: Node) -> bool:
    return any(word in node.attrs.get("dtype", "") for word in ("int", "bool"))


def _lines_of(
    model: Model, shapes: Mapping[str, tuple[int, ...]], shared: _Shared
) -> tuple[list[Line], tuple[Value, ...]]:
    """The lines of a network that its outputs need, and these outputs.

    `shapes` are those of the arrays that no common layer makes, by name. What the lines call is added to `shared`.
    """
    nodes = model.symbol.nodes
    lines: list[Line] = []
    # A node that computes nothing here, such as `identity`, has no line: its output is that of the node before. And a
    # variable that is there twice is one value.
    same: dict[Value, Value] = {}
    variables: dict[str, int] = {}
    outputs_used: dict[int, int] = {}  # how many outputs of each node are used, counted from the first
    for number, place in [*model.symbol.heads, *(value for node in nodes for value in node.inputs)]:
        outputs_used[number] = max(outputs_used.get(number, 1), place + 1)
    for number, node in enumerate(nodes):
        if node.is_variable:
            same[number, 0] = variables.setdefault(node.name, number), 0
            continue
        call = _Call(model, number, shapes, same)
        is_common = node.op in _COMMON and not (shared.has_integers and node.op in _OF_FLOATS)
        is_common = is_common and node.op not in shared.user_operators
        form = _COMMON[node.op](call) if is_common else None
        if form is None:
            if node.op not in shared.rare:
                word = re.sub(r"\W", "_", node.op.strip("_").lower(), flags=re.ASCII)
                shared.rare[node.op] = free_name(f"mx_{word}", shared.taken)
            count = min(outputs_used.get(number, 1), _MOST_OUTPUTS) if node.op in shared.user_operators else 0
            graphs = call.attrs.get("subgraphs", ()) if call.operator.graphs else ()
            form = _rare(call, shared.rare[node.op], count, [shared.text_of_graph(node, each) for each in graphs])
        else:
            count = 0
        if isinstance(form, str):
            count = count or min(call.operator.outputs(call.attrs), _MOST_OUTPUTS)
            outputs = tuple((number, place) for place in range(count))
            lines += call.lines
            lines.append(Line(form, tuple(call.inputs), outputs, tuple(call.slots), node.op))
        else:
            same[number, 0] = form
    heads = tuple(same.get(head, head) for head in model.symbol.heads)
    for number, place in dict.fromkeys(heads):
        if nodes[number].is_variable and nodes[number].name in model._arrays:  # an array itself is an output
            lines.append(_line_of_array(nodes[number].name, shapes, (number, place)))
    made = {value for line in lines for value in line.outputs}
    for number, place in {*heads, *(value for line in lines for value in line.inputs)} - made:
        if not (node := nodes[number]).is_variable:
            raise CheckpointError(f"the symbol is damaged: {node} has no output {place}")
    return _needed(lines, heads), heads


def _line_of_array(name: str, shapes: Mapping[str, tuple[int, ...]], output: Value) -> Line:
    slots = Slot("name", "name", name), Slot("shape", "shape", _shape_of(name, shapes))
    return Line("net.array({s[0]}{s[1]})", (), (output,), slots, "null")


def _shape_of(name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    if name not in shapes:
        raise ValueError(f"the shape of {name!r} is unknown; give the params file too, or the shapes of the inputs")
    return shapes[name]


class _Call:
    """A node that becomes a line. Its methods give the texts of the form, and collect the inputs and slots."""

    def __init__(self, model: Model, number: int, shapes: Mapping[str, tuple[int, ...]], same: Mapping[Value, Value]):
        self.node, self.number, self._shapes = model.symbol.nodes[number], number, shapes
        self.operator, attrs = model._operators[number]
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
        self.lines: list[Line] = []  # of arrays that are read before

    def slot(self, kind: str, key: str, value: object, default: object = POSITION) -> str:
        self.slots.append(Slot(kind, key, value, default))
        return f"{{s[{len(self.slots) - 1}]}}"

    def argument(self, place: int = 0) -> str:
        """A value in brackets, or at the end of the form: an array is read where it stands."""
        name = self.arrays[place]
        if name is None:
            return self.operand(place)
        shape = _shape_of(name, self._shapes)
        return f"net.array({self.slot('name', 'name', name)}{self.slot('shape', 'shape', shape)})"

    def operand(self, place: int = 0) -> str:
        """A value anywhere: an array is read in a line before."""
        value, name = self.refs[place], self.arrays[place]
        if name is not None:
            value = self.number, -1 - place
            self.lines.append(_line_of_array(name, self._shapes, value))
        self.inputs.append(value)
        return f"{{v[{len(self.inputs) - 1}]}}"

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
                    text += f", {self.argument()}"
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


def _batch_norm(call: _Call) -> _Form:
    by = "moving" if (call.arrays[3] or "").endswith("moving_mean") else "running"
    return call.layer("batch_norm", f"gamma beta {by}_mean {by}_var", by=by)


def _pooling(call: _Call) -> _Form:
    a, kind = call.attrs, call.attrs["pool_type"]
    if kind not in ("max", "avg") or a["layout"]:
        return None
    if a["global_pool"]:
        value = call.operand()
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
    return form and form.format(call.operand(), slope=text_of(call.attrs.get("slope")))


def _softmax_output(call: _Call) -> _Form:
    """Its prediction. The label is left out, for it acts on the gradient only."""
    a, value = call.attrs, call.argument()
    if a["multi_output"] or a["preserve_shape"]:
        return f"jax.nn.softmax({value}, axis={1 if a['multi_output'] else -1})"
    before = call.before
    if before and (before.op == "Flatten" or (before.op == "FullyConnected" and "flatten" not in before.attrs)):
        return f"jax.nn.softmax({value})"
    return f"softmax_output({value})"


def _reshape(call: _Call) -> _Form:
    shape = call.attrs["shape"]
    if call.attrs["reverse"] or min(shape, default=-2) < -1:
        return None
    value = call.operand()
    return f"{value}.reshape({', '.join(str(n) if n else f'{value}.shape[{i}]' for i, n in enumerate(shape))})"


def _reduction(call: _Call) -> _Form:
    """MXNet gives an array of one number in place of a scalar, so the first axis must be left."""
    axes = call.attrs["axis"] or (0,)
    if not call.non_default.keys() <= {"axis"} or min(axes) < 1:
        return None
    return f"{call.operand()}.{call.node.op.removesuffix('_axis')}({axes[0] if len(axes) == 1 else axes})"


def _concatenate(call: _Call) -> _Form:
    arrays = ", ".join(map(call.argument, range(len(call.refs))))
    return f"jnp.concatenate([{arrays}], axis={call.attrs['dim']})"


def _same(call: _Call) -> _Form:
    """A node that computes nothing."""
    return call.refs[0] if call.arrays[0] is None else call.argument()


def _infix(sign: str) -> Callable[[_Call], _Form]:
    return lambda call: f"{call.operand(0)} {sign} {call.argument(1)}"


def _plain(form: str, *attributes: str) -> Callable[[_Call], _Form]:
    """A form of one value, {x}, and of attributes. With attributes, None for a node that has others."""

    def plain(call: _Call) -> _Form:
        if attributes and not call.non_default.keys() <= {*attributes}:
            return None
        texts = {name: text_of(value) for name, value in call.attrs.items()}
        return form.format(x=call.operand(), op=call.node.op, **texts)

    return plain


def _rare(call: _Call, name: str, outputs: int, graphs: Sequence[str]) -> str:
    """A call of jaxpar's function, without labels; or of one's own, which gives so many outputs, or more.

    `graphs` are those inside of the node.
    """
    places = [call.argument(place) for place in range(1 if call.operator.labels else len(call.refs))]
    more: list[str] = []  # attributes that are no names
    if graphs:
        places.append(f"subgraphs=({', '.join(graphs)}{',' * (len(graphs) == 1)})")
    for key, value in call.non_default.items():
        if graphs and key in LOCATIONS:  # `part` has them
            continue
        is_name = key.isidentifier() and not keyword.iskeyword(key)
        text = call.slot("value", key if is_name and not outputs else "value", value)
        if is_name:
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
    "transpose": lambda call: f"{call.operand()}.transpose({', '.join(map(str, call.attrs['axes']))})",
    "SwapAxis swapaxes": _plain("{x}.swapaxes({dim1}, {dim2})"),
    "expand_dims": _plain("jnp.expand_dims({x}, {axis})"),
    "Concat concat": _concatenate,
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
