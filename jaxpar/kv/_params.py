"""A store out of any pytree of arrays, that pytree again, and a store moved to other devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

from .._core import checks
from .._core.arrays import Device
from .._devices import processes
from .._devices.collectives import from_rows, to_rows
from .._devices.mesh import STORE_AXIS, copied, mesh_of
from .._devices.placement import to_host
from ..updaters import UpdateFn, Updater
from . import _aggregate, _staleness
from ._create import create, init, set_optimizer, set_updater, signature
from ._pull import whole
from ._store import KVStore, check_shares, shapes_of, wholes_of

if TYPE_CHECKING:
    import optax


def from_params(
    params: Any,
    *,
    kind: str = "device",
    optimizer: optax.GradientTransformation | Updater | None = None,
    updater: Updater | UpdateFn | None = None,
    devices: Sequence[Device] | None = None,
    staleness: int | None = None,
) -> KVStore:
    """A store that holds a pytree of arrays: keys 0..n-1 in flatten order, the path of a leaf as its name.

    Args:
        params: any pytree whose leaves are arrays.
        kind: as in `kv.create`.
        optimizer: an optax transform, as in `kv.set_optimizer`.
        updater: as in `kv.set_updater`; not together with `optimizer`.
        devices, staleness: as in `kv.create`.

    Raises:
        TypeError: a leaf that is no array.
        ValueError: both an optimizer and an updater, an unknown kind; kind `sharded` and an optimizer that is not
            elementwise, see `kv.set_optimizer`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jaxpar import kv
        >>> store = kv.from_params({"w": jnp.ones(2), "b": jnp.zeros(1)}, optimizer=optax.sgd(0.1))
        >>> kv.names(store)
        {0: 'b', 1: 'w'}
    """
    if optimizer is not None and updater is not None:
        raise ValueError("kv.from_params: give an optimizer or an updater, not both")
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    store = dataclasses.replace(create(kind, devices=devices, staleness=staleness), paths=tuple(enumerate(paths)))
    if optimizer is not None:
        store = set_optimizer(store, optimizer)
    elif updater is not None:
        store = set_updater(store, updater)
    values = [_leaf(leaf, path) for path, (_, leaf) in zip(paths, leaves, strict=True)]
    store = init(store, list(range(len(values))), values)
    return dataclasses.replace(store, treedef=treedef)


def _leaf(leaf: Any, path: str) -> jax.Array:
    try:
        return checks.array(leaf, f"kv.from_params: leaf {path!r} of params")
    except TypeError as error:
        hint = "; separate the arrays of a model from all else first: eqx.partition(model, eqx.is_inexact_array) in"
        raise TypeError(f"{error}{hint} Equinox, nnx.split(model, nnx.Param) in Flax NNX") from None


def to_params(store: KVStore, *, axis_name: str | None = None) -> Any:
    """The pytree that `from_params` was given, with the values stored now.

    Args:
        store: made by `from_params`, and pushed to since.
        axis_name: for a store of kind `sharded` inside `pmap` or `shard_map`, as in `kv.pull`.

    Raises:
        ValueError: the store was not made by `from_params`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import kv
        >>> kv.to_params(kv.from_params({"w": jnp.ones(2)}))["w"].tolist()
        [1.0, 1.0]
    """
    if store.treedef is None:
        raise ValueError("kv.to_params: this store was not made by kv.from_params; kv.pull gives its values")
    keys = [k for k, _ in store.paths]
    if store.kind == "sharded":
        return store.treedef.unflatten(whole(store, keys, axis_name))
    return store.treedef.unflatten([store.values[k] for k in keys])


def place(store: KVStore, devices: Sequence[Device]) -> KVStore:
    """The store moved to other devices, values and updater states with it; the arrays are copies.

    A store of kind `sharded` is cut anew into one row for each device; of the other kinds, `local` too, each
    device gets a copy, as a program over these devices needs it. Residuals of a compressor belong to the
    devices that pushed; they stay where their number is the same and start anew otherwise. What waits in a store
    with a staleness is handed to the new devices, so that the sums to come are the same.

    Args:
        store: any store.
        devices: one or more different devices.

    Raises:
        ValueError: kind `sharded` and an updater that is not elementwise for shares of this many devices.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxpar import kv
        >>> store = kv.place(kv.from_params({"w": jnp.ones(2)}), jax.devices()[:1])
        >>> len(store.values[0].sharding.device_set)
        1
    """
    target = create(store.kind, devices=devices).devices
    assert target is not None
    store = _of_process_0(store, target)
    moved = dataclasses.replace(store, devices=target, values={}, updater_state={}, residuals={}, pending={})
    if store.devices is None or len(store.devices) != len(target):
        check_shares(moved, wholes_of(store), "kv.place")
    mesh = mesh_of(target)
    rows, everywhere = NamedSharding(mesh, P(STORE_AXIS)), NamedSharding(mesh, P())
    shapes = shapes_of(store)
    keys = sorted(store.values)

    def put(k: int, leaf: jax.Array) -> jax.Array:
        """A value, or a leaf of an updater's state, which is laid out as the value where it has its shape."""
        if store.kind == "sharded" and leaf.shape == store.values[k].shape:
            return copied(to_rows(from_rows(leaf, shapes[k]), len(target)), rows)
        return copied(leaf, everywhere)

    moved = dataclasses.replace(
        moved,
        values={k: put(k, store.values[k]) for k in keys},
        updater_state={k: jax.tree.map(lambda leaf, k=k: put(k, leaf), store.updater_state[k]) for k in keys},
    )
    return with_pending(with_residuals(moved, store.residuals), store.pending)


def _of_process_0(store: KVStore, target: Sequence[Device]) -> KVStore:
    """The store with process 0's values and states, where they are local and go to devices of several processes."""
    held = (store.values, store.updater_state)
    if not processes.to_share(held, target):
        return store
    processes.agree("kv.place: every process must hold the same keys, in the same shapes", signature(store.values))
    values, states = processes.from_first(held)
    return dataclasses.replace(store, values=values, updater_state=states)


def with_residuals(store: KVStore, before: dict[int, Any]) -> KVStore:
    """The store with a residual for each compressed key and each of its devices, so that a push makes none."""
    if store.compressor is None:
        return store
    assert store.devices is not None
    count = len(store.devices)
    along = NamedSharding(mesh_of(store.devices), P(STORE_AXIS))
    residuals = {}
    for k in sorted(_aggregate.compressed_keys(store, store.values)):
        fresh = _aggregate.start_residuals(store, k, count)
        held = before.get(k)
        same = held is not None and jax.tree.map(lambda x: x.shape, held) == jax.tree.map(lambda x: x.shape, fresh)
        residuals[k] = copied(held if same else fresh, along)
    return dataclasses.replace(store, residuals=residuals)


def with_pending(store: KVStore, before: dict[int, _staleness.PendingPushes]) -> KVStore:
    """The store with what waits on each of its devices, so that a push makes no room for it.

    Raises:
        ValueError: values that wait in this process alone, where the devices are of several.
    """
    if not store.staleness:
        return store
    assert store.devices is not None
    mesh = mesh_of(store.devices)
    along, everywhere = NamedSharding(mesh, P(STORE_AXIS)), NamedSharding(mesh, P())
    pending = {}
    for k in sorted(store.values):
        held = before.get(k)
        if held is None and not jnp.issubdtype(store.values[k].dtype, jnp.inexact):
            continue  # a step pushes what has a gradient
        if held is None:
            held = _staleness.start(store, k, len(store.devices))
        elif processes.to_share(held.values, store.devices):
            raise ValueError(
                f"kv.place: values pushed to key {k} by this process alone wait to be applied, and the devices are of "
                "several processes; call kv.flush before"
            )
        held = _staleness.regrouped(jax.tree.map(to_host, held), len(store.devices))
        pending[k] = _staleness.PendingPushes(copied(held.values, along), copied(held.count, everywhere))
    return dataclasses.replace(store, pending=pending)
