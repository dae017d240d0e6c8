"""The picture: a `graphviz.Digraph` that knows its `Graph` and draws in time."""

from __future__ import annotations

import base64
import functools
import html
import io
import os
import re
from collections.abc import Callable
from typing import Any

import graphviz

from .._graph import Graph
from .._page.page import to_frame, to_page
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
        whole: gives the graph of the page, with all blocks and without a limit. None for `network`.
        depth: how many levels of the page are open at first. None for as many as fit.
    """

    def __init__(
        self,
        network: Graph,
        options: Options,
        time_limit: float,
        whole: Callable[[], Graph] | None = None,
        depth: int | None = None,
    ) -> None:
        super().__init__(name=re.sub(r"[^\w .-]+", "_", options.title) or "plot")
        self.network: Graph = network
        self.options: Options = options
        self.time_limit: float = time_limit
        self.whole: Callable[[], Graph] = whole or (lambda: network)
        self.depth: int | None = depth
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

    def html(self) -> str:
        """The interactive page: one HTML file that needs no server and loads nothing.

        Blocks open and close in place. A search finds layers. The path of a layer is marked where the mouse is, and a
        click shows everything that is known of it.

        Raises:
            RenderError: there is no renderer, or it took longer than `time_limit`.
        """
        return self._page

    @functools.cached_property
    def _page(self) -> str:
        return to_page(self.whole(), self.options, self.depth, self.time_limit)

    def save(self, filename: Any = None, directory: Any = None, **kwargs: Any) -> str:
        """Write the picture to a file.

        Args:
            filename: its ending says the format: .svg, .png, .pdf, ... The ending .html writes the interactive page,
                .dot and .gv the text.
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
            content = self._content(format)
        except NoRendererError:
            table = _write(f"{stem}.layers.html", to_html(self.network, self.options.title).encode())
            raise NoRendererError(f" The table of layers was written to {table} instead.") from None
        return _write(path, content)

    def _content(self, format: str) -> bytes:
        if format in ("html", "htm"):
            return self.html().encode()
        return self.source.encode() if format in ("dot", "gv", "") else self.pipe(format)

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
        """The interactive page for a notebook, and a PNG. Without a renderer, what to install and the table."""
        try:
            page, still = self.html(), base64.b64encode(self._preview()).decode()
        except RenderError as error:
            table = to_html(self.network, self.options.title)
            return {"text/html": f"<p>{html.escape(str(error))}</p>{table}", "text/plain": str(error)}
        shown = to_frame(page, self.options.title, still)
        return {"text/html": shown, "image/png": still, "text/plain": repr(self.network)}

    def _preview(self) -> bytes:
        """The picture as a small PNG of limited size. Notebooks that are not trusted show this."""
        from PIL import Image

        limited = self.source.replace("graph [", f"graph [size={_PREVIEW_INCHES} dpi=96 ", 1)
        picture = Image.open(io.BytesIO(render(limited, "png", self.time_limit)))
        small = io.BytesIO()
        picture.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
        return small.getvalue()


def _write(path: str, content: bytes) -> str:
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)
    return path
