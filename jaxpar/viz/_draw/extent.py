"""How large a picture will be, without Graphviz: what is opened at first has to fit on a screen.

Graphviz writes boxes in rows, each above what it reads. So the height is that of the longest way through the boxes, and
the width that of the fullest row. Real pictures differ from this by a few percent.
"""

from __future__ import annotations

from .._graph import Graph
from .._scopes import common_prefix, paths_of
from .._searches import order
from .dot import clusters, drawn, layer_of, without_residuals
from .style import Options, join_sign, label_lines, text_width

_GAP = 38.0  # points between two rows, with the shape beside the arrow
_SHAPE = 60.0  # the length of a shape, where arrows go to the right
_FRAME, _TITLE = 10.0, 27.0  # above a frame, and below it with its name
_BESIDE = 22.0  # between two boxes of a row
_LEGEND = 75.0  # below the network
_SCREEN = (1600.0, 1125.0)  # points of a picture that a screen of 1280 × 900 pixels shows at 60 %


def fits_screen(graph: Graph, options: Options) -> bool:
    """Whether a picture is one screen, at a scale of 60 % or more."""
    width, height = extent(graph, options)
    return width <= _SCREEN[0] and height <= _SCREEN[1]


def extent(graph: Graph, options: Options) -> tuple[float, float]:
    """The width and the height of a picture in points, about."""
    nodes, edges = drawn(graph, options.hide_weights)
    signs, framed = join_sign(graph), clusters(graph, nodes)
    widths, heights = dict[str, float](), dict[str, float]()
    for node in nodes:
        lines = [(" ", 22.0, False)] if node.name in signs else label_lines(node, options.heat)
        widths[node.name] = max(94.0, max(text_width(text, size, bold) for text, size, bold in lines) + 14)
        heights[node.name] = max(36.0, sum(size for _, size, _ in lines) * 1.15 + 11.5)
    gap = _GAP
    if options.direction == "right":
        widths, heights, gap = heights, widths, _GAP + _SHAPE
    scopes = {node.name: tuple(path for path in paths_of(node.scope) if path in framed) for node in nodes}

    # A gradient stands beside its layer, and its arrows go down.
    beside = {name: layer.name for name, layer in layer_of(nodes).items()}
    place = {node.name: at for at, node in enumerate(nodes)}
    below: dict[str, set[str]] = {node.name: set() for node in nodes if node.name not in beside}
    for edge in without_residuals(nodes, edges):
        source, target = (beside.get(name, name) for name in (edge.source, edge.target))
        if edge.source in beside and edge.target in beside:
            source, target = target, source
        if source != target and not edge.carry and place[source] < place[target]:
            below[target].add(source)
    top: dict[str, float] = {}
    row: dict[str, int] = {}
    for name in order(below, place.__getitem__):
        start, row[name] = 0.0, 0
        for source in below[name]:
            shared = len(common_prefix((scopes[source], scopes[name])))
            frames = _FRAME * (len(scopes[source]) - shared) + _TITLE * (len(scopes[name]) - shared)
            start, row[name] = max(start, top[source] + gap + frames), max(row[name], row[source] + 1)
        top[name] = start + heights[name]
    full = dict[int, float]()
    for node in nodes:
        number = row[beside.get(node.name, node.name)]
        full[number] = full.get(number, 0.0) + widths[node.name] + _BESIDE
    across, along = max(full.values(), default=0.0), max(top.values(), default=0.0)
    return (along, across + _LEGEND) if options.direction == "right" else (across, along + _LEGEND)
