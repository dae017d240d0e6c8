"""The type of row-sparse values, and what is done with them: take rows of a table, sum them, update by them.

A compiled program needs a fixed number of rows. So a `RowSparse` may have padding: rows whose index is the length of
the table. Reads give zeros for them and writes drop them. Read `RowSparse` and `_coalesce` first.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec, SingleDeviceSharding

from .._core import host
from .._core.arrays import PyTree, check_plain, is_of_numbers
from .._core.transfers import allows_transfers
from .._devices.user_mesh import is_split, unsplit

if TYPE_CHECKING:  # `_as_ids` and JAX say what is wrong with ids and axis names
    from collections.abc import Hashable

    from jax.typing import ArrayLike

    Ids = ArrayLike | Sequence[Any]  # integers of any shape


@dataclasses.dataclass(frozen=True, eq=False)
class RowSparse:
    """Some rows of a table. The other rows are zero.

    A pytree with the leaves `indices` and `values`. Rows with the same index are summed. `take`, `coalesce`, `add` and
    `allreduce` return sorted, unique indices.

    Args:
        indices: (m,) integers in [0, shape[0]), stored as int32. The index shape[0] marks padding.
        values: (m, *shape[1:]), the rows.
        shape: the shape of the table, with at least one axis.

    Raises:
        ValueError: shapes do not fit each other, or an index is out of range. Under `jit` only shapes are checked, and
            an index out of range is padding.

    Example:
        >>> from jaxpar import sparse
        >>> rows = RowSparse(np.array([2, 0]), jnp.array([[1.0, 2.0], [3.0, 4.0]]), (3, 2))
        >>> sparse.to_dense(rows).tolist()
        [[3.0, 4.0], [0.0, 0.0], [1.0, 2.0]]
    """

    indices: jax.Array
    values: jax.Array
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        shape = _check_table(self.shape, "RowSparse")
        indices, values = _as_ids(self.indices, "RowSparse: indices"), _as_array(self.values)
        if indices.ndim != 1:
            raise ValueError(f"RowSparse: indices must have one axis, got shape {indices.shape}")
        expected = (indices.shape[0], *shape[1:])
        if values.shape != expected:
            raise ValueError(
                f"RowSparse: {indices.shape[0]} rows of a table of shape {shape} need values of shape {expected}, got "
                f"{values.shape}"
            )
        _check_range(indices, shape[0], "RowSparse: row", last=shape[0])
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "indices", _as_array(indices).astype(jnp.int32))
        object.__setattr__(self, "values", values)

    __iter__ = None  # otherwise Python would iterate by __getitem__, forever

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the rows."""
        return self.values.dtype

    def __getitem__(self, ids: Ids) -> jax.Array:
        """Rows by their index in the table, zeros for absent rows.

        So a model that looks up `table[ids]` runs on pulled rows too.

        Args:
            ids: integers of any shape. The result has the shape (*shape of the ids, *shape[1:]).

        Raises:
            ValueError: indices that are not sorted and unique. Under `jit` this is not checked.

        Example:
            >>> from jaxpar import sparse
            >>> rows = sparse.take(jnp.arange(8.0).reshape(4, 2), [3, 1])
            >>> rows[jnp.array([3, 3, 1])].tolist()
            [[6.0, 7.0], [6.0, 7.0], [2.0, 3.0]]
            >>> rows[jnp.array([0, 3])].tolist()  # an id without a row gives zeros
            [[0.0, 0.0], [6.0, 7.0]]
        """
        ids = jnp.asarray(_as_ids(ids, "RowSparse: ids"), jnp.int32)
        if _is_known(self.indices):
            indices = np.asarray(self.indices)
            if (indices[1:] <= indices[:-1])[indices[1:] < self.shape[0]].any():
                raise ValueError("RowSparse: rows are looked up in sorted indices, each once; call coalesce first")
        if self.indices.shape[0] == 0:
            return jnp.zeros((*ids.shape, *self.shape[1:]), self.dtype)
        # The position of each id among the rows. An id without a row, or of padding, gets one beyond the end: zeros.
        position = jnp.searchsorted(self.indices, ids).astype(jnp.int32)
        is_present = self.indices.at[position].get(mode="clip") == ids
        position = jnp.where(is_present & (ids < self.shape[0]), position, self.indices.shape[0])
        return self.values.at[position].get(mode="fill", fill_value=0)


def _flatten(rows: RowSparse) -> tuple[tuple[tuple[Any, jax.Array], ...], tuple[int, ...]]:
    names = jax.tree_util.GetAttrKey("indices"), jax.tree_util.GetAttrKey("values")
    return tuple(zip(names, (rows.indices, rows.values), strict=True)), rows.shape


def _make_unchecked(shape: tuple[int, ...], leaves: Iterable[Any]) -> RowSparse:
    """A `RowSparse` without checks. Its leaves may have a further first axis, or be no arrays."""
    rows = object.__new__(RowSparse)
    for name, value in zip(("indices", "values", "shape"), (*leaves, shape), strict=True):
        object.__setattr__(rows, name, value)
    return rows


jax.tree_util.register_pytree_with_keys(RowSparse, _flatten, _make_unchecked)


@allows_transfers
def coalesce(rows: RowSparse, *, size: int | None = None) -> RowSparse:
    """The same table with sorted, unique indices. Sums repeated rows.

    Args:
        rows: m rows in any order.
        size: the number of rows of the result, including padding. Default: the number of distinct rows, or m under
            `jit`. Outside `jit`, `size=m` avoids a compilation for each batch.

    Raises:
        ValueError: there are more than `size` distinct rows. Under `jit` this is not checked, and the rows with the
            largest indices are lost, so give an upper bound.

    Example:
        >>> rows = RowSparse(np.array([2, 0, 2]), jnp.array([1.0, 2.0, 3.0]), (4,))
        >>> coalesce(rows).indices.tolist(), coalesce(rows).values.tolist()
        ([0, 2], [2.0, 4.0])
        >>> coalesce(rows, size=3).indices.tolist()
        [0, 2, 4]
    """
    return _coalesce(rows, _size(rows.indices, rows.shape[0], size, "coalesce"))


@functools.partial(jax.jit, static_argnames="size")
def _coalesce(rows: RowSparse, size: int) -> RowSparse:
    # Equal indices stand beside each other in the sorted order, and padding, the largest one, at the end. The sort is
    # stable, so the rows of one index are added in the order in which they came.
    count = rows.shape[0]
    indices = _padding_last(rows.indices, count)  # (m,)
    order = jnp.argsort(indices, stable=True)
    ordered = indices[order]
    is_first = jnp.concatenate([jnp.ones_like(ordered[:1], bool), ordered[1:] != ordered[:-1]])
    # The row of the result, 0 to size - 1, for each of the m rows. Padding goes beyond the end, where it is dropped.
    position = jnp.where(ordered < count, jnp.cumsum(is_first) - 1, size).astype(jnp.int32)
    values = jnp.zeros((size, *rows.shape[1:]), rows.dtype).at[position].add(rows.values[order], mode="drop")
    unique = jnp.full(size, count, jnp.int32).at[position].set(ordered, mode="drop")
    return _make_unchecked(rows.shape, (unique, values))


@allows_transfers
def to_dense(rows: RowSparse) -> jax.Array:
    """The dense table, of shape `rows.shape`. Absent rows are zeros.

    Example:
        >>> to_dense(RowSparse(np.array([2, 2]), jnp.array([1.0, 2.0]), (3,))).tolist()
        [0.0, 0.0, 3.0]
    """
    indices = _padding_last(rows.indices, rows.shape[0])
    return jnp.zeros(rows.shape, rows.dtype).at[indices].add(rows.values, mode="drop")


@allows_transfers
def from_dense(array: jax.Array, row_ids: Ids | None = None) -> RowSparse:
    """Rows of a table: the given rows, or all nonzero rows.

    Args:
        array: the table, at least one axis.
        row_ids: as for `take`. None takes all nonzero rows, whose number is unknown under `jit`: JAX raises there.

    Raises:
        ValueError: as for `take`.

    Example:
        >>> from_dense(jnp.array([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])).indices.tolist()
        [1]
    """
    if row_ids is not None:
        return take(array, row_ids)
    check_plain(array, "sparse.from_dense: array")
    array = _as_array(array)
    return take(array, np.flatnonzero(np.asarray((array != 0).any(tuple(range(1, array.ndim))))))


@allows_transfers
def take(array: jax.Array, row_ids: Ids, *, size: int | None = None) -> RowSparse:
    """Rows of a table, sorted and unique.

    Args:
        array: the table, at least one axis.
        row_ids: integers of any shape, in any order. They may repeat or be empty.
        size: the number of rows of the result, including padding. Default: the number of distinct ids, or of all ids
            under `jit`.

    Raises:
        ValueError: an id is negative or beyond the table, or `size` is too small. Under `jit` such an id becomes
            padding.

    Example:
        >>> rows = take(jnp.arange(8.0).reshape(4, 2), [3, 0, 3, 1])
        >>> rows.indices.tolist(), rows.values.tolist()
        ([0, 1, 3], [[0.0, 1.0], [2.0, 3.0], [6.0, 7.0]])
    """
    check_plain(array, "sparse.take: array")
    array = _as_array(array)
    count = _check_table(array.shape, "take")[0]
    ids = _as_ids(row_ids, "take: row ids").reshape(-1)
    _check_range(ids, count, "take: row", last=count - 1)
    size = _size(ids, count, size, "take")
    # Under `jit` nobody knows how many ids are distinct. So there are `size` rows, and the last ones may be padding.
    if _is_known(ids):
        unique = np.unique(np.asarray(ids))
        unique = np.append(unique, np.full(size - unique.size, count)).astype(np.int32)
        if not isinstance(array, Tracer):
            return _make_unchecked(array.shape, (jax.device_put(unique), _gather_now(array, unique)))
    else:
        unique = jnp.unique(_padding_last(jnp.asarray(ids, jnp.int32), count), size=size, fill_value=count)
    unique = jnp.asarray(unique, jnp.int32)
    return _make_unchecked(array.shape, (unique, _gather(array, unique)))


@allows_transfers
def add(rows: Sequence[RowSparse], *, size: int | None = None) -> RowSparse:
    """The sum of row-sparse values of one table, coalesced.

    Args:
        rows: a list of values of one table.
        size: the number of rows of the result, as for `coalesce`.

    Raises:
        ValueError: the list is empty, tables differ in shape, or `size` is too small.

    Example:
        >>> one = RowSparse(np.array([0, 2]), jnp.array([1.0, 1.0]), (3,))
        >>> total = add([one, RowSparse(np.array([2]), jnp.array([5.0]), (3,))])
        >>> total.indices.tolist(), total.values.tolist()
        ([0, 2], [1.0, 6.0])
    """
    shapes = sorted({term.shape for term in rows})
    if len(shapes) != 1:
        raise ValueError(f"add: expected row-sparse values of one shape, got shapes {shapes}")
    indices = jnp.concatenate([term.indices for term in rows])
    values = jnp.concatenate([unsplit(term.values) for term in rows])
    return coalesce(_make_unchecked(shapes[0], (indices, values)), size=size)


@allows_transfers
def allreduce(rows: RowSparse, axis_name: Hashable, *, size: int | None = None) -> RowSparse:
    """The sum over the devices of `pmap` or `shard_map`.

    Each device sends its indices and values, and no dense table is built. The result is equal on all devices.
    `shard_map` cannot infer that, so `out_specs=P()` needs `check_vma=False`.

    Args:
        rows: this device's m rows, with the same m on each device.
        axis_name: the mapped axis, or a tuple of axes.
        size: the number of rows of the result, including padding: an upper bound of the distinct rows on all devices.
            Default: m times the number of devices.

    Example:
        >>> def total(index, value):
        ...     return to_dense(allreduce(RowSparse(index, value, (3,)), "i"))
        >>> jax.vmap(total, axis_name="i")(jnp.array([[2], [0]]), jnp.ones((2, 1)))[0].tolist()
        [1.0, 0.0, 1.0]
    """
    indices = jax.lax.all_gather(rows.indices, axis_name, tiled=True)
    values = jax.lax.all_gather(rows.values, axis_name, tiled=True)
    return _coalesce(_make_unchecked(rows.shape, (indices, values)), indices.shape[0] if size is None else size)


@allows_transfers
def lazy_update(
    update: Callable[[jax.Array, PyTree, jax.Array], tuple[jax.Array, PyTree]],
    rows: RowSparse,
    state: PyTree,
    stored: jax.Array,
    *,
    coalesced: bool = False,
) -> tuple[jax.Array, PyTree]:
    """Apply an updater to the pushed rows only.

    Other rows of value and state do not change: they get no momentum and no weight decay, as with MXNet's
    `lazy_update`. Under `jit`, donate `stored` and `state`, in this order, so that XLA changes the table in place. (JAX
    pairs donated buffers with results of the same shape in order.) Outside `jit` the table is copied once.

    Args:
        update: `update(pushed_rows, state_rows, stored_rows) -> (new_rows, new_state_rows)`, such as
            `functools.partial(updater.update, key)`. It must treat all rows equally.
        rows: the pushed rows. Rows with the same index are summed first.
        state: the updater's state. Leaves with the shape of `stored` are passed row by row, other leaves (counts)
            whole.
        stored: the table.
        coalesced: whether `rows` come from `coalesce`, `add` or `allreduce`, so that they are sorted already.

    Returns:
        The updated (stored, state), with the same shapes and dtypes.

    Raises:
        ValueError: `rows` belong to a table of another shape, or the update changes the shape or structure of its
            arguments.

    Example:
        >>> rows = RowSparse(np.array([1]), jnp.array([5.0]), (3,))
        >>> def sgd(pushed, state, stored):
        ...     return stored - pushed, state
        >>> lazy_update(sgd, rows, (), jnp.ones(3))[0].tolist()
        [1.0, -4.0, 1.0]
    """
    if rows.shape != stored.shape:
        raise ValueError(f"lazy_update: rows of a table of shape {rows.shape}, stored value of {stored.shape}")
    rows = _with_values(rows, rows.values.astype(stored.dtype))
    if not coalesced:
        rows = _coalesce(rows, rows.indices.shape[0])

    def by_row(leaf: jax.Array) -> bool:
        return np.shape(leaf) == stored.shape

    def gather(leaf: jax.Array) -> jax.Array:
        return read(leaf, rows.indices) if by_row(leaf) else leaf

    def scatter(leaf: jax.Array, new: jax.Array) -> jax.Array:
        if by_row(leaf) and np.shape(new) != rows.values.shape:
            raise ValueError(f"lazy_update: the update got rows of {rows.values.shape}, gave {np.shape(new)}")
        return write(leaf, rows.indices, new) if by_row(leaf) else new

    new = update(rows.values, jax.tree.map(gather, state), gather(stored))
    # All reads come before all writes. A read after a scatter would cost a copy of the table.
    new_rows, new_state = jax.lax.optimization_barrier(new)
    return scatter(stored, new_rows), jax.tree.map(scatter, state, new_state)


def read(table: jax.Array, indices: jax.Array) -> jax.Array:
    """Rows of a table, zeros for padding."""
    return _gather(jnp.asarray(table), indices)


def write(table: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """The table with new rows, whose indices are sorted and unique."""
    # All different: each row of padding gets an index of its own beyond the table.
    count, m = table.shape[0], indices.shape[0]
    indices = jnp.where(indices < count, indices, count + np.arange(m, dtype=np.int32))
    # A table that is split over a user's mesh stays so.
    table = jnp.asarray(table)
    split = jax.typeof(table).sharding.spec if is_split(table) else None
    return table.at[indices].set(rows.astype(table.dtype), mode="drop", unique_indices=True, out_sharding=split)


def value_and_grad(loss_fn: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., tuple[Any, PyTree]]:
    """`jax.value_and_grad` for params whose leaves may be `RowSparse`.

    Args:
        loss_fn: `loss_fn(params, *args, **kwargs) -> loss`, or `(loss, aux)` with `has_aux`. It looks up rows by
            `params[...][ids]`.
        has_aux: as in JAX.

    Returns:
        `fn(params, *args, **kwargs) -> (loss, grads)`. The gradient of a `RowSparse` is a `RowSparse` with the same
        indices. It can be pushed to a store.

    Example:
        >>> rows = take(jnp.ones((1000, 2)), [7, 3])
        >>> loss, grads = value_and_grad(lambda rows, ids: (rows[ids] ** 2).sum())(rows, jnp.array([7, 3, 7]))
        >>> float(loss), grads.indices.tolist(), grads.values.tolist()
        (6.0, [3, 7], [[2.0, 2.0], [4.0, 4.0]])
    """

    def is_rows(leaf: object) -> TypeGuard[RowSparse]:
        return isinstance(leaf, RowSparse)

    def with_values(leaf: RowSparse | jax.Array, values: jax.Array) -> RowSparse | jax.Array:
        return _with_values(leaf, values) if is_rows(leaf) else values

    def run(params: PyTree, *args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
        # JAX differentiates by arrays, and the indices are integers. So it is given the rows in place of `RowSparse`s.
        def loss_of(values: PyTree) -> Any:
            return loss_fn(jax.tree.map(with_values, params, values, is_leaf=is_rows), *args, **kwargs)

        values = jax.tree.map(lambda leaf: leaf.values if is_rows(leaf) else leaf, params, is_leaf=is_rows)
        loss, grads = jax.value_and_grad(loss_of, has_aux=has_aux)(values)
        return loss, jax.tree.map(with_values, params, grads, is_leaf=is_rows)

    return run


# Rows and indices that several of these functions need.


def _with_values(rows: RowSparse, values: jax.Array) -> RowSparse:
    return _make_unchecked(rows.shape, (rows.indices, values))


def _as_array(array: object) -> jax.Array:
    """A jax array. NumPy arrays are copied, since their memory may change later."""
    check_plain(array, "RowSparse")
    if isinstance(array, np.ndarray) and is_of_numbers(array):
        array = host.in_kept_dtype(array, "RowSparse: an array")
    return array if isinstance(array, jax.Array) else jnp.array(array)


def _is_known(array: object) -> bool:
    """Whether this process can read every value."""
    if isinstance(array, Tracer):
        return False
    return not isinstance(array, jax.Array) or array.is_fully_addressable


def _check_table(shape: Iterable[SupportsIndex], what: str) -> tuple[int, ...]:
    """The shape of a table as Python ints."""
    sizes = tuple(map(operator.index, shape))
    # Indices are int32, and those of padding are beyond the table, up to its length plus the number of rows: `write`.
    if not sizes or not 0 <= sizes[0] < 2**30:
        raise ValueError(f"{what}: a table must have a first axis of fewer than 2**30 rows, got shape {sizes}")
    return sizes


def _as_ids(ids: Ids, what: str) -> np.ndarray | jax.Array:
    """`ids` as an array of integers of NumPy or JAX. Those of MXNet are whole floating numbers."""
    check_plain(ids, what)
    ids = ids if isinstance(ids, jax.Array) else np.asarray(ids)
    if jnp.issubdtype(ids.dtype, jnp.floating) and _is_known(ids):
        host = np.asarray(ids, np.float64)
        # Beyond 2**62 a cast to int64 could wrap around to a row that is there.
        if not (wrong := host[~(host == np.rint(host)) | (abs(host) >= 2.0**62)]).size:
            return host.astype(np.int64)
        raise TypeError(f"{what} must be integers, got {wrong[0]}")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{what} must be integers, got dtype {ids.dtype}")
    return ids


def _size(ids: np.ndarray | jax.Array, count: int, size: int | None, what: str) -> int:
    """How many rows a result has: `size`, or the number of different ids where it is known."""
    distinct = ids.size
    if _is_known(ids):
        host = np.asarray(ids)
        distinct = np.unique(host[(host >= 0) & (host < count)]).size  # without padding
        if size is not None and distinct > size:
            raise ValueError(f"{what}: size {size} is too small for {distinct} different rows")
    return distinct if size is None else size


def _check_range(ids: np.ndarray | jax.Array, count: int, what: str, *, last: int) -> None:
    """`ValueError` for an id that is negative or above `last`. Nothing is checked under `jit`."""
    if not _is_known(ids):
        return
    host = np.asarray(ids)
    wrong = host[(host < 0) | (host > last)]
    if wrong.size:
        raise ValueError(f"{what} {wrong[0]} is not in the table, whose rows are 0 to {count - 1}")


def _padding_last(indices: jax.Array, count: int) -> jax.Array:
    """The indices with `count` for those out of range. JAX would count a negative one from the end."""
    return jnp.where((indices < 0) | (indices > count), count, indices)


def _gather_now(table: jax.Array, indices: np.ndarray) -> jax.Array:
    """As `_gather`, at the prompt. The indices are sorted and not negative."""
    # Ids of a batch have another number of different ones each time, and each number would be another program. NumPy
    # needs none, and reads the memory of a CPU without a copy.
    if is_on_cpu(table):
        rows = np.zeros((indices.size, *table.shape[1:]), table.dtype)
        count = int(np.searchsorted(indices, table.shape[0]))  # what follows is padding
        rows[:count] = np.asarray(table)[indices[:count]]
        return jax.device_put(rows, table.sharding if table.committed else None)
    return _gather_program(table, indices)


def is_on_cpu(array: jax.Array) -> bool:
    """Whether an array is on one CPU device of this process."""
    return isinstance(array.sharding, SingleDeviceSharding) and next(iter(array.devices())).platform == "cpu"


@jax.jit
def _gather_program(table: jax.Array, indices: jax.Array) -> jax.Array:
    return _gather(table, indices)


def padded(rows: RowSparse) -> RowSparse:
    """The rows, with padding up to a power of two: programs for few numbers of rows take pushes of any number."""
    count = rows.indices.shape[0]
    more = (1 << max(0, count - 1).bit_length()) - count
    if count == 0 or more == 0:
        return rows
    # By NumPy a CPU needs no program for this either.
    xp: Any = np if is_on_cpu(rows.indices) and is_on_cpu(rows.values) else jnp
    indices = xp.append(xp.asarray(rows.indices), xp.full(more, rows.shape[0], np.int32))
    zeros = xp.zeros((more, *rows.shape[1:]), rows.values.dtype)
    return _make_unchecked(rows.shape, (indices, xp.concatenate([xp.asarray(rows.values), zeros])))


def _gather(table: jax.Array, indices: jax.Array) -> jax.Array:
    """Rows of a table, zeros beyond it. They are whole, also where the table is split over a user's mesh."""
    replicated = PartitionSpec() if is_split(table) else None
    return table.at[indices].get(mode="fill", fill_value=0, out_sharding=replicated)
