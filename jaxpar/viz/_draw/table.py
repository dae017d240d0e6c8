"""The table of layers, as text and as HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence

from .._graph import Graph, Node, human
from .labels import output_text

_COLUMNS = ("Layer (type)", "Output Shape", "Param #", "FLOPs", "Previous Layer")


def to_text(graph: Graph) -> str:
    """The table as text, as wide as its longest entries. Numbers are aligned right."""
    rows = [_COLUMNS, *(_row(graph, node) for node in graph.nodes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = [_line(row, widths) for row in rows]
    total = max(map(len, lines), default=0)
    ends = [f"Total params: {graph.total_params}", f"Total FLOPs: {graph.total_flops}"]
    table = ["-" * total, lines[0], "=" * total, *lines[1:], "=" * total, *ends, "-" * total]
    return "\n".join(line.rstrip() for line in table)


def _line(row: Sequence[str], widths: list[int]) -> str:
    cells = [
        text.rjust(width) if 1 < n < 4 else text.ljust(width)
        for n, (text, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "   ".join(cells)


def _row(graph: Graph, node: Node) -> tuple[str, ...]:
    """The entries of a layer. Only the first three of what it reads are listed."""
    previous = [edge.source for edge in graph.edges if edge.target == node.name and not edge.carry]
    shown = ", ".join(previous[:3]) + (f", ... ({len(previous)})" if len(previous) > 3 else "")
    kind = f"{node.op} {node.detail}".strip()
    times = f" ×{node.repeat}" if node.repeat > 1 else ""
    return f"{node.name} ({kind}){times}", output_text(node), str(node.params), str(node.flops), shown


def to_html(graph: Graph, title: str = "") -> str:
    """The table for a notebook, in the colours of the page. A row shows its source line when pointed at."""
    head = "".join(map(_head_cell, _COLUMNS))
    body = "".join(_html_row(graph, node) for node in graph.nodes)
    foot = f"{graph.total_params:,} parameters, {human(graph.total_flops, 'FLOP')}"
    caption = f"<caption>{html.escape(title)}</caption>" if title else ""
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p><b>{foot}</b></p>"


def _head_cell(name: str) -> str:
    return f"<th style='text-align:left'>{html.escape(name)}</th>"


def _html_row(graph: Graph, node: Node) -> str:
    name, shape, _, _, previous = _row(graph, node)
    entries = (name, shape, f"{node.params:,}", human(node.flops, "FLOP"), previous)
    cells = "".join(f"<td style='text-align:left'>{html.escape(entry)}</td>" for entry in entries)
    return f"<tr title='{html.escape(node.source, quote=True)}'>{cells}</tr>"
