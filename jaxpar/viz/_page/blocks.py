"""A `Graph` as a tree of blocks: the lines of each, and the ports where they cross its border.

Begin with `tree`, then `draw_lines`. An array that crosses the border of a block goes through a port, so that each
block can be laid out by itself and opened in place.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..._core.text import plural
from .._draw.look import Look, arrow_label, clusters, drawn, layer_of, named_edges, without_residuals
from .._draw.style import SIZE, SMALL, Line as Text, Options, box_size, cost, is_argument, scope_label
from .._graph import BACKWARD, Edge, Graph, Node, human
from .._scopes import common_prefix, paths_of
from .._searches import order

_MOST_ITEMS = 80  # of one block; Graphviz gets slow above
_PART = 30  # items of each part that a larger block is cut into
_SIGN = 18  # points, the width of the sign that opens a block
_TO = " … "  # between the names of the first and the last item of a part

# How arrays flow: along the direction, against it as gradients do, or back to the start of a loop. A pair only joins
# a layer with its gradient.
Kind = Literal["forward", "back", "carry", "pair"]
Key = tuple[int, Kind]  # the node whose array it is, and how it flows
Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Port:
    """Where arrays cross the border of a block."""

    keys: frozenset[Key]  # the arrays that cross
    enters: bool  # whether they come in
    is_first: bool  # whether it is at the end where the block's forward pass begins


@dataclass(slots=True)
class Line:
    """Arrays that flow between two ends. An end is an item of the block, or -1 and a port of the block itself."""

    tail: int
    head: int
    tail_port: int = -1  # of that item or of the block itself, -1 for a node
    head_port: int = -1
    keys: frozenset[Key] = frozenset()
    label: str = ""
    kind: Kind = "forward"


@dataclass(slots=True)
class Block:
    """A part of the network that opens and closes. The first one is the whole network."""

    label: str
    path: Path  # the scopes from the outside in
    items: list[int] = field(default_factory=list)  # what it holds, nodes and blocks
    ports: dict[Port, int] = field(default_factory=dict[Port, int])  # where arrays cross its border, numbered
    lines: list[Line] = field(default_factory=list)  # what is drawn between them
    pairs: list[tuple[int, int]] = field(default_factory=list)  # layers and their gradients, which are side by side


@dataclass(frozen=True, slots=True)
class Flow:
    """An edge that is drawn, with the numbers of its nodes."""

    source: int
    target: int
    edge: Edge
    kind: Kind


@dataclass(slots=True)
class Tree:
    """The nodes that are drawn, and the blocks that they are in.

    An item is a number, as the page's script has it. The nodes come first, then the blocks.
    """

    nodes: list[Node]
    edges: list[tuple[int, int]]  # all of them, those that are not drawn too
    flows: list[Flow]  # those that are drawn
    look: Look  # of the nodes
    blocks: list[Block] = field(default_factory=lambda: [Block("", ())])  # the first one is the whole network
    parent: dict[int, int] = field(default_factory=dict[int, int])  # the block that each item is in
    words: list[list[Text]] = field(default_factory=list)  # what is written in each box

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
        way = [item]
        while way[-1] in self.parent:
            way.append(self.parent[way[-1]])
        return way

    def is_oval(self, item: int) -> bool:
        """Whether an item is drawn as an oval or a circle."""
        return not self.is_block(item) and self.look.is_oval(self.nodes[item])

    def size(self, item: int) -> tuple[int, int]:
        """The width and the height of a node or a closed block, in points."""
        if not self.is_block(item):
            width, height = self.look.size(self.nodes[item])
            return round(width), round(height)
        width, height = box_size(self.words[item])
        return round(width) + _SIGN, round(height)

    def nodes_in(self, item: int) -> list[int]:
        """All nodes of a block, at any depth."""
        if not self.is_block(item):
            return [item]
        return [node for inner in self.block(item).items for node in self.nodes_in(inner)]

    def sent_in(self, item: int) -> list[str]:
        """The collectives of a block."""
        return list(dict.fromkeys(sent for node in self.nodes_in(item) for sent in self.nodes[node].sends))


def tree(graph: Graph, options: Options) -> Tree:
    """The blocks of a graph and their words, without their lines."""
    nodes, edges = drawn(graph, options.hide_weights)
    number, scopes = {node.name: at for at, node in enumerate(nodes)}, dict[str, list[Path]]()
    # Parameters are where the layers are that read them.
    for edge in () if options.hide_weights else graph.weight_edges:
        scopes.setdefault(edge.source, []).append(nodes[number[edge.target]].scope)
    nodes = [replace(node, scope=common_prefix(scopes[node.name])) if node.name in scopes else node for node in nodes]
    flows: list[Flow] = []
    for edge in without_residuals(nodes, edges):
        source, target = number[edge.source], number[edge.target]
        is_back = nodes[source].is_backward and nodes[target].is_backward
        flows.append(Flow(source, target, edge, "carry" if edge.carry else "back" if is_back else "forward"))
    ends = dict.fromkeys((number[edge.source], number[edge.target]) for edge in edges)
    made = Tree(nodes, list(ends), flows, Look(graph, nodes, options))
    _nest(made, graph)
    at = 0
    while at < len(made.blocks):  # parts become blocks, which may be cut too
        _cut(made, made.root + at)
        at += 1
    made.words = [_words(made, item) for item in range(len(nodes) + len(made.blocks))]
    return made


def _words(tree: Tree, item: int) -> list[Text]:
    """What is written in a box, closed where it is a block."""
    if not tree.is_block(item):
        return tree.look.words(tree.nodes[item])
    inside = [tree.nodes[node] for node in tree.nodes_in(item)]
    layers = sum(not is_argument(node) for node in inside)
    facts = [", ".join([*tree.sent_in(item), plural(layers, "layer")])]
    facts += [f"{params:,} params"] if (params := sum(n.params for n in inside if n.op != "weight")) else []
    lines = [(scope_label(tree.block(item).label), SIZE, True), (" · ".join(facts), SMALL, False)]
    if (heat := tree.look.options.heat) is not None:
        total = human(sum(cost(node, heat) for node in inside), "FLOP" if heat == "flops" else "B")
        lines.append((total, SMALL, False))
    return lines


def _nest(tree: Tree, graph: Graph) -> None:
    """Put each node into the block of its scope."""
    framed = clusters(graph, tree.nodes)
    at: dict[Path, int] = {}
    for number, node in enumerate(tree.nodes):
        inside = tree.root
        for path in (path for path in paths_of(node.scope) if path in framed):
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
        for start, end in itertools.pairwise(number * len(ordered) // count for number in range(count + 1)):
            piece = ordered[start:end]
            label = f"{tree.name(piece[0]).split(_TO)[0]}{_TO}{tree.name(piece[-1]).split(_TO)[-1]}"
            tree.parent |= dict.fromkeys(piece, _add(tree, Block(label, (*block.path, label), piece), item))


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
    ordered = order(before, {inner: place for place, inner in enumerate(items)}.__getitem__)
    place = {tree.name(inner): at for at, inner in enumerate(ordered)}
    return sorted(ordered, key=lambda inner: place.get(tree.name(inner).split(BACKWARD)[0], place[tree.name(inner)]))


_MOST_LINES = 3  # between the same two items; more become one line
CROWDED = 100  # lines in a block, above which only one line joins the same two items

_End = tuple[int, int]  # an item and -1, or -1 and a port


@dataclass(slots=True)
class _Crossing:
    """What flows in one block: between its items, with what is written there, and between them and its border."""

    inside: dict[tuple[int, int, Key], str] = field(default_factory=dict[tuple[int, int, Key], str])
    across: dict[tuple[Key, bool], dict[int, None]] = field(default_factory=dict[Any, Any])  # whether it enters


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
    crossings = {tree.root + at: _Crossing() for at in range(len(tree.blocks))}
    for flow, is_named in zip(tree.flows, named_edges([flow.edge for flow in tree.flows], set()), strict=True):
        key = flow.source, flow.kind
        out, into = tree.way_out(flow.source), tree.way_out(flow.target)
        while len(out) > 2 and len(into) > 2 and out[-2] == into[-2]:
            out.pop()
            into.pop()
        label = arrow_label(flow.edge, tree.nodes[flow.source], tree.nodes[flow.target]) if is_named else ""
        inside = crossings[out[-1]].inside
        inside[out[-2], into[-2], key] = inside.get((out[-2], into[-2], key)) or label
        for way, enters in ((out, False), (into, True)):
            for inner, block in itertools.pairwise(way[:-1]):
                crossings[block].across.setdefault((key, enters), {})[inner] = None
    return crossings


def _groups(tree: Tree, item: int, crossing: _Crossing) -> dict[tuple[_End, _End, Kind], dict[Key, str]]:
    """The arrays between each two ends, with the label of each."""
    groups: dict[tuple[_End, _End, Kind], dict[Key, str]] = {}
    for (tail, head, key), label in crossing.inside.items():
        groups.setdefault(((tail, -1), (head, -1), key[1]), {})[key] = label
    for port, number in tree.block(item).ports.items():
        for key in sorted(port.keys):
            for inner in crossing.across[key, port.enters]:
                ends = ((-1, number), (inner, -1)) if port.enters else ((inner, -1), (-1, number))
                groups.setdefault((*ends, key[1]), {})[key] = ""
    return groups


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
    """Join each layer with its gradient, where both are in one block. Blocks of layers and of gradients are beside."""
    number, layers = {node.name: at for at, node in enumerate(tree.nodes)}, layer_of(tree.nodes)
    for at, node in enumerate(tree.nodes):
        layer = layers.get(node.name)
        if layer is not None and tree.parent[number[layer.name]] == tree.parent[at]:
            block = tree.block(tree.parent[at])
            block.pairs.append((number[layer.name], at))
            block.lines += [Line(number[layer.name], at, kind="pair")] if layer.op != "Loss" else []
    for block in tree.blocks:
        inner = {tree.name(item): item for item in block.items if tree.is_block(item)}
        block.pairs += [(item, inner[name + BACKWARD]) for name, item in inner.items() if name + BACKWARD in inner]
