"""A jaxpr, run with a record of the first equation that made a NaN or an infinity.

`run` evaluates it as one program. The record goes through loops as a carry, through branches as an operand, and comes
out of a map over devices once for each of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from .._read.costs import Jaxpr
from .._read.jaxpr import INLINE, body_of

_NEVER = np.iinfo(np.int32).max
Path = tuple[int, ...]  # the numbers of an equation and of those around it, from the outside in; branches too


class Record(NamedTuple):
    """The first equation that made a NaN or an infinity, as arrays of no dimension."""

    site: Any  # its number in `Sites`. -1 for none.
    is_nan: Any  # else it is an infinity
    low: Any  # the least and the greatest number that it read, without NaNs
    high: Any
    when: Any  # how many equations had looked at their results before
    now: Any  # and up to here


@dataclass(slots=True)
class Sites:
    """Which equation each site is. One of a shared jaxpr is another site for each call."""

    paths: dict[Path, int] = field(default_factory=dict)
    eqns: list[tuple[Path, jex.JaxprEqn]] = field(default_factory=list)

    def number(self, path: Path, eqn: jex.JaxprEqn) -> int:
        """The number of a site. A loop's body may be traced more than once."""
        if path not in self.paths:
            self.paths[path] = len(self.eqns)
            self.eqns.append((path, eqn))
        return self.paths[path]


def run(closed: Jaxpr, arrays: Sequence[Any], sites: Sites) -> tuple[Record, bool]:
    """The record of a run, and whether a result of it has a NaN or an infinity."""

    @jax.jit
    def whole(arrays: Sequence[Any]) -> tuple[Record, Any]:
        none = jnp.int32(0)
        start = Record(none - 1, none < 0, jnp.float32(0), jnp.float32(0), none + _NEVER, none)
        record, results = _evaluate(closed, start, arrays, (), sites)
        bad = [jnp.any(~jnp.isfinite(result)) for result in results if _is_inexact(result)]
        return record, functools.reduce(jnp.logical_or, bad, jnp.bool_(False))

    record, in_result = jax.device_get(whole(list(arrays)))
    return Record(*record), bool(in_result)


def _evaluate(body: Any, record: Record, args: Sequence[Any], path: Path, sites: Sites) -> tuple[Record, list[Any]]:
    """The results of a jaxpr, and the record after it."""
    jaxpr: jex.Jaxpr = getattr(body, "jaxpr", body)
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, getattr(body, "consts", ()), strict=True))
    env |= zip(jaxpr.invars, args, strict=True)

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else env[atom]

    for number, eqn in enumerate(jaxpr.eqns):
        record, outs = _step(eqn, record, [read(atom) for atom in eqn.invars], (*path, number), sites)
        env |= zip(eqn.outvars, outs, strict=True)
    return record, [read(atom) for atom in jaxpr.outvars]


def _step(eqn: jex.JaxprEqn, record: Record, ins: list[Any], path: Path, sites: Sites) -> tuple[Record, list[Any]]:
    """The results of an equation. A nested jaxpr is evaluated with the record."""
    name, params = eqn.primitive.name, eqn.params

    def inner(body: Any, record: Record, args: Sequence[Any], *more: int) -> tuple[Record, list[Any]]:
        return _evaluate(body, record, args, (*path, *more), sites)

    if name == "scan":
        if "num_carry" in params:
            first, carried = params["num_consts"], params["num_carry"]
        else:  # jax 0.12 has them as a tree
            first, carried = map(len, params["ft_in"].unpack()[:2])
        consts, carry, xs = ins[:first], ins[first : first + carried], ins[first + carried :]

        def one(state: Any, x: Any) -> tuple[Any, Any]:
            record, outs = inner(params["jaxpr"], state[0], [*consts, *state[1], *x])
            return (record, outs[:carried]), outs[carried:]

        options = {name: params[name] for name in ("length", "reverse")}
        (record, last), ys = lax.scan(one, (record, carry), xs, **options)
        return record, [*last, *ys]
    if name == "while":
        asks, body = params["cond_nconsts"], params["body_nconsts"]
        asking, consts, carry = ins[:asks], ins[asks : asks + body], ins[asks + body :]

        def goes_on(state: Any) -> Any:
            return jax.core.eval_jaxpr(params["cond_jaxpr"].jaxpr, params["cond_jaxpr"].consts, *asking, *state[1])[0]

        def again(state: Any) -> Any:
            return inner(params["body_jaxpr"], state[0], [*consts, *state[1]])

        return lax.while_loop(goes_on, again, (record, carry))
    if name == "cond" and not params.get("branches_platforms"):
        branches = [
            functools.partial(lambda number, body, record, *args: inner(body, record, args, number), number, body)
            for number, body in enumerate(params["branches"])
        ]
        return lax.switch(jnp.asarray(ins[0], jnp.int32), branches, record, *ins[1:])
    if name == "shard_map":
        return _on_devices(params, record, ins, inner)
    if name in INLINE and (body := body_of(eqn)) is not None:
        return inner(body, record, ins)
    with eqn.ctx.manager:  # the precision of products, the mesh
        made = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(params))
    outs = list(made) if eqn.primitive.multiple_results else [made]
    return _look(eqn, record, ins, outs, sites.number(path, eqn)), outs


def _on_devices(params: dict[str, Any], record: Record, ins: list[Any], inner: Any) -> tuple[Record, list[Any]]:
    """A map over devices. Each has a record; of these the earliest goes on."""
    axes = tuple(name for name in params["mesh"].axis_names if name in params["newly_manual_axes"])

    def body(record: Record, *args: Any) -> tuple[Record, list[Any]]:
        if params["check_vma"]:  # what a device found differs from what others did
            record = Record(*(lax.pcast(value, axes, to="varying") for value in record))
        record, outs = inner(params["jaxpr"], record, args)
        return Record(*(value[None] for value in record)), outs

    mapped = jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=(Record(*[P()] * len(record)), *params["in_specs"]),
        out_specs=(Record(*[P(axes)] * len(record)), list(params["out_specs"])),
        axis_names=set(axes),
        check_vma=params["check_vma"],
    )
    records, outs = mapped(record, *ins)
    first = jnp.argmin(records.when)
    chosen = Record(*(value[first] for value in records))
    return chosen._replace(now=records.now.max()), outs


def _look(eqn: jex.JaxprEqn, record: Record, ins: list[Any], outs: list[Any], site: int) -> Record:
    """The record after an equation.

    An infinity that an equation read is no new one: masks are made of them. A NaN that comes of one is.
    """
    read, made = [x for x in ins if _is_inexact(x) and np.size(x)], [x for x in outs if _is_inexact(x) and np.size(x)]
    if not made or eqn.primitive.name.startswith("empty"):
        return record

    def anywhere(test: Any, values: list[Any]) -> Any:
        return functools.reduce(jnp.logical_or, [jnp.any(test(value)) for value in values], jnp.bool_(False))

    is_nan = anywhere(jnp.isnan, made) & ~anywhere(jnp.isnan, read)
    is_inf = anywhere(jnp.isinf, made) & ~anywhere(lambda x: ~jnp.isfinite(x), read) & bool(read)
    is_first = (is_nan | is_inf) & (record.site < 0)
    sizes = [jnp.abs(x) if jnp.iscomplexobj(x) else x for x in read]
    low = functools.reduce(jnp.minimum, [jnp.min(x, where=~jnp.isnan(x), initial=math.inf) for x in sizes], jnp.inf)
    high = functools.reduce(jnp.maximum, [jnp.max(x, where=~jnp.isnan(x), initial=-math.inf) for x in sizes], -jnp.inf)
    new = Record(site, is_nan, jnp.float32(low), jnp.float32(high), record.now, record.now)
    chosen = Record(*(jnp.where(is_first, a, b) for a, b in zip(new, record, strict=True)))
    return chosen._replace(now=record.now + 1)


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", np.int32), jnp.inexact)
