"""Empty stores, keys, updaters and compression."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .. import distributed
from .._core import checks
from .._core.arrays import Device, is_traced
from .._devices import collectives, processes
from .._devices.buckets import BucketLimits
from .._devices.mesh import mesh_of
from .._devices.placement import put, spans_processes
from ..updaters import UpdateFn, Updater
from ._store import KVStore, check_shares, home, shards, wholes_of

if TYPE_CHECKING:
    import optax


KINDS = ("local", "device", "sharded", "dist_sync", "dist_device_sync", "dist_async")


_ALIASES = {"nccl": "device"}


def create(
    kind: str = "local",
    *,
    devices: Sequence[Device] | None = None,
    staleness: int | None = None,
    bucket_bytes: int = BucketLimits.bucket_bytes,
    alone_bytes: int = BucketLimits.alone_bytes,
) -> KVStore:
    """An empty store.

    | kind | where a push is summed | where a value lives |
    |---|---|---|
    | `local` | gathered on one device | on that device |
    | `device` (also named `nccl`) | by an all-reduce | a copy on every device |
    | `sharded` | by a reduce-scatter | 1/N of it on each of N devices, the updater's state too |
    | `dist_sync`, `dist_device_sync` | as `device`, over the devices of every process | as `device`, in each process |
    | `dist_async` | as `dist_sync`, but `staleness` pushes later; `kv.flush` ends the wait | as `device` |

    Kind `sharded` needs an elementwise updater, see `kv.set_updater`.

    With several processes only the kinds that begin with `dist_` aggregate over them at the prompt: each process
    sums the values of its own devices first, `dist_sync` by gathering them on one of its devices, `dist_device_sync`
    by an all-reduce over those that push, as MXNet did on the host and on the GPUs; then the sums are summed over
    processes. Within `pmap` and `shard_map` the two are the same.

    A kind `dist_...` joins the other processes, as `jp.distributed.initialize()` does where that was not called: those
    of `python -m jaxpar launch`, SLURM, Open MPI or Kubernetes. So make this store before the first use of JAX, or call
    `initialize` there. With no others the store has one worker. A process that has joined stays as it is.

    Args:
        kind: see the table. MXNet took any unknown name for `local` without a word; here it is an error.
        devices: where the values live, in order. None: `sharded` takes all devices, the other kinds leave a
            value where it is and follow the devices that push.
        staleness: kind `dist_async` only (None there is 1): how many pushes later a push is applied. 0 is
            `dist_sync`. Each costs every device the memory of one more copy of the values.
        bucket_bytes: small values travel together in buckets of at most this many bytes.
        alone_bytes: a value of this many bytes or more travels alone and is not copied into a bucket.

    Raises:
        ValueError: unknown kind, no or repeated devices, negative sizes, a staleness below 0 or of another kind.
        TypeError: a staleness that is no int.
        RuntimeError: a kind `dist_...` in one of several processes, where JAX was used before they were joined; or the
            others cannot be joined (see `jp.distributed.initialize`). A kind `sharded` over all devices in a process
            of `python -m jaxpar launch` that has not joined the others.

    Example:
        >>> from jaxpar import kv
        >>> kv.create("device")
        KVStore(kind='device', updater=assign, empty)
    """
    kind = _ALIASES.get(kind, kind)
    if kind not in KINDS:
        raise ValueError(f"kv.create: unknown kind {kind!r}; known are {', '.join(KINDS)} and {', '.join(_ALIASES)}")
    staleness = _checked_staleness(kind, staleness)
    if devices is not None:
        devices = checks.devices(devices, "kv.create")
    limits = BucketLimits(bucket_bytes, alone_bytes)
    if kind.startswith("dist_"):
        distributed.join(f"kv.create: kind {kind!r}")
    elif kind == "sharded" and devices is None:
        harm = "each would cut the values over its own devices"
        distributed.check_joined(f"kv.create: kind {kind!r}", harm, launched=True)
        devices = tuple(jax.devices())
    return KVStore({}, {}, {}, kind, devices=devices, limits=limits, staleness=staleness)


def _checked_staleness(kind: str, staleness: int | None) -> int:
    if staleness is None:
        return 1 if kind == "dist_async" else 0
    if isinstance(staleness, bool) or not isinstance(staleness, (int, np.integer)):
        raise TypeError(f"kv.create: staleness must be an int of 0 or more, got {checks.describe(staleness)}")
    if staleness < 0:
        raise ValueError(f"kv.create: staleness must be an int of 0 or more, got {staleness}")
    if staleness and kind != "dist_async":
        raise ValueError(
            f"kv.create: staleness={staleness} is for kind 'dist_async'; kind {kind!r} applies a push at once"
        )
    return int(staleness)


def init(store: KVStore, key: int | Sequence[int], value: Any) -> KVStore:
    """The store with more keys. The updater's state of a key is made here too.

    Args:
        store: any store.
        key: an int, or a list of ints.
        value: an array of any shape and numeric dtype; for a list of keys a list of them. NumPy arrays are
            copied.

    In a store of a kind `dist_...`, and in one whose devices belong to several processes, every process must call
    this with the same keys and shapes, and the values are those of process 0, as MXNet took those of worker 0.

    Returns:
        A new store; where one key of a list is wrong, none is added.

    Raises:
        ValueError: a key that the store holds already, a key named twice, a list of the wrong length; processes
            that give different keys or shapes; kind `sharded` and an updater that is not elementwise for a value.
        TypeError: a key that is no int, a value that is no array.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import kv
        >>> store = kv.init(kv.create("device"), 3, jnp.full((2, 3), 2.0))
        >>> kv.pull(store, 3).tolist()
        [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]
    """
    keys, many = checks.as_keys(key)
    given = checks.as_values(keys, value, many, "kv.init")
    seen = set(store.values)
    for k in keys:
        if k in seen:
            raise ValueError(f"kv.init: key {k} is initialised already; push changes its value")
        seen.add(k)
    arrays = {k: checks.array(v, f"kv.init: value of key {k}") for k, v in zip(keys, given, strict=True)}
    check_shares(store, arrays, "kv.init")
    if store.kind.startswith("dist_") or processes.to_share(arrays, store.devices or ()):
        arrays = _of_process_0(arrays)
    values = {k: lay_out(store, v) for k, v in arrays.items()}
    shapes = store.shapes
    if store.kind == "sharded":
        shapes = (*shapes, *((k, tuple(v.shape)) for k, v in arrays.items()))
    return dataclasses.replace(
        store,
        values={**store.values, **values},
        updater_state={**store.updater_state, **{k: init_state(store, k, v) for k, v in values.items()}},
        shapes=shapes,
    )


def init_state(store: KVStore, key: int, value: jax.Array) -> Any:
    """The updater's state for a key, where the value lives; a plain function has none."""
    if not isinstance(store.updater, Updater):
        return ()
    state = store.updater.init(key, value)
    if store.devices is None or is_traced(value):
        return state
    on = home(store)
    everywhere = on if store.kind == "local" else NamedSharding(mesh_of(store.devices), PartitionSpec())
    return jax.tree.map(lambda leaf: put(leaf, on if leaf.shape == value.shape else everywhere), state)


def set_updater(store: KVStore, updater: Updater | UpdateFn) -> KVStore:
    """The store with another updater; its state for each key is made anew.

    Args:
        store: any store.
        updater: a `jp.updaters.Updater`, compiled into each push, or a pure function
            `updater(key, pushed, stored) -> new_stored`. A plain function runs in Python on every push made
            outside `jit`, once for each key in ascending order, so that a `print` in it prints. An exception in
            it reaches the caller and the old store stays valid (MXNet swallowed it).

    In a store of kind `sharded` an `Updater` sees one device's flat share of a value and must be elementwise: `init`
    and `update` are traced on the value and on a share, and must be the same elementwise program. A plain function
    sees whole values at the prompt. Inside `pmap` and `shard_map` it sees shares, and is checked when it is traced.

    Raises:
        TypeError: `updater` is neither.
        ValueError: the kind is `sharded` and the `Updater` is not elementwise for a value of the store.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import kv
        >>> store = kv.init(kv.create(), 3, jnp.full(2, 4.0))
        >>> store = kv.set_updater(store, lambda key, pushed, stored: stored + 2 * pushed)
        >>> kv.pull(kv.push(store, 3, jnp.ones(2)), 3).tolist()
        [6.0, 6.0]
    """
    if not callable(updater) and not isinstance(updater, Updater):
        hint = "; kv.set_optimizer takes an optax transform" if hasattr(updater, "update") else ""
        raise TypeError(
            "kv.set_updater: expected updater(key, pushed, stored) -> new_stored or a jp.updaters.Updater, "
            f"got {checks.describe(updater)}{hint}"
        )
    store = dataclasses.replace(store, updater=updater)
    check_shares(store, wholes_of(store), "kv.set_updater")
    state = {k: init_state(store, k, v) for k, v in store.values.items()}
    return dataclasses.replace(store, updater_state=state)


def set_optimizer(store: KVStore, tx: optax.GradientTransformation | Updater) -> KVStore:
    """The store with an optax transform as its updater: what is pushed is the gradient of the stored value.

    Args:
        store: any store.
        tx: an `optax.GradientTransformation`; its state is kept for each key. In a store of kind `sharded` it
            sees one device's flat share of a value, so it must be elementwise, as `sgd`, `adam` and `adamw` are.

    Raises:
        TypeError: `tx` is no optax transform.
        ValueError: `tx` couples the keys, such as clipping by the norm over all of them, which a store that
            updates key by key cannot do. Kind `sharded`: `tx` is not elementwise for a value of the store, as `lamb`,
            `muon` and a mask by the number of axes are not. Nothing was changed.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jaxpar import kv
        >>> store = kv.set_optimizer(kv.init(kv.create(), 0, jnp.ones(2)), optax.sgd(0.5))
        >>> kv.pull(kv.push(store, 0, jnp.ones(2)), 0).tolist()
        [0.5, 0.5]
    """
    from ..updaters import couples_keys, from_optax

    if isinstance(tx, Updater):
        return set_updater(store, tx)
    if not callable(getattr(tx, "init", None)) or not callable(getattr(tx, "update", None)):
        name = getattr(tx, "__name__", None) if callable(tx) else None
        hint = f"; call it first, {name}(0.1)" if name else ", say optax.sgd(0.1)"
        raise TypeError(f"kv.set_optimizer: expected an optax.GradientTransformation{hint}; got {checks.describe(tx)}")
    if couples_keys(tx):
        raise ValueError(
            "kv.set_optimizer: this transform computes the update of one key from the gradients of others (as "
            "optax.clip_by_global_norm does), and the store updates key by key; give that part to "
            "train.make_train_step as grad_transform, and the rest here"
        )
    return set_updater(store, from_optax(tx))


def set_gradient_compression(store: KVStore, spec: Mapping[str, Any]) -> KVStore:
    """A store that compresses what is sent between devices, with error feedback; the residuals start anew.

    Args:
        store: any store.
        spec: `{"type": "2bit", "threshold": 0.5}`; `jaxpar.compression` lists the types. `none` ends it.

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
    from .. import compression

    return dataclasses.replace(store, compressor=compression.make(spec), residuals={})


def signature(arrays: Mapping[int, Any]) -> str:
    """Keys, shapes and dtypes as text, for processes to compare."""
    return ", ".join(f"key {k} {checks.describe(v)}" for k, v in arrays.items()) or "no key"


def _of_process_0(arrays: dict[int, jax.Array]) -> dict[int, jax.Array]:
    """The values that process 0 gives, where there are several: as MXNet's rank 0 initialises the servers."""
    if jax.process_count() == 1 or is_traced(arrays):
        return arrays
    processes.agree("kv.init: every process must give the same keys, in the same shapes", signature(arrays))
    local = {k: v for k, v in arrays.items() if not spans_processes(v)}
    told = processes.from_first(local)
    return arrays | {k: put(v, local[k].sharding) if local[k].committed else jnp.asarray(v) for k, v in told.items()}


def lay_out(store: KVStore, value: jax.Array) -> jax.Array:
    """A whole value as the store keeps it: on the store's devices, in rows where the kind is `sharded`."""
    if store.kind == "sharded":
        value = collectives.to_rows(value, shards(store))
    sharding = home(store)
    return value if sharding is None or is_traced(value) else put(value, sharding)
