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
from jax.extend.core import JaxprEqn, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, auto_axes

Program = Any  # a jaxpr, open or closed: two classes in older versions of jax
# For each primitive the new one, or a function that gives the new equation or None.
Replacements = Mapping[Any, Any]

_LOOPS = frozenset(("scan", "while"))
# Primitives whose parameters have a program that XLA compiles as it does the one around it. A Pallas kernel is none.
_WITH_PROGRAMS = frozenset(
    "jit pjit scan while cond checkpoint remat remat2 shard_map "
    "closed_call core_call custom_jvp_call custom_vjp_call".split()
)


class Place(NamedTuple):
    """Where in a program a formula is.

    Attributes:
        is_partitioned: whether XLA splits the program over devices. A formula should then not merge or loop over axes
            that may be split.
        is_shared: whether the program is for several devices, whose threads then share the cores.
        is_in_loop: whether it is in the body of a loop. There XLA has no fast convolution.
        is_exported: whether the program is for other processes, which may not have the kernels of this one.
    """

    is_partitioned: bool
    is_shared: bool
    is_in_loop: bool = False
    is_exported: bool = False


def make(lax_p: Primitive, formula: Callable[..., Any], *, bilinear: bool = False) -> Primitive:
    """A primitive with the parameters, shapes and derivatives of another one.

    Args:
        lax_p: the other one, with one result.
        formula: `formula(*operands, place=..., **params)` computes it on CPUs, at a `Place` of a program.
        bilinear: whether it is linear in each of two operands. Then its derivatives are of the new primitive too.
    """
    new_p = Primitive(lax_p.name)  # the name under which pictures and profiles know it

    def of_lax(*args: Any, **params: Any) -> Any:
        return lax_p.bind(*args, **params)

    @partial(jax.jit, static_argnames="params")
    def compiled(args: tuple[Any, ...], params: tuple[tuple[str, Any], ...]) -> Any:
        return new_p.bind(*args, **dict(params))

    def batch(args: tuple[Any, ...], axes: tuple[Any, ...], /, **params: Any) -> tuple[Any, int]:
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
    mlir.register_lowering(new_p, partial(_lower_on_cpu, formula), platform="cpu")
    return new_p


def bind_like(instead: Mapping[Any, Primitive], function: Callable[..., Any], *args: Any) -> Any:
    """What `function` computes, with other primitives.

    Args:
        instead: the new primitive for each of those to be replaced.
        function: of arrays, traced once. It gives one array.
    """
    closed = jax.make_jaxpr(function)(*(jax.typeof(x) for x in args))
    (result,) = jaxpr_as_fun(replace_primitives(closed, instead))(*args)
    return result


def replace_primitives(
    program: Program,
    instead: Replacements,
    in_loops: Replacements | None = None,
    done: dict[tuple[int, int], tuple[Program, Program]] | None = None,
) -> Program:
    """A jaxpr, open or closed, with other primitives, also in the programs inside of its equations.

    Args:
        program: the jaxpr.
        instead: for each primitive to be replaced the new one, or a function that gives the new equation or None.
        in_loops: the same for the bodies of loops. None: as outside.
        done: the programs that are made already. One object stays one in all its places.
    """
    in_loops = instead if in_loops is None else in_loops
    done = {} if done is None else done
    key = id(program), id(instead)
    if key not in done:
        if hasattr(program, "jaxpr") and program.jaxpr is not program:
            new = program.replace(jaxpr=replace_primitives(program.jaxpr, instead, in_loops, done))
        else:
            new = program.replace(eqns=[_replace_equation(eqn, instead, in_loops, done) for eqn in program.eqns])
        done[key] = (new, program)  # which keeps the identity its own
    return done[key][0]


def _replace_equation(
    eqn: JaxprEqn, instead: Replacements, in_loops: Replacements, done: dict[tuple[int, int], tuple[Program, Program]]
) -> JaxprEqn:
    new = instead.get(eqn.primitive)
    if isinstance(new, Primitive):
        return eqn.replace(primitive=new)
    if new is not None and (replaced := new(eqn)) is not None:
        return replaced
    inside = in_loops if eqn.primitive.name in _LOOPS else instead
    return with_programs(eqn, lambda program: replace_primitives(program, inside, in_loops, done))


def with_programs(eqn: JaxprEqn, new: Callable[[Program], Program]) -> JaxprEqn:
    """An equation with new programs inside, where XLA compiles these as it does the program around them."""
    if eqn.primitive.name not in _WITH_PROGRAMS:
        return eqn

    def parameter(value: Any) -> Any:
        if type(value) is tuple:  # branches, or shardings and the like
            return tuple(map(parameter, value))
        # Open and closed jaxprs, which are two classes in older versions of jax.
        return new(value) if hasattr(value, "eqns") else value

    return eqn.replace(params={name: parameter(value) for name, value in eqn.params.items()})


def _transposes(of_lax: Callable[..., Any], bind: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The rules of transposition by the left and by the right operand."""

    def by_left(cotangent: jax.Array, lhs: Any, rhs: jax.Array, **params: Any) -> jax.Array:
        def transposed(cotangent: jax.Array, rhs: jax.Array) -> jax.Array:
            return jax.linear_transpose(lambda x: of_lax(x, rhs, **params), lhs.aval)(cotangent)[0]

        return bind(transposed, cotangent, rhs)

    def by_right(cotangent: jax.Array, lhs: jax.Array, rhs: Any, **params: Any) -> jax.Array:
        def transposed(cotangent: jax.Array, lhs: jax.Array) -> jax.Array:
            return jax.linear_transpose(lambda x: of_lax(lhs, x, **params), rhs.aval)(cotangent)[0]

        return bind(transposed, cotangent, lhs)

    return by_left, by_right


def _lower_on_cpu(formula: Callable[..., Any], ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
    function = partial(formula, place=place_of(ctx), **params)
    (result,) = ctx.avals_out
    if AxisType.Explicit in result.sharding.mesh.axis_types:  # the formulas reshape and sum over what is split
        function = auto_axes(function, out_sharding=result.sharding)
    return mlir.lower_fun(function, multiple_results=False)(ctx, *operands)


def place_of(ctx: mlir.LoweringRuleContext) -> Place:
    """Where the program is that a rule of lowering is for. Inside of pmap and of a whole shard_map XLA splits none."""
    context = ctx.module_context
    axes, is_exported = context.axis_context, context.lowering_parameters.for_export
    if isinstance(axes, mlir.ShardingContext):
        return Place(axes.num_devices != 1, axes.num_devices != 1, is_exported=is_exported)
    if isinstance(axes, mlir.SPMDAxisContext):
        is_partitioned = axes.manual_axes != frozenset(axes.mesh.axis_names)
        return Place(is_partitioned, axes.mesh.size != 1, is_exported=is_exported)
    return Place(False, axes.axis_env.nreps != 1, is_exported=is_exported)
