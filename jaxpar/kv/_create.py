"""The beginning of a store: an empty one, its keys, its updater and compression. Which process this is.

Each function gives a new store. Begin with `create` and `init`. An optimizer of `from_params` sees the whole pytree and
has one state, see `set_optimizer`; any other updater has a state for each key.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from .. import compression, distributed, sparse, updaters
from .._core import checks
from .._core.arguments import no_such_arguments
from .._core.arrays import Device, PyTree, is_traced
from .._core.transfers import allows_transfers
from .._devices import processes
from .._devices.collectives import BucketLimits
from .._devices.mesh import own_copies, put
from .._devices.user_mesh import in_user_mesh
from .._store import aggregate, store as stores
from .._store.mxnet_names import ARGUMENTS as MXNET_ARGUMENTS, KIND_ALIASES, OTHER_KINDS
from .._store.store import Changes, Form, KVStore, Layout

if TYPE_CHECKING:
    import optax


@no_such_arguments(MXNET_ARGUMENTS)
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

    With several processes, only the kinds `dist_*` sum over processes outside `jit`. Each process first sums the values
    of its own devices: `dist_device_sync` by an all-reduce, the other kinds on one device. Inside `pmap` and
    `shard_map` all kinds `dist_*` are equal.

    A kind `dist_*` calls `jp.distributed.initialize()`. So make this store before the first use of JAX. Without other
    processes the store has one worker.

    Args:
        kind: see the table.
        devices: the devices of the values, in order. None: kind `sharded` takes all devices. With other kinds, a value
            stays on its device and then follows the devices of the pushes.
        staleness: for kind `dist_async` only: a push is applied this many pushes later. None is 1. 0 equals
            `dist_sync`. Each unit costs every device the memory of one copy of the values.
        bucket_bytes: the largest size of a bucket, in which small values are sent together.
        alone_bytes: a value of at least this many bytes is sent alone, without a copy.

    Raises:
        ValueError: the kind is unknown; devices are empty or repeated; a size or the staleness is negative; another
            kind than `dist_async` has a staleness.
        RuntimeError: the processes of a kind `dist_*` cannot join, see `jp.distributed.initialize`. For kind `sharded`
            over all devices: a process of `python -m jaxpar launch` has not joined the others.

    Example:
        >>> from jaxpar import kv
        >>> kv.create("device")
        KVStore(kind='device', updater=assign, empty)
    """
    if kind in OTHER_KINDS:
        kinds = ", ".join(stores.KINDS)
        raise ValueError(f"kv.create: unknown kind {kind!r}; known are {kinds}; {OTHER_KINDS[kind]}")
    kind = checks.choice(KIND_ALIASES.get(kind, kind), "kv.create", "kind", stores.KINDS)
    traits = stores.KINDS[kind]
    if staleness is None:
        staleness = int(traits.delayed)
    staleness = checks.whole_number(staleness, "kv.create", "staleness", least=0)
    if staleness and not traits.delayed:
        raise ValueError(f"kv.create: staleness={staleness} is for kind 'dist_async'; kind {kind!r} delays no pushes")
    if devices is not None:
        devices = checks.devices(devices, "kv.create")
    # Processes join before anything asks JAX for devices: with its devices known, JAX joins no others.
    limits = BucketLimits(bucket_bytes, alone_bytes)
    # Values of kind `sharded` are cut for a number of devices, which must be that of all processes.
    if traits.over_processes:
        distributed.join(f"kv.create: kind {kind!r}")
    elif traits.in_rows and devices is None:
        harm = "each process would split the values over its own devices only"
        distributed.check_joined(f"kv.create: kind {kind!r}", harm, launched=True)
        devices = tuple(jax.devices())
    return KVStore({}, {}, {}, kind, devices=devices, limits=limits, staleness=staleness)


@no_such_arguments(MXNET_ARGUMENTS)
@allows_transfers
@in_user_mesh
def init(store: KVStore, key: int | Sequence[int], value: PyTree) -> KVStore:
    """Add keys with their first values and updater states.

    For a kind `dist_*`, and for devices of several processes, every process must call `init` with the same keys and
    shapes. The store takes the values of process 0.

    Args:
        store: any store.
        key: an int, or a list of ints.
        value: an array of any shape and numeric dtype, or a list of one array; for a list of keys, a list of these.
            Arrays are copied, so the caller may change or donate them. A `RowSparse` is stored as the whole table.

    Raises:
        ValueError: the store has the key already; a key appears twice; the list has the wrong length; processes give
            different keys or shapes. For kind `sharded`: the updater is not elementwise for a value.
        RuntimeError: an array was deleted, for example by donation.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import kv
        >>> store = kv.init(kv.create("device"), 3, jnp.full((2, 3), 2.0))
        >>> kv.pull(store, 3).tolist()
        [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]
    """
    stores.check_is_store(store, "kv.init")
    keys, many = checks.find_keys(key, "kv.init")
    first_values = checks.as_values(keys, value, "kv.init") if many else [value]
    has_tree_optimizer = isinstance(store.updater, updaters._TreeOptimizer)
    if has_tree_optimizer or (stores.is_split(store) and not set(keys) <= dict(store.layouts).keys()):
        reason = "its optimizer sees all params" if has_tree_optimizer else "its values are split over a mesh"
        raise ValueError(
            f"kv.init: keys {checks.shorten(keys)}: the store takes no more keys, because {reason}; make a second store"
        )
    # A key that is there already would lose its value and its updater's state.
    twice = [k for k, count in Counter([*store.values, *keys]).items() if count > 1]
    if twice:
        raise ValueError(f"kv.init: key {twice[0]} is initialised already; push changes its value")
    # Each value as an array in memory of the store's own, since the caller may donate what it gave. A list of one is
    # that one, as in a push, and rows are a table. What `checks.array` made out of a list or a number is ours already.
    plain: dict[int, PyTree] = {}
    for k, value_of_key in zip(keys, first_values, strict=True):
        if isinstance(value_of_key, (list, tuple)) and len(value_of_key) == 1:
            value_of_key = value_of_key[0]
        plain[k] = sparse.to_dense(value_of_key) if isinstance(value_of_key, sparse.RowSparse) else value_of_key
    arrays = {k: checks.array(v, f"kv.init: value of key {k}") for k, v in plain.items()}
    arrays |= own_copies({k: v for k, v in arrays.items() if v is plain[k]})
    aggregate.check_shares(store, arrays, "kv.init")

    # Each process may have drawn other random numbers. From here on all of them hold the values of process 0.
    is_shared = stores.KINDS[store.kind].over_processes or processes.to_share(arrays, store.devices or ())
    if is_shared and processes.count() > 1 and not is_traced(arrays):
        processes.agree("kv.init: every process must give the same keys, in the same shapes", signature(arrays))
        of_first = processes.from_first(arrays)
        arrays = {k: put(v, arrays[k].sharding) if arrays[k].committed else jnp.asarray(v) for k, v in of_first.items()}

    if stores.is_in_rows(store):
        # A frozen value stays whole: its rows would be gathered at every step.
        count, frozen = stores.shards(store), store.frozen
        rows = {k: Layout(Form.ROWS, tuple(v.shape), count) for k, v in arrays.items() if k not in frozen}
        store = dataclasses.replace(store, layouts=(*store.layouts, *rows.items()))
    values = {k: stores.lay_out(store, k, v) for k, v in arrays.items()}
    states = {k: stores.start_state(store, k, v) for k, v in values.items()}
    return stores.with_changes(store, Changes(values, states))


def signature(arrays: Mapping[int, Any]) -> str:
    """Keys, shapes and dtypes as text, for processes to compare."""
    return ", ".join(f"key {k} {checks.describe(v)}" for k, v in arrays.items()) or "no key"


@allows_transfers
@in_user_mesh
def set_updater(store: KVStore, updater: updaters.Updater | updaters.UpdateFn) -> KVStore:
    """Replace the updater. The updater state of each key starts anew.

    In a store of kind `sharded`, an `Updater` sees one device's flat share of a value, so it must be elementwise:
    `init` and `update` are traced on a value and on a share, and both programs must agree. A plain function sees whole
    values outside `jit`. Inside `pmap` and `shard_map` it sees shares and is checked at tracing.

    Args:
        store: any store.
        updater: a `jp.updaters.Updater`, compiled into each push, or a pure function
            `updater(key, pushed, stored) -> new_stored`. Outside `jit`, a plain function runs in Python at every push,
            once for each key in ascending order. It may print. If it raises, the caller gets the exception, and the old
            store stays valid.

    Raises:
        TypeError: a function does not take these arguments.
        ValueError: the kind is `sharded` and the `Updater` is not elementwise for a value of the store.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import kv
        >>> store = kv.init(kv.create(), 3, jnp.full(2, 4.0))
        >>> store = kv.set_updater(store, lambda key, pushed, stored: stored + 2 * pushed)
        >>> kv.pull(kv.push(store, 3, jnp.ones(2)), 3).tolist()
        [6.0, 6.0]
    """
    updaters._check_updater(updater, "kv.set_updater")
    checks.find_keys([*store.values], "kv.set_updater", store)
    # The states of another updater say nothing to this one, not even where they have the same shapes.
    store = dataclasses.replace(store, updater=updater, optimizer_state=())
    aggregate.check_shares(store, stores.specs_of(store), "kv.set_updater")
    state = {k: stores.start_state(store, k, v) for k, v in store.values.items()}
    return dataclasses.replace(store, updater_state=state)


@no_such_arguments(MXNET_ARGUMENTS)
@allows_transfers
@in_user_mesh
def set_optimizer(store: KVStore, tx: optax.GradientTransformation | updaters.Updater) -> KVStore:
    """Make an optax transform the updater. Then push gradients.

    In a store from `kv.from_params`, the transform updates the whole pytree, with one state in `store.optimizer_state`.
    Then a push must have every floating key that is not frozen. In any other store, each key has its own state.

    Args:
        store: any store.
        tx: an `optax.GradientTransformation`. In a store of kind `sharded`, the transform sees one device's flat share
            of each value, so it must be elementwise, as `sgd`, `adam` and `adamw` are.

    Raises:
        ValueError: in a store with one state for each key: `tx` couples the keys, as clipping by the global norm does.
            For kind `sharded`: `tx` is not elementwise, such as `lamb`, `muon`, or a mask by the number of axes. In a
            store with staleness: `tx` reads the loss, as `optax.contrib.reduce_on_plateau` does.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jaxpar import kv
        >>> store = kv.set_optimizer(kv.init(kv.create(), 0, jnp.ones(2)), optax.sgd(0.5))
        >>> kv.pull(kv.push(store, 0, jnp.ones(2)), 0).tolist()
        [0.5, 0.5]
    """
    if isinstance(tx, updaters.Updater):
        return set_updater(store, tx)
    checks.find_keys([*store.values], "kv.set_optimizer", store)
    checks.transform(tx, "kv.set_optimizer")
    if store.treedef is None:
        if updaters._couples_keys(tx):
            raise ValueError(
                "kv.set_optimizer: tx computes the update of one key from the gradients of others; use "
                "kv.from_params(params, optimizer=tx), or make_train_step(grad_transform=tx); updaters.from_optax(tx) "
                "in place of tx takes each key by itself"
            )
        return set_updater(store, updaters.from_optax(tx))

    # A store of `from_params` gets an optimizer of the whole pytree, which may be given shares, and knows no loss where
    # a push is late.
    optimizer = updaters._TreeOptimizer(tx)
    store = dataclasses.replace(store, updater=optimizer, updater_state=dict.fromkeys(store.values, ()))
    specs = stores.specs_of(store)
    aggregate.check_shares(store, specs, "kv.set_optimizer")
    if store.staleness and optimizer.reads_loss(stores.tree_of(store, specs)):
        raise ValueError("kv.set_optimizer: this optimizer reads the loss, which a late push lacks; use staleness=0")
    # Its state before the first update. A leaf with the shape of a param lies as that param does, so that the update
    # moves nothing between devices.
    store = dataclasses.replace(store, optimizer_state=optimizer.init(stores.tree_of(store, store.values)))
    if store.devices is None or is_traced(store.optimizer_state):
        return store
    homes = jax.tree.map(lambda layout: stores.home(store, layout), stores.state_layouts(store))
    return dataclasses.replace(store, optimizer_state=jax.tree.map(put, store.optimizer_state, homes))


@no_such_arguments(MXNET_ARGUMENTS)
@allows_transfers
def set_gradient_compression(store: KVStore, spec: Mapping[str, Any]) -> KVStore:
    """Compress pushes between devices, with error feedback.

    Args:
        store: any store.
        spec: `{"type": "2bit", "threshold": 0.5}`. `jaxpar.compression` lists the types. The type `none` turns
            compression off. With compression, a push of a `RowSparse` is an error, as in MXNet.

    Raises:
        ValueError: the type or a parameter is unknown, or a value is out of range.

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
    if stores.is_split(store) and compressor is not None:
        raise ValueError(
            "kv.set_gradient_compression: values are split over a mesh, and the compiler sums their gradients; use "
            "kind 'device' without sharding= and mesh="
        )
    return dataclasses.replace(store, compressor=compressor, residuals={})


# Which process this is.


def rank() -> int:
    """The number of this process, from 0.

    Raises:
        RuntimeError: the run has several processes, and this one has not joined the others, by a store of a kind
            `dist_*` or `jp.distributed.initialize()`.

    Example:
        >>> from jaxpar import kv
        >>> kv.rank()
        0
    """
    distributed.check_joined("kv.rank", "JAX would return 0 in each process")
    return jax.process_index()


def num_workers() -> int:
    """The number of processes. `RuntimeError` as for `rank`.

    Example:
        >>> from jaxpar import kv
        >>> kv.num_workers()
        1
    """
    distributed.check_joined("kv.num_workers", "JAX would return 1 in each process")
    return jax.process_count()


def barrier(name: str = "barrier") -> None:
    """Wait until every process has called `barrier`.

    Args:
        name: the name of the barrier, equal in every process.

    Raises:
        ValueError: processes give different names. Every process raises.
        RuntimeError: as for `rank`.

    Example:
        >>> from jaxpar import kv
        >>> kv.barrier("epoch 1")
    """
    distributed.check_joined("kv.barrier", "it would not wait for them")
    processes.refuse_elastic("kv.barrier")
    processes.agree("kv.barrier: the processes wait at different barriers", name)
