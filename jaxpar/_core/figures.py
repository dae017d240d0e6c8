"""A matplotlib figure that a notebook shows without pyplot."""

from __future__ import annotations

import functools
import io
import os
from typing import Any


def figure(name: str, width: float, height: float) -> Any:
    """An empty figure of so many inches, for the function of that name.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        return _kind()(figsize=(width, height), layout="constrained")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{name} draws with matplotlib: pip install matplotlib") from error


def saved(figure: Any, path: str | os.PathLike[str] | None) -> Any:
    """The figure, written to a file where there is a path."""
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def png(figure: Any, dpi: float = 100) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


@functools.cache
def _kind() -> Any:
    from matplotlib.figure import Figure

    class Picture(Figure):
        """A figure that is of no window and no global list of figures, so that nothing shows it twice."""

        def _repr_png_(self) -> bytes:
            return png(self)

    return Picture
