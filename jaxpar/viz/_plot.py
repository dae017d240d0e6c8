"""`plot_network`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ._draw.dot import Options
from ._draw.style import THEMES
from ._fold.calls import Call
from ._fold.table import Rule
from ._trace import trace

if TYPE_CHECKING:
    from ._draw.render import Plot


def plot_network(
    fn: Callable[..., Any],
    *args: Any,
    title: str = "plot",
    hide_weights: bool = True,
    node_attrs: Mapping[str, str] | None = None,
    depth: int | None = None,
    params_argnums: int | Sequence[int] | None = 0,
    max_nodes: int | None = 200,
    repeats: bool = True,
    rules: Sequence[Rule | Call] = (),
    heat: Literal["flops", "bytes"] | None = None,
    theme: Literal["light", "dark"] = "light",
    legend: bool = True,
    time_limit: float = 30.0,
    **kwargs: Any,
) -> Plot:
    """Draw a function as the network it computes, after `mxnet.visualization.plot_network`.

    Inputs are ovals at the bottom, layers are boxes coloured by kind, edges carry the shapes; a gradient stands beside
    its layer and flows down; what is sent between devices stands out. Nothing is run.

    Args:
        fn, args, kwargs, params_argnums, depth, max_nodes, repeats, rules: as for `trace`.
        title: stands below the picture, and names the file that `render` writes.
        hide_weights: whether the parameters are left out.
        node_attrs: Graphviz attributes for every node, over those chosen here, e.g. `{"shape": "oval"}`.
        heat: "flops" or "bytes" colours the layers by what they cost, and writes it on them.
        theme: "light" or "dark".
        legend: whether the colours are explained.
        time_limit: seconds the renderer may take.

    Returns:
        A `graphviz.Digraph`: its `source` is the same for the same function; it shows itself in a notebook, and
        `save("net.svg")` writes it (.png, .pdf, .dot too). Its `network` is the `Graph`. Where the program `dot` is
        missing, pygraphviz draws it if installed; a notebook shows a plainer picture otherwise, and `save` raises a
        `RenderError` with the command that installs Graphviz.

    Raises:
        TypeError: an argument is no array. ValueError: an unknown theme or heat.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> plot = plot_network(lambda w, x: jax.nn.relu(x @ w), jnp.ones((3, 2)), jnp.ones((5, 3)))
        >>> plot.network
        Graph(1 inputs, 2 layers, 2 edges, 6 parameters, 4 equations)
    """
    if theme not in THEMES:
        raise ValueError(f"plot_network: theme must be one of {', '.join(THEMES)}, got {theme!r}")
    if heat not in (None, "flops", "bytes"):
        raise ValueError(f"plot_network: heat must be None, 'flops' or 'bytes', got {heat!r}")
    graph = trace(
        fn, *args, params_argnums=params_argnums, depth=depth, max_nodes=max_nodes, repeats=repeats, rules=rules,
        **kwargs,
    )  # fmt: skip
    from ._draw.render import Plot

    return Plot(graph, Options(title, hide_weights, node_attrs, heat, theme, legend), time_limit)
