"""A `Graph` as a tree of blocks."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field, replace
from typing import Literal

from .._draw.dot import _clusters, _drawn, _is_residual
from .._draw.labels import join_sign
from .._draw.loops import join_carries
from .._graph import BACKWARD, Edge, Graph, Node, common_prefix

_MOST_ITEMS = 80  # of one block; Graphviz gets slow above
_PART = 30  # items of each part that a larger block is cut into
_TO = " … "  # between the names of the first and the last item of a part

# How arrays flow: along the direction, against it as gradients do, or back to the start of a loop. A pair only joins
# a layer with its gradient.
Kind = Literal["forward", "back", "carry", "pair"]
Key = tuple[int, Kind]  # the node whose array it is, and how it flows
Path = tuple[str, ...]
Text = tuple[str, float, bool]  # a line of text, its size, whether it is bold
_Box = tuple[int, str | None]  # an item, and what colours it


@dataclass(frozen=True, slots=True)
class Port:
    """Where arrays cross the border of a block.

    Attributes:
        keys: the arrays that cross.
        enters: whether they come in.
        is_first: whether it is at the end where the block's forward pass begins.
    """

    keys: frozenset[Key]
    enters: bool
    is_first: bool


@dataclass(slots=True)
class Line:
    """Arrays that flow between two ends. An end is an item or a port of the same block.

    Attributes:
        tail, head: the item, or -1 for a port of the block itself.
        tail_port, head_port: the port of that item or of the block itself, -1 for a node.
        keys: the arrays that flow here.
        label: what is written on it.
        kind: how they flow.
    """

    tail: int
    head: int
    tail_port: int = -1
    head_port: int = -1
    keys: frozenset[Key] = frozenset()
    label: str = ""
    kind: Kind = "forward"


@dataclass(slots=True)
class Block:
    """A part of the network that opens and closes. The first one is the whole network.

    Attributes:
        label: its name.
        path: the scopes from the outside in.
        items: what it holds, nodes and blocks.
        ports: where arrays cross its border, and the number of each.
        lines: what is drawn between them.
        pairs: layers and their gradients, which are side by side.
    """

    label: str
    path: Path
    items: list[int] = field(default_factory=list)
    ports: dict[Port, int] = field(default_factory=dict[Port, int])
    lines: list[Line] = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Flow:
    """An edge that is drawn, with the numbers of its nodes.

    Attributes:
        source, target: nodes.
        edge: what flows.
        kind: how it flows.
    """

    source: int
    target: int
    edge: Edge
    kind: Kind


@dataclass(slots=True)
class Tree:
    """The nodes that are drawn, and the blocks that they are in.

    An item is a number. The nodes come first, then the blocks.

    Attributes:
        nodes, blocks: what is drawn. The first block is the whole network.
        parent: of each item, the item that is its block.
        edges: all edges, those that are not drawn too.
        flows: those that are drawn.
        signs: the nodes that are small circles, and what is in them.
        words: what is written in boxes, as far as it was asked for.
    """

    nodes: list[Node]
    edges: list[tuple[int, int]]
    flows: list[Flow]
    signs: dict[int, str]
    blocks: list[Block] = field(default_factory=lambda: [Block("", ())])
    parent: dict[int, int] = field(default_factory=dict[int, int])
    words: dict[_Box, list[Text]] = field(default_factory=dict[_Box, list[Text]])

    @property
    def root(self) -> int:
        """The item that is the whole network."""
        return len(self.nodes)

    def is_block(self, item: int) -> bool:
        """Whether an item is a block."""
        return item >= self.root

    def block(self, item: int) -> Block:
        """The block that an item is."""
        return self.blocks[item - self.root]

    def name(self, item: int) -> str:
        """The name of a node or block."""
        return self.block(item).label if self.is_block(item) else self.nodes[item].name

    def way_out(self, item: int) -> list[int]:
        """An item and the blocks around it, from the inside out."""
        found = [item]
        while found[-1] in self.parent:
            found.append(self.parent[found[-1]])
        return found

    def nodes_in(self, item: int) -> list[int]:
        """All nodes of a block, at any depth."""
        if not self.is_block(item):
            return [item]
        return [node for inner in self.block(item).items for node in self.nodes_in(inner)]


def tree(graph: Graph, *, hide_weights: bool) -> Tree:
    """The blocks of a graph, without their lines."""
    edges = join_carries(graph.edges) + ([] if hide_weights else list(graph.weight_edges))
    nodes = _drawn(graph, edges) + ([] if hide_weights else _placed_weights(graph))
    number = {node.name: at for at, node in enumerate(nodes)}
    by_name = {node.name: node for node in nodes}
    flows = [
        Flow(number[edge.source], number[edge.target], edge, _kind(by_name, edge))
        for edge in edges
        if not _is_residual(by_name, edge)
    ]
    ends = dict.fromkeys((number[edge.source], number[edge.target]) for edge in edges)
    signs = {number[name]: sign for name, sign in join_sign(graph).items() if name in number}
    found = Tree(nodes, list(ends), flows, signs)
    _nest(found, graph)
    at = 0
    while at < len(found.blocks):  # parts become blocks, which may be cut too
        _cut(found, found.root + at)
        at += 1
    return found


def _placed_weights(graph: Graph) -> list[Node]:
    """The parameters, in the scope of the layers that read them."""
    scopes: dict[str, list[Path]] = {}
    by_name = {node.name: node for node in graph.nodes}
    for edge in graph.weight_edges:
        scopes.setdefault(edge.source, []).append(by_name[edge.target].scope)
    return [replace(weight, scope=common_prefix(scopes.get(weight.name, []))) for weight in graph.weights]


def _kind(by_name: dict[str, Node], edge: Edge) -> Kind:
    if edge.carry:
        return "carry"
    return "back" if by_name[edge.source].is_backward and by_name[edge.target].is_backward else "forward"


def _nest(tree: Tree, graph: Graph) -> None:
    """Put each node into the block of its scope."""
    drawn = _clusters(graph, tree.nodes)
    at: dict[Path, int] = {(): tree.root}
    for number, node in enumerate(tree.nodes):
        inside = tree.root
        for path in (node.scope[:length] for length in range(1, len(node.scope) + 1)):
            if path in drawn:
                at[path] = inside = at[path] if path in at else _add(tree, Block(path[-1], path), inside)
        tree.block(inside).items.append(number)
        tree.parent[number] = inside


def _add(tree: Tree, block: Block, inside: int) -> int:
    item = tree.root + len(tree.blocks)
    tree.blocks.append(block)
    tree.block(inside).items.append(item)
    tree.parent[item] = inside
    return item


def _cut(tree: Tree, item: int) -> None:
    """Cut a block of too many items into parts that follow each other. Inputs stay in sight."""
    block = tree.block(item)
    while len(block.items) > _MOST_ITEMS:
        inputs = [inner for inner in block.items if not tree.is_block(inner) and tree.nodes[inner].op == "input"]
        inputs = inputs if len(inputs) < _PART else []
        ordered = [inner for inner in _in_order(tree, item) if inner not in inputs]
        count = -(-len(ordered) // _PART)
        block.items = inputs
        for start, end in itertools.pairwise(part * len(ordered) // count for part in range(count + 1)):
            part = ordered[start:end]
            label = f"{tree.name(part[0]).split(_TO)[0]}{_TO}{tree.name(part[-1]).split(_TO)[-1]}"
            tree.parent |= dict.fromkeys(part, _add(tree, Block(label, (*block.path, label), part), item))


def _in_order(tree: Tree, item: int) -> list[int]:
    """The items of a block in the order of the drawing. Gradients come with their layers."""
    items = tree.block(item).items
    place = {inner: number for number, inner in enumerate(items)}
    inside = {node: inner for inner in items for node in tree.nodes_in(inner)}
    after: dict[int, set[int]] = {}
    waiting = dict.fromkeys(items, 0)
    for flow in (flow for flow in tree.flows if flow.kind != "carry"):
        ends = inside.get(flow.source), inside.get(flow.target)
        first, then = reversed(ends) if flow.kind == "back" else ends
        if first is None or then is None or first == then or then in after.setdefault(first, set()):
            continue
        after[first].add(then)
        waiting[then] += 1
    ready = [place[inner] for inner in items if not waiting[inner]]
    found: dict[int, None] = {}
    while len(found) < len(items):
        if not ready:  # a circle, which goes on with its first item
            ready = [next(at for at, inner in enumerate(items) if inner not in found)]
        inner = items[heapq.heappop(ready)]
        if inner in found:
            continue
        found[inner] = None
        for then in after.get(inner, ()):
            waiting[then] -= 1
            if waiting[then] == 0:
                heapq.heappush(ready, place[then])
    return _beside(tree, list(found))


def _beside(tree: Tree, items: list[int]) -> list[int]:
    """The same items, each gradient after its layer."""
    place = {tree.name(item): at for at, item in enumerate(items)}
    at = {item: place.get(tree.name(item).split(BACKWARD)[0], place[tree.name(item)]) for item in items}
    return sorted(items, key=at.__getitem__)
