"""`trace` and `plot_network`: from a function to its `Graph` in passes, and to its picture."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax

from .._core.calls import answers
from .._core.text import did_you_mean
from ..viz import _failure as failure
from ._draw.style import Options
from ._fold.backward import attach_residuals, attach_views, fold_backward
from ._fold.calls import CALLS, Call, fold_calls, fold_helpers, fold_optimizers, fold_siblings, fold_statements
from ._fold.cells import Cells, break_cycles
from ._fold.known import RULES, fold_patterns
from ._fold.templates import Pattern, Rule
from ._graph import Graph
from ._layout.build import build, demote_constants, join_arguments, mark_state, set_sizes
from ._layout.collapse import add_parts, collapse_scopes, limit_nodes
from ._layout.net import Net, to_graph
from ._layout.repeats import collapse_repeats
from ._options import argnums, check_dtype, check_picture, check_trace
from ._read import jaxpr
from ._read.bind import bind, called_method
from ._read.raw import Raw, mark_constant

if TYPE_CHECKING:
    from ._draw.picture import Plot


_OPTIONS = (
    "params_argnums depth max_nodes repeats rules title hide_weights node_attrs heat theme legend direction".split()
)


@answers("viz.trace")
def trace(
    fn: Callable[..., Any],
    *args: Any,
    params_argnums: int | Sequence[int] | None = 0,
    depth: int | None = None,
    max_nodes: int | None = 200,
    repeats: bool = True,
    rules: Sequence[Call | Pattern | Rule] = (),
    **kwargs: Any,
) -> Graph:
    """Read the layers of a function from its jaxpr, without running it.

    Equations are folded into layers in this order: by known functions (`jax.nn.softmax`, a module's `LayerNorm`), by
    patterns (a convolution and its bias), and the rest by the user's own small functions and lines. The gradient of a
    layer becomes one backward node. A repeated block is kept once, with its count.

    Args:
        fn: any function that JAX can trace, also jitted, mapped over devices, or a gradient; or a module of Flax NNX,
            Equinox or Keras, whose arrays are the parameters.
        args, kwargs: arrays or `jax.ShapeDtypeStruct`s, in any pytree, or NNX and Equinox modules. Other values
            (strings, flags, functions, numbers) are static.
        params_argnums: the positional arguments with parameters: an int, or several. Negative numbers count from the
            end. None: no argument. A single argument that is an array is data. If no argument has parameters, captured
            arrays that a layer reads as weights are the parameters.
        depth: the number of open levels of modules and scopes. None: all. Scopes around the whole function do not
            count, so 0 closes all other scopes.
        max_nodes: the largest number of layers. The deepest scopes close first. None: no limit.
        repeats: whether to keep repeated blocks once.
        rules: `Call`s, `Pattern`s and `Rule`s to try before those in `CALLS` and `RULES`.

    Returns:
        The graph. Inside `pmap` and `shard_map`, shapes and costs are for one device. A scan counts each iteration, a
        while loop counts once. For `jax.lax.platform_dependent`, the default branch counts.

    Raises:
        TypeError: `fn` is not callable, or does not take a keyword of `kwargs`; an option has the wrong type.
        ValueError: an option is out of range.
        An exception of `fn` itself passes through. Its attribute `graph` has the layers up to the failed line.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> graph = trace(lambda w, x: jax.nn.relu(x @ w), jnp.ones((3, 2)), jnp.ones((5, 3)))
        >>> [(node.op, node.shape, node.params) for node in graph.layers]
        [('FullyConnected', (5, 2), 6), ('Activation', (5, 2), 0)]
    """
    check_trace(fn, len(args), params_argnums, depth, max_nodes, repeats, rules)

    def graph(raw: Raw) -> Graph:
        return to_graph(layers(raw, depth, max_nodes, repeats, rules))

    return graph(read_or_attach(fn, args, kwargs, params_argnums, "graph", graph))


def layers(
    raw: Raw, depth: int | None, max_nodes: int | None, repeats: bool, rules: Sequence[Call | Pattern | Rule]
) -> Net:
    """The layers of flat equations, as few as the options of `trace` say."""
    net = all_layers(raw, repeats, rules)
    close(net, depth, max_nodes)
    return net


def close(net: Net, depth: int | None, max_nodes: int | None) -> None:
    """Close the scopes of a net until it is as small as the options of `trace` say."""
    if depth is not None:
        collapse_scopes(net, depth)
    if max_nodes is not None:
        limit_nodes(net, max_nodes)


def whole_of(net: Net) -> Graph:
    """All layers, with parts as scopes, for a page whose scopes open and close. The net stays as it is.

    A scope that holds many layers or scopes has scopes for its parts with one way in and one way out, named by what
    they share ("conv2_block1").
    """
    net = net.copy()
    add_parts(net)
    return to_graph(net)


def all_layers(raw: Raw, repeats: bool, rules: Sequence[Call | Pattern | Rule]) -> Net:
    """Layers and the edges between them. Everything is open. The equations are marked."""
    calls = [rule for rule in rules if isinstance(rule, Call)]
    patterns = [rule for rule in rules if not isinstance(rule, Call)]
    cells = _layers(raw, calls, patterns)
    if demote_constants(cells):
        for eqn in raw.eqns:
            mark_constant(raw, eqn)
        cells = _layers(raw, calls, patterns)
    mark_state(cells)
    net = build(cells)
    set_sizes(net)  # before anything in it is joined
    join_arguments(net)
    if repeats:
        collapse_repeats(net)
    return net


def _layers(raw: Raw, calls: Sequence[Call], patterns: Sequence[Pattern | Rule]) -> Cells:
    """The layers of these equations."""
    cells = Cells(raw)
    fold_optimizers(cells)
    fold_calls(cells, (*CALLS, *calls))
    written = [rule for rule in patterns if isinstance(rule, Pattern)]
    fold_patterns(cells, (*patterns, *RULES, *written))  # again, now that activations in them are known
    fold_helpers(cells)
    fold_statements(cells)
    fold_siblings(cells)
    attach_residuals(cells)
    attach_views(cells)
    fold_backward(cells)
    break_cycles(cells)
    return cells


def read(fn: Callable[..., Any], *args: Any, params_argnums: int | Sequence[int] | None = 0, **kwargs: Any) -> Raw:
    """The flat equations of a function and the names of its arguments."""
    return read_or_attach(fn, args, kwargs, params_argnums)


def read_or_attach(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    params_argnums: int | Sequence[int] | None,
    name: str = "",
    draw: Callable[[Raw], Any] | None = None,
) -> Raw:
    """As `read`. Where `fn` raises, the error gets what `draw` makes of the equations before as an attribute `name`."""
    _check_keywords(fn, kwargs)
    bound = bind(fn, args, kwargs, _argument_names(fn, len(args)), argnums(params_argnums, len(args)))
    for array, argument in zip(bound.arrays, bound.arguments, strict=True):
        check_dtype(fn, argument.name, array)

    @functools.wraps(fn, updated=())
    def call(arrays: Sequence[Any]) -> Any:
        return bound.call(arrays)

    try:
        closed, (out, changed) = jax.make_jaxpr(call, return_shape=True)(bound.arrays)
    except Exception as error:
        if draw is not None:
            failure.attach(error, bound, name, draw)
        if not bound.static or not isinstance(error, (TypeError, AttributeError)):
            raise
        of, given = getattr(fn, "__name__", type(fn).__name__), ", ".join(bound.static[:5])
        raise TypeError(
            f"viz: {of} cannot be traced with {given}, which is not an array and was passed unchanged; expected an "
            f"array or a jax.ShapeDtypeStruct? {type(error).__name__}: {error}"
        ) from error
    results = ["output" + jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(out)]
    return jaxpr.read(closed, bound.arguments, [*results, *changed], bound.captured)


def _argument_names(fn: Callable[..., Any], count: int) -> list[str]:
    method, before = called_method(fn)
    parameters = _parameters(fn) if method is None else [*_parameters(fn)[:before], *_parameters(method)]
    names: list[str] = []
    for number in range(count):
        parameter = parameters[number] if number < len(parameters) else None
        if parameter is None or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            names += [f"arg{n}" for n in range(number, count)]
            break
        names.append(parameter.name)
    return names


def _check_keywords(fn: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """`TypeError` for an argument that the function does not take, which may be a misspelt option."""
    parameters = _parameters(fn)
    if not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    for name in kwargs.keys() - {p.name for p in parameters}:
        of = getattr(fn, "__name__", type(fn).__name__)
        raise TypeError(f"viz: {of} has no argument {name!r}{did_you_mean(name, _OPTIONS)}")


def _parameters(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    """Those of a function. None of one that Python cannot inspect."""
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return []


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
    rules: Sequence[Call | Pattern | Rule] = (),
    heat: Literal["flops", "bytes"] | None = None,
    theme: Literal["light", "dark"] = "light",
    legend: bool = True,
    direction: Literal["up", "down", "right"] = "up",
    time_limit: float = 30.0,
    **kwargs: Any,
) -> Plot:
    """Draw a function as the network it computes.

    Inputs are ovals at the bottom. Layers are boxes coloured by kind. Edges show shapes. A gradient is next to its
    layer and flows down. Collectives between devices have a separate colour. The function is traced and not run.
    MXNet's counterpart is `mxnet.visualization.plot_network`.

    Args:
        fn, args, kwargs, params_argnums, depth, max_nodes, repeats, rules: as for `trace`.
        title: the text below the picture, and the file name for `render`. "": no text.
        hide_weights: whether to hide the parameters.
        node_attrs: Graphviz attributes for every node, such as `{"shape": "oval"}`. They override the default
            attributes. The interactive page ignores them.
        heat: "flops" or "bytes" colours the layers by cost and shows the cost.
        theme: "light" or "dark". With "light", the interactive page follows the reader's theme.
        legend: whether to explain the colours.
        direction: "up" draws the inputs at the bottom, "down" at the top, "right" at the left.
        time_limit: seconds that the renderer may take.

    Returns:
        A `graphviz.Digraph`. A notebook shows it as an interactive page whose blocks open and close, and
        `save("net.html")` writes that page. `save("net.svg")` writes the picture (also .png, .pdf, .dot). The attribute
        `network` is the `Graph`. The attribute `source` is equal for equal functions. Without the program `dot`,
        pygraphviz draws the picture. Without both, a notebook shows the table of layers and how to install one of them.
        `save` then writes the table and raises a `RenderError`.

    Raises:
        TypeError: `fn` is not callable, or does not take a keyword of `kwargs`; an option has the wrong type.
        ValueError: theme, heat or direction is unknown, or a number is out of range.
        An exception of `fn` itself passes through. Its attribute `plot` is the picture up to the failed line, in red.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> plot = plot_network(lambda w, x: jax.nn.relu(x @ w), jnp.ones((3, 2)), jnp.ones((5, 3)))
        >>> plot.network
        Graph(1 input, 2 layers, 2 edges, 6 parameters, 4 equations)
    """
    check_picture(title, node_attrs, theme, heat, time_limit, hide_weights, legend, direction)
    check_trace(fn, len(args), params_argnums, depth, max_nodes, repeats, rules)

    def draw(raw: Raw) -> Plot:
        net = all_layers(raw, repeats, rules)
        every = functools.partial(whole_of, net.copy())
        close(net, depth, max_nodes)
        graph = to_graph(net)
        from ._draw.picture import Plot  # loads graphviz

        options = Options(title, hide_weights, node_attrs, heat, theme, legend, direction)
        return Plot(graph, options, time_limit, every, depth)

    return draw(read_or_attach(fn, args, kwargs, params_argnums, "plot", draw))
