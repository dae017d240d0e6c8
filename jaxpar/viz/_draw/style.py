"""Colours and sizes, MXNet's palette in a light and a dark theme; attributes and strings of the dot language."""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass

from ..._core.text import printable
from .._fold.calls import OPTIMIZERS
from .._fold.cells import COLLECTIVES
from .._graph import FAILS_AT, Node

FONT = "Helvetica,Arial,sans-serif"
SIZE, SMALL = 12.0, 9.5  # points
DIRECTIONS = {"up": "BT", "down": "TB", "right": "LR"}  # and Graphviz's names
INK = "#1f2328"
# kind of layer: (colour, name in the legend), with the colours of mxnet.visualization
_KINDS = {
    "input": ("#8dd3c7", "input"),
    "weight": ("#ccebc5", "parameter"),
    "matrix": ("#fb8072", "convolution, dense"),
    "embedding": ("#fdcdac", "embedding"),
    "activation": ("#ffffb3", "activation"),
    "pooling": ("#80b1d3", "pooling"),
    "norm": ("#bebada", "normalization"),
    "shape": ("#fdb462", "concat, flatten"),
    "softmax": ("#b3de69", "softmax, attention"),
    "recurrent": ("#cab2d6", "recurrent, scan"),
    "loss": ("#f4a6c6", "loss"),
    "optimizer": ("#bc80bd", "optimizer"),
    "collective": ("#c51b7d", "sent between devices"),
    "failed": ("#b30000", "a line that raises"),
    "block": ("#d9d9d9", "collapsed"),
    "other": ("#fccde5", "other"),
}
_OPS = {
    "matrix": ("Convolution", "Deconvolution", "FullyConnected", "MatMul"),
    "embedding": ("Embedding",),
    "activation": ("Activation",),
    "pooling": ("Pooling",),
    "norm": ("LayerNorm", "BatchNorm", "GroupNorm", "InstanceNorm", "RMSNorm", "Normalization", "Dropout"),
    "shape": ("Concat", "Flatten", "SpaceToDepth"),
    "softmax": ("Softmax", "LogSoftmax", "Attention", "RoPE", "Routing"),
    "recurrent": ("LSTM", "GRU", "AssociativeScan", "SelectiveScan"),
    "loss": ("Loss",),
    "optimizer": tuple(OPTIMIZERS),
    "input": ("input",),
    "weight": ("weight",),
    "collective": tuple(COLLECTIVES - {"axis_index"}),
}
_KIND_OF = {op: kind for kind, ops in _OPS.items() for op in ops}


@dataclass(frozen=True, slots=True)
class Options:
    """How a graph is drawn: arguments of `plot_network`."""

    title: str = "plot"
    hide_weights: bool = True
    node_attrs: Mapping[str, str] | None = None
    heat: str | None = None
    theme: str = "light"
    legend: bool = True
    direction: str = "up"


@dataclass(frozen=True, slots=True)
class Theme:
    """The colours around the boxes, which are the same in both themes."""

    background: str
    text: str
    line: str
    faint: str
    cluster: str
    region: str
    carry: str


THEMES = {
    "light": Theme("#ffffff", "#24292f", "#57606a", "#b6bcc4", "#f6f8fa", "#eef4fb", "#8250df"),
    "dark": Theme("#1e1e1e", "#e6e6e6", "#a8b0b8", "#5f666d", "#2a2a2a", "#25303b", "#c297ff"),
}


def _kind(node: Node) -> str:
    """The kind that gives a node its colour."""
    if node.op.startswith(FAILS_AT):
        return "failed"
    if node.kind not in _KIND_OF and node.detail.endswith((" layers", " steps")):
        return "block"
    return "optimizer" if is_update(node) else _KIND_OF.get(node.kind, "other")


def is_update(node: Node) -> bool:
    """Whether a node updates parameters: an optimizer, or such a function of the user's."""
    return node.kind in OPTIMIZERS or (node.op != "input" and node.detail.endswith((" arrays", " array")))


def fill(node: Node) -> str:
    """The colour of a node."""
    return _KINDS[_kind(node)][0]


def legend(nodes: list[Node]) -> list[tuple[str, str]]:
    """The colour and the name of each kind that is drawn."""
    drawn = {_kind(node) for node in nodes}
    return [value for name, value in _KINDS.items() if name in drawn]


def heat(share: float) -> str:
    """A colour from white to red, for a share from 0 to 1."""
    low, high = (255, 247, 236), (215, 48, 31)
    mixed = (round(a + (b - a) * share**0.5) for a, b in zip(low, high, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def ink(colour: str) -> str:
    """Dark text on light colours, white on dark ones."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return INK if 0.3 * red + 0.59 * green + 0.11 * blue > 120 else "#ffffff"


# Widths in DejaVu Sans, the widest of the usual sans-serif fonts: a box that fits a text in it fits it in any.
_NARROW, _WIDE = "iIjl.,:;'|![]()ft/\\r -", "mwMWOQGDH@%&×+=<>~#…"


def text_width(text: str, size: float, bold: bool = False) -> float:
    """An upper estimate of the width of a line, in units of `size`."""
    return sum(map(_units, text)) * size * (1.1 if bold else 1.0)


@functools.cache
def _units(letter: str) -> float:
    if letter.isascii() or letter in _WIDE:
        return 0.42 if letter in _NARROW else 0.98 if letter in _WIDE else 0.66
    kind = unicodedata.category(letter)
    if kind in ("Mn", "Me", "Cf"):
        return 0.0  # on the letter before it
    if unicodedata.east_asian_width(letter) in "WF":
        return 1.4 if kind == "So" else 1.1  # emoji, Chinese
    return 0.9


class Html(str):
    """One of Graphviz's HTML-like labels. Every other text is quoted, whatever it looks like."""


def quote(text: str) -> str:
    r"""A quoted string.

    >>> print(quote('a "b"'))
    "a \"b\""
    """
    lines = [printable(line).replace("\\", "\\\\").replace('"', '\\"') for line in text.split("\n")]
    return '"' + "\\n".join(lines) + '"'


def attributes(**values: object) -> str:
    """The attributes of a graph, node or edge.

    >>> print(attributes(label=Html("<<B>x</B>>"), tooltip="<b>", penwidth=2))
    [label=<<B>x</B>> tooltip="<b>" penwidth="2"]
    """
    shown = {key: value if isinstance(value, Html) else quote(str(value)) for key, value in values.items()}
    return "[" + " ".join(f"{key}={value}" for key, value in shown.items()) + "]"
