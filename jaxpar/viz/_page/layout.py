"""Where Graphviz puts the boxes, ports and lines of each block."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from .._draw.attributes import quote
from .._draw.labels import label_lines, scope_label
from .._draw.render import NEXT, render
from .._draw.style import SIZE, SMALL, text_width
from .._graph import Node, human
from .blocks import Block, Line, Text, Tree
from .lines import CROWDED

Point = tuple[float, float]

_START = re.compile(r"\S")  # of a document
_POINTS = 72.0  # of an inch
_MANY = 40  # items, above which dot works with limits, as it does in a crowd of lines
_PORT = {"up": 0.4, "down": 0.4, "right": 0.02}  # inches, so that the labels of lines have room
_RANKDIR = {"up": "TB", "down": "TB", "right": "LR"}  # the page turns it over for "up"


@dataclass(frozen=True, slots=True)
class Layout:
    """Places in points from the left and the top. The forward pass flows down, or to the right.

    Attributes:
        width, height: of all.
        items, ports: centres, in the order of the block.
        lines: the Bézier points of each line, from its tail to its head.
        labels: the centre of each line's label. None for a line without one.
    """

    width: float
    height: float
    items: list[Point]
    ports: list[Point]
    lines: list[list[Point]]
    labels: list[Point | None]


def layouts(tree: Tree, direction: str, heat: str | None, time_limit: float) -> tuple[list[Layout], list[int]]:
    """The layouts of all blocks, from one run of Graphviz.

    Returns:
        The layouts that differ, and which of them each block has.

    Raises:
        RenderError: there is no Graphviz, or it took longer than `time_limit`.
    """
    texts = [_dot(tree, block, direction, heat) for block in tree.blocks]
    distinct = list(dict.fromkeys(texts))
    drawn = _documents(render(NEXT.join(distinct), "json0", time_limit).decode())
    first = {text: tree.blocks[texts.index(text)] for text in distinct}
    found = [_layout(first[text], graph) for text, graph in zip(distinct, drawn, strict=True)]
    at = {text: number for number, text in enumerate(distinct)}
    return found, [at[text] for text in texts]


def _documents(text: str) -> list[dict[str, Any]]:
    """JSON documents that follow each other."""
    found: list[dict[str, Any]] = []
    decoder, start = json.JSONDecoder(), _START.search(text)
    while start is not None:
        document, at = decoder.raw_decode(text, start.start())
        found.append(document)
        start = _START.search(text, at)
    return found


def _dot(tree: Tree, block: Block, direction: str, heat: str | None) -> str:
    """The boxes of a block without their words, and its lines. Equal shapes give equal texts."""
    rows = ["digraph {", f"graph [rankdir={_RANKDIR[direction]} nodesep=0.3 ranksep=0.32{_limits(block)}]"]
    rows += ['node [shape=box fixedsize=true label=""]', f"edge [dir=none fontsize={SMALL}]"]
    for at, item in enumerate(block.items):
        width, height = size(tree, item, heat)
        shape = " shape=ellipse" if is_oval(tree, item) else ""
        rows.append(f"i{at} [width={width / _POINTS:.3f} height={height / _POINTS:.3f}{shape}]")
    for first, rank in ((True, "source"), (False, "sink")):
        ports = [
            f"p{at} [width={_PORT[direction]} height=.02];"
            for port, at in block.ports.items()
            if port.is_first is first
        ]
        rows += [f"{{ rank={rank}; {' '.join(ports)} }}"] if ports else []
    place = {item: at for at, item in enumerate(block.items)}
    rows += [f"{{ rank=same; i{place[layer]}; i{place[gradient]} }}" for layer, gradient in block.pairs]
    rows += [_line(line, place, at) for at, line in enumerate(block.lines)]
    return "\n".join([*rows, "}"])


def _limits(block: Block) -> str:
    if len(block.lines) > CROWDED:
        return " nslimit=0.4 nslimit1=0.4 mclimit=0.1 splines=line"
    return " nslimit=1 nslimit1=1 mclimit=0.2" if len(block.items) > _MANY else ""


def _line(line: Line, place: dict[int, int], at: int) -> str:
    tail = f"i{place[line.tail]}" if line.tail >= 0 else f"p{line.tail_port}"
    head = f"i{place[line.head]}" if line.head >= 0 else f"p{line.head_port}"
    ends = f"{head} -> {tail}" if line.kind == "back" else f"{tail} -> {head}"
    constraint = " constraint=false" if line.kind in ("pair", "carry") and min(line.tail, line.head) >= 0 else ""
    label = f" label={quote(re.sub(r'[^0-9]', 'x', f' {line.label} '))}" if line.label else ""
    return f"{ends} [id={at}{label}{constraint}]"


def texts(tree: Tree, item: int, heat: str | None) -> list[Text]:
    """What is written in a box, closed where it is a block."""
    if (item, heat) not in tree.words:
        tree.words[item, heat] = _texts(tree, item, heat)
    return tree.words[item, heat]


def _texts(tree: Tree, item: int, heat: str | None) -> list[Text]:
    if item in tree.signs:
        return [(tree.signs[item], SIZE + 2, True)]
    if not tree.is_block(item):
        return list(label_lines(tree.nodes[item], heat))
    inside = [tree.nodes[node] for node in tree.nodes_in(item)]
    layers = sum(node.op not in ("input", "weight") for node in inside)
    facts = [f"{layers:,} layer{'s' * (layers != 1)}"]
    facts += [f"{params:,} params"] if (params := sum(n.params for n in inside if n.op != "weight")) else []
    return [
        (scope_label(tree.block(item).label), SIZE, True),
        (" · ".join(facts), SMALL, False),
        *_heat(inside, heat),
    ]


def _heat(inside: list[Node], heat: str | None) -> list[Text]:
    unit = {"flops": "FLOP", "bytes": "B"}.get(heat or "")
    return [(human(sum(getattr(node, heat) for node in inside), unit), SMALL, False)] if heat and unit else []


def size(tree: Tree, item: int, heat: str | None) -> tuple[int, int]:
    """Width and height of a closed box, in points."""
    if item in tree.signs:
        return 22, 22
    lines = texts(tree, item, heat)
    width = max(text_width(text, size, bold) for text, size, bold in lines) + 14 + 18 * tree.is_block(item)
    height = sum(size for _, size, _ in lines) * 1.15 + 12
    return round(max(94, width * (1.3 if is_oval(tree, item) else 1))), round(max(36, height))


def is_oval(tree: Tree, item: int) -> bool:
    """Whether an item is drawn as an oval or circle: arguments, parameters, and what only joins others."""
    return not tree.is_block(item) and (item in tree.signs or tree.nodes[item].op in ("input", "weight"))


def _layout(block: Block, graph: dict[str, Any]) -> Layout:
    """What Graphviz wrote of one graph."""
    _, _, width, height = map(float, graph["bb"].split(","))
    place = {o["name"]: _point(o["pos"], height) for o in graph.get("objects", ()) if "pos" in o}
    edges = {int(edge["id"]): edge for edge in graph.get("edges", ())}
    lines = [_spline(edges[at]["pos"], height, line.kind == "back") for at, line in enumerate(block.lines)]
    labels = [_point(edges[at]["lp"], height) if "lp" in edges[at] else None for at in range(len(block.lines))]
    items = [place[f"i{at}"] for at in range(len(block.items))]
    return Layout(width, height, items, [place[f"p{at}"] for at in range(len(block.ports))], lines, labels)


def _point(text: str, height: float) -> Point:
    x, y = text.split(",")
    return float(x), height - float(y)


def _spline(text: str, height: float, is_back: bool) -> list[Point]:
    points = [_point(part, height) for part in text.split() if part.count(",") == 1]
    return points[::-1] if is_back else points
