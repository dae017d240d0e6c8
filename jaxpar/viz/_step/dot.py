"""The picture of a step: a `Plot` of a `StepGraph`, with the place of everything."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from .._draw import labels, style
from .._draw.labels import cut, scope_label
from .._draw.picture import Plot
from .._draw.style import FONT, THEMES, Options, Theme, attributes, ink, quote
from .._graph import Graph, Node
from .columns import BIG, LINE, SMALL, Columns, Line, Row, caption_lines, cost, sends_text, size
from .graph import StepGraph, StepLayer, StepPart

Point = tuple[float, float]

_POINTS = 72.0  # of an inch
_SENT = "#c51b7d"
_BAND, _BAND_LINE = "#ccebc5", "#5aa05a"


class StepPlot(Plot):
    """A drawn training step. A notebook shows it and `save` writes it.

    Attributes:
        step: the `StepGraph` that it was drawn from.
        network: the `Graph` of the same function.
    """

    def __init__(self, step: StepGraph, network: Graph, options: Options, time_limit: float) -> None:
        super().__init__(network, replace(options, heat=None), time_limit, lines=_Drawing(step, options).lines())
        self.step: StepGraph = step

    def html(self) -> str:
        """The picture as a static page."""
        return self._static_page("")


class _Drawing:
    def __init__(self, graph: StepGraph, options: Options) -> None:
        self.graph, self.options = graph, options
        self.theme: Theme = THEMES[options.theme]
        self.columns = Columns(graph, options.heat)
        self.x, self.width = self.columns.x, self.columns.width
        parts = [part for layer in (*graph.layers, *graph.optimizers) for part in (layer.forward, layer.backward)]
        self.most = max((cost(part, options.heat) for part in parts if part is not None), default=0) or 1

    def lines(self) -> list[str]:
        boxes = [box for row in self.columns.rows.values() for box in self._row(row)]
        back = [*self._blocks(), *self._band()]
        return [*self._head(), *back, *boxes, *self._inputs(), *self._edges(), *self._updates(), self._caption()]

    def _head(self) -> list[str]:
        """`nop2` draws nodes and edges where they say that they are."""
        whole = {"layout": "nop2", "bgcolor": self.theme.background, "tooltip": self.options.title}
        whole |= {"outputorder": "nodesfirst", "fontname": FONT, "fontcolor": self.theme.text}
        box = {"shape": "box", "style": "filled,rounded", "fontname": FONT, "fontcolor": style.INK, "margin": 0}
        edge = {"color": self.theme.line, "fontcolor": self.theme.line, "fontname": FONT, "fontsize": SMALL}
        return [
            "graph " + attributes(**whole),
            "node " + attributes(**box, color="#6e7781", penwidth=0.8, fontsize=BIG),
            "edge " + attributes(**edge, arrowsize=0.6, penwidth=0.9),
        ]

    def _blocks(self) -> list[str]:
        """A frame around the rows of each repeated block and loop."""
        groups: dict[tuple[str, ...], list[Row]] = {}
        for row in self.columns.rows.values():
            scope = row.layer.scope
            if depth := next((depth for depth, part in enumerate(scope, 1) if "×" in part), 0):
                groups.setdefault(scope[:depth], []).append(row)
        left = self.x["forward"] - self.width["forward"] / 2 - 8
        right = self.x["backward"] + self.width["backward"] / 2 + 8
        column = "band" if "band" in self.x else "forward"
        beside = self.x[column] + self.width[column] / 2
        found: list[str] = []
        for path, rows in groups.items():
            low, high = rows[0].y - rows[0].height / 2 - 9, rows[-1].y + rows[-1].height / 2 + 9
            look = {"style": "filled,rounded,dashed", "fillcolor": self.theme.region, "color": self.theme.faint}
            middle = ((left + right) / 2, (low + high) / 2)
            name = "/".join(path)
            found.append(node(f"block {name}", middle, (right - left, high - low), label="", **look))
            lines: list[Line] = [(cut(scope_label(path[-1]), (right - beside) / SMALL), "plain")]
            wide, look = size(lines)[0], {"label": label(lines, self.theme.text), "shape": "plaintext", "style": ""}
            found.append(node(f"name of {name}", (right + 6 - wide / 2, high - 10), (wide, 16), **look))
        return found

    def _band(self) -> list[str]:
        """The parameters of all layers as one band."""
        rows = [row for row in self.columns.rows.values() if row.band]
        if not rows:
            return []
        low, high = rows[0].y - rows[0].height / 2, rows[-1].y + rows[-1].height / 2
        place = (self.x["band"], (low + high) / 2), (self.width["band"], high - low)
        look = {"style": "filled", "fillcolor": _BAND, "color": _BAND_LINE, "tooltip": "the parameters"}
        return [node("parameters", *place, label="", **look)]

    def _row(self, row: Row) -> list[str]:
        """A layer's boxes, side by side, and the words beside the edges that leave them."""
        layer, found = row.layer, list[str]()
        found.append(self._box(layer.name, "forward", row.forward, row.y, layer, layer.forward))
        if layer.backward is not None:
            found.append(self._box(_back(layer.name), "backward", row.backward, row.y, layer, layer.backward))
        if row.band:
            place = (self.x["band"], row.y), (self.width["band"] - 4, size(row.band)[1])
            look = {"style": "filled", "fillcolor": _BAND, "color": _BAND_LINE, "tooltip": ", ".join(layer.weights)}
            found.append(node(f"{layer.name}: parameters", *place, label=label(row.band, style.INK), **look))
        if row.gather:
            found.append(self._badge(f"{layer.name}: gather", row.gather, (self.x["gather"], row.y)))
        if row.gradients:
            found.append(self._badge(f"{layer.name}: gradient", row.gradients, (self.x["gradients"], row.y)))
        found += self._words(f"{layer.name}: up", row.above, self.x["forward"], row.y + row.height / 2, 1)
        found += self._words(f"{layer.name}: down", row.below, self.x["backward"], row.y - row.height / 2, -1)
        return [*found, *self._reads(row)]

    def _box(self, name: str, column: str, lines: list[Line], y: float, layer: StepLayer, part: StepPart) -> str:
        colour = style.fill(Node(layer.name, layer.op, layer.detail))
        if self.options.heat is not None:
            colour = style.heat(cost(part, self.options.heat) / self.most)
        look = {"label": label(lines, ink(colour)), "fillcolor": colour, "tooltip": _tooltip(layer, part)}
        look |= {"style": "filled,rounded" + (",dashed" if column == "backward" else "")}
        return node(name, (self.x[column], y), (self.width[column], size(lines)[1]), **look)

    def _badge(self, name: str, lines: Sequence[Line], at: Point) -> str:
        look = {"style": "filled", "fillcolor": _SENT, "color": _SENT, "tooltip": "sent between devices"}
        return node(name, at, size(lines), label=label(lines, "#ffffff"), **look)

    def _words(self, name: str, lines: list[Line], x: float, y: float, way: int) -> list[str]:
        """The lines beside an edge, to the right of it. What is sent has a colour of its own."""
        found: list[str] = []
        for number, text in enumerate(lines if way < 0 else lines[::-1]):
            width = size([text])[0] - 8
            at = x + width / 2 + 5, y + way * (LINE * (number + 0.5) + 6)
            sent = text[1] == "sent"
            look = {"style": "filled" if sent else "", "shape": "box" if sent else "plaintext", "tooltip": text[0]}
            look |= {"fillcolor": _SENT, "color": _SENT} if sent else {}
            colour = "#ffffff" if sent else self.theme.line
            found.append(node(f"{name} {number}", at, (width, LINE - 1), label=label([text], colour), **look))
        return found

    def _reads(self, row: Row) -> list[str]:
        """The way of the parameters from the band to the forward box."""
        if not (row.band or row.gather) or "band" not in self.x:
            return []
        start = self.x["band"] - self.width["band"] / 2
        end = self.x["forward"] + self.width["forward"] / 2
        cell = f"{row.layer.name}: parameters" if row.band else "parameters"
        names, stops = [cell, row.layer.name], [(start, end)]
        if row.gather:
            half = size(row.gather)[0] / 2
            names.insert(1, f"{row.layer.name}: gather")
            stops = [(start, self.x["gather"] + half), (self.x["gather"] - half, end)]
        look = {"color": _SENT if row.gather else _BAND_LINE}
        pairs = zip(names, names[1:], stops, strict=False)
        return [line(a, b, [(left, row.y), (right, row.y)], **look) for a, b, (left, right) in pairs]

    def _inputs(self) -> list[str]:
        """What the step is given besides parameters, below the first row."""
        names = dict.fromkeys(edge.source for edge in self.graph.edges if edge.source not in self.columns.rows)
        look = {"shape": "oval", "style": "filled", "fillcolor": "#8dd3c7"}
        found: list[str] = []
        for number, name in enumerate(names):
            lines = [(name, "plain")]
            at = self.x["forward"], -LINE - number * 30
            found.append(node(name, at, (size(lines)[0] * 1.3, 26), label=label(lines, style.INK), **look))
        return found

    def _edges(self) -> list[str]:
        """Between layers upwards, between their gradients downwards."""
        rows, found = self.columns.rows, list[str]()
        for edge in self.graph.edges:
            if edge.phase not in ("forward", "backward"):
                continue
            up = edge.phase == "forward"
            ends = (edge.source, edge.target) if up else (_back(edge.source), _back(edge.target))
            first, last = rows.get(edge.source), rows[edge.target]
            x, y, low = self.x[edge.phase], first.y if first else -LINE, first.height / 2 if first else 13
            lane = self.columns.lanes.get((edge.phase, edge.source, edge.target))
            if lane is None:
                way = 1 if last.y > y else -1
                points = [(x, y + way * _half(first, up, low)), (x, last.y - way * _half(last, up, last.height / 2))]
            else:
                side = x + (-1 if up else 1) * self.width[edge.phase] / 2
                start = side if first else x - 26
                points = [(start, y), (lane, y), (lane, last.y), (side, last.y)]
            found.append(line(*ends, points, tooltip=f"{edge.dtype}[{', '.join(map(str, edge.shape))}]"))
        return found + self._turn()

    def _turn(self) -> list[str]:
        """From the loss to its gradient."""
        row = next((row for row in reversed(self.columns.rows.values()) if row.backward), None)
        if row is None or row.band:
            return []
        left = self.x["forward"] + self.width["forward"] / 2
        right = self.x["backward"] - self.width["backward"] / 2
        return [line(row.layer.name, _back(row.layer.name), [(left, row.y), (right, row.y)])]

    def _updates(self) -> list[str]:
        """The optimizers, the gradients that reach them, and the way back to the parameters."""
        found: list[str] = []
        into: dict[str, int] = {}
        for number, (lines, layers, y) in enumerate(self.columns.shared):
            found.append(self._badge(f"gradients {number}", lines, (self.x["gradients"], y)))
            into |= dict.fromkeys(layers or self.columns.rows, number)
        for optimizer in self.graph.optimizers:
            lines, y = self.columns.optimizers[optimizer.name]
            found.append(self._box(optimizer.name, "optimizer", lines, y, optimizer, optimizer.forward))
            if any(edge.target == optimizer.name for edge in self.graph.edges):
                found += self._return(optimizer.name, y + size(lines)[1] / 2)
        ways = [edge for edge in self.graph.edges if edge.phase == "gradients"]
        arrows = [arrow for edge in ways for arrow in self._way(edge.source, edge.target, into)]
        return [*found, *dict.fromkeys(arrows)]

    def _way(self, source: str, target: str, into: dict[str, int]) -> list[str]:
        """From a gradient to the optimizer, through what is sent on the way."""
        row = self.columns.rows[source]
        names, places = [_back(source)], [(self.x["backward"] + self.width["backward"] / 2, row.y)]
        if row.gradients:
            names.append(f"{source}: gradient")
            half = size(row.gradients)[0] / 2
            places += [(self.x["gradients"] - half, row.y), (self.x["gradients"] + half, row.y)]
        elif source in into:
            lines, _, y = self.columns.shared[into[source]]
            names.append(f"gradients {into[source]}")
            places += [(self.x["gradients"] - size(lines)[0] / 2, y), (self.x["gradients"] + size(lines)[0] / 2, y)]
        names.append(target)
        places.append((self.x["optimizer"] - self.width["optimizer"] / 2, self.columns.optimizers[target][1]))
        pairs = zip(places[::2], places[1::2], strict=True)
        look = {"color": _SENT if len(names) > 2 else self.theme.line}
        knees = (self.columns.knee, 0.0)  # past the words beside the edges between gradients
        ends = zip(names, names[1:], pairs, knees, strict=False)
        return [curve(a, b, start, end, knee, **look) for a, b, (start, end), knee in ends]

    def _return(self, name: str, y: float) -> list[str]:
        """The updated parameters, back to the band over the top."""
        rows = [row for row in self.columns.rows.values() if row.band]
        if not rows:
            return []
        above, x = self.columns.top + LINE, self.x["band"]
        end = rows[-1].y + rows[-1].height / 2
        points = [(self.x["optimizer"], y), (self.x["optimizer"], above), (x, above), (x, end)]
        look = {"color": _BAND_LINE, "penwidth": 2.5, "tooltip": "the new parameters"}
        words = node("new parameters", (x + 60, above + 9), (90, LINE), label="new parameters", shape="plaintext",
                    style="", fontsize=SMALL, fontcolor=self.theme.text)  # fmt: skip
        return [line(name, "parameters", points, **look), words]

    def _caption(self) -> str:
        """The title and the totals, below everything."""
        rest = [one for one in self.graph.collectives if one.phase == "elsewhere" and one.devices > 1]
        lines: list[Line] = [(self.options.title, "big")]
        lines += [(text, "plain") for text in caption_lines(self.graph, self.options.heat)]
        lines += [(f"elsewhere in the step: {text}", "plain") for text in sends_text(rest, dict(self.graph.mesh))]
        inputs = len({edge.source for edge in self.graph.edges if edge.source not in self.columns.rows})
        wide, high = size(lines)
        at = self.columns.right / 2, -LINE - 30 * max(inputs, 1) - high / 2
        return node("caption", at, (wide, high), label=label(lines, self.theme.text), shape="plaintext", style="")


def _half(row: Row | None, up: bool, otherwise: float) -> float:
    """Half of the height of a box."""
    lines = (row.forward if up else row.backward) if row is not None else []
    return size(lines)[1] / 2 if lines else otherwise


def _back(name: str) -> str:
    return name + " (backward)"


def _tooltip(layer: StepLayer, part: StepPart) -> str:
    lines = [f"{layer.name}: {layer.op} {layer.detail}".strip(), f"{part.flops:,} FLOP, {part.bytes:,} B"]
    lines += [f"{part.peak:,} bytes live on a device"] if part.peak is not None else []
    lines += [f"{part.seconds:.3g} s"] if part.seconds is not None else []
    return "\n".join([*lines, layer.source])


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
    return labels.label([(text, BIG if kind == "big" else SMALL, kind == "big") for text, kind in lines], colour)
