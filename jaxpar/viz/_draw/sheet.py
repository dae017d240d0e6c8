"""The table of layers as HTML, whose modules open and close without a script."""

from __future__ import annotations

import html
from collections.abc import Sequence

from ..._core.text import columns, printable
from .._graph import Graph, human
from .labels import missing
from .table import EMPTY, HEAD, NUMBERS, cells_of, counts, memory
from .tree import Row, rows

_MANY = 60  # rows, above which only the first levels are open
_LEVELS = 2
_STYLE = (
    ".jaxpar-table{overflow-x:auto}"
    ".jaxpar-table>div{width:max-content;min-width:60%}"
    ".jaxpar-table [role=row]{display:grid;gap:0 16px;padding:2px 8px;white-space:nowrap}"
    ".jaxpar-table [role=row]:hover{background:rgba(128,128,128,.15)}"
    ".jaxpar-table summary{cursor:pointer;font-weight:bold;list-style:none}"
    ".jaxpar-table summary::-webkit-details-marker{display:none}"
    ".jaxpar-table summary>:first-child::before{content:'▸ '}"
    ".jaxpar-table details[open]>summary>:first-child::before{content:'▾ '}"
    ".jaxpar-table [role=columnheader]{font-weight:bold}"
    ".jaxpar-table .n{text-align:right}"
)


def to_html(graph: Graph, title: str = "", depth: int | None = None, frozen: frozenset[str] = frozenset()) -> str:
    """The table for a notebook, in the colours of the page. A click on a module opens or closes it.

    A row shows its source line when pointed at. Above 60 rows only the first two levels of modules are open.
    """
    found = rows(graph, depth, frozen)
    cells = [HEAD, *map(_cells, found)]
    widths = [max(map(columns, column)) for column in zip(*cells, strict=True)]
    widths[0] = max(columns(row[0]) + 2 * level for row, level in zip(cells, [0, *_levels(found)], strict=True)) + 3
    grid = " ".join(f"{width + 1}ch" for width in widths)
    body = _row(HEAD, grid, 0, "columnheader") + _body(found, grid)
    body += "" if graph.layers else f"<div>{EMPTY}</div>"
    caption = f"<b>{html.escape(printable(title))}</b>" if title.strip() else ""
    facts = " · ".join([f"{graph.total_params:,} parameters", human(graph.total_flops, "FLOP") + missing(graph)])
    foot = "".join(f"<p>{html.escape(' · '.join(lines))}</p>" for lines in (counts(graph, frozen), memory(graph)))
    table = f"<style>{_STYLE}</style>{caption}<div role='table'>{body}</div><p><b>{facts}</b></p>{foot}"
    return f"<div class='jaxpar-table'>{table}</div>"


def _levels(found: Sequence[Row]) -> list[int]:
    return [row.level for row in found]


def _cells(row: Row) -> tuple[str, ...]:
    cells = cells_of(row, "")
    return (*cells[:3], human(row.flops, "FLOP"), cells[4])


def _body(found: Sequence[Row], grid: str) -> str:
    """The rows, each module around what is in it."""
    parts: list[str] = []
    ends: list[int] = []  # the levels of the modules that are not complete
    for row, after in zip(found, [*_levels(found), 0][1:], strict=True):
        while ends and ends[-1] >= row.level:
            parts.append("</details>")
            ends.pop()
        if row.kind or after <= row.level:
            parts.append(_row(_cells(row), grid, row.level, "cell", row.source))
            continue
        is_open = " open=''" if len(found) <= _MANY or row.level + 1 < _LEVELS else ""
        parts.append(f"<details{is_open}>{_row(_cells(row), grid, row.level, 'cell', row.source, 'summary')}")
        ends.append(row.level)
    return "".join([*parts, *("</details>" for _ in ends)])


def _row(cells: Sequence[str], grid: str, level: int, role: str, source: str = "", tag: str = "div") -> str:
    shown = [_cell(text, role, number in NUMBERS, 2 * level if number == 0 else 0) for number, text in enumerate(cells)]
    tip = f" title='{html.escape(printable(source), quote=True)}'" if source else ""
    return f"<{tag} role='row'{tip} style='grid-template-columns:{grid}'>{''.join(shown)}</{tag}>"


def _cell(text: str, role: str, is_number: bool, indent: int) -> str:
    look = " class='n'" if is_number else f" style='padding-left:{indent}ch'" if indent else ""
    return f"<span role='{role}'{look}>{html.escape(text)}</span>"
