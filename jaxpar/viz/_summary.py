"""`print_summary`: the layers as a table, on the terminal and in a notebook."""

from __future__ import annotations

import html
import sys
from collections.abc import Callable, Sequence
from typing import IO, Any

from ._fold.calls import Call
from ._fold.table import Rule
from ._graph import Graph, Node, human
from ._trace import trace

_COLUMNS = ("Layer (type)", "Output Shape", "Param #", "FLOPs", "Previous Layer")


def print_summary(
    fn: Callable[..., Any],
    *args: Any,
    file: IO[str] | None = None,
    params_argnums: int | Sequence[int] | None = 0,
    depth: int | None = None,
    repeats: bool = True,
    rules: Sequence[Rule | Call] = (),
    **kwargs: Any,
) -> None:
    """Print a function's layers: name and type, output shape, parameters, FLOPs, and what they read.

    After `mxnet.visualization.print_summary`, with shapes as JAX has them (the batch axis too), and right for scalars,
    vectors and shared weights. In a notebook, and without a `file`, the table is HTML.

    Args:
        fn, args, kwargs, params_argnums, depth, repeats, rules: as for `trace`.
        file: where to write; standard output where None.

    Raises:
        TypeError: an argument is no array.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> print_summary(lambda w, x: jnp.tanh(x @ w), jnp.ones((3, 2)), jnp.ones((5, 3)))
        -------------------------------------------------------------------------------------
        Layer (type)                         Output Shape   Param #   FLOPs   Previous Layer
        =====================================================================================
        x (input)                            5x3 float32          0       0
        fullyconnected0 (FullyConnected 2)   5x2 float32          6      60   x
        tanh0 (Activation tanh)              5x2 float32          0       0   fullyconnected0
        =====================================================================================
        Total params: 6
        Total FLOPs: 60
        -------------------------------------------------------------------------------------
    """
    graph = trace(
        fn, *args, params_argnums=params_argnums, depth=depth, max_nodes=None, repeats=repeats, rules=rules, **kwargs
    )
    if file is None and _shows_html():
        from IPython.core.display import HTML
        from IPython.core.display_functions import display

        display(HTML(to_html(graph)))
    else:
        print(to_text(graph), file=file or sys.stdout)


def to_text(graph: Graph) -> str:
    """The table as text; as wide as its longest entries, long lists of previous layers cut."""
    rows = [_COLUMNS, *(_row(graph, node) for node in graph.nodes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = [_line(row, widths) for row in rows]
    total = max(map(len, lines), default=0)
    ends = [f"Total params: {graph.total_params}", f"Total FLOPs: {graph.total_flops}"]
    table = ["-" * total, lines[0], "=" * total, *lines[1:], "=" * total, *ends, "-" * total]
    return "\n".join(line.rstrip() for line in table)


def _line(row: Sequence[str], widths: list[int]) -> str:
    cells = [
        text.rjust(width) if 1 < n < 4 else text.ljust(width)
        for n, (text, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "   ".join(cells)


def _row(graph: Graph, node: Node) -> tuple[str, ...]:
    previous = [edge.source for edge in graph.edges if edge.target == node.name]
    shown = ", ".join(previous[:3]) + (f", ... ({len(previous)})" if len(previous) > 3 else "")
    kind = f"{node.op} {node.detail}".strip()
    times = f" ×{node.repeat}" if node.repeat > 1 else ""
    shape = "x".join(map(str, node.shape)) or "scalar"
    return f"{node.name} ({kind}){times}", f"{shape} {node.dtype}", str(node.params), str(node.flops), shown


def to_html(graph: Graph) -> str:
    """The table for a notebook; it takes the colours of the page."""
    head = "".join(f"<th style='text-align:left'>{html.escape(name)}</th>" for name in _COLUMNS)
    body = ""
    for node in graph.nodes:
        name, shape, _, _, previous = _row(graph, node)
        cells = (name, shape, f"{node.params:,}", human(node.flops, "FLOP"), previous)
        tip = html.escape(node.source, quote=True)
        body += (
            f"<tr title='{tip}'>"
            + "".join(f"<td style='text-align:left'>{html.escape(c)}</td>" for c in cells)
            + "</tr>"
        )
    foot = f"{graph.total_params:,} parameters, {human(graph.total_flops, 'FLOP')}"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p><b>{foot}</b></p>"


def _shows_html() -> bool:
    """Whether this runs in a notebook."""
    if "IPython" not in sys.modules:
        return False
    from IPython.core.getipython import get_ipython

    return type(get_ipython()).__name__ == "ZMQInteractiveShell"
