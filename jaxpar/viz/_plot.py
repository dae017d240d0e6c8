"""`plot_network`: from a function to its picture."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from .._core.calls import answers
from ._draw.style import Options
from ._fold.known import Call
from ._fold.patterns import Rule
from ._layout.graph import to_graph
from ._options import check_picture, check_trace
from ._trace import all_layers, close, read, whole_of

if TYPE_CHECKING:
    from ._draw.picture import Plot


@answers("viz.plot_network")
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
    direction: Literal["up", "down", "right"] = "up",
    time_limit: float = 30.0,
    **kwargs: Any,
) -> Plot:
    """Draw a function as the network it computes.

    Inputs are ovals at the bottom. Layers are boxes coloured by kind. Edges carry the shapes. A gradient is next to its
    layer and flows down. Collectives between devices have a colour of their own. Nothing is run. MXNet has the same in
    `mxnet.visualization.plot_network`.

    Args:
        fn, args, kwargs, params_argnums, depth, max_nodes, repeats, rules: as for `trace`.
        title: the text below the picture, and the name of the file that `render` writes. "" for no text.
        hide_weights: whether the parameters are left out.
        node_attrs: Graphviz attributes of every node, such as `{"shape": "oval"}`. They win over those chosen here.
            The page has none of them.
        heat: "flops" or "bytes" colours the layers by what they cost, and writes it on them.
        theme: "light" or "dark". The page is light or dark as its reader is, and always dark with "dark".
        legend: whether the colours are explained.
        direction: "up" draws the inputs at the bottom, "down" at the top, "right" at the left.
        time_limit: seconds that the renderer may take.

    Returns:
        A `graphviz.Digraph`. A notebook shows it as a page whose blocks open and close, and `save("net.html")` writes
        that page. `save("net.svg")` writes the picture (.png, .pdf, .dot too). Its `network` is the `Graph`, and its
        `source` is the same for the same function. Where the program `dot` is missing, pygraphviz draws it. Where both
        are missing, a notebook shows how to install one, and the table of layers. `save` then writes that table and
        raises a `RenderError`.

    Raises:
        TypeError: `fn` is not callable, or takes no argument of a name in `kwargs`. An option has a wrong type.
        ValueError: an unknown theme, heat or direction, or a number out of range.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> plot = plot_network(lambda w, x: jax.nn.relu(x @ w), jnp.ones((3, 2)), jnp.ones((5, 3)))
        >>> plot.network
        Graph(1 inputs, 2 layers, 2 edges, 6 parameters, 4 equations)
    """
    check_picture(title, node_attrs, theme, heat, time_limit, hide_weights, legend, direction)
    check_trace(fn, len(args), params_argnums, depth, max_nodes, repeats, rules)
    raw = read(fn, *args, params_argnums=params_argnums, **kwargs)
    net = all_layers(raw, repeats, rules)
    every = functools.partial(whole_of, net.copy())
    close(net, depth, max_nodes)
    graph = to_graph(net)
    from ._draw.picture import Plot  # loads graphviz

    options = Options(title, hide_weights, node_attrs, heat, theme, legend, direction)
    return Plot(graph, options, time_limit, every, depth)
