"""The gradient of a table, as the rows that a loss looks up.

JAX makes the gradient of `table[ids]` as a sum of the size of the table: zeros, to which the gradients of the rows are
added. `value_and_grad` traces that program, and evaluates it with such sums kept as their terms. All else is computed
as it stands, so the rows are those of the dense gradient, whatever the loss does before and after it looks them up.
Where the gradient of a table is anything else than such a sum, the loss does not only look up rows, and that is an
error.

A table may be a `Shards`, of which each device has a part. Then a lookup sends ids and rows between the devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, Literal  # pyright: ignore[reportPrivateImportUsage]  # jax 0.12: an alias
from jax.typing import DTypeLike

from ... import sparse
from ..._core.arrays import PyTree
from ..._devices import collectives
from ..._store import aggregate
from ...sparse import RowSparse

_CALLS = frozenset("jit pjit closed_call core_call remat remat2 checkpoint".split())


@dataclasses.dataclass(frozen=True)
class Shards:
    """A table that is flat and cut into one chunk for each device, inside of the mapped axis."""

    chunk: jax.Array
    shape: tuple[int, ...]
    axis_name: str

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.chunk.dtype

    def dense(self) -> jax.Array:
        return collectives.from_rows(lax.all_gather(self.chunk, self.axis_name), self.shape)

    def astype(self, dtype: DTypeLike) -> Shards:
        return dataclasses.replace(self, chunk=self.chunk.astype(dtype))

    def take(self, ids: jax.Array) -> jax.Array:
        """The rows of these ids (m,), all of them in the table. Devices send ids and rows."""
        # Each device gives the elements that it has of the rows of all devices, and zeros, and gets the sum of its own.
        of_all = lax.all_gather(ids, self.axis_name, tiled=True)  # (devices * m,)
        elements = sparse._read(self.chunk, aggregate.own_elements(of_all, self.shape, self.axis_name))
        rows = collectives.scatter_sum(elements.reshape(lax.axis_size(self.axis_name), -1), self.axis_name)
        return rows.reshape(ids.size, *self.shape[1:])


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
    loss_fn: Callable[[list[jax.Array]], tuple[jax.Array, PyTree]],
    params: Sequence[jax.Array | Shards],
    tables: Mapping[int, str],
) -> tuple[tuple[jax.Array, PyTree], list[Any]]:
    """`jax.value_and_grad(loss_fn, has_aux=True)(params)` with a `RowSparse` for the gradient of each table.

    Its rows are in the order of the lookups, and may repeat. Ids out of range are padding. The gradient of a table of
    which the loss looks up no row is None.

    Args:
        loss_fn: `loss_fn(params) -> (loss, aux)`.
        params: the arrays. A table may be a `Shards`.
        tables: the name of each table by its position in `params`.

    Raises:
        ValueError: the loss does more with a table than to look up rows.

    Example:
        >>> def loss_fn(params):
        ...     return (params[0][jnp.array([2, 0, 2])] @ params[1]).sum(), ()
        >>> _, (rows, dense) = value_and_grad(loss_fn, [jnp.ones((1000, 2)), jnp.ones(2)], {0: "table"})
        >>> rows.indices.tolist(), rows.values.shape, dense.tolist()
        ([2, 0, 2], (3, 2), [3.0, 3.0])
    """
    # Traced with whole tables, as the loss is written, and evaluated with what a device has of them.
    specs = [jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, Shards) else x for x in params]
    closed, shapes = jax.make_jaxpr(jax.value_and_grad(loss_fn, has_aux=True), return_shape=True)(specs)
    results = _evaluate(closed.jaxpr, closed.consts, params, {params[i].shape for i in tables})
    first = len(results) - len(params)  # of the gradients, which come last
    for i, name in tables.items():
        total = results[first + i]
        if not isinstance(total, _Sum):
            result = closed.jaxpr.outvars[first + i]
            makers = [eqn.primitive.name for eqn in closed.jaxpr.eqns if result in eqn.outvars] or ["the loss"]
            raise ValueError(
                f"train step: row_sparse={name!r}: the gradient is not of looked-up rows alone, but comes from "
                f"{makers[0]!r}; look rows up by params[{name!r}][ids] or jnp.take(..., axis=0), "
                "outside of loops and branches, and use the table for nothing else, or leave it out of row_sparse="
            )
        ids, rows = zip(*total.terms, strict=True) if total.terms else ((), ())
        results[first + i] = RowSparse(jnp.concatenate(ids), jnp.concatenate(rows), total.shape) if ids else None
    # A result that is a constant comes as a number of Python or NumPy, which has no dtype of its own.
    leaves, structure = jax.tree.flatten(shapes)
    arrays = [
        x if x is None or isinstance(x, RowSparse) else jnp.asarray(_dense(x), leaf.dtype)
        for x, leaf in zip(results, leaves, strict=True)
    ]
    value, _ = structure.unflatten([*arrays[:first], *specs])
    return value, arrays[first:]


def _evaluate(jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Any], shapes: Set[tuple[int, ...]]) -> list[Any]:
    """The results of a program. Sums of rows of these shapes stay a `_Sum` as long as that is possible.

    A `Shards` among the arguments stays one.
    """
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    eqns: list[Any] = jaxpr.eqns  # JAX gives their avals no type that has a shape
    for eqn in eqns:
        operands = list(map(read, eqn.invars))
        # What is of a table has its shape. Another array may have it by chance: it becomes dense where it is used.
        is_of_table = any(v.aval.shape in shapes for v in (*eqn.invars, *eqn.outvars) if hasattr(v.aval, "shape"))
        results = _of_table(eqn, operands, shapes) if is_of_table else None
        if results is None:
            # An equation of arrays, as a program of one equation: that keeps the names of the scopes that it is in.
            arrays = {v: _dense(x) for v, x in zip(eqn.invars, operands, strict=True) if not isinstance(v, Literal)}
            program = jaxpr.replace(constvars=[*arrays], invars=[], outvars=eqn.outvars, eqns=[eqn])
            results = jax.core.eval_jaxpr(program, [*arrays.values()])
        env |= zip(eqn.outvars, results, strict=True)
    return list(map(read, jaxpr.outvars))


def _of_table(eqn: Any, operands: list[Any], shapes: Set[tuple[int, ...]]) -> list[Any] | None:
    """The results of an equation that takes or makes a `_Sum` or a `Shards`. None: it takes and makes arrays."""
    name: str = eqn.primitive.name
    first: Any = operands[0] if operands else None
    # Zeros, to which the backward pass of a lookup adds the gradients of its rows.
    if name == "broadcast_in_dim" and isinstance(eqn.invars[0], Literal) and not first:
        return [_Sum(eqn.outvars[0].aval.shape, eqn.outvars[0].aval.dtype)]
    if name == "convert_element_type" and isinstance(first, Shards):
        return [first.astype(eqn.params["new_dtype"])]
    if name == "gather" and isinstance(first, Shards):
        taken = _rows_taken(eqn, first, operands[1])
        return None if taken is None else [taken]
    if name == "convert_element_type" and isinstance(first, _Sum):
        dtype = eqn.params["new_dtype"]
        return [_Sum(first.shape, dtype, tuple((ids, rows.astype(dtype)) for ids, rows in first.terms))]
    # Two lookups of one table: both sums in one.
    if name == "add_any" and all(isinstance(x, _Sum) for x in operands):
        return [_Sum(first.shape, first.dtype, first.terms + operands[1].terms)]
    if name == "scatter-add" and isinstance(first, _Sum):
        term = _rows_added(eqn, first, *(_dense(x) for x in operands[1:]))
        return term and [_Sum(first.shape, first.dtype, (*first.terms, term))]
    # A function inside of the loss may hold the lookup.
    if name in _CALLS:
        inner: Any = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if eqn.params.get("prevent_cse"):
            # Or XLA would find that what is computed again was computed before. A table is not computed.
            computed = [np.shape(x) not in shapes if hasattr(x, "dtype") else False for x in operands]
            operands = [lax.optimization_barrier(x) if c else x for x, c in zip(operands, computed, strict=True)]
        return _evaluate(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), operands, shapes)
    return None


def _rows_added(eqn: Any, table: _Sum, indices: jax.Array, updates: jax.Array) -> tuple[jax.Array, jax.Array] | None:
    """The ids and the rows that a scatter adds to a table. None where it adds anything else than whole rows."""
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    window = numbers.update_window_dims
    sizes = [updates.shape[axis] for axis in window]
    ids = _ids(
        indices,
        table.shape,
        mode,
        sizes,
        numbers.inserted_window_dims,
        numbers.scatter_dims_to_operand_dims,
        numbers.operand_batching_dims,
    )
    if ids is None:
        return None
    # (ids..., rows...), in whichever order the scatter has its axes.
    of_ids = [axis for axis in range(updates.ndim) if axis not in window]
    return ids.reshape(-1), updates.transpose(*of_ids, *window).reshape(-1, *table.shape[1:])


def _rows_taken(eqn: Any, table: Shards, indices: jax.Array) -> jax.Array | None:
    """What a gather takes of a table. None where it takes anything else than whole rows."""
    numbers, mode, fill = (eqn.params[name] for name in ("dimension_numbers", "mode", "fill_value"))
    sizes = [n for axis, n in enumerate(eqn.params["slice_sizes"]) if axis not in numbers.collapsed_slice_dims]
    count, takes_whole_rows = table.shape[0], eqn.params["slice_sizes"] == (1, *table.shape[1:])
    ids = _ids(
        indices,
        table.shape,
        mode,
        sizes,
        numbers.collapsed_slice_dims,
        numbers.start_index_map,
        numbers.operand_batching_dims,
    )
    if ids is None or not takes_whole_rows:
        return None
    # Beyond the table JAX fills in NaN, or another value, if it was asked to, and else takes the first or the last row.
    is_within = ids < count
    if mode != lax.GatherScatterMode.FILL_OR_DROP:
        ids = jnp.clip(_row_numbers(indices, numbers.start_index_map), 0, count - 1).astype(jnp.int32)
    rows = table.take(jnp.clip(ids, 0, count - 1).reshape(-1))
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        rows = jnp.where(is_within.reshape(-1, *[1] * (rows.ndim - 1)), rows, jnp.nan if fill is None else fill)
    rows = rows.astype(table.dtype).reshape(*ids.shape, *sizes)
    return jnp.moveaxis(rows, range(ids.ndim, rows.ndim), numbers.offset_dims)


def _row_numbers(indices: jax.Array, of_axes: tuple[int, ...]) -> jax.Array:
    # At least int32: the length of a table, which stands for ids beyond it, may not fit into the int8 of its ids.
    ids = indices[..., of_axes.index(0)]
    return ids.astype(jnp.promote_types(ids.dtype, jnp.int32))


def _ids(
    indices: jax.Array,
    shape: tuple[int, ...],
    mode: lax.GatherScatterMode,
    window: Sequence[int],
    left_out: tuple[int, ...],
    of_axes: tuple[int, ...],
    batching: tuple[int, ...],
) -> jax.Array | None:
    """The ids of a gather or a scatter, int32, with the length of the table for those beyond it.

    None where it is not of whole rows. `window`: what there is of each axis of the table but those that are `left_out`.
    """
    count, one_row = shape[0], [1, *shape[1:]][len(left_out) :]
    # Where a row begins in the other axes is clipped to 0, the one place where there is room for it.
    is_at_start = of_axes == (0,) or mode == lax.GatherScatterMode.CLIP
    if left_out not in ((), (0,)) or list(window) != one_row or 0 not in of_axes or not is_at_start or batching:
        return None
    ids = _row_numbers(indices, of_axes)
    if mode == lax.GatherScatterMode.CLIP:
        ids = jnp.clip(ids, 0, count - 1)
    return jnp.where((ids >= 0) & (ids < count), ids, count).astype(jnp.int32)


def _dense(x: Any) -> Any:
    return x.dense() if isinstance(x, _Sum | Shards) else x
