"""A matplotlib figure that a notebook shows without pyplot."""

from __future__ import annotations

import contextlib
import functools
import io
import os
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
_STYLE = "jaxpar.train.notebook"
_OWN = ("figure.facecolor", "text.color")  # a user who changed one of these has colours of their own


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


def readable(draw: Callable[_P, _T]) -> Callable[_P, _T]:
    """The function, drawing in colours that read on a light and on a dark page, unless the user chose some."""

    @functools.wraps(draw)
    def styled(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with _style():
            return draw(*args, **kwargs)

    return styled


@contextlib.contextmanager
def _style() -> Generator[None]:
    try:
        import matplotlib.style
    except ModuleNotFoundError:  # `new_figure` says so, with the name of the function
        yield
        return
    now, default = matplotlib.rcParams, matplotlib.rcParamsDefault
    with matplotlib.style.context(_STYLE if all(now[name] == default[name] for name in _OWN) else {}):
        yield


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
