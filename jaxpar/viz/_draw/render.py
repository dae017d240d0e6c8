"""The picture itself: a `graphviz.Digraph` that knows its graph, draws in time, and draws without `dot` too."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from typing import Any

import graphviz

from .._graph import Graph
from .dot import Options, to_dot

_INSTALL = (
    "jaxpar.viz: the program `dot` of Graphviz is not on the PATH. Install it with `sudo apt-get install graphviz` "
    "(Debian, Ubuntu), `brew install graphviz` (macOS), `winget install graphviz` (Windows) or `conda install -c "
    "conda-forge graphviz`; or run `pip install pygraphviz`, whose wheels bring their own copy of Graphviz."
)
_LARGE = "Draw less of it: depth=0 closes every module, max_nodes=100 draws fewer nodes; or give time_limit=..."
# Reads dot text, writes a picture; in a process of its own, so that it can be stopped.
_PYGRAPHVIZ = (
    "import sys, pygraphviz\n"
    "graph = pygraphviz.AGraph(string=sys.stdin.buffer.read().decode())\n"
    "sys.stdout.buffer.write(graph.draw(format=sys.argv[1], prog='dot'))\n"
)


class RenderError(RuntimeError):
    """No picture: no renderer is installed, it failed, or it took too long. The message says what to do."""


class Plot(graphviz.Digraph):
    """A drawn network: shown as SVG at the end of a notebook cell, saved with `save`.

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
        """The picture in a format of Graphviz ("svg", "png", "pdf", ...), as bytes, or text with an `encoding`.

        Raises:
            RenderError: there is no renderer, or it took longer than `time_limit`.
        """
        picture = render(self.source, format or "svg", self.time_limit)
        return picture if encoding is None else picture.decode(encoding)

    def save(self, filename: Any = None, directory: Any = None, **kwargs: Any) -> str:
        """Write the picture to a file, by its ending: .svg, .png, .pdf, ...; .dot or .gv writes the text.

        Returns:
            The path written.
        """
        path = os.path.join(directory or "", os.fspath(filename or f"{self.name}.gv"))
        ending = os.path.splitext(path)[1].lstrip(".").lower()
        content = self.source.encode() if ending in ("dot", "gv", "") else self.pipe(ending)
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)
        return path

    def render(self, filename: Any = None, directory: Any = None, *args: Any, format: str | None = None,
               view: bool = False, **kwargs: Any) -> str:  # fmt: skip
        """As `graphviz.Digraph.render`: writes `filename.format`, and opens it with `view`."""
        path = self.save(f"{filename or self.name}.{format or self.format or 'svg'}", directory)
        if view:
            graphviz.view(path)
        return path

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None, **_: Any) -> dict[str, bytes | str]:
        try:
            return {"image/svg+xml": self.pipe("svg", encoding="utf-8"), "text/plain": repr(self.network)}
        except RenderError as error:
            from .svg import to_svg

            return {"image/svg+xml": to_svg(self.network, self.options), "text/plain": str(error)}

    def _repr_svg_(self) -> str:
        return str(self._repr_mimebundle_()["image/svg+xml"])


def render(text: str, format: str, time_limit: float) -> bytes:
    """Run `dot`, else pygraphviz, on the text of a graph."""
    program = shutil.which("dot")
    if program is not None:
        command = [program, f"-T{format}"]
    elif _has_pygraphviz():
        command = [sys.executable, "-c", _PYGRAPHVIZ, format]
    else:
        raise RenderError(_INSTALL)
    try:
        done = subprocess.run(command, input=text.encode(), capture_output=True, timeout=time_limit)
    except subprocess.TimeoutExpired:
        raise RenderError(f"jaxpar.viz: dot did not finish in {time_limit:g} s and was stopped. {_LARGE}") from None
    if done.returncode != 0 or not done.stdout:
        raise RenderError(f"jaxpar.viz: dot cannot draw {format}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def _has_pygraphviz() -> bool:
    import importlib.util

    return importlib.util.find_spec("pygraphviz") is not None
