"""Run Graphviz on the text of a graph, and write a picture to a file.

What is wrong with the path or the format is refused before anything is drawn.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from ..._core import files
from ..._core.text import describe, did_you_mean

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
    """The picture could not be drawn. The message gives reason and remedy."""


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

    Graphs that are joined by `NEXT` give pictures that follow each other.
    """
    # Of some large pictures dot gives up. Then it is asked again for less: straight lines, and clusters that need not
    # be ranked by themselves.
    done = _run(_command(format, engine, flags), text, time_limit)
    if not _is_drawn(done) and len(texts := text.split(NEXT)) > 1:
        # Graphviz 2.43 frees the memory of some layouts twice, and aborts at the graph that follows. It draws each
        # alone.
        return b"".join(render(one, format, time_limit, engine, flags) for one in texts)
    if not _is_drawn(done) and engine == "dot":
        done = _run(_command(format, engine, (*flags, *_OTHERWISE)), text, time_limit)
    if not _is_drawn(done):
        reason, hint = done.stderr.decode(errors="replace").strip(), ""
        if "not recognized" in reason or "no layout engine" in reason:  # nop2 places a step, as neato does
            hint = (
                "\nThis Graphviz has no engine but dot. Install its plugin neato_layout: `sudo apt-get install "
                "libgvplugin-neato-layout8` (Debian and Ubuntu, with Graphviz 14)"
            )
        raise RenderError(f"jaxpar.viz: dot cannot draw {format}: {reason}{hint}")
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


TEXTS = frozenset(("dot", "gv", ""))
PAGES = frozenset(("html", "htm"))
FORMATS = frozenset(
    "bmp canon cgimage cmap cmapx cmapx_np dot dot_json eps exr fig gd gd2 gif gv icns ico imap imap_np ismap jp2 jpe "
    "jpeg jpg json json0 kitty kittyz mp pct pdf pic pict plain plain-ext png pov ps ps2 psd sgi svg svg_inline svgz "
    "tga tif tiff tk vdx vml vmlz vrml vt wbmp webp xdot xdot1.2 xdot1.4 xdot_json".split()
)
_USUAL = ("html", "svg", "png", "pdf", "gif", "jpg", "webp", "dot")


def path_of(filename: object, directory: object, what: str = "Plot.save") -> str:
    """The path of a file, with `~` as the user's home. It must have a name, and not only an ending."""
    parts = [_text(part, what) for part in (directory, filename) if part is not None]
    if not parts[-1] or "\0" in "".join(parts):
        raise ValueError(f"{what}: the name of the file must not be empty or have a NUL in it, got {parts[-1]!r}")
    path = files.as_local(os.path.join(*parts), f"{what}: the path")
    name = os.path.basename(path)
    if name.startswith(".") and name[1:].lower() in FORMATS | PAGES:
        raise ValueError(f"{what}: {path!r} is only an ending; write a name before it, such as 'plot{name}'")
    return path


def _text(given: object, what: str) -> str:
    if isinstance(given, (str, bytes, os.PathLike)):
        return os.fsdecode(given)
    hint = '; write the bytes yourself, file.write(plot.pipe("svg"))' if hasattr(given, "write") else ""
    raise TypeError(f'{what}: expected a path such as "net.svg", got {describe(given)}{hint}')


def format_of(path: str) -> str:
    """The format that the ending of a path says, in small letters."""
    return os.path.splitext(path)[1].lstrip(".").lower()


def check_format(format: object) -> str:
    """A format that Graphviz has, or that of the page, in small letters."""
    if not isinstance(format, str):
        raise TypeError(f'jaxpar.viz: format must be a string such as "svg", got {describe(format)}')
    if format.lower() not in FORMATS | PAGES:
        raise RenderError(
            f"jaxpar.viz: cannot draw {format}, which is not a format; the usual ones are "
            f"{', '.join(_USUAL)}{did_you_mean(format, FORMATS | PAGES)}"
        )
    return format.lower()


def check_writable(path: str, what: str = "Plot.save") -> None:
    """Raise an `OSError` where a file cannot be written."""
    if os.path.isdir(path):
        raise IsADirectoryError(f"{what}: {path} is a folder; write the name of a file in it")
    folder = os.path.dirname(os.path.abspath(path))
    while not os.path.lexists(folder):  # the missing ones are made
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder):
        raise NotADirectoryError(f"{what}: {path} cannot be written, since {folder} is not a directory")
    there = path if os.path.exists(path) else folder
    if not os.access(there, os.W_OK):
        raise PermissionError(f"{what}: {path} cannot be written, since there is no permission to write {there}")


def write(path: str, content: bytes) -> str:
    """Write a file. Missing folders are made. Returns the path."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)
    return path
