"""`Plot` and `DiffPlot`, which load graphviz on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._diff.picture import DiffPlot as DiffPlot
    from ._draw.picture import Plot as Plot

    __all__ = ["DiffPlot", "Plot"]
else:
    __all__ = ["__getattr__"]

    def __getattr__(name: str) -> Any:
        if name == "Plot":
            from ._draw.picture import Plot

            return Plot
        if name == "DiffPlot":
            from ._diff.picture import DiffPlot

            return DiffPlot
        raise AttributeError(f"module 'jaxpar.viz' has no attribute {name!r}")
