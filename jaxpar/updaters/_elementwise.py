"""Whether a jaxpr is elementwise in a value, and whether two of them are the same program for two shapes of it.

`read` describes a jaxpr without the shape of the value. Two readings are equal if the jaxprs are the same equations in
the same order, with equal constants and parameters. The rule:

- An equation that depends on the value must be one of `ELEMENTWISE`.
- Its operands are numbers for each element of the value, or scalars. A broadcast scalar counts as the scalar.
- A `cond` may choose between elementwise programs by a scalar that does not depend on the value.
- Calls such as `jit` and `custom_jvp` are read as what they call.
- An equation that does not depend on the value may be any. Its own shapes are then part of the reading.

Reductions, matrix products, reshapes, sorts, gathers and loops over the value break the rule.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal  # pyright: ignore[reportPrivateImportUsage]  # jax 0.12: an alias

from .._core.arrays import is_traced

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
_INNER = ("jaxpr", "call_jaxpr")
_SILENT = ("debug_callback", "debug_print")  # they return nothing
_MOST_COMPARED = 1 << 20  # elements. Larger constants are equal if they are the same array
_NO_ARITHMETIC = ("sharding", "name", "out_sharding")


class Extent(enum.IntEnum):
    """What an intermediate result is: a scalar (broadcast or not), another array, one number for each element."""

    SCALAR = 0
    ARRAY = 1
    ELEMENTS = 2


@dataclasses.dataclass(frozen=True)
class _Result:
    name: Any  # equal in two programs if the result is computed in the same way
    extent: Extent


class NotElementwise(Exception):
    """The message names the equation that breaks the rule."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """A jaxpr without the shape of the value.

    Attributes:
        lines: the equations. The first entry of each is the name of its primitive.
        results: the names of what the jaxpr returns.
    """

    lines: list[Any]
    results: list[Any]


def read(closed: ClosedJaxpr, extents: Sequence[Extent]) -> Reading:
    """The reading of a jaxpr.

    Args:
        closed: the jaxpr.
        extents: of its arguments. Those with elements may belong to several values of different shapes.

    Raises:
        NotElementwise: an equation breaks the rule.

    Example:
        >>> import jax.numpy as jnp
        >>> def forms(f):
        ...     return [read(jax.make_jaxpr(f)(jnp.ones(s)), [Extent.ELEMENTS]) for s in ((4, 4), (8,))]
        >>> whole, share = forms(lambda x: x * jnp.ones_like(x) + 2)
        >>> whole == share
        True
        >>> whole, share = forms(lambda x: x / x.size)
        >>> whole == share
        False
    """
    reader = _Reader()
    given = [_Result(("argument", i), extent) for i, extent in enumerate(extents)]
    results = reader.read(closed.jaxpr, closed.consts, given)
    return Reading(reader.lines, [r.name for r in results])


class _Reader:
    """Describes a jaxpr in lines that do not name the shape of the value."""

    def __init__(self):
        self.lines: list[Any] = []
        self.count = 0

    def read(self, jaxpr: Jaxpr, consts: Sequence[Any], given: Sequence[_Result]) -> list[_Result]:
        """The results of the program, whose equations are added to the lines."""
        known = dict(zip(jaxpr.constvars, map(_constant, consts), strict=True))
        known |= zip(jaxpr.invars, given, strict=True)

        def result(atom: Any) -> _Result:
            return _constant(atom.val) if isinstance(atom, Literal) else known[atom]

        for eqn in jaxpr.eqns:
            known |= zip(eqn.outvars, self._equation(eqn, [result(atom) for atom in eqn.invars]), strict=True)
        return [result(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: Any, given: list[_Result]) -> list[_Result]:
        name = eqn.primitive.name
        if name in CALLS:
            inner = next(eqn.params[p] for p in _INNER if p in eqn.params)
            return self.read(*((inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())), given)
        if name in _SILENT:
            return []
        if name == "broadcast_in_dim" and given[0].extent == Extent.SCALAR and not eqn.invars[0].aval.shape:
            return given
        if name == "cond":
            return self._cond(eqn, given)
        extent = max((g.extent for g in given), default=Extent.SCALAR)
        if extent == Extent.ELEMENTS:
            self._check(eqn, given)
        extents, shapes = [extent] * len(eqn.outvars), ()
        if name not in ELEMENTWISE or extent == Extent.ARRAY:
            extents = [Extent.ARRAY if v.aval.shape else Extent.SCALAR for v in eqn.outvars]
            shapes = tuple(str(v.aval) for v in (*eqn.invars, *eqn.outvars))
        self.lines.append((name, _parameters(eqn), [g.name for g in given], shapes))
        return self._results(extents)

    def _check(self, eqn: Any, given: list[_Result]) -> None:
        name = eqn.primitive.name
        if name not in ELEMENTWISE:
            raise NotElementwise(f"{name!r} combines elements of the value")
        if any(g.extent == Extent.ARRAY for g in given):
            raise NotElementwise(f"{name!r} takes an array that is not made of the value")
        shapes = {v.aval.shape for v, g in zip(eqn.invars, given, strict=True) if g.extent == Extent.ELEMENTS}
        if {v.aval.shape for v in eqn.outvars} != shapes:
            raise NotElementwise(f"{name!r} changes the shape of the value")

    def _cond(self, eqn: Any, given: list[_Result]) -> list[_Result]:
        """Each branch is read by itself. A result is what it may be in any of them."""
        index, *operands = given
        if index.extent == Extent.ELEMENTS:
            raise NotElementwise("'cond' looks at the value")
        lines, branches, found = self.lines, [], []
        for branch in eqn.params["branches"]:
            self.lines = []
            results = self.read(branch.jaxpr, branch.consts, operands)
            branches.append((self.lines, [r.name for r in results]))
            found.append([r.extent for r in results])
        self.lines = lines
        mixed = [set(extents) for extents in zip(*found, strict=True)]
        if any({Extent.ARRAY, Extent.ELEMENTS} <= extents for extents in mixed):
            raise NotElementwise("'cond' chooses between the value and an array that is not made of it")
        self.lines.append(("cond", index.name, branches))
        return self._results([max(extents) for extents in mixed])

    def _results(self, extents: Sequence[Extent]) -> list[_Result]:
        self.count += 1
        return [_Result(("line", self.count, i), extent) for i, extent in enumerate(extents)]


def _constant(value: Any) -> _Result:
    shape = np.shape(value)
    if is_traced(value) or not getattr(value, "is_fully_addressable", True) or np.size(value) > _MOST_COMPARED:
        return _Result(("array", id(value)), Extent.ARRAY if shape else Extent.SCALAR)
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    name = ("constant", str(array.dtype), shape, np.asarray(array).tobytes())
    return _Result(name, Extent.ARRAY if shape else Extent.SCALAR)


def _parameters(eqn: Any) -> list[tuple[str, Any]]:
    return [(name, _parameter(value)) for name, value in sorted(eqn.params.items()) if name not in _NO_ARITHMETIC]


def _parameter(value: Any) -> Any:
    if isinstance(value, ClosedJaxpr):
        return str(value.jaxpr), [_constant(c).name for c in value.consts]
    if isinstance(value, (tuple, list)):
        return [_parameter(v) for v in value]
    return _constant(value).name if isinstance(value, (np.ndarray, jax.Array)) else repr(value)
