"""How large a picture will be, without Graphviz: what is opened at first has to fit on a screen.

Graphviz writes boxes in rows, each above what it reads. So the height is that of the longest way through the boxes, and
the width that of the fullest row. Real pictures differ from this by a few percent.
"""

from __future__ import annotations

from .._graph import Graph
from .._scopes import common_prefix, paths_of
from .._searches import order
from .look import Look, clusters, drawn, layer_of, without_residuals
from .style import Options

_GAP = 38.0  # points between two rows, with the shape beside the arrow
_SHAPE = 60.0  # the length of a shape, where arrows go to the right
_FRAME, _TITLE = 10.0, 27.0  # above a frame, and below it with its name
_BESIDE = 22.0  # between two boxes of a row
_LEGEND = 75.0  # below the network
WIDEST, HIGHEST = 1600.0, 1125.0  # points of a picture that a screen of 1280 × 900 pixels shows at 60 %


def fits_screen(graph: Graph, options: Options) -> bool:
    """Whether a picture is one screen, at a scale of 60 % or more."""
    width, height = extent(graph, options)
    return width <= WIDEST and height <= HIGHEST


def extent(graph: Graph, options: Options) -> tuple[float, float]:
    """The width and the height of a picture in points, about."""
    nodes, edges = drawn(graph, options.hide_weights)
    look, framed = Look(graph, nodes, options), clusters(graph, nodes)
    widths, heights = dict[str, float](), dict[str, float]()
    for node in nodes:
        widths[node.name], heights[node.name] = look.size(node)
    gap = _GAP
    if options.direction == "right":
        widths, heights, gap = heights, widths, _GAP + _SHAPE
    scopes = {node.name: tuple(path for path in paths_of(node.scope) if path in framed) for node in nodes}

    # A gradient stands beside its layer, and its arrows go down.
    place = {node.name: at for at, node in enumerate(nodes)}
    beside = {name: layer.name for name, layer in layer_of(nodes).items()}
    row_at = {node.name: place[beside.get(node.name, node.name)] for node in nodes}
    below: dict[int, set[int]] = {at: set() for at in row_at.values()}
    for edge in without_residuals(nodes, edges):
        source, target = row_at[edge.source], row_at[edge.target]
        if edge.source in beside and edge.target in beside:
            source, target = target, source
        if not edge.carry and source < target:
            below[target].add(source)
    top: dict[int, float] = {}
    row: dict[int, int] = {}
    for at in order(below, lambda at: at):
        scope, start, row[at] = scopes[nodes[at].name], 0.0, 0
        for source in below[at]:
            outside = scopes[nodes[source].name]
            shared = len(common_prefix((outside, scope)))
            frames = _FRAME * (len(outside) - shared) + _TITLE * (len(scope) - shared)
            start, row[at] = max(start, top[source] + gap + frames), max(row[at], row[source] + 1)
        top[at] = start + heights[nodes[at].name]
    full = dict[int, float]()
    for node in nodes:
        number = row[row_at[node.name]]
        full[number] = full.get(number, 0.0) + widths[node.name] + _BESIDE
    across, along = max(full.values(), default=0.0), max(top.values(), default=0.0)
    return (along, across + _LEGEND) if options.direction == "right" else (across, along + _LEGEND)
