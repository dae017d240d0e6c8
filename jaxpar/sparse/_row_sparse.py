"""The type of row-sparse values, and the checks of indices that its functions share."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._core.arrays import check_plain
from .._core.calls import answers_class


@answers_class("sparse.RowSparse")
@dataclasses.dataclass(frozen=True, eq=False)
class RowSparse:
    """Some rows of a table. The other rows are zero.

    A pytree with the leaves `indices` and `values`. An index may appear twice. Its rows are summed. `take`,
    `coalesce`, `add` and `allreduce` return sorted, unique indices.

    Args:
        indices: (m,) integers in [0, shape[0]), stored as int32. shape[0] itself marks padding.
        values: (m, *shape[1:]), the rows.
        shape: of the table, at least one axis.

    Raises:
        TypeError: indices are no integers.
        ValueError: shapes that do not fit each other, or an index out of range. Under `jit` only shapes are
            known, and an index out of range is padding.

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
        shape = check_table(self.shape, "RowSparse")
        indices, values = as_ids(self.indices, "RowSparse: indices"), _own(self.values)
        if indices.ndim != 1:
            raise ValueError(f"RowSparse: indices must have one axis, got shape {indices.shape}")
        expected = (indices.shape[0], *shape[1:])
        if values.shape != expected:
            raise ValueError(
                f"RowSparse: {indices.shape[0]} rows of a table of shape {shape} need values of shape "
                f"{expected}, got {values.shape}"
            )
        check_range(indices, shape[0], "RowSparse: row", last=shape[0])
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "indices", _own(indices).astype(jnp.int32))
        object.__setattr__(self, "values", values)

    __iter__ = None  # otherwise Python would iterate by __getitem__, forever

    @property
    def dtype(self) -> Any:
        """The dtype of the rows."""
        return self.values.dtype

    def __getitem__(self, ids: Any) -> jax.Array:
        """Rows by their index in the table, zeros for absent rows.

        So a model that looks up `table[ids]` runs on pulled rows too.

        Args:
            ids: integers of any shape.

        Returns:
            An array (*shape of the ids, *shape[1:]).

        Raises:
            TypeError: ids that are no integers.
            ValueError: indices that are not sorted and unique, as `take` and `coalesce` return them. Under `jit` this
                is not checked.

        Example:
            >>> from jaxpar import sparse
            >>> rows = sparse.take(jnp.arange(8.0).reshape(4, 2), [3, 1])
            >>> rows[jnp.array([3, 3, 1])].tolist()
            [[6.0, 7.0], [6.0, 7.0], [2.0, 3.0]]
        """
        ids = jnp.asarray(as_ids(ids, "RowSparse: ids"), jnp.int32)
        check_sorted(self)
        if self.indices.shape[0] == 0:
            return jnp.zeros((*ids.shape, *self.shape[1:]), self.dtype)
        place = jnp.searchsorted(self.indices, ids).astype(jnp.int32)
        there = self.indices.at[place].get(mode="clip") == ids
        place = jnp.where(there & (ids < self.shape[0]), place, self.indices.shape[0])
        return self.values.at[place].get(mode="fill", fill_value=0)


def _flatten(rows: RowSparse) -> tuple[tuple[tuple[Any, Any], ...], tuple[int, ...]]:
    names = jax.tree_util.GetAttrKey("indices"), jax.tree_util.GetAttrKey("values")
    return tuple(zip(names, (rows.indices, rows.values), strict=True)), rows.shape


def make_unchecked(shape: tuple[int, ...], leaves: Iterable[Any]) -> RowSparse:
    """A `RowSparse` without checks. Its leaves may have a further first axis, or be no arrays."""
    rows = object.__new__(RowSparse)
    for name, value in zip(("indices", "values", "shape"), (*leaves, shape), strict=True):
        object.__setattr__(rows, name, value)
    return rows


jax.tree_util.register_pytree_with_keys(RowSparse, _flatten, make_unchecked)


def with_values(rows: RowSparse, values: Any) -> RowSparse:
    """The same rows with other values."""
    return make_unchecked(rows.shape, (rows.indices, values))


def _own(array: Any) -> jax.Array:
    """A jax array. NumPy arrays are copied, since their memory may change later."""
    check_plain(array, "RowSparse")
    return array if isinstance(array, jax.Array) else jnp.array(array)


def is_known(array: Any) -> bool:
    """Whether this process can read every value."""
    if isinstance(array, Tracer):
        return False
    return not isinstance(array, jax.Array) or array.is_fully_addressable


def check_table(shape: Iterable[Any], what: str) -> tuple[int, ...]:
    """The shape of a table as Python ints.

    Raises:
        ValueError: no first axis, or too many rows for int32 indices and padding.
    """
    shape = tuple(map(operator.index, shape))
    if not shape or not 0 <= shape[0] < 2**30:
        raise ValueError(f"{what}: a table must have a first axis of fewer than 2**30 rows, got shape {shape}")
    return shape


def as_ids(ids: Any, what: str) -> np.ndarray | jax.Array:
    """`ids` as an array of integers of NumPy or JAX. Those of MXNet are whole floating numbers.

    Raises:
        TypeError: they are no integers, or floating and traced.
    """
    check_plain(ids, what)
    ids = ids if isinstance(ids, jax.Array) else np.asarray(ids)
    if ids.size == 0 and not isinstance(ids, jax.Array):
        ids = ids.astype(np.int32)
    if jnp.issubdtype(ids.dtype, jnp.floating) and is_known(ids):
        host = np.asarray(ids, np.float64)
        if not (wrong := host[~(host == np.rint(host)) | (abs(host) >= 2.0**62)]).size:
            return host.astype(np.int64)
        raise TypeError(f"{what} must be integers, got {wrong[0]}")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{what} must be integers, got dtype {ids.dtype}")
    return ids


def check_range(ids: Any, count: int, what: str, *, last: int) -> None:
    """`ValueError` for an id that is negative or above `last`. Nothing is checked under `jit`."""
    if not is_known(ids):
        return
    host = np.asarray(ids)
    wrong = host[(host < 0) | (host > last)]
    if wrong.size:
        raise ValueError(f"{what} {wrong[0]} is not in the table, whose rows are 0 to {count - 1}")


def check_sorted(rows: RowSparse) -> None:
    """`ValueError` for indices that are not sorted and unique. Nothing is checked under `jit`."""
    if is_known(rows.indices):
        held = np.asarray(rows.indices)
        if (held[1:] <= held[:-1])[held[1:] < rows.shape[0]].any():
            raise ValueError("RowSparse: rows are looked up in sorted indices, each once; call coalesce first")


def distinct_rows(rows: RowSparse) -> np.ndarray:
    """The sorted, unique indices, without padding."""
    held = np.asarray(rows.indices)
    return np.unique(held[(held >= 0) & (held < rows.shape[0])])


def padding_last(indices: jax.Array, count: int) -> jax.Array:
    """The indices with `count` for those out of range. JAX would count a negative one from the end."""
    return jnp.where((indices < 0) | (indices > count), count, indices)


def check_row_sparse(rows: Any, where: str) -> RowSparse:
    """`rows`. `TypeError` for what is no `RowSparse`."""
    if not isinstance(rows, RowSparse):
        given = f"{type(rows).__name__}; sparse.from_dense makes one of a table"
        raise TypeError(f"{where}: expected a RowSparse(indices, values, shape), got a {given}")
    return rows


def unique_indices(rows: RowSparse) -> jax.Array:
    """Indices that are all different: each row of padding gets one of its own beyond the table."""
    count, m = rows.shape[0], rows.indices.shape[0]
    return jnp.where(rows.indices < count, rows.indices, count + np.arange(m, dtype=np.int32))


def pad_indices(unique: np.ndarray, size: int | None, count: int) -> np.ndarray:
    """The indices, padded to `size` of them."""
    if size is None:
        return unique
    if unique.size > size:
        raise ValueError(f"take: size {size} is too small for {unique.size} different rows")
    return np.concatenate([unique, np.full(size - unique.size, count, unique.dtype)])
