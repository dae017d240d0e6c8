"""Where everything is in the picture of a step, in points. Graphviz only draws it.

A layer has a row. From the left: ways around rows, forward boxes, gathered parameters, the band of parameters, backward
boxes, ways around rows, collectives of gradients, optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..._core.text import plural
from .._draw.labels import cut, own_name, shape_text
from .._draw.style import text_width
from .._graph import Node, human
from .graph import Collective, StepArgument, StepEdge, StepGraph, StepLayer, StepPart

BIG, SMALL = 12.0, 9.5  # points
LINE = 13.0  # the height of a line
_PAD, _GAP, _LANE = 18.0, 26.0, 12.0

Line = tuple[str, str]  # a text, and "big", "plain" or "sent"


@dataclass(slots=True, eq=False)
class Row:
    """A layer's row.

    Attributes:
        layer: whose row it is.
        forward, backward, band: the lines of its boxes. Empty for none.
        above: the lines beside the edge that leaves its forward box.
        below: those beside the edge that leaves its backward box.
        gather, gradients: what is sent between the band and its forward box, and behind its backward box.
        y, height: the middle of its boxes, and how high they are.
    """

    layer: StepLayer
    forward: list[Line]
    backward: list[Line]
    band: list[Line]
    above: list[Line]
    below: list[Line]
    gather: list[Line]
    gradients: list[Line]
    y: float = 0.0
    height: float = 0.0


class Columns:
    """The places of all columns.

    Attributes:
        rows: by the names of the layers, from below.
        shared: collectives of the gradients of several layers: their lines, their layers and how high they are.
        optimizers: their lines and how high they are, by name.
        x: the middle of each column.
        width: of the boxes of each column.
        lanes: for each edge that passes rows, by phase, source and target: its way.
        knee: where the words beside the edges between gradients end.
        top, right: of the whole.
        sends: the collectives by phase and layers. Only those of gradients are shared by several layers.
    """

    def __init__(self, graph: StepGraph, heat: str | None) -> None:
        self.graph, self.heat, self.mesh = graph, heat, dict(graph.mesh)
        self.sends: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
        for one in (one for one in graph.collectives if one.devices > 1):
            layers = one.layers if one.phase == "gradients" else one.layers[:1]
            self.sends.setdefault((one.phase, layers), []).append(one)
        self.rows: dict[str, Row] = {layer.name: self._row(layer) for layer in graph.layers}
        several = [layers for phase, layers in self.sends if phase == "gradients" and len(layers) != 1]
        self.shared = [(self._sent("gradients", layers), layers, 0.0) for layers in several]
        self.optimizers: dict[str, tuple[list[Line], float]] = {}
        for one in graph.optimizers:
            lines = layer_lines(one, one.forward, heat, backward=False) + self._sent("optimizer", (one.name,))
            self.optimizers[one.name] = (lines, 0.0)
        self.x, self.width = dict[str, float](), dict[str, float]()
        self.lanes: dict[tuple[str, str, str], float] = {}
        self.knee = self.top = self.right = 0.0
        self._place_rows()
        self._place_columns({phase: self._place_lanes(phase) for phase in ("forward", "backward")})
        self._place_updates()

    def _sent(self, phase: str, layers: tuple[str, ...]) -> list[Line]:
        parts = (text.partition(" over ") for text in sends_text(self.sends.get((phase, layers), ()), self.mesh))
        return [line for what, _, where in parts for line in ((what, "sent"), (f"over {where}", "sent"))]

    def _row(self, layer: StepLayer) -> Row:
        def sent(phase: str) -> list[Line]:
            return self._sent(phase, (layer.name,))

        def leaving(phase: str) -> list[Line]:
            edge = next((e for e in self.graph.edges if e.phase == phase and e.source == layer.name), None)
            return [(text, "plain") for text in edge_text(edge)] if edge is not None else []

        boxes = [
            layer_lines(layer, part, self.heat, backward=back) if part else []
            for part, back in ((layer.forward, False), (layer.backward, True))
        ]
        weights = weights_text(layer, self.graph.arguments) if layer.params else ()
        band: list[Line] = [(text, "plain") for text in weights]
        above, below = [*leaving("forward"), *sent("forward")], [*leaving("backward"), *sent("backward")]
        return Row(layer, boxes[0], boxes[1], band, above, below, sent("parameters"), sent("gradients"))

    def _place_rows(self) -> None:
        y = 0.0
        below: Row | None = None
        for row in self.rows.values():
            boxes = (row.forward, row.backward, row.band, row.gather, row.gradients)
            row.height = max(size(lines)[1] for lines in boxes)
            lines = max(len(below.above) if below else 1, len(row.below))
            y += _GAP + LINE * lines + row.height / 2
            row.y = y
            y += row.height / 2
            below = row
        self.top = y + (LINE * len(below.above) if below else 0)

    def _place_lanes(self, phase: str) -> int:
        """Give each edge of a phase that passes rows a way of its own. Returns how many ways there are."""
        order = {name: number for number, name in enumerate(self.rows, 1)}
        spans: list[list[tuple[int, int, str]]] = []  # what is in each lane: from, to and the source
        edges = [edge for edge in self.graph.edges if edge.phase == phase]
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
        width, rows = self.width, self.rows.values()
        for name in ("forward", "gather", "band", "backward", "gradients"):
            width[name] = max((size(lines)[0] for row in rows if (lines := getattr(row, name))), default=0.0)
        width["gradients"] = max([width["gradients"], *(size(lines)[0] for lines, _, _ in self.shared)])
        width["optimizer"] = max((size(lines)[0] for lines, _ in self.optimizers.values()), default=0.0)
        beside = {name: max((size(getattr(row, name))[0] for row in rows), default=0.0) for name in ("above", "below")}
        x = _LANE * (lanes["forward"] + 1)
        x = self._put("forward", x, max(0.0, beside["above"] - width["forward"] / 2))
        for name in ("gather", "band"):
            x = self._put(name, x, 0.0) if width[name] else x
        x = self._put("backward", x, max(_LANE * (lanes["backward"] + 1), beside["below"] - width["backward"] / 2))
        self.knee, x = x - _GAP, x + _GAP
        for name in ("gradients", "optimizer"):
            x = self._put(name, x, 0.0) if width[name] else x
        self.right = x
        left, right = self.x["forward"] - width["forward"] / 2, self.x["backward"] + width["backward"] / 2
        for key, lane in self.lanes.items():
            self.lanes[key] = left - _LANE * (lane + 1) if key[0] == "forward" else right + _LANE * (lane + 1)

    def _put(self, name: str, x: float, extra: float) -> float:
        """Place a column to the right of x. Returns where it ends, with a gap."""
        self.x[name] = x + self.width[name] / 2
        return x + self.width[name] + extra + _GAP

    def _place_updates(self) -> None:
        """Place what several gradients go through, and the optimizers, at the middle of where they come from."""
        taken = [(row.y, row.height) for row in self.rows.values() if row.gradients]
        for number, (lines, layers, _) in enumerate(self.shared):
            ys = [self.rows[name].y for name in layers if name in self.rows]
            self.shared[number] = (lines, layers, _free(ys or [self.top / 2], size(lines)[1], taken))
        taken = []
        for name, (lines, _) in self.optimizers.items():
            ys = [self.rows[e.source].y for e in self.graph.edges if e.phase == "gradients" and e.target == name]
            self.optimizers[name] = (lines, _free(ys or [0.0], size(lines)[1], taken))


def size(lines: Sequence[Line]) -> tuple[float, float]:
    """The width and the height of a box with these lines."""
    widths = [text_width(text, BIG if kind == "big" else SMALL, kind == "big") for text, kind in lines]
    return max(widths, default=0.0) + _PAD, LINE * len(lines) + 10


def _free(ys: Sequence[float], height: float, taken: list[tuple[float, float]]) -> float:
    """The next place upwards from the middle of these where nothing is. `taken` grows."""
    y = sum(ys) / len(ys)
    for other, size in sorted(taken):
        if abs(other - y) < (size + height) / 2 + 6:
            y = other + (size + height) / 2 + 6
    taken.append((y, height))
    return y


def spec_text(spec: tuple[str, ...] | None) -> str:
    """ "(data, –)" for what is split over "data" along its first dimension. Empty for what is not split.

    >>> spec_text(("data", ""))
    '(data, –)'
    """
    if spec is None or not any(spec):
        return ""
    return f"({', '.join(part or '–' for part in spec)})"


def edge_text(edge: StepEdge) -> tuple[str, ...]:
    """The lines beside an edge: the shape, and each device's part of it."""
    spec = spec_text(edge.spec)
    kind = "" if edge.dtype in ("float32", "") else f" {edge.dtype}"
    first = f"{shape_text(edge.shape)}{kind}"
    return (first, spec) if spec else (first,)


def sends_text(collectives: Sequence[Collective], mesh: dict[str, int]) -> list[str]:
    """One line for each kind of collective and its axes: "all-reduce 1.2 MB over data=4"."""
    groups: dict[tuple[str, str], list[Collective]] = {}
    for one in collectives:
        over = ", ".join(f"{name}={mesh[name]}" for name in one.axes) or f"{one.devices} devices"
        groups.setdefault((one.kind, over), []).append(one)
    return [_send_text(kind, over, group) for (kind, over), group in groups.items()]


def _send_text(kind: str, over: str, group: list[Collective]) -> str:
    runs, size = sum(one.times for one in group), human(sum(one.total_bytes for one in group), "B")
    least = "" if all(one.is_exact for one in group) else "at least "
    return f"{kind} {least}{size} over {over}" + (f", {runs} times" if runs > 1 else "")


def weights_text(layer: StepLayer, arguments: Iterable[StepArgument]) -> list[str]:
    """The lines of a cell of the band: how many parameters, and how they are split."""
    named = {argument.name: argument for argument in arguments}
    mine = [named[name] for name in layer.weights if name in named]
    specs = list(dict.fromkeys(text for one in mine if (text := spec_text(one.spec))))
    return [f"{layer.params:,} params", *specs[:2]]


def layer_lines(layer: StepLayer, part: StepPart, heat: str | None, *, backward: bool) -> list[Line]:
    """The lines of a box. A layer is called as in `plot_network`."""
    name = own_name(Node(layer.name, layer.op, layer.detail, scope=layer.scope))
    if backward:
        words = [name or layer.op, "backward"]
    else:
        words = [name, f"{layer.op} {layer.detail}".strip()] if name else [layer.op, layer.detail]
    lines = [(cut(text), "plain" if number else "big") for number, text in enumerate(words)]
    if heat is not None and heat != "memory":
        lines.append((cost_text(part, heat), "plain"))
    if part.peak is not None:
        lines.append((f"{human(part.peak, 'B')} live", "plain"))
    return [line for line in lines if line[0]]


def cost(part: StepPart, heat: str | None) -> float:
    """What `heat` colours by."""
    found = {"seconds": part.seconds, "flop/byte": part.flops_per_byte, "memory": part.peak}.get(heat or "")
    return found or 0.0


def cost_text(part: StepPart, heat: str) -> str:
    """ "1.2 ms", "3.4 FLOP/B". Empty where it is not known."""
    if heat == "seconds":
        return human_seconds(part.seconds) if part.seconds is not None else ""
    return f"{part.flops_per_byte:.3g} FLOP/B" if heat == "flop/byte" else ""


def human_seconds(seconds: float) -> str:
    """A time with three digits.

    >>> human_seconds(0.00123)
    '1.23 ms'
    """
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def caption_lines(graph: StepGraph, heat: str | None) -> list[str]:
    """The lines below the title."""
    mesh = ", ".join(f"{name}={size}" for name, size in graph.mesh)
    where = plural(graph.devices, "device") + (f" ({mesh})" if mesh else "")
    sent = f"{human(graph.total_bytes, 'B')} handed in to collectives by each" if graph.collectives else "nothing sent"
    lines = [f"{graph.total_params:,} parameters · {where} · {sent}"]
    if graph.memory is not None:
        memory = f"memory of a device: {human(graph.memory.total, 'B')}, live at most {human(graph.memory.peak, 'B')}"
        lines.append(memory)
    if heat is not None:
        lines.append(f"colour: {heat}, white is none, red the most of all")
    return lines
