"""The picture of a step: a `Plot` of a `StepGraph`."""

from __future__ import annotations

from .._draw.picture import Plot
from .._draw.style import Options
from .._graph import Graph
from .dot import StepOptions, to_dot
from .graph import StepGraph


class StepPlot(Plot):
    """A drawn training step. A notebook shows it and `save` writes it.

    Attributes:
        step: the `StepGraph` that it was drawn from.
        network: the `Graph` of the same function.
    """

    def __init__(self, step: StepGraph, network: Graph, options: StepOptions, time_limit: float) -> None:
        super().__init__(network, Options(options.title, theme=options.theme), time_limit)
        self.step: StepGraph = step
        self.body: list[str] = ["\t" + line + "\n" for line in to_dot(step, options)]
        self._drawn: str = self.source

    def html(self) -> str:
        """The picture as a static page."""
        return self._static_page("")
