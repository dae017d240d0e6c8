"""Read a store: whole values, copies on devices, rows of a table.

A store and what was pulled out of it may share memory, but never a buffer that one of them could donate under the
other. `pull_whole` reads, `own_values` makes it the caller's, `_on_each` sends copies to other devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P, SingleDeviceSharding

from .. import sparse
from .._core import checks
from .._core.arguments import no_such_arguments
from .._core.arrays import Device, PyTree, is_tracing
from .._core.checks import Key, Keys
from .._core.text import plural
from .._core.transfers import allows_transfers
from .._devices import collectives, mesh
from .._devices.user_mesh import in_user_mesh, in_user_mesh_now
from .._store import aggregate, store as stores
from .._store.mxnet_names import ARGUMENTS as MXNET_ARGUMENTS
from .._store.store import KVStore
from ._create import init


@overload
def pull(
    store: KVStore, key: Key, *, devices: None = None, axis_name: str | None = None, copy: bool = True
) -> jax.Array: ...
@overload
def pull(
    store: KVStore, key: Key, *, devices: Sequence[Device], axis_name: str | None = None, copy: bool = True
) -> list[jax.Array]: ...
@overload
def pull(
    store: KVStore, key: Keys, *, devices: None = None, axis_name: str | None = None, copy: bool = True
) -> list[jax.Array]: ...
@overload
def pull(
    store: KVStore, key: Keys, *, devices: Sequence[Device], axis_name: str | None = None, copy: bool = True
) -> list[list[jax.Array]]: ...
@no_such_arguments(MXNET_ARGUMENTS)
@allows_transfers
@in_user_mesh_now
def pull(
    store: KVStore,
    key: Key | Keys,
    *,
    devices: Sequence[Device] | None = None,
    axis_name: str | None = None,
    copy: bool = True,
) -> Any:
    """The stored values.

    If a store of kind `sharded`, or a store whose values are split over a mesh, spans several processes, all of them
    must call `pull`.

    Args:
        store: any store.
        key: an int, the name of a parameter in a store of `from_params`, or a list of both.
        devices: the devices of this process that get copies. None: the value on the store's devices. Under `jit`, the
            compiled program decides the device of a value, so the list repeats the value for each device.
        axis_name: inside `pmap` or `shard_map`, the axis that splits a store of kind `sharded`, whose rows are
            gathered. Other kinds need no axis.
        copy: True: the result may be donated while the store stays valid, and vice versa. (Large values on emulated
            devices share memory safely.) False: the result shares the arrays of the store.

    Returns:
        An array of the shape given to `init`. With `devices`, a list with one array on each device. For a list of keys,
        a list of these results.

    Raises:
        KeyError: a key was never initialised, or no parameter has that name.
        ValueError: a device belongs to another process.
        RuntimeError: the stored value was deleted, for example by donating the store.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxpar import kv
        >>> store = kv.init(kv.create(), [5, 7], [jnp.ones(2), jnp.zeros(2)])
        >>> [value.tolist() for value in kv.pull(store, [7, 5])]
        [[0.0, 0.0], [1.0, 1.0]]
    """
    stores.check_is_store(store, "kv.pull")
    keys, many = checks.find_keys(key, "kv.pull", store)
    values = pull_whole(store, keys, axis_name)
    if devices is not None:
        pulled = _on_each(values, checks.device_list(devices, "kv.pull"), copy and _may_share(store))
    else:
        pulled = own_values(store, values) if copy else values
    return pulled if many else pulled[0]


def own_values(store: KVStore, values: list[jax.Array]) -> list[jax.Array]:
    """What `pull_whole` gave, in arrays that do not belong to the store. Outside of traced functions only."""
    return values if is_tracing() or not _may_share(store) else mesh.donatable(values)


def _may_share(store: KVStore) -> bool:
    """Whether `pull_whole` gives arrays of the store itself. Values in rows are gathered, but not frozen ones."""
    return not stores.is_in_rows(store) or bool(store.frozen)


def pull_whole(store: KVStore, keys: Sequence[int], axis_name: str | None) -> list[jax.Array]:
    """The values of these keys in the shapes that the user sees."""
    layouts = stores.rows_of(store)
    rows = {k: store.values[k] for k in keys if k in layouts}  # the others are whole, as frozen ones are
    if not rows:
        return [store.values[k] for k in keys]
    shapes = tuple(layouts[k].shape for k in rows)
    # Inside of a mapped axis each device has its own row (chunk,) of a value, elsewhere the store has all (n, chunk).
    if axis_name is not None:
        aggregate.axis_size(axis_name, "kv.pull")
        full = collectives.all_gather([r.reshape(-1) for r in rows.values()], shapes, axis_name, store.limits)
    else:
        assert store.devices is not None
        for k, r in rows.items():
            if r.shape[0] != len(store.devices) or r.ndim != 2:
                raise ValueError(f"kv.pull: key {k}: this is one device's share; give axis_name to gather the others")
        if is_tracing():
            full = [layouts[k].full(r) for k, r in rows.items()]
        else:
            mesh.wait_before_collectives(rows, store.devices)
            full = _gather_program(store.devices, shapes, store.limits)(list(rows.values()))
    values = store.values | dict(zip(rows, full, strict=True))
    return [values[k] for k in keys]


@functools.lru_cache(maxsize=1024)
def _gather_program(
    devices: tuple[Device, ...], shapes: tuple[collectives.Shape, ...], limits: collectives.BucketLimits
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    def run(rows: list[jax.Array]) -> list[jax.Array]:
        return collectives.all_gather([p.reshape(-1) for p in rows], shapes, mesh.STORE_AXIS, limits)

    devices_mesh, per_device = mesh.mesh_of(devices), P(mesh.STORE_AXIS)
    return jax.jit(jax.shard_map(run, mesh=devices_mesh, in_specs=per_device, out_specs=P(), check_vma=False))


# Copies on devices.


def _on_each(values: Sequence[jax.Array], devices: tuple[Device, ...], copy_present: bool) -> list[list[jax.Array]]:
    """For each value a list with a copy on each device. `copy_present`: also of arrays that are there already."""
    if is_tracing() or not devices:
        return [[v] * len(devices) for v in values]
    wanted = set(devices)
    checks.check_own(wanted, "kv.pull")
    if copy_present:
        # What is there already is the store's, so the caller gets a copy of it.
        shared = [i for i, v in enumerate(values) if v.is_fully_replicated and wanted & v.sharding.device_set]
        new = dict(zip(shared, mesh.donatable([values[i] for i in shared]), strict=True))
        values = [new.get(i, v) for i, v in enumerate(values)]
    # A value that has a copy on each of the devices is not sent. The others are, many in one go.
    present = {i for i, v in enumerate(values) if v.is_fully_replicated and wanted <= v.sharding.device_set}
    copies = {i: _by_device(values[i]) for i in present}
    absent = [i for i in range(len(values)) if i not in present]
    for group in mesh.for_programs(absent):
        # Every process must call this for values that span them: then each has all of them.
        to_send = [values[i] for i in group]
        to_send = [jnp.asarray(mesh.to_host(v)) if mesh.spans_processes(v) else v for v in to_send]
        copies |= zip(group, _send(to_send, wanted), strict=True)
    return [[copies[i][d] for d in devices] for i in range(len(values))]


def _by_device(array: jax.Array) -> dict[Device, jax.Array]:
    return {shard.device: shard.data for shard in array.addressable_shards}


def _send(values: list[jax.Array], devices: set[Device]) -> list[dict[Device, jax.Array]]:
    """Copies on each device. Small values that are on the same one share buckets."""
    source = values[0].sharding
    groups: collectives.Groups = tuple((i,) for i in range(len(values)))
    if isinstance(source, SingleDeviceSharding) and all(v.sharding == source for v in values):
        groups = collectives.plan(values)

    # 1. The small ones first, in buckets: the large ones may still be computed. Positions in the buckets are counted
    #    from 0, so that the programs depend on sizes only.
    copies: dict[int, dict[Device, jax.Array]] = {}
    if small := [i for group in groups if len(group) > 1 for i in group]:
        of_small = [values[i] for i in small]
        shapes, buckets = tuple(v.shape for v in of_small), collectives.plan(of_small)
        # In one memory NumPy joins them, which no device has to wait for. Else one program does, and one transfer a
        # device.
        shared = mesh.one_memory({*devices, *source.device_set})
        flat = (
            collectives.pack([np.asarray(v) for v in of_small], buckets, xp=np) if shared else _pack(of_small, buckets)
        )
        sent = dict.fromkeys(devices & source.device_set, of_small)
        for device in devices - source.device_set:
            with jax.default_device(device):
                on_device = flat if shared else jax.device_put(flat, SingleDeviceSharding(device))
                sent[device] = _unpack(on_device, shapes, buckets)
        copies |= {i: {device: arrays[n] for device, arrays in sent.items()} for n, i in enumerate(small)}

    # 2. The large ones stay out of programs, which would copy them once more.
    alone = [g[0] for g in groups if len(g) == 1]
    large = mesh.share_or_put([values[i] for i in alone], mesh.copies_on(tuple(devices)))
    copies |= zip(alone, map(_by_device, large), strict=True)
    return [copies[i] for i in range(len(values))]


_pack = jax.jit(collectives.pack, static_argnums=1)
_unpack = jax.jit(collectives.unpack, static_argnums=(1, 2))


@overload
def broadcast(store: KVStore, key: int, value: PyTree, *, devices: None = None) -> tuple[KVStore, jax.Array]: ...
@overload
def broadcast(
    store: KVStore, key: int, value: PyTree, *, devices: Sequence[Device]
) -> tuple[KVStore, list[jax.Array]]: ...
@overload
def broadcast(
    store: KVStore, key: Sequence[int], value: PyTree, *, devices: None = None
) -> tuple[KVStore, list[jax.Array]]: ...
@overload
def broadcast(
    store: KVStore, key: Sequence[int], value: PyTree, *, devices: Sequence[Device]
) -> tuple[KVStore, list[list[jax.Array]]]: ...
@no_such_arguments(MXNET_ARGUMENTS)
@allows_transfers
@in_user_mesh
def broadcast(
    store: KVStore, key: int | Sequence[int], value: PyTree, *, devices: Sequence[Device] | None = None
) -> tuple[KVStore, Any]:
    """Call `init`, then `pull` of the same keys: (the new store, the pulled values).

    Args:
        store, key, value: as in `init`.
        devices: as in `pull`.

    Raises:
        KeyError, ValueError: as for `init` and `pull`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxpar import kv
        >>> store, copies = kv.broadcast(kv.create(), 3, jnp.ones(2), devices=jax.devices()[:2])
        >>> [copy.tolist() for copy in copies]
        [[1.0, 1.0], [1.0, 1.0]]
    """
    store, read = init(store, key, value), cast(Any, pull)
    return store, read(store, key, devices=devices)


# Rows of a table.


@overload
def row_sparse_pull(store: KVStore, key: Key, row_ids: PyTree, *, devices: None = None) -> sparse.RowSparse: ...
@overload
def row_sparse_pull(
    store: KVStore, key: Key, row_ids: PyTree, *, devices: Sequence[Device]
) -> list[sparse.RowSparse]: ...
@overload
def row_sparse_pull(store: KVStore, key: Keys, row_ids: PyTree, *, devices: None = None) -> list[sparse.RowSparse]: ...
@overload
def row_sparse_pull(
    store: KVStore, key: Keys, row_ids: PyTree, *, devices: Sequence[Device]
) -> list[list[sparse.RowSparse]]: ...
@no_such_arguments(MXNET_ARGUMENTS)
@allows_transfers
@in_user_mesh_now
def row_sparse_pull(
    store: KVStore, key: Key | Keys, row_ids: PyTree, *, devices: Sequence[Device] | None = None
) -> Any:
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
        ValueError: an id is negative or out of range, as for `jaxpar.sparse.take`; the number of lists of ids fits
            neither the keys nor the devices; or a device belongs to another process.

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
    keys, many = checks.find_keys(key, "kv.row_sparse_pull", store)
    devices = None if devices is None else checks.device_list(devices, "kv.row_sparse_pull")
    checks.check_own(() if devices is None or is_tracing() else devices, "kv.row_sparse_pull")
    ids_of_keys = row_ids if many and _is_list_of_arrays(row_ids) else [row_ids] * len(keys)
    checks.as_values(keys, ids_of_keys, "kv.row_sparse_pull", "row_ids")
    # The ids of each key: one array for all devices, or one for each.
    count = 1 if devices is None else len(devices)
    wanted = [list(ids) if _is_list_of_arrays(ids) else [ids] for ids in ids_of_keys]
    for k, ids in zip(keys, wanted, strict=True):
        if len(ids) not in (1, count):
            count_of_devices = "no devices=" if devices is None else plural(count, "device")
            raise ValueError(
                f"kv.row_sparse_pull: key {k}: expected one array of ids, or one for each device, got {len(ids)} lists "
                f"of ids and {count_of_devices}"
            )
    # A table that spans processes is gathered whole first, in all of them. One array of ids is for all devices.
    pulled = list[Any]()
    for value, ids in zip(map(mesh.to_host, pull_whole(store, keys, None)), wanted, strict=True):
        rows = [sparse.take(value, i) for i in ids]
        if devices is None:
            pulled.append(rows[0])
            continue
        rows = rows if len(rows) == count else rows * count
        pulled.append([r if is_tracing() else jax.device_put(r, d) for r, d in zip(rows, devices, strict=True)])
    return pulled if many else pulled[0]


def _is_list_of_arrays(row_ids: PyTree) -> bool:
    return isinstance(row_ids, (list, tuple)) and any(
        (hasattr(ids, "shape") and ids.shape) or isinstance(ids, (list, tuple)) for ids in row_ids
    )
