"""`trace`: a function becomes a `Graph`; nothing is run and no memory is taken."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._core.formula import as_written
from ._fold import backward, group, table
from ._fold.calls import CALLS, Call, fold_calls
from ._fold.cells import Cells
from ._fold.table import RULES, Rule
from ._graph import Graph
from ._layout import collapse, net as _net
from ._read import jaxpr


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
    """A function as a `Graph` of layers, from its jaxpr alone: nothing is run and no memory is taken.

    Equations are folded into layers: by the function that made them (`jax.nn.softmax`, a module's `LayerNorm`), by
    patterns (a convolution and its bias), and what is left by the user's own small functions and lines. Gradients
    become one backward node a layer. A repeated block is kept once, with its count.

    Args:
        fn: any function that JAX can trace: jitted, mapped over devices, the gradient of another.
        args, kwargs: arrays or `jax.ShapeDtypeStruct`s, in any pytree.
        params_argnums: which positional arguments hold the parameters; None for none of them. A bare array that is
            the only argument is data. Arrays that the function captured are parameters too.
        depth: how many nested modules and scopes to keep open; None for all, 0 closes every one but those that
            stand around the whole function.
        max_nodes: draw at most so many nodes, closing the deepest scopes first; None for no limit.
        repeats: whether repeated blocks are kept once.
        rules: `Call`s and `Rule`s to try before those in `CALLS` and `RULES`.

    Returns:
        The graph. Inside `pmap` and `shard_map`, shapes and costs are those of one device; a scan counts as often
        as it runs, a while loop once.

    Raises:
        TypeError: an argument is no array; the message names it. Whatever `fn` itself raises comes through.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> graph = trace(lambda w, x: jax.nn.relu(x @ w), jnp.ones((3, 2)), jnp.ones((5, 3)))
        >>> [(node.op, node.shape, node.params) for node in graph.layers]
        [('FullyConnected', (5, 2), 6), ('Activation', (5, 2), 0)]
    """
    raw = read(fn, *args, params_argnums=params_argnums, **kwargs)
    calls = [rule for rule in rules if isinstance(rule, Call)]
    patterns = [rule for rule in rules if isinstance(rule, Rule)]
    cells = Cells(raw)
    fold_calls(cells, (*CALLS, *calls))
    table.fold_patterns(cells, (*patterns, *RULES))
    group.fold_helpers(cells)
    group.fold_statements(cells)
    group.fold_siblings(cells)
    backward.attach_residuals(cells)
    backward.attach_views(cells)
    backward.fold_backward(cells)
    group.break_cycles(cells)
    net = _net.build(cells)
    if repeats:
        collapse.collapse_repeats(net)
    if depth is not None:
        collapse.collapse_scopes(net, depth)
    if max_nodes is not None:
        collapse.limit(net, max_nodes)
    return _net.to_graph(net)


def read(
    fn: Callable[..., Any], *args: Any, params_argnums: int | Sequence[int] | None = 0, **kwargs: Any
) -> jaxpr.Raw:
    """The flat equations of a function and the names of its arguments."""
    names, weights = _arguments(fn, args, kwargs, params_argnums)

    @functools.wraps(fn, updated=())
    def traced(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    with as_written(True):
        closed, out = jax.make_jaxpr(traced, return_shape=True)(*args, **kwargs)
    results = ["output" + jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(out)]
    return jaxpr.read(closed, names, weights, results)


def _arguments(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], params_argnums: int | Sequence[int] | None
) -> tuple[list[str], list[bool]]:
    """The name of each leaf ("params['conv1']['bias']"), and whether it is a parameter."""
    argnums = {params_argnums} if isinstance(params_argnums, int) else set(params_argnums or ())
    names = _argument_names(fn, len(args))
    found: list[str] = []
    weights: list[bool] = []
    for number, arg in enumerate(args):
        bare = len(args) == 1 and not kwargs and jax.tree_util.treedef_is_leaf(jax.tree.structure(arg))
        for path, leaf in jax.tree_util.tree_leaves_with_path(arg):
            name = names[number] + jax.tree_util.keystr(path)
            _check_array(fn, name, leaf)
            found.append(name)
            weights.append(number in argnums and not bare and not str(getattr(leaf, "dtype", "")).startswith("key"))
    for path, leaf in jax.tree_util.tree_leaves_with_path(kwargs):
        name = str(getattr(path[0], "key", path[0])) + jax.tree_util.keystr(path[1:])
        _check_array(fn, name, leaf)
        found.append(name)
        weights.append(False)
    return found, weights


def _argument_names(fn: Callable[..., Any], count: int) -> list[str]:
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names: list[str] = []
    for number in range(count):
        parameter = parameters[number] if number < len(parameters) else None
        if parameter is None or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            names += [f"arg{n}" for n in range(number, count)]
            break
        names.append(parameter.name)
    return names


def _check_array(fn: Callable[..., Any], name: str, leaf: Any) -> None:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return
    if isinstance(leaf, (bool, int, float, complex)):
        return
    of = getattr(fn, "__name__", type(fn).__name__)
    raise TypeError(
        f"viz: argument {name} of {of} is {leaf!r}, a {type(leaf).__name__}; expected an array or a "
        f"jax.ShapeDtypeStruct. Bind what is no array first, as in functools.partial({of}, {name.split('[')[0]}=...)"
    )
