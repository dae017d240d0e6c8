"""`first_nonfinite`: the layer that made the first NaN or infinity, and its picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .._draw.style import Options
from .._fold.calls import Call
from .._fold.templates import Pattern, Rule
from .._function import check_picture, check_trace, read
from .._layout.net import Net, name_drafts, to_graph
from .._read.raw import Eqn, Raw
from .._read.source import short_path
from .._trace import layers
from .found import Nonfinite
from .run import Record, Sites, run

if TYPE_CHECKING:
    from .picture import NonfinitePlot


def first_nonfinite(
    fn: Callable[..., Any],
    *args: Any,
    title: str = "first NaN or infinity",
    params_argnums: int | Sequence[int] | None = 0,
    depth: int | None = None,
    max_nodes: int | None = 200,
    repeats: bool = True,
    rules: Sequence[Call | Pattern | Rule] = (),
    theme: Literal["light", "dark"] = "light",
    time_limit: float = 30.0,
) -> NonfinitePlot:
    """Run a function once, and draw the first layer with a NaN.

    The function runs with its arguments. Each operation looks at its result, in the order in which they run, through
    loops, branches, gradients and maps over devices. The first one that makes a NaN of numbers, or an infinity of
    finite ones, is found, and its layer is red. An infinity that an operation only hands on, as of a mask, does not
    count. The arguments stay as they are, also if the function donates them.

    The operations are compiled with the looks between them. XLA may then round otherwise than in the function itself,
    above all in float16 and bfloat16.

    Args:
        fn: any function that JAX can trace: a step of `jaxpar.train`, a loss, a gradient.
        args: arrays with values, in any pytree.
        title: the text below the picture.
        params_argnums, depth, max_nodes, repeats, rules, theme, time_limit: as for `plot_network`.

    Returns:
        A `Plot` whose `found` is a `Nonfinite`, or None where all numbers are finite.

    Raises:
        TypeError: an argument has no values; or as for `plot_network`.
        ValueError: as for `plot_network`.

    Example:
        >>> import jax.numpy as jnp
        >>> def loss(w, x):
        ...     return jnp.log(jnp.square(x @ w)).mean()
        >>> found = first_nonfinite(loss, jnp.zeros((3, 2)), jnp.ones((5, 3))).found
        >>> found.primitive, found.kind, found.low, found.high
        ('log', 'inf', 0.0, 0.0)
    """
    options = Options(title, theme=theme)
    check_picture(options, time_limit, "first_nonfinite")
    check_trace(fn, len(args), params_argnums, depth, max_nodes, repeats, rules, what="first_nonfinite")
    raw, closed, arrays = read(fn, args, {}, params_argnums)
    leaves = [value for value in raw.values if value.kind in ("weight", "input") and not value.captured]
    for value, array in zip(leaves, arrays, strict=False):
        if isinstance(array, jax.ShapeDtypeStruct):
            raise TypeError(
                f"first_nonfinite: {value.name} has a shape and no values; the function is run, so give an array"
            )
    net = layers(raw, depth, max_nodes, repeats, rules)
    names = name_drafts(net)
    at, found = None, None
    sites = Sites()
    record, in_result = run(closed, arrays, sites)
    with_nan = [value.name for value, array in zip(leaves, arrays, strict=False) if _has_nan(array)]
    if with_nan:
        found = Nonfinite(with_nan[0], "nan", "argument", "", float("nan"), float("nan"), in_result)
    elif record.site >= 0:
        path, eqn = sites.eqns[int(record.site)]
        flat = _flat(raw, sites, path, eqn)
        at = _draft_of(net, flat) if flat is not None else None
        found = _found(record, eqn.primitive.name, names.get(at, "") if at is not None else "", raw, flat, in_result)
    from .picture import NonfinitePlot  # loads graphviz

    return NonfinitePlot(to_graph(net), options, time_limit, found)


def _has_nan(array: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(array), jnp.inexact) and bool(jnp.isnan(array).any())


def _flat(raw: Raw, sites: Sites, path: tuple[int, ...], eqn: Any) -> Eqn | None:
    """The flat equation of a site. Calls of one jaxpr share its equations, so it is the one of the same call."""
    copies = [flat for flat in raw.eqns if flat.params is eqn.params and flat.prim == eqn.primitive.name]
    calls = sorted(other for other, same in sites.eqns if same is eqn)
    at = calls.index(path)
    if len(copies) != len(calls):  # what no result needs is not drawn
        return copies[min(at, len(copies) - 1)] if copies else None
    return copies[at]


def _draft_of(net: Net, flat: Eqn) -> int | None:
    """The layer of an equation. A cast or a reshape is part of the layer that reads it."""
    owner = {number: draft.at for draft in net.layers for number in draft.eqns}
    if flat.id in owner:
        return owner[flat.id]
    outs = set(flat.outs)
    for eqn in net.raw.eqns[flat.id + 1 :]:
        if any(outs.intersection(net.raw.shown(value)) for value in eqn.ins):
            if eqn.id in owner:
                return owner[eqn.id]
            outs.update(eqn.outs)
    made = net.raw.of(flat.ins[0]).producer if flat.ins else None
    return owner.get(made) if made is not None else None


def _found(record: Record, primitive: str, name: str, raw: Raw, flat: Eqn | None, in_result: bool) -> Nonfinite:
    frames = raw.own_stack(flat) if flat is not None else ()
    users = [frame for frame in frames if frame.origin == "user"] or list(frames)
    last = users[-1] if users else None
    source = f"{short_path(last.file)}:{last.line} in {last.name}" if last is not None else ""
    kind: Literal["nan", "inf"] = "nan" if np.asarray(record.is_nan) else "inf"
    return Nonfinite(name, kind, primitive, source, float(record.low), float(record.high), in_result)
