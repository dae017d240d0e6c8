"""From a `Graph` to the text of a picture, in the dot language.

Begin with `to_dot`. Graphviz places what it is given, so the order of the lines, the ranks and the edges that do not
constrain are what keeps a picture readable.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from .._graph import BACKWARD, Edge, Graph, Node
from .._scopes import Block, Path, nest, paths_of
from .._searches import reach
from . import style
from .look import (
    FEW,
    Look,
    arrow_label,
    clusters,
    drawn,
    is_to_update,
    layer_of,
    named_edges,
    without_residuals,
)
from .style import (
    DIRECTIONS,
    FONT,
    SIZE,
    SMALL,
    THEMES,
    Options,
    Theme,
    attributes,
    ink,
    label,
    quote,
    scope_label,
)

_POINTS = 72.0  # of an inch
_OUTSIDE = {"up": "n", "down": "s", "right": "e"}  # the side of a box that is away from the layers before it
_MANY, _MANY_EDGES = 150, 220  # nodes and edges, above which dot works with limits


def to_dot(graph: Graph, options: Options, look: Look | None = None) -> list[str]:
    """The lines between the braces of a digraph. Equal graphs give equal lines."""
    theme = THEMES[options.theme]
    nodes, edges = drawn(graph, options.hide_weights)
    large = len(nodes) > _MANY or len(graph.edges) > _MANY_EDGES
    look = look or Look(graph, nodes, options)
    losses = _losses(nodes, edges)
    lines = _head(look.caption, options, theme, large=large)
    lines += _nodes(graph, nodes, losses, look, theme)
    by_name = {node.name: node for node in nodes}
    # A gradient reads much of the forward pass. The line from its layer stands for that, or the picture would be full.
    edges = without_residuals(nodes, edges)
    joined = {node.name for node in nodes if node.leaves}
    carried = Counter(edge.source for edge in edges if edge.carry)
    # Gradients that others read. Their arrows to an optimizer leave at the side, away from the shapes above and below.
    hands_on = {e.source for e in edges if by_name[e.source].is_backward and by_name[e.target].is_backward}
    for edge, named in zip(edges, named_edges(edges, joined), strict=True):
        if named is None:  # an argument for most layers, such as statistics: they keep their places
            line = {"color": theme.faint, "constraint": "false", "penwidth": 0.6}
            lines.append(_line(edge, line | look.arrow(edge)))
        else:
            ends = by_name[edge.source], by_name[edge.target]
            beside = edge.source in hands_on and options.direction != "right"
            if edge.source in losses[:-1] and edge.target == edge.source + BACKWARD:
                # Other losses stand between. The arrow passes outside of the row: a number would draw it through them.
                side = _OUTSIDE[options.direction]
                lines.append(_line(edge, {"tailport": side, "headport": side} | look.arrow(edge)))
                continue
            lines.append(_edge(*ends, edge, theme, look, named, carried[edge.source] > FEW, beside))
    lines += _pairs(nodes, theme)
    if not graph.layers:
        text = "Nothing is computed from the arguments."
        lines.append(f'"nothing" {attributes(label=text, shape="plaintext", style="", fontcolor=theme.text)}')
    return lines


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


def _nodes(graph: Graph, nodes: list[Node], losses: list[str], look: Look, theme: Theme) -> list[str]:
    """Nodes inside the clusters of their scopes."""
    framed, numbers = clusters(graph, nodes), itertools.count()

    def write(block: Block[Node], level: int) -> Iterator[str]:
        leaves = [item for item in block.items if isinstance(item, Node)]
        for item in block.items:
            if isinstance(item, Node):  # all of them where the first one is
                yield from (_node(node, look) for node in leaves)
                yield from _side_by_side([node.name for node in leaves], losses)
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


def _node(node: Node, look: Look) -> str:
    colour, dashed = look.fill(node), ",dashed" if look.is_dashed(node) else ""
    width, height = look.size(node)
    attrs = {
        "label": label(look.words(node), ink(colour)),
        "fillcolor": colour,
        "width": f"{width / _POINTS:.2f}",
        "height": f"{height / _POINTS:.2f}",
        "tooltip": look.tooltip(node),
    }
    if node.name in look.signs:
        attrs |= {"shape": "circle", "style": "filled" + dashed, "fixedsize": "true", "margin": "0"}
    elif look.is_oval(node):
        attrs |= {"shape": "oval", "style": "filled" + (",dashed" if node.op == "weight" else dashed)}
    elif dashed:
        attrs |= {"style": "filled,rounded,dashed"}
    if node.outputs and not node.is_backward:
        attrs |= {"penwidth": 2}
    if style.holds_collectives(node):
        attrs |= {"color": style.SENDING, "penwidth": 2}
    attrs |= dict(look.options.node_attrs or {})  # the user's own override all others
    return f"{quote(node.name)} {attributes(**attrs)}"


def _pairs(nodes: list[Node], theme: Theme) -> list[str]:
    """A line from each layer to its gradient."""
    line = attributes(color=theme.faint, style="dashed", constraint="false", penwidth=0.6, dir="none")
    pairs = layer_of(nodes).items()
    return [f"{quote(layer.name)} -> {quote(name)} {line}" for name, layer in pairs if layer.op != "Loss"]


def _losses(nodes: list[Node], edges: list[Edge]) -> list[str]:
    """The losses of several parts of a batch, where none reads another one. Else none."""
    losses = [node.name for node in nodes if node.op == "Loss"]
    readers_of: dict[str, list[str]] = {}
    for edge in edges if len(losses) > 1 else ():
        readers_of.setdefault(edge.source, []).append(edge.target)
    forward = {node.name: readers_of.get(node.name, []) for node in nodes if not node.is_backward}
    return losses if all(reach([loss], forward).isdisjoint(set(losses) - {loss}) for loss in losses) else []


def _side_by_side(names: list[str], losses: list[str]) -> list[str]:
    """Layers and their gradients at the same height. Written elsewhere, it would take them out of their cluster.

    Several losses are at one height, and their gradients behind them the other way round: so the arrows down from the
    gradients do not cross.
    """
    pairs = ((name.removesuffix(BACKWARD), name) for name in names if name.endswith(BACKWARD))
    pairs = {layer: name for layer, name in pairs if layer in names}
    lines, ends = list[str](), [loss for loss in losses if loss in pairs]
    if len(ends) > 1:
        row = [*ends, *(pairs.pop(loss) for loss in reversed(ends))]
        lines = [f"{{ rank=same {' -> '.join(map(quote, row))} {attributes(style='invis')} }}"]
    return [f"{{ rank=same {quote(layer)} {quote(name)} }}" for layer, name in pairs.items()] + lines


def _edge(
    source: Node, target: Node, edge: Edge, theme: Theme, look: Look, named: bool, is_one_of_many: bool, beside: bool
) -> str:
    text = arrow_label(edge, source, target) if named else ""
    line = {"label": f" {text} "} if text else {}
    if edge.carry:  # back. Many from one layer begin at one point.
        line |= {"color": theme.carry, "fontcolor": theme.carry, "style": "dashed", "penwidth": 1.2}
        line |= {"constraint": "false"} | ({"sametail": "carry"} if is_one_of_many else {})
    elif source.is_backward and target.is_backward:  # downwards, next to the layers
        return f"{quote(edge.target)} -> {quote(edge.source)} " + attributes(**(line | look.arrow(edge)), dir="back")
    elif is_to_update(source, target):  # from each layer with parameters
        line |= {"color": theme.faint, "penwidth": 0.6, "weight": 0}
        line |= {"tailport": "e"} if beside else {}
    return _line(edge, line | look.arrow(edge))


def _line(edge: Edge, look: dict[str, Any]) -> str:
    return f"{quote(edge.source)} -> {quote(edge.target)}" + (f" {attributes(**look)}" if look else "")
