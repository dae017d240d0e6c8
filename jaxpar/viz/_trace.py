"""`trace`, `plot_network`, `print_summary` and `diff`: from functions to a `Graph` in passes, a picture, a table.

`all_layers` and `_layers` are the passes, in their order. The public functions check their options, read the function,
and show what the passes give.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any, Literal

from .._core import checks
from .._core.text import in_notebook
from ._diff.changes import compare
from ._draw.style import Options
from ._draw.table import frozen_names, to_html, to_text
from ._fold.backward import attach_residuals, attach_views, fold_backward
from ._fold.calls import CALLS, Call, fold_calls, fold_helpers, fold_optimizers, fold_siblings, fold_statements
from ._fold.cells import Cells, break_cycles
from ._fold.known import RULES, fold_patterns
from ._fold.templates import Pattern, Rule
from ._function import check_picture, check_trace, drawn_for, read, true_or_false
from ._graph import Graph, Node
from ._layout.arrays import demote_constants, mark_state, set_sizes
from ._layout.build import build, join_arguments
from ._layout.collapse import FEW_BOXES, add_parts, close_until, collapse_scopes, limit_nodes, open_where
from ._layout.inside import frame_as
from ._layout.net import Net, to_graph
from ._layout.repeats import collapse_repeats
from ._read.raw import Raw, mark_constant

if TYPE_CHECKING:
    from ._diff.picture import DiffPlot
    from ._draw.marked import MarkedPlot
    from ._draw.picture import Plot


def trace(
    fn: Callable[..., Any],
    *args: Any,
    params_argnums: int | Sequence[int] | None = 0,
    depth: int | None = None,
    open: Callable[[Node], object] | None = None,
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
            Equinox or Keras, whose arrays are the parameters; or one of Flax Linen, whose `init` says what they are; or
            a `jaxpar.mxnet.Model`.
        args, kwargs: arrays or `jax.ShapeDtypeStruct`s, in any pytree, or NNX and Equinox modules. Other values
            (strings, flags, functions, numbers) are static. `shape={"x": (32, 784)}` is an array of float32 for each
            argument that is named, unless `fn` has an argument `shape`.
        params_argnums: the positional arguments with parameters: an int, or several. Negative numbers count from the
            end. None: no argument. A single argument that is an array is data. If no argument has parameters, captured
            arrays that a layer reads as weights are the parameters.
        depth: the number of open levels of modules and scopes. None: all. Scopes around the whole function do not
            count, so 0 closes all other scopes.
        open: a function of a `Node`, which says whether a module or scope is open. It is given the box that stands for
            the closed one. `open=lambda node: node.shape not in node.input_shapes` opens what changes the shape. With
            `depth`, scopes below that level stay closed.
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
    check_trace(fn, len(args), params_argnums, depth, max_nodes, repeats, rules, opened=open)

    def graph(raw: Raw) -> Graph:
        return to_graph(layers(raw, depth, max_nodes, repeats, rules, open))

    raw, _, _ = read(drawn_for(fn), args, kwargs, params_argnums, ("graph", graph))
    return graph(raw)


def layers(
    raw: Raw,
    depth: int | None,
    max_nodes: int | None,
    repeats: bool,
    rules: Sequence[Call | Pattern | Rule],
    opened: Callable[[Node], object] | None = None,
) -> Net:
    """The layers of flat equations, as few as the options of `trace` say."""
    net = all_layers(raw, repeats, rules)
    close(net, depth, max_nodes, opened)
    return net


def close(net: Net, depth: int | None, max_nodes: int | None, opened: Callable[[Node], object] | None = None) -> None:
    """Close the scopes of a net until it is as small as the options of `trace` say."""
    if depth is not None:
        collapse_scopes(net, depth)
    if opened is not None:
        open_where(net, opened)
    if max_nodes is not None:
        limit_nodes(net, max_nodes)


def whole_of(net: Net, picture: Net | None = None) -> Graph:
    """All layers, for a page whose scopes open and close: the frames and boxes of the picture, and what is in them.

    A scope that holds many layers or scopes has scopes for its parts with one way in and one way out, named by what
    they share ("conv2_block1"). `picture` is the net with what is closed at first. None: nothing is. Both stay.
    """
    net = net.copy()
    if picture is None:
        add_parts(net)
    else:
        frame_as(net, picture)
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
    attach_views(cells)  # again, those of gradients
    break_cycles(cells)
    return cells


def plot_network(
    fn: Callable[..., Any],
    *args: Any,
    title: str = "plot",
    hide_weights: bool = True,
    node_attrs: Mapping[str, str] | None = None,
    depth: int | None = None,
    open: Callable[[Node], object] | None = None,
    params_argnums: int | Sequence[int] | None = 0,
    max_nodes: int | Literal["screen"] | None = "screen",
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
        fn, args, kwargs, params_argnums, depth, open, repeats, rules: as for `trace`.
        max_nodes: "screen": the blocks are open that a screen of 1280 × 900 pixels shows at 60 % or more, or those of
            `depth` and `open`, with 200 layers at most. An int or None: as for `trace`. The page has the same open, or
            less in a small window.
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
    options = Options(title, hide_weights, node_attrs, heat, theme, legend, direction)
    check_picture(options, time_limit, "plot_network")
    on_screen = max_nodes == "screen"
    most = _MOST_NODES if max_nodes == "screen" else max_nodes
    check_trace(fn, len(args), params_argnums, depth, most, repeats, rules, opened=open)
    asked = depth is not None or open is not None

    def draw(raw: Raw) -> Plot:
        from ._draw.extent import fits_screen
        from ._draw.picture import Plot  # loads graphviz

        net = all_layers(raw, repeats, rules)
        every = net.copy()
        if on_screen and not asked:
            close_until(net, lambda net: fits_screen(to_graph(net), options), few=FEW_BOXES)
        close(net, depth, most, open)
        return Plot(to_graph(net), options, time_limit, functools.partial(whole_of, every, net), asked)

    raw, _, _ = read(drawn_for(fn), args, kwargs, params_argnums, ("plot", draw))
    return draw(raw)


def plot_marked(fn: Callable[..., Any], args: Sequence[Any], marks: Sequence[str], title: str) -> MarkedPlot:
    """The network of a function, with those of its layers in colour that use the params of these names."""
    graph = trace(fn, *args)
    from ._draw.marked import MarkedPlot  # loads graphviz

    return MarkedPlot(graph, marks, Options(title), _TIME_LIMIT)


_TIME_LIMIT = 30.0  # seconds, as of `plot_network`
_MOST_NODES = 200  # layers in a picture

# What a terminal without these letters shows.
_PLAIN = str.maketrans({"├": "|", "└": "`", "─": "-", "│": "|", "×": "x", "…": "~"})


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
    memory: bool = False,
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
        memory: whether to add columns of bytes: the first output of a layer, the first output of its gradient, and
            what the layer computes that the backward pass reads, all before XLA's fusion.

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
    true_or_false(memory, "print_summary", "memory")
    if depth is not None:
        checks.whole_number(depth, "print_summary", "depth", least=0)
    if "open" in kwargs:  # `trace` would take it, and the memory of a closed box is not that of what is in it
        raise TypeError("print_summary: a table has no open=, which is of plot_network, trace and diff; write depth=")
    patterns = _patterns(frozen)
    graph = trace(fn, *args, params_argnums=params_argnums, max_nodes=None, repeats=repeats, rules=rules, **kwargs)
    _show(graph, file, {"depth": depth, "frozen": frozen_names(graph, patterns), "memory_columns": bool(memory)}, width)


def _patterns(frozen: str | Sequence[str]) -> list[str]:
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
    try:
        print(text, file=out)
    except UnicodeEncodeError:  # nothing of the text is written then
        print(text.translate(_PLAIN), file=out)


Network = Graph | tuple[Callable[..., Any], Sequence[Any]] | tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]


def diff(
    before: Network,
    after: Network,
    *,
    title: str = "diff",
    node_attrs: Mapping[str, str] | None = None,
    depth: int | None = None,
    open: Callable[[Node], object] | None = None,
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
        params_argnums, depth, open, max_nodes, repeats, rules: as for `trace`, for both functions.
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
    drawn = Options(title, True, node_attrs, None, theme, legend, direction)
    check_picture(drawn, time_limit, "diff")
    options = {"depth": depth, "open": open, "max_nodes": max_nodes, "repeats": repeats, "rules": rules}
    graphs = [_graph(which, given, params_argnums, options) for which, given in (("first", before), ("second", after))]
    from ._diff.picture import DiffPlot  # loads graphviz

    return DiffPlot(compare(*graphs), drawn, time_limit)


def _graph(which: str, given: Any, params_argnums: int | Sequence[int] | None, options: dict[str, Any]) -> Graph:
    if isinstance(given, Graph):
        return given
    expected = f"diff: the {which} network must be (fn, args), such as (apply, (params, x)), or a viz.Graph"
    if not isinstance(given, tuple):
        hint = "; write its arguments beside it" if callable(given) else ""
        raise TypeError(f"{expected}; got {checks.describe(given)}{hint}")
    args, kwargs = (*given[1:], {}, {})[:2]
    if len(given) not in (2, 3) or not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        raise TypeError(f"{expected}; got ({', '.join(map(checks.describe, given))})")
    return trace(given[0], *args, params_argnums=params_argnums, **options, **kwargs)
