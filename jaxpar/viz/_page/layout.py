"""Where Graphviz puts the boxes and lines of each block, with the blocks in it closed.

It runs once for all blocks that differ.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from .._draw.render import NEXT, render
from .._draw.style import SMALL, quote
from .blocks import CROWDED, Block, Line, Tree

Point = tuple[float, float]

_START = re.compile(r"\S")  # of a document
_POINTS = 72.0  # of an inch
_MANY = 40  # items, above which dot works with limits, as it does in a crowd of lines
_PORT = {"up": 0.4, "down": 0.4, "right": 0.02}  # inches, so that the labels of lines have room
_RANKDIR = {"up": "TB", "down": "TB", "right": "LR"}  # the page turns it over for "up"


@dataclass(frozen=True, slots=True)
class Layout:
    """Places in points from the left and the top. The forward pass flows down, or to the right."""

    width: float
    height: float
    items: list[Point]  # centres, in the order of the block
    ports: list[Point]
    lines: list[list[Point]]  # the Bézier points of each, from its tail to its head
    labels: list[Point | None]  # the centre of each line's label


def layouts(tree: Tree, direction: str, time_limit: float) -> tuple[list[Layout], list[int]]:
    """The layouts of blocks that differ, from one run of Graphviz, and which of them each block has."""
    texts = [_dot(tree, block, direction) for block in tree.blocks]
    first = dict(zip(reversed(texts), reversed(tree.blocks), strict=True))  # the first block of each text
    at = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    drawn = _documents(render(NEXT.join(at), "json0", time_limit).decode())
    return [_layout(first[text], graph) for text, graph in zip(at, drawn, strict=True)], [at[text] for text in texts]


def _documents(text: str) -> list[dict[str, Any]]:
    """JSON documents that follow each other."""
    documents: list[dict[str, Any]] = []
    decoder, start = json.JSONDecoder(), _START.search(text)
    while start is not None:
        document, at = decoder.raw_decode(text, start.start())
        documents.append(document)
        start = _START.search(text, at)
    return documents


def _dot(tree: Tree, block: Block, direction: str) -> str:
    """The boxes of a block without their words, and its lines. Equal shapes give equal texts."""
    limits = " nslimit=1 nslimit1=1 mclimit=0.2" if len(block.items) > _MANY else ""
    if len(block.lines) > CROWDED:
        limits = " nslimit=0.4 nslimit1=0.4 mclimit=0.1 splines=line"
    rows = ["digraph {", f"graph [rankdir={_RANKDIR[direction]} nodesep=0.3 ranksep=0.32{limits}]"]
    rows += ['node [shape=box fixedsize=true label=""]', f"edge [dir=none fontsize={SMALL}]"]
    for at, item in enumerate(block.items):
        width, height = tree.size(item)
        shape = " shape=ellipse" if tree.is_oval(item) else ""
        rows.append(f"i{at} [width={width / _POINTS:.3f} height={height / _POINTS:.3f}{shape}]")
    # Where arrays cross the border of a block: on its first or its last rank, so that no line goes around.
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


def _line(line: Line, place: dict[int, int], at: int) -> str:
    tail = f"i{place[line.tail]}" if line.tail >= 0 else f"p{line.tail_port}"
    head = f"i{place[line.head]}" if line.head >= 0 else f"p{line.head_port}"
    ends = f"{head} -> {tail}" if line.kind == "back" else f"{tail} -> {head}"
    constraint = " constraint=false" if line.kind in ("pair", "carry") and min(line.tail, line.head) >= 0 else ""
    label = f" label={quote(re.sub(r'[^0-9]', 'x', f' {line.label} '))}" if line.label else ""
    return f"{ends} [id={at}{label}{constraint}]"


def _layout(block: Block, graph: dict[str, Any]) -> Layout:
    """What Graphviz wrote of one graph."""
    _, _, width, height = map(float, graph["bb"].split(","))
    place = {o["name"]: _point(o["pos"], height) for o in graph.get("objects", ()) if "pos" in o}
    edges = {int(edge["id"]): edge for edge in graph.get("edges", ())}
    lines: list[list[Point]] = []
    for at, line in enumerate(block.lines):
        points = [_point(point, height) for point in edges[at]["pos"].split() if point.count(",") == 1]
        lines.append(points[::-1] if line.kind == "back" else points)
    labels = [_point(edges[at]["lp"], height) if "lp" in edges[at] else None for at in range(len(block.lines))]
    items = [place[f"i{at}"] for at in range(len(block.items))]
    return Layout(width, height, items, [place[f"p{at}"] for at in range(len(block.ports))], lines, labels)


def _point(text: str, height: float) -> Point:
    x, y = text.split(",")
    return float(x), height - float(y)
