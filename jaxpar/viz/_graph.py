"""The plain data that both the picture and the table are drawn from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Node:
    """One layer of a network, or one of its inputs.

    Attributes:
        name: unique in its graph: the layer's name in the parameters or modules where it has one ("conv1"), else
            its kind and a number ("pooling0").
        op: the kind of layer: "Convolution", "FullyConnected", "Activation", ..., "input", "weight", or the name
            of the JAX function or primitive that nothing folds. The gradient of a layer ends in " (backward)".
        detail: what a label adds to the kind ("3x3/1, 20", "relu", "avg, 2x2/2x2"); may be empty.
        shape, dtype: of the (first) output; inside pmap and shard_map those of one device.
        params: how many parameters this layer is the first to use; a weight shared by two layers counts once.
        flops: floating-point operations as XLA counts them; exp, tanh and the like are not among them.
        bytes: of the distinct arrays this layer reads and writes.
        scope: the modules, named scopes, jitted functions and loops it stands in, from the outside in.
        source: "file.py:12 in function", where the user's code makes it.
        weights: the names of the parameters that it uses.
        repeat: how many copies of it were drawn as one; params, flops and bytes are those of all copies.
        equations: how many equations of the jaxpr were folded into it (into each copy).
        outputs: the names of the function's results among its outputs.
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

    @property
    def kind(self) -> str:
        """`op` without the " (backward)" of a gradient."""
        return self.op.removesuffix(BACKWARD)

    @property
    def is_backward(self) -> bool:
        """Whether this is the gradient of a layer."""
        return self.op.endswith(BACKWARD)


BACKWARD = " (backward)"


@dataclass(frozen=True, slots=True)
class Edge:
    """An array that flows from the node named `source` to the node named `target`."""

    source: str
    target: str
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Graph:
    """A function as a graph.

    Attributes:
        nodes: the inputs and the layers, in the order in which they are traced; parameters are not among them.
        edges: the arrays between them.
        weights, weight_edges: the parameters as nodes, and which layer each goes to; drawn with
            `hide_weights=False`.
        total_params: elements of the distinct parameters used, each counted once.
        equations: of the jaxpr, nested ones included.
        scopes: how many copies each scope path stands for, where that is more than one.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    weights: tuple[Node, ...] = ()
    weight_edges: tuple[Edge, ...] = ()
    total_params: int = 0
    equations: int = 0
    scopes: tuple[tuple[tuple[str, ...], int], ...] = ()

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
        """FLOPs of all layers."""
        return sum(node.flops for node in self.nodes)

    def __getitem__(self, name: str) -> Node:
        """The node of this name; KeyError where there is none."""
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
    """ "1.04 GFLOP", "516 kB": three digits and a decimal prefix."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5:
            return f"{number:.3g} {prefix}{unit}"
        number /= 1000
    return f"{number:,.0f} P{unit}"


def common_prefix(paths: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """What all of these scopes begin with."""
    paths = list(paths)
    found = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        found.append(parts[0])
    return tuple(found)
