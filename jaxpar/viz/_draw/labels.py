"""The words of a picture: labels, tooltips, caption and legend."""

from __future__ import annotations

import re

from ..._core.text import cut_middle, printable
from .._graph import Edge, Graph, Node, human
from . import style
from .style import SIZE, SMALL, Options, text_width

_MOST_LEAVES = 12  # in a tooltip
_Line = tuple[str, float, bool]  # text, size, bold
_TITLE = 90  # characters


def label_lines(node: Node, heat: str | None) -> list[_Line]:
    """The lines of a node's label."""
    if node.op == "input":
        return [(node.name, SIZE, False), (node.detail or node.dtype, SMALL, False)]
    if node.op == "weight":
        return [(_weight_name(node.name), SIZE - 1, False), (f"{shape_text(node.shape)} {node.dtype}", SMALL, False)]
    found = [(node.kind, SIZE, True)]
    found += [("backward", SMALL, False)] if node.is_backward else []
    found += [(node.detail, SIZE - 1, False)] if node.detail and not node.is_backward else []
    if node.params:
        each, rest = divmod(node.params, node.repeat)
        times = f"{node.repeat} × " if node.repeat > 1 and not rest else ""
        found.append((f"{times}{each if times else node.params:,} params", SMALL, False))
    if heat:
        unit = "FLOP" if heat == "flops" else "B"
        found.append((human(cost(node, heat), unit), SMALL, False))
    return found


def label(lines: list[_Line], colour: str) -> str:
    """The lines as one of Graphviz's HTML-like labels."""
    fonts = [
        f'<FONT POINT-SIZE="{size:g}" COLOR="{colour}">{f"<B>{_html(text)}</B>" if bold else _html(text)}</FONT>'
        for text, size, bold in lines
    ]
    return f"<{'<BR/>'.join(fonts)}>"


def edge_label(edge: Edge, source: Node) -> str:
    """What flows along an edge: its shape, or how many arrays of an argument."""
    if source.leaves and edge.arrays > 1:
        return f"{edge.arrays} arrays"
    shape = shape_text(edge.shape) + ("" if edge.dtype in ("float32", "") else f" {edge.dtype}")
    return f"{edge.label} {shape}".strip()


def output_text(node: Node) -> str:
    """The shape and dtype of a node's output, or how many arrays an input has."""
    return node.detail if node.leaves else f"{shape_text(node.shape)} {node.dtype}"


def cost(node: Node, heat: str | None) -> int:
    """What `heat` colours by."""
    return {"flops": node.flops, "bytes": node.bytes}.get(heat or "", 0)


def shape_text(shape: tuple[int, ...]) -> str:
    """ "2x3" for (2, 3)."""
    return "x".join(map(str, shape)) or "scalar"


def scope_label(name: str) -> str:
    """The label of a cluster: its scope, without a number."""
    head, found, number = name.rpartition(" (")
    return head if found and number[:-1].isdigit() else name


def _weight_name(name: str) -> str:
    """ "conv1/weight" for params['conv1']['weight']."""
    keys = re.findall(r"[\w-]+", name)
    return "/".join(keys[1:] or keys)


def tooltip(node: Node) -> str:
    """Everything that is known of a node, a fact on each line."""
    lines = [f"{node.name}: {node.op}" + (f" {node.detail}" if node.detail else "")]
    if node.leaves:
        lines += [*node.leaves[:_MOST_LEAVES], *(["..."] if len(node.leaves) > _MOST_LEAVES else [])]
    else:
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


def caption(graph: Graph, nodes: list[Node], options: Options) -> str:
    """The title, the totals and the legend, as a table of Graphviz."""
    counts = f"{graph.total_params:,} parameters · {human(graph.total_flops, 'FLOP')}"
    rows = [_title_row(line) for line in options.title.splitlines() if line.strip()]
    rows.append(f'<TR><TD><FONT POINT-SIZE="10">{_html(counts)}</FONT></TD></TR>')
    if options.heat is not None:
        text = f"{_html(options.heat)}: white is none, red the most of all nodes"
        rows.append(f'<TR><TD><FONT POINT-SIZE="{SMALL}">{text}</FONT></TD></TR>')
    elif options.legend:
        entries = style.legend(nodes)
        rows += [_legend_row(entries[start : start + 4]) for start in range(0, len(entries), 4)]
    return f'<<TABLE BORDER="0" CELLSPACING="0" CELLPADDING="2">{"".join(rows)}</TABLE>>'


def _title_row(line: str) -> str:
    return f'<TR><TD><FONT POINT-SIZE="14"><B>{_html(cut_middle(line, _TITLE))}</B></FONT></TD></TR>'


def _legend_row(entries: list[tuple[str, str]]) -> str:
    cells = "".join(
        f'<TD BGCOLOR="{colour}" WIDTH="{text_width(name, SMALL) + 8:.0f}">'
        f'<FONT POINT-SIZE="{SMALL}" COLOR="{style.ink(colour)}">{_html(name)}</FONT></TD>'
        for colour, name in entries
    )
    table = f'<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="4" CELLPADDING="3"><TR>{cells}</TR></TABLE>'
    return f"<TR><TD>{table}</TD></TR>"


def _html(text: str) -> str:
    return printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
