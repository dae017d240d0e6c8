"""The picture of a comparison."""

from __future__ import annotations

from typing import Any

from .._draw.picture import Plot
from .._draw.style import Options
from . import table
from .dot import to_dot
from .result import Diff


class DiffPlot(Plot):
    """A drawn comparison. A notebook shows it and `save` writes it.

    Attributes:
        diff: the `Diff` that it was drawn from.
        network: the second network.
        time_limit: seconds that the renderer may take.
    """

    def __init__(self, diff: Diff, options: Options, time_limit: float) -> None:
        super().__init__(diff.after, options, time_limit)
        self.diff: Diff = diff
        self.body: list[str] = ["\t" + line + "\n" for line in to_dot(diff, options)]
        self._drawn: str = self.source

    def __repr__(self) -> str:
        return repr(self.diff)

    def html(self, *args: Any, **options: Any) -> str:
        """The picture and the table as one static page."""
        return self._static_page(self._table())

    def _table(self) -> str:
        return table.to_html(self.diff.before, self.diff.after, self.diff.changes, self.options.title)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None, **_: Any) -> dict[str, bytes | str]:
        """The picture for a notebook, as SVG and PNG. Without a renderer, what to install and the table."""
        return {**super()._repr_mimebundle_(include, exclude), "text/plain": str(self.diff)}
