"""`Plot` and `DiffPlot`, which load graphviz on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._diff.picture import DiffPlot as DiffPlot
    from ._draw.picture import Plot as Plot

    __all__ = ["DiffPlot", "Plot"]
else:
    __all__ = ["__getattr__"]

    def __getattr__(name: str) -> Any:
        room = {"Plot": "_draw", "DiffPlot": "_diff"}.get(name)
        if room is None:
            raise AttributeError(f"module 'jaxpar.viz' has no attribute {name!r}")
        return getattr(importlib.import_module(f"jaxpar.viz.{room}.picture"), name)
