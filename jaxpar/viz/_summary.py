"""`print_summary`: the table of layers, on the terminal or in a notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import IO, Any

from .._core import checks
from .._core.calls import answers
from .._core.text import in_notebook
from ._draw.table import frozen_names, to_html, to_text
from ._fold.calls import Call
from ._fold.templates import Pattern, Rule
from ._graph import Graph
from ._trace import trace

# What a terminal without these letters shows.
_PLAIN = str.maketrans({"├": "|", "└": "`", "─": "-", "│": "|", "×": "x", "…": "~"})


@answers("print_summary")
def print_summary(
    fn: Callable[..., Any],
    *args: Any,
    file: IO[str] | None = None,
    params_argnums: int | Sequence[int] | None = 0,
    depth: int | None = None,
    repeats: bool = True,
    rules: Sequence[Call | Pattern | Rule] = (),
    frozen: str | Sequence[str] = (),
    width: int = 120,
    **kwargs: Any,
) -> None:
    """Print the table of a function's layers.

    A module is a row above its layers, with the sums of their parameters and FLOPs. A row has the output shape with the
    batch axis, the parameters, the FLOPs, and the layers that it reads. Parameters in brackets are not trained. Below
    are the totals, and the memory in megabytes, as in torchinfo. In a notebook, without a `file`, the table is HTML.
    MXNet's counterpart is `mxnet.visualization.print_summary`.

    Args:
        fn, args, kwargs, params_argnums, repeats, rules: as for `trace`.
        file: the file to write to. None: standard output.
        depth: the number of open levels of modules. None: all.
        frozen: a pattern, or a list of patterns, of parameters that are not trained: "conv1", "*/bias". Parameters
            without a gradient in `fn` are not trained either.
        width: the width of the longest line.

    Raises:
        TypeError: `fn` is not callable, or does not take a keyword of `kwargs`; an option has the wrong type.
        ValueError: a pattern of `frozen` matches no parameter, or a number is out of range.

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
        Trainable params: 6
        Non-trainable params: 0
        Total FLOPs: 60
        -------------------------------------------------------------------------------------
        Input size (MB): 0.00
        Forward pass size (MB): 0.00
        Params size (MB): 0.00
        Estimated total size (MB): 0.00
        -------------------------------------------------------------------------------------
    """
    if file is not None and (isinstance(file, ModuleType) or not hasattr(file, "write")):  # `os` has a `write` too
        raise TypeError(f"print_summary: file must be an open file, open(path, 'w'), got {checks.describe(file)}")
    checks.whole_number(width, "print_summary", "width", least=80)
    if depth is not None:
        checks.whole_number(depth, "print_summary", "depth", least=0)
    patterns = _patterns(frozen)
    graph = trace(fn, *args, params_argnums=params_argnums, max_nodes=None, repeats=repeats, rules=rules, **kwargs)
    _show(graph, file, {"depth": depth, "frozen": frozen_names(graph, patterns)}, width)


def _patterns(frozen: Any) -> list[str]:
    patterns = [frozen] if isinstance(frozen, str) else frozen
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        expected = 'a pattern such as "*/bias", or a list of patterns'
        raise TypeError(f"print_summary: frozen must be {expected}, got {checks.describe(frozen)}")
    return list(patterns)


def _show(graph: Graph, file: IO[str] | None, options: dict[str, Any], width: int) -> None:
    if file is None and in_notebook():
        from IPython.core.display import HTML
        from IPython.core.display_functions import display

        display(HTML(to_html(graph, **options)))
        return
    out = file or sys.stdout
    text = to_text(graph, width, **options)
    print(text if _can_write(text, out) else text.translate(_PLAIN), file=out)


def _can_write(text: str, file: IO[str]) -> bool:
    """Whether the encoding of a file has all letters of a text."""
    try:
        text.encode(getattr(file, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
