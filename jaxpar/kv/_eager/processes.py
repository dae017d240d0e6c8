"""A push at the prompt in several processes: each sums its own values, then they sum over processes.

Every process has its own copy of the stored values, on its own devices, as a store of kind `device` does. One compiled
program sums over the first devices of the processes, in buckets and compressed if the store says so. Then every process
makes the same update. So all must push the same keys in the same order.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

from ... import sparse
from ..._core.recent import Recent
from ..._devices import buckets, emulated, processes
from ..._devices.mesh import STORE_AXIS, mesh_of, split_over
from ..._devices.placement import put, spans_processes, to_host
from ...compression import Compressor, LinearCompressor
from ...sparse import RowSparse
from ...updaters import assign
from .. import _aggregate
from .._new_values import signature
from .._store import Arrays, Changes, KVStore, Lists, kind_of
from . import programs
from .buckets import pack


def push(store: KVStore, pushed: Lists) -> Changes:
    """What a push changes."""
    totals, residuals = _totals(store, _own_sums(store, pushed))
    totals = {k: [put(v, store.values[k].sharding)] for k, v in totals.items()}
    return programs.push(dataclasses.replace(store, compressor=None, residuals={}), totals)._replace(
        residuals=residuals
    )


def rows(store: KVStore, pushed: dict[int, list[RowSparse]]) -> dict[int, list[RowSparse]]:
    """For each key the sum of the rows that all processes push, unique and sorted, in every process."""
    return {k: [put(_add_rows(vs, store.values[k].dtype), store.values[k].sharding)] for k, vs in pushed.items()}


def agree(store: KVStore, pushed: dict[int, list[Any]]) -> None:
    """Compare what the processes push. With other keys in one of them, all would wait forever.

    Raises:
        ValueError: they push different keys or shapes, or an array that belongs to several processes.
    """
    for k, values in pushed.items():
        if any(spans_processes(leaf) for leaf in jax.tree.leaves(values)):
            raise ValueError(
                f"kv.push: key {k}: this value is on devices of several processes; at the prompt each process pushes "
                "what it has itself (value.addressable_data(i)), and a sum over all devices belongs inside pmap or "
                "shard_map, with axis_name"
            )
    where = f"kv.push: kind {store.kind!r}: every process must push the same keys, in the same shapes"
    like = {k: jax.ShapeDtypeStruct(vs[0].shape, store.values[k].dtype) for k, vs in pushed.items()}
    rows = [k for k, vs in pushed.items() if isinstance(vs[0], RowSparse)]
    processes.agree(where, signature(like) + (f", of keys {rows} rows" if rows else ""))


def _own_sums(store: KVStore, pushed: Lists) -> Arrays:
    """The sum of this process's values of each key, on its first device."""
    here = SingleDeviceSharding(_leader())
    like = {k: put(to_host(store.values[k]), here) for k, vs in pushed.items() if len(vs) > 1}
    part = dataclasses.replace(
        store,
        values=like,
        updater_state=dict.fromkeys(like, ()),
        residuals={},
        kind=kind_of(store).within_process,
        updater=assign,
        compressor=None,
        devices=None,
        pending={},
        optimizer_state=(),
        shardings=(),
    )
    sums = programs.push(part, {k: pushed[k] for k in like}).values if like else {}
    return {k: _here(sums[k] if k in sums else pushed[k][0]) for k in pushed}


def _leader() -> Any:
    return processes.leaders()[jax.process_index()]


def _here(value: jax.Array) -> jax.Array:
    """The value on this process's first device."""
    for shard in value.addressable_shards if value.sharding.is_fully_replicated else ():
        if shard.device == _leader():
            return shard.data
    return jax.device_put(value, _leader())


def _totals(store: KVStore, sums: Arrays) -> tuple[Arrays, dict[int, Any]]:
    """The sums over the processes, on each one's first device, and the residuals of what is compressed."""
    devices = processes.leaders()
    along = split_over(devices)
    compressed = _aggregate.compressed_keys(store, sums)
    residuals = put(_aggregate.residuals_for(store, dict.fromkeys(compressed, len(devices))), along)
    arrays, dtypes = list(sums.values()), tuple(store.values[k].dtype for k in sums)
    shapes = tuple(a.shape for a in arrays)
    groups = buckets.plan(tuple(zip(shapes, dtypes, strict=True)), store.limits)
    if residuals:
        groups = tuple((i,) for i in range(len(arrays)))  # compressed by key
    packed = [_over_leaders(part, along) for part in pack(arrays, dtypes, groups)]
    run = _programs(store.compressor)(devices, store.compressor, store.limits, tuple(sums), shapes, dtypes, groups)
    totals, residuals = emulated.run_by_itself(run, packed, residuals)
    return {k: v.addressable_data(0) for k, v in totals.items()}, residuals


def _over_leaders(part: jax.Array, along: NamedSharding) -> jax.Array:
    shape = (along.num_devices * part.shape[0], *part.shape[1:])
    return jax.make_array_from_single_device_arrays(shape, along, [part])


def _program(
    devices: Any,
    compressor: Compressor | LinearCompressor | None,
    limits: buckets.BucketLimits,
    keys: tuple[int, ...],
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[Any, ...],
    groups: tuple[tuple[int, ...], ...],
) -> Any:
    """The compiled sum over the processes: (buckets, residuals) to (sums, residuals)."""
    like: Any = {k: jax.ShapeDtypeStruct(s, d) for k, s, d in zip(keys, shapes, dtypes, strict=True)}
    store = KVStore(like, {}, {}, "device", compressor=compressor, limits=limits)

    def body(packed: list[jax.Array], residuals: dict[int, Any]) -> Any:
        mine = dict(zip(keys, buckets.unpack(packed, shapes, groups), strict=True))
        return _aggregate.reduce(dataclasses.replace(store, residuals=residuals), mine, STORE_AXIS)

    return jax.jit(
        jax.shard_map(
            body, mesh=mesh_of(devices), in_specs=P(STORE_AXIS), out_specs=(P(), P(STORE_AXIS)), check_vma=False
        )
    )


_programs = Recent(lambda _: functools.lru_cache(maxsize=256)(_program))


def _add_rows(values: list[RowSparse], dtype: Any) -> RowSparse:
    own = jax.device_put([RowSparse(r.indices, r.values.astype(dtype), r.shape) for r in values], _leader())
    count = sum(r.indices.shape[0] for r in own)
    most = max(map(int, processes.exchange(str(count))))
    size = 1 << (most - 1).bit_length() if most else 1  # few sizes, so few programs
    mine = sparse.add(own, size=size)
    along = split_over(processes.leaders())
    run = _rows_program(processes.leaders(), mine.shape)
    rows = _over_leaders(mine.indices, along), _over_leaders(mine.values, along)
    indices, summed = emulated.run_by_itself(run, *rows)
    return RowSparse(indices.addressable_data(0), summed.addressable_data(0), mine.shape)


@functools.lru_cache(maxsize=64)
def _rows_program(devices: Any, shape: tuple[int, ...]) -> Any:
    def body(indices: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = sparse.allreduce(RowSparse(indices, values, shape), STORE_AXIS)
        return total.indices, total.values

    mesh, along = mesh_of(devices), P(STORE_AXIS)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(along, along), out_specs=P(), check_vma=False))
