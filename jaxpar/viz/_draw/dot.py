"""From a `Graph` to the text of a picture, in the dot language.

Begin with `to_dot`. Graphviz places what it is given, so the order of the lines, the ranks and the edges that do not
constrain are what keeps a picture readable. `Look` says colours and words, which a comparison replaces.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from .._graph import BACKWARD, Edge, Graph, Node
from .._scopes import Block, Path, nest, paths_of
from .._searches import reach
from . import style
from .style import (
    DIRECTIONS,
    FONT,
    SIZE,
    SMALL,
    THEMES,
    Line,
    Options,
    Theme,
    attributes,
    caption,
    cost,
    edge_label,
    ink,
    join_sign,
    label,
    label_lines,
    quote,
    scope_label,
    text_width,
    tooltip,
)

_POINTS = 72.0  # of an inch
_MANY, _MANY_EDGES = 150, 220  # nodes and edges, above which dot works with limits
_MANY_READERS = 4  # of an input of several arrays, above which its edges give way
_FEW = 2  # readers of an array, above which only one edge names it


class Look:
    """How boxes and arrows look: in the colours of their kinds or costs. A comparison has another look."""

    def __init__(self, graph: Graph, nodes: list[Node], options: Options) -> None:
        self.options, self.signs = options, join_sign(graph)  # of nodes that only join others
        self.most = max((cost(node, options.heat) for node in nodes), default=0) or 1
        self.caption = caption(graph, nodes, options)

    def fill(self, node: Node) -> str:
        """The colour of a box."""
        heat = self.options.heat if node.op not in ("input", "weight") else None
        return style.heat(cost(node, heat) / self.most) if heat else style.fill(node)

    def is_dashed(self, node: Node) -> bool:
        """Whether a box has a dashed line around it."""
        return node.is_backward

    def lines(self, node: Node) -> list[Line]:
        """What is written in a box."""
        return label_lines(node, self.options.heat)

    def tooltip(self, node: Node) -> str:
        """What is shown where the mouse is on a box."""
        return tooltip(node)

    def arrow(self, edge: Edge) -> dict[str, Any]:
        """The attributes of an arrow, besides those of its way."""
        return {}


def to_dot(graph: Graph, options: Options, look: Look | None = None) -> list[str]:
    """The lines between the braces of a digraph. Equal graphs give equal lines."""
    theme = THEMES[options.theme]
    nodes, edges = drawn(graph, options.hide_weights)
    large = len(nodes) > _MANY or len(graph.edges) > _MANY_EDGES
    look = look or Look(graph, nodes, options)
    lines = _head(look.caption, options, theme, large=large)
    lines += _nodes(graph, nodes, look, theme)
    by_name = {node.name: node for node in nodes}
    # A gradient reads much of the forward pass. The line from its layer stands for that, or the picture would be full.
    edges = without_residuals(nodes, edges)
    joined = {node.name for node in nodes if node.leaves}
    carried = Counter(edge.source for edge in edges if edge.carry)
    for edge, named in zip(edges, named_edges(edges, joined), strict=True):
        if edge.carry:
            lines.append(_carry(edge, theme, look, bool(named), carried[edge.source] > _FEW))
        elif named is not None:
            lines.append(_edge(by_name, edge, theme, look, named))
        else:  # an argument for most layers, such as statistics: they keep their places
            line = {"color": theme.faint, "constraint": "false", "penwidth": 0.6}
            lines.append(_line(edge, line | look.arrow(edge)))
    lines += _pairs(nodes, theme)
    if not graph.layers:
        text = "Nothing is computed from the arguments."
        lines.append(f'"nothing" {attributes(label=text, shape="plaintext", style="", fontcolor=theme.text)}')
    return lines


def named_edges(edges: list[Edge], inputs: set[str]) -> list[bool | None]:
    """Whether each edge says what flows along it. An array that many read is named once.

    None for the edges of an input of many arrays to many layers, except the first.
    """
    count = Counter((edge.source, edge.shape, edge.carry) for edge in edges)
    readers = Counter(edge.source for edge in edges)
    seen: set[object] = set()
    are_named: list[bool | None] = []
    for edge in edges:
        key = (edge.source, edge.shape, edge.carry)
        if edge.source in inputs and edge.source in seen and readers[edge.source] > _MANY_READERS:
            are_named.append(None)
        else:
            are_named.append(count[key] <= _FEW or key not in seen or bool(edge.label))
        seen |= {key, edge.source}
    return are_named


def drawn(graph: Graph, hide_weights: bool) -> tuple[list[Node], list[Edge]]:
    """The nodes and edges of a picture: all but scalars without edges, such as an optimizer's count."""
    edges = join_carries(graph.edges) + ([] if hide_weights else list(graph.weight_edges))
    joined = {end for edge in edges for end in (edge.source, edge.target)}
    nodes = [node for node in graph.nodes if node.name in joined or node.shape or not joined]
    return nodes + ([] if hide_weights else list(graph.weights)), edges


def _head(caption: str, options: Options, theme: Theme, *, large: bool) -> list[str]:
    """The attributes of all graphs, nodes and edges. In a large one dot works with limits."""
    drawing = {
        "rankdir": DIRECTIONS[options.direction],
        "bgcolor": theme.background,
        "nodesep": 0.3,
        "ranksep": 0.32,
        "labelloc": "b",
        "labeljust": "c",
        "tooltip": options.title,
        "fontname": FONT,
        "fontcolor": theme.text,
    }
    drawing |= {"nslimit": 1, "nslimit1": 1, "mclimit": 0.2} if large else {}
    box = {"shape": "box", "style": "filled,rounded", "fontname": FONT, "fontcolor": style.INK, "fontsize": SIZE}
    box |= {"color": "#6e7781", "penwidth": 0.8, "margin": "0.1,0.05"}
    line = {"color": theme.line, "fontcolor": theme.line, "fontname": FONT, "fontsize": SMALL}
    return [
        "graph " + attributes(**drawing, label=caption),
        "node " + attributes(**box),
        "edge " + attributes(**line, arrowsize=0.6, penwidth=0.9),
    ]


def _nodes(graph: Graph, nodes: list[Node], look: Look, theme: Theme) -> list[str]:
    """Nodes inside the clusters of their scopes."""
    framed, numbers = clusters(graph, nodes), itertools.count()

    def write(block: Block[Node], level: int) -> Iterator[str]:
        leaves = [item for item in block.items if isinstance(item, Node)]
        for item in block.items:
            if isinstance(item, Node):  # all of them where the first one is
                yield from (_node(node, look) for node in leaves)
                yield from _side_by_side([node.name for node in leaves])
                leaves = []
            else:
                yield f"subgraph {quote(f'cluster_{next(numbers)}')} {{"
                yield "graph " + attributes(**_frame(item.path, theme, level))
                yield from write(item, level + 1)
                yield "}"

    return list(write(nest((node, (path for path in paths_of(node.scope) if path in framed)) for node in nodes), 0))


def _frame(path: Path, theme: Theme, level: int) -> dict[str, Any]:
    region = path[-1].is_region
    attrs = {"label": scope_label(path[-1]), "labelloc": "b", "labeljust": "r", "fontsize": 13, "margin": 10}
    attrs |= {"style": "rounded,filled" + (",dashed" if region else ""), "color": theme.faint}
    return attrs | {
        "fillcolor": theme.region if region or level % 2 else theme.cluster,
        "tooltip": "/".join(path),
    }


def clusters(graph: Graph, nodes: list[Node]) -> set[Path]:
    """Scopes of two nodes or more. A scope around everything, or with one scope in it that is no repeat, is none."""
    members = Counter(path for node in nodes for path in paths_of(node.scope))
    layers = len(graph.layers)
    around = {path[:-1] for path, count in members.items() if members[path[:-1]] == count and path[-1].times is None}
    special = {path for path in members if path[-1].is_region or path[-1].times is not None}
    return special | {path for path, count in members.items() if 1 < count < layers and path not in around}


def _node(node: Node, look: Look) -> str:
    lines, colour, dashed = look.lines(node), look.fill(node), ",dashed" if look.is_dashed(node) else ""
    width = max(text_width(text, size, bold) for text, size, bold in lines) / _POINTS + 0.2
    attrs = {
        "label": label(lines, ink(colour)),
        "fillcolor": colour,
        "width": f"{max(1.3, width * (1.3 if node.op == 'input' else 1)):.2f}",
        "height": f"{max(0.5, sum(size for _, size, _ in lines) * 1.15 / _POINTS + 0.16):.2f}",
        "tooltip": look.tooltip(node),
    }
    if node.op in ("input", "weight"):
        attrs |= {"shape": "oval", "style": "filled" + (",dashed" if node.op == "weight" else dashed)}
    elif dashed:
        attrs |= {"style": "filled,rounded,dashed"}
    if node.name in look.signs:
        sign = label([(look.signs[node.name], SIZE + 2, True)], ink(colour))
        attrs |= {"label": sign, "shape": "circle", "style": "filled" + dashed}
        attrs |= {"width": "0.3", "height": "0.3", "fixedsize": "true", "margin": "0"}
    if node.outputs and not node.is_backward:
        attrs |= {"penwidth": 2}
    attrs |= dict(look.options.node_attrs or {})  # the user's own override all others
    return f"{quote(node.name)} {attributes(**attrs)}"


def layer_of(nodes: list[Node]) -> dict[str, Node]:
    """The layer of each gradient, by the name of the gradient."""
    by_name = {node.name: node for node in nodes}
    split_names = ((node.name, node.name.partition(BACKWARD)) for node in nodes if node.is_backward)
    return {
        name: by_name[layer_name]
        for name, (layer_name, word, number) in split_names
        if word and not number and layer_name in by_name
    }


def without_residuals(nodes: list[Node], edges: list[Edge]) -> list[Edge]:
    """The edges without what a gradient reads of the forward pass. The line from its layer is enough."""
    gradients, results = layer_of(nodes), {node.name for node in nodes if node.is_backward or node.op == "Loss"}
    return [edge for edge in edges if edge.carry or edge.target not in gradients or edge.source in results]


def _pairs(nodes: list[Node], theme: Theme) -> list[str]:
    """A line from each layer to its gradient."""
    line = attributes(color=theme.faint, style="dashed", constraint="false", penwidth=0.6, dir="none")
    pairs = layer_of(nodes).items()
    return [f"{quote(layer.name)} -> {quote(name)} {line}" for name, layer in pairs if layer.op != "Loss"]


def _side_by_side(names: list[str]) -> list[str]:
    """Layers and their gradients at the same height. Written elsewhere, it would take them out of their cluster."""
    pairs = ((name.removesuffix(BACKWARD), name) for name in names if name.endswith(BACKWARD))
    return [f"{{ rank=same {quote(layer)} {quote(name)} }}" for layer, name in pairs if layer in names]


def _carry(edge: Edge, theme: Theme, look: Look, named: bool, is_one_of_many: bool) -> str:
    """An edge back. Many from one layer begin at one point."""
    line = {"style": "dashed", "constraint": "false", "color": theme.carry, "fontcolor": theme.carry, "penwidth": 1.2}
    line |= {"label": f" {carry_label(edge)} "} if named else {}
    return _line(edge, line | ({"sametail": "carry"} if is_one_of_many else {}) | look.arrow(edge))


def _edge(by_name: dict[str, Node], edge: Edge, theme: Theme, look: Look, named: bool) -> str:
    source, target = by_name[edge.source], by_name[edge.target]
    arrow_look = look.arrow(edge)
    text = ({"label": f" {edge_label(edge, source)} "} if named and source.op != "weight" else {}) | arrow_look
    if source.is_backward and target.is_backward:  # downwards, next to the layers
        return f"{quote(edge.target)} -> {quote(edge.source)} " + attributes(**text, dir="back")
    if source.is_backward and style.is_update(target):  # from each layer with parameters
        return _line(edge, {"color": theme.faint, "penwidth": 0.6, "weight": 0} | arrow_look)
    return _line(edge, text)


def _line(edge: Edge, look: dict[str, Any]) -> str:
    return f"{quote(edge.source)} -> {quote(edge.target)}" + (f" {attributes(**look)}" if look else "")


def join_carries(edges: Iterable[Edge]) -> list[Edge]:
    """Edges as they are drawn: one arrow back from a layer to each that reads it in the next pass.

    What a layer hands to itself goes with an arrow back to a layer before it, where there is one. So the recurrence of
    an LSTM, a hidden state and a cell, is one arrow. A layer that hands on to itself only keeps its own.

    >>> cell = [Edge("dense", "gates"), Edge("gates", "dense", carry=True), Edge("gates", "gates", carry=True)]
    >>> [(edge.source, edge.target, edge.arrays) for edge in join_carries(cell) if edge.carry]
    [('gates', 'dense', 2)]
    """
    edges = list(edges)
    arrows: dict[tuple[str, str], Edge] = {}
    for edge in edges:
        if edge.carry:
            arrow = arrows.get((edge.source, edge.target))
            together = arrow.arrays + edge.arrays if arrow is not None else edge.arrays
            arrows[edge.source, edge.target] = replace(arrow or edge, arrays=together)
    itself = [ends for ends in arrows if ends[0] == ends[1]]
    on: dict[str, list[str]] = {}
    for edge in edges if itself else ():
        if not edge.carry:
            on.setdefault(edge.source, []).append(edge.target)
    for source, target in itself:
        ways = (ends for ends in arrows if ends[0] == source != ends[1])
        if (outer := next((ends for ends in ways if source in reach([ends[1]], on)), None)) is not None:
            arrows[outer] = replace(arrows[outer], arrays=arrows[outer].arrays + arrows.pop((source, target)).arrays)
    return [*(edge for edge in edges if not edge.carry), *arrows.values()]


def carry_label(edge: Edge) -> str:
    """What is written beside an arrow back."""
    return "carry" if edge.arrays == 1 else f"carry, {edge.arrays} arrays"
