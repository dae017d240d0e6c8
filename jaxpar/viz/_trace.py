"""`trace`: from a function to its `Graph`, in passes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._core.arguments import did_you_mean
from .._core.calls import answers
from ._fold.backward import attach_residuals, attach_views, fold_backward
from ._fold.calls import fold_calls
from ._fold.cells import Cells
from ._fold.cycles import break_cycles
from ._fold.helpers import fold_helpers, fold_siblings, fold_statements
from ._fold.known import CALLS, Call
from ._fold.optimizers import fold_optimizers
from ._fold.patterns import Rule, fold_patterns
from ._fold.table import RULES
from ._graph import Graph
from ._layout.arguments import join_arguments
from ._layout.build import build
from ._layout.collapse import collapse_scopes, limit_nodes
from ._layout.graph import to_graph
from ._layout.kinds import demote_constants, mark_state
from ._layout.net import Net
from ._layout.regions import add_regions
from ._layout.repeats import collapse_repeats
from ._layout.sizes import sizes_of
from ._options import argnums, check_dtype, check_trace
from ._read import jaxpr
from ._read.bind import bind
from ._read.libraries import called_method
from ._read.raw import Raw
from ._read.views import mark_constants

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
    rules: Sequence[Rule | Call] = (),
    **kwargs: Any,
) -> Graph:
    """The layers of a function, read from its jaxpr. Nothing is run and no memory is taken.

    Equations are folded into layers. First by the function that made them (`jax.nn.softmax`, a module's `LayerNorm`).
    Then by patterns (a convolution and its bias). What is left, by the user's own small functions and lines. A layer's
    gradient becomes one backward node. A repeated block is kept once, with its count.

    Args:
        fn: any function that JAX can trace: jitted, mapped over devices, the gradient of another. Or a module of Flax
            NNX, Equinox or Keras, whose arrays are the parameters.
        args, kwargs: arrays or `jax.ShapeDtypeStruct`s, in any pytree, or NNX and Equinox modules. What is no array
            (a string, flag, function or number) is a part of the function.
        params_argnums: which positional arguments hold the parameters: an int, or several. Negative ones count from
            the end. None for none of them. A bare array that is the only argument is data. Where no argument holds
            parameters, captured arrays that a layer reads as its weights do.
        depth: how many nested modules and scopes to keep open. None for all. Scopes around the whole function do not
            count, so 0 closes all others.
        max_nodes: how many layers to draw at most. The deepest scopes close first. None for no limit.
        repeats: whether repeated blocks are kept once.
        rules: `Call`s and `Rule`s to try before those in `CALLS` and `RULES`.

    Returns:
        The graph. Inside `pmap` and `shard_map`, shapes and costs are those of one device. A scan counts as often as
        it runs, a while loop once. Of `jax.lax.platform_dependent` the default branch counts.

    Raises:
        TypeError: `fn` is not callable, or takes no argument of a name in `kwargs`. An option has a wrong type. Errors
            of `fn` itself come through.
        ValueError: an option is out of range.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> graph = trace(lambda w, x: jax.nn.relu(x @ w), jnp.ones((3, 2)), jnp.ones((5, 3)))
        >>> [(node.op, node.shape, node.params) for node in graph.layers]
        [('FullyConnected', (5, 2), 6), ('Activation', (5, 2), 0)]
    """
    check_trace(fn, len(args), params_argnums, depth, max_nodes, repeats, rules)
    raw = read(fn, *args, params_argnums=params_argnums, **kwargs)
    return to_graph(layers(raw, depth, max_nodes, repeats, rules))


def layers(raw: Raw, depth: int | None, max_nodes: int | None, repeats: bool, rules: Sequence[Rule | Call]) -> Net:
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
    """All layers, with regions as scopes, for a page whose scopes open and close. The net stays as it is.

    A scope that holds many layers or scopes has scopes for its parts with one way in and one way out, named by what
    they share ("conv2_block1").
    """
    net = net.copy()
    add_regions(net)
    return to_graph(net)


def all_layers(raw: Raw, repeats: bool, rules: Sequence[Rule | Call]) -> Net:
    """Layers and the edges between them. Everything is open. The equations are marked."""
    calls = [rule for rule in rules if isinstance(rule, Call)]
    patterns = [rule for rule in rules if isinstance(rule, Rule)]
    cells = _layers(raw, calls, patterns)
    if demote_constants(cells):
        mark_constants(raw)
        cells = _layers(raw, calls, patterns)
    mark_state(cells)
    net = build(cells)
    net.sizes = sizes_of(net)  # before anything in it is joined
    join_arguments(net)
    if repeats:
        collapse_repeats(net)
    return net


def _layers(raw: Raw, calls: Sequence[Call], patterns: Sequence[Rule]) -> Cells:
    """The layers of these equations."""
    cells = Cells(raw)
    fold_optimizers(cells)
    fold_calls(cells, (*CALLS, *calls))
    fold_patterns(cells, (*patterns, *RULES))
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
    _check_keywords(fn, kwargs)
    bound = bind(fn, args, kwargs, _argument_names(fn, len(args)), argnums(params_argnums, len(args)))
    for array, argument in zip(bound.arrays, bound.arguments, strict=True):
        check_dtype(fn, argument.name, array)

    @functools.wraps(fn, updated=())
    def call(arrays: Sequence[Any]) -> Any:
        return bound.call(arrays)

    try:
        closed, (out, changed) = jax.make_jaxpr(call, return_shape=True)(bound.arrays)
    except (TypeError, AttributeError) as error:
        if not bound.static:
            raise
        of, given = getattr(fn, "__name__", type(fn).__name__), ", ".join(bound.static[:5])
        raise TypeError(
            f"viz: {of} cannot be traced with {given}, which is no array and was passed on as it is; expected an array "
            f"or a jax.ShapeDtypeStruct? {type(error).__name__}: {error}"
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
