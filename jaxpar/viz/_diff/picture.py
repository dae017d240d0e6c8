"""The picture of a comparison: both networks as one, with what changed in colour.

The nodes of both networks become one `Graph`, under names that are unique in both, and `_draw.dot` draws it with a
`Look` of its own.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Any, Literal

from ..._core.text import cut_middle
from .._draw import dot
from .._draw.look import join_carries
from .._draw.picture import Plot
from .._draw.style import Line, Options, caption_of, title_lines
from .._graph import Edge, Graph, Node, human
from .._scopes import Path, Scope, paths_of
from .changes import Change, Diff, Status, arrow, change_texts, delta_text, to_html

COLOURS: dict[Status, str] = {"same": "#d9d9d9", "changed": "#fdc162", "added": "#8fd694", "removed": "#f2918c"}
_LINES: dict[Status, str] = {"added": "#1a7f37", "removed": "#cf222e"}
_MOST = 44  # characters in a line of a box
_Ends = tuple[str, str, bool]  # the names of two nodes, and whether the edge goes back


def to_dot(diff: Diff, options: Options) -> list[str]:
    """The lines between the braces of a digraph. Equal comparisons give equal lines."""
    changes, scopes = _names(diff), _scopes(diff)
    nodes = (replace(change.node, name=name, scope=_scope(change, scopes)) for name, change in changes.items())
    before, after = _edges(diff, changes, "before"), _edges(diff, changes, "after")
    edges = after | {ends: edge for ends, edge in before.items() if ends not in after}
    graph = Graph(tuple(nodes), tuple(edges.values()))
    return dot.to_dot(graph, options, _Look(diff, options, changes, before.keys(), after.keys()))


def _edges(diff: Diff, changes: dict[str, Change], side: Literal["before", "after"]) -> dict[_Ends, Edge]:
    """The edges of one network, with the names of the picture."""
    names = {node.name: name for name, change in changes.items() if (node := getattr(change, side)) is not None}
    graph: Graph = getattr(diff, side)
    edges = (replace(edge, source=names[edge.source], target=names[edge.target]) for edge in join_carries(graph.edges))
    return {_ends(edge): edge for edge in edges}


def _ends(edge: Edge) -> _Ends:
    return edge.source, edge.target, edge.carry


class _Look(dot.Look):
    """Boxes and arrows in the colours of what changed."""

    def __init__(
        self, diff: Diff, options: Options, changes: dict[str, Change], before: Set[_Ends], after: Set[_Ends]
    ) -> None:
        self.options, self.signs, self.caption = options, dict[str, str](), _caption(diff, options)
        self._changes, self._before, self._after = changes, before, after

    def fill(self, node: Node) -> str:
        return COLOURS[self._changes[node.name].status]

    def is_dashed(self, node: Node) -> bool:
        return node.is_backward or self._changes[node.name].status == "removed"

    def lines(self, node: Node) -> list[Line]:
        return _label_lines(self._changes[node.name])

    def tooltip(self, node: Node) -> str:
        change = self._changes[node.name]
        return "\n".join([f"{change.status}: {change.node.name}", *(text for text, _, _ in _label_lines(change))])

    def arrow(self, edge: Edge) -> dict[str, Any]:
        if _ends(edge) in self._before and _ends(edge) in self._after:
            return {"tooltip": "same"}
        status: Status = "added" if _ends(edge) in self._after else "removed"
        look = {"color": _LINES[status], "penwidth": 1.6, "fontcolor": _LINES[status], "tooltip": status}
        return look | ({"style": "dashed"} if status == "removed" else {})


def _names(diff: Diff) -> dict[str, Change]:
    """A name for each change. A layer that was removed may have the name of another one."""
    by_name = {change.after.name: change for change in diff.changes if change.after is not None}
    for change in diff.changes:
        if change.after is None and change.before is not None:
            name = change.before.name
            while name in by_name:
                name += " (removed)"
            by_name[name] = change
    return by_name


def _scopes(diff: Diff) -> dict[Path, Path]:
    """What each scope of the first network is called in the second."""
    second_names: dict[Path, Path] = {}
    for change in diff.changes:
        if change.before is not None and change.after is not None:
            old, new = paths_of(change.before.scope), paths_of(change.after.scope)
            for path, other in zip(old, new, strict=True) if len(old) == len(new) else ():
                second_names.setdefault(path, other)
    return second_names


def _scope(change: Change, scopes: dict[Path, Path]) -> Path:
    """The scopes around a node, "×12 → ×24" where one has another name in the second network."""
    back = {new: old for old, new in scopes.items()}
    paths = paths_of(change.node.scope)
    if change.after is None:
        return tuple(_both(path[-1], scopes.get(path, path)[-1]) for path in paths)
    return tuple(_both(back.get(path, path)[-1], path[-1]) for path in paths)


def _both(before: Scope, after: Scope) -> Scope:
    """A scope in two networks: "layers ×12 → ×24"."""
    if before == after:
        return after
    (name, _, count), (other, _, new) = (str(scope.numbered(1)).rpartition(" ") for scope in (before, after))
    text = f"{name} {arrow(count, new)}".strip() if name == other else arrow(before.numbered(1), after.numbered(1))
    return Scope(text.removesuffix(f" ×{after.times}"), after.kind, after.times, after.call)


def _label_lines(change: Change) -> list[Line]:
    """The lines of a box: name, kind, and of what changed the output and what it costs more."""
    name, layer, shape = change_texts(change)
    if change.node.op == "input":
        return [(cut_middle(name, _MOST), 12.0, False), (cut_middle(shape, _MOST), 9.5, False)]
    lines = [(cut_middle(name, _MOST), 10.5, False), (cut_middle(layer, _MOST), 12.0, True)]
    if change.status == "same":
        return lines
    lines += [(cut_middle(shape, _MOST), 9.5, False)] if "→" in shape else []
    deltas = ((change.params, " params"), (change.flops, "FLOP"), (change.bytes, "B"))
    costs = [
        f"{n:+,} params".replace("-", "−") if unit == " params" else delta_text(n, unit) for n, unit in deltas if n
    ]
    return [*lines, *((", ".join(costs[at : at + 2]), 9.5, False) for at in range(0, len(costs), 2))]


def _caption(diff: Diff, options: Options) -> str:
    lines = title_lines(options.title)
    for side, graph in (("before", diff.before), ("after", diff.after)):
        size = human(sum(node.bytes for node in graph.nodes), "B")
        sums = f"{graph.total_params:,} params · {human(graph.total_flops, 'FLOP')} · {size}"
        lines.append((f"{side}: {sums}", 10, False))
    params = f"{diff.params:+,}".replace("-", "−")
    deltas = f"{params} params · {delta_text(diff.flops, 'FLOP')} · {delta_text(diff.bytes, 'B')}"
    shown = diff.counts if options.legend else {}
    legend = [(COLOURS[status], f"{count} {status}") for status, count in shown.items() if count]
    return caption_of([*lines, (f"Δ {deltas}", 10, True)], legend)


class DiffPlot(Plot):
    """A drawn comparison. A notebook shows it and `save` writes it.

    Attributes:
        diff: the `Diff` that it was drawn from.
        network: the second network.
        time_limit: seconds that the renderer may take.
    """

    def __init__(self, diff: Diff, options: Options, time_limit: float) -> None:
        super().__init__(diff.after, options, time_limit, lines=to_dot(diff, options))
        self.diff: Diff = diff

    def __repr__(self) -> str:
        return repr(self.diff)

    def html(self, *args: Any, **options: Any) -> str:
        """The picture and the table as one static page."""
        return self._static_page(self._table())

    def _table(self) -> str:
        return to_html(self.diff, self.options.title)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None, **_: object) -> dict[str, bytes | str]:
        """The picture for a notebook, as SVG and PNG. Without a renderer, what to install and the table."""
        return {**super()._repr_mimebundle_(include, exclude), "text/plain": str(self.diff)}
