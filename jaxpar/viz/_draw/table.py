"""The table of layers, as text and as HTML."""

from __future__ import annotations

from collections.abc import Container

from ..._core.text import columns, fit, printable
from .._graph import Graph
from .labels import missing
from .tree import Row, rows

HEAD = ("Layer (type)", "Output Shape", "Param #", "FLOPs", "Previous Layer")
GAP = "   "
_LEAST = 14  # of the last column, else it is left out
NUMBERS = (2, 3)
EMPTY = "Nothing is computed from the arguments."


def to_text(graph: Graph, width: int = 120, depth: int | None = None, frozen: frozenset[str] = frozenset()) -> str:
    """The table as text. Numbers are aligned right. What is too long loses its middle.

    Args:
        graph: with all its scopes open.
        width: of the longest line.
        depth: how many levels of modules are open.
        frozen: the names of parameters that are not trained.
    """
    found = rows(graph, depth, frozen)
    cells = [HEAD, *(cells_of(row, tree) for row, tree in zip(found, _branches(found), strict=True))]
    widths = _widths(cells, width)
    lines = [line(row, widths) for row in cells]
    lines += [] if graph.layers else [EMPTY]
    below, sizes = counts(graph, frozen), memory(graph)
    rule = max(map(columns, [*lines, *below, *sizes]))
    table = ["-" * rule, lines[0], "=" * rule, *lines[1:], "=" * rule, *below, "-" * rule, *sizes, "-" * rule]
    return "\n".join(text.rstrip() for text in table)


def _branches(found: list[Row]) -> list[str]:
    """The lines of the tree before each name."""
    drawn: list[str] = []
    follows: set[int] = set()  # the levels on which a row comes below, seen from the last row
    for row in reversed(found):
        follows = {level for level in follows if level <= row.level}
        inner = "".join("│ " if level in follows else "  " for level in range(1, row.level))
        drawn.append(inner + ("├─" if row.level in follows else "└─") if row.level else "")
        follows.add(row.level)
    return drawn[::-1]


def cells_of(row: Row, tree: str) -> tuple[str, ...]:
    """The entries of a row. Only the first three layers that it reads are listed."""
    times = f" ×{row.repeat}" if row.repeat > 1 else ""
    kind = f" ({row.kind})" if row.kind else ""
    shown = ", ".join(row.previous[:3]) + (f", ... ({len(row.previous)})" if len(row.previous) > 3 else "")
    name = printable(f"{tree}{row.name}{kind}{times}")
    return name, row.shape, _params(row), f"{row.flops:,}", printable(shown)


def _params(row: Row) -> str:
    """The parameters, in brackets where none of them is trained."""
    return f"({row.params:,})" if row.params and not row.trained else f"{row.params:,}"


def _widths(cells: list[tuple[str, ...]], width: int) -> list[int]:
    """The widths of the columns. The last one is left out where there is no room for it."""
    name, shape, params, flops, previous = (max(map(columns, column)) for column in zip(*cells, strict=True))
    shape = min(shape, width // 4)
    left = width - shape - params - flops - 3 * len(GAP)
    beside = min(previous, 24) + len(GAP)
    name = min(name, left, max(left - beside, 44))
    left -= name + len(GAP)
    found = [name, shape, params, flops]
    return [*found, min(previous, left)] if left >= min(previous, _LEAST) else found


def line(row: tuple[str, ...], widths: list[int], numbers: Container[int] = NUMBERS) -> str:
    """A row of a table as text. What is too long loses its middle. Columns without a width are left out.

    Args:
        row: an entry for each column.
        widths: of the columns.
        numbers: the columns that are aligned right.
    """
    entries: list[str] = []
    for number, (text, width) in enumerate(zip(row, widths, strict=False)):
        text = fit(text, width)
        space = " " * (width - columns(text))
        entries.append(space + text if number in numbers else text + space)
    return GAP.join(entries)


def counts(graph: Graph, frozen: frozenset[str]) -> list[str]:
    """What the network has, in torchinfo's words."""
    trained = trained_params(graph, frozen)
    found = [
        ("Total params", graph.total_params),
        ("Trainable params", trained),
        ("Non-trainable params", graph.total_params - trained),
    ]
    others = {"Non-trainable state": graph.total_state, "Constants": graph.total_constants}
    others["Unread, not counted"] = graph.sizes.unused
    found += [(name, number) for name, number in others.items() if number]
    return [*(f"{name}: {number:,}" for name, number in found), f"Total FLOPs: {graph.total_flops:,}{missing(graph)}"]


def memory(graph: Graph) -> list[str]:
    """What it takes, in megabytes of 10^6 bytes, as torchinfo has them."""
    sizes = graph.sizes
    passes = "Forward/backward pass size" if sizes.backward else "Forward pass size"
    found = [("Input size", sizes.inputs), (passes, sizes.forward + sizes.backward), ("Params size", sizes.params)]
    found += [("State size", sizes.state)] if sizes.state else []
    found += [("Optimizer state", sizes.optimizer)] if sizes.optimizer else []
    return [f"{name} (MB): {size / 1e6:,.2f}" for name, size in [*found, ("Estimated total size", sizes.total)]]


def trained_params(graph: Graph, frozen: frozenset[str] = frozenset()) -> int:
    """Elements of the parameters that are trained, each counted once."""
    return sum(w.params for w in graph.weights if w.name in graph.sizes.trained - frozen)
