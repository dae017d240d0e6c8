"""How the jaxpr of an update is walked, and what its results depend on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal  # pyright: ignore[reportPrivateImportUsage]  # jax 0.12: an alias
from jax.typing import ArrayLike

from .._core.arrays import PyTree
from .._devices.user_mesh import outside_mesh

Eqn = Any  # a `JaxprEqn`: JAX gives its avals no type that has a shape
Marks = np.ndarray[Any, np.dtype[np.bool_]]  # for each element of an array whether it depends on something

# An operation of a new jax that is not in these lists counts as one that mixes elements: then an optimizer is refused
# that could be taken, and no number is wrong.
_NAMES = (
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil "
    "clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 "
    "expm1 floor ge gt igamma igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max "
    "min mul mulhi ne neg nextafter not one_minus_square optimization_barrier or polygamma population_count pow real "
    "reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta"
)
ELEMENTWISE = frozenset(_NAMES.split())
_CALL_NAMES = "jit pjit closed_call core_call custom_jvp_call custom_vjp_call remat remat2 checkpoint"
CALLS = frozenset(_CALL_NAMES.split())
_MOVES = frozenset({"broadcast_in_dim", "concatenate", "reshape", "rev", "slice", "split", "squeeze", "transpose"})

T = TypeVar("T")


def interpret(
    jaxpr: Jaxpr,
    consts: Sequence[T],
    arguments: Sequence[T],
    constant: Callable[[ArrayLike], T],
    equation: Callable[[Eqn, list[T]], list[T]],
) -> list[T]:
    """What `equation` and `constant` make of the results of a program, from its constants and arguments."""
    env: dict[Any, T] = dict(zip(jaxpr.constvars, consts, strict=True))  # by variable
    env |= zip(jaxpr.invars, arguments, strict=True)

    def read_atom(atom: Any) -> T:
        return constant(atom.val) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        env |= zip(eqn.outvars, equation(eqn, list(map(read_atom, eqn.invars))), strict=True)
    return list(map(read_atom, jaxpr.outvars))


def programs(eqn: Eqn) -> Iterator[tuple[Jaxpr, Sequence[ArrayLike]]]:
    """The programs inside an equation, with their constants: of a call, a loop, branches."""
    for _, value in sorted(eqn.params.items()):
        for inner in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(inner, (ClosedJaxpr, Jaxpr)):
                yield (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())


def dependence(fn: Callable[..., PyTree], *args: PyTree) -> Callable[..., PyTree]:
    """A function from marks of the elements of `args` to marks of the results that depend on a marked element.

    `fn` is traced for arguments of these shapes. Nothing is computed. A result is marked too often where an operation
    is neither elementwise nor a move of elements: all that it gives then depends on all that it takes.
    """
    with outside_mesh():
        closed, out = jax.make_jaxpr(fn, return_shape=True)(*args)

    def marked(*marks: PyTree) -> PyTree:
        return jax.tree.unflatten(jax.tree.structure(out), _dependence(closed.jaxpr, jax.tree.leaves(marks)))

    return marked


def _dependence(jaxpr: Jaxpr, marks: Sequence[Marks]) -> list[Marks]:
    def equation(eqn: Eqn, operands: list[Marks]) -> list[Marks]:
        # From what is known most exactly to what is known least: of an operation that is not listed here, such as a
        # matrix product or a loop, everything depends on everything.
        name, shapes = eqn.primitive.name, [v.aval.shape for v in eqn.outvars]
        if not any(operand.any() for operand in operands):
            return list(map(_unmarked, shapes))
        if name in CALLS:
            inner, _ = next(programs(eqn))
            return _dependence(inner, operands)
        if name == "cond" and not operands[0].any():
            branches = [_dependence(branch.jaxpr, operands[1:]) for branch in eqn.params["branches"]]
            return [functools.reduce(np.logical_or, of_result) for of_result in zip(*branches, strict=True)]
        if name == "optimization_barrier":
            return operands
        if name in ELEMENTWISE:
            return [functools.reduce(np.logical_or, operands, _unmarked(shapes[0]))]
        if name in _MOVES:  # marks move as the elements do, so the operation itself moves them
            with outside_mesh(), jax.ensure_compile_time_eval():
                moved = eqn.primitive.bind(*map(jnp.asarray, operands), **eqn.params)
            return list(map(np.asarray, moved if eqn.primitive.multiple_results else [moved]))
        return [np.ones(shape, bool) for shape in shapes]

    constants: list[Any] = jaxpr.constvars  # JAX gives their avals no type that has a shape
    unmarked = [_unmarked(v.aval.shape) for v in constants]
    return interpret(jaxpr, unmarked, marks, lambda value: _unmarked(np.shape(value)), equation)


def _unmarked(shape: tuple[int, ...]) -> Marks:
    return np.zeros(shape, bool)
