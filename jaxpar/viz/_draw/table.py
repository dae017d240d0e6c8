"""The table of layers, as text and as HTML: modules with their sums, and the layers in them.

`rows` makes the rows from a graph, `to_text` and `to_html` write them.
"""

from __future__ import annotations

import html
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from ..._core.text import columns, did_you_mean, fit, matches, printable
from .._graph import BACKWARD, Graph, Node, human, on_each_device, parameters
from .._scopes import Block, Scope, common_prefix, nest, paths_of
from .style import missing, output_text


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: a layer, or a module with the sums of all that is in it."""

    level: int  # how many modules it is in
    name: str
    kind: str  # "Convolution 3x3/1, 20"; a module has none
    shape: str  # of its output, "256x26x26x20 float32"
    params: int
    flops: int
    trained: int  # of the params
    previous: tuple[str, ...] = ()  # the layers that it reads
    source: str = ""  # the line of the user's code
    layer: str = ""  # the name of its node
    repeat: int = 1  # the number of copies that the row stands for
    memory: tuple[int, int, int] = (0, 0, 0)  # bytes of outputs, of outputs of gradients, and kept for gradients


def rows(graph: Graph, depth: int | None = None, frozen: frozenset[str] = frozenset()) -> list[Row]:
    """The rows of a graph with all its scopes open, modules before what is in them.

    `depth` levels of modules are open, all for None. Scopes around the whole function do not count. `frozen` parameters
    are not trained, besides those that the graph knows.
    """
    trained = _trained(graph, frozen)
    previous, readers = dict[str, list[str]](), dict[str, set[str]]()
    for edge in graph.edges:
        if not edge.carry:  # it goes back to an earlier layer
            previous.setdefault(edge.target, []).append(edge.source)
            readers.setdefault(edge.source, set()).add(edge.target)

    def layer(node: Node, level: int, name: str = "") -> Row:
        return Row(
            level,
            name + (BACKWARD if node.is_backward else "") if name else without_scopes(node.name, node.scope),
            f"{node.kind} {node.detail}".strip(),
            output_text(node),
            node.params,
            node.flops,
            trained[node.name],
            tuple(without_scopes(name, node.scope) for name in previous.get(node.name, ())),
            node.source,
            node.name,
            node.repeat,
            _memory_of([node]),
        )

    def module(block: Block[Node], level: int) -> Row:
        nodes = list(block.all_leaves())
        forward = [node for node in nodes if not node.is_backward]
        names, shown = {node.name for node in nodes}, forward or nodes
        last = next((node for node in reversed(shown) if readers.get(node.name, names) - names), shown[-1])
        return Row(
            level,
            block.path[-1] + ("" if forward else BACKWARD),
            "",
            output_text(last),
            sum(node.params for node in nodes),
            sum(node.flops for node in nodes),
            sum(trained[node.name] for node in nodes),
            memory=_memory_of(nodes),
        )

    def inside(outer: Block[Node], level: int) -> Iterator[Row]:
        for item in outer.items:
            if isinstance(item, Node):
                yield layer(item, level)
            elif _is_one_layer(item):
                yield from (layer(node, level, item.path[-1]) for node in item.all_leaves())
            else:
                yield module(item, level)
                if depth is None or level < depth + around:
                    yield from inside(item, level + 1)

    around = len(common_prefix(node.scope for node in graph.layers))
    return list(inside(nest((node, paths_of(node.scope)) for node in graph.nodes), 0))


def _memory_of(nodes: Sequence[Node]) -> tuple[int, int, int]:
    forward, backward = (sum(n.output_bytes for n in nodes if n.is_backward == late) for late in (False, True))
    return forward, backward, sum(node.kept_bytes for node in nodes)


def frozen_names(graph: Graph, patterns: Sequence[str]) -> frozenset[str]:
    """The names of the parameters that a pattern matches: "conv1/weight", "*/bias", or "conv1" for what is in it."""
    known = {weight.name: parameter_path(weight.name) for weight in graph.weights}
    frozen: set[str] = set()
    for pattern in patterns:
        matched = {name for name, path in known.items() if matches(path, pattern)}
        if not matched:
            some = ", ".join(list(known.values())[:4])
            near = did_you_mean(pattern, {part for path in known.values() for part in (path, path.rpartition("/")[0])})
            raise ValueError(f"print_summary: frozen={pattern!r} matches no parameter; some are {some}{near}")
        frozen |= matched
    return frozenset(frozen)


def parameter_path(name: str) -> str:
    """ "conv1/weight" for params['conv1']['weight']."""
    keys = re.findall(r"\['((?:[^'\\]|\\.)*)'\]|\[(\d+)\]|\.(\w+)", name)
    return "/".join(quoted or number or attribute for quoted, number, attribute in keys) or name


def _trained(graph: Graph, frozen: frozenset[str]) -> dict[str, int]:
    """Elements of the trained parameters that each node is the first to use."""
    sizes = {weight.name: weight.params for weight in graph.weights}
    counted: set[str] = set()
    trained_by: dict[str, int] = {}
    for node in graph.nodes:
        new = dict.fromkeys(name for name in node.weights if name not in counted) if node.params else {}
        counted.update(new)
        trained_by[node.name] = sum(sizes[name] for name in new if name in graph.sizes.trained - frozen)
    return trained_by


def _is_one_layer(module: Block[Node]) -> bool:
    """Whether a module is one layer, or its gradient, or both."""
    forward = sum(not node.is_backward for node in module.all_leaves())
    has_blocks = any(isinstance(item, Block) for item in module.items)
    return not has_blocks and (forward == 1 or (not forward and len(module.items) == 1))


def without_scopes(name: str, scope: tuple[str, ...]) -> str:
    """A name without the scopes that it begins with. The rows above say them."""
    keys = name.split("/")
    for outer in map(Scope.of, scope):
        same = Scope(keys[0]).stem == outer.stem if outer.times is not None else keys[0] == outer
        keys = keys[1:] if same and len(keys) > 1 else keys
    return "/".join(keys)


HEAD = ("Layer (type)", "Output Shape", "Param #", "FLOPs", "Previous Layer")
_MEMORY = ("Forward B", "Backward B", "Kept B")  # before the last column, where they are asked for
GAP = "   "
_LEAST = 14  # of the last column, else it is left out
NUMBERS = (2, 3)
_ALL_NUMBERS = (2, 3, 4, 5, 6)
EMPTY = "Nothing is computed from the arguments."


def to_text(
    graph: Graph,
    width: int = 120,
    depth: int | None = None,
    frozen: frozenset[str] = frozenset(),
    memory_columns: bool = False,
) -> str:
    """The table as text, as for `rows`. Numbers are aligned right. What is longer than `width` loses its middle."""
    table_rows = rows(graph, depth, frozen)
    cells = [_head(memory_columns)]
    cells += [cells_of(row, tree, memory_columns) for row, tree in zip(table_rows, _branches(table_rows), strict=True)]
    widths = _widths(cells, width)
    lines = [line(row, widths, _ALL_NUMBERS if memory_columns else NUMBERS) for row in cells]
    lines += [] if graph.layers else [EMPTY]
    return ruled(lines, counts(graph, frozen), memory(graph))


def ruled(lines: list[str], *feet: list[str]) -> str:
    """A table with rules: its head, its rows, and what is below them."""
    thin, thick = (rule * max(columns(text) for block in (lines, *feet) for text in block) for rule in "-=")
    rows = [*lines[1:], thick] if len(lines) > 1 else []
    below = [text for foot in feet for text in (*foot, thin)]
    return "\n".join(text.rstrip() for text in (thin, lines[0], thick, *rows, *below))


def _branches(table_rows: list[Row]) -> list[str]:
    """The lines of the tree before each name."""
    drawn: list[str] = []
    follows: set[int] = set()  # the levels on which a row comes below, seen from the last row
    for row in reversed(table_rows):
        follows = {level for level in follows if level <= row.level}
        inner = "".join("│ " if level in follows else "  " for level in range(1, row.level))
        drawn.append(inner + ("├─" if row.level in follows else "└─") if row.level else "")
        follows.add(row.level)
    return drawn[::-1]


def _head(memory_columns: bool) -> tuple[str, ...]:
    return (*HEAD[:-1], *_MEMORY, HEAD[-1]) if memory_columns else HEAD


def cells_of(row: Row, tree: str, memory_columns: bool = False) -> tuple[str, ...]:
    """The entries of a row. Only the first three layers that it reads are listed."""
    times = f" ×{row.repeat}" if row.repeat > 1 else ""
    kind = f" ({row.kind})" if row.kind else ""
    shown = ", ".join(row.previous[:3]) + (f", ... ({len(row.previous)})" if len(row.previous) > 3 else "")
    name = printable(f"{tree}{row.name}{kind}{times}")
    params = f"({row.params:,})" if row.params and not row.trained else f"{row.params:,}"
    sizes = tuple(f"{size:,}" for size in row.memory) if memory_columns else ()
    return name, row.shape, params, f"{row.flops:,}", *sizes, printable(shown)


def _widths(cells: list[tuple[str, ...]], width: int) -> list[int]:
    """The widths of the columns. The last one is left out where there is no room for it."""
    name, shape, *numbers, previous = (max(map(columns, column)) for column in zip(*cells, strict=True))
    shape = min(shape, width // 4)
    left = width - shape - sum(numbers) - (1 + len(numbers)) * len(GAP)
    beside = min(previous, 24) + len(GAP)
    name = min(name, left, max(left - beside, 44))
    left -= name + len(GAP)
    widths = [name, shape, *numbers]
    return [*widths, min(previous, left)] if left >= min(previous, _LEAST) else widths


def line(row: tuple[str, ...], widths: list[int], numbers: Container[int] = NUMBERS) -> str:
    """A row of a table as text. `numbers` are aligned right. Columns without a width are left out."""
    entries: list[str] = []
    for number, (text, width) in enumerate(zip(row, widths, strict=False)):
        text = fit(text, width)
        space = " " * (width - columns(text))
        entries.append(space + text if number in numbers else text + space)
    return GAP.join(entries)


def counts(graph: Graph, frozen: frozenset[str]) -> list[str]:
    """What the network has, in torchinfo's words."""
    trained = sum(weight.params for weight in graph.weights if weight.name in graph.sizes.trained - frozen)
    facts = [
        ("Total params", graph.total_params),
        ("Trainable params", trained),
        ("Non-trainable params", graph.total_params - trained),
    ]
    also = {"Non-trainable state": graph.total_state, "Constants": graph.total_constants}
    also["Unread, not counted"] = graph.sizes.unused
    facts += [(name, number) for name, number in also.items() if number]
    lines = [f"{name}: {number:,}" for name, number in facts]
    lines[0] += on_each_device(graph)
    return [*lines, f"Total FLOPs: {graph.total_flops:,}{missing(graph)}"]


def memory(graph: Graph) -> list[str]:
    """What it takes, in megabytes of 10^6 bytes, as torchinfo has them."""
    sizes = graph.sizes
    passes = "Forward/backward pass size" if sizes.backward else "Forward pass size"
    facts = [("Input size", sizes.inputs), (passes, sizes.forward + sizes.backward), ("Params size", sizes.params)]
    facts += [("State size", sizes.state)] if sizes.state else []
    facts += [("Optimizer state", sizes.optimizer)] if sizes.optimizer else []
    return [f"{name} (MB): {size / 1e6:,.2f}" for name, size in [*facts, ("Estimated total size", sizes.total)]]


_MANY = 60  # rows, above which only the first levels are open
_LEVELS = 2
_STYLE = (
    ".jaxpar-table{overflow-x:auto}"
    ".jaxpar-table>div{width:max-content;min-width:60%}"
    ".jaxpar-table [role=row]{display:grid;gap:0 16px;padding:2px 8px;white-space:nowrap}"
    ".jaxpar-table [role=row]:hover{background:rgba(128,128,128,.15)}"
    ".jaxpar-table summary{cursor:pointer;list-style:none}"
    ".jaxpar-table summary::-webkit-details-marker{display:none}"
    ".jaxpar-table summary>:first-child::before{content:'▸ '}"
    ".jaxpar-table details[open]>summary>:first-child::before{content:'▾ '}"
    # Of the cells, not of the row: its columns are so many digits wide, and those are wider in bold.
    ".jaxpar-table summary>span,.jaxpar-table [role=columnheader]{font-weight:bold}"
    ".jaxpar-table .n{text-align:right}"
)


def to_html(
    graph: Graph,
    title: str = "",
    depth: int | None = None,
    frozen: frozenset[str] = frozenset(),
    memory_columns: bool = False,
) -> str:
    """The table for a notebook, in the colours of the page. A click on a module opens or closes it.

    A row shows its source line when pointed at. Above 60 rows only the first two levels of modules are open.
    """
    table_rows = rows(graph, depth, frozen)
    head = _head(memory_columns)
    cells = [head, *(_cells(row, memory_columns) for row in table_rows)]
    widths = [max(map(columns, column)) for column in zip(*cells, strict=True)]
    levels = [row.level for row in table_rows]
    widths[0] = max(columns(row[0]) + 2 * level for row, level in zip(cells, [0, *levels], strict=True)) + 3
    grid = " ".join(f"{width + 1}ch" for width in widths)
    body = _row(head, grid, 0, "columnheader") + _body(table_rows, grid, memory_columns)
    body += "" if graph.layers else f"<div>{EMPTY}</div>"
    caption = f"<b>{html.escape(printable(title))}</b>" if title.strip() else ""
    facts = " · ".join([parameters(graph), human(graph.total_flops, "FLOP") + missing(graph)])
    foot = "".join(f"<p>{html.escape(' · '.join(lines))}</p>" for lines in (counts(graph, frozen), memory(graph)))
    table = f"<style>{_STYLE}</style>{caption}<div role='table'>{body}</div><p><b>{facts}</b></p>{foot}"
    return f"<div class='jaxpar-table'>{table}</div>"


def _cells(row: Row, memory_columns: bool) -> tuple[str, ...]:
    sizes = [human(size, "B") for size in row.memory] if memory_columns else []
    cells = cells_of(row, "")
    return (*cells[:3], human(row.flops, "FLOP"), *sizes, cells[-1])


def _body(table_rows: Sequence[Row], grid: str, memory_columns: bool) -> str:
    """The rows, each module around what is in it."""
    pieces: list[str] = []
    ends: list[int] = []  # the levels of the modules that are not complete
    for row, after in zip(table_rows, [*(row.level for row in table_rows), 0][1:], strict=True):
        while ends and ends[-1] >= row.level:
            pieces.append("</details>")
            ends.pop()
        if row.kind or after <= row.level:
            pieces.append(_row(_cells(row, memory_columns), grid, row.level, "cell", row.source))
            continue
        is_open = " open=''" if len(table_rows) <= _MANY or row.level + 1 < _LEVELS else ""
        cells = _cells(row, memory_columns)
        pieces.append(f"<details{is_open}>{_row(cells, grid, row.level, 'cell', row.source, 'summary')}")
        ends.append(row.level)
    return "".join([*pieces, *("</details>" for _ in ends)])


def _row(cells: Sequence[str], grid: str, level: int, role: str, source: str = "", tag: str = "div") -> str:
    shown = ""
    for number, text in enumerate(cells):
        indent = f" style='padding-left:{2 * level}ch'" if number == 0 and level else ""
        look = " class='n'" if 2 <= number < len(cells) - 1 else indent
        shown += f"<span role='{role}'{look}>{html.escape(text)}</span>"
    tip = f" title='{html.escape(printable(source), quote=True)}'" if source else ""
    return f"<{tag} role='row'{tip} style='grid-template-columns:{grid}'>{shown}</{tag}>"
