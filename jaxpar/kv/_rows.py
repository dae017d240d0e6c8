"""Rows of a table: a push that stays sparse, over processes too, and a pull of some rows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, overload

import jax
from jax.sharding import PartitionSpec as P

from .. import sparse, updaters
from .._core import checks
from .._core.arrays import Device, is_tracing
from .._core.calls import answers
from .._core.checks import Key, Keys, find_keys
from .._core.recent import Recent
from .._core.text import plural
from .._devices import emulated, processes
from .._devices.mesh import STORE_AXIS, assemble, mesh_of, put, split_over, to_host
from .._devices.user_mesh import in_user_mesh_now, split_like
from .._store import aggregate, store as stores
from .._store.store import Changes, KVStore
from ..mxnet import _STORE_ARGUMENTS as MXNET_ARGUMENTS
from ..sparse import RowSparse
from ..updaters import Updater, assign
from ._pull import RETURNED, pull_whole


def push(store: KVStore, pushed: dict[int, list[RowSparse]], axis_name: str | None, across: bool) -> Changes:
    """What a push of rows changes, `across` all processes or in this one. It makes no residuals."""
    # With the default updater the rows replace the whole value, as in MXNet: the other rows become 0. Any other updater
    # sees the rows that are pushed, of the stored value and of its own state. Some of MXNet's optimizers update the
    # whole table instead, as MXNet does.
    refused = {
        "values of this store are split over a mesh and take no RowSparse; make the store of this table without mesh= "
        "and sharding=": stores.is_on_mesh(store),
        f"a store of kind {store.kind!r} cuts values across their rows and takes no RowSparse; use kind 'device' or "
        "'local' for this table": stores.is_split(store),
        "gradient compression does not take a RowSparse, as in MXNet; keep this table in a separate store without "
        "compression, or push dense values": store.compressor is not None,
        f"a RowSparse names other rows with each push, so a store of staleness {store.staleness} cannot delay it; push "
        "dense values, or use kind 'dist_sync' for this table": store.staleness,
    }
    for reason, holds in refused.items():
        if holds:
            raise ValueError(f"kv.push: keys {sorted(pushed)}: {reason}")
    for key in pushed:
        try:
            updaters._check_rows(store.updater, key)
        except ValueError as error:
            raise ValueError(f"kv.push: key {key}: {error}") from None
    changes = Changes({}, {})
    for key, rows in pushed.items():
        stored, state = store.values[key], store.updater_state[key]
        run = functools.partial(_add_and_update, store.updater)
        if not is_tracing():
            rows = [_sum_over_processes(rows, stored.dtype)] if across else rows
            rows = put(rows, stored.sharding)
            run = _compiled(store.updater) if isinstance(store.updater, Updater) else run
        changes.values[key], changes.updater_state[key] = run(key, axis_name, rows, state, stored)
    return changes


def _add_and_update(
    updater: Any, key: int, axis_name: str | None, rows: list[RowSparse], state: Any, stored: jax.Array
) -> tuple[jax.Array, Any]:
    total = sparse.add(_cast(rows, stored.dtype), size=sum(r.indices.shape[0] for r in rows))
    if axis_name is not None:
        total = sparse.allreduce(total, axis_name)
    if updater == assign:
        return split_like(sparse.to_dense(total), stored), state
    update = functools.partial(aggregate.update_one, updater, key)
    if not updaters._is_lazy(updater, state):
        return update(sparse.to_dense(total), state, stored)
    return sparse.lazy_update(update, total, state, stored, coalesced=True)


_compiled = Recent(lambda updater: jax.jit(functools.partial(_add_and_update, updater), static_argnums=(0, 1)))


def _cast(rows: list[RowSparse], dtype: Any) -> list[RowSparse]:
    return [RowSparse(r.indices, r.values.astype(dtype), r.shape) for r in rows]


def _sum_over_processes(rows: list[RowSparse], dtype: Any) -> RowSparse:
    """The sum of the rows that all processes push, unique and sorted, in every process."""
    leaders = processes.leaders()
    own = jax.device_put(_cast(rows, dtype), leaders[jax.process_index()])
    most = max(map(int, processes.exchange(str(sum(r.indices.shape[0] for r in own)))))
    mine = sparse.add(own, size=1 << (most - 1).bit_length() if most else 1)  # few sizes, so few programs
    ours = [assemble([leaf], split_over(leaders)) for leaf in (mine.indices, mine.values)]
    indices, values = emulated.run_by_itself(_sum_program(leaders, mine.shape), *ours)
    return RowSparse(indices.addressable_data(0), values.addressable_data(0), mine.shape)


@functools.lru_cache(maxsize=64)
def _sum_program(devices: Any, shape: tuple[int, ...]) -> Any:
    def body(indices: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = sparse.allreduce(RowSparse(indices, values, shape), STORE_AXIS)
        return total.indices, total.values

    mesh, along = mesh_of(devices), P(STORE_AXIS)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(along, along), out_specs=P(), check_vma=False))


@overload
def row_sparse_pull(store: KVStore, key: Key, row_ids: Any, *, devices: None = None) -> RowSparse: ...
@overload
def row_sparse_pull(store: KVStore, key: Key, row_ids: Any, *, devices: Sequence[Device]) -> list[RowSparse]: ...
@overload
def row_sparse_pull(store: KVStore, key: Keys, row_ids: Any, *, devices: None = None) -> list[RowSparse]: ...
@overload
def row_sparse_pull(store: KVStore, key: Keys, row_ids: Any, *, devices: Sequence[Device]) -> list[list[RowSparse]]: ...
@answers("kv.row_sparse_pull", MXNET_ARGUMENTS, RETURNED)
@in_user_mesh_now
def row_sparse_pull(store: KVStore, key: Key | Keys, row_ids: Any, *, devices: Sequence[Device] | None = None) -> Any:
    """Some rows of a stored value.

    Args:
        store: any store.
        key: as in `pull`. The values must have at least one axis.
        row_ids: (m,) integers, for all devices; or a list of arrays, one for each of `devices`, of any lengths. For a
            list of keys, one array for all keys, or a list with one such entry for each key.
        devices: the devices that get the rows, as in `pull`.

    Returns:
        A `RowSparse` of the unique, sorted rows. With `devices`, a list with one for each device. For a list of keys, a
        list of these results.

    Raises:
        KeyError, TypeError, RuntimeError: as for `pull`.
        ValueError: an id is negative or out of range, as for `jaxpar.sparse.take`; or the number of lists of ids fits
            neither the keys nor the devices.

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
    keys, many = find_keys(key, "kv.row_sparse_pull", store)
    given = row_ids if many and _is_list_of_arrays(row_ids) else [row_ids] * len(keys)
    checks.as_values(keys, given, True, "kv.row_sparse_pull", "row_ids")
    count = 1 if devices is None else len(devices)
    wanted = [list(ids) if _is_list_of_arrays(ids) else [ids] for ids in given]
    for k, ids in zip(keys, wanted, strict=True):
        if len(ids) not in (1, count):
            where = "no devices=" if devices is None else plural(count, "device")
            raise ValueError(
                f"kv.row_sparse_pull: key {k}: expected one array of ids, or one for each device, got {len(ids)} lists "
                f"of ids and {where}"
            )
    pulled = list[Any]()
    for value, ids in zip(map(to_host, pull_whole(store, keys, None)), wanted, strict=True):
        rows = [sparse.take(value, i) for i in ids]
        if devices is None:
            pulled.append(rows[0])
            continue
        rows = rows if len(rows) == count else rows * count
        pulled.append([r if is_tracing() else jax.device_put(r, d) for r, d in zip(rows, devices, strict=True)])
    return pulled if many else pulled[0]


def _is_list_of_arrays(row_ids: Any) -> bool:
    return isinstance(row_ids, (list, tuple)) and any(
        (hasattr(ids, "shape") and ids.shape) or isinstance(ids, (list, tuple)) for ids in row_ids
    )
