"""What of a graph is drawn, and how it looks: the same for the picture, for its page, and for an estimate of its size.

`drawn` gives the nodes and the edges. `Look` says colours, words and sizes, which a comparison replaces.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from .._graph import BACKWARD, Edge, Graph, Node
from .._scopes import Path, Scope, common_prefix, paths_of
from .._searches import reach
from . import style
from .style import (
    SIZE,
    Line,
    Options,
    box_size,
    caption,
    cost,
    edge_label,
    is_argument,
    join_sign,
    label_lines,
    tooltip,
)

_SIGN = 21.6  # points, the circle of a node that only joins others
_MANY_READERS = 4  # of an input of several arrays, above which its edges give way
FEW = 2  # readers of an array, above which only one edge names it


def drawn(graph: Graph, hide_weights: bool) -> tuple[list[Node], list[Edge]]:
    """The nodes and edges of a picture: all but scalars without edges, such as an optimizer's count."""
    edges = join_carries(graph.edges) + ([] if hide_weights else list(graph.weight_edges))
    joined = {end for edge in edges for end in (edge.source, edge.target)}
    nodes = [node for node in graph.nodes if node.name in joined or node.shape or not joined]
    return nodes + ([] if hide_weights else list(graph.weights)), edges


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


def clusters(graph: Graph, nodes: list[Node]) -> set[Path]:
    """Scopes of two nodes or more. A scope around everything, or with one scope in it that is no repeat, is none."""
    members = Counter(path for node in nodes for path in paths_of(node.scope))
    layers = len(graph.layers)
    around = {path[:-1] for path, count in members.items() if members[path[:-1]] == count and path[-1].times is None}
    special = {path for path in members if path[-1].is_region or path[-1].times is not None}
    return special | {path for path, count in members.items() if 1 < count < layers and path not in around}


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
            are_named.append(count[key] <= FEW or key not in seen or bool(edge.label))
        seen |= {key, edge.source}
    return are_named


def arrow_label(edge: Edge, source: Node, target: Node) -> str:
    """What is written beside an arrow. Empty beside those of parameters, and of gradients that an optimizer reads."""
    if edge.carry:
        return "carry" if edge.arrays == 1 else f"carry, {edge.arrays} arrays"
    if source.op == "weight" or is_to_update(source, target):
        return ""
    text = edge_label(edge, source)
    # An input says itself how many arrays it has. What a gradient reads of its layer is not counted.
    if source.leaves or source.is_backward != target.is_backward:
        return text
    more = _arrays_of_a_copy(edge, source, target) - 1
    return f"{text} and {more} more" if more else text


def _arrays_of_a_copy(edge: Edge, source: Node, target: Node) -> int:
    """The arrays of an edge, without those of the copies of a block that is drawn once, with both ends in it."""
    around = map(Scope.of, common_prefix((source.scope, target.scope)))
    copies = math.prod(scope.times or 1 for scope in around if not scope.is_region)
    return -(-edge.arrays // copies)


def is_to_update(source: Node, target: Node) -> bool:
    """Whether an arrow goes from a gradient to the optimizer that reads it."""
    return source.is_backward and not target.is_backward and style.is_update(target)


class Look:
    """How boxes and arrows look: in the colours of their kinds or costs. A comparison has another look.

    The page has the same boxes, in the same sizes.
    """

    def __init__(self, graph: Graph, nodes: list[Node], options: Options) -> None:
        self.options, self.signs = options, join_sign(graph)  # of nodes that only join others
        self.most = max((cost(node, options.heat) for node in nodes), default=0) or 1
        self.caption = caption(graph, nodes, options)

    def fill(self, node: Node) -> str:
        """The colour of a box."""
        heat = self.options.heat if not is_argument(node) else None
        return style.heat(cost(node, heat) / self.most) if heat else style.fill(node)

    def is_dashed(self, node: Node) -> bool:
        """Whether a box has a dashed line around it."""
        return node.is_backward

    def lines(self, node: Node) -> list[Line]:
        """What is written in a box."""
        return label_lines(node, self.options.heat)

    def words(self, node: Node) -> list[Line]:
        """What is written in a box or in the circle that only joins others."""
        return [(self.signs[node.name], SIZE + 2, True)] if node.name in self.signs else self.lines(node)

    def is_oval(self, node: Node) -> bool:
        """Whether a box is an oval or a circle."""
        return is_argument(node) or node.name in self.signs

    def size(self, node: Node) -> tuple[float, float]:
        """The width and the height of a box, in points."""
        return (_SIGN, _SIGN) if node.name in self.signs else box_size(self.lines(node), is_oval=self.is_oval(node))

    def tooltip(self, node: Node) -> str:
        """What is shown where the mouse is on a box."""
        return tooltip(node)

    def arrow(self, edge: Edge) -> dict[str, Any]:
        """The attributes of an arrow, besides those of its way."""
        return {}
