"""A network in grey, whose layers with certain params are marked: where a fault was, for `train.Fault`."""

from __future__ import annotations

from collections.abc import Collection

from .._graph import Graph, Node
from .dot import to_dot
from .look import Look, drawn
from .picture import Plot
from .style import SMALL, Line, Options, caption_of, cut, title_lines

_MARKED, _OTHER = "#cf222e", "#d9d9d9"
_MOST = 3  # marks that a box names
_SHOWN = 6  # marks that the caption names because no layer has them


class MarkedPlot(Plot):
    """A drawn network with marks. A notebook shows the picture, and `save` writes it.

    Attributes:
        marked: {name of a layer: the marks on it}.
    """

    def __init__(self, network: Graph, marks: Collection[str], options: Options, time_limit: float) -> None:
        """`marks` are paths that have the name of a param in them, or that of a layer with params."""
        names = {weight.name: (weight.detail or weight.name).replace(".", "/") for weight in network.weights}
        uses = {node.name: {names[w] for w in node.weights if w in names} for node in network.layers if node.weights}
        self.marked: dict[str, list[str]] = {}
        without_layer: list[str] = []
        for mark in marks:
            path = f"/{mark}/".replace(".", "/")  # viz writes the number of a list's element behind a point
            # The longest name: "b/w" is another param than "w". Statistics of a layer have its name, and are no params.
            in_path = [name for name in {*names.values(), *uses} if f"/{name}/" in path]
            found = max(in_path, key=len, default=None)
            layers = [layer for layer, params in uses.items() if found == layer or found in params]
            for layer in layers:
                self.marked.setdefault(layer, []).append(mark)
            without_layer += [] if layers else [mark]
        lines = title_lines(options.title)
        if without_layer:
            more = ", ..." if len(without_layer) > _SHOWN else ""
            lines.append((f"not in this picture: {', '.join(map(cut, without_layer[:_SHOWN]))}{more}", SMALL, False))
        look = _Look(network, options, self.marked)
        look.caption = caption_of(lines, [])
        super().__init__(network, options, time_limit, lines=to_dot(network, options, look))

    def html(self) -> str:
        """The picture and the table of layers as one static page."""
        return self._static_page(self._table())


class _Look(Look):
    """Marked layers are red and name their marks. All others are grey."""

    def __init__(self, graph: Graph, options: Options, marked: dict[str, list[str]]) -> None:
        super().__init__(graph, drawn(graph, options.hide_weights)[0], options)
        self._marked = marked

    def fill(self, node: Node) -> str:
        return _MARKED if node.name in self._marked else _OTHER

    def lines(self, node: Node) -> list[Line]:
        marks = self._marked.get(node.name, [])
        shown = [*marks[:_MOST], *(["..."] if len(marks) > _MOST else [])]
        return [*super().lines(node), *((cut(text), SMALL, True) for text in shown)]
