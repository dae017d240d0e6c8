"""See any JAX function: a picture, a table, and the plain data that both are drawn from.

- `plot_network(fn, *args)`: the picture, a `graphviz.Digraph` that a notebook shows and `save` writes.
- `print_summary(fn, *args)`: the table of layers.
- `trace(fn, *args)`: the `Graph` of `Node`s and `Edge`s.
- `CALLS`, `RULES`: what is folded into one layer. `rules=[Call("my_attention", "Attention")]` folds a function of your
  own; a `Rule` matches a pattern of cells and returns a `Fold`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._fold.calls import CALLS as CALLS, Call as Call
from ._fold.table import RULES as RULES, Fold as Fold, Rule as Rule
from ._graph import Edge as Edge, Graph as Graph, Node as Node
from ._plot import plot_network as plot_network
from ._summary import print_summary as print_summary
from ._trace import trace as trace

if TYPE_CHECKING:
    from ._draw.render import Plot as Plot, RenderError as RenderError
else:

    def __getattr__(name: str) -> Any:
        if name in ("Plot", "RenderError"):  # they need graphviz, which loads on first use
            from ._draw import render

            return getattr(render, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
