"""The picture of a step: a `Plot` of a `StepGraph`, with the place of everything in points. Graphviz only draws it.

A layer has a row. From the left: ways around rows, forward boxes, gathered parameters, the band of parameters, backward
boxes, ways around rows, the wall, optimizers. What the devices sum crosses the wall: gradients beside their layers, the
loss and the metrics above them. Behind the columns that each device computes alone lie cards, as many as devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..._core.text import plural
from .._draw import style
from .._draw.extent import HIGHEST
from .._draw.picture import Plot
from .._draw.style import SENDING, SMALL, Options, attributes, cut, ink, own_name, scope_label
from .._fold.cells import SENT
from .._graph import BACKWARD, Graph, Node, human, parameters
from .._scopes import Path, paths_of
from .._searches import reach
from .graph import Collective, StepEdge, StepGraph, StepLayer, StepPart, sends_text
from .marks import LINE, Line, Point, curve, label, line, node, size
from .phases import changes_params
from .words import cost, edge_text, layer_lines, tooltip, weights_text

_GAP, _NEAR, _LANE = 26.0, 19.0, 12.0  # points: between boxes, between rows of lower boxes, between ways
_FITS, _TOO_MUCH = "#d6e4f2", "#d7301f"
_AGAIN = "#1f6feb"
_TALLEST = 150.0  # points, of the box with the most live bytes. Less where a screen is too low for that
_LOWEST = LINE + 3  # points, of a box with a line of its name and its bytes
_MARGIN = 8.0  # points, Graphviz's around everything
_CARDS = 4  # at most that many are drawn
_RESULTS = "results"  # the box with the names of the metrics
_MOST_RESULTS = 4  # names in it
_SUMS = ("all-reduce", "reduce-scatter")
_IN_JAX = {  # how users write XLA's collectives
    "all-reduce": "psum",
    "reduce-scatter": "psum_scatter",
    "all-gather": "all_gather",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "ragged_all_to_all",
    "collective-permute": "ppermute",
}
_BAND_LINE = "#5aa05a"
_BAND_LOOK = {"style": "filled", "fillcolor": "#ccebc5", "color": _BAND_LINE}


class StepPlot(Plot):
    """A drawn training step. A notebook shows it and `save` writes it.

    Attributes:
        step: the `StepGraph` that it was drawn from.
        network: the `Graph` of the same function.
    """

    def __init__(self, step: StepGraph, network: Graph, options: Options, time_limit: float) -> None:
        super().__init__(
            network, replace(options, heat=None), time_limit, lines=_Drawing(step, network, options).lines()
        )
        self.step: StepGraph = step

    def html(self) -> str:
        """The picture as a static page."""
        return self._static_page("")


def fits_screen(step: StepGraph, network: Graph, options: Options) -> bool:
    """Whether the picture of a step is as high as a screen of 1280 × 900 pixels at 60 %, or less."""
    return _Drawing(step, network, options).height() <= HIGHEST


@dataclass(slots=True, eq=False)
class Row:
    """A layer's row: the lines of its boxes and of what is beside them. Empty for none."""

    layer: StepLayer
    forward: list[Line]
    backward: list[Line]
    band: list[Line]
    above: list[Line]  # beside the edge that leaves its forward box
    below: list[Line]  # beside the edge that leaves its backward box
    gather: list[Line]  # what is sent between the band and its forward box
    gradients: list[Line]  # what is sent behind its backward box
    y: float = 0.0  # the middle of its boxes
    height: float = 0.0
    halves: tuple[float, float] = (0.0, 0.0)  # half of the height of its forward and of its backward box


class _Drawing:
    """The places of everything, and the lines of a digraph with them."""

    def __init__(self, graph: StepGraph, network: Graph, options: Options) -> None:
        self.network = network
        self.graph, self.title, self.heat, self.mesh = graph, options.title, options.heat, dict(graph.mesh)
        self.theme: style.Theme = style.THEMES[options.theme]
        self.options, self.by_memory, self.limit = options, options.height == "memory", options.limit
        layers = (*graph.layers, *graph.optimizers)
        costs = [part for layer in layers for part in (layer.forward, layer.backward) if part is not None]
        self.peak = max((part.peak or 0 for part in costs), default=0)
        self.most = max((cost(part, self.heat) for part in costs), default=0) or 1
        self.cards = min(graph.devices, _CARDS)
        # By phase and layers. Only those of gradients are shared by several layers.
        # What moves params for a later pass, and the layers that read these.
        self.moves: dict[str, list[str]] = {}
        for edge in (edge for edge in graph.edges if edge.phase == "parameters"):
            self.moves.setdefault(edge.source, []).append(edge.target)
        self._sends: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
        for collective in (collective for collective in graph.collectives if collective.devices > 1):
            layers = collective.layers if collective.phase == "gradients" else collective.layers[:1]
            self._sends.setdefault((collective.phase, layers), []).append(collective)
        names = {layer.name for layer in graph.layers}
        inputs = (e.source for e in graph.edges if e.phase == "forward" and e.source not in names)
        self.inputs = dict.fromkeys(inputs)
        self.bottom = -LINE - 30.0 * max(len(self.inputs), 1)  # of what a device has alone
        self._place_all(_TALLEST)
        if self.by_memory:
            # Lower boxes, where they are too high for a screen. The lowest one has room for a line: a box that is
            # higher than its bytes would say something wrong.
            least = min((part.peak for part in costs if part.peak), default=1)
            lowest = min(_TALLEST, _LOWEST * self.peak / least)
            for share in range(9, -1, -1):
                if self.height() <= HIGHEST:
                    break
                self._place_all(lowest + (_TALLEST - lowest) * share / 10)

    def _place_all(self, tallest: float) -> None:
        self.tallest = tallest  # points, of the box with the most live bytes
        self.rows: dict[str, Row] = {layer.name: self._row_of(layer) for layer in self.graph.layers}  # from below
        self.x, self.width = dict[str, float](), dict[str, float]()  # the middle of each column, and of its boxes
        self.lanes: dict[tuple[str, str, str], float] = {}  # of edges that pass rows, by phase, source and target
        self.knee = self.top = self.right = 0.0  # where the words beside the edges between gradients end; of the whole
        self._place_rows()
        self._place_updates()
        self._place_columns({phase: self._place_lanes(phase) for phase in ("forward", "backward")})

    def _sent(self, phase: str, layers: tuple[str, ...]) -> list[Line]:
        return self._sent_lines(self._sends.get((phase, layers), ()))

    def _sent_lines(self, collectives: Sequence[Collective]) -> list[Line]:
        sends = (text.partition(" over ") for text in sends_text(collectives, self.mesh))
        return [line for what, _, over in sends for line in ((what, "sent"), (f"over {over}", "sent"))]

    def _leaving(self, phase: str, layer: StepLayer) -> list[Line]:
        """What is written beside the edge that leaves a box: what flows, and what is sent."""
        edge = next((e for e in self.graph.edges if e.phase == phase and e.source == layer.name), None)
        return [*edge_text(edge), *self._sent(phase, (layer.name,))] if edge else self._sent(phase, (layer.name,))

    def _gathered(self, layer: StepLayer) -> list[Line]:
        """What is sent between the band and a forward box. A bucket of several layers' params is at the first."""
        if sent := self._sent("parameters", (layer.name,)):
            return sent
        shared = (one for one in self.graph.collectives if one.phase == "parameters" and layer.name in one.layers)
        bucket = next(shared, None)
        return [(f"{bucket.kind} together", "sent"), (cut(f"with {bucket.layers[0]}", 18), "sent")] if bucket else []

    def _row_of(self, layer: StepLayer) -> Row:
        return Row(
            layer,
            forward=self._lines(layer, layer.forward, backward=False),
            backward=self._lines(layer, layer.backward, backward=True) if layer.backward else [],
            band=self._band_text(layer),
            above=self._leaving("forward", layer),
            below=self._leaving("backward", layer),
            gather=self._gathered(layer),
            gradients=self._sent("gradients", (layer.name,)),
        )

    def _lines(self, layer: StepLayer, part: StepPart, *, backward: bool) -> list[Line]:
        """The lines of a box, as many as there is room for where it is as high as its bytes."""
        room = self._live(part) if self.by_memory and part.peak is not None else math.inf
        return layer_lines(layer, part, self.options, backward=backward, room=room)

    def _live(self, part: StepPart) -> float:
        """How high the bytes are that are live while a part runs."""
        return self.tallest * (part.peak or 0) / self.peak if self.by_memory and self.peak else 0.0

    def _band_text(self, layer: StepLayer) -> list[Line]:
        """The lines of a layer's cell of the band."""
        if any(layer.name in layers for layers in self.moves.values()):
            return [("moved params", "plain")]
        return weights_text(layer, self.graph.arguments) if layer.params else []

    def _place_rows(self) -> None:
        y = 0.0
        below: Row | None = None
        for row in self.rows.values():
            boxes = (row.forward, row.backward, row.band, row.gather, row.gradients)
            heights = [self._height(row.forward, row.layer.forward), self._height(row.backward, row.layer.backward)]
            row.height = max(*heights, *(size(lines)[1] for lines in boxes))
            row.halves = heights[0] / 2, heights[1] / 2
            lines = max(len(below.above) if below else 1, len(row.below))
            y += (_GAP if self.tallest == _TALLEST else _NEAR) + LINE * lines + row.height / 2
            row.y = y
            y += row.height / 2
            below = row
        self.top = y + (LINE * len(below.above) if below else 0) + _GAP / 2
        # What the step returns beside its new state is one box above all rows.
        names = list(dict.fromkeys(edge.target for edge in self.graph.edges if edge.phase == "metrics"))
        others = len(names) - _MOST_RESULTS
        shown = names if others <= 0 else [*names[: _MOST_RESULTS - 1], f"and {others + 1} more"]
        self.results: list[Line] = [(cut(name), "plain") for name in shown]
        self.results_y = self.top + _GAP / 2 + size(self.results)[1] / 2

    def _height(self, lines: list[Line], part: StepPart | None) -> float:
        """Of a box: that of its lines, or that of the bytes that are live."""
        live = self._live(part) if part is not None else 0.0
        if live and len(lines) == 1:
            return max(_LOWEST, live)
        return max(size(lines)[1], live) if lines else 0.0

    def _ways_up(self) -> list[StepEdge]:
        """The edges of the forward pass, and those to the results, one from each layer."""
        edges = [edge for edge in self.graph.edges if edge.phase in ("forward", "metrics")]
        edges = [replace(edge, target=_RESULTS) if edge.phase == "metrics" else edge for edge in edges]
        return list({(edge.source, edge.target): edge for edge in edges}.values())

    def _place_lanes(self, phase: str) -> int:
        """Give each edge of a phase that passes rows a way of its own. Returns how many ways there are."""
        order = {name: number for number, name in enumerate([*self.rows, _RESULTS], 1)}
        spans: list[list[tuple[int, int, str]]] = []  # what is in each lane: from, to and the source
        edges = self._ways_up() if phase == "forward" else [edge for edge in self.graph.edges if edge.phase == phase]
        for edge in sorted(edges, key=lambda edge: abs(order.get(edge.source, 0) - order[edge.target])):
            low, high = sorted((order.get(edge.source, 0), order[edge.target]))
            if high - low < 2:
                continue
            free = (  # what is there has the same source, or ends before, or begins behind
                n
                for n, lane in enumerate(spans)
                if all(source == edge.source or high <= begin or end <= low for begin, end, source in lane)
            )
            lane = next(free, len(spans))
            spans += [[]] if lane == len(spans) else []
            spans[lane].append((low, high, edge.source))
            self.lanes[phase, edge.source, edge.target] = float(lane)
        return len(spans)

    def _place_columns(self, lanes: dict[str, int]) -> None:
        """Place the columns from the left to the right, given how many ways are on each side."""
        # First how wide the boxes of each column are, then from left to right where the columns begin. Columns that
        # this step does not need take no room.
        width, rows = self.width, self.rows.values()
        for name in ("forward", "gather", "band", "backward", "gradients"):
            width[name] = max((size(lines)[0] for row in rows if (lines := getattr(row, name))), default=0.0)
        width["gradients"] = max([width["gradients"], *(size(lines)[0] for lines, _, _ in self.shared)])
        updates = [self.results, *(lines for lines, _ in self.optimizers.values())]
        width["optimizer"] = max(size(lines)[0] if lines else 0.0 for lines in updates)
        beside = {name: max((size(getattr(row, name))[0] for row in rows), default=0.0) for name in ("above", "below")}
        x = _LANE * (lanes["forward"] + 1)
        x = self._put("forward", x, max(0.0, beside["above"] - width["forward"] / 2))
        for name in ("gather", "band"):
            x = self._put(name, x, 0.0) if width[name] else x
        x = self._put("backward", x, max(_LANE * (lanes["backward"] + 1), beside["below"] - width["backward"] / 2))
        self.knee, x = x - _GAP, x + _GAP + 7 * (self.cards - 1)
        for name in ("gradients", "optimizer"):
            x = self._put(name, x, 0.0) if width[name] else x
        self.right = x + 12
        left, right = self.x["forward"] - width["forward"] / 2, self.x["backward"] + width["backward"] / 2
        for key, lane in self.lanes.items():
            self.lanes[key] = left - _LANE * (lane + 1) if key[0] == "forward" else right + _LANE * (lane + 1)

    def _put(self, name: str, x: float, extra: float) -> float:
        """Place a column to the right of x. Returns where it ends, with a gap."""
        self.x[name] = x + self.width[name] / 2
        return x + self.width[name] + extra + _GAP

    def _place_updates(self) -> None:
        """Place the wall, the words on it, and the optimizers."""
        sends = [one for (phase, _), group in self._sends.items() if phase == "gradients" for one in group]
        sent = {name for one in sends for name in one.layers}
        self.sent = {name: row for name, row in self.rows.items() if name in sent and row.backward}
        # Words for several layers stand in their middle, or above what is there. Those for one layer stand beside it.
        taken = [(row.y, row.height) for row in self.rows.values() if row.gradients]
        self.shared: list[tuple[list[Line], tuple[str, ...], float]] = []  # lines, layers, the middle
        for layers in (layers for phase, layers in self._sends if phase == "gradients" and len(layers) != 1):
            group = self._sends["gradients", layers]
            kinds = dict.fromkeys(_IN_JAX.get(one.kind, one.kind) for one in group)
            along = list(dict.fromkeys(name for one in group for name in one.metrics))
            words = f"of gradients, {', '.join(along)}" if along else "of gradients"
            lines = [(" + ".join(kinds), "big"), (cut(words, 18), "sent"), *self._sent("gradients", layers)]
            ys = [self.rows[name].y for name in layers if name in self.rows]
            self.shared.append((lines, layers, _free(ys or [self.top / 2], size(lines)[1], taken)))
        # A sum that the program names no layer for is of gradients that are in no other sum, as far as that shows. They
        # go into the wall too: drawn past it, they would say that each device updates by its own.
        self.unnamed = [one for one in self._sends.get(("elsewhere", ()), ()) if one.kind in _SUMS]
        sources = {edge.source for edge in self.graph.edges if edge.phase == "gradients"}
        perhaps = {name: row for name, row in self.rows.items() if name in sources - sent} if self.unnamed else {}
        if perhaps:
            lines: list[Line] = [("psum", "big"), ("of dashed gradients", "sent"), *self._sent_lines(self.unnamed)]
            self.shared.append(
                (lines, tuple(perhaps), _free([row.y for row in perhaps.values()], size(lines)[1], taken))
            )
        self.sent, self.unnamed = self.sent | perhaps, self.unnamed if perhaps else []
        self.perhaps = set(self.sent) - sent
        self.wall: tuple[float, float] | None = None  # from below to above
        if sends or self.unnamed:
            edges = [y + way * height / 2 for y, height in taken for way in (-1, 1)]
            edges += [row.y + way * row.height / 2 for row in self.sent.values() for way in (-1, 1)]
            along_y = [self.results_y + size(self.results)[1] / 2] if any(one.metrics for one in sends) else []
            self.wall = min(edges), max([*edges, *along_y])
        # What prepares or checks an update, such as the codes of compressed gradients, is one box below the optimizers.
        updates = self.graph.optimizers
        params = {weight for layer in self.graph.layers for weight in layer.weights}
        known = [one for one in updates if changes_params(one, params)] or list(updates)
        known += [one for one in updates if one.name in self.moves and one not in known]
        self.known = {one.name for one in known}
        # What follows an update, such as the mean of the params every few steps, has a box of its own above it.
        follow = [edge for edge in self.graph.edges if edge.phase in ("optimizer", "elsewhere")]
        self.behind = {edge.target: edge.source for edge in follow}
        self.beside = {edge.target for edge in follow if edge.phase == "elsewhere"}  # it leaves the params as they are
        others = [one for one in updates if one not in known and one.name not in self.behind]
        taken = [(self.results_y, size(self.results)[1])] if self.results else []
        self.optimizers: dict[str, tuple[list[Line], float]] = {}  # by name: lines, the middle of the box
        self.boxes: dict[str, list[StepLayer]] = {one.name: [one] for one in known}
        self.boxes |= {others[0].name: others} if others else {}
        self.boxes |= {one.name: [one] for one in updates if one.name in self.behind}
        for name, layers in self.boxes.items():
            first = layers[0]
            lines = self._lines(first, first.forward, backward=False)
            if len(layers) > 1:
                kinds = list(dict.fromkeys(own_name(Node(one.name, one.op)) or one.op for one in layers))
                lines = [
                    (cut(text), kind) for text, kind in ((kinds[0], "big"), (", ".join(kinds[1:]), "plain")) if text
                ]
            lines += [line for one in layers for line in self._sent("optimizer", (one.name,))]
            names = {one.name for one in layers}
            ys = [self.rows[e.source].y for e in self.graph.edges if e.phase == "gradients" and e.target in names]
            height = self._height(lines, first.forward)
            if name in self.behind:
                update, y = self.optimizers[self.behind[name]]
                ys = [y + size(update)[1] / 2 + _GAP + height / 2]
            self.optimizers[name] = (lines, _free(ys or [0.0], height, taken))

    def lines(self) -> list[str]:
        boxes = [box for row in self.rows.values() for box in self._row(row)]
        back = [*self._devices(), *self._blocks(), *self._band()]
        ways = [*self._edges(), *self._turn(), *self._updates()]
        return [*self._head(), *back, *boxes, *self._inputs(), *ways, self._caption()]

    def height(self) -> float:
        """Of all of it, in points."""
        return self._highest() - self.bottom + LINE + 12 + size(self._caption_lines())[1] + _MARGIN

    def _highest(self) -> float:
        """Where everything ends, and the way of moved parameters is."""
        highest = max(self.top + 7 * (self.cards - 1), self.results_y + size(self.results)[1] / 2)
        return highest + 8 * bool(self.moves)

    def _head(self) -> list[str]:
        """`nop2` draws nodes and edges where they say that they are."""
        drawing = {"layout": "nop2", "bgcolor": self.theme.background, "tooltip": self.title}
        drawing |= {"outputorder": "nodesfirst", "fontname": style.FONT, "fontcolor": self.theme.text}
        box = {"shape": "box", "style": "filled,rounded", "fontname": style.FONT, "fontcolor": style.INK, "margin": 0}
        edge = {"color": self.theme.line, "fontcolor": self.theme.line, "fontname": style.FONT, "fontsize": SMALL}
        return [
            "graph " + attributes(**drawing),
            "node " + attributes(**box, color="#6e7781", penwidth=0.8, fontsize=style.SIZE),
            "edge " + attributes(**edge, arrowsize=0.6, penwidth=0.9),
        ]

    def _left(self, column: str) -> float:
        return self.x[column] - self.width[column] / 2

    def _right(self, column: str) -> float:
        return self.x[column] + self.width[column] / 2

    def _devices(self) -> Iterator[str]:
        """A card for each device under the columns that it computes alone."""
        if self.cards == 1:
            return
        lanes = [x for (phase, _, _), x in self.lanes.items() if phase == "forward"]
        left, right = min([self._left("forward"), *lanes]) - 10, self.knee + 4
        size_of = right - left, self.top - self.bottom + 10
        middle = (left + right) / 2, (self.top + self.bottom - 10) / 2
        look = {"label": "", "style": "filled,rounded", "color": self.theme.faint, "tooltip": "each device has this"}
        for number in reversed(range(self.cards)):
            at = middle[0] + 7 * number, middle[1] + 7 * number
            yield node(f"device {number}", at, size_of, fillcolor=self.theme.cluster, **look)
        lines: list[Line] = [(f"each of {self.graph.devices} devices", "plain")]
        wide = size(lines)[0]
        look = {"label": label(lines, self.theme.text), "shape": "plaintext", "style": ""}
        yield node("devices", (right - wide / 2, self.bottom + 2), (wide, LINE), **look)

    def _blocks(self) -> Iterator[str]:
        """A frame around the rows of each repeated block and loop."""
        groups: dict[Path, list[Row]] = {}
        for row in self.rows.values():
            path = next((path for path in paths_of(row.layer.scope) if path[-1].times is not None), None)
            if path is not None:
                groups.setdefault(path, []).append(row)
        left, right = self._left("forward") - 8, self._right("backward") + 8
        beside = self._right("band" if "band" in self.x else "forward")
        for path, rows in groups.items():
            low, high = rows[0].y - rows[0].height / 2 - 9, rows[-1].y + rows[-1].height / 2 + 9
            high += LINE if rows[-1].backward else 0  # its name is above the box of the gradient
            look = {"style": "filled,rounded,dashed", "fillcolor": self.theme.region, "color": self.theme.faint}
            name, middle = "/".join(path), ((left + right) / 2, (low + high) / 2)
            yield node(f"block {name}", middle, (right - left, high - low), label="", **look)
            lines: list[Line] = [(cut(scope_label(path[-1]), (right - beside) / SMALL), "plain")]
            wide, plain = size(lines)[0], {"label": label(lines, self.theme.text), "shape": "plaintext", "style": ""}
            yield node(f"name of {name}", (right + 6 - wide / 2, high - 10), (wide, 16), **plain)

    def _band(self) -> Iterator[str]:
        """The parameters of all layers as one band."""
        if rows := [row for row in self.rows.values() if row.band]:
            low, high = rows[0].y - rows[0].height / 2, rows[-1].y + rows[-1].height / 2
            place = (self.x["band"], (low + high) / 2), (self.width["band"], high - low)
            yield node("parameters", *place, label="", **_BAND_LOOK, tooltip="the parameters")

    def _row(self, row: Row) -> Iterator[str]:
        """A layer's boxes, side by side, and the words beside the edges that leave them."""
        layer = row.layer
        yield self._box(layer.name, "forward", row.forward, row.y, layer, layer.forward)
        if layer.backward is not None:
            yield self._box(layer.name + BACKWARD, "backward", row.backward, row.y, layer, layer.backward)
        if row.band:
            place = (self.x["band"], row.y), (self.width["band"] - 4, size(row.band)[1])
            look = {"label": label(row.band, style.INK), **_BAND_LOOK, "tooltip": ", ".join(layer.weights)}
            yield node(f"{layer.name}: parameters", *place, **look)
        if row.gather:
            yield self._badge(f"{layer.name}: gather", row.gather, (self.x["gather"], row.y))
        yield from self._words(f"{layer.name}: up", row.above, self.x["forward"], row.y + _half(row, True), 1)
        yield from self._words(f"{layer.name}: down", row.below, self.x["backward"], row.y - _half(row, False), -1)
        yield from self._reads(row)

    def _box(self, name: str, column: str, lines: list[Line], y: float, layer: StepLayer, part: StepPart) -> str:
        colour = style.fill(Node(layer.name, layer.op, layer.detail))
        if self.heat is not None:
            colour = style.heat(cost(part, self.heat) / self.most)
        if self.by_memory and self.limit is not None:
            colour = _TOO_MUCH if (part.peak or 0) > self.limit else _FITS
        look = {"label": label(lines, ink(colour)), "fillcolor": colour, "tooltip": tooltip(layer, part)}
        look |= {"style": "filled,rounded" + (",dashed" if column == "backward" else "")}
        if self.by_memory and part.again:
            look |= {"penwidth": 2.5, "color": _AGAIN}
        return node(name, (self.x[column], y), (self.width[column], self._height(lines, part)), **look)

    def _badge(self, name: str, lines: Sequence[Line], at: Point) -> str:
        look = {"style": "filled", "fillcolor": SENDING, "color": SENDING, "tooltip": "sent between devices"}
        return node(name, at, size(lines), label=label(lines, "#ffffff"), **look)

    def _words(self, name: str, lines: list[Line], x: float, y: float, way: int) -> Iterator[str]:
        """The lines beside an edge, to the right of it. What is sent has a colour of its own."""
        for number, text in enumerate(lines if way < 0 else lines[::-1]):
            width = size([text])[0] - 8
            at = x + width / 2 + 5, y + way * (LINE * (number + 0.5) + 6)
            sent = text[1] == "sent"
            look = {"style": "filled" if sent else "", "shape": "box" if sent else "plaintext", "tooltip": text[0]}
            look |= {"fillcolor": SENDING, "color": SENDING} if sent else {}
            colour = "#ffffff" if sent else self.theme.line
            yield node(f"{name} {number}", at, (width, LINE - 1), label=label([text], colour), **look)

    def _reads(self, row: Row) -> Iterator[str]:
        """The way of the parameters from the band to the forward box."""
        if not (row.band or row.gather) or "band" not in self.x:
            return
        name, gather, half = row.layer.name, f"{row.layer.name}: gather", size(row.gather)[0] / 2
        cell = f"{name}: parameters" if row.band else "parameters"
        start, end = (self._left("band"), row.y), (self._right("forward"), row.y)
        if row.gather:
            yield line(cell, gather, [start, (self.x["gather"] + half, row.y)], color=SENDING)
            yield line(gather, name, [(self.x["gather"] - half, row.y), end], color=SENDING)
        else:
            yield line(cell, name, [start, end], color=_BAND_LINE)

    def _inputs(self) -> Iterator[str]:
        """What the step is given besides parameters, below the first row."""
        look = {"shape": "oval", "style": "filled", "fillcolor": "#8dd3c7"}
        for number, name in enumerate(self.inputs):
            lines = [(name, "plain")]
            at = self.x["forward"], -LINE - number * 30
            yield node(name, at, (size(lines)[0] * 1.3, 26), label=label(lines, style.INK), **look)

    def _edges(self) -> Iterator[str]:
        """Between layers upwards, between their gradients downwards."""
        for edge in [*self._ways_up(), *(edge for edge in self.graph.edges if edge.phase == "backward")]:
            up = edge.phase != "backward"
            ends = (edge.source, edge.target) if up else (edge.source + BACKWARD, edge.target + BACKWARD)
            first, x = self.rows.get(edge.source), self.x["forward" if up else "backward"]
            y, low = (first.y, _half(first, up)) if first else (-LINE, 13.0)
            lane = self.lanes.get(("forward" if up else "backward", edge.source, edge.target))
            if edge.target == _RESULTS:
                side, goal = self._left("forward"), (self.x["optimizer"] - size(self.results)[0] / 2, self.results_y)
                start = [(x, y + low)] if lane is None else [(side if first else x - 26, y), (lane, y)]
                yield line(*ends, [*start, (start[-1][0], self.results_y), goal], tooltip="returned")
                continue
            last = self.rows[edge.target]
            if lane is None:
                way = 1 if last.y > y else -1
                points = [(x, y + way * low), (x, last.y - way * _half(last, up))]
            else:
                side = self._left("forward") if up else self._right("backward")
                points = [(side if first else x - 26, y), (lane, y), (lane, last.y), (side, last.y)]
            yield line(*ends, points, tooltip=f"{edge.dtype}[{', '.join(map(str, edge.shape))}]")

    def _turn(self) -> Iterator[str]:
        """From the loss to its gradient."""
        row = next((row for row in reversed(self.rows.values()) if row.backward), None)
        if row is not None and not row.band:
            points = [(self._right("forward"), row.y), (self._left("backward"), row.y)]
            yield line(row.layer.name, row.layer.name + BACKWARD, points)

    def _updates(self) -> Iterator[str]:
        """The wall, the optimizers, the gradients that reach them, and the way back to the parameters."""
        if self.wall is not None:
            (low, high), x = self.wall, self.x["gradients"]
            look = {"style": "filled", "fillcolor": SENDING, "color": SENDING, "tooltip": "sent between devices"}
            yield node("sums", (x, (low + high) / 2), (self.width["gradients"], high - low), label="", **look)
            words = [(lines, y) for lines, _, y in self.shared]
            words += [(row.gradients, row.y) for row in self.rows.values() if row.gradients]
            for number, (lines, y) in enumerate(words):
                yield self._badge(f"sum {number}", lines, (x, y))
        if self.results:
            at, look = (
                (self.x["optimizer"], self.results_y),
                {"shape": "oval", "style": "filled", "fillcolor": "#f4a6c6"},
            )
            yield node(_RESULTS, at, size(self.results), label=label(self.results, style.INK), **look)
        goals = {one.name: name for name, layers in self.boxes.items() for one in layers}
        ways = dict.fromkeys((e.source, goals[e.target]) for e in self.graph.edges if e.phase == "gradients")
        for name, layers in self.boxes.items():
            lines, y = self.optimizers[name]
            yield self._box(name, "optimizer", lines, y, layers[0], layers[0].forward)
            if name in self.behind:
                first, first_y = self.optimizers[self.behind[name]]
                x, up = self.x["optimizer"], 1 if y > first_y else -1
                points = [(x, first_y + up * size(first)[1] / 2), (x, y - up * size(lines)[1] / 2)]
                yield line(self.behind[name], name, points, tooltip="updated by each device")
            is_last = name in self.behind or (name in self.known and any(target == name for _, target in ways))
            followed = {update for follower, update in self.behind.items() if follower not in self.beside}
            if name in self.moves:
                yield from self._move(name, y)
            elif is_last and name not in followed | self.beside:
                yield from self._return(name, y)
        # Gradients that are summed go into the wall, each beside its layer, and come out of it as one arrow.
        for name, row in self.sent.items():
            ends = (self._right("backward"), row.y), (self._left("gradients"), row.y)
            look = {"style": "dashed", "tooltip": "in a sum that the program names no layer for"}
            look = look if name in self.perhaps else {}
            yield line(name + BACKWARD, "sums", ends, color=SENDING, penwidth=1.5, **look)
        for source, target in ways:
            if source not in self.sent:
                start = self._right("backward"), self.rows[source].y
                end = self._left("optimizer"), self.optimizers[target][1]
                yield curve(source + BACKWARD, target, start, end, self.knee, color=self.theme.line)
        summed = dict.fromkeys(target for source, target in ways if source in self.sent)
        targets = [one for one in summed if one in self.known] or list(summed)
        for target in (*targets, *(name for name in self.boxes if self.wall and name not in (*targets, *self.behind))):
            assert self.wall is not None
            y = self.optimizers[target][1]
            start = self._right("gradients"), min(max(y, self.wall[0] + 8), self.wall[1] - 8)
            end, look = (self._left("optimizer"), y), {"color": SENDING, "penwidth": 1.5}
            if target not in targets and any(self._is_sent(one) for one in self.boxes[target]):
                yield line(target, "sums", (end, start), tooltip="prepares what is sent", **look)
            else:
                yield curve("sums", target, start, end, 0.0, **look)

    def _is_sent(self, layer: StepLayer) -> bool:
        """Whether what a layer computes goes into a collective, as the codes of gradients do."""
        on: dict[str, list[str]] = {}
        for edge in self.network.edges:
            on.setdefault(edge.source, []).append(edge.target)
        return any(self.network[target].op in SENT for target in reach([layer.name], on))

    def _move(self, name: str, y: float) -> Iterator[str]:
        """The moved parameters, to the band above everything."""
        if not (rows := [row for row in self.rows.values() if row.band]):
            return
        side, above, x = self._right("optimizer"), self._highest(), self.x["band"]
        points = [(side, y), (side + 6, y), (side + 6, above), (x, above), (x, rows[-1].y + rows[-1].height / 2)]
        yield line(name, "parameters", points, color=_BAND_LINE, penwidth=1.5, tooltip="the moved parameters")

    def _return(self, name: str, y: float) -> Iterator[str]:
        """The updated parameters, back to the band below everything."""
        rows = [row for row in self.rows.values() if row.band]
        if not rows:
            return
        side, below, x = self._right("optimizer"), self.bottom - LINE, self.x["band"]
        points = [(side, y), (side + 12, y), (side + 12, below), (x, below), (x, rows[0].y - rows[0].height / 2)]
        yield line(name, "parameters", points, color=_BAND_LINE, penwidth=2.5, tooltip="the new parameters")
        look = {"shape": "plaintext", "style": "", "fontsize": SMALL, "fontcolor": self.theme.text}
        yield node("new parameters", (self.x["optimizer"] - 20, below + 9), (90, LINE), label="new parameters", **look)

    def _caption(self) -> str:
        """The title and the totals, below everything."""
        lines = self._caption_lines()
        wide, high = size(lines)
        at = self.right / 2, self.bottom - LINE - 12 - high / 2
        return node("caption", at, (wide, high), label=label(lines, self.theme.text), shape="plaintext", style="")

    def _caption_lines(self) -> list[Line]:
        elsewhere = [
            collective
            for collective in self.graph.collectives
            if collective.phase == "elsewhere" and collective.devices > 1 and collective not in self.unnamed
        ]
        mesh = ", ".join(f"{name}={size}" for name, size in self.mesh.items())
        devices = plural(self.graph.devices, "device") + (f" ({mesh})" if mesh else "")
        sent = f"{human(self.graph.total_bytes, 'B')} handed in to collectives by each"
        sent = sent if self.graph.collectives else "nothing sent"
        texts = [f"{parameters(self.network)} · {devices} · {sent}"]
        if (memory := self.graph.memory) is not None:
            texts.append(f"memory of a device: {human(memory.total, 'B')}, live at most {human(memory.peak, 'B')}")
        texts += [f"colour: {self.heat}, white is none, red the most of all"] if self.heat is not None else []
        if self.by_memory:
            texts.append("height: the bytes that are live on a device while a layer runs, from 0, parameters included")
            again = any(layer.backward.again for layer in self.graph.layers if layer.backward)
            texts += ["blue frame: remat computes a part of the layer again"] if again else []
            texts += [f"red: above {human(self.limit, 'B')}"] if self.limit is not None else []
        texts += ["dashed: the program names no layer that these sums are of"] if self.unnamed else []
        texts += [f"elsewhere in the step: {text}" for text in sends_text(elsewhere, self.mesh)]
        return [(self.title, "big"), *((text, "plain") for text in texts)]


def _half(row: Row, up: bool) -> float:
    """Half of the height of a box."""
    return row.halves[0 if up else 1] or row.height / 2


def _free(ys: Sequence[float], height: float, taken: list[tuple[float, float]]) -> float:
    """The next place upwards from the middle of these where nothing is. `taken` grows."""
    y = sum(ys) / len(ys)
    for other, other_height in sorted(taken):
        if abs(other - y) < (other_height + height) / 2 + 6:
            y = other + (other_height + height) / 2 + 6
    taken.append((y, height))
    return y
