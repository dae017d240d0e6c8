"""A convolution as a primitive of its own: the parameters, shapes and derivatives of lax's, another lowering on CPUs.

Every rule but the lowering is lax's own. It is traced with lax's primitive, and each convolution in the trace becomes
one of this primitive. So the gradients of a convolution, a batch of them and the gradients of those are convolutions
of this primitive again, and each is lowered by the formula that is fastest for its own shape.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.extend.core import Literal, Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, auto_axes

from .formulas import convolve

_lax_p = lax.conv_general_dilated_p
conv_p = Primitive("conv_general_dilated")  # the name under which pictures and profiles know it


def bind_like(function: Callable[..., Any], *args: Any) -> Any:
    """What `function` computes, with this primitive in place of lax's convolution.

    Args:
        function: of arrays, traced once. It gives one array.
    """
    closed = jax.make_jaxpr(function)(*(jax.typeof(x) for x in args))
    (result,) = _evaluate(closed, args)
    return result


def _evaluate(closed: Any, args: tuple[Any, ...]) -> list[Any]:
    values: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(closed.jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in closed.jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if eqn.primitive is _lax_p:
            results = [conv_p.bind(*operands, **eqn.params)]
        elif "jaxpr" in eqn.params and eqn.primitive.name in ("jit", "pjit"):
            results = _evaluate(eqn.params["jaxpr"], tuple(operands))
        else:
            results = eqn.primitive.bind(*operands, **eqn.params)
            results = results if eqn.primitive.multiple_results else [results]
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in closed.jaxpr.outvars]


def _lax(lhs: Any, rhs: Any, **params: Any) -> Any:
    return _lax_p.bind(lhs, rhs, **params)


def _transpose_lhs(cotangent: Any, lhs: Any, rhs: Any, **params: Any) -> Any:
    def transposed(cotangent: Any, rhs: Any) -> Any:
        return jax.linear_transpose(lambda x: _lax(x, rhs, **params), lhs.aval)(cotangent)[0]

    return bind_like(transposed, cotangent, rhs)


def _transpose_rhs(cotangent: Any, lhs: Any, rhs: Any, **params: Any) -> Any:
    def transposed(cotangent: Any, lhs: Any) -> Any:
        return jax.linear_transpose(lambda x: _lax(lhs, x, **params), rhs.aval)(cotangent)[0]

    return bind_like(transposed, cotangent, lhs)


def _batch(args: tuple[Any, ...], axes: tuple[Any, ...], **params: Any) -> tuple[Any, int]:
    return bind_like(jax.vmap(partial(_lax, **params), axes), *args), 0


def _lower_on_cpu(ctx: Any, lhs: Any, rhs: Any, **params: Any) -> Any:
    function = partial(convolve, is_partitioned=_is_partitioned(ctx.module_context.axis_context), **params)
    (result,) = ctx.avals_out
    if AxisType.Explicit in result.sharding.mesh.axis_types:  # the formulas reshape and sum over what is split
        function = auto_axes(function, out_sharding=result.sharding)
    return mlir.lower_fun(function, multiple_results=False)(ctx, lhs, rhs)


def _is_partitioned(axes: Any) -> bool:
    """Whether XLA splits the program over devices. Inside of pmap and of a whole shard_map it does not."""
    if isinstance(axes, mlir.ShardingContext):
        return axes.num_devices != 1
    return isinstance(axes, mlir.SPMDAxisContext) and axes.manual_axes != frozenset(axes.mesh.axis_names)


@partial(jax.jit, static_argnames="params")
def _compiled(lhs: Any, rhs: Any, params: tuple[tuple[str, Any], ...]) -> Any:
    return conv_p.bind(lhs, rhs, **dict(params))


conv_p.def_impl(lambda *args, **params: _compiled(*args, params=tuple(params.items())))
conv_p.def_effectful_abstract_eval(_lax_p.abstract_eval)
ad.defbilinear(conv_p, _transpose_lhs, _transpose_rhs)
batching.primitive_batchers[conv_p] = _batch
mlir.register_lowering(conv_p, mlir.lower_fun(_lax, multiple_results=False))
mlir.register_lowering(conv_p, _lower_on_cpu, platform="cpu")
