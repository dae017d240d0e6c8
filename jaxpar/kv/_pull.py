"""Reading a store: whole values, copies on devices, rows of a table."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, overload

import jax
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

from .._core import checks
from .._core.arrays import Device, is_traced
from .._devices import buckets, collectives, emulated
from .._devices.emulated import wait_before_collectives
from .._devices.mesh import STORE_AXIS, mesh_of
from .._devices.placement import to_host
from ..sparse import RowSparse, take
from ._aggregate import axis_size
from ._create import init
from ._store import Key, KVStore, shapes_of

# XLA compiles a kernel for each value, so a program that packs thousands of them would take minutes.
_MOST_VALUES = 256


@overload
def pull(store: KVStore, key: int, *, devices: None = None, axis_name: str | None = None) -> jax.Array: ...


@overload
def pull(store: KVStore, key: int, *, devices: Sequence[Device], axis_name: str | None = None) -> list[jax.Array]: ...


@overload
def pull(
    store: KVStore, key: Sequence[int], *, devices: None = None, axis_name: str | None = None
) -> list[jax.Array]: ...


@overload
def pull(
    store: KVStore, key: Sequence[int], *, devices: Sequence[Device], axis_name: str | None = None
) -> list[list[jax.Array]]: ...


def pull(
    store: KVStore,
    key: int | Sequence[int],
    *,
    devices: Sequence[Device] | None = None,
    axis_name: str | None = None,
) -> Any:
    """The stored values.

    Args:
        store: any store.
        key: an int, or a list of ints.
        devices: where to put copies, devices of this process. None: the value as the store has it. Under `jit`
            the program decides where a value lies, so the list holds the value once for each device.
        axis_name: inside `pmap` or `shard_map`, the axis over which a store of kind `sharded` is spread; its
            rows are gathered. The other kinds need none.

    A store of kind `sharded` that is spread over several processes is pulled by all of them, or by none.

    Returns:
        An array; with `devices` a list of arrays, one on each. For a list of keys, a list of those.

    Raises:
        KeyError: a key that was never initialised.
        TypeError: a key that is no int.
        ValueError: a device of another process.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxpar import kv
        >>> store = kv.init(kv.create(), [5, 7], [jnp.ones(2), jnp.zeros(2)])
        >>> [value.tolist() for value in kv.pull(store, [7, 5])]
        [[0.0, 0.0], [1.0, 1.0]]
    """
    keys, many = checks.as_keys(key)
    checks.known(keys, store.values, "kv.pull")
    values = whole(store, keys, axis_name) if store.kind == "sharded" else [store.values[k] for k in keys]
    pulled = values if devices is None else copies(values, tuple(devices))
    return pulled if many else pulled[0]


def whole(store: KVStore, keys: Sequence[int], axis_name: str | None) -> list[jax.Array]:
    """The values of a `sharded` store in their own shapes."""
    shapes = shapes_of(store)
    wanted = [shapes[k] for k in keys]
    rows = [store.values[k] for k in keys]
    if axis_name is not None:
        axis_size(axis_name, "kv.pull")
        return collectives.all_gather([r.reshape(-1) for r in rows], wanted, axis_name, store.limits)
    assert store.devices is not None
    for k, r in zip(keys, rows, strict=True):
        if r.shape[0] != len(store.devices) or r.ndim != 2:
            raise ValueError(
                f"kv.pull: key {k}: this is one device's share of a store of kind 'sharded'; give axis_name to "
                "gather the others"
            )
    if is_traced(rows):
        return [collectives.from_rows(r, shape) for r, shape in zip(rows, wanted, strict=True)]
    wait_before_collectives(rows, store.devices)
    return _gather_program(store.devices, store.limits)(rows, tuple(wanted))


@functools.lru_cache(maxsize=64)
def _gather_program(devices: tuple[Device, ...], limits: Any) -> Any:
    def run(rows: list[jax.Array], shapes: Any) -> list[jax.Array]:
        return jax.shard_map(
            lambda rows: collectives.all_gather([r.reshape(-1) for r in rows], shapes, STORE_AXIS, limits),
            mesh=mesh_of(devices),
            in_specs=P(STORE_AXIS),
            out_specs=P(),
            check_vma=False,
        )(rows)

    return jax.jit(run, static_argnums=1)


def copies(values: Sequence[jax.Array], devices: tuple[Device, ...]) -> list[list[jax.Array]]:
    """For each value a list with a copy on each device; copies that are there already are not made again."""
    if not devices:
        return [[] for _ in values]
    if is_traced(values):
        return [[v] * len(devices) for v in values]
    wanted = set(devices)
    for d in wanted:
        if d.process_index != jax.process_index():
            raise ValueError(
                f"kv.pull: {d} belongs to process {d.process_index} and this is process {jax.process_index()}; give "
                "devices of this process, jax.local_devices()"
            )
    held: list[Any] = [_held(v, wanted) for v in values]
    absent = [i for i, there in enumerate(held) if there is None]
    for start in range(0, len(absent), _MOST_VALUES):
        some = absent[start : start + _MOST_VALUES]
        for i, sent in zip(some, _sent([values[i] for i in some], wanted), strict=True):
            held[i] = sent
    return [[there[d] for d in devices] for there in held]


def _held(value: jax.Array, wanted: set[Device]) -> dict[Device, jax.Array] | None:
    """The copies on each device where all that are wanted exist."""
    if not value.sharding.is_fully_replicated or not wanted <= value.sharding.device_set:
        return None
    if len(value.sharding.device_set) == 1:
        return dict.fromkeys(wanted, value)
    return {shard.device: shard.data for shard in value.addressable_shards}


def _sent(values: list[jax.Array], devices: set[Device]) -> list[dict[Device, jax.Array]]:
    """Copies on each device; small values that are on the same one travel in buckets."""
    source = values[0].sharding
    groups: tuple[tuple[int, ...], ...] = tuple((i,) for i in range(len(values)))
    if isinstance(source, SingleDeviceSharding) and all(v.sharding == source for v in values):
        groups = buckets.plan_of(values, buckets.BucketLimits())
    together = tuple(g for g in groups if len(g) > 1)
    copies: list[dict[Device, jax.Array]] = [{} for _ in values]
    # The small ones first: the large ones may still be computed. And those stay out of programs, which copy.
    packed = [i for g in together for i in g]
    for device, small in _sent_in_buckets([values[i] for i in packed], tuple(map(len, together)), devices).items():
        for i, copy in zip(packed, small, strict=True):
            copies[i][device] = copy
    alone = [g[0] for g in groups if len(g) == 1]
    everywhere = NamedSharding(mesh_of(tuple(devices)), P())
    for i, sent in zip(alone, emulated.put([values[i] for i in alone], everywhere), strict=True):
        copies[i] = {shard.device: shard.data for shard in sent.addressable_shards}
    return copies


def _sent_in_buckets(
    values: list[jax.Array], lengths: tuple[int, ...], devices: set[Device]
) -> dict[Device, list[jax.Array]]:
    """Copies on each device of values of one other, which travel in buckets of so many of them."""
    if not values:
        return {}
    source, shapes = values[0].sharding, tuple(v.shape for v in values)
    stops = tuple(itertools.accumulate(lengths))
    groups = tuple(tuple(range(stop - n, stop)) for stop, n in zip(stops, lengths, strict=True))
    shared = emulated.one_memory({*devices, *source.device_set})
    flat = emulated.bucketed(values, [v.dtype for v in values], groups) if shared else _pack(values, groups)
    sent = dict.fromkeys(devices & source.device_set, values)
    for device in devices - source.device_set:
        where = SingleDeviceSharding(device)
        with emulated.on(where):
            sent[device] = _unpack(flat if shared else jax.device_put(flat, where), shapes, groups)
    return sent


_pack = jax.jit(buckets.pack, static_argnums=1)


_unpack = jax.jit(buckets.unpack, static_argnums=(1, 2))


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
        row_ids: (m,) integers; for a list of keys one for all or a list with one for each.
        devices: where to put copies, as in `pull`.

    Returns:
        A `RowSparse` of the unique, sorted rows; with `devices` a list of them; for a list of keys a list.

    Raises:
        KeyError: a key that was never initialised.
        ValueError, IndexError: what `jaxpar.sparse.take` raises for ids out of range, which MXNet skipped
            without a word, or negative ones, on which it aborted.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import kv
        >>> store = kv.init(kv.create(), 0, jnp.arange(8.0).reshape(4, 2))
        >>> kv.row_sparse_pull(store, 0, jnp.array([3, 0, 3])).indices.tolist()
        [0, 3]
    """
    keys, many = checks.as_keys(key)
    checks.known(keys, store.values, "kv.row_sparse_pull")
    ids = row_ids if isinstance(row_ids, (list, tuple)) and many and _of_arrays(row_ids) else [row_ids] * len(keys)
    checks.as_values(keys, ids, True, "kv.row_sparse_pull")
    values = [to_host(value) for value in pull(store, keys)]
    pulled = [take(value, i) for value, i in zip(values, ids, strict=True)]
    if devices is not None:
        pulled = [_rows_on(rows, devices) for rows in pulled]
    return pulled if many else pulled[0]


def _rows_on(rows: RowSparse, devices: Sequence[Device]) -> list[RowSparse]:
    if is_traced(rows):
        return [rows] * len(devices)
    return [jax.device_put(rows, d) for d in devices]


def _of_arrays(row_ids: Sequence[Any]) -> bool:
    return any(hasattr(i, "shape") or isinstance(i, (list, tuple)) for i in row_ids)


@overload
def broadcast(store: KVStore, key: int, value: Any, *, devices: None = None) -> tuple[KVStore, jax.Array]: ...


@overload
def broadcast(
    store: KVStore, key: int, value: Any, *, devices: Sequence[Device]
) -> tuple[KVStore, list[jax.Array]]: ...


@overload
def broadcast(
    store: KVStore, key: Sequence[int], value: Any, *, devices: None = None
) -> tuple[KVStore, list[jax.Array]]: ...


@overload
def broadcast(
    store: KVStore, key: Sequence[int], value: Any, *, devices: Sequence[Device]
) -> tuple[KVStore, list[list[jax.Array]]]: ...


def broadcast(store: KVStore, key: Key, value: Any, *, devices: Sequence[Device] | None = None) -> tuple[KVStore, Any]:
    """`init`, then `pull` of the same keys.

    Returns:
        (the new store, what was pulled): with `devices` a list with one copy on each for every key.
    """
    store = init(store, key, value)
    return store, pull(store, key, devices=devices)
