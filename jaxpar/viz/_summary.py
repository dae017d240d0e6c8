"""`print_summary`: the table of layers, on the terminal or in a notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import IO, Any

from .._core.arguments import describe
from .._core.text import in_notebook
from ._draw.table import to_html, to_text
from ._fold.calls import Call
from ._fold.patterns import Rule
from ._trace import trace


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
    """Print the table of a function's layers.

    A row has the name and kind of the layer, its output shape with the batch axis, its parameters, its FLOPs, and the
    layers that it reads. In a notebook, without a `file`, the table is HTML. MXNet has the same in
    `mxnet.visualization.print_summary`.

    Args:
        fn, args, kwargs, params_argnums, depth, repeats, rules: as for `trace`.
        file: where to write. None for standard output.

    Raises:
        TypeError: `fn` is not callable, or takes no argument of a name in `kwargs`.

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
    if file is not None and not hasattr(file, "write"):
        raise TypeError(f"print_summary: file must be an open file, open(path, 'w'), got {describe(file)}")
    graph = trace(
        fn, *args, params_argnums=params_argnums, depth=depth, max_nodes=None, repeats=repeats, rules=rules, **kwargs
    )
    if file is None and in_notebook():
        from IPython.core.display import HTML
        from IPython.core.display_functions import display

        display(HTML(to_html(graph)))
    else:
        print(to_text(graph), file=file or sys.stdout)
