"""`plot_network`: from a function to its picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from .._core.checks import choice, describe
from ._draw.style import THEMES, Options
from ._fold.calls import Call
from ._fold.patterns import Rule
from ._trace import trace

if TYPE_CHECKING:
    from ._draw.picture import Plot


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
    """Draw a function as the network it computes.

    Inputs are ovals at the bottom. Layers are boxes coloured by kind. Edges carry the shapes. A gradient is next to its
    layer and flows down. Collectives between devices have a colour of their own. Nothing is run. MXNet has the same in
    `mxnet.visualization.plot_network`.

    Args:
        fn, args, kwargs, params_argnums, depth, max_nodes, repeats, rules: as for `trace`.
        title: the text below the picture, and the name of the file that `render` writes.
        hide_weights: whether the parameters are left out.
        node_attrs: Graphviz attributes of every node, such as `{"shape": "oval"}`. They win over those chosen here.
        heat: "flops" or "bytes" colours the layers by what they cost, and writes it on them.
        theme: "light" or "dark".
        legend: whether the colours are explained.
        time_limit: seconds that the renderer may take.

    Returns:
        A `graphviz.Digraph`. A notebook shows it, and `save("net.svg")` writes it (.png, .pdf, .dot too). Its `network`
        is the `Graph`, and its `source` is the same for the same function. Where the program `dot` is missing,
        pygraphviz draws it. Where both are missing, a notebook shows how to install one, and the table of layers.
        `save` then writes that table and raises a `RenderError`.

    Raises:
        TypeError: `fn` is not callable, or takes no argument of a name in `kwargs`.
        ValueError: an unknown theme or heat.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> plot = plot_network(lambda w, x: jax.nn.relu(x @ w), jnp.ones((3, 2)), jnp.ones((5, 3)))
        >>> plot.network
        Graph(1 inputs, 2 layers, 2 edges, 6 parameters, 4 equations)
    """
    if not isinstance(title, str):
        raise TypeError(f"plot_network: title must be a string, got {describe(title)}")
    if node_attrs is not None and not isinstance(node_attrs, Mapping):
        raise TypeError(
            f'plot_network: node_attrs must be a dict such as {{"shape": "oval"}}, got {describe(node_attrs)}'
        )
    choice(theme, "plot_network", "theme", THEMES)
    if heat is not None:
        choice(heat, "plot_network", "heat", ("flops", "bytes"))
    reading: dict[str, Any] = {"depth": depth, "max_nodes": max_nodes, "repeats": repeats, "rules": rules}
    graph = trace(fn, *args, params_argnums=params_argnums, **reading, **kwargs)
    from ._draw.picture import Plot  # loads graphviz

    return Plot(graph, Options(title, hide_weights, node_attrs, heat, theme, legend), time_limit)
