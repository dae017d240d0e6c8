"""Run Graphviz on the text of a graph."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Sequence

_LARGE = "Draw less of it: depth=0 closes every module, max_nodes=100 draws fewer nodes; or give time_limit=..."
# For large pictures in which dot finds no ranks for clusters, or no way around the boxes.
_OTHERWISE = ("-Gnewrank=true", "-Gsplines=line")
NEXT = "\n// next\n"  # between graphs that are drawn together
# Reads dot text and writes a picture of each graph. A process of its own can be stopped.
_PYGRAPHVIZ = (
    "import sys, pygraphviz\n"
    f"for text in sys.stdin.buffer.read().decode().split({NEXT!r}):\n"
    "    graph = pygraphviz.AGraph(string=text)\n"
    "    picture = graph.draw(format=sys.argv[1], prog=sys.argv[2], args=sys.argv[3])\n"
    "    sys.stdout.buffer.write(picture)\n"
)


class RenderError(RuntimeError):
    """There is no picture. The message says why and what to do."""


class NoRendererError(RenderError):
    """Neither the program `dot` nor pygraphviz is installed."""

    def __init__(self, instead: str = "") -> None:
        super().__init__(
            "jaxpar.viz: the program `dot` of Graphviz is not on the PATH. Install it with `sudo apt-get install "
            "graphviz` (Debian, Ubuntu), `brew install graphviz` (macOS), `winget install graphviz` (Windows) or "
            "`conda install -c conda-forge graphviz`; or run `pip install pygraphviz`, whose wheels contain Graphviz."
            + instead
        )


def render(text: str, format: str, time_limit: float, engine: str = "dot", flags: Sequence[str] = ()) -> bytes:
    """The picture of a graph, drawn by the program `dot`, or else by pygraphviz.

    Args:
        text: in the dot language. Graphs that are joined by `NEXT` give pictures that follow each other.
        format: "svg", "png", "pdf" or another that Graphviz knows.
        time_limit: seconds, after which the renderer is stopped.
        engine: "dot", "neato" or another layout of Graphviz.
        flags: other arguments of the program.

    Raises:
        NoRendererError: there is neither `dot` nor pygraphviz.
        RenderError: the renderer failed or took too long.
    """
    done = _run(_command(format, engine, flags), text, time_limit)
    if not _is_drawn(done) and engine == "dot":
        done = _run(_command(format, engine, (*flags, *_OTHERWISE)), text, time_limit)
    if not _is_drawn(done):
        raise RenderError(f"jaxpar.viz: dot cannot draw {format}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def _run(command: list[str], text: str, time_limit: float) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(command, input=text.encode(), capture_output=True, timeout=time_limit)
    except subprocess.TimeoutExpired:
        raise RenderError(f"jaxpar.viz: dot did not finish in {time_limit:g} s and was stopped. {_LARGE}") from None


def _is_drawn(done: subprocess.CompletedProcess[bytes]) -> bool:
    return done.returncode == 0 and bool(done.stdout)


def _command(format: str, engine: str, flags: Sequence[str]) -> list[str]:
    program = shutil.which("dot")
    if program is not None:
        return [program, f"-K{engine}", f"-T{format}", *flags]
    if importlib.util.find_spec("pygraphviz") is not None:
        return [sys.executable, "-c", _PYGRAPHVIZ, format, engine, " ".join(flags)]
    raise NoRendererError
