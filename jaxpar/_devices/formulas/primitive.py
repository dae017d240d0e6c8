"""Primitives that are lax's own but for the way they are lowered on CPUs.

Every other rule is lax's. It is traced with lax's primitive, and each such primitive in the trace becomes one of these.
So the gradients of a convolution, a batch of them and the gradients of those are convolutions of the new primitive
again, and each is lowered by the formula that is fastest for its own shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal, Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, auto_axes


class Place(NamedTuple):
    """Where in a program a formula is.

    Attributes:
        is_partitioned: whether XLA splits the program over devices.
        is_shared: whether the program is for several devices, whose threads then share the cores.
        is_in_loop: whether it is in the body of a loop. There XLA has no fast convolution.
    """

    is_partitioned: bool
    is_shared: bool
    is_in_loop: bool = False


def make(lax_p: Any, formula: Callable[..., Any], *, bilinear: bool = False, is_told_place: bool = False) -> Primitive:
    """A primitive with the parameters, shapes and derivatives of another one.

    Args:
        lax_p: the other one, with one result.
        formula: `formula(*operands, is_partitioned=..., **params)` computes it on CPUs. `is_partitioned` says whether
            XLA splits the program over devices: then it should not merge or loop over axes that may be split.
        bilinear: whether it is linear in each of two operands. Then its derivatives are of the new primitive too.
        is_told_place: whether the formula is given `place`, a `Place`, instead of `is_partitioned`.
    """
    new_p = Primitive(lax_p.name)  # the name under which pictures and profiles know it

    def of_lax(*args: Any, **params: Any) -> Any:
        return lax_p.bind(*args, **params)

    @partial(jax.jit, static_argnames="params")
    def compiled(args: tuple[Any, ...], params: tuple[tuple[str, Any], ...]) -> Any:
        return new_p.bind(*args, **dict(params))

    def batch(args: tuple[Any, ...], axes: tuple[Any, ...], **params: Any) -> tuple[Any, int]:
        return bind_like({lax_p: new_p}, jax.vmap(partial(of_lax, **params), axes), *args), 0

    new_p.def_impl(lambda *args, **params: compiled(args, params=tuple(params.items())))
    new_p.def_effectful_abstract_eval(lax_p.abstract_eval)
    batching.primitive_batchers[new_p] = batch
    if bilinear:
        ad.defbilinear(new_p, *_transposes(of_lax, partial(bind_like, {lax_p: new_p})))
    else:
        ad.primitive_jvps[new_p] = lambda primals, tangents, **params: jax.jvp(
            partial(of_lax, **params), primals, tuple(ad.instantiate_zeros(x) for x in tangents)
        )
    mlir.register_lowering(new_p, mlir.lower_fun(of_lax, multiple_results=False))
    mlir.register_lowering(new_p, partial(_lower_on_cpu, formula, is_told_place), platform="cpu")
    return new_p


def bind_like(instead: Mapping[Any, Primitive], function: Callable[..., Any], *args: Any) -> Any:
    """What `function` computes, with other primitives.

    Args:
        instead: the new primitive for each of those to be replaced.
        function: of arrays, traced once. It gives one array.
    """
    closed = jax.make_jaxpr(function)(*(jax.typeof(x) for x in args))
    (result,) = _evaluate(instead, closed, args)
    return result


def _evaluate(instead: Mapping[Any, Primitive], closed: Any, args: tuple[Any, ...]) -> list[Any]:
    values: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(closed.jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in closed.jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if eqn.primitive in instead:
            results = [instead[eqn.primitive].bind(*operands, **eqn.params)]
        elif "jaxpr" in eqn.params and eqn.primitive.name in ("jit", "pjit"):
            results = _evaluate(instead, eqn.params["jaxpr"], tuple(operands))
        else:
            results = eqn.primitive.bind(*operands, **eqn.params)
            results = results if eqn.primitive.multiple_results else [results]
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in closed.jaxpr.outvars]


def _transposes(of_lax: Callable[..., Any], bind: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The rules of transposition by the left and by the right operand."""

    def by_left(cotangent: Any, lhs: Any, rhs: Any, **params: Any) -> Any:
        def transposed(cotangent: Any, rhs: Any) -> Any:
            return jax.linear_transpose(lambda x: of_lax(x, rhs, **params), lhs.aval)(cotangent)[0]

        return bind(transposed, cotangent, rhs)

    def by_right(cotangent: Any, lhs: Any, rhs: Any, **params: Any) -> Any:
        def transposed(cotangent: Any, lhs: Any) -> Any:
            return jax.linear_transpose(lambda x: of_lax(lhs, x, **params), rhs.aval)(cotangent)[0]

        return bind(transposed, cotangent, lhs)

    return by_left, by_right


def _lower_on_cpu(formula: Callable[..., Any], is_told_place: bool, ctx: Any, *operands: Any, **params: Any) -> Any:
    place = _place(ctx.module_context.axis_context)
    told = {"place": place} if is_told_place else {"is_partitioned": place.is_partitioned}
    function = partial(formula, **told, **params)
    (result,) = ctx.avals_out
    if AxisType.Explicit in result.sharding.mesh.axis_types:  # the formulas reshape and sum over what is split
        function = auto_axes(function, out_sharding=result.sharding)
    return mlir.lower_fun(function, multiple_results=False)(ctx, *operands)


def _place(axes: Any) -> Place:
    """Inside of pmap and of a whole shard_map XLA does not partition."""
    if isinstance(axes, mlir.ShardingContext):
        return Place(axes.num_devices != 1, axes.num_devices != 1)
    if isinstance(axes, mlir.SPMDAxisContext):
        return Place(axes.manual_axes != frozenset(axes.mesh.axis_names), axes.mesh.size != 1)
    return Place(False, axes.axis_env.nreps != 1)
