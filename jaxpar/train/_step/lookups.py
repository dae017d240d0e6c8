"""The gradient of a table, as the rows that a loss looks up.

JAX makes the gradient of `table[ids]` as a sum of the size of the table: zeros, to which the gradients of the rows are
added. `value_and_grad` traces that program, and evaluates it with such sums kept as their terms. All else is computed
as it stands, so the rows are those of the dense gradient, whatever the loss does before and after it looks them up.
Where the gradient of a table is anything else than such a sum, the loss does not only look up rows, and that is an
error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, Literal  # pyright: ignore[reportPrivateImportUsage]  # jax 0.12: an alias

from ..._core.arrays import PyTree
from ...sparse import RowSparse

_CALLS = frozenset("jit pjit closed_call core_call remat remat2 checkpoint".split())


@dataclasses.dataclass(frozen=True)
class _Sum:
    """An array of zeros, to which rows were added: for each time the ids (m,) and the rows (m, ...)."""

    shape: tuple[int, ...]
    dtype: Any
    terms: tuple[tuple[jax.Array, jax.Array], ...] = ()

    def dense(self) -> jax.Array:
        total = jnp.zeros(self.shape, self.dtype)
        for ids, rows in self.terms:
            total = total.at[ids].add(rows, mode="drop")
        return total


def value_and_grad(
    loss_fn: Callable[[list[jax.Array]], tuple[jax.Array, PyTree]], params: list[jax.Array], tables: Mapping[int, str]
) -> tuple[tuple[jax.Array, PyTree], list[Any]]:
    """`jax.value_and_grad(loss_fn, has_aux=True)(params)` with a `RowSparse` for the gradient of each table.

    Its rows are in the order of the lookups, and may repeat. Ids out of range are padding. The gradient of a table of
    which the loss looks up no row is None.

    Args:
        loss_fn: `loss_fn(params) -> (loss, aux)`.
        params: the arrays.
        tables: the name of each table by its position in `params`.

    Raises:
        ValueError: the loss does more with a table than to look up rows.

    Example:
        >>> def loss_fn(params):
        ...     return (params[0][jnp.array([2, 0, 2])] * params[1]).sum(), ()
        >>> _, (rows, dense) = value_and_grad(loss_fn, [jnp.ones((1000, 2)), jnp.ones(2)], {0: "table"})
        >>> rows.indices.tolist(), rows.values.shape, dense.tolist()
        ([2, 0, 2], (3, 2), [3.0, 3.0])
    """
    closed, shapes = jax.make_jaxpr(jax.value_and_grad(loss_fn, has_aux=True), return_shape=True)(params)
    results = _evaluate(closed.jaxpr, closed.consts, params, {params[i].shape for i in tables})
    first = len(results) - len(params)  # of the gradients, which come last
    for i, name in tables.items():
        total = results[first + i]
        if not isinstance(total, _Sum):
            raise ValueError(
                f"train step: row_sparse={name!r}: the gradient is not of looked-up rows alone, but comes from "
                f"{_maker(closed.jaxpr, first + i)!r}; look rows up by params[{name!r}][ids] or jnp.take(..., axis=0), "
                "outside of loops and branches, and use the table for nothing else, or leave it out of row_sparse="
            )
        ids, rows = zip(*total.terms, strict=True) if total.terms else ((), ())
        results[first + i] = RowSparse(jnp.concatenate(ids), jnp.concatenate(rows), total.shape) if ids else None
    # A result that is a constant comes as a number of Python or NumPy, which has no dtype of its own.
    leaves, structure = jax.tree.flatten(shapes)
    arrays = [
        x if x is None or isinstance(x, RowSparse) else jnp.asarray(x.dense() if isinstance(x, _Sum) else x, leaf.dtype)
        for x, leaf in zip(results, leaves, strict=True)
    ]
    value, _ = structure.unflatten([*arrays[:first], *params])
    return value, arrays[first:]


def _maker(jaxpr: Jaxpr, i: int) -> str:
    """The name of the operation whose result is result `i` of a program."""
    makers = [eqn.primitive.name for eqn in jaxpr.eqns if jaxpr.outvars[i] in eqn.outvars]
    return makers[0] if makers else "the loss"


def _evaluate(jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Any], shapes: Set[tuple[int, ...]]) -> list[Any]:
    """The results of a program. Sums of rows of these shapes stay a `_Sum` as long as that is possible."""
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands = list(map(read, eqn.invars))
        makes_sum = any(v.aval.shape in shapes for v in eqn.outvars if hasattr(v.aval, "shape"))
        results = _sums(eqn, operands, shapes) if makes_sum else None
        env |= zip(eqn.outvars, _arrays(eqn, operands) if results is None else results, strict=True)
    return list(map(read, jaxpr.outvars))


def _sums(eqn: Any, operands: list[Any], shapes: Set[tuple[int, ...]]) -> list[Any] | None:
    """The results of an equation, some of which are a `_Sum`. None: it has none."""
    name, first = eqn.primitive.name, operands[0] if operands else None
    if name == "broadcast_in_dim" and isinstance(eqn.invars[0], Literal) and not first:
        return [_Sum(eqn.outvars[0].aval.shape, eqn.outvars[0].aval.dtype)]
    if name == "convert_element_type" and isinstance(first, _Sum):
        dtype = eqn.params["new_dtype"]
        return [_Sum(first.shape, dtype, tuple((ids, rows.astype(dtype)) for ids, rows in first.terms))]
    if name == "add_any" and all(isinstance(x, _Sum) for x in operands):
        return [_Sum(first.shape, first.dtype, first.terms + operands[1].terms)]
    if name == "scatter-add" and isinstance(first, _Sum):
        term = _rows_added(eqn, first, *(_dense(x) for x in operands[1:]))
        return term and [_Sum(first.shape, first.dtype, (*first.terms, term))]
    if name in _CALLS:
        inner: Any = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if eqn.params.get("prevent_cse"):
            # Or XLA would find that what is computed again was computed before. A table is not computed.
            computed = [not isinstance(x, _Sum) and x.shape not in shapes for x in operands]
            operands = [lax.optimization_barrier(x) if c else x for x, c in zip(operands, computed, strict=True)]
        return _evaluate(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), operands, shapes)
    return None


def _rows_added(eqn: Any, table: _Sum, indices: jax.Array, updates: jax.Array) -> tuple[jax.Array, jax.Array] | None:
    """The ids and the rows that a scatter adds to a table. None where it adds anything else than whole rows."""
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    of_ids, window = numbers.scatter_dims_to_operand_dims, numbers.update_window_dims
    sizes = [updates.shape[axis] for axis in window]
    one_row = [1, *table.shape[1:]][len(numbers.inserted_window_dims) :]
    # Where a row begins in the other axes is clipped to 0, the one place where there is room for it.
    is_at_start = of_ids == (0,) or mode == lax.GatherScatterMode.CLIP
    if numbers.inserted_window_dims not in ((), (0,)) or sizes != one_row or 0 not in of_ids or not is_at_start:
        return None
    if numbers.operand_batching_dims:
        return None
    count = table.shape[0]
    ids = indices[..., of_ids.index(0)].reshape(-1)
    ids = ids.astype(jnp.promote_types(ids.dtype, jnp.int32))
    is_within = (ids >= 0) & (ids < count)
    ids = jnp.clip(ids, 0, count - 1) if mode == lax.GatherScatterMode.CLIP else jnp.where(is_within, ids, count)
    others = [axis for axis in range(updates.ndim) if axis not in window]
    rows = updates.transpose(*others, *window).reshape(-1, *table.shape[1:])
    return ids.astype(jnp.int32), rows


def _dense(x: Any) -> Any:
    return x.dense() if isinstance(x, _Sum) else x


def _arrays(eqn: Any, operands: list[Any]) -> list[Any]:
    """The results of an equation of arrays."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # jax 0.12 has functions among the params
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*functions, *map(_dense, operands), **params)
    return results if eqn.primitive.multiple_results else [results]
