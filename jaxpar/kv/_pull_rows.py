"""Read some rows of a table out of a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import jax

from .._core import checks
from .._core.arrays import Device, is_traced
from .._core.text import plural
from .._devices.placement import to_host
from ..sparse import RowSparse, take
from ._pull import pull_whole
from ._store import KVStore


@overload
def row_sparse_pull(store: KVStore, key: int, row_ids: Any, *, devices: None = None) -> RowSparse: ...


@overload
def row_sparse_pull(store: KVStore, key: int, row_ids: Any, *, devices: Sequence[Device]) -> list[RowSparse]: ...


@overload
def row_sparse_pull(store: KVStore, key: Sequence[int], row_ids: Any, *, devices: None = None) -> list[RowSparse]: ...


@overload
def row_sparse_pull(
    store: KVStore, key: Sequence[int], row_ids: Any, *, devices: Sequence[Device]
) -> list[list[RowSparse]]: ...


def row_sparse_pull(
    store: KVStore, key: int | Sequence[int], row_ids: Any, *, devices: Sequence[Device] | None = None
) -> Any:
    """Some rows of a stored value.

    Args:
        store: any store.
        key: an int, or a list of ints, of values with at least one axis.
        row_ids: (m,) integers, for all devices. Or a list of them, of any lengths, with one for each of `devices`. For
            a list of keys, an array for all keys, or a list with one such entry for each key.
        devices: where to put the rows, as in `pull`.

    Returns:
        A `RowSparse` of the unique, sorted rows. With `devices` a list of them. For a list of keys, a list of those.

    Raises:
        KeyError: a key that was never initialised.
        ValueError: ids that are negative or out of range, as of `jaxpar.sparse.take`. Or as many lists of ids as there
            are neither keys nor devices.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxpar import kv
        >>> store = kv.init(kv.create(), 0, jnp.arange(8.0).reshape(4, 2))
        >>> kv.row_sparse_pull(store, 0, jnp.array([3, 0, 3])).indices.tolist()
        [0, 3]
        >>> pulled = kv.row_sparse_pull(store, 0, [[0, 1], [2, 2]], devices=jax.devices()[:2])
        >>> [rows.indices.tolist() for rows in pulled]
        [[0, 1], [2]]
    """
    keys, many = checks.as_keys(key)
    checks.known(keys, store.values, "kv.row_sparse_pull")
    wanted = _ids_of_keys(keys, many, row_ids, devices)
    values = [to_host(value) for value in pull_whole(store, keys, None)]
    pulled = [_rows(value, ids, devices) for value, ids in zip(values, wanted, strict=True)]
    return pulled if many else pulled[0]


def _ids_of_keys(keys: list[int], many: bool, row_ids: Any, devices: Sequence[Device] | None) -> list[list[Any]]:
    """For each key the ids of each device, or one entry for all of them."""
    given = row_ids if many and _is_list_of_arrays(row_ids) else [row_ids] * len(keys)
    checks.as_values(keys, given, True, "kv.row_sparse_pull")
    return [_ids_of_devices(key, ids, devices) for key, ids in zip(keys, given, strict=True)]


def _ids_of_devices(key: int, ids: Any, devices: Sequence[Device] | None) -> list[Any]:
    """The ids of each device, or one entry for all of them.

    Raises:
        ValueError: a list of ids for each device, for another number of devices.
    """
    if not _is_list_of_arrays(ids):
        return [ids]
    if devices is None and len(ids) != 1:
        raise ValueError(
            f"kv.row_sparse_pull: key {key}: expected one array of ids, got {len(ids)} lists of them; give devices=, one "
            "for each list, or join them by numpy.concatenate"
        )
    if devices is not None and len(ids) not in (1, len(devices)):
        raise ValueError(
            f"kv.row_sparse_pull: key {key}: expected a list of ids for each of {plural(len(devices), 'device')}, got "
            f"{len(ids)} lists; give one for each, or one array for all"
        )
    return list(ids)


def _rows(value: jax.Array, wanted: list[Any], devices: Sequence[Device] | None) -> Any:
    """The rows on each device. Without devices one `RowSparse`, where the value is."""
    pulled = [take(value, ids) for ids in wanted]
    if devices is None:
        return pulled[0]
    each = pulled if len(pulled) == len(devices) else pulled * len(devices)
    return [rows if is_traced(rows) else jax.device_put(rows, d) for rows, d in zip(each, devices, strict=True)]


def _is_list_of_arrays(row_ids: Any) -> bool:
    return isinstance(row_ids, (list, tuple)) and any(
        hasattr(ids, "shape") and ids.shape or isinstance(ids, (list, tuple)) for ids in row_ids
    )
