"""The picture of a network whose first layer with a NaN or an infinity is red."""

from __future__ import annotations

from .._draw.picture import Plot
from .._draw.style import SMALL, Options, attributes, quote
from .._graph import Graph
from .found import Nonfinite

_RED = "#f0382b"


class NonfinitePlot(Plot):
    """A drawn network. A notebook shows it and `save` writes it.

    Attributes:
        found: the first NaN or infinity, or None where all numbers are finite.
    """

    def __init__(self, network: Graph, options: Options, time_limit: float, found: Nonfinite | None) -> None:
        super().__init__(network, options, time_limit)
        self.found: Nonfinite | None = found
        if found is not None and any(node.name == found.layer for node in network.nodes):
            words = f"{found.kind}: {found.primitive} of {found.low:.4g} to {found.high:.4g}\n{found.source}"
            look = {"fillcolor": _RED, "color": "#b30000", "penwidth": 3, "xlabel": words, "fontsize": SMALL}
            self.body.append(f"\t{quote(found.layer)} {attributes(**look, fontcolor='#b30000', tooltip=str(found))}\n")
            self._drawn = self.source

    def html(self) -> str:
        """The picture as a static page."""
        return self._static_page("")
