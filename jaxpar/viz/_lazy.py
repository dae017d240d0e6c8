"""What loads on first use: `Plot` and `DiffPlot`, which need graphviz, and `compare_meshes` of `jp.train`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._diff.picture import DiffPlot as DiffPlot
    from ._draw.picture import Plot as Plot

    compare_meshes: Callable[..., Any]

    __all__ = ["DiffPlot", "Plot", "compare_meshes"]
else:
    __all__ = ["__getattr__"]

    def __getattr__(name: str) -> Any:
        # People look for it beside `plot_step`. It asks the compilers of `jp.train`, which stands above this room.
        if name == "compare_meshes":
            return importlib.import_module("jaxpar.train").compare_meshes
        room = {"Plot": "_draw", "DiffPlot": "_diff"}.get(name)
        if room is None:
            raise AttributeError(f"module 'jaxpar.viz' has no attribute {name!r}")
        return getattr(importlib.import_module(f"jaxpar.viz.{room}.picture"), name)
