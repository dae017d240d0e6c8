"""`Plot`, which loads graphviz on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._draw.picture import Plot as Plot

    __all__ = ["Plot"]
else:
    __all__ = ["__getattr__"]

    def __getattr__(name: str) -> Any:
        if name == "Plot":
            from ._draw.picture import Plot

            return Plot
        raise AttributeError(f"module 'jaxpar.viz' has no attribute {name!r}")
