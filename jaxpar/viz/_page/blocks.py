"""A `Graph` as a tree of blocks: the lines of each, and the ports where they cross its border."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Literal

from .._draw.dot import _clusters, _drawn, _forward, _is_residual, _named, carry_label, join_carries
from .._draw.labels import edge_label, join_sign
from .._draw.style import is_update
from .._graph import BACKWARD, Edge, Graph, Node
from .._scopes import common_prefix
from .._searches import order

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
    inside = {node: inner for inner in items for node in tree.nodes_in(inner)}
    before: dict[int, set[int]] = {inner: set() for inner in items}
    for flow in (flow for flow in tree.flows if flow.kind != "carry"):
        ends = inside.get(flow.source), inside.get(flow.target)
        first, then = reversed(ends) if flow.kind == "back" else ends
        if first is not None and then is not None and first != then:
            before[then].add(first)
    return _beside(tree, order(before, {inner: place for place, inner in enumerate(items)}.__getitem__))


def _beside(tree: Tree, items: list[int]) -> list[int]:
    """The same items, each gradient after its layer."""
    place = {tree.name(item): at for at, item in enumerate(items)}
    at = {item: place.get(tree.name(item).split(BACKWARD)[0], place[tree.name(item)]) for item in items}
    return sorted(items, key=at.__getitem__)


_MOST_LINES = 3  # between the same two items; more become one line
CROWDED = 100  # lines in a block, above which only one line joins the same two items

_End = tuple[int, int]  # an item and -1, or -1 and a port


@dataclass(slots=True)
class _Crossing:
    """What flows where in one block.

    Attributes:
        inside: between two of its items, with what is written on it.
        enters: which items read an array from outside.
        leaves: which item an array comes from that is read outside.
    """

    inside: dict[tuple[int, int, Key], str] = field(default_factory=dict[tuple[int, int, Key], str])
    enters: dict[Key, dict[int, None]] = field(default_factory=dict[Key, dict[int, None]])
    leaves: dict[Key, int] = field(default_factory=dict[Key, int])


def draw_lines(tree: Tree) -> None:
    """Give each block its lines and ports, from the outside in."""
    crossings = _crossings(tree)
    work = [tree.root]
    while work:
        item = work.pop()
        groups = _groups(tree, item, crossings[item])
        most = 1 if sum(map(len, groups.values())) > CROWDED else _MOST_LINES
        for (tail, head, kind), keys in groups.items():
            _draw(tree, item, tail, head, kind, keys, most)
        work += [inner for inner in tree.block(item).items if tree.is_block(inner)]
    _draw_pairs(tree)


def _crossings(tree: Tree) -> dict[int, _Crossing]:
    found = {tree.root + at: _Crossing() for at in range(len(tree.blocks))}
    for flow, is_named in zip(tree.flows, _named([flow.edge for flow in tree.flows], set()), strict=True):
        key = flow.source, flow.kind
        out, into = tree.way_out(flow.source), tree.way_out(flow.target)
        while len(out) > 2 and len(into) > 2 and out[-2] == into[-2]:
            out.pop()
            into.pop()
        label = _label(tree, flow) if is_named else ""
        inside = found[out[-1]].inside
        inside[out[-2], into[-2], key] = inside.get((out[-2], into[-2], key)) or label
        for inner, block in itertools.pairwise(out[:-1]):
            found[block].leaves[key] = inner
        for inner, block in itertools.pairwise(into[:-1]):
            found[block].enters.setdefault(key, {})[inner] = None
    return found


def _groups(tree: Tree, item: int, crossing: _Crossing) -> dict[tuple[_End, _End, Kind], dict[Key, str]]:
    """The arrays between each two ends, with the label of each."""
    found: dict[tuple[_End, _End, Kind], dict[Key, str]] = {}
    for (tail, head, key), label in crossing.inside.items():
        found.setdefault(((tail, -1), (head, -1), key[1]), {})[key] = label
    for port, number in tree.block(item).ports.items():
        for key in sorted(port.keys):
            for inner in crossing.enters[key] if port.enters else (crossing.leaves[key],):
                ends = ((-1, number), (inner, -1)) if port.enters else ((inner, -1), (-1, number))
                found.setdefault((*ends, key[1]), {})[key] = ""
    return found


def _label(tree: Tree, flow: Flow) -> str:
    if flow.kind == "carry":
        return carry_label(flow.edge)
    source, target = tree.nodes[flow.source], tree.nodes[flow.target]
    if source.op == "weight" or (source.is_backward and is_update(target)):
        return ""
    return edge_label(flow.edge, source)


def _draw(tree: Tree, item: int, tail: _End, head: _End, kind: Kind, keys: dict[Key, str], most: int) -> None:
    """One line for each array, or one for all where they are more than `most` or cross the border."""
    crosses = tail[0] < 0 or head[0] < 0
    together = len(keys) > most or crosses
    bundles = [(frozenset(keys), "" if crosses else f"{len(keys)} arrays")]
    for bundle, label in bundles if together else [(frozenset({key}), text) for key, text in keys.items()]:
        line = Line(tail[0], head[0], tail[1], head[1], bundle, label, kind)
        if line.tail >= 0 and tree.is_block(line.tail):
            line.tail_port = _port(tree, line.tail, Port(bundle, False, kind == "back"))
        if line.head >= 0 and tree.is_block(line.head):
            line.head_port = _port(tree, line.head, Port(bundle, True, kind != "back"))
        tree.block(item).lines.append(line)


def _port(tree: Tree, item: int, port: Port) -> int:
    """The number of the port, which is added where it is missing."""
    ports = tree.block(item).ports
    return ports.setdefault(port, len(ports))


def _draw_pairs(tree: Tree) -> None:
    """Join each layer with its gradient, where both are in one block."""
    number = {node.name: at for at, node in enumerate(tree.nodes)}
    by_name = {node.name: node for node in tree.nodes}
    for node in tree.nodes:
        layer = _forward(by_name, node)
        if layer is None:
            continue
        pair = number[layer.name], number[node.name]
        if tree.parent[pair[0]] != tree.parent[pair[1]]:
            continue
        block = tree.block(tree.parent[pair[0]])
        block.pairs.append(pair)
        if layer.op != "Loss":
            block.lines.append(Line(*pair, kind="pair"))
