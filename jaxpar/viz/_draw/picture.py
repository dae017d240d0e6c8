"""The picture: a `graphviz.Digraph` that knows its `Graph` and draws in time.

It takes the place of `graphviz.Digraph`, so its methods have the arguments of those, and adds the page, a limit of time
and what to do without Graphviz.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import functools
import html
import io
import os
import re
from collections.abc import Callable, Generator
from typing import Any

import graphviz

from ..._core.text import cut_middle
from .._graph import Graph
from .._page.page import to_frame, to_page, to_still_page
from .._scopes import paths_of
from . import render
from .dot import to_dot
from .look import Look, drawn
from .style import Options
from .table import to_html

Filename = str | bytes | os.PathLike[str]

_NAME = 100  # characters of a file's name
_PREVIEW_INCHES = '"13.33,33.33"'  # of 72 pixels; larger pictures are shrunk to this width and height
_PREVIEW_COLOURS = 32


class Plot(graphviz.Digraph):
    """A drawn network. A notebook shows it and `save` writes it.

    Attributes:
        network: the `Graph` that it was drawn from.
        time_limit: seconds that the renderer may take.
        whole: gives the graph of the page, in which the closed boxes of `network` are scopes. None for `network`.
        asked: whether the user asked for what is open. Then a view of any size has it open.
    """

    def __init__(
        self,
        network: Graph,
        options: Options,
        time_limit: float,
        whole: Callable[[], Graph] | None = None,
        asked: bool = False,
        lines: list[str] | None = None,
    ) -> None:
        name = cut_middle(re.sub(r"[^\w .-]+", "_", options.title).strip(), _NAME)
        super().__init__(name=name or "plot", format="svg")
        self.network: Graph = network
        self.options: Options = options
        self.time_limit: float = time_limit
        self.whole: Callable[[], Graph] = whole or functools.partial(_whole, network)
        self.asked: bool = asked
        lines = to_dot(network, options) if lines is None else lines
        self.body: list[str] = ["\t" + line + "\n" for line in lines]
        self._drawn: str = self.source

    def __copy__(self) -> Plot:
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        return made

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: the whole graph, instead of the function that traces it."""
        return {**vars(self), "whole": functools.partial(_whole, self.whole())}

    def copy(self) -> Plot:
        """A picture to which nodes can be added and this one stays as it is."""
        made = copy.copy(self)
        made.body = list(self.body)
        for name in ("graph_attr", "node_attr", "edge_attr"):
            setattr(made, name, dict(getattr(self, name)))
        return made

    def subgraph(self, graph: graphviz.Digraph | None = None, *names: Any, **attrs: Any) -> Any:
        """Add a graph as a subgraph, or begin an empty one in a `with` block, as `graphviz.Digraph.subgraph` does."""
        if graph is not None:
            return super().subgraph(graph, *names, **attrs)
        return self._new_subgraph(graphviz.Digraph(*names, **attrs))

    @contextlib.contextmanager
    def _new_subgraph(self, graph: graphviz.Digraph) -> Generator[graphviz.Digraph, None, None]:
        yield graph
        super().subgraph(graph)

    def pipe(
        self,
        format: str | None = None,
        renderer: str | None = None,
        formatter: str | None = None,
        neato_no_op: bool | int | None = None,
        quiet: bool = False,
        *,
        engine: str | None = None,
        encoding: str | None = None,
    ) -> Any:
        """The picture as bytes, or as text with an `encoding`.

        Args:
            format: "svg", "png", "pdf" or another that Graphviz knows, or "html" for the page. None for the attribute
                `format`.
            renderer, formatter, neato_no_op, engine: as for `graphviz.Digraph.pipe`.
            quiet: accepted for Graphviz's sake. Nothing is printed.
            encoding: "utf-8", for the formats that are text.

        Raises:
            RenderError: there is no renderer or no such format, or it took longer than `time_limit`.
            ValueError: an `encoding` for a format that is not text.
        """
        given = render.check_format(self.format if format is None else format)
        if given in render.PAGES:
            return self.html() if encoding else self.html().encode()
        kind = ":".join(filter(None, (given, renderer, formatter)))
        no_op = () if neato_no_op is None else (f"-n{int(neato_no_op)}",)
        picture = render.render(self.source, kind, self.time_limit, engine or self.engine, no_op)
        if encoding is None:
            return picture
        try:
            return picture.decode(encoding)
        except UnicodeDecodeError:
            raise ValueError(f"Plot.pipe: {given} is not text; leave out encoding={encoding!r}") from None

    def html(self) -> str:
        """The interactive page: one HTML file that needs no server and loads nothing.

        Blocks open and close in place. A search finds layers. The path of a layer is marked where the mouse is, and a
        click shows everything that is known of it. Where no script runs, it shows the picture that `save("net.svg")`
        writes.

        Raises:
            RenderError: there is no renderer, or it took longer than `time_limit`.
        """
        return self._page

    @functools.cached_property
    def _page(self) -> str:
        look = Look(self.network, drawn(self.network, self.options.hide_weights)[0], self.options)
        look.caption = ""  # the page has title and legend around it
        text = "\n".join(["digraph {", *to_dot(self.network, self.options, look), "}"])
        picture = render.render(text, "svg", self.time_limit).decode()
        opened = {path for node in self.network.nodes for path in paths_of(node.scope)}
        return to_page(self.whole(), self.options, self.time_limit, picture, opened, self.asked)

    def save(
        self, filename: Filename | None = None, directory: Filename | None = None, *, skip_existing: bool | None = False
    ) -> str:
        """Write the picture to a file.

        Args:
            filename: its ending says the format: .svg, .png, .pdf, ... The ending .html writes the interactive page.
                The endings .dot and .gv, and a name without one, write the text. None for the name of the picture
                and .gv.
            directory: the folder of the file. It is made where it is missing.
            skip_existing: leave a file as it is that is there.

        Returns:
            The path written.

        Raises:
            RenderError: there is no such format or no renderer, it failed, or it took too long. Where there is none,
                the table of layers is written instead, to `filename` with the ending .layers.html.
            TypeError: no path.
            ValueError: an empty name or only an ending.
            OSError: the file cannot be written. Nothing was drawn.
        """
        filename = f"{self.name}.gv" if filename is None else filename
        if skip_existing and os.path.exists(path := render.path_of(filename, directory)):
            return path
        path = self.check_path(filename, directory)
        return self._write(path, render.format_of(path))

    @staticmethod
    def check_path(filename: Filename, directory: Filename | None = None) -> str:
        """The path that `save` would write. It raises what `save` raises before anything is drawn.

        Example:
            >>> Plot.check_path("net.svg")
            'net.svg'
        """
        path = render.path_of(filename, directory)
        if (format := render.format_of(path)) not in render.TEXTS | render.PAGES:
            render.check_format(format)
        render.check_writable(path)
        return path

    def _write(self, path: str, format: str, **options: Any) -> str:
        """Write a path in a format."""
        try:
            content = self.source.encode() if format in render.TEXTS else self.pipe(format, **options)
        except render.NoRendererError:
            table = f"{os.path.splitext(path)[0]}.layers.html"
            render.write(table, self._table().encode())
            raise render.NoRendererError(f" The table of layers was written to {table} instead.") from None
        return render.write(path, content)

    def render(
        self,
        filename: Filename | None = None,
        directory: Filename | None = None,
        view: bool = False,
        cleanup: bool = False,
        format: str | None = None,
        renderer: str | None = None,
        formatter: str | None = None,
        neato_no_op: bool | int | None = None,
        quiet: bool = False,
        quiet_view: bool = False,
        *,
        outfile: Filename | None = None,
        engine: str | None = None,
        raise_if_result_exists: bool = False,
        overwrite_source: bool = False,
    ) -> str:
        """Write `filename.format`, or `outfile`, as `graphviz.Digraph.render` does, and open it with `view`.

        The arguments are those of Graphviz. The text of the graph is not written beside it, so `cleanup`,
        `overwrite_source` and `quiet` change nothing.

        Raises:
            RenderError, TypeError, ValueError, OSError: as for `save`.
            FileExistsError: the file is there, with `raise_if_result_exists`.
        """
        if outfile is not None:
            path = render.path_of(outfile, directory, "Plot.render")
            format = format or render.format_of(path) or self.format
        else:
            format = render.check_format(format or self.format)
            stem = render.path_of(self.name if filename is None else filename, directory, "Plot.render")
            path = ".".join(filter(None, (stem, renderer, formatter, format)))
        if raise_if_result_exists and os.path.exists(path):
            raise FileExistsError(f"Plot.render: {path} exists; leave out raise_if_result_exists to replace it")
        extra = {"renderer": renderer, "formatter": formatter, "neato_no_op": neato_no_op, "engine": engine}
        render.check_writable(path, "Plot.render")
        self._write(path, render.check_format(format), **extra)
        if view:
            graphviz.view(path, quiet=quiet_view)
        return path

    def _repr_mimebundle_(self, include: object = None, exclude: object = None, **_: object) -> dict[str, bytes | str]:
        """The interactive page for a notebook, and a PNG. Without a renderer, what to install and the table.

        A picture that was changed since, by `node` or `edge`, is shown as SVG.
        """
        try:
            still = base64.b64encode(self._preview()).decode()
            if self.source != self._drawn:
                shown = {"image/svg+xml": self.pipe("svg", encoding="utf-8")}
            else:
                shown = {"text/html": to_frame(self.html(), self.options.title, still)}
        except render.RenderError as error:
            return {"text/html": f"<p>{html.escape(str(error))}</p>{self._table()}", "text/plain": str(error)}
        return {**shown, "image/png": still, "text/plain": repr(self.network)}

    def _table(self) -> str:
        """What is shown where there is no renderer."""
        return to_html(self.network, self.options.title)

    def _static_page(self, table: str) -> str:
        """The picture, and a table below it, as a page on which nothing moves."""
        try:
            picture: str = self.pipe("svg", encoding="utf-8")
        except render.RenderError as error:
            picture = f"<p>{html.escape(str(error))}</p>"
        return to_still_page(picture, table, self.options)

    def _preview(self) -> bytes:
        """The picture as a small PNG of limited size. Notebooks that are not trusted show this."""
        from PIL import Image

        limited = self.source.replace("graph [", f"graph [size={_PREVIEW_INCHES} dpi=72 ", 1)
        picture = Image.open(io.BytesIO(render.render(limited, "png", self.time_limit)))
        small = io.BytesIO()
        picture.convert("RGB").quantize(_PREVIEW_COLOURS, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
        return small.getvalue()


def _whole(graph: Graph) -> Graph:
    return graph
