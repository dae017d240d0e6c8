"""A page: the HTML that shows the blocks and their layouts, and opens them by the scripts beside this file.

Begin with `to_page`.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import json
import re
import string
from collections.abc import Collection, Iterable
from importlib import resources
from typing import Any

from .._draw import style
from .._draw.style import SIZE, THEMES, Options, cost, scope_label, text_width
from .._graph import Graph, human, parameters
from .blocks import Path, Tree, draw_lines, tree
from .layout import Layout, Point, layouts
from .still import still_of

_PACKAGE = "jaxpar.viz._page"
_SCRIPTS = ("theme.js", "reading.js", "places.js", "drawing.js", "page.js", "events.js")
# Opens no other place: what an attribute or a script could end with is escaped.
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "'": "\\u0027", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def to_page(
    graph: Graph, options: Options, time_limit: float, picture: str, opened: Collection[Path], asked: bool
) -> str:
    """One HTML file that needs nothing else.

    Args:
        graph: all layers.
        options: how they are drawn.
        time_limit: seconds that Graphviz may take.
        picture: its SVG of what is seen at first, which the page shows until the script draws, and where none runs.
        opened: the scopes that are open there.
        asked: whether the user asked for these. Else a view that is too small for them has less open.
    """
    drawn = tree(graph, options)
    draw_lines(drawn)
    title = html.escape(options.title)
    return string.Template(asset("page.html")).substitute(
        title=title,
        theme=_theme(options),
        facts=html.escape(f"{parameters(graph)} · {human(graph.total_flops, 'FLOP')}"),
        css=colours() + asset("page.css"),
        still=still_of(picture).replace("<svg", f'<svg id="svg" role="group" aria-label="{title}"', 1),
        legend=_legend(drawn, options),
        data=_escaped(_data(drawn, options, time_limit, opened, asked)),
        script="\n".join(map(script, _SCRIPTS)),
    )


def _theme(options: Options) -> str:
    """The attributes of a page that is always dark. Another one has the colours of the reader."""
    return ' data-plot="dark" data-theme="dark"' if options.theme == "dark" else ""


def to_frame(page: str, title: str, still: str) -> str:
    """The page for a notebook, in a frame.

    `still` is a PNG in base64. A notebook that is not trusted drops the frame and `hidden`, and so shows this.
    """
    page = page.replace("&", "&amp;").replace("'", "&#39;")
    name = html.escape(title)
    frame = f"<iframe data-jaxpar title='{name}' style='width:100%;height:560px;border:0' srcdoc='{page}'></iframe>"
    return f"{frame}<div hidden><img alt='{name}' src='data:image/png;base64,{still}'></div>"


@functools.cache
def asset(name: str) -> str:
    """A file beside this one, without its comments and indentation: every picture of a notebook has a copy."""
    text = resources.files(_PACKAGE).joinpath(name).read_text(encoding="utf-8")
    if name.endswith(".js"):
        text = re.sub(r"(^|\s+)// .*$", "", text, flags=re.MULTILINE)
    if name.endswith(".css"):
        text = re.sub(r"([:;,{}]) | (?=[{}])", r"\1", text)
    lines = map(str.strip, text.splitlines())
    return "\n".join(filter(None, lines)) + "\n"


def script(name: str) -> str:
    """A script beside this file, for a page with others."""
    return asset(name).replace('"use strict";\n', "")


def _escaped(data: object) -> str:
    """JSON that nothing in a script element or an attribute can end."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    for letter, escape in _UNSAFE.items():  # faster than `str.translate`
        text = text.replace(letter, escape)
    return text


def colours() -> str:
    """The colours of both themes, as variables. Paper is white, so what is printed has those of the light one."""
    return f":root{_variables('light')}\n@media screen{{:root[data-theme=dark]{_variables('dark')}}}\n"


def _variables(name: str) -> str:
    names = ("background", "text", "line", "faint", "cluster", "region", "carry")
    values = {key: getattr(THEMES[name], key) for key in names}
    values["block"] = "#3a3f46" if name == "dark" else "#e4e8ec"
    values["sends"] = style.SENDING
    return "{" + "".join(f"--{key}:{value};" for key, value in values.items()) + "}"


def _legend(tree: Tree, options: Options) -> str:
    if options.heat is not None:
        return f"<span>{html.escape(options.heat)}: white is none, red the most of all nodes</span>"
    entries = style.legend(tree.nodes) if options.legend else []
    return "".join(
        f'<span style="background:{colour};color:{style.ink(colour)}">{html.escape(name)}</span>'
        for colour, name in entries
    )


def _data(tree: Tree, options: Options, time_limit: float, opened: Collection[Path], asked: bool) -> dict[str, Any]:
    """What the script reads."""
    places, which = layouts(tree, options.direction, time_limit)
    return {
        "direction": options.direction,
        "asked": asked,
        "open": [tree.root + at for at, block in enumerate(tree.blocks) if block.path in opened],
        "nodes": [_node(tree, item) for item in range(len(tree.nodes))],
        "blocks": [_block(tree, tree.root + at, layout) for at, layout in enumerate(which)],
        "layouts": [_placed(layout) for layout in places],
        "edges": [end for edge in tree.edges for end in edge],
    }


def _node(tree: Tree, item: int) -> list[Any]:
    node, colour = tree.nodes[item], tree.look.fill(tree.nodes[item])
    kind = "backward" if node.is_backward else "returned" if node.outputs else ""
    # The script reads in the tooltip what is there: name, kind, the first four weights, the source and its line.
    tip, more = tree.look.tooltip(node), " ".join(node.weights[: node.copy_weights][4:8])
    source = tip.split("\n").index(node.source) if node.source else -1
    look = [*tree.size(item), kind, int(tree.is_oval(item)), colour, style.ink(colour)]
    return [*look, _texts(tree, item), tip, more, source]


def _block(tree: Tree, item: int, layout: int) -> list[Any]:
    block, heat = tree.block(item), tree.look.options.heat
    label = scope_label(block.label)
    width = round(text_width(label, SIZE, True)) + 40
    texts = tree.words[item]
    tip = "\n".join(filter(None, ["/".join(block.path), *(text for text, _, _ in texts[1:])]))
    colour = ink = None
    if heat is not None:
        total = sum(cost(tree.nodes[node], heat) for node in tree.nodes_in(item))
        colour = style.heat(min(1.0, total / tree.look.most))
        ink = style.ink(colour)
    box = [*tree.size(item), width, label, _texts(tree, item), tip, colour, ink]
    lines = [
        [line.tail, line.head, line.tail_port, line.head_port, kind, line.label, sorted({n for n, _ in line.keys})]
        for line in block.lines
        for kind in ["" if line.kind == "forward" else line.kind]
    ]
    firsts, sends = [int(port.is_first) for port in block.ports], int(bool(tree.sent_in(item)))
    return [*box, layout, block.items, firsts, lines, sends]


def _texts(tree: Tree, item: int) -> list[list[Any]]:
    """What is written in a box: each line with its size, and 1 where it is bold."""
    return [[text, int(size) if size == int(size) else size, int(bold)] for text, size, bold in tree.words[item]]


def _placed(layout: Layout) -> dict[str, Any]:
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


_SHAPES = ":is(polygon,ellipse,path,polyline)"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def to_still_page(picture: str, table: str, options: Options) -> str:
    """One HTML file with Graphviz's SVG in the colours of its theme, or with HTML that says why there is none.

    "light" is for the colours of the reader, without scripts those of the system. "dark" is always dark.
    """
    title = html.escape(options.title)
    svg = picture[picture.find("<svg") :] if "<svg" in picture else picture
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    head += f"<title>{title}</title>"
    head += f"<style>{_colours_of(options.theme)}{asset('still.css')}</style>"
    body = f"{svg}{table}<script>{script('theme.js')}{script('still.js')}</script>"
    return f'<!DOCTYPE html><html lang="en"{_theme(options)}><head>{head}</head><body>{body}</body></html>'


def _colours_of(theme: str) -> str:
    """Rules that give the reader's colours to what Graphviz drew in those of a theme. Boxes keep theirs."""
    colour_of = dataclasses.asdict(THEMES[theme])
    rules = [f'text[fill="{colour_of[name]}"]{{fill:var(--{name})}}' for name in ("text", "line", "carry")]
    for name, colour in colour_of.items():
        rules.append(f'{_SHAPES}[fill="{colour}"]{{fill:var(--{name})}}')
        rules.append(f'{_SHAPES}[stroke="{colour}"]{{stroke:var(--{name})}}')
    unless_said = f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme]){_variables('dark')}}}\n"
    return colours() + unless_said + "".join(rules)
