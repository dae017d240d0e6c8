"""The picture of a page before its script draws, and where scripts do not run: Graphviz's SVG, written shorter.

A page has its network twice, as this picture and as the data of the script, and a notebook has a page for each picture.
"""

from __future__ import annotations

import re
from collections import Counter

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


def still_of(svg: str) -> str:
    """Graphviz's SVG for a page: what is seen of it, in whole points."""
    still = _UNSEEN.sub("", svg[svg.find("<svg") :])
    still = _PLACES.sub(lambda place: re.sub(r"\.\d+", "", place[0]), still)
    return _small(_PATH.sub(_relative, still))


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
