"""A plain picture without Graphviz, for notebooks on machines that have none: layers in rows, edges as curves."""

from __future__ import annotations

from html import escape

from .._graph import Graph, Node
from . import dot, style
from .dot import Options
from .style import THEMES, text_width

_GAP_X, _GAP_Y, _HEIGHT, _SIZE = 24.0, 34.0, 46.0, 12.0


def to_svg(graph: Graph, options: Options) -> str:
    """The nodes in rows by their longest path from an input, each row ordered by what it reads (Sugiyama, Tagawa
    and Toda 1981); no clusters and no weights.
    """
    rows = _order(graph, _rows(graph))
    widths = {node.name: _width(node, options) for node in graph.nodes}
    row_widths = [sum(widths[name] for name in row) + _GAP_X * (len(row) - 1) for row in rows]
    total, height = max([*row_widths, 200.0]) + 40, len(rows) * (_HEIGHT + _GAP_Y) + 40
    at: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        x, y = (total - row_widths[number]) / 2, height - 60 - number * (_HEIGHT + _GAP_Y)
        for name in row:
            at[name] = (x + widths[name] / 2, y)
            x += widths[name] + _GAP_X
    theme = THEMES[options.theme]
    parts = [_edge(at[edge.source], at[edge.target], theme.line) for edge in graph.edges]
    parts += [_box(node, at[node.name], widths[node.name], options) for node in graph.nodes]
    parts.append(
        f'<text x="{total / 2:.0f}" y="{height - 6:.0f}" text-anchor="middle" fill="{theme.text}">'
        f"{escape(options.title)} · {graph.total_params:,} parameters</text>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {total:.0f} {height:.0f}" font-family="Helvetica,Arial,sans-serif" font-size="{_SIZE:g}">'
        f'<rect width="100%" height="100%" fill="{theme.background}"/>{"".join(parts)}</svg>'
    )


def _rows(graph: Graph) -> list[list[str]]:
    rank = {node.name: 0 for node in graph.nodes}
    for node in graph.nodes:  # in the order of the trace, so what a node reads comes before it
        before = [rank[edge.source] + 1 for edge in graph.edges if edge.target == node.name]
        rank[node.name] = max(before, default=0)
    rows: list[list[str]] = [[] for _ in range(max(rank.values(), default=0) + 1)]
    for name, row in rank.items():
        rows[row].append(name)
    return rows


def _order(graph: Graph, rows: list[list[str]]) -> list[list[str]]:
    place = {name: n / max(1, len(row)) for row in rows for n, name in enumerate(row)}
    for row in rows:
        for name in row:
            before = [place[edge.source] for edge in graph.edges if edge.target == name]
            place[name] = sum(before) / len(before) if before else place[name]
        row.sort(key=lambda name: place[name])
    return rows


def _width(node: Node, options: Options) -> float:
    return max(text_width(text, size, bold) for text, size, bold in dot.label_lines(node, options.heat)) + 20


def _edge(start: tuple[float, float], end: tuple[float, float], colour: str) -> str:
    (x, y), (to_x, to_y) = (start[0], start[1] - _HEIGHT / 2), (end[0], end[1] + _HEIGHT / 2)
    middle = (y + to_y) / 2
    curve = f"M{x:.0f},{y:.0f} C{x:.0f},{middle:.0f} {to_x:.0f},{middle:.0f} {to_x:.0f},{to_y:.0f}"
    tip = f"M{to_x - 4:.0f},{to_y + 7:.0f} L{to_x:.0f},{to_y:.0f} L{to_x + 4:.0f},{to_y + 7:.0f} Z"
    return f'<path d="{curve}" fill="none" stroke="{colour}"/><path d="{tip}" fill="{colour}"/>'


def _box(node: Node, centre: tuple[float, float], width: float, options: Options) -> str:
    x, y = centre
    lines = dot.label_lines(node, options.heat)
    radius = _HEIGHT / 2 if node.op == "input" else 8
    colour = style.fill(node)
    text = ""
    for number, (line, size, bold) in enumerate(lines):
        down = y + (number - (len(lines) - 1) / 2) * 13 + size / 3
        weight = ' font-weight="bold"' if bold else ""
        text += (
            f'<text x="{x:.0f}" y="{down:.0f}" text-anchor="middle" font-size="{size:g}"{weight} '
            f'fill="{dot.ink(colour)}">{escape(line)}</text>'
        )
    return (
        f"<g><title>{escape(dot.tooltip(node))}</title>"
        f'<rect x="{x - width / 2:.0f}" y="{y - _HEIGHT / 2:.0f}" width="{width:.0f}" height="{_HEIGHT:.0f}" '
        f'rx="{radius:g}" fill="{colour}" stroke="#6e7781"/>{text}</g>'
    )
