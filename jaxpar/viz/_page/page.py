"""A page: where Graphviz puts the boxes and lines of each block, and the HTML that shows them.

Begin with `to_page`. Graphviz runs once for all blocks that differ. The scripts beside this file put the layouts
together when a reader opens a block.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import json
import re
import string
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Any

from .._draw import style
from .._draw.render import NEXT, render
from .._draw.style import SIZE, SMALL, THEMES, Options, cost, quote, scope_label, text_width, tooltip
from .._graph import Graph, human
from .blocks import CROWDED, Block, Line, Tree, draw_lines, tree

_PACKAGE = "jaxpar.viz._page"
_SCRIPTS = ("theme.js", "reading.js", "places.js", "drawing.js", "page.js", "events.js")
# Opens no other place: what an attribute or a script could end with is escaped.
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "'": "\\u0027", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def to_page(graph: Graph, options: Options, depth: int | None, time_limit: float) -> str:
    """One HTML file that needs nothing else. `depth` levels are open at first, as many as fit for None."""
    drawn = tree(graph, hide_weights=options.hide_weights, heat=options.heat)
    draw_lines(drawn)
    title = html.escape(options.title)
    return string.Template(asset("page.html")).substitute(
        title=title,
        facts=html.escape(f"{graph.total_params:,} parameters · {human(graph.total_flops, 'FLOP')}"),
        css=colours() + asset("page.css"),
        legend=_legend(drawn, options),
        data=_escaped(_data(drawn, options, depth, time_limit)),
        script="\n".join(map(script, _SCRIPTS)),
    )


_WITHOUT_SCRIPT = "main,.tools{display:none}noscript{flex:1;overflow:auto}noscript svg{max-width:100%;height:auto}"
# What only a mouse or a script finds, and the font, which is that of the page.
_UNSEEN = re.compile(
    r"<!--.*?-->\n?|<title>.*?</title>\n?|</?a\b[^>]*>\n?"
    r'| (?:xmlns:xlink|font-family|id|class)="[^"]*"',
    re.DOTALL,
)
_PLACES = re.compile(r' (?:points|d|x|y|cx|cy)="[^"]*"')
_PATH = re.compile(r'd="M(-?\d+),(-?\d+)C([-\d, ]+)"')
_POINT = re.compile(r"(-?\d+),(-?\d+)")
_TEXT_COLOUR = re.compile(r'<text [^>]*?( fill="[^"]*")')


def with_still(page: str, svg: str) -> str:
    """A page that shows Graphviz's SVG to a reader without scripts: what is seen of it, in whole points."""
    still = _UNSEEN.sub("", svg[svg.find("<svg") :])
    still = _PLACES.sub(lambda place: re.sub(r"\.\d+", "", place[0]), still)
    still = _small(_PATH.sub(_relative, still))
    return page.replace("<noscript>", f"<noscript>{still}<style>{_WITHOUT_SCRIPT}</style>", 1)


def _small(svg: str) -> str:
    """The same picture, without what SVG takes for granted: a page has it a second time."""
    svg = svg.replace(' text-anchor="start"', "").replace("scale(1 1) rotate(0) ", "")
    svg = re.sub(r'"(\d*)(\.\d*?)0+"', lambda number: f'"{number[1]}{number[2].rstrip(".")}"', svg)  # 9.50 is 9.5
    svg = svg.replace('"0.', '".')
    svg = re.sub(r' points="(\S+) ([^"]*) \1"', r' points="\1 \2"', svg)  # a polygon closes itself
    if svg.count("<g ") == 1 and svg.endswith("</svg>\n"):  # all other groups are empty of attributes
        svg = re.sub(r"</?g>", "", svg).replace("</svg>", "</g></svg>")
        colours = Counter(_TEXT_COLOUR.findall(svg))  # shapes have a colour of their own
        for colour, _ in colours.most_common(1):
            svg = re.sub(rf"(<text [^>]*?){re.escape(colour)}", r"\1", svg).replace("<g ", f"<g{colour} ", 1)
    return re.sub(r"\n+(?=<|$)", "", svg)


def _relative(path: re.Match[str]) -> str:
    """A path of whole points, each from where the curve before it ended: shorter, and as exact."""
    x, y = int(path[1]), int(path[2])
    points = [(int(a), int(b)) for a, b in _POINT.findall(path[3])]
    shown: list[str] = []
    for at, (px, py) in enumerate(points):
        shown.append(f"{px - x},{py - y}")
        if at % 3 == 2:
            x, y = px, py
    return f'd="M{path[1]},{path[2]}c{" ".join(shown)}"'.replace(",-", "-").replace(" -", "-")


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
    places, which = layouts(tree, options.direction, time_limit)
    most = max((cost(node, tree.heat) for node in tree.nodes), default=0) or 1
    return {
        "direction": options.direction,
        "theme": "dark" if options.theme == "dark" else None,
        "depth": depth,
        "nodes": [_node(tree, item, most) for item in range(len(tree.nodes))],
        "blocks": [_block(tree, tree.root + at, layout, most) for at, layout in enumerate(which)],
        "layouts": [_placed(layout) for layout in places],
        "edges": [end for edge in tree.edges for end in edge],
    }


def _node(tree: Tree, item: int, most: int) -> list[Any]:
    node = tree.nodes[item]
    kind = "backward" if node.is_backward else "returned" if node.outputs else ""
    colour = style.fill(node)
    if tree.heat and node.op not in ("input", "weight"):
        colour = style.heat(cost(node, tree.heat) / most)
    # The script reads in the tooltip what is there: name, kind, the first four weights, the source and its line.
    tip, more = tooltip(node), " ".join(node.weights[4:8])
    source = tip.split("\n").index(node.source) if node.source else -1
    oval = int(is_oval(tree, item))
    look = [*size(tree, item), kind, oval, colour, style.ink(colour)]
    return [*look, _texts(tree, item), tip, more, source]


def _block(tree: Tree, item: int, layout: int, most: int) -> list[Any]:
    block = tree.block(item)
    label = scope_label(block.label)
    width = round(text_width(label, SIZE, True)) + 40
    texts = tree.words[item]
    tip = "\n".join(filter(None, ["/".join(block.path), *(text for text, _, _ in texts[1:])]))
    colour = None
    if tree.heat:
        total = sum(cost(tree.nodes[node], tree.heat) for node in tree.nodes_in(item))
        colour = style.heat(min(1.0, total / most))
    ink = style.ink(colour) if colour else None
    box = [*size(tree, item), width, label, _texts(tree, item), tip, colour, ink]
    lines = [
        [line.tail, line.head, line.tail_port, line.head_port, kind, line.label, sorted({n for n, _ in line.keys})]
        for line in block.lines
        for kind in ["" if line.kind == "forward" else line.kind]
    ]
    return [*box, layout, block.items, [int(port.is_first) for port in block.ports], lines]


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


def to_still_page(picture: str, table: str, title: str, theme: str) -> str:
    """One HTML file with Graphviz's SVG in the colours of `theme`, or with HTML that says why there is none.

    "light" is for the colours of the reader, without scripts those of the system. "dark" is always dark.
    """
    svg = picture[picture.find("<svg") :] if "<svg" in picture else picture
    plot = ' data-plot="dark" data-theme="dark"' if theme == "dark" else ""
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    head += f"<title>{html.escape(title)}</title><style>{_colours_of(theme)}{asset('still.css')}</style>"
    body = f"{svg}{table}<script>{script('theme.js')}{script('still.js')}</script>"
    return f'<!DOCTYPE html><html lang="en"{plot}><head>{head}</head><body>{body}</body></html>'


def _colours_of(theme: str) -> str:
    """Rules that give the reader's colours to what Graphviz drew in those of a theme. Boxes keep theirs."""
    colour_of = dataclasses.asdict(THEMES[theme])
    rules = [f'text[fill="{colour_of[name]}"]{{fill:var(--{name})}}' for name in ("text", "line", "carry")]
    for name, colour in colour_of.items():
        rules.append(f'{_SHAPES}[fill="{colour}"]{{fill:var(--{name})}}')
        rules.append(f'{_SHAPES}[stroke="{colour}"]{{stroke:var(--{name})}}')
    dark = colours().split("data-theme=dark]", 1)[1].strip()
    return colours() + f"@media (prefers-color-scheme:dark){{:root:not([data-theme]){dark}}}\n" + "".join(rules)


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
        width, height = size(tree, item)
        shape = " shape=ellipse" if is_oval(tree, item) else ""
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


def size(tree: Tree, item: int) -> tuple[int, int]:
    """Width and height of a closed box, in points."""
    if item in tree.signs:
        return 22, 22
    lines = tree.words[item]
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
