"""Read a store: whole values, copies on devices, rows of a table."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, overload

import jax
from jax.sharding import PartitionSpec as P, SingleDeviceSharding

from .._core import checks
from .._core.arrays import Device, is_traced
from .._devices import buckets, emulated
from .._devices.mesh import STORE_AXIS, copies_on, mesh_of
from .._devices.placement import to_host
from .._devices.user_mesh import in_user_mesh
from ..sparse import RowSparse, take
from ._aggregate import axis_size
from ._create import init
from ._kinds import Layout
from ._store import Key, KVStore, layout_of, shapes_of

_MOST_VALUES = 256  # XLA compiles a kernel for each, so a program that packs thousands would take minutes


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


@in_user_mesh
def pull(
    store: KVStore,
    key: int | Sequence[int],
    *,
    devices: Sequence[Device] | None = None,
    axis_name: str | None = None,
) -> Any:
    """The stored values.

    A store of kind `sharded` that is spread over several processes is pulled by all of them, or by none.

    Args:
        store: any store.
        key: an int, or a list of ints.
        devices: where to put copies, devices of this process. None: the value as the store has it. Under `jit` the
            program decides on which device a value is, so the list has the value once for each device.
        axis_name: inside `pmap` or `shard_map`, the axis over which a store of kind `sharded` is spread. Its rows are
            gathered. The other kinds need none.

    Returns:
        An array of the shape given to `init`. With `devices` a list of arrays, one on each. For a list of keys, a
        list of those.

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
    checks.check_known(keys, store.values, "kv.pull")
    values = pull_whole(store, keys, axis_name)
    pulled = values if devices is None else copies(values, tuple(devices))
    return pulled if many else pulled[0]


def pull_whole(store: KVStore, keys: Sequence[int], axis_name: str | None) -> list[jax.Array]:
    """The values of these keys in the shapes that the user sees."""
    layout, stored = layout_of(store), [store.values[k] for k in keys]
    if not layout.is_split:
        return stored
    shapes = shapes_of(store)
    wanted = tuple(shapes[k] for k in keys)
    if axis_name is not None:
        axis_size(axis_name, "kv.pull")
        return layout.gather([r.reshape(-1) for r in stored], wanted, axis_name, store.limits)
    assert store.devices is not None
    for k, r in zip(keys, stored, strict=True):
        if r.shape[0] != len(store.devices) or r.ndim != 2:
            raise ValueError(
                f"kv.pull: key {k}: this is one device's share of a store of kind {store.kind!r}; give axis_name to "
                "gather the others"
            )
    if is_traced(stored):
        return [layout.whole(r, shape) for r, shape in zip(stored, wanted, strict=True)]
    emulated.wait_before_collectives(stored, store.devices)
    return _gather_program(layout, store.devices, store.limits)(stored, wanted)


@functools.lru_cache(maxsize=64)
def _gather_program(layout: Layout, devices: tuple[Device, ...], limits: Any) -> Any:
    def run(stored: list[jax.Array], shapes: Any) -> list[jax.Array]:
        return jax.shard_map(
            lambda parts: layout.gather([p.reshape(-1) for p in parts], shapes, STORE_AXIS, limits),
            mesh=mesh_of(devices),
            in_specs=layout.spec(STORE_AXIS),
            out_specs=P(),
            check_vma=False,
        )(stored)

    return jax.jit(run, static_argnums=1)


def copies(values: Sequence[jax.Array], devices: tuple[Device, ...]) -> list[list[jax.Array]]:
    """For each value a list with a copy on each device. Copies that are there already are not made again."""
    if not devices:
        return [[] for _ in values]
    if is_traced(values):
        return [[v] * len(devices) for v in values]
    wanted = set(devices)
    checks.check_own(wanted, "kv.pull")
    held: list[Any] = [_find_copies(v, wanted) for v in values]
    absent = [i for i, there in enumerate(held) if there is None]
    for start in range(0, len(absent), _MOST_VALUES):
        some = absent[start : start + _MOST_VALUES]
        for i, sent in zip(some, _send([values[i] for i in some], wanted), strict=True):
            held[i] = sent
    return [[there[d] for d in devices] for there in held]


def _find_copies(value: jax.Array, wanted: set[Device]) -> dict[Device, jax.Array] | None:
    """The copies on each device. None: one that is wanted does not exist."""
    if not value.sharding.is_fully_replicated or not wanted <= value.sharding.device_set:
        return None
    if len(value.sharding.device_set) == 1:
        return dict.fromkeys(wanted, value)
    return {shard.device: shard.data for shard in value.addressable_shards}


def _send(values: list[jax.Array], devices: set[Device]) -> list[dict[Device, jax.Array]]:
    """Copies on each device. Small values that are on the same one share buckets."""
    source = values[0].sharding
    groups: buckets.Groups = tuple((i,) for i in range(len(values)))
    if isinstance(source, SingleDeviceSharding) and all(v.sharding == source for v in values):
        groups = buckets.plan_of(values, buckets.BucketLimits())
    copies: list[dict[Device, jax.Array]] = [{} for _ in values]
    # The small ones first: the large ones may still be computed. And those stay out of programs, which copy.
    small, together = buckets.consecutive([g for g in groups if len(g) > 1])
    for device, sent in _send_in_buckets([values[i] for i in small], together, devices).items():
        for i, copy in zip(small, sent, strict=True):
            copies[i][device] = copy
    alone = [g[0] for g in groups if len(g) == 1]
    large = emulated.share_or_put([values[i] for i in alone], copies_on(tuple(devices)))
    for i, sent in zip(alone, large, strict=True):
        copies[i] = {shard.device: shard.data for shard in sent.addressable_shards}
    return copies


def _send_in_buckets(
    values: list[jax.Array], groups: buckets.Groups, devices: set[Device]
) -> dict[Device, list[jax.Array]]:
    """Copies on each device of values that are all on one other."""
    if not values:
        return {}
    source, shapes = values[0].sharding, tuple(v.shape for v in values)
    shared = emulated.one_memory({*devices, *source.device_set})
    flat = emulated.pack_views(values, [v.dtype for v in values], groups) if shared else _pack(values, groups)
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


@in_user_mesh
def row_sparse_pull(
    store: KVStore, key: int | Sequence[int], row_ids: Any, *, devices: Sequence[Device] | None = None
) -> Any:
    """Some rows of a stored value.

    Args:
        store: any store.
        key: an int, or a list of ints, of values with at least one axis.
        row_ids: (m,) integers. For a list of keys, one such array for all or a list with one for each.
        devices: where to put copies, as in `pull`.

    Returns:
        A `RowSparse` of the unique, sorted rows. With `devices` a list of them. For a list of keys, a list of those.

    Raises:
        KeyError: a key that was never initialised.
        ValueError, IndexError: ids that are negative or out of range, as of `jaxpar.sparse.take`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import kv
        >>> store = kv.init(kv.create(), 0, jnp.arange(8.0).reshape(4, 2))
        >>> kv.row_sparse_pull(store, 0, jnp.array([3, 0, 3])).indices.tolist()
        [0, 3]
    """
    keys, many = checks.as_keys(key)
    checks.check_known(keys, store.values, "kv.row_sparse_pull")
    ids = row_ids if isinstance(row_ids, (list, tuple)) and many and _of_arrays(row_ids) else [row_ids] * len(keys)
    checks.as_values(keys, ids, True, "kv.row_sparse_pull")
    values = [to_host(value) for value in pull(store, keys)]
    pulled = [take(value, i) for value, i in zip(values, ids, strict=True)]
    if devices is not None:
        pulled = [_rows_on(rows, devices) for rows in pulled]
    return pulled if many else pulled[0]


def _rows_on(rows: RowSparse, devices: Sequence[Device]) -> list[RowSparse]:
    return [rows if is_traced(rows) else jax.device_put(rows, d) for d in devices]


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


@in_user_mesh
def broadcast(store: KVStore, key: Key, value: Any, *, devices: Sequence[Device] | None = None) -> tuple[KVStore, Any]:
    """Call `init`, then `pull` of the same keys.

    Args:
        store, key, value: as in `init`.
        devices: as in `pull`.

    Returns:
        (the new store, what was pulled).

    Raises:
        KeyError, TypeError, ValueError: as of `init` and `pull`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxpar import kv
        >>> store, copies = kv.broadcast(kv.create(), 3, jnp.ones(2), devices=jax.devices()[:2])
        >>> [copy.tolist() for copy in copies]
        [[1.0, 1.0], [1.0, 1.0]]
    """
    store = init(store, key, value)
    return store, pull(store, key, devices=devices)
