"""The graph of a symbol file of MXNet, as plain data, and the attributes of its operators.

A symbol file is JSON: nodes in the order of their computation, each with the numbers of the outputs that it takes. All
attributes are strings. Nothing in it is run. Versions 0.8 to 2.0 are read: attributes were called `param` and `attr`
before `attrs`, and running statistics were no nodes of their own before 0.9.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .._core import files
from .._core.files import CheckpointError
from ._operators import BY_ROWS, OPERATORS, Operator

_MOST_BYTES = 1 << 28
# Two parts of a pattern never match the same characters in a row: a text that fails would be tried in all ways.
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d{1,3})?|[-+]?(inf|nan)")
_INTEGER = re.compile(r"([-+]?\d{1,19})L?")  # Python 2 wrote (1L, 2L)
_MOST_NUMBERS = 1024  # of a tuple
_MOST_LEVELS = 8  # of graphs inside of nodes
_TOLERANCE, _TOLERANCE_OF_16_BITS = 1e-4, 1e-2
_WEIGHTS = frozenset(("weight", "bias", "gamma", "beta", "parameters"))  # arrays of an operator that are trained
# What MXNet calls the outputs of operators, where these are not output, output0, output1, ...
_OUTPUTS = {
    "_contrib_MultiBoxTarget": ("loc_target", "loc_mask", "cls_target"),
    **dict.fromkeys(("_contrib_Proposal", "_contrib_MultiProposal"), ("output", "score")),
    "_contrib_hawkesll": ("output", "out_state"),
    "RNN": ("output", "state_output", "statecell_output"),
    "BatchNorm": ("output", "mean", "var"),
    **dict.fromkeys(("LayerNorm", "GroupNorm"), ("output", "mean", "std")),
    **dict.fromkeys(("_npi_concatenate", "_npi_matmul"), ("out",)),
    "_npi_std": ("std",),
    "_npi_var": ("var",),
    "make_loss": ("loss",),
}
_FILLED = frozenset(("_zeros", "_ones", "_full"))
_AXIS_OF_ARGMAX = 905  # the version since which an axis of -1 is the last one

# Of no effect on what is computed: how MXNet runs an operator, and its own marks.
_IGNORED = frozenset(
    "cudnn_tune cudnn_off cudnn_algo_verbose cudnn_algo_fwd cudnn_algo_bwd_data cudnn_algo_bwd_filter workspace"
    " sparse_grad ctx ctx_group force_mirroring mirror_stage num_args key_var_num_args"
    " lstm_state_clip_nan min_calib_range max_calib_range out ndev key forward_stype".split()
)


@dataclasses.dataclass(frozen=True)
class Node:
    """One node of a symbol. A variable has the operator "null".

    Attributes:
        inputs: (number of the node, number of its output) of each value that it takes.
        attrs: what the file says, strings by name.
        subgraphs: of a loop or a branch what it runs. Their variables are the values that the node takes.
    """

    op: str
    name: str
    inputs: tuple[tuple[int, int], ...]
    attrs: Mapping[str, str]
    subgraphs: tuple[Graph, ...] = ()

    @property
    def is_variable(self) -> bool:
        return self.op == "null"

    def __str__(self) -> str:
        return f"{self.op} {self.name!r}"


@dataclasses.dataclass(frozen=True)
class Graph:
    """A symbol: its nodes, each after those that it takes, and its outputs as (number of the node, of its output).

    Attributes:
        version: of the MXNet that wrote it, such as 10901 for 1.9.1. 0 before 0.9.
    """

    nodes: tuple[Node, ...]
    heads: tuple[tuple[int, int], ...]
    version: int


def read_graph(path: Path) -> Graph:
    """The graph of a symbol file. `CheckpointError` if it is none, or damaged."""
    try:
        content = json.loads(files.read(path, _MOST_BYTES).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise CheckpointError(f"{path} is no symbol file of MXNet, or is cut: {reason}") from None
    if not isinstance(content, dict) or not isinstance(content.get("nodes"), list):
        raise CheckpointError(f"{path} is no symbol file of MXNet: it has no list of nodes")
    attrs = content.get("attrs")
    entry = attrs.get("mxnet_version") if isinstance(attrs, dict) else None  # ["int", 10901]
    version = entry[1] if isinstance(entry, list) and len(entry) == 2 and type(entry[1]) is int else 0
    return _graph_of(path, content, version, _MOST_LEVELS)


def _graph_of(path: Path, content: Any, version: int, levels: int) -> Graph:
    """The graph of a file or of a node. Its nodes may have graphs, and these too, down to so many levels."""
    is_graph = isinstance(content, dict) and isinstance(content.get("nodes"), list)
    _check(path, is_graph and levels > 0, f"a graph inside of a node has no nodes, or is the {_MOST_LEVELS}th of them")
    nodes: list[Node] = []
    for number, entry in enumerate(content["nodes"]):
        node = _read_node(path, number, entry, nodes)
        inside = entry.get("subgraphs", [])
        _check(path, isinstance(inside, list), f"the graphs of node {number} are no list")
        subgraphs = tuple(_graph_of(path, each, version, levels - 1) for each in inside)
        nodes.append(dataclasses.replace(node, subgraphs=subgraphs))
    heads = _references(path, "the outputs", content.get("heads"), len(nodes))
    _check(path, bool(heads), "it has no outputs")
    return Graph(tuple(nodes), heads, version)


def _read_node(path: Path, number: int, node: Any, before: list[Node]) -> Node:
    name = f"node {number}"
    has_names = isinstance(node, dict) and isinstance(node.get("op"), str) and isinstance(node.get("name"), str)
    _check(path, has_names, f"{name} has no name or no operator")
    attrs: dict[str, str] = {}
    for key in ("attr", "param", "attrs"):
        of_key = node.get(key) or {}
        has_strings = isinstance(of_key, dict) and all(isinstance(value, str) for value in of_key.values())
        _check(path, has_strings, f"the attributes of {name} are no strings by name")
        attrs |= of_key
    inputs = _references(path, name, node.get("inputs", []), len(before))
    _check(path, node["op"] != "null" or not inputs, f"{name} is a variable and takes {len(inputs)} values")
    has_further = any(number and before[i].is_variable for i, number in inputs)
    _check(path, not has_further, f"{name} takes a further output of a variable")
    return Node(node["op"], node["name"], inputs, attrs)


def _references(path: Path, name: str, entries: Any, count: int) -> tuple[tuple[int, int], ...]:
    """Pairs (node, output) of the first `count` nodes. A third number, a version, is left out."""
    pairs: list[tuple[int, int]] = []
    listed: list[Any] = entries if isinstance(entries, list) else [None]  # None is no pair
    for entry in listed:
        is_pair = isinstance(entry, list) and len(entry) in (2, 3) and all(type(n) is int for n in entry)
        _check(path, is_pair, f"{name} has no list of pairs of numbers")
        is_there = 0 <= entry[0] < count and entry[1] >= 0
        _check(path, is_there, f"{name} takes output {entry[1]} of node {entry[0]}")
        pairs.append((entry[0], entry[1]))
    return tuple(pairs)


def _check(path: Path, is_sound: bool, problem: str) -> None:
    if not is_sound:
        raise CheckpointError(f"{path} is damaged: {problem}")


def parse_attributes(operator: Operator, node: Node) -> dict[str, Any]:
    """The attributes of a node as arguments of its operator, by the types of these."""
    # The annotation of the operator's argument says how its text is read. What says how MXNet runs an operator, and a
    # user's own marks, are left out.
    parameters = operator.attributes
    takes_any = any(p.kind == p.VAR_KEYWORD for p in operator.parameters.values())
    values: dict[str, Any] = {}
    for name, text in node.attrs.items():
        if name in parameters:
            form = parameters[name].annotation
            form = form if isinstance(form, str) else inspect.formatannotation(form)
            values[name] = parse(text, form, f"{node}: attribute {name}")
        elif name.startswith("__") or name.endswith(("lr_mult", "wd_mult")) or (name in _IGNORED and not takes_any):
            continue
        elif takes_any:
            values[name] = text
        else:
            raise ValueError(f"{node} has an unknown attribute {name}={text[:100]!r}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in values:
            raise ValueError(f"{node} has no attribute {name}")
    return values


def parse(text: str, form: str, what: str) -> Any:
    """The value of an attribute. `form` is the annotation of the argument; a string for one that has none."""
    text = text.strip()
    if "None" in form and text in ("None", ""):
        return None
    if form.startswith("bool") and text in ("True", "true", "1", "False", "false", "0"):
        return text in ("True", "true", "1")
    if form.startswith("int") and (match := _INTEGER.fullmatch(text)):
        return int(match[1])
    if form.startswith("float") and _NUMBER.fullmatch(text):
        return float(text)
    if form.startswith("tuple[float") and (numbers := _float_tuple(text)) is not None:
        return numbers
    if (
        form.startswith("tuple")
        and "float" not in form
        and (integers := _tuple(text, "int | None" in form)) is not None
    ):
        return integers
    if form.startswith(("bool", "int", "float", "tuple")):
        raise ValueError(f"{what} must be of the form {form}, got {text[:100]!r}")
    return text


def _tuple(text: str, holes: bool) -> tuple[int | None, ...] | None:
    """The integers of "(1, 2)", "[1, 2]" or "1". None: it is no such text."""
    inner = text[1:-1] if text[:1] + text[-1:] in ("()", "[]") else text
    items = [item.strip() for item in inner.split(",", _MOST_NUMBERS)]
    if items[-1] == "":
        items.pop()
    integers: list[int | None] = []
    for item in items:
        match = _INTEGER.fullmatch(item)
        if match is None and not (holes and item == "None"):
            return None
        integers.append(int(match[1]) if match else None)
    return tuple(integers) if len(integers) <= _MOST_NUMBERS else None


def _float_tuple(text: str) -> tuple[float, ...] | None:
    """The numbers of "(0.5, 1)", "[0.5, 1]" or "0.5". None: it is no such text."""
    inner = text[1:-1] if text[:1] + text[-1:] in ("()", "[]") else text
    items = [item.strip() for item in inner.split(",", _MOST_NUMBERS)]
    if items[-1] == "":
        items.pop()
    is_sound = len(items) <= _MOST_NUMBERS and all(_NUMBER.fullmatch(item) for item in items)
    return tuple(float(item) for item in items) if is_sound else None


# The operators of the nodes, and the roles of the variables.

Table = dict[int, tuple[Operator, Mapping[str, Any]]]


def with_operators(path: Path, graph: Graph, user_operators: Mapping[str, Callable[..., Any]]) -> tuple[Graph, Table]:
    """The graph as the newest MXNet would have it, and the operator of each node with its attributes."""
    operators = OPERATORS | {name: Operator(fn) for name, fn in user_operators.items()}
    missing: dict[str, list[str]] = {}
    for node in graph.nodes:
        if not node.is_variable and node.op not in operators:
            missing.setdefault(node.op, []).append(node.name)
    if missing:
        nodes = "; ".join(f"{op} in {', '.join(map(repr, names))}" for op, names in missing.items())
        hint = "Give operators={name: function}, and to the command `jaxpar port` --operator NAME=MODULE:FUNCTION"
        raise ValueError(f"{path} has operators that are unknown here: {nodes}. {hint}")
    # Upgraded first: variables that are added change the numbers of the nodes, by which the table has them.
    graph = _upgraded(graph, operators)
    table: Table = {}
    for number, node in enumerate(graph.nodes):
        if not node.is_variable:
            operator = operators[node.op]
            _check_count(path, node, operator)
            table[number] = operator, parse_attributes(operator, node)
    return graph, table


def _upgraded(graph: Graph, operators: Mapping[str, Operator]) -> Graph:
    """A graph of an old version in the form of 1.0: running statistics are variables too."""
    nodes: list[Node] = []
    moved: list[int] = []
    for node in graph.nodes:
        inputs = tuple((moved[i], k) for i, k in node.inputs)
        operator = operators.get(node.op)
        if operator and operator.state and len(inputs) == len(operator.slots) - len(operator.state):
            for name in operator.state:
                inputs += ((len(nodes), 0),)
                nodes.append(Node("null", f"{node.name}_{name}", (), {}))
        attrs = dict(node.attrs)
        if graph.version < _AXIS_OF_ARGMAX and node.op in ("argmax", "argmin") and attrs.get("axis") == "-1":
            del attrs["axis"]  # meant all axes
        moved.append(len(nodes))
        nodes.append(dataclasses.replace(node, inputs=inputs, attrs=attrs))
    return Graph(tuple(nodes), tuple((moved[i], k) for i, k in graph.heads), graph.version)


def _check_count(path: Path, node: Node, operator: Operator) -> None:
    """`CheckpointError` for a node that takes too few or too many arrays."""
    parameters, count = operator.parameters, len(node.inputs)
    least = sum(parameters[name].default is inspect.Parameter.empty for name in operator.slots)
    several = any(p.kind == p.VAR_POSITIONAL for p in parameters.values())
    fits = count >= max(least, several) and (count <= len(operator.slots) or several)
    _check(path, fits, f"{node} takes {count} arrays")


def check_shapes(path: Path, graph: Graph, table: Table, inputs: Sequence[str]) -> None:
    """`ValueError` where MXNet infers a 0 in the shape of an array of zeros or ones, and here it stays open.

    It is 1 here. That is right up to the operator that broadcasts it to what follows from an input of the network.
    """
    begun: dict[int, Node] = {}  # the array of which an open value is made
    of_inputs: set[int] = set()  # what is made of inputs
    names = {*inputs}
    # An open 0 goes on through operators that keep rows, until the network's own input decides it, or nothing does.
    for number, node in enumerate(graph.nodes):
        before = [i for i, _ in node.inputs]
        opened = [begun[i] for i in before if i in begun]
        if node.is_variable:
            of_inputs |= {number} if node.name in names else set()
        elif node.op in _FILLED and 0 in table[number][1].get("shape", ()):
            begun[number] = node
        elif opened and node.op not in BY_ROWS:
            raise ValueError(_open(path, opened[0], f"{node} takes it"))
        elif of_inputs.intersection(before):
            of_inputs.add(number)
        elif opened:
            begun[number] = opened[0]
    for number, _ in graph.heads:
        if number in begun:
            raise ValueError(_open(path, begun[number], "it is an output"))


def _open(path: Path, begun: Node, reason: str) -> str:
    hint = "write the number in the symbol file, or give unroll(begin_state=) variables in MXNet"
    return (
        f"{path}: {begun} has a 0 in its shape, {begun.attrs['shape']}, which jaxpar cannot infer as {reason}; {hint}"
    )


def roles(graph: Graph, table: Table) -> tuple[list[str], set[str], set[str]]:
    """Names of variables: running statistics, weights, and those of convolutions."""
    # What an operator updates is a statistic, and what it reads as a weight is trained. The file itself does not say.
    statistics: dict[str, None] = {}
    # Gluon's files have all of these marks for each of its parameters. One alone may be an input's: `AttrScope` gives
    # factors to all variables, and inputs of rows have a storage type.
    gluon = {"__lr_mult__", "__wd_mult__", "__storage_type__"}
    weights: set[str] = {
        node.name
        for node in graph.nodes
        if node.is_variable and ("__init__" in node.attrs or gluon <= node.attrs.keys())
    }
    kernels: set[str] = set()
    for number, (operator, attrs) in table.items():
        # What a loop or a branch trains is what its graphs train.
        of_graphs = {place for subgraph in attrs["subgraphs"] for place in subgraph.weights} if operator.graphs else ()
        for place, (i, _) in enumerate(graph.nodes[number].inputs):
            slot = operator.slots[place] if place < len(operator.slots) else ""
            name = graph.nodes[i].name
            if not graph.nodes[i].is_variable:
                continue
            if slot in operator.state:
                statistics[name] = None
            # UpSampling takes a weight if it is bilinear, and else any number of images.
            if place and slot in _WEIGHTS and attrs.get("sample_type") != "nearest":
                weights.add(name)
                kernels |= {name} if slot == "weight" and operator.last and operator.last(attrs) else set()
            weights |= {name} if place in of_graphs else set()
    return list(statistics), weights, kernels


def needed_nodes(
    graph: Graph, table: Mapping[int, tuple[Operator, Mapping[str, Any]]], heads: Sequence[tuple[int, int]]
) -> frozenset[int]:
    """The nodes that these outputs are computed of. Labels of loss layers are none, nor what is before."""
    needed = {number for number, _ in heads}
    for number in range(len(graph.nodes) - 1, -1, -1):
        if number in needed and number in table:
            inputs = graph.nodes[number].inputs
            needed.update(i for i, _ in (inputs[:1] if table[number][0].labels else inputs))
    return frozenset(needed)


def labels_of(graph: Graph, number: int) -> frozenset[str]:
    """The names of the variables that the label of a loss layer is computed of."""
    visited = set[int]()
    waiting = [i for i, _ in graph.nodes[number].inputs[1:]]
    while waiting:
        if (i := waiting.pop()) not in visited:
            visited.add(i)
            waiting += [j for j, _ in graph.nodes[i].inputs]
    return frozenset(graph.nodes[i].name for i in visited if graph.nodes[i].is_variable)


def output_names(graph: Graph) -> tuple[str, ...]:
    """MXNet's names: "fc_output", and numbered where a node has several."""
    several = {i for i, k in graph.heads if k}
    names: list[str] = []
    for i, k in graph.heads:
        node = graph.nodes[i]
        word = f"output{k if i in several else ''}"
        word = _OUTPUTS[node.op][k] if k < len(_OUTPUTS.get(node.op, ())) else word
        names.append(node.name if node.is_variable else f"{node.name}_{word}")
    return tuple(names)


# Where a network differs from MXNet's own outputs: the first layer, and by how much.


@dataclasses.dataclass(frozen=True)
class Difference:
    """A layer whose output is not MXNet's. Its text says the same.

    Attributes:
        name, op: of the node.
        shape, expected_shape: of its output here, and in MXNet.
        max_abs: the largest difference. NaN where the shapes differ.
        relative: that over the largest absolute value of MXNet's output.
        index: where it is. value, expected: the numbers there, here and in MXNet.
        equal: how many layers before it give what they give in MXNet.
    """

    name: str
    op: str
    shape: tuple[int, ...]
    expected_shape: tuple[int, ...]
    max_abs: float
    relative: float
    index: tuple[int, ...]
    value: float
    expected: float
    equal: int

    def __str__(self) -> str:
        before = f"{self.op} {self.name!r} differs from MXNet, after {self.equal} equal layers: "
        if self.shape != self.expected_shape:
            return f"{before}its output has the shape {self.shape}, in MXNet {self.expected_shape}"
        at = f"{self.value:.7g} in place of {self.expected:.7g} at {self.index}"
        return f"{before}by up to {self.max_abs:.3g}, {self.relative:.2g} of the largest value: {at}, {self.shape}"


def first_difference(
    graph: Graph,
    run: Callable[[int, Sequence[Any]], Sequence[Any]],
    arrays: Mapping[str, Any],
    reference: Mapping[str, Any],
    tolerance: float | None,
) -> Difference | None:
    """The first node whose output is not that of the reference, where each gets the values of the reference.

    `run` gives the outputs of a node, of its number and the values that it takes. `arrays` are those of variables.
    """
    values: list[list[Any]] = []
    equal = 0
    for number, node in enumerate(graph.nodes):
        if node.is_variable:
            values.append([arrays.get(node.name)])
            continue
        # A label that is not given leaves what is computed of it without outputs.
        outputs = list(run(number, [values[i][k] if k < len(values[i]) else None for i, k in node.inputs]))
        for k, output in enumerate(outputs):
            words = (*_OUTPUTS.get(node.op, ("output",))[k : k + 1], f"output{k}")
            names = [f"{node.name}_{word}" for word in words]
            expected = next((np.asarray(reference[name]) for name in names if name in reference), None)
            if expected is None:
                continue
            if node.op in _FILLED:  # a 0 in its shape is 1 here
                output = np.broadcast_to(output, expected.shape)
            if (difference := _difference(node, np.asarray(output), expected, tolerance, equal)) is not None:
                return difference
            outputs[k], equal = expected, equal + 1  # so that the next layer is given what it is given in MXNet
        values.append(outputs)
    if not equal:
        raise ValueError(f"Model.compare: the reference has no output of the network, but {list(reference)[:8]}")
    return None


def _difference(
    node: Node, output: np.ndarray, expected: np.ndarray, tolerance: float | None, equal: int
) -> Difference | None:
    # Relative to the largest value of the layer: small values beside it carry its rounding. Infinities and NaN are
    # equal to themselves.
    shapes = output.shape, expected.shape
    if output.shape != expected.shape:
        return Difference(node.name, node.op, *shapes, np.nan, np.nan, (), np.nan, np.nan, equal)
    if tolerance is None:
        tolerance = _TOLERANCE_OF_16_BITS if min(output.dtype.itemsize, expected.dtype.itemsize) == 2 else _TOLERANCE
    a, b = output.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore"):  # inf - inf
        gap = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.abs(a - b))
    gap = np.where(np.isnan(gap), np.inf, gap)
    largest = float(np.abs(b[np.isfinite(b)]).max(initial=0))
    if gap.max(initial=0) <= tolerance * largest:
        return None
    at = np.unravel_index(gap.argmax(), gap.shape)
    relative = float(gap[at]) / largest if largest else np.inf
    index = tuple(int(i) for i in at)
    return Difference(node.name, node.op, *shapes, float(gap[at]), relative, index, float(a[at]), float(b[at]), equal)
