"""From a `Graph` to the text of a picture, in Graphviz's dot language: pure, and the same for the same graph."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .._graph import BACKWARD, Edge, Graph, Node, human
from .._layout.net import REGIONS
from . import style
from .style import THEMES, Theme, text_width

_SIZE, _SMALL = 12.0, 9.5  # points
_POINTS = 72.0  # an inch
_MANY = 150  # nodes, above which dot is told to try less hard
_FONT = "Helvetica,Arial,sans-serif"
_REGIONS = (*REGIONS, "×")


@dataclass(frozen=True, slots=True)
class Options:
    """How a graph is drawn; the arguments of `plot_network`."""

    title: str = "plot"
    hide_weights: bool = True
    node_attrs: Mapping[str, str] | None = None
    heat: str | None = None
    theme: str = "light"
    legend: bool = True


def to_dot(graph: Graph, options: Options) -> list[str]:
    """The lines between the braces of a digraph."""
    theme = THEMES[options.theme]
    edges = list(graph.edges) + ([] if options.hide_weights else list(graph.weight_edges))
    nodes = _drawn(graph, edges) + ([] if options.hide_weights else list(graph.weights))
    lines = _head(graph, nodes, options, theme)
    lines += _nodes(graph, nodes, options, theme)
    by_name = {node.name: node for node in nodes}
    lines += [_edge(by_name, edge, theme) for edge in edges if not _kept(by_name, edge)]
    return lines + _pairs(nodes, theme)


def _drawn(graph: Graph, edges: list[Edge]) -> list[Node]:
    """All nodes but the scalars that stand alone, such as the step that an optimizer counts."""
    joined = {end for edge in edges for end in (edge.source, edge.target)}
    return [node for node in graph.nodes if node.name in joined or node.shape or not joined]


def quote(text: str) -> str:
    """A quoted string of the dot language."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _attrs(**values: object) -> str:
    return "[" + " ".join(f"{key}={_value(value)}" for key, value in values.items()) + "]"


def _value(value: object) -> str:
    text = str(value)
    return text if text.startswith("<<") else quote(text)


def _html(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def _head(graph: Graph, nodes: list[Node], options: Options, theme: Theme) -> list[str]:
    limits = {"nslimit": 1, "nslimit1": 1, "mclimit": 0.2} if len(nodes) > _MANY else {}
    fonts = {"fontname": _FONT, "fontcolor": theme.text}
    return [
        "graph "
        + _attrs(
            rankdir="BT", bgcolor=theme.background, nodesep=0.3, ranksep=0.32, labelloc="b", labeljust="c",
            tooltip=options.title, **fonts, **limits, label=_caption(graph, nodes, options, theme),
        ),
        "node " + _attrs(shape="box", style="filled,rounded", fontname=_FONT, fontcolor="#1f2328", fontsize=_SIZE,
                         color="#6e7781", penwidth=0.8, margin="0.1,0.05"),
        "edge " + _attrs(color=theme.line, fontcolor=theme.line, fontname=_FONT, fontsize=_SMALL, arrowsize=0.6,
                         penwidth=0.9),
    ]  # fmt: skip


def _caption(graph: Graph, nodes: list[Node], options: Options, theme: Theme) -> str:
    """The title, the totals and the legend."""
    counts = f"{graph.total_params:,} parameters · {human(graph.total_flops, 'FLOP')}"
    rows = [f'<TR><TD><FONT POINT-SIZE="14"><B>{_html(options.title)}</B></FONT></TD></TR>']
    rows.append(f'<TR><TD><FONT POINT-SIZE="10">{_html(counts)}</FONT></TD></TR>')
    if options.legend and options.heat is None:
        entries = style.legend(nodes)
        for start in range(0, len(entries), 4):
            cells = "".join(
                f'<TD BGCOLOR="{colour}" WIDTH="{text_width(name, _SMALL) + 8:.0f}">'
                f'<FONT POINT-SIZE="{_SMALL}" COLOR="{ink(colour)}">{_html(name)}</FONT></TD>'
                for colour, name in entries[start : start + 4]
            )
            rows.append(
                f'<TR><TD><TABLE BORDER="0" CELLBORDER="0" CELLSPACING="4" CELLPADDING="3"><TR>{cells}</TR>'
                "</TABLE></TD></TR>"
            )
    elif options.heat is not None:
        text = f"{_html(options.heat)}: white is none, red the most of all nodes"
        rows.append(f'<TR><TD><FONT POINT-SIZE="{_SMALL}">{text}</FONT></TD></TR>')
    return f'<<TABLE BORDER="0" CELLSPACING="0" CELLPADDING="2">{"".join(rows)}</TABLE>>'


def _nodes(graph: Graph, nodes: list[Node], options: Options, theme: Theme) -> list[str]:
    """Nodes inside the clusters of their scopes."""
    most = max((_cost(node, options.heat) for node in nodes), default=0) or 1
    drawn = _clusters(graph, nodes)
    tree: dict[Any, Any] = {}  # a scope -> what is in it; None -> the nodes here
    for node in nodes:
        inner = tree
        for scope in (path for path in _paths(node.scope) if path in drawn):
            inner = inner.setdefault(scope, {})
        inner.setdefault(None, []).append(node)
    return _write(tree, options, theme, most, iter(range(len(drawn) + 1)), 0)


def _paths(scope: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [scope[:length] for length in range(1, len(scope) + 1)]


def _clusters(graph: Graph, nodes: list[Node]) -> set[tuple[str, ...]]:
    """Scopes of two nodes or more that say something: not the one around everything, not one twice."""
    members: dict[tuple[str, ...], int] = {}
    for node in nodes:
        for path in _paths(node.scope):
            members[path] = members.get(path, 0) + 1
    layers = len(graph.layers)
    drawn = set()
    for path, count in members.items():
        inner = [p for p in members if len(p) == len(path) + 1 and p[:-1] == path and members[p] == count]
        special = path[-1].startswith(_REGIONS) or "×" in path[-1]
        if special or (1 < count < layers and not inner):
            drawn.add(path)
    return drawn


def _write(
    tree: dict[Any, Any], options: Options, theme: Theme, most: int, numbers: Iterator[int], level: int
) -> list[str]:
    lines: list[str] = []
    for scope, inner in tree.items():
        if scope is None:
            lines += [_node(node, options, most) for node in inner]
            lines += _side_by_side(inner)
            continue
        region = scope[-1].startswith(_REGIONS)
        lines.append(f"subgraph {quote(f'cluster_{next(numbers)}')} {{")
        lines.append(
            "graph "
            + _attrs(
                label=_scope_label(scope[-1]),
                labelloc="b",
                labeljust="r",
                fontsize=13,
                margin=10,
                style="rounded,filled" + (",dashed" if region else ""),
                color=theme.faint,
                fillcolor=theme.region if region or level % 2 else theme.cluster,
                tooltip="/".join(scope),
            )
        )
        lines += _write(inner, options, theme, most, numbers, level + 1)
        lines.append("}")
    return lines


def _scope_label(name: str) -> str:
    head, found, number = name.rpartition(" (")
    return head if found and number[:-1].isdigit() else name


def _cost(node: Node, heat: str | None) -> int:
    return {"flops": node.flops, "bytes": node.bytes}.get(heat or "", 0)


def label_lines(node: Node, heat: str | None) -> list[tuple[str, float, bool]]:
    """The lines of a label: text, size, bold."""
    if node.op == "input":
        return [(node.name, _SIZE, False), (node.dtype, _SMALL, False)]
    if node.op == "weight":
        return [(_weight_name(node.name), _SIZE - 1, False), (f"{_shape(node.shape)} {node.dtype}", _SMALL, False)]
    found = [(node.kind, _SIZE, True)]
    found += [("backward", _SMALL, False)] if node.is_backward else []
    found += [(node.detail, _SIZE - 1, False)] if node.detail and not node.is_backward else []
    if node.params:
        each, rest = divmod(node.params, node.repeat)
        times = f"{node.repeat} × " if node.repeat > 1 and not rest else ""
        found.append((f"{times}{each if times else node.params:,} params", _SMALL, False))
    if heat:
        unit = "FLOP" if heat == "flops" else "B"
        found.append((human(_cost(node, heat), unit), _SMALL, False))
    return found


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _weight_name(name: str) -> str:
    """ "conv1/weight" for params['conv1']['weight']."""
    keys = re.findall(r"[\w-]+", name)
    return "/".join(keys[1:] or keys)


def _node(node: Node, options: Options, most: int) -> str:
    lines = label_lines(node, options.heat)
    colour = style.fill(node)
    if options.heat and node.op not in ("input", "weight"):
        colour = style.heat(_cost(node, options.heat) / most)
    text_colour = ink(colour)
    label = "<BR/>".join(
        f'<FONT POINT-SIZE="{size:g}" COLOR="{text_colour}">{f"<B>{_html(text)}</B>" if bold else _html(text)}</FONT>'
        for text, size, bold in lines
    )
    width = max(text_width(text, size, bold) for text, size, bold in lines) / _POINTS + 0.2
    attrs = {
        "label": f"<{label}>",
        "fillcolor": colour,
        "width": f"{max(1.3, width * (1.3 if node.op == 'input' else 1)):.2f}",
        "height": f"{max(0.5, sum(size for _, size, _ in lines) * 1.15 / _POINTS + 0.16):.2f}",
        "tooltip": tooltip(node),
    }
    if node.op in ("input", "weight"):
        attrs |= {"shape": "oval", "style": "filled" + (",dashed" if node.op == "weight" else "")}
    elif node.is_backward:
        attrs |= {"style": "filled,rounded,dashed"}
    if node.outputs and not node.is_backward:
        attrs |= {"penwidth": 2}
    attrs |= dict(options.node_attrs or {})
    return f"{quote(node.name)} {_attrs(**attrs)}"


def ink(colour: str) -> str:
    """Dark text on light colours, white on dark ones."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#1f2328" if 0.3 * red + 0.59 * green + 0.11 * blue > 120 else "#ffffff"


def tooltip(node: Node) -> str:
    lines = [f"{node.name}: {node.op}" + (f" {node.detail}" if node.detail else "")]
    lines.append(f"output {node.dtype}[{','.join(map(str, node.shape))}]")
    if node.params:
        lines.append(f"{node.params:,} parameters")
    if node.weights:
        lines.append("weights " + ", ".join(node.weights[:4]) + (", ..." if len(node.weights) > 4 else ""))
    if node.op not in ("input", "weight"):
        lines.append(f"{human(node.flops, 'FLOP')}, {human(node.bytes, 'B')}, {node.equations} equations")
    lines += [f"drawn once for {node.repeat} copies"] if node.repeat > 1 else []
    lines += ["in " + "/".join(node.scope)] if node.scope else []
    lines += [node.source] if node.source else []
    lines += ["returned as " + ", ".join(node.outputs[:4])] if node.outputs else []
    return "\n".join(lines)


def _forward(by_name: dict[str, Node], node: Node) -> Node | None:
    """The layer whose gradient a node is."""
    name, _, number = node.name.partition(BACKWARD)
    return by_name.get(name) if node.is_backward and not number else None


def _kept(by_name: dict[str, Node], edge: Edge) -> bool:
    """Whether an edge carries what the forward pass kept for a gradient; the line to its layer stands for it."""
    source, target = by_name[edge.source], by_name[edge.target]
    own = _forward(by_name, target)
    return target.is_backward and not source.is_backward and own is not None and source.op != "Loss"


def _pairs(nodes: list[Node], theme: Theme) -> list[str]:
    """A line from each layer to its gradient."""
    by_name = {node.name: node for node in nodes}
    pairs = ((_forward(by_name, node), node) for node in nodes)
    line = _attrs(color=theme.faint, style="dashed", constraint="false", penwidth=0.6, dir="none")
    return [
        f"{quote(layer.name)} -> {quote(node.name)} {line}"
        for layer, node in pairs
        if layer is not None and layer.op != "Loss"
    ]


def _side_by_side(nodes: list[Node]) -> list[str]:
    """Layers and their gradients at the same height; said inside their cluster, or dot takes them out of it."""
    by_name = {node.name: node for node in nodes}
    pairs = ((_forward(by_name, node), node) for node in nodes)
    return [f"{{ rank=same {quote(a.name)} {quote(b.name)} }}" for a, b in pairs if a is not None]


def _edge(by_name: dict[str, Node], edge: Edge, theme: Theme) -> str:
    source, target = by_name[edge.source], by_name[edge.target]
    shape = _shape(edge.shape) + ("" if edge.dtype in ("float32", "") else f" {edge.dtype}")
    ends = f"{quote(edge.source)} -> {quote(edge.target)}"
    if source.is_backward and target.is_backward:  # downwards, beside the layers
        return f"{quote(edge.target)} -> {quote(edge.source)} " + _attrs(label=f" {shape} ", dir="back")
    return ends if source.op == "weight" else f"{ends} " + _attrs(label=f" {shape} ")
