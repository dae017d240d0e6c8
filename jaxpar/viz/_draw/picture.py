"""The picture: a `graphviz.Digraph` that knows its `Graph` and draws in time."""

from __future__ import annotations

import base64
import contextlib
import html
import os
import re
from typing import Any

import graphviz

from .._graph import Graph
from .dot import to_dot
from .render import NoRendererError, RenderError, render
from .style import Options
from .table import to_html

_PREVIEW_INCHES = '"10,25"'  # larger pictures are shrunk to this width and height


class Plot(graphviz.Digraph):
    """A drawn network. A notebook shows it and `save` writes it.

    Attributes:
        network: the `Graph` that it was drawn from.
        time_limit: seconds that the renderer may take.
    """

    def __init__(self, network: Graph, options: Options, time_limit: float) -> None:
        super().__init__(name=re.sub(r"[^\w .-]+", "_", options.title) or "plot")
        self.network: Graph = network
        self.options: Options = options
        self.time_limit: float = time_limit
        self.body: list[str] = ["\t" + line + "\n" for line in to_dot(network, options)]

    def pipe(self, format: str | None = None, *args: Any, encoding: str | None = None, **kwargs: Any) -> Any:
        """The picture as bytes, or as text with an `encoding`.

        Args:
            format: "svg", "png", "pdf" or another that Graphviz knows.
            encoding: "utf-8", for the formats that are text.

        Raises:
            RenderError: there is no renderer, or it took longer than `time_limit`.
        """
        picture = render(self.source, format or "svg", self.time_limit)
        return picture if encoding is None else picture.decode(encoding)

    def save(self, filename: Any = None, directory: Any = None, **kwargs: Any) -> str:
        """Write the picture to a file.

        Args:
            filename: its ending says the format: .svg, .png, .pdf, ... The endings .dot and .gv write the text.
            directory: the folder of the file. It is made where it is missing.

        Returns:
            The path written.

        Raises:
            RenderError: there is no renderer, it failed, or it took too long. Where there is none, the table of
                layers is written instead, to `filename` with the ending .layers.html.
        """
        path = os.path.join(directory or "", os.fspath(filename or f"{self.name}.gv"))
        stem, ending = os.path.splitext(path)
        format = ending.lstrip(".").lower()
        try:
            content = self.source.encode() if format in ("dot", "gv", "") else self.pipe(format)
        except NoRendererError:
            table = _write(f"{stem}.layers.html", to_html(self.network, self.options.title).encode())
            raise NoRendererError(f" The table of layers was written to {table} instead.") from None
        return _write(path, content)

    def render(
        self,
        filename: Any = None,
        directory: Any = None,
        *args: Any,
        format: str | None = None,
        view: bool = False,
        **kwargs: Any,
    ) -> str:
        """Write `filename.format` as `graphviz.Digraph.render` does, and open it with `view`.

        Raises:
            RenderError: as for `save`.
        """
        path = self.save(f"{filename or self.name}.{format or self.format or 'svg'}", directory)
        if view:
            graphviz.view(path)
        return path

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None, **_: Any) -> dict[str, bytes | str]:
        """The picture for a notebook, as SVG and PNG. Without a renderer, what to install and the table."""
        try:
            shown = {"image/svg+xml": self.pipe("svg", encoding="utf-8"), "text/plain": repr(self.network)}
        except RenderError as error:
            table = to_html(self.network, self.options.title)
            return {"text/html": f"<p>{html.escape(str(error))}</p>{table}", "text/plain": str(error)}
        with contextlib.suppress(RenderError):  # the SVG is there
            shown["image/png"] = base64.b64encode(self._preview()).decode()
        return shown

    def _preview(self) -> bytes:
        """The picture as a PNG of limited size. Notebooks that are not trusted drop SVG and show this."""
        limited = self.source.replace("graph [", f"graph [size={_PREVIEW_INCHES} dpi=96 ", 1)
        return render(limited, "png", self.time_limit)


def _write(path: str, content: bytes) -> str:
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)
    return path
