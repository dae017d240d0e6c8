"""The HTML of a page: the layouts as data, and the script that draws them."""

from __future__ import annotations

import functools
import html
import json
import string
from collections.abc import Iterable
from importlib import resources
from typing import Any

from .._draw import style
from .._draw.labels import cost, scope_label, tooltip
from .._draw.style import SIZE, THEMES, Options, text_width
from .._graph import Graph, human
from .blocks import Block, Tree, tree
from .layout import Layout, Point, is_oval, layouts, size, texts
from .lines import draw_lines

_PACKAGE = "jaxpar.viz._page"
_SCRIPTS = ("theme.js", "reading.js", "places.js", "drawing.js", "page.js", "events.js")
# Opens no other place: what an attribute or a script could end with is escaped.
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "'": "\\u0027", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def to_page(graph: Graph, options: Options, depth: int | None, time_limit: float) -> str:
    """One HTML file that needs nothing else.

    Args:
        graph: with all its blocks as scopes.
        options: title, direction, heat and the like.
        depth: how many levels are open at first. None for as many as fit.
        time_limit: seconds that Graphviz may take.

    Raises:
        RenderError: there is no Graphviz, or it took longer than `time_limit`.
    """
    found = tree(graph, hide_weights=options.hide_weights)
    draw_lines(found)
    title = html.escape(options.title)
    return string.Template(asset("page.html")).substitute(
        title=title,
        facts=html.escape(f"{graph.total_params:,} parameters · {human(graph.total_flops, 'FLOP')}"),
        css=colours() + asset("page.css"),
        legend=_legend(found, options),
        data=_escaped(_data(found, options, depth, time_limit)),
        script="\n".join(map(script, _SCRIPTS)),
    )


def to_frame(page: str, title: str, still: str) -> str:
    """The page for a notebook, in a frame.

    Args:
        page: what `to_page` gives.
        title: the name of the frame.
        still: a PNG in base64. A notebook that is not trusted drops the frame and `hidden`, and so shows this.
    """
    page = page.replace("&", "&amp;").replace("'", "&#39;")
    name = html.escape(title)
    frame = f"<iframe data-jaxpar title='{name}' style='width:100%;height:560px;border:0' srcdoc='{page}'></iframe>"
    return f"{frame}<div hidden><img alt='{name}' src='data:image/png;base64,{still}'></div>"


@functools.cache
def asset(name: str) -> str:
    """A file beside this one, without its comments and indentation: every picture of a notebook has a copy."""
    text = resources.files(_PACKAGE).joinpath(name).read_text(encoding="utf-8")
    lines = map(str.strip, text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//")) + "\n"


def script(name: str) -> str:
    """A script beside this file, for a page with others."""
    return asset(name).replace('"use strict";\n', "")


def _escaped(data: Any) -> str:
    """JSON that nothing in a script element or an attribute can end."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    for letter, escape in _UNSAFE.items():  # faster than `str.translate`
        text = text.replace(letter, escape)
    return text


def colours() -> str:
    """The colours of both themes, as variables."""
    rules: list[str] = []
    for name, theme in THEMES.items():
        names = ("background", "text", "line", "faint", "cluster", "region", "carry")
        values = {key: getattr(theme, key) for key in names} | {"block": {"dark": "#3a3f46"}.get(name, "#e4e8ec")}
        body = "".join(f"--{key}:{value};" for key, value in values.items())
        rules.append(f"{':root' if name == 'light' else ':root[data-theme=dark]'}{{{body}}}\n")
    return "".join(rules)


def _legend(tree: Tree, options: Options) -> str:
    if options.heat is not None:
        return f"<span>{html.escape(options.heat)}: white is none, red the most of all nodes</span>"
    entries = style.legend(tree.nodes) if options.legend else []
    return "".join(
        f'<span style="background:{colour};color:{style.ink(colour)}">{html.escape(name)}</span>'
        for colour, name in entries
    )


def _data(tree: Tree, options: Options, depth: int | None, time_limit: float) -> dict[str, Any]:
    """What the script reads."""
    places, which = layouts(tree, options.direction, options.heat, time_limit)
    most = max((cost(node, options.heat) for node in tree.nodes), default=0) or 1
    return {
        "direction": options.direction,
        "theme": "dark" if options.theme == "dark" else None,
        "depth": depth,
        "nodes": [_node(tree, item, options, most) for item in range(len(tree.nodes))],
        "blocks": [_block(tree, tree.root + at, layout, options, most) for at, layout in enumerate(which)],
        "layouts": [_layout(layout) for layout in places],
        "edges": [end for edge in tree.edges for end in edge],
    }


def _node(tree: Tree, item: int, options: Options, most: int) -> list[Any]:
    node = tree.nodes[item]
    kind = "backward" if node.is_backward else "returned" if node.outputs else ""
    colour = style.fill(node)
    if options.heat and node.op not in ("input", "weight"):
        colour = style.heat(cost(node, options.heat) / most)
    find = " ".join((node.name, node.op, node.detail, node.source, *node.weights[:8]))
    oval = int(is_oval(tree, item))
    words = texts(tree, item, options.heat)
    look = [*size(tree, item, options.heat), kind, oval, colour, style.ink(colour)]
    return [*look, words, tooltip(node), find, node.source]


def _block(tree: Tree, item: int, layout: int, options: Options, most: int) -> list[Any]:
    block = tree.block(item)
    label = scope_label(block.label)
    width = round(text_width(label, SIZE, True)) + 40
    words = texts(tree, item, options.heat)
    tip = "\n".join(filter(None, ["/".join(block.path), *(text for text, _, _ in words[1:])]))
    colour = None
    if options.heat:
        total = sum(cost(tree.nodes[node], options.heat) for node in tree.nodes_in(item))
        colour = style.heat(min(1.0, total / most))
    ink = style.ink(colour) if colour else None
    box = [*size(tree, item, options.heat), width, label, words, tip, colour, ink]
    return [*box, layout, block.items, [int(port.is_first) for port in block.ports], list(_lines(block))]


def _lines(block: Block) -> Iterable[list[Any]]:
    for line in block.lines:
        keys = sorted({node for node, _ in line.keys})
        yield [line.tail, line.head, line.tail_port, line.head_port, line.kind, line.label, keys]


def _layout(layout: Layout) -> dict[str, Any]:
    """A layout in whole points."""
    return {
        "w": round(layout.width),
        "h": round(layout.height),
        "items": _numbers(layout.items),
        "ports": _numbers(layout.ports),
        "lines": [_numbers(line) for line in layout.lines],
        "labels": [None if label is None else _numbers([label]) for label in layout.labels],
    }


def _numbers(points: Iterable[Point]) -> list[float]:
    return [round(value) for point in points for value in point]
