"""From a `StepGraph` to the text of its picture, in the dot language.

Each layer has a row: its forward box, its cell of the band of parameters, its backward box. The optimizer is beside them.
"""

from __future__ import annotations

import html
from dataclasses import dataclass

from .._draw import style
from .._draw.dot import quote
from .._draw.style import FONT, SMALL, THEMES, Theme, ink, text_width
from .._graph import Node
from .graph import Collective, StepEdge, StepGraph, StepLayer, StepPart
from .text import caption_lines, cost, edge_text, layer_lines, sends_text, weights_text

_SENT = "#c51b7d"
_BAND, _BAND_LINE = "#ccebc5", "#7fbf7b"
_POINTS = 72.0  # of an inch
_BAND_WIDTH = 11  # points of the line between two cells


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How a step is drawn: arguments of `plot_step`."""

    title: str = "step"
    heat: str | None = None
    theme: str = "light"


def to_dot(graph: StepGraph, options: StepOptions) -> list[str]:
    """The lines between the braces of a digraph."""
    return _Drawing(graph, options).lines()


class _Drawing:
    def __init__(self, graph: StepGraph, options: StepOptions) -> None:
        self.graph, self.options = graph, options
        self.theme: Theme = THEMES[options.theme]
        self.mesh = dict(graph.mesh)
        self.sends: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
        for one in graph.collectives:
            if one.devices > 1:
                layers = one.layers[:1] if one.phase in ("forward", "backward") else one.layers
                self.sends.setdefault((one.phase, layers), []).append(one)
        parts = [part for layer in (*graph.layers, *graph.optimizers) for part in (layer.forward, layer.backward)]
        self.most = max((cost(part, options.heat) for part in parts if part is not None), default=0) or 1
        self.drawn: set[tuple[str, str]] = set()  # collectives that are written on an edge

    def lines(self) -> list[str]:
        return [*self._head(), *self._inputs(), *self._rows(), *self._edges(), *self._band(), *self._updates()]

    def _head(self) -> list[str]:
        whole = {"rankdir": "BT", "bgcolor": self.theme.background, "nodesep": 0.35, "ranksep": 0.35}
        whole |= {"labelloc": "b", "tooltip": self.options.title, "fontname": FONT, "fontcolor": self.theme.text}
        box = {"shape": "box", "style": "filled,rounded", "fontname": FONT, "fontcolor": style.INK, "fontsize": 12}
        box |= {"color": "#6e7781", "penwidth": 0.8, "margin": "0.1,0.05"}
        line = {"color": self.theme.line, "fontcolor": self.theme.line, "fontname": FONT, "fontsize": SMALL}
        return [
            "graph " + _attrs(**whole, label=self._caption()),
            "node " + _attrs(**box),
            "edge " + _attrs(**line, arrowsize=0.6, penwidth=0.9),
        ]

    def _caption(self) -> str:
        rest = [one for (phase, _), group in self.sends.items() if phase == "elsewhere" for one in group]
        lines = caption_lines(self.graph, self.options.heat)
        lines += [f"elsewhere in the step: {text}" for text in sends_text(rest, self.mesh)]
        fonts = [(14, f"<B>{_escape(self.options.title)}</B>"), *((10, _escape(line)) for line in lines)]
        rows = (f'<TR><TD><FONT POINT-SIZE="{size}">{text}</FONT></TD></TR>' for size, text in fonts)
        return f'<<TABLE BORDER="0" CELLSPACING="0" CELLPADDING="2">{"".join(rows)}</TABLE>>'

    def _inputs(self) -> list[str]:
        """What the step is given besides parameters."""
        layers = {layer.name for layer in self.graph.layers}
        names = dict.fromkeys(edge.source for edge in self.graph.edges if edge.source not in layers)
        look = {"shape": "oval", "style": "filled", "fillcolor": "#8dd3c7"}
        return [f"{quote(name)} " + _attrs(label=name, **look) for name in names]

    def _rows(self) -> list[str]:
        """The rows, those of a repeated block or loop in a cluster."""
        found: list[str] = []
        last: str = ""
        for number, layer in enumerate(self.graph.layers):
            block = next((part for part in layer.scope if "×" in part), "")
            if block != last:
                found += ["}"] if last else []
                found += self._open(block, number) if block else []
                last = block
            found += self._row(layer)
        return found + (["}"] if last else [])

    def _open(self, block: str, number: int) -> list[str]:
        look = {"label": block, "labelloc": "b", "labeljust": "l", "fontsize": 13, "style": "rounded,filled,dashed"}
        look |= {"color": self.theme.faint, "fillcolor": self.theme.region, "margin": 10}
        return [f"subgraph {quote(f'cluster_{number}')} {{", "graph " + _attrs(**look)]

    def _row(self, layer: StepLayer) -> list[str]:
        """A layer's boxes, side by side."""
        boxes = [(layer.name, self._box(layer, layer.forward, backward=False))]
        if (sends := self.sends.get(("parameters", (layer.name,)))) is not None:
            boxes.append((f"{layer.name}: gather", self._badge(sends)))
        if layer.params:
            text = _table(weights_text(layer, self.graph.arguments), "#1f2328", SMALL)
            look = {"style": "filled", "fillcolor": _BAND, "color": _BAND_LINE, "group": "band", "width": 1.1}
            boxes.append((_cell(layer), _attrs(label=text, **look, tooltip=", ".join(layer.weights))))
        if layer.backward is not None:
            boxes.append((_back(layer), self._box(layer, layer.backward, backward=True)))
        if (sends := self.sends.get(("gradients", (layer.name,)))) is not None:
            boxes.append((f"{layer.name}: gradient", self._badge(sends)))
        found = [f"{quote(name)} {attrs}" for name, attrs in boxes]
        order = " -> ".join(quote(name) for name, _ in boxes)
        same = [f"{{ rank=same {order} {_attrs(style='invis')} }}"] if len(boxes) > 1 else []
        return found + same + self._flows(layer, [name for name, _ in boxes])

    def _flows(self, layer: StepLayer, names: list[str]) -> list[str]:
        """The arrows from the band to the boxes beside it."""
        gather = f"{layer.name}: gather"
        reads = [gather, layer.name] if gather in names else [layer.name]
        way = [_cell(layer), *reads] if _cell(layer) in names else reads
        look = _attrs(color=_BAND_LINE, constraint="false", penwidth=1.2)
        return [f"{quote(a)} -> {quote(b)} {look}" for a, b in zip(way, way[1:], strict=False)]

    def _box(self, layer: StepLayer, part: StepPart, *, backward: bool) -> str:
        lines = layer_lines(layer, part, self.options.heat, backward=backward)
        colour = style.fill(Node(layer.name, layer.op, layer.detail))
        if self.options.heat is not None:
            colour = style.heat(cost(part, self.options.heat) / self.most)
        width = max(text_width(text, 12 if bold else 9.5, bold) for text, bold in lines) / _POINTS + 0.2
        fonts = (
            f'<FONT POINT-SIZE="{12 if bold else 9.5}" COLOR="{ink(colour)}">'
            f"{f'<B>{_escape(text)}</B>' if bold else _escape(text)}</FONT>"
            for text, bold in lines
        )
        look = {"label": f"<{'<BR/>'.join(fonts)}>", "fillcolor": colour, "width": f"{max(1.3, width):.2f}"}
        look |= {"group": "backward" if backward else "forward", "tooltip": _tooltip(layer, part)}
        return _attrs(**look, style="filled,rounded" + (",dashed" if backward else ""))

    def _badge(self, sends: list[Collective]) -> str:
        text = _table(sends_text(sends, self.mesh), "#ffffff", SMALL)
        tip = "\n".join(f"{one.name}: {one.kind}, {one.bytes:,} bytes, {one.source}" for one in sends[:20])
        return _attrs(label=text, style="filled", fillcolor=_SENT, color=_SENT, height=0.2, tooltip=tip)

    def _edges(self) -> list[str]:
        """Between layers upwards, between their gradients downwards, with what is sent on the way."""
        found: list[str] = []
        for edge in self.graph.edges:
            if edge.phase == "forward":
                ends, look = f"{quote(edge.source)} -> {quote(edge.target)}", {}
            elif edge.phase == "backward":
                ends, look = f"{quote(edge.target + _BACK)} -> {quote(edge.source + _BACK)}", {"dir": "back"}
            else:
                continue
            found.append(f"{ends} " + _attrs(label=self._edge_label(edge), **look))
        turn = (layer for layer in reversed(self.graph.layers) if layer.backward is not None)
        if (top := next(turn, None)) is not None and not top.params:
            found.append(f"{quote(top.name)} -> {quote(_back(top))} " + _attrs(constraint="false"))
        return found + self._leftover()

    def _edge_label(self, edge: StepEdge) -> str:
        place = (edge.phase, edge.source)
        sends = self.sends.get((edge.phase, (edge.source,)), [])
        sends = [] if place in self.drawn else sends
        self.drawn.add(place)
        rows = [f'<TR><TD><FONT COLOR="{self.theme.line}">{_escape(line)}</FONT></TD></TR>' for line in edge_text(edge)]
        rows += [
            f'<TR><TD BGCOLOR="{_SENT}"><FONT COLOR="#ffffff">{_escape(line)}</FONT></TD></TR>'
            for line in sends_text(sends, self.mesh)
        ]
        return f'<<TABLE BORDER="0" CELLSPACING="0" CELLPADDING="1">{"".join(rows)}</TABLE>>'

    def _leftover(self) -> list[str]:
        """What is sent in a layer that no edge leaves, or of several layers at once."""
        found: list[str] = []
        for (phase, layers), sends in self.sends.items():
            alone = phase in ("forward", "backward") and (phase, layers[0]) not in self.drawn
            if alone or (phase == "parameters" and len(layers) != 1):
                name = f"{phase}: {', '.join(layers)}"
                found.append(f"{quote(name)} {self._badge(sends)}")
                goals = [layer + (_BACK if phase == "backward" else "") for layer in layers]
                found += [
                    f"{quote(name)} -> {quote(goal)} " + _attrs(color=_SENT, constraint="false") for goal in goals
                ]
        return found

    def _band(self) -> list[str]:
        """The line that makes one band of the cells."""
        cells = [_cell(layer) for layer in self.graph.layers if layer.params]
        look = _attrs(color=_BAND, penwidth=_BAND_WIDTH, dir="none", weight=100)
        return [f"{quote(a)} -> {quote(b)} {look}" for a, b in zip(cells, cells[1:], strict=False)]

    def _updates(self) -> list[str]:
        """The optimizers, what reaches them, and the way back to the parameters."""
        found: list[str] = []
        shared = {key: sends for key, sends in self.sends.items() if key[0] == "gradients" and len(key[1]) != 1}
        into: dict[str, str] = {}
        for number, ((_, layers), sends) in enumerate(shared.items()):
            badge = f"gradients {number}"
            found.append(f"{quote(badge)} {self._badge(sends)}")
            into |= dict.fromkeys(layers or [layer.name for layer in self.graph.layers], badge)
        found += self._ways(into)
        cells = [_cell(layer) for layer in self.graph.layers if layer.params]
        for optimizer in self.graph.optimizers:
            found.append(f"{quote(optimizer.name)} {self._box(optimizer, optimizer.forward, backward=False)}")
            found += self._own_sends(optimizer)
            if cells and any(edge.target == optimizer.name for edge in self.graph.edges):
                look = _attrs(color=_BAND_LINE, penwidth=2.5, constraint="false", label=" new parameters ")
                found.append(f"{quote(optimizer.name)} -> {quote(cells[-1])} {look}")
        return found

    def _ways(self, into: dict[str, str]) -> list[str]:
        """From each gradient to the optimizer, through the collectives on the way."""
        found: dict[str, None] = {}
        line, sent = _attrs(minlen=1), _attrs(color=_SENT, penwidth=1.6)
        for edge in (edge for edge in self.graph.edges if edge.phase == "gradients"):
            own = f"{edge.source}: gradient"
            has_own = ("gradients", (edge.source,)) in self.sends
            stops = [own] if has_own else [into[edge.source]] if edge.source in into else []
            way = [edge.source + _BACK, *stops, edge.target]
            for a, b in zip(way, way[1:], strict=False):
                look = sent if a in stops else line
                found[f"{quote(a)} -> {quote(b)} {look}"] = None
        return list(found)

    def _own_sends(self, optimizer: StepLayer) -> list[str]:
        sends = self.sends.get(("optimizer", (optimizer.name,)))
        if sends is None:
            return []
        name = f"{optimizer.name}: sent"
        line = _attrs(color=_SENT, dir="both")
        return [f"{quote(name)} {self._badge(sends)}", f"{quote(optimizer.name)} -> {quote(name)} {line}"]


_BACK = " (backward)"


def _back(layer: StepLayer) -> str:
    return layer.name + _BACK


def _cell(layer: StepLayer) -> str:
    return f"{layer.name}: parameters"


def _tooltip(layer: StepLayer, part: StepPart) -> str:
    lines = [f"{layer.name}: {layer.op} {layer.detail}".strip(), f"{part.flops:,} FLOP, {part.bytes:,} B"]
    lines += [f"{part.peak:,} bytes live on a device"] if part.peak is not None else []
    lines += [f"{part.seconds:.3g} s"] if part.seconds is not None else []
    return "\n".join([*lines, layer.source])


def _table(lines: list[str], colour: str, size: float) -> str:
    fonts = (f'<FONT POINT-SIZE="{size:g}" COLOR="{colour}">{_escape(line)}</FONT>' for line in lines)
    return f"<{'<BR/>'.join(fonts)}>"


def _attrs(**values: object) -> str:
    return "[" + " ".join(f"{key}={_value(value)}" for key, value in values.items()) + "]"


def _value(value: object) -> str:
    text = str(value)
    return text if text.startswith("<") and text.endswith(">") else quote(text)


def _escape(text: str) -> str:
    return html.escape(text)
