"""A matplotlib figure that a notebook shows without pyplot."""

from __future__ import annotations

import functools
import io
import os
from typing import Any


def new_figure(name: str, width: float, height: float) -> Any:
    """An empty figure of this size in inches.

    Args:
        name: the function that draws, for the message.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        return _figure_type()(figsize=(width, height), layout="constrained")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{name} draws with matplotlib: pip install matplotlib") from error


def save_figure(figure: Any, path: str | os.PathLike[str] | None) -> Any:
    """Write the figure to a file if there is a path, and return it."""
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def png(figure: Any, dpi: float = 100) -> bytes:
    """The figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


@functools.cache
def _figure_type() -> Any:
    from matplotlib.figure import Figure

    class Picture(Figure):
        """A figure in no window and in no global list of figures, so that a notebook shows it once."""

        def _repr_png_(self) -> bytes:
            return png(self)

    return Picture
