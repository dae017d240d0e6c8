"""Functions of row-sparse values and of tables: take rows, sum them, update by them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .._core.arrays import check_plain
from .._core.calls import answers
from .._devices.user_mesh import is_split, unsplit
from ._row_sparse import (
    RowSparse,
    as_ids,
    check_range,
    check_row_sparse,
    check_table,
    distinct_rows,
    is_known,
    make_unchecked,
    pad_indices,
    padding_last,
    unique_indices,
    with_values,
)


@answers("coalesce")
def coalesce(rows: RowSparse, *, size: int | None = None) -> RowSparse:
    """The same table with sorted, unique indices. Values of one index are summed.

    Args:
        rows: m rows in any order.
        size: how many rows the result has, padding included. Default: the number of different ones, or m under
            `jit`. Give m in a notebook too, to have one compiled program for every batch.

    Raises:
        ValueError: there are more different rows than `size`. Under `jit` this cannot be checked, and the rows of
            the largest indices are lost, so give an upper bound.

    Example:
        >>> rows = RowSparse(np.array([2, 0, 2]), jnp.array([1.0, 2.0, 3.0]), (4,))
        >>> coalesce(rows).indices.tolist(), coalesce(rows).values.tolist()
        ([0, 2], [2.0, 4.0])
        >>> coalesce(rows, size=3).indices.tolist()
        [0, 2, 4]
    """
    distinct = distinct_rows(rows).size if is_known(rows.indices) else None
    if size is None:
        size = rows.indices.shape[0] if distinct is None else distinct
    elif distinct is not None and distinct > size:
        raise ValueError(f"coalesce: size {size} is too small for {distinct} different rows")
    return _coalesce(rows, size)


@functools.partial(jax.jit, static_argnames="size")
def _coalesce(rows: RowSparse, size: int) -> RowSparse:
    count = rows.shape[0]
    indices = padding_last(rows.indices, count)
    order = jnp.argsort(indices, stable=True)
    ordered = indices[order]
    new = jnp.concatenate([jnp.ones_like(ordered[:1], bool), ordered[1:] != ordered[:-1]])
    place = jnp.where(ordered < count, jnp.cumsum(new) - 1, size).astype(jnp.int32)
    values = jnp.zeros((size, *rows.shape[1:]), rows.dtype).at[place].add(rows.values[order], mode="drop")
    return make_unchecked(rows.shape, (jnp.full(size, count, jnp.int32).at[place].set(ordered, mode="drop"), values))


@answers("to_dense")
def to_dense(rows: RowSparse) -> jax.Array:
    """The whole table, of shape `rows.shape`. Rows of one index are summed, absent rows are zeros.

    Example:
        >>> to_dense(RowSparse(np.array([2, 2]), jnp.array([1.0, 2.0]), (3,))).tolist()
        [0.0, 0.0, 3.0]
    """
    indices = padding_last(check_row_sparse(rows, "to_dense").indices, rows.shape[0])
    return jnp.zeros(rows.shape, rows.dtype).at[indices].add(rows.values, mode="drop")


@answers("from_dense")
def from_dense(array: jax.Array, row_ids: Any = None) -> RowSparse:
    """Rows of a table: the given ones, or all that are not zero.

    Args:
        array: the table, at least one axis.
        row_ids: as for `take`. None takes the rows that are not zero, which is impossible under `jit`.

    Raises:
        TypeError, ValueError: as of `take`, or no `row_ids` under `jit`.

    Example:
        >>> from_dense(jnp.array([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])).indices.tolist()
        [1]
    """
    if row_ids is not None:
        return take(array, row_ids)
    check_plain(array, "sparse.from_dense: array")
    array = jnp.asarray(array)
    if not is_known(array):
        raise ValueError("from_dense: which rows are not zero is unknown under jit; give row_ids")
    return take(array, np.flatnonzero(np.asarray((array != 0).any(tuple(range(1, array.ndim))))))


@answers("take")
def take(array: jax.Array, row_ids: Any, *, size: int | None = None) -> RowSparse:
    """Rows of a table, sorted and unique.

    Args:
        array: the table, at least one axis.
        row_ids: integers of any shape, in any order, repeated or not. There may be none.
        size: how many rows the result has, padding included. Default: the number of different ids, or of all ids
            under `jit`.

    Raises:
        TypeError: ids that are no integers.
        ValueError: an id that is negative or beyond the table, or a `size` that is too small. Under `jit` such an id
            becomes padding.

    Example:
        >>> rows = take(jnp.arange(8.0).reshape(4, 2), [3, 0, 3, 1])
        >>> rows.indices.tolist(), rows.values.tolist()
        ([0, 1, 3], [[0.0, 1.0], [2.0, 3.0], [6.0, 7.0]])
    """
    check_plain(array, "sparse.take: array")
    array = jnp.asarray(array)
    count = check_table(array.shape, "take")[0]
    ids = as_ids(row_ids, "take: row ids").reshape(-1)
    check_range(ids, count, "take: row", last=count - 1)
    if is_known(ids):
        unique = pad_indices(np.unique(np.asarray(ids)), size, count)
    else:
        ids = padding_last(jnp.asarray(ids, jnp.int32), count)
        unique = jnp.unique(ids, size=ids.size if size is None else size, fill_value=count)
    unique = jnp.asarray(unique, jnp.int32)
    return make_unchecked(array.shape, (unique, _gather(array, unique)))


@answers("add")
def add(rows: Sequence[RowSparse], *, size: int | None = None) -> RowSparse:
    """The sum of row-sparse values of one table, coalesced.

    Args:
        rows: values of one table.
        size: how many rows the result has, as for `coalesce`.

    Raises:
        ValueError: an empty list, tables of different shapes, or a `size` that is too small.

    Example:
        >>> one = RowSparse(np.array([0, 2]), jnp.array([1.0, 1.0]), (3,))
        >>> total = add([one, RowSparse(np.array([2]), jnp.array([5.0]), (3,))])
        >>> total.indices.tolist(), total.values.tolist()
        ([0, 2], [1.0, 6.0])
    """
    shapes = sorted({check_row_sparse(one, "add").shape for one in rows})
    if len(shapes) != 1:
        raise ValueError(f"add: expected row-sparse values of one shape, got shapes {shapes}")
    indices = jnp.concatenate([one.indices for one in rows])
    values = jnp.concatenate([unsplit(one.values) for one in rows])
    return coalesce(make_unchecked(shapes[0], (indices, values)), size=size)


@answers("sparse.allreduce")
def allreduce(rows: RowSparse, axis_name: Any, *, size: int | None = None) -> RowSparse:
    """The sum over the devices of `pmap` or `shard_map`, equal on each.

    Each device sends its indices and values. The table is never built. `shard_map` cannot infer that the result is
    equal on all devices, so `out_specs=P()` needs `check_vma=False`.

    Args:
        rows: this device's m rows, the same m on each device.
        axis_name: the mapped axis, or a tuple of them.
        size: rows of the result, padding included: an upper bound of the different rows on all devices.
            Default: m times the number of devices.

    Example:
        >>> def total(index, value):
        ...     return to_dense(allreduce(RowSparse(index, value, (3,)), "i"))
        >>> jax.vmap(total, axis_name="i")(jnp.array([[2], [0]]), jnp.ones((2, 1)))[0].tolist()
        [1.0, 0.0, 1.0]
    """
    indices = jax.lax.all_gather(rows.indices, axis_name, tiled=True)
    values = jax.lax.all_gather(rows.values, axis_name, tiled=True)
    return _coalesce(make_unchecked(rows.shape, (indices, values)), indices.shape[0] if size is None else size)


@answers("lazy_update")
def lazy_update(
    update: Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, Any]],
    rows: RowSparse,
    state: Any,
    stored: jax.Array,
    *,
    coalesced: bool = False,
) -> tuple[jax.Array, Any]:
    """Apply an updater to the pushed rows only. Other rows of value and state do not change.

    So an absent row has no momentum and no weight decay, as with MXNet's `lazy_update`. Under `jit`, donate `stored`
    and `state`, in this order, to have the table changed in place. (JAX pairs donated buffers with results of the same
    shape in turn, and this is the order of the results.) Outside of `jit` the table is copied once.

    Args:
        update: `update(pushed_rows, state_rows, stored_rows) -> (new_rows, new_state_rows)`, such as
            `functools.partial(updater.update, key)`. It must treat all rows alike.
        rows: what was pushed. Rows of one index are summed first.
        state: the updater's state. Leaves of the shape of `stored` are passed by rows, others (counts) whole.
        stored: the table.
        coalesced: whether `rows` come from `coalesce`, `add` or `allreduce`, and need no second sort.

    Returns:
        (stored, state), updated, of the same shapes and dtypes.

    Raises:
        ValueError: `rows` are of another table, or the update changes the shape or structure of its arguments.

    Example:
        >>> rows = RowSparse(np.array([1]), jnp.array([5.0]), (3,))
        >>> def sgd(pushed, state, stored):
        ...     return stored - pushed, state
        >>> lazy_update(sgd, rows, (), jnp.ones(3))[0].tolist()
        [1.0, -4.0, 1.0]
    """
    if rows.shape != stored.shape:
        raise ValueError(f"lazy_update: rows of a table of shape {rows.shape}, stored value of {stored.shape}")
    rows = with_values(rows, rows.values.astype(stored.dtype))
    if not coalesced:
        rows = _coalesce(rows, rows.indices.shape[0])
    indices = unique_indices(rows)

    def by_row(leaf: Any) -> bool:
        return np.shape(leaf) == stored.shape

    def gather(leaf: Any) -> Any:
        return _gather(jnp.asarray(leaf), indices) if by_row(leaf) else leaf

    def scatter(leaf: Any, new: Any) -> Any:
        if by_row(leaf) and np.shape(new) != rows.values.shape:
            raise ValueError(f"lazy_update: the update got rows of {rows.values.shape}, gave {np.shape(new)}")
        return _scatter(jnp.asarray(leaf), indices, new.astype(leaf.dtype)) if by_row(leaf) else new

    new = update(rows.values, jax.tree.map(gather, state), gather(stored))
    # All reads come before all writes. A read after a scatter would cost a copy of the table.
    new_rows, new_state = jax.lax.optimization_barrier(new)
    return scatter(stored, new_rows), jax.tree.map(scatter, state, new_state)


@answers("sparse.value_and_grad")
def value_and_grad(loss_fn: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., tuple[Any, Any]]:
    """`jax.value_and_grad` by a first argument whose leaves may be `RowSparse`.

    Args:
        loss_fn: `loss_fn(params, *args, **kwargs) -> loss`, or `(loss, aux)` with `has_aux`. It looks rows up
            by `params[...][ids]`.
        has_aux: as in JAX.

    Returns:
        `fn(params, *args, **kwargs) -> (loss, grads)`. A `RowSparse` in `params` is one in `grads`, with the
        same indices and the gradient of its rows. It can be pushed to a store.

    Example:
        >>> rows = take(jnp.ones((1000, 2)), [7, 3])
        >>> loss, grads = value_and_grad(lambda rows, ids: (rows[ids] ** 2).sum())(rows, jnp.array([7, 3, 7]))
        >>> float(loss), grads.indices.tolist(), grads.values.tolist()
        (6.0, [3, 7], [[2.0, 2.0], [4.0, 4.0]])
    """

    def is_rows(leaf: Any) -> bool:
        return isinstance(leaf, RowSparse)

    def merge(leaf: Any, values: Any) -> Any:
        return with_values(leaf, values) if is_rows(leaf) else values

    def run(params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(params, is_leaf=is_rows)

        def loss_of(values: list[Any]) -> Any:
            return loss_fn(jax.tree.unflatten(tree, list(map(merge, leaves, values))), *args, **kwargs)

        values = [leaf.values if is_rows(leaf) else leaf for leaf in leaves]
        loss, grads = jax.value_and_grad(loss_of, has_aux=has_aux)(values)
        return loss, jax.tree.unflatten(tree, list(map(merge, leaves, grads)))

    return run


def _gather(table: jax.Array, indices: jax.Array) -> jax.Array:
    """Rows of a table, zeros beyond it. They are whole, also where the table is split over a user's mesh."""
    whole = PartitionSpec() if is_split(table) else None
    return table.at[indices].get(mode="fill", fill_value=0, out_sharding=whole)


def _scatter(table: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """The table with other rows, split over a user's mesh as it was. The indices are all different."""
    split = jax.typeof(table).sharding.spec if is_split(table) else None
    return table.at[indices].set(rows, mode="drop", unique_indices=True, out_sharding=split)
