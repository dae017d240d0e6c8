"""Empty stores, keys, updaters and compression."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from .. import compression, distributed
from .._core import checks
from .._core.arrays import Device, is_traced
from .._core.keys import check_stored
from .._devices import processes
from .._devices.buckets import BucketLimits
from .._devices.copies import own_copies
from .._devices.placement import put, spans_processes
from .._devices.user_mesh import in_user_mesh
from .._store import tree_optimizer
from .._store.kinds import Kind, kind_named
from .._store.layouts import Rows
from .._store.placing import lay_out, start_state
from .._store.store import Changes, KVStore, is_on_mesh, is_split, kind_of, shards, specs_of, with_changes
from ..sparse import RowSparse, to_dense
from ..updaters import (
    UpdateFn,
    Updater,
    _check_updater as check_updater,
    _couples_keys as couples_keys,
    _TreeOptimizer as TreeOptimizer,
    from_optax,
)
from ._mxnet import answers

if TYPE_CHECKING:
    import optax


@answers
def create(
    kind: str = "local",
    *,
    devices: Sequence[Device] | None = None,
    staleness: int | None = None,
    bucket_bytes: int = BucketLimits.bucket_bytes,
    alone_bytes: int = BucketLimits.alone_bytes,
) -> KVStore:
    """Make an empty store.

    | kind | where a push is summed | where a value is |
    |---|---|---|
    | `local` (also `local_update_cpu`, `local_allreduce_cpu`) | gathered on one device | on that device |
    | `device` (also `nccl`, `local_allreduce_device`) | by an all-reduce | a copy on every device |
    | `sharded` | by a reduce-scatter | 1/N of it on each of N devices, the updater's state too |
    | `dist_sync` (also `dist`) | as `device`, over the devices of every process | as `device`, in each process |
    | `dist_device_sync` (also `dist_sync_device`) | as `dist_sync` | as `dist_sync` |
    | `dist_async` (also `dist_device_async`) | as `dist_sync`, `staleness` pushes later | as `dist_sync` |

    Kind `sharded` needs an elementwise updater, see `kv.set_updater`. For kind `dist_async`, `kv.flush` applies what
    is pending.

    With several processes, only the kinds `dist_*` sum over them at the prompt. Each process first sums the values of
    its own devices, `dist_device_sync` by an all-reduce and the others on one device. Inside `pmap` and `shard_map`
    they are the same.

    A kind `dist_*` joins the other processes, as `jp.distributed.initialize()` does. These are the processes of
    `python -m jaxpar launch`, SLURM, Open MPI or Kubernetes. So make this store before the first use of JAX, or call
    `initialize` there. With no others the store has one worker. A process that has joined stays as it is.

    Args:
        kind: see the table.
        devices: where the values are, in order. None: `sharded` takes all devices. The other kinds leave a value
            where it is and follow the devices that push.
        staleness: how many pushes later a push is applied, for kind `dist_async` only. None there is 1, and 0 is
            `dist_sync`. Each costs every device the memory of one more copy of the values.
        bucket_bytes: small values share buckets of at most this many bytes.
        alone_bytes: a value of this many bytes or more shares no bucket and is not copied.

    Returns:
        A store without keys.

    Raises:
        ValueError: unknown kind, no or repeated devices, negative sizes, a staleness below 0 or of another kind.
        TypeError: a staleness that is no int.
        RuntimeError: a kind `dist_*` in one of several processes, if JAX was used before they were joined or they
            cannot be joined (see `jp.distributed.initialize`). A kind `sharded` over all devices in a process of
            `python -m jaxpar launch` that has not joined the others.

    Example:
        >>> from jaxpar import kv
        >>> kv.create("device")
        KVStore(kind='device', updater=assign, empty)
    """
    found = kind_named(kind, "kv.create")
    kind = found.name
    staleness = _check_staleness(found, staleness)
    if devices is not None:
        devices = checks.devices(devices, "kv.create")
    limits = BucketLimits(bucket_bytes, alone_bytes)
    if found.over_processes:
        distributed.join(f"kv.create: kind {kind!r}")
    elif found.in_rows and devices is None:
        harm = "each would cut the values over its own devices"
        distributed.check_joined(f"kv.create: kind {kind!r}", harm, launched=True)
        devices = tuple(jax.devices())
    return KVStore({}, {}, {}, kind, devices=devices, limits=limits, staleness=staleness)


def _check_staleness(kind: Kind, staleness: int | None) -> int:
    if staleness is None:
        return int(kind.delayed)
    staleness = checks.whole_number(staleness, "kv.create", "staleness", least=0)
    if staleness and not kind.delayed:
        raise ValueError(
            f"kv.create: staleness={staleness} is for kind 'dist_async'; kind {kind.name!r} applies a push at once"
        )
    return staleness


@answers
@in_user_mesh
def init(store: KVStore, key: int | Sequence[int], value: Any) -> KVStore:
    """Add keys with their first values. The updater's state of each key is made here too.

    In a store of a kind `dist_*`, and in one whose devices belong to several processes, every process must call this
    with the same keys and shapes. The values are those of process 0.

    Args:
        store: any store.
        key: an int, or a list of ints.
        value: an array of any shape and numeric dtype, or a list of one. For a list of keys, a list of them. Arrays are
            copied, so the caller may change or donate them. A `RowSparse` becomes the whole table.

    Returns:
        A new store. If one key of a list is wrong, none is added.

    Raises:
        ValueError: a key that the store holds, a key that appears twice, a list of the wrong length, processes that
            give different keys or shapes. For kind `sharded`, an updater that is not elementwise for a value.
        TypeError: a key that is no int, a value that is no array, or a tracer of a function that has ended.
        RuntimeError: an array that was deleted, as by donating it.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import kv
        >>> store = kv.init(kv.create("device"), 3, jnp.full((2, 3), 2.0))
        >>> kv.pull(store, 3).tolist()
        [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]
    """
    keys, many = checks.as_keys(key)
    given = checks.as_values(keys, value, many, "kv.init")
    if isinstance(store.updater, TreeOptimizer):
        raise ValueError(
            f"kv.init: keys {checks.shorten(keys)}: the optimizer of this store sees the whole pytree that "
            "kv.from_params was given, which has no such keys; make a store of all params"
        )
    if is_on_mesh(store) and (others := [k for k in keys if k not in dict(store.layouts)]):
        raise ValueError(
            f"kv.init: keys {checks.shorten(others)}: values of this store are split over a mesh as kv.from_params was "
            "asked to, which gave no sharding for these keys; make a store of all params, or a second store"
        )
    twice = [k for k, count in Counter([*store.values, *keys]).items() if count > 1]
    if twice:
        raise ValueError(f"kv.init: key {twice[0]} is initialised already; push changes its value")
    arrays = _own_arrays(dict(zip(keys, given, strict=True)))
    tree_optimizer.check_shares(store, arrays, "kv.init")
    if kind_of(store).over_processes or processes.to_share(arrays, store.devices or ()):
        arrays = _values_of_first(arrays)
    if is_split(store):
        rows = {k: Rows(tuple(v.shape), shards(store)) for k, v in arrays.items()}
        store = dataclasses.replace(store, layouts=(*store.layouts, *rows.items()))
    values = {k: lay_out(store, k, v) for k, v in arrays.items()}
    states = {k: start_state(store, k, v) for k, v in values.items()}
    return with_changes(store, Changes(values, states))


def signature(arrays: Mapping[int, Any]) -> str:
    """Keys, shapes and dtypes as text, for processes to compare."""
    return ", ".join(f"key {k} {checks.describe(v)}" for k, v in arrays.items()) or "no key"


def _own_arrays(given: Mapping[int, Any]) -> dict[int, jax.Array]:
    """The given values as arrays in memory of their own: a list of one as that one, as in a push, rows as a table."""
    given = {k: v[0] if isinstance(v, (list, tuple)) and len(v) == 1 else v for k, v in given.items()}
    given = {k: to_dense(v) if isinstance(v, RowSparse) else v for k, v in given.items()}
    arrays = {k: checks.array(v, f"kv.init: value of key {k}") for k, v in given.items()}
    return arrays | own_copies({k: v for k, v in arrays.items() if v is given[k]})


def _values_of_first(arrays: dict[int, jax.Array]) -> dict[int, jax.Array]:
    """The values that process 0 gives, if there are several processes."""
    if processes.count() == 1 or is_traced(arrays):
        return arrays
    processes.agree("kv.init: every process must give the same keys, in the same shapes", signature(arrays))
    local = {k: v for k, v in arrays.items() if not spans_processes(v)}
    first = processes.from_first(local)
    return arrays | {k: put(v, local[k].sharding) if local[k].committed else jnp.asarray(v) for k, v in first.items()}


@answers
@in_user_mesh
def set_updater(store: KVStore, updater: Updater | UpdateFn) -> KVStore:
    """Replace the updater. Its state for each key starts from scratch.

    In a store of kind `sharded` an `Updater` sees one device's flat share of a value. So `init` and `update` are
    traced on the value and on a share, and must be the same elementwise program. A plain function sees whole values
    at the prompt. Inside `pmap` and `shard_map` it sees shares, and is checked when it is traced.

    Args:
        store: any store.
        updater: a `jp.updaters.Updater`, compiled into each push, or a pure function
            `updater(key, pushed, stored) -> new_stored`. Outside `jit`, a plain function runs in Python on every
            push, once for each key in ascending order. So a `print` in it prints. An exception in it reaches the
            caller and the old store stays valid.

    Returns:
        A new store with the same values.

    Raises:
        TypeError: `updater` is neither. A plain function does not take three arguments, or `Updater.update` four.
        ValueError: the kind is `sharded` and the `Updater` is not elementwise for a value of the store.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import kv
        >>> store = kv.init(kv.create(), 3, jnp.full(2, 4.0))
        >>> store = kv.set_updater(store, lambda key, pushed, stored: stored + 2 * pushed)
        >>> kv.pull(kv.push(store, 3, jnp.ones(2)), 3).tolist()
        [6.0, 6.0]
    """
    check_updater(updater, "kv.set_updater")
    check_stored(store.values, store.values, "kv.set_updater")
    store = dataclasses.replace(store, updater=updater, optimizer_state=())
    tree_optimizer.check_shares(store, specs_of(store), "kv.set_updater")
    state = {k: start_state(store, k, v) for k, v in store.values.items()}
    return dataclasses.replace(store, updater_state=state)


@answers
@in_user_mesh
def set_optimizer(store: KVStore, tx: optax.GradientTransformation | Updater) -> KVStore:
    """Make an optax transform the updater. What is pushed is then the gradient of the stored value.

    In a store made by `kv.from_params` the transform sees the whole pytree, with one state for all of it in
    `store.optimizer_state`. A push must then have all floating keys. In any other store each key has its own state.

    Args:
        store: any store.
        tx: an `optax.GradientTransformation`. In a store of kind `sharded` it sees one device's flat share of each
            value, so it must be elementwise, as `sgd`, `adam` and `adamw` are.

    Returns:
        A new store with the same values.

    Raises:
        TypeError: `tx` is no optax transform.
        ValueError: in a store with one state a key, `tx` couples the keys, as clipping by the norm over all of them
            does. For kind `sharded`, `tx` is not elementwise, as `lamb`, `muon` and a mask by the number of axes are
            not. In a store with a staleness, `tx` reads the loss, as `optax.contrib.reduce_on_plateau` does.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jaxpar import kv
        >>> store = kv.set_optimizer(kv.init(kv.create(), 0, jnp.ones(2)), optax.sgd(0.5))
        >>> kv.pull(kv.push(store, 0, jnp.ones(2)), 0).tolist()
        [0.5, 0.5]
    """
    if isinstance(tx, Updater):
        return set_updater(store, tx)
    check_stored(store.values, store.values, "kv.set_optimizer")
    checks.transform(tx, "kv.set_optimizer")
    if store.treedef is not None:
        return tree_optimizer.with_optimizer(store, tx, "kv.set_optimizer")
    if couples_keys(tx):
        raise ValueError(
            "kv.set_optimizer: this transform computes the update of one key from the gradients of others (as "
            "optax.clip_by_global_norm does), and this store updates key by key; make the store by "
            "kv.from_params(params, optimizer=...), whose optimizer sees the whole pytree, or give that part to "
            "train.make_train_step as grad_transform"
        )
    return set_updater(store, from_optax(tx))


@answers
def set_gradient_compression(store: KVStore, spec: Mapping[str, Any]) -> KVStore:
    """Compress what is sent between devices, with error feedback. The residuals start from scratch.

    Args:
        store: any store.
        spec: `{"type": "2bit", "threshold": 0.5}`. `jaxpar.compression` lists the types. `none` ends it. A push of a
            `RowSparse` is then refused, as in MXNet.

    Returns:
        A new store with the same values.

    Raises:
        ValueError: an unknown type or parameter, a value out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import kv
        >>> store = kv.init(kv.create("device"), 3, jnp.zeros(3))
        >>> store = kv.set_gradient_compression(store, {"type": "2bit", "threshold": 0.5})
        >>> store = kv.push(store, 3, jnp.array([0.4, 0.6, -0.7]))
        >>> kv.pull(store, 3).tolist()
        [0.0, 0.5, -0.5]
    """
    compressor = compression.make(spec)
    if is_on_mesh(store) and compressor is not None:
        raise ValueError(
            "kv.set_gradient_compression: values of this store are split over a mesh, and the compiler sums their "
            "gradients, so no device has one to compress; make the store without sharding= and mesh=, and with an "
            "elementwise optimizer for kind 'sharded'"
        )
    return dataclasses.replace(store, compressor=compressor, residuals={})
