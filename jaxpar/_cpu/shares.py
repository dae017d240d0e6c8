"""Operations of a program that XLA splits over a mesh, each device by itself with its share of the examples.

XLA does not split the call of a kernel, nor a formula that loops over the examples. So these operations become a
`shard_map` over the axes that split the examples. This comes after all derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Primitive
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from .problem import filter_gradient, has_formulas
from .recurrent import loop_p

Axis = int | None


def convolution(mesh: Mesh | AbstractMesh, axes: tuple[str, ...], own_p: Primitive, eqn: JaxprEqn) -> JaxprEqn:
    """The equation of a convolution, or of a filter's gradient, as one of each device's images. `own_p` computes it."""
    avals: list[Any] = [x.aval for x in eqn.invars]
    (lhs, rhs), params = avals, eqn.params
    eqn = eqn.replace(primitive=own_p)
    if not has_formulas(lhs, rhs, params):
        return eqn
    numbers = params["dimension_numbers"]
    if params["feature_group_count"] == 1 and filter_gradient(lhs, rhs, params) is not None:
        return _split(mesh, axes, eqn, [numbers.lhs_spec[1], numbers.rhs_spec[1]], [None])
    if params["batch_group_count"] != 1:
        return eqn
    return _split(mesh, axes, eqn, [numbers.lhs_spec[0], None], [numbers.out_spec[0]])


def loop(mesh: Mesh | AbstractMesh, axes: tuple[str, ...], eqn: JaxprEqn) -> JaxprEqn:
    """The equation of the loop of a cell, or of its transpose, as one of each device's examples."""
    of_operands = [1, None, *((0, 0) if eqn.params["cell"] == "lstm" else (None, 0))]
    count = len(of_operands)
    if eqn.primitive is loop_p:
        return _split(mesh, axes, eqn, of_operands, [1] * len(eqn.outvars))
    return _split(mesh, axes, eqn, of_operands + [1] * (len(eqn.invars) - count), of_operands)


def _split(
    mesh: Mesh | AbstractMesh,
    axes: tuple[str, ...],
    eqn: JaxprEqn,
    operand_axes: Sequence[Axis],
    result_axes: Sequence[Axis],
) -> JaxprEqn:
    """The equation over the shares of the devices. `operand_axes` and `result_axes` are those of the examples.

    An operand without such an axis is whole on each device. A result without one is summed over the devices.
    """
    avals: list[Any] = [x.aval for x in eqn.invars]
    if any(AxisType.Manual in aval.sharding.mesh.axis_types for aval in avals):  # in a `shard_map` of the loss
        return eqn
    if avals[0].shape[operand_axes[0]] % math.prod(mesh.shape[name] for name in axes):
        return eqn

    def of_share(*operands: jax.Array) -> list[jax.Array]:
        results = eqn.primitive.bind(*operands, **eqn.params)
        results = results if eqn.primitive.multiple_results else [results]
        return [lax.psum(y, axes) if axis is None else y for y, axis in zip(results, result_axes, strict=True)]

    def specs(of: Sequence[Axis]) -> list[PartitionSpec]:
        return [PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, axes) for axis in of]

    mapped = jax.shard_map(
        of_share, mesh=mesh, in_specs=tuple(specs(operand_axes)), out_specs=specs(result_axes), check_vma=False
    )
    (call,) = jax.make_jaxpr(mapped)(*avals).eqns
    return eqn.replace(primitive=call.primitive, params=call.params, effects=call.effects)
