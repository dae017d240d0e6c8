"""The plain data that the picture and the table are drawn from."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from ._sizes import Sizes

_Part = TypeVar("_Part")
BACKWARD = " (backward)"
_COPIES = re.compile(r"(((?<=\w)[._ ]|(?<=[^\W\d]))\d+([–-]\d+)?)?( ×\d+)?( \(\d+\))?$")
_LONGEST = 3  # kinds that are all named
_REGIONS = ("scan ×", "while", "cond", "branch ", "pmap ", "shard_map ", "remat", "custom_")


@dataclass(frozen=True, slots=True)
class Node:
    """One layer of a network, or one of its inputs.

    Attributes:
        name: unique in its graph. The name of the parameters or module where there is one ("conv1"), else the kind
            and a number ("pooling0").
        op: the kind of layer: "Convolution", "FullyConnected", "Activation", ..., "input", "weight", or the name of
            the JAX function or primitive that nothing folds. The gradient of a layer ends in " (backward)".
        detail: what a label adds to the kind ("3x3/1, 20", "relu", "avg, 2x2/2x2"). May be empty.
        shape, dtype: of the first output. Inside pmap and shard_map those of one device. An input of several arrays has
            no shape, and a dtype where they share one.
        params: elements of the parameters that it is the first to use. A weight shared by two layers counts once.
            Arrays that no optimizer trains are in `state`.
        flops: floating-point operations as XLA counts them, without exp, tanh and the like.
        bytes: of the distinct arrays that it reads and writes.
        scope: the modules, named scopes, jitted functions and loops around it, from the outside in.
        source: "file.py:12 in function", where the user's code makes it.
        weights: the names of the parameters that it uses.
        repeat: the number of copies that are drawn as one. Params, flops and bytes are those of all copies.
        equations: the number of equations of the jaxpr that were folded into each copy.
        outputs: the names of the function's results among its outputs.
        leaves: of an input with several arrays, "name: dtype[shape]" of each.
        state: elements of the arrays that it is the first to use and that no optimizer trains: running means.
    """

    name: str
    op: str
    detail: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    params: int = 0
    flops: int = 0
    bytes: int = 0
    scope: tuple[str, ...] = ()
    source: str = ""
    weights: tuple[str, ...] = ()
    repeat: int = 1
    equations: int = 0
    outputs: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    state: int = 0

    @property
    def kind(self) -> str:
        """`op` without the " (backward)" of a gradient."""
        return self.op.removesuffix(BACKWARD)

    @property
    def is_backward(self) -> bool:
        """Whether this is the gradient of a layer."""
        return self.op.endswith(BACKWARD)


@dataclass(frozen=True, slots=True)
class Edge:
    """An array that flows between two nodes, or several of them.

    Attributes:
        source, target: the names of the nodes.
        shape, dtype: of the array that its source is known by, else of the largest.
        label: the array's name in its argument ("image"), where the source is an input of several arrays.
        arrays: how many flow here.
        carry: whether it goes back, from one pass of a loop to the next. All other edges go to later nodes.
    """

    source: str
    target: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    label: str = ""
    arrays: int = 1
    carry: bool = False


@dataclass(frozen=True, slots=True)
class Graph:
    """A function as a graph.

    Attributes:
        nodes: the inputs and the layers, in the order in which they can be computed.
        edges: the arrays between them.
        weights, weight_edges: the parameters as nodes, and the layers that read them.
        total_params: elements of the parameters used, each counted once.
        equations: the number of equations of the jaxpr, nested ones included.
        scopes: each repeated scope, and the number of its copies.
        sizes: the bytes of its arrays, and which parameters are trained.
        uncounted: the primitives for which there is no formula. Their FLOPs are missing.
        total_state: elements of the arrays that no optimizer trains, each counted once.
        total_constants: elements of the captured arrays that are no parameters, each counted once, without scalars.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    weights: tuple[Node, ...] = ()
    weight_edges: tuple[Edge, ...] = ()
    total_params: int = 0
    equations: int = 0
    scopes: tuple[tuple[tuple[str, ...], int], ...] = ()
    sizes: Sizes = field(default_factory=Sizes)
    uncounted: tuple[str, ...] = ()
    total_state: int = 0
    total_constants: int = 0

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The nodes that are arguments of the function."""
        return tuple(node for node in self.nodes if node.op == "input")

    @property
    def layers(self) -> tuple[Node, ...]:
        """The nodes that compute something."""
        return tuple(node for node in self.nodes if node.op != "input")

    @property
    def total_flops(self) -> int:
        """The FLOPs of all layers."""
        return sum(node.flops for node in self.nodes)

    def __getitem__(self, name: str) -> Node:
        """The node of this name.

        Raises:
            KeyError: there is none. The message lists the names.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(f"no node named {name!r}; the nodes are {[node.name for node in self.nodes]}")

    def __repr__(self) -> str:
        return (
            f"Graph({len(self.inputs)} inputs, {len(self.layers)} layers, {len(self.edges)} edges, "
            f"{self.total_params:,} parameters, {self.equations:,} equations)"
        )


def human(number: float, unit: str) -> str:
    """A number with three digits and a decimal prefix.

    >>> human(1_040_000_000, "FLOP"), human(516_272, "B")
    ('1.04 GFLOP', '516 kB')
    """
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5:
            return f"{number:.3g} {prefix}{unit}"
        number /= 1000
    return f"{number:,.0f} P{unit}"


def common_prefix(paths: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """The scopes that all of these paths begin with."""
    paths = list(paths)
    found: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        found.append(parts[0])
    return tuple(found)


def main_prefix(paths: Iterable[tuple[tuple[_Part, ...], int]]) -> tuple[_Part, ...]:
    """What the paths begin with that have more than half of the weight.

    >>> main_prefix([(("net", "attn"), 90), (("net", "attn", "mask"), 5), (("net",), 5)]), main_prefix([((), 1)])
    (('net', 'attn'), ())
    """
    paths = list(paths)
    total, found = sum(weight for _, weight in paths), list[_Part]()
    while True:
        weights = Counter[_Part]()
        for path, weight in paths:
            if len(path) > len(found):
                weights[path[len(found)]] += weight
        if not weights or 2 * max(weights.values()) <= total:
            return tuple(found)
        found.append(max(weights, key=weights.__getitem__))
        paths = [(path, weight) for path, weight in paths if path[: len(found)] == tuple(found)]


def is_region(scope: str) -> bool:
    """Whether a scope is a loop, branch, custom gradient or device map."""
    return scope.startswith(_REGIONS)


def name_kinds(layers: Iterable[tuple[str, int]]) -> str:
    """What is in a part of a network, given as kinds and FLOPs. The kind with most FLOPs comes first.

    >>> name_kinds([("Activation", 1), ("Dense", 9), ("Dense", 9)]), name_kinds([("a", 1), ("b", 2), ("c", 3)])
    ('2 Dense, Activation', 'c + 2')
    """
    count, cost = Counter[str](), Counter[str]()
    for kind, flops in layers:
        count[kind] += 1
        cost[kind] += flops
    kinds = sorted(count, key=lambda kind: -cost[kind])
    if len(kinds) < _LONGEST:
        return ", ".join(_counted(kind, count[kind]) for kind in kinds)
    return f"{_counted(kinds[0], count[kinds[0]])} + {count.total() - count[kinds[0]]}"


def _counted(kind: str, number: int) -> str:
    return kind if number == 1 else f"{number} {kind}"


def scope_stem(scope: str) -> str:
    """A scope without its number and copies. A number that counts what is in it stays.

    >>> scope_stem("layers ×32"), scope_stem("layers.7"), scope_stem("block_1–5 ×5"), scope_stem("enc (2)")
    ('layers', 'layers', 'block', 'enc')
    >>> scope_stem("3 Convolution + 7 ×2")
    '3 Convolution + 7'
    """
    return _COPIES.sub("", scope)
