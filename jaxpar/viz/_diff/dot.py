"""A comparison in the dot language: both networks as one, with what changed in colour."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..._core.text import cut_middle, printable
from .._draw.attributes import Html, attributes, quote
from .._draw.dot import MANY, head
from .._draw.labels import edge_label, scope_label
from .._draw.loops import carry_label, join_carries
from .._draw.style import THEMES, Options, Theme, ink, text_width
from .._graph import BACKWARD, Edge, Graph, human
from .changes import STATUSES, Change, Status
from .result import Diff
from .table import arrow, change_texts, delta_text

COLOURS: dict[Status, str] = {"same": "#d9d9d9", "changed": "#fdc162", "added": "#8fd694", "removed": "#f2918c"}
_LINES: dict[Status, str] = {"same": "", "changed": "#b36b00", "added": "#1a7f37", "removed": "#cf222e"}
_MOST = 44  # characters in a line of a box
_Line = tuple[str, float, bool]  # text, size, bold
_Path = tuple[str, ...]
_Ends = tuple[str, str, bool]  # the names of two nodes, and whether the edge goes back


def to_dot(diff: Diff, options: Options) -> list[str]:
    """The lines between the braces of a digraph. Equal comparisons give equal lines."""
    theme, names, scopes = THEMES[options.theme], _names(diff), _scopes(diff)
    tree: dict[Any, Any] = {}
    for change in diff.changes:
        inner = tree
        for name in _scope(change, scopes):
            inner = inner.setdefault(name, {})
        inner.setdefault(None, []).append(change)
    ids = {id(change): name for name, change in names.items()}
    lines = head(_caption(diff, options), options, theme, large=len(diff.changes) > MANY)
    lines += _write(tree, ids, theme, options, iter(range(len(diff.changes) * 8 + 1)))
    return [*lines, *_edges(diff, ids, theme)]


def _names(diff: Diff) -> dict[str, Change]:
    """A name for each change. A layer that was removed may have the name of another one."""
    found = {change.after.name: change for change in diff.changes if change.after is not None}
    for change in diff.changes:
        if change.after is None and change.before is not None:
            name = change.before.name
            while name in found:
                name += " (removed)"
            found[name] = change
    return found


def _scopes(diff: Diff) -> dict[_Path, _Path]:
    """What each scope of the first network is called in the second."""
    found: dict[_Path, _Path] = {}
    for change in diff.changes:
        if change.before is None or change.after is None:
            continue
        old, new = change.before.scope, change.after.scope
        for length in range(1, len(old) + 1 if len(old) == len(new) else 1):
            found.setdefault(old[:length], new[:length])
    return found


def _scope(change: Change, scopes: dict[_Path, _Path]) -> tuple[str, ...]:
    """The labels of the clusters around a node, "×12 → ×24" where a scope has another name in the second network."""
    back = {new: old for old, new in scopes.items()}
    path = change.node.scope
    old, new = [path[:length] for length in range(1, len(path) + 1)], list[_Path]()
    if change.after is None:
        new = [scopes.get(scope, scope) for scope in old]
    else:
        new, old = old, [back.get(scope, scope) for scope in old]
    return tuple(_both(scope_label(a[-1]), scope_label(b[-1])) for a, b in zip(old, new, strict=True))


def _both(before: str, after: str) -> str:
    """What a scope is called in two networks: "layers ×12 → ×24"."""
    (name, _, count), (other, _, new) = before.rpartition(" "), after.rpartition(" ")
    return f"{name} {arrow(count, new)}".strip() if name == other else arrow(before, after)


def _write(
    tree: dict[Any, Any], ids: dict[int, str], theme: Theme, options: Options, numbers: Iterator[int], level: int = 0
) -> list[str]:
    """The nodes inside the clusters of their scopes. A scope of one node is none."""
    lines: list[str] = []
    for scope, inner in tree.items():
        if scope is None:
            lines += [_node(change, ids[id(change)], options) for change in inner]
            lines += _side_by_side([ids[id(change)] for change in inner])
        elif _count(inner) == 1:
            lines += _write(inner, ids, theme, options, numbers, level)
        else:
            attrs = {"label": cut_middle(scope, _MOST), "labeljust": "r", "labelloc": "b", "fontsize": 13}
            attrs |= {"style": "rounded,filled", "color": theme.faint, "margin": 10, "tooltip": scope}
            attrs |= {"fillcolor": theme.region if level % 2 else theme.cluster}
            lines += [f"subgraph {quote(f'cluster_{next(numbers)}')} {{", "graph " + attributes(**attrs)]
            lines += [*_write(inner, ids, theme, options, numbers, level + 1), "}"]
    return lines


def _count(tree: dict[Any, Any]) -> int:
    return sum(len(inner) if scope is None else _count(inner) for scope, inner in tree.items())


def _side_by_side(names: list[str]) -> list[str]:
    """Layers and their gradients at the same height."""
    pairs = ((name.removesuffix(BACKWARD), name) for name in names if name.endswith(BACKWARD))
    return [f"{{ rank=same {quote(layer)} {quote(name)} }}" for layer, name in pairs if layer in names]


def _node(change: Change, name: str, options: Options) -> str:
    lines = _label_lines(change)
    attrs: dict[str, Any] = {
        "label": Html(f"<{'<BR/>'.join(_font(*line, COLOURS[change.status]) for line in lines)}>"),
        "fillcolor": COLOURS[change.status],
        "width": f"{max(1.3, max(text_width(*line) for line in lines) / 72 + 0.2):.2f}",
        "tooltip": "\n".join([f"{change.status}: {change.node.name}", *(text for text, _, _ in lines)]),
    }
    if change.node.op == "input":
        attrs["shape"] = "oval"
    if change.node.is_backward or change.status == "removed":
        attrs["style"] = "filled,rounded,dashed" if change.node.op != "input" else "filled,dashed"
    attrs |= dict(options.node_attrs or {})
    return f"{quote(name)} {attributes(**attrs)}"


def _label_lines(change: Change) -> list[_Line]:
    """The lines of a box: name, kind, and of what changed the output and what it costs more."""
    name, layer, shape = change_texts(change)
    if change.node.op == "input":
        return [(cut_middle(name, _MOST), 12.0, False), (cut_middle(shape, _MOST), 9.5, False)]
    found = [(cut_middle(name, _MOST), 10.5, False), (cut_middle(layer, _MOST), 12.0, True)]
    if change.status == "same":
        return found
    found += [(cut_middle(shape, _MOST), 9.5, False)] if "→" in shape else []
    deltas = ((change.params, " params"), (change.flops, "FLOP"), (change.bytes, "B"))
    costs = [
        f"{n:+,} params".replace("-", "−") if unit == " params" else delta_text(n, unit) for n, unit in deltas if n
    ]
    return [*found, *((", ".join(costs[at : at + 2]), 9.5, False) for at in range(0, len(costs), 2))]


def _edges(diff: Diff, ids: dict[int, str], theme: Theme) -> list[str]:
    """The edges of both networks, each once. Those of only one have its colour."""
    names = {
        side: {node.name: ids[id(c)] for c in diff.changes if (node := getattr(c, side)) is not None}
        for side in ("before", "after")
    }
    before, after = _joined(diff.before, names["before"]), _joined(diff.after, names["after"])
    lines: list[str] = []
    for ends in [*after, *(ends for ends in before if ends not in after)]:
        status: Status = "same" if ends in before and ends in after else "added" if ends in after else "removed"
        lines.append(_edge(ends, *(after.get(ends) or before[ends]), status))
    return lines


def _edge(ends: _Ends, edge: Edge, text: str, status: Status) -> str:
    """An edge. Between two gradients it goes down, next to the layers. To a layer's own gradient it goes aside."""
    source, target, carry = ends
    attrs: dict[str, Any] = {"label": f" {text} ", "tooltip": status}
    if status != "same":
        attrs |= {"color": _LINES[status], "penwidth": 1.6, "fontcolor": _LINES[status]}
    attrs |= {"style": "dashed"} if status == "removed" else {}
    if carry:
        attrs |= {"style": "dashed", "constraint": "false"}
    elif edge.target.endswith(BACKWARD):
        if edge.source.endswith(BACKWARD):
            return f"{quote(target)} -> {quote(source)} {attributes(**attrs, dir='back')}"
        if edge.source == edge.target.removesuffix(BACKWARD):
            attrs |= {"label": "", "penwidth": 0.6, "constraint": "false"}
    return f"{quote(source)} -> {quote(target)} {attributes(**attrs)}"


def _joined(graph: Graph, names: dict[str, str]) -> dict[_Ends, tuple[Edge, str]]:
    """The edges of a graph and their labels, by the names of their ends in the picture."""
    nodes, found = {node.name: node for node in graph.nodes}, dict[_Ends, tuple[Edge, str]]()
    for edge in join_carries(graph.edges):
        text = carry_label(edge) if edge.carry else edge_label(edge, nodes[edge.source])
        found[names[edge.source], names[edge.target], edge.carry] = edge, text
    return found


def _caption(diff: Diff, options: Options) -> str:
    rows = [_row(cut_middle(line, 90), 14, bold=True) for line in options.title.splitlines() if line.strip()]
    for side, graph in (("before", diff.before), ("after", diff.after)):
        size = human(sum(node.bytes for node in graph.nodes), "B")
        sums = f"{graph.total_params:,} params · {human(graph.total_flops, 'FLOP')} · {size}"
        rows.append(_row(f"{side}: {sums}", 10, bold=False))
    params = f"{diff.params:+,}".replace("-", "−")
    deltas = f"{params} params · {delta_text(diff.flops, 'FLOP')} · {delta_text(diff.bytes, 'B')}"
    rows.append(_row(f"Δ {deltas}", 10, bold=True))
    if options.legend:
        cells = "".join(_legend_cell(status, diff.counts[status]) for status in STATUSES if diff.counts[status])
        table = f'<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="4" CELLPADDING="3"><TR>{cells}</TR></TABLE>'
        rows += [f"<TR><TD>{table}</TD></TR>"] if cells else []
    return Html(f'<<TABLE BORDER="0" CELLSPACING="0" CELLPADDING="2">{"".join(rows)}</TABLE>>')


def _row(text: str, size: float, *, bold: bool) -> str:
    return f"<TR><TD>{_font(text, size, bold, '')}</TD></TR>"


def _legend_cell(status: Status, count: int) -> str:
    return f'<TD BGCOLOR="{COLOURS[status]}">{_font(f"{count} {status}", 9.5, False, COLOURS[status])}</TD>'


def _font(text: str, size: float, bold: bool, colour: str) -> str:
    for letter, name in (("&", "amp"), ("<", "lt"), (">", "gt"), ('"', "quot")):
        text = text.replace(letter, f"&{name};")
    shown = f"<B>{printable(text)}</B>" if bold else printable(text)
    on = f' COLOR="{ink(colour)}"' if colour else ""
    return f'<FONT POINT-SIZE="{size:g}"{on}>{shown}</FONT>'
