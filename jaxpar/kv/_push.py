"""Pushes: check the request, choose how to sum, apply the changes."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any, overload

import jax

from .._core import checks
from .._core.arrays import Device, any_gone, is_traced
from .._core.keys import Key, Keys, find_keys
from .._devices.placement import spans_processes
from .._devices.processes import refuse_elastic
from .._devices.user_mesh import in_user_mesh
from .._store import aggregate, queue, tree_optimizer
from .._store.store import Changes, KVStore, Lists, kind_of, shapes_of, with_changes
from .._store.update import counted, uncounted
from ..sparse import RowSparse
from ..updaters import _TreeOptimizer as TreeOptimizer
from . import _eager, _processes, _rows
from ._mxnet import answers
from ._pull import read


@answers
@in_user_mesh
def push(store: KVStore, key: Key | Keys, value: Any, *, axis_name: str | None = None) -> KVStore:
    """Sum what is pushed to each key, apply the updater, and return the next store.

    The sum of a key replaces the stored value, or goes through the store's updater.

    Args:
        store: any store.
        key: an int, the name of a parameter in a store of `from_params`, or a list of both. A key may appear twice. Its
            values are summed.
        value: an array of the stored shape, or a list of them, any number on any devices, which is summed. An empty
            list pushes nothing. For a list of keys, a list with one such entry per key. A `RowSparse`, or a list of
            them, changes its own rows only. Floating values of any width are cast to a stored floating dtype.
        axis_name: the mapped axis to sum over, inside `pmap` or `shard_map`. `value` is this device's share. See
            "Gradients under shard_map" below.

    Returns:
        The next store. `store` stays valid.

    Raises:
        KeyError: a key that was never initialised, or a name that no parameter has.
        ValueError: a wrong shape, a list of the wrong length, or processes that push different keys. At the prompt,
            a store on devices of several processes, unless it is of a kind `dist_*`. A `RowSparse` for a store that
            compresses, cuts or delays what is pushed.
        TypeError: a key that is no int, a dtype that cannot be cast safely, or a tracer of a function that has ended.
        RuntimeError: a pushed or stored array was deleted, as by donating it.
        NameError: there is no axis of that name.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import kv
        >>> store = kv.init(kv.create("device"), [3, 5], [jnp.zeros(2), jnp.zeros(())])
        >>> store = kv.push(store, [3, 5], [[jnp.ones(2), jnp.ones(2)], jnp.ones(())])
        >>> kv.pull(store, 3).tolist(), kv.pull(store, 5).tolist()
        ([2.0, 2.0], 1.0)

    Several processes:
        The kinds `dist_*` sum over all processes, the other kinds sum what this process pushes. At the prompt every
        process pushes the values of its own devices, any number of them. They are summed first, then over processes,
        and every process gets the same sum. All must push the same keys in the same order, which is compared on every
        push. Only the sums between processes are compressed. Inside `pmap` and `shard_map` all kinds sum over the
        axis.

    Gradients under shard_map:
        With `check_vma=True`, the default, jax already sums the gradient of replicated params, and a push would sum
        it again. Pass `check_vma=False`, or mark the params with `jax.lax.pcast(params, axis_name, to="varying")`.
        `train.make_train_step` does.
    """
    return _pushed_store(store, key, value, axis_name)


@answers
@in_user_mesh
def flush(store: KVStore, *, axis_name: str | None = None) -> KVStore:
    """Apply all pending pushes, the oldest first: for the end of training.

    Args:
        store: any store. Without a staleness nothing changes.
        axis_name: inside `pmap` or `shard_map`, the axis over which the store is spread.

    Returns:
        The next store, in which nothing is pending.

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
    return queue.flush(store, axis_name, functools.partial(_push_dense, axis_name=axis_name))


def _pushed_store(store: KVStore, key: Key | Keys, value: Any, axis_name: str | None) -> KVStore:
    """What `push` returns."""
    if axis_name is not None and not isinstance(axis_name, (str, tuple)):
        raise TypeError(f"kv.push: axis_name must be the name of a mapped axis, got {checks.describe(axis_name)}")
    pushed = _request(store, key, value)
    across = _is_across_processes(store, pushed, axis_name)
    if across:
        _processes.agree(store, pushed)
    elif axis_name is None and jax.process_count() > 1:
        _check_within_process(store, pushed)
    rows = {k: vs for k, vs in pushed.items() if isinstance(vs[0], RowSparse)}
    dense = {k: vs for k, vs in pushed.items() if k not in rows}
    known = counted(store, pushed)
    parts: list[Changes] = []
    if rows:
        parts.append(_rows.push(known, _processes.rows(known, rows) if across else rows, axis_name))
    if dense:
        send = functools.partial(_push_dense, axis_name=axis_name)
        parts.append(queue.push(known, dense, axis_name, send) if store.staleness else send(known, dense))
    if known is not store:
        parts = [uncounted(changes) for changes in parts]
    return functools.reduce(with_changes, parts, store)


def _push_dense(store: KVStore, pushed: Lists, axis_name: str | None) -> Changes:
    if _is_across_processes(store, pushed, axis_name):
        return _processes.push(store, pushed)
    if axis_name is None and not _is_traced(store, pushed):
        return _eager.push(store, pushed)
    if axis_name is None:
        _warn_without_axis(store)
    return aggregate.push(store, pushed, axis_name)


def _warn_without_axis(store: KVStore) -> None:
    """A push inside `pmap` or `shard_map` without `axis_name` is allowed, but rarely meant."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if axes and not kind_of(store).on_one_device:
        warnings.warn(
            f"kv.push: inside a pmap or shard_map over {', '.join(map(repr, axes))}, without axis_name, nothing is "
            f"summed over the devices; give axis_name={axes[0]!r}, or use kind='local' for a store of its own on each",
            stacklevel=7,  # the caller of `push` or `pushpull`
        )


def _is_across_processes(store: KVStore, pushed: Any, axis_name: str | None) -> bool:
    """Whether this is a push at the prompt that other processes make too."""
    several = kind_of(store).over_processes and jax.process_count() > 1
    across = several and axis_name is None and not _is_traced(store, pushed)
    if across:
        refuse_elastic(f"kv.push: kind {store.kind!r}")
    return across


def _check_within_process(store: KVStore, pushed: Any) -> None:
    for k in pushed:
        if spans_processes(store.values[k]):
            raise ValueError(
                f"kv.push: key {k}: the store, of kind {store.kind!r}, is on devices of several processes, and a "
                "push at the prompt is of one of them; push inside pmap or shard_map with axis_name, as a training "
                "step does, or use kind 'dist_sync' or 'dist_device_sync'"
            )


def _is_traced(store: KVStore, pushed: Any) -> bool:
    part = [(store.values[k], store.updater_state[k], store.residuals.get(k)) for k in pushed]
    return is_traced((part, store.optimizer_state, pushed))


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


@answers
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
        (the next store, what was pulled). A store without updater gives the sums.

    Raises:
        KeyError, TypeError, ValueError, NameError, RuntimeError: as of `push` and `pull`.

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
    given = checks.as_values(keys, value, many, "kv.push")
    gone = any_gone(given)
    shapes = shapes_of(store)
    pushed: dict[int, list[Any]] = {}
    for k, values in zip(keys, given, strict=True):
        values = values if isinstance(values, (list, tuple)) else [values]
        pushed.setdefault(k, []).extend(_check(v, k, shapes[k], store.values[k].dtype, gone) for v in values)
    for k, values in pushed.items():
        if len({isinstance(v, RowSparse) for v in values}) > 1:
            raise TypeError(f"kv.push: key {k}: RowSparse and dense values cannot be pushed together")
    pushed = {k: pushed[k] for k in sorted(pushed) if pushed[k]}
    if isinstance(store.updater, TreeOptimizer):
        tree_optimizer.check_pushed(
            store, pushed, [k for k, values in pushed.items() if isinstance(values[0], RowSparse)]
        )
    return pushed


def _check(value: Any, key: int, shape: tuple[int, ...], dtype: Any, gone: bool) -> Any:
    """A value to push. `gone` says that some value of the push is deleted, so that it is found here."""
    if isinstance(value, RowSparse):
        for leaf in (value.indices, value.values):
            checks.array(leaf, f"kv.push: rows for key {key}")
    elif gone or not isinstance(value, jax.Array):
        value = checks.array(value, f"kv.push: value for key {key}")
    if value.shape != shape:
        checks.same_shape(value, shape, f"kv.push: value for key {key}")
    given = value.values.dtype if isinstance(value, RowSparse) else value.dtype
    if given != dtype:
        checks.castable(given, dtype, f"kv.push: value for key {key}")
    return value
