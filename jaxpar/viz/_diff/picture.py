"""The picture of a comparison: both networks as one, with what changed in colour."""

from __future__ import annotations

from typing import Any

from ..._core.text import cut_middle
from .._draw.dot import MANY, carry_label, clusters, head, join_carries, side_by_side
from .._draw.labels import caption_of, edge_label, label, scope_label, title_lines
from .._draw.picture import Plot
from .._draw.style import THEMES, Options, Theme, attributes, ink, quote, text_width
from .._graph import BACKWARD, Edge, Graph, human
from .._scopes import Block, nest, paths_of
from .changes import Change, Diff, Status, arrow, change_texts, delta_text, to_html

COLOURS: dict[Status, str] = {"same": "#d9d9d9", "changed": "#fdc162", "added": "#8fd694", "removed": "#f2918c"}
_LINES: dict[Status, str] = {"same": "", "changed": "#b36b00", "added": "#1a7f37", "removed": "#cf222e"}
_MOST = 44  # characters in a line of a box
_Line = tuple[str, float, bool]  # text, size, bold
_Path = tuple[str, ...]
_Ends = tuple[str, str, bool]  # the names of two nodes, and whether the edge goes back


def to_dot(diff: Diff, options: Options) -> list[str]:
    """The lines between the braces of a digraph. Equal comparisons give equal lines."""
    theme, names, scopes = THEMES[options.theme], _names(diff), _scopes(diff)
    ids = {id(change): name for name, change in names.items()}
    tree = nest((change, paths_of(_scope(change, scopes))) for change in diff.changes)

    def draw(inside: list[Change]) -> list[str]:
        known = [ids[id(change)] for change in inside]
        return [_node(change, ids[id(change)], options) for change in inside] + side_by_side(known)

    lines = head(_caption(diff, options), options, theme, large=len(diff.changes) > MANY)
    lines += clusters(tree, draw, lambda block, level: _frame(block, theme, level))
    return [*lines, *_edges(diff, ids, theme)]


def _frame(block: Block[Change], theme: Theme, level: int) -> dict[str, Any] | None:
    """The attributes of a cluster. A scope of one node has none."""
    if len(list(block.all_leaves())) == 1:
        return None
    name = block.path[-1]
    attrs = {"label": cut_middle(name, _MOST), "labeljust": "r", "labelloc": "b", "fontsize": 13}
    attrs |= {"style": "rounded,filled", "color": theme.faint, "margin": 10, "tooltip": name}
    return attrs | {"fillcolor": theme.region if level % 2 else theme.cluster}


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


def _node(change: Change, name: str, options: Options) -> str:
    lines = _label_lines(change)
    attrs: dict[str, Any] = {
        "label": label(lines, ink(COLOURS[change.status])),
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
        super().__init__(diff.after, options, time_limit)
        self.diff: Diff = diff
        self.body: list[str] = ["\t" + line + "\n" for line in to_dot(diff, options)]
        self._drawn: str = self.source

    def __repr__(self) -> str:
        return repr(self.diff)

    def html(self, *args: Any, **options: Any) -> str:
        """The picture and the table as one static page."""
        return self._static_page(self._table())

    def _table(self) -> str:
        return to_html(self.diff, self.options.title)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None, **_: Any) -> dict[str, bytes | str]:
        """The picture for a notebook, as SVG and PNG. Without a renderer, what to install and the table."""
        return {**super()._repr_mimebundle_(include, exclude), "text/plain": str(self.diff)}
