"""`diff`: from two functions to what is different in the second."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..._core.calls import answers
from ..._core.text import describe
from .._draw.style import Options
from .._fold.calls import Call
from .._fold.templates import Pattern, Rule
from .._graph import Graph
from .._options import check_picture
from .._trace import trace
from .changes import compare

if TYPE_CHECKING:
    from .picture import DiffPlot

Network = Graph | tuple[Callable[..., Any], Sequence[Any]] | tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]


@answers("diff")
def diff(
    before: Network,
    after: Network,
    *,
    title: str = "diff",
    node_attrs: Mapping[str, str] | None = None,
    depth: int | None = None,
    params_argnums: int | Sequence[int] | None = 0,
    max_nodes: int | None = 200,
    repeats: bool = True,
    rules: Sequence[Call | Pattern | Rule] = (),
    theme: Literal["light", "dark"] = "light",
    legend: bool = True,
    direction: Literal["up", "down", "right"] = "up",
    time_limit: float = 30.0,
) -> DiffPlot:
    """Compare two networks, and draw both as one picture.

    Equal layers are grey, changed layers orange, added layers green, removed layers red. A changed layer shows its kind
    and shape in both networks, and the differences in parameters, FLOPs and bytes. Layers are matched by the names of
    their weights, their kinds and their order, so that an inserted layer does not shift the others.

    Args:
        before, after: `(fn, args)`, with the positional arguments as a tuple. `(fn, args, kwargs)` adds keyword
            arguments. A `Graph` of `trace` works too.
        params_argnums, depth, max_nodes, repeats, rules: as for `trace`, for both functions.
        title, node_attrs, theme, legend, direction, time_limit: as for `plot_network`.

    Returns:
        A picture, as from `plot_network`. Its attribute `diff` is plain data: `diff.changes` has the nodes of both
        networks, and `diff.params`, `diff.flops` and `diff.bytes` the differences. `print(plot.diff)` prints a table of
        the changes.

    Raises:
        TypeError: an argument is not a pair of a function and its arguments; or as for `plot_network`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def net(w, x):
        ...     return jax.nn.relu(x @ w)
        >>> x = jnp.ones((5, 3))
        >>> plot = diff((net, (jnp.ones((3, 2)), x)), (net, (jnp.ones((3, 4)), x)))
        >>> plot.diff
        Diff(1 same, 2 changed, 0 added, 0 removed, +6 parameters, +70 FLOPs, +144 bytes)
    """
    check_picture(title, node_attrs, theme, None, time_limit, True, legend, direction, what="diff")
    options = {"depth": depth, "max_nodes": max_nodes, "repeats": repeats, "rules": rules}
    graphs = [_graph(which, given, params_argnums, options) for which, given in (("first", before), ("second", after))]
    from .picture import DiffPlot  # loads graphviz

    drawn = Options(title, True, node_attrs, None, theme, legend, direction)
    return DiffPlot(compare(*graphs), drawn, time_limit)


def _graph(which: str, given: Any, params_argnums: Any, options: dict[str, Any]) -> Graph:
    """The graph of one side."""
    if isinstance(given, Graph):
        return given
    expected = f"diff: the {which} network must be (fn, args), such as (apply, (params, x)), or a viz.Graph"
    if not isinstance(given, tuple):
        hint = "; write its arguments beside it" if callable(given) else ""
        raise TypeError(f"{expected}; got {describe(given)}{hint}")
    match given:
        case (fn, tuple() | list() as args):
            kwargs: Mapping[str, Any] = {}
        case (fn, tuple() | list() as args, dict() as kwargs):
            pass
        case _:
            raise TypeError(f"{expected}; got ({', '.join(map(describe, given))})")
    return trace(fn, *args, params_argnums=params_argnums, **options, **kwargs)
