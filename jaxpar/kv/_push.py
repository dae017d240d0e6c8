"""Pushes: check the request, choose how to sum, apply the changes. Of rows too."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any, overload

import jax

from .. import sparse, updaters
from .._core import checks
from .._core.arrays import Device, is_at_prompt
from .._core.calls import answers
from .._core.checks import Key, Keys, find_keys
from .._core.recent import Recent
from .._devices.mesh import spans_processes
from .._devices.processes import refuse_elastic
from .._devices.user_mesh import in_user_mesh, now_if_constant, split_like
from .._store import aggregate, queue, tree_optimizer
from .._store.store import Changes, KVStore, is_on_mesh, is_split, kind_of, names, shapes_of, with_changes
from ..mxnet import _STORE_ARGUMENTS as MXNET_ARGUMENTS
from ..sparse import RowSparse
from ..updaters import Updater, _TreeOptimizer as TreeOptimizer, assign
from . import _eager, _processes
from ._pull import RETURNED, read


@answers("kv.push", MXNET_ARGUMENTS)
@now_if_constant
@in_user_mesh
def push(store: KVStore, key: Key | Keys, value: Any, *, axis_name: str | None = None) -> KVStore:
    """Sum the values of each key and apply the updater.

    Without an updater, the sum replaces the stored value.

    Args:
        store: any store.
        key: an int, the name of a parameter in a store of `from_params`, or a list of both. The values of a repeated
            key are summed.
        value: an array of the stored shape, or a list of such arrays on any devices, which are summed; for a list of
            keys, a list with one such entry for each key. An empty list pushes nothing. A `RowSparse`, or a list of
            them, changes only its own rows. Floating values are cast to a stored floating dtype.
        axis_name: the mapped axis to sum over, inside `pmap` or `shard_map`, where `value` is this device's share. See
            "Gradients under shard_map" below.

    Returns:
        The next store. `store` stays valid.

    Raises:
        KeyError: a key was never initialised, or no parameter has that name.
        ValueError: a shape or the length of a list is wrong; processes push different keys; outside `jit`, a store of
            another kind than `dist_*` has devices of several processes; a `RowSparse` is pushed to a store with
            compression, staleness or kind `sharded`.
        TypeError: a key is not an int, a dtype cannot be cast safely, or a value is a tracer of a function that has
            ended.
        RuntimeError: a pushed or stored array was deleted, for example by donation.
        NameError: no axis has that name.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import kv
        >>> store = kv.init(kv.create("device"), [3, 5], [jnp.zeros(2), jnp.zeros(())])
        >>> store = kv.push(store, [3, 5], [[jnp.ones(2), jnp.ones(2)], jnp.ones(())])
        >>> kv.pull(store, 3).tolist(), kv.pull(store, 5).tolist()
        ([2.0, 2.0], 1.0)

    Several processes:
        The kinds `dist_*` sum over all processes, and the other kinds sum within this process. Outside `jit`, each
        process pushes the values of its own devices. Each process sums its values first. Then the sums are added over
        the processes, and every process gets the same result. All processes must push the same keys in the same order,
        which every push checks. Only the sums between processes are compressed. Inside `pmap` and `shard_map`, all
        kinds sum over the axis.

    Gradients under shard_map:
        With `check_vma=True`, the default, jax already sums the gradient of replicated params, and a push would sum it
        again. Pass `check_vma=False`, or mark the params with `jax.lax.pcast(params, axis_name, to="varying")`, as
        `train.make_train_step` does.
    """
    return _pushed_store(store, key, value, axis_name)


@answers("kv.flush", MXNET_ARGUMENTS)
@now_if_constant
@in_user_mesh
def flush(store: KVStore, *, axis_name: str | None = None) -> KVStore:
    """Apply all pending pushes, oldest first, at the end of training.

    Args:
        store: any store. A store without staleness stays unchanged.
        axis_name: inside `pmap` or `shard_map`, the axis that splits the store.

    Returns:
        The next store, without pending pushes.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import kv, updaters
        >>> store = kv.init(kv.create("dist_async", staleness=2), 3, jnp.zeros(2))
        >>> store = kv.set_updater(store, updaters.accumulate)
        >>> for number in (1.0, 10.0, 100.0):
        ...     store = kv.push(store, 3, jnp.full(2, number))
        >>> kv.pull(store, 3).tolist(), kv.pull(kv.flush(store), 3).tolist()
        ([1.0, 1.0], [111.0, 111.0])
    """
    if not store.pending:
        return store
    at_prompt = axis_name is None and is_at_prompt((store.pending, store.values))
    return queue.flush(store, axis_name, _send(store, axis_name, at_prompt, depth=6))


def _pushed_store(store: KVStore, key: Key | Keys, value: Any, axis_name: str | None) -> KVStore:
    """What `push` returns."""
    pushed = _request(store, key, value)
    held = [(store.values[k], store.updater_state[k], store.residuals.get(k)) for k in pushed]
    at_prompt = axis_name is None and is_at_prompt((held, store.optimizer_state, pushed))
    across = at_prompt and _is_across_processes(store)
    if across:  # also where this process pushes nothing: others may wait for it
        _processes.agree(store, pushed)
    elif axis_name is None and jax.process_count() > 1:
        _check_within_process(store, pushed)
    if not pushed:
        return store
    rows = {k: vs for k, vs in pushed.items() if isinstance(vs[0], RowSparse)}
    dense = {k: vs for k, vs in pushed.items() if k not in rows}
    known = aggregate.counted(store, pushed)  # here, since the program of some keys does not see the counts of others
    changes = Changes()
    if rows:
        changes |= _push_rows(known, _processes.rows(known, rows) if across else rows, axis_name)
    if dense:
        send = _send(known, axis_name, at_prompt)
        changes |= queue.push(known, dense, axis_name, send) if store.staleness else send(known, dense)
    if known is not store:
        changes = aggregate.uncounted(changes)
    return with_changes(store, changes)


def _send(store: KVStore, axis_name: str | None, at_prompt: bool, depth: int = 7) -> queue.Send:
    """What gives the changes of a push without a delay. It is called with a store and the lists of values.

    `depth` is how many calls above this one the user's code is, for a warning.
    """
    if at_prompt:
        return _processes.push if _is_across_processes(store) else _eager.push
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if axis_name is None and axes and not kind_of(store).on_one_device:  # it is allowed, but rarely meant
        warnings.warn(
            f"kv.push: inside a pmap or shard_map over {', '.join(map(repr, axes))}, without axis_name, nothing is "
            f"summed over the devices; give axis_name={axes[0]!r}, or use kind='local' for a separate store on each",
            stacklevel=depth,
        )
    return functools.partial(aggregate.push, axis_name=axis_name)


def _is_across_processes(store: KVStore) -> bool:
    """Whether a push at the prompt is one that other processes make too."""
    across = kind_of(store).over_processes and jax.process_count() > 1
    if across:
        refuse_elastic(f"kv.push: kind {store.kind!r}")
    return across


def _check_within_process(store: KVStore, pushed: Any) -> None:
    for k in pushed:
        if spans_processes(store.values[k]):
            raise ValueError(
                f"kv.push: key {k}: this store of kind {store.kind!r} is on devices of several processes; push inside "
                "pmap or shard_map with axis_name, as a training step does, or use kind 'dist_sync'"
            )


@overload
def pushpull(
    store: KVStore, key: Key, value: Any, *, devices: None = None, axis_name: str | None = None
) -> tuple[KVStore, jax.Array]: ...
@overload
def pushpull(
    store: KVStore, key: Key, value: Any, *, devices: Sequence[Device], axis_name: str | None = None
) -> tuple[KVStore, list[jax.Array]]: ...
@overload
def pushpull(
    store: KVStore, key: Keys, value: Any, *, devices: None = None, axis_name: str | None = None
) -> tuple[KVStore, list[jax.Array]]: ...
@overload
def pushpull(
    store: KVStore, key: Keys, value: Any, *, devices: Sequence[Device], axis_name: str | None = None
) -> tuple[KVStore, list[list[jax.Array]]]: ...
@answers("kv.pushpull", MXNET_ARGUMENTS, RETURNED)
@now_if_constant
@in_user_mesh
def pushpull(
    store: KVStore,
    key: Key | Keys,
    value: Any,
    *,
    devices: Sequence[Device] | None = None,
    axis_name: str | None = None,
) -> tuple[KVStore, Any]:
    """Call `push`, then `pull` of the same keys.

    Args:
        store, key, value, axis_name: as in `push`.
        devices: as in `pull`.

    Returns:
        (the next store, the pulled values). Without an updater these are the sums.

    Raises:
        KeyError, TypeError, ValueError, NameError, RuntimeError: as for `push` and `pull`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import kv
        >>> store = kv.init(kv.create("device"), 0, jnp.zeros(2))
        >>> store, total = kv.pushpull(store, 0, [jnp.ones(2), jnp.ones(2)])
        >>> total.tolist()
        [2.0, 2.0]
    """
    store = _pushed_store(store, key, value, axis_name)
    return store, read(store, key, devices, axis_name)


def _request(store: KVStore, key: Key | Keys, value: Any) -> dict[int, list[Any]]:
    """The values of each key, checked, in ascending order of the keys. Keys with no value are left out."""
    keys, many = find_keys(key, store.values, store.paths, "kv.push")
    if still := [k for k in keys if k in store.frozen]:
        raise ValueError(
            f"kv.push: key {still[0]} ({names(store)[still[0]]!r}) is frozen, so it takes no gradient; push the "
            "others, or make the store without frozen="
        )
    given = checks.as_values(keys, value, many, "kv.push")
    shapes = shapes_of(store)
    pushed: dict[int, list[Any]] = {}
    for k, values in zip(keys, given, strict=True):
        values = values if isinstance(values, (list, tuple)) else [values]
        pushed.setdefault(k, []).extend([_check(v, k, shapes[k], store.values[k].dtype) for v in values])
    pushed = {k: pushed[k] for k in sorted(pushed) if pushed[k]}
    for k, values in pushed.items():
        if len({isinstance(v, RowSparse) for v in values}) > 1:
            raise TypeError(f"kv.push: key {k}: RowSparse and dense values cannot be pushed together")
    if isinstance(store.updater, TreeOptimizer):
        rows = [k for k, values in pushed.items() if isinstance(values[0], RowSparse)]
        tree_optimizer.check_pushed(store, pushed, rows)
    return pushed


def _check(value: Any, key: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """A value to push."""
    where = f"kv.push: value for key {key}"
    if isinstance(value, RowSparse):
        for leaf in (value.indices, value.values):
            checks.array(leaf, f"kv.push: rows for key {key}")
    else:
        value = checks.array(value, where)
    checks.same_shape(value, shape, where)
    checks.castable(value.dtype, dtype, where)
    return value


# Rows of a table: a sum over devices that stays sparse, and an update of these rows.


def _push_rows(store: KVStore, pushed: dict[int, list[RowSparse]], axis_name: str | None) -> Changes:
    """What a push of rows changes. It makes no residuals."""
    # With the default updater the rows replace the whole value, as in MXNet: the other rows become 0. Any other updater
    # sees the rows that are pushed, of the stored value and of its own state. Some of MXNet's optimizers update the
    # whole table instead, as MXNet does.
    refused = {
        "values of this store are split over a mesh and take no RowSparse; make the store of this table without mesh= "
        "and sharding=": is_on_mesh(store),
        f"a store of kind {store.kind!r} cuts values across their rows and takes no RowSparse; use kind 'device' or "
        "'local' for this table": is_split(store),
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
    values: dict[int, jax.Array] = {}
    states: dict[int, Any] = {}
    for key, rows in pushed.items():
        stored, state = store.values[key], store.updater_state[key]
        if axis_name is not None:
            aggregate.axis_size(axis_name, "kv.push")
        concrete = is_at_prompt((rows, stored, state))
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
        return aggregate.update_one(updater, key, pushed, state, stored)

    if not updaters._is_lazy(updater, state):
        return update(sparse.to_dense(total), state, stored)
    return sparse.lazy_update(update, total, state, stored, coalesced=True)


_compiled = Recent(lambda updater: jax.jit(functools.partial(_add_and_update, updater), static_argnums=(0, 1)))
