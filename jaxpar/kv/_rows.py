"""A push of rows: a sum over devices that stays sparse, then an update of these rows only."""

from __future__ import annotations

import functools
from typing import Any

import jax

from .. import sparse
from .._core.arrays import is_traced
from .._core.recent import Recent
from .._devices.user_mesh import split_like
from ..sparse import RowSparse
from ..updaters import Updater, assign
from . import _aggregate, _update
from ._store import Changes, KVStore, layout_of


def push(store: KVStore, pushed: dict[int, list[RowSparse]], axis_name: str | None) -> Changes:
    """What a push of rows changes. It makes no residuals.

    With the default updater the rows replace the whole value, as in MXNet: the other rows become 0. Any other updater
    sees the rows that are pushed, of the stored value and of its own state.

    Raises:
        ValueError: values are split, or pushes are delayed.
    """
    if layout_of(store).is_split or store.shardings:
        raise ValueError(
            f"kv.push: keys {sorted(pushed)}: a store of kind {store.kind!r} cuts values across their rows and takes "
            "no RowSparse; use kind 'device' or 'local' for this table"
        )
    if store.staleness:
        raise ValueError(
            f"kv.push: keys {sorted(pushed)}: a RowSparse names other rows with each push, so a store "
            f"of staleness {store.staleness} cannot delay it; push dense values, or use kind 'dist_sync' for this table"
        )
    values: dict[int, jax.Array] = {}
    states: dict[int, Any] = {}
    for key, rows in pushed.items():
        stored, state = store.values[key], store.updater_state[key]
        if axis_name is not None:
            _aggregate.axis_size(axis_name, "kv.push")
        concrete = not is_traced((rows, stored, state))
        if concrete:
            rows = [jax.device_put(r, stored.sharding) for r in rows]
        compiled = concrete and isinstance(store.updater, Updater)
        run = _compiled(store.updater) if compiled else functools.partial(_add_and_update, store.updater)
        values[key], states[key] = run(key, axis_name, rows, state, stored)
    return Changes(values, states)


def _add_and_update(
    updater: Any, key: int, axis_name: str | None, rows: list[RowSparse], state: Any, stored: jax.Array
) -> tuple[jax.Array, Any]:
    rows = [RowSparse(r.indices, r.values.astype(stored.dtype), r.shape) for r in rows]
    total = sparse.add(rows, size=sum(r.indices.shape[0] for r in rows))
    if axis_name is not None:
        total = sparse.allreduce(total, axis_name)
    if updater == assign:
        return split_like(sparse.to_dense(total), stored), state

    def update(pushed: jax.Array, state: Any, stored: jax.Array) -> tuple[jax.Array, Any]:
        return _update.update_one(updater, key, pushed, state, stored)

    return sparse.lazy_update(update, total, state, stored, coalesced=True)


_compiled = Recent(lambda updater: jax.jit(functools.partial(_add_and_update, updater), static_argnums=(0, 1)))
