"""A comparison as a table, as text and as HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence

from ..._core.text import columns, printable
from .._draw.labels import output_text
from .._draw.table import GAP, line
from .._graph import Graph, Node, human
from .changes import Change, count

_HEAD = ("", "Layer (type)", "Output Shape", "Δ Params", "Δ FLOPs", "Δ Bytes")
_MARKS = {"same": " ", "changed": "~", "added": "+", "removed": "-"}
_NUMBERS = (3, 4, 5)


def to_text(before: Graph, after: Graph, changes: Sequence[Change], width: int = 120) -> str:
    """The table as text. Layers that are the same are counted below it."""
    shown = [change for change in changes if change.status != "same"]
    cells = [_HEAD, *map(_cells, shown)]
    widths = _widths(cells, width)
    lines = [line(row, widths, _NUMBERS) for row in cells]
    below = totals(before, after, changes)
    rule = max(map(columns, [*lines, *below]))
    table = ["-" * rule, lines[0], "=" * rule, *lines[1:], *(["=" * rule] if shown else []), *below, "-" * rule]
    return "\n".join(text.rstrip() for text in table)


def totals(before: Graph, after: Graph, changes: Sequence[Change]) -> list[str]:
    """How many layers changed, and the sums of both networks."""
    counts = ", ".join(f"{number:,} {status}" for status, number in count(changes).items())
    return [
        f"Layers: {counts}",
        f"Total params: {_step(before.total_params, after.total_params)}",
        f"Total FLOPs: {_step(before.total_flops, after.total_flops)}",
        f"Bytes read and written: {_step(*(sum(node.bytes for node in graph.nodes) for graph in (before, after)))}",
    ]


def _step(before: int, after: int) -> str:
    """ "100 → 150 (+50, +50.0 %)"."""
    if before == after:
        return f"{after:,}"
    share = f", {(after - before) / before:+.1%}" if before else ""
    return f"{before:,} → {after:,} ({after - before:+,}{share})"


def arrow(before: str, after: str) -> str:
    """ "128 → 256", or one of both where they are equal."""
    return after if before == after else f"{before or 'none'} → {after or 'none'}"


def kind(node: Node) -> str:
    """The kind of a layer, with what its label adds."""
    return f"{node.kind} {node.detail}".strip() if node.op != "input" else "input"


def _arrows(before: str, after: str) -> str:
    """An arrow for each word where both have as many words and some are equal, else one for all."""
    words = before.split(" "), after.split(" ")
    if len(words[0]) == len(words[1]) and set(zip(*words, strict=True)) & {(word, word) for word in words[0]}:
        return " ".join(map(arrow, *words))
    return arrow(before, after)


def change_texts(change: Change) -> tuple[str, str, str]:
    """The name, the kind and the output of a change, both where they differ."""
    before, after = change.before or change.node, change.after or change.node
    times = arrow(*(f"×{node.repeat}" if node.repeat > 1 else "" for node in (before, after)))
    name = change.node.name + (f" {times}" if times else "")
    return name, _arrows(kind(before), kind(after)), _arrows(output_text(before), output_text(after))


def _cells(change: Change) -> tuple[str, ...]:
    name, layer, shape = change_texts(change)
    deltas = [f"{delta:+,}" if delta else "0" for delta in (change.params, change.flops, change.bytes)]
    return _MARKS[change.status], printable(f"{name} ({layer})"), shape, *deltas


def _widths(cells: list[tuple[str, ...]], width: int) -> list[int]:
    mark, name, shape, *numbers = (max(map(columns, column)) for column in zip(*cells, strict=True))
    left = width - 1 - sum(numbers) - 5 * len(GAP)
    shape = min(shape, max(left // 3, left - name))
    return [max(mark, 1), min(name, left - shape), shape, *numbers]


def to_html(before: Graph, after: Graph, changes: Sequence[Change], title: str = "") -> str:
    """The table for a page, in its colours."""
    head = "".join(f"<th style='text-align:left;padding:2px 8px'>{name}</th>" for name in _HEAD)
    body = "".join(map(_html_row, (change for change in changes if change.status != "same")))
    caption = f"<caption>{html.escape(printable(title))}</caption>" if title.strip() else ""
    foot = "".join(f"<p>{html.escape(text)}</p>" for text in totals(before, after, changes))
    return f"<table style='color:inherit'>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{foot}"


def _html_row(change: Change) -> str:
    cells = "".join(
        f"<td style='text-align:{'right' if number in _NUMBERS else 'left'};padding:2px 8px'>{html.escape(text)}</td>"
        for number, text in enumerate(_cells(change))
    )
    return f"<tr>{cells}</tr>"


def delta_text(number: int, unit: str) -> str:
    """ "+52 MFLOP"."""
    return ("+" if number > 0 else "−" if number < 0 else "±") + human(abs(number), unit)
