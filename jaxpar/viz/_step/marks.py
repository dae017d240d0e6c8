"""Boxes, arrows and words at given places in points, as lines of the dot language, for Graphviz's `nop2`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from .._draw import style
from .._draw.style import SMALL, attributes, quote, text_width

Point = tuple[float, float]
Line = tuple[str, str]  # a text, and "big", "plain" or "sent"

LINE = 13.0  # points, the height of a line
_PAD = 18.0
_POINTS = 72.0  # of an inch


def node(name: str, at: Point, size: Point, **look: object) -> str:
    """A node with its middle at a place."""
    box = {"pos": f"{at[0]:.1f},{at[1]:.1f}", "width": f"{size[0] / _POINTS:.3f}", "height": f"{size[1] / _POINTS:.3f}"}
    return f"{quote(name)} {attributes(**box, **look)}"


def line(source: str, target: str, points: Sequence[Point], **look: object) -> str:
    """An edge along straight lines."""
    way = [points[0]]
    for a, b in itertools.pairwise(points):
        way += [_between(a, b, 1 / 3), _between(a, b, 2 / 3), b]
    return _edge(source, target, way, **look)


def curve(source: str, target: str, start: Point, end: Point, knee: float, **look: object) -> str:
    """An edge that leaves and arrives level. It turns behind the knee."""
    turn = (min(max(knee, start[0]), end[0] - 12), start[1])
    middle = (turn[0] + end[0]) / 2
    way = [start, _between(start, turn, 1 / 3), _between(start, turn, 2 / 3), turn]
    return _edge(source, target, [*way, (middle, turn[1]), (middle, end[1]), end], **look)


def _edge(source: str, target: str, way: list[Point], **look: object) -> str:
    """The arrow's head begins 6 points before the end."""
    tip, before = way[-1], way[-2]
    length = max(1e-6, ((tip[0] - before[0]) ** 2 + (tip[1] - before[1]) ** 2) ** 0.5)
    way = [*way[:-1], _between(tip, before, min(0.9, 6 / length))]
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in way)
    return f"{quote(source)} -> {quote(target)} {attributes(pos=f'e,{tip[0]:.1f},{tip[1]:.1f} {text}', **look)}"


def _between(a: Point, b: Point, share: float) -> Point:
    return a[0] + (b[0] - a[0]) * share, a[1] + (b[1] - a[1]) * share


def label(lines: Sequence[Line], colour: str) -> str:
    """The lines as one label."""
    return style.label([(text, style.SIZE if kind == "big" else SMALL, kind == "big") for text, kind in lines], colour)


def size(lines: Sequence[Line]) -> tuple[float, float]:
    """The width and the height of a box with these lines."""
    widths = [text_width(text, style.SIZE if kind == "big" else SMALL, kind == "big") for text, kind in lines]
    return max(widths, default=0.0) + _PAD, LINE * len(lines) + 10
