"""How boxes and lines look: colours and sizes, the words in them, captions; attributes of the dot language.

The palette is MXNet's. A light and a dark theme have other colours around the boxes.
"""

from __future__ import annotations

import functools
import math
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass

from ..._core.text import plural, printable
from .._fold.calls import OPTIMIZERS
from .._fold.cells import SENT
from .._graph import BACKWARD, FAILS_AT, Edge, Graph, Node, human, parameters
from .._scopes import Scope

FONT = "Helvetica,Arial,sans-serif"
SIZE, SMALL = 12.0, 9.5  # points
DIRECTIONS = {"up": "BT", "down": "TB", "right": "LR"}  # and Graphviz's names
INK = "#1f2328"
# kind of layer: (colour, name in the legend, operations), with the colours of mxnet.visualization
_NORMS = ("LayerNorm", "BatchNorm", "GroupNorm", "InstanceNorm", "RMSNorm", "Normalization", "Dropout")
_KINDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "input": ("#8dd3c7", "input", ("input",)),
    "weight": ("#ccebc5", "parameter", ("weight",)),
    "matrix": ("#fb8072", "convolution, dense", ("Convolution", "Deconvolution", "FullyConnected", "MatMul")),
    "embedding": ("#fdcdac", "embedding", ("Embedding",)),
    "activation": ("#ffffb3", "activation", ("Activation",)),
    "pooling": ("#80b1d3", "pooling", ("Pooling",)),
    "norm": ("#bebada", "normalization", _NORMS),
    "shape": ("#fdb462", "concat, flatten", ("Concat", "Flatten", "SpaceToDepth")),
    "softmax": ("#b3de69", "softmax, attention", ("Softmax", "LogSoftmax", "Attention", "RoPE", "Routing")),
    "recurrent": ("#cab2d6", "recurrent, scan", ("LSTM", "GRU", "AssociativeScan", "SelectiveScan")),
    "loss": ("#f4a6c6", "loss", ("Loss",)),
    "optimizer": ("#bc80bd", "optimizer", tuple(OPTIMIZERS)),
    "collective": ("#c51b7d", "sent between devices", tuple(SENT)),
    "failed": ("#b30000", "a line that raises", ()),
    "block": ("#d9d9d9", "collapsed", ()),
    "other": ("#fccde5", "other", ()),
}
SENDING = _KINDS["collective"][0]  # the colour of what sends between devices
_KIND_OF = {op: kind for kind, (_, _, ops) in _KINDS.items() for op in ops}


@dataclass(frozen=True, slots=True)
class Options:
    """How a graph is drawn: arguments of `plot_network`, and `height` and `limit` of `plot_step`."""

    title: str = "plot"
    hide_weights: bool = True
    node_attrs: Mapping[str, str] | None = None
    heat: str | None = None
    theme: str = "light"
    legend: bool = True
    direction: str = "up"
    height: str | None = None
    limit: int | None = None


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


def is_argument(node: Node) -> bool:
    """Whether a node is an argument of the function or a parameter, and computes nothing."""
    return node.op in ("input", "weight")


def is_update(node: Node) -> bool:
    """Whether a node updates parameters: an optimizer, or such a function of the user's."""
    return node.kind in OPTIMIZERS or (node.op != "input" and node.detail.endswith((" arrays", " array")))


def holds_collectives(node: Node) -> bool:
    """Whether something inside of a closed box sends between devices."""
    return bool(node.sends) and _kind(node) != "collective"


def fill(node: Node) -> str:
    """The colour of a node."""
    return _KINDS[_kind(node)][0]


def legend(nodes: list[Node]) -> list[tuple[str, str]]:
    """The colour and the name of each kind that is drawn."""
    drawn = {_kind(node) for node in nodes} | {"collective" for node in nodes if holds_collectives(node)}
    return [(colour, shown) for name, (colour, shown, _) in _KINDS.items() if name in drawn]


def heat(share: float) -> str:
    """A colour from white to red, for a share from 0 to 1."""
    low, high = (255, 247, 236), (215, 48, 31)
    mixed = (round(a + (b - a) * share**0.5) for a, b in zip(low, high, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


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


def box_size(lines: list[Line], *, is_oval: bool = False) -> tuple[float, float]:
    """The width and the height of a box with these lines in it, in points."""
    width = max(text_width(text, size, bold) for text, size, bold in lines) + 14.4
    height = sum(size for _, size, _ in lines) * 1.15 + 11.52
    return max(93.6, width * (1.3 if is_oval else 1)), max(36.0, height)


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


_MOST_LEAVES, _MOST_WEIGHTS = 12, 4  # in a tooltip
_LINE = 24  # letters, for a kind and its details on one line
_LONGEST = 24  # times the size of the letters: 36 letters or so
Line = tuple[str, float, bool]  # text, size, bold
_LEGEND_ROW = 4  # colours in a row of the legend, at most
_TITLE = 40  # times the size of the letters: 50 letters or so


def label_lines(node: Node, heat: str | None) -> list[Line]:
    """The lines of a node's label: its own name where it has one, its kind, its parameters."""
    if node.op == "input":
        return [(cut(node.name), SIZE, False), (node.detail or node.dtype, SMALL, False)]
    if node.op == "weight":
        text = f"{times(shape_text(node.shape))} {node.dtype}"
        return [(cut(node.detail or node.name), SIZE - 1, False), (text, SMALL, False)]
    lines = _kind_lines(node, own_name(node))
    if node.params:
        each, remainder = divmod(node.params, node.repeat)
        copies = f"{node.repeat} × " if node.repeat > 1 and not remainder else ""
        lines.append((f"{copies}{plural(each if copies else node.params, 'param')}", SMALL, False))
    if heat:
        unit = "FLOP" if heat == "flops" else "B"
        lines.append((human(cost(node, heat), unit), SMALL, False))
    return lines


def _kind_lines(node: Node, name: str) -> list[Line]:
    kind, detail = cut(node.kind), cut("" if node.is_backward else times(node.detail))
    if not name:
        backward = [("backward", SMALL, False)] if node.is_backward else []
        return [(kind, SIZE, True), *backward, *([(detail, SIZE - 1, False)] if detail else [])]
    if node.is_backward:
        return [(cut(name), SIZE, True), (f"{kind} backward", SMALL, False)]
    kind_and_detail = f"{kind} {detail}".strip()
    lines = [kind_and_detail] if len(kind_and_detail) <= _LINE else [kind, detail]
    return [(cut(name), SIZE, True), *((line, SIZE - 1, False) for line in lines if line)]


def own_name(node: Node) -> str:
    """The name of a layer, without the scopes around it. Empty where it only repeats the kind.

    >>> own_name(Node("attn/q", "FullyConnected", "64", scope=("attn",))), own_name(Node("relu3", "Activation", "relu"))
    ('q', '')
    >>> own_name(Node("q (backward) 2", "FullyConnected (backward)"))
    'q'
    """
    *above, last = node.name.partition(BACKWARD)[0].split("/")  # a second gradient ends in a number
    scopes = {Scope.of(scope).stem for scope in node.scope}
    while above and Scope(above[0]).stem in scopes:
        del above[0]
    name = "/".join([*above, last])
    kinds = (node.kind, node.kind.rpartition(".")[2], node.op, node.detail, "")  # "optax.clip" is "clip"
    return "" if _letters(name) in map(_letters, kinds) else name


def _letters(text: str) -> str:
    return re.sub(r"[\W\d_]+", "", text).lower()


def join_sign(graph: Graph) -> dict[str, str]:
    """The nodes that only add or multiply two activations, and the sign for each: a residual connection, a gate."""
    sizes = {node.name: (math.prod(node.shape), bool(node.shape)) for node in graph.layers}
    reads: dict[str, set[str]] = {}
    for edge in graph.edges:
        if (math.prod(edge.shape), bool(edge.shape)) == sizes[edge.target]:  # some are transposed or reshaped
            reads.setdefault(edge.target, set()).add(edge.source)
    signs = {"add": "+", "mul": "×"}
    sign_of = {
        node.name: signs[node.op]
        for node in graph.layers
        if node.op in signs and not (node.detail or node.params or own_name(node))
        if len(reads.get(node.name, ())) > 1
    }
    return sign_of | {name + BACKWARD: sign for name, sign in sign_of.items()}


def label(lines: list[Line], colour: str) -> str:
    """The lines as one of Graphviz's HTML-like labels."""
    return Html(f"<{'<BR/>'.join(_font(*line, colour) for line in lines)}>")


def _font(text: str, size: float, bold: bool = False, colour: str = "") -> str:
    shown = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
    on = f' COLOR="{colour}"' if colour else ""
    return f'<FONT POINT-SIZE="{size:g}"{on}>{f"<B>{shown}</B>" if bold else shown}</FONT>'


def caption_of(lines: list[Line], legend: list[tuple[str, str]]) -> str:
    """Lines, and colours with their names below, as a table of Graphviz."""
    rows = [f"<TR><TD>{_font(*line)}</TD></TR>" for line in lines]
    # Graphviz makes each row as wide as the widest one. So they have about equally many colours.
    count = -(-len(legend) // _LEGEND_ROW)
    length = -(-len(legend) // max(1, count))
    rows += [_legend_row(legend[row * length : (row + 1) * length]) for row in range(count)]
    return Html(f'<<TABLE BORDER="0" CELLSPACING="0" CELLPADDING="2">{"".join(rows)}</TABLE>>')


def title_lines(title: str) -> list[Line]:
    """The lines of a title that say something."""
    return [(cut(line, _TITLE), 14, True) for line in title.splitlines() if line.strip()]


def edge_label(edge: Edge, source: Node) -> str:
    """What flows along an edge: its shape, or how many arrays of an argument."""
    if source.leaves and edge.arrays > 1:
        return f"{edge.arrays} arrays"
    shape = times(shape_text(edge.shape)) + ("" if edge.dtype in ("float32", "") else f" {edge.dtype}")
    return f"{cut(edge.label)} {shape}".strip()


def output_text(node: Node) -> str:
    """The shape and dtype of a node's output, or how many arrays an input has."""
    return node.detail if node.leaves else f"{shape_text(node.shape)} {node.dtype}"


def cost(node: Node, heat: str | None) -> int:
    """What `heat` colours by."""
    return {"flops": node.flops, "bytes": node.bytes}.get(heat or "", 0)


def times(detail: str) -> str:
    """A detail with "×" between its numbers.

    >>> times("avg, 2x2/2x2")
    'avg, 2×2/2×2'
    """
    return re.sub(r"(?<=\d)x(?=\d)", "×", detail)


def cut(text: str, most: float = _LONGEST) -> str:
    """A text without its middle, if it is wider than `most` times its size. The tooltip has all of it.

    >>> cut("encoder_layer_12_self_attention_query_projection")
    'encoder_layer_12_se…n_query_projection'
    """
    if text_width(text, 1.0) <= most:
        return text
    half = int(most)  # letters, too many at first: their widths differ
    start, end = text[: half + 1], text[-half:]
    while text_width(f"{start}…{end}", 1.0) > most:
        start, end = start[:-1], end[1:]
    return f"{start}…{end}"


def shape_text(shape: tuple[int, ...]) -> str:
    """ "2x3" for (2, 3)."""
    return "x".join(map(str, shape)) or "scalar"


def scope_label(name: str) -> str:
    """The label of a cluster: its scope, without the number of its call."""
    return cut(Scope.of(name).numbered(1))


def tooltip(node: Node) -> str:
    """Everything that is known of a node, a fact on each line."""
    lines = [f"{node.name}: {node.op}" + (f" {node.detail}" if node.detail else "")]
    if node.leaves:
        lines += [*node.leaves[:_MOST_LEAVES], *(["..."] if len(node.leaves) > _MOST_LEAVES else [])]
    else:
        lines.append(f"output {node.dtype}[{','.join(map(str, node.shape))}]")
    if node.params:
        lines.append(plural(node.params, "parameter"))
    if node.weights:
        shown = node.weights[: min(_MOST_WEIGHTS, node.copy_weights)]  # of one copy: the others' differ in a number
        lines.append("weights " + ", ".join(shown) + (", ..." if len(shown) < len(node.weights) else ""))
    if not is_argument(node):
        lines.append(f"{human(node.flops, 'FLOP')}, {human(node.bytes, 'B')}, {node.equations} equations")
    lines += [f"drawn once for {node.repeat} copies"] if node.repeat > 1 else []
    lines += ["in " + "/".join(node.scope)] if node.scope else []
    lines += [node.source] if node.source else []
    lines += ["returned as " + ", ".join(node.outputs[:4])] if node.outputs else []
    return "\n".join(lines)


def caption(graph: Graph, nodes: list[Node], options: Options) -> str:
    """The title, the totals and the legend, as a table of Graphviz."""
    counts = f"{parameters(graph)} · {human(graph.total_flops, 'FLOP')}{missing(graph)}"
    lines = [*title_lines(options.title), (counts, 10, False)]
    if options.heat is not None:
        lines.append((f"{options.heat}: white is none, red the most of all nodes", SMALL, False))
    return caption_of(lines, legend(nodes) if options.legend and options.heat is None else [])


def _legend_row(entries: list[tuple[str, str]]) -> str:
    cells = "".join(
        f'<TD BGCOLOR="{colour}" WIDTH="{text_width(name, SMALL) + 8:.0f}">'
        f"{_font(name, SMALL, colour=ink(colour))}</TD>"
        for colour, name in entries
    )
    table = f'<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="4" CELLPADDING="3"><TR>{cells}</TR></TABLE>'
    return f"<TR><TD>{table}</TD></TR>"


def missing(graph: Graph) -> str:
    """What the sum of FLOPs lacks: " without top_k". Empty where it lacks nothing."""
    return f" without {', '.join(graph.uncounted)}" if graph.uncounted else ""
