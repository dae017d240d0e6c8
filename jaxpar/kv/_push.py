"""The key-value store: init, push, pull as pure functions over an immutable pytree.

>>> import jax.numpy as jnp
>>> from jaxpar import kv
>>> store = kv.init(kv.create("device"), 3, jnp.full((2, 3), 2.0))
>>> store = kv.push(store, 3, [jnp.ones((2, 3))] * 4)
>>> kv.pull(store, 3).tolist()
[[4.0, 4.0, 4.0], [4.0, 4.0, 4.0]]

A pushed value goes this way: store -> buckets -> compression -> collective -> updater -> store. Typed at the
prompt, a push takes arrays or lists of arrays on any devices; inside `pmap` or `shard_map`, with `axis_name`, it
takes this device's share and sums over that axis.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any, overload

import jax

from .._core import checks
from .._core.arrays import Device, is_traced
from .._devices.placement import spans_processes
from ..sparse import RowSparse
from . import _aggregate, _eager, _eager_processes, _staleness
from ._pull import pull
from ._store import Changes, Key, KVStore, shapes_of, with_changes


def push(store: KVStore, key: Key, value: Any, *, axis_name: str | None = None) -> KVStore:
    """The store after the values of each key were summed and handed to the updater.

    Args:
        store: any store.
        key: an int, or a list of ints. A key that stands twice in the list has its values summed.
        value: an array of the stored shape, or a list of them (one for each device, any number, on any
            devices), which is summed; an empty list pushes nothing. For a list of keys, a list with one such
            entry for each. A `RowSparse` (or a list of them) touches its rows alone, see `jaxpar.sparse`.
            Floating values of any width are cast to a stored floating dtype.
        axis_name: inside `pmap` or `shard_map`, the axis to sum over; `value` is this device's share. Beware that
            in `shard_map` with `check_vma=True` (its default) jax sums the gradient by replicated params itself,
            and a push would sum it again: give the params `jax.lax.pcast(params, axis_name, to="varying")` first,
            or `check_vma=False`. `train.make_train_step` sees to that.

    In several processes the kinds `dist_...` sum over all of them. At the prompt every process pushes the values
    of its own devices, any number of them; they are summed first, then over processes, and every process gets the
    same sum. All must push the same keys in the same order, which is compared on every push. What crosses between
    processes travels in buckets, and compressed where the store says so (what crosses within a process is not).
    The other kinds sum what this process pushes. Inside `pmap` and `shard_map` all kinds sum over the axis.

    Returns:
        A new store. The sum of a key replaces the stored value, or goes through the store's updater.

    Raises:
        KeyError: a key that was never initialised.
        ValueError: a wrong shape, a list of the wrong length; processes that push different keys; at the prompt, a
            store that lies on devices of several, unless it is of a kind `dist_*`.
        TypeError: a key that is no int, a dtype that cannot be cast safely.
        NameError: there is no axis of that name.

    MXNet: `KVStore.push`. There a push of an unknown key gave no key in the message, a value of another shape
    changed the stored shape without a word, and a single pushed array was kept by reference.
    """
    pushed = _request(store, key, value)
    if _across_processes(store, pushed, axis_name):
        _eager_processes.agree(store, pushed)
    elif axis_name is None and jax.process_count() > 1:
        _check_within_process(store, pushed)
    if not pushed:
        return store
    rows = {k: vs for k, vs in pushed.items() if isinstance(vs[0], RowSparse)}
    dense = {k: vs for k, vs in pushed.items() if k not in rows}
    parts: list[Changes] = []
    if rows:
        from . import _rows

        if _across_processes(store, rows, axis_name):
            rows = _eager_processes.rows(store, rows)
        parts.append(_rows.push(store, rows, axis_name))
    if dense and store.staleness:
        parts.append(_staleness.push(store, dense, axis_name, functools.partial(_dense, axis_name=axis_name)))
    elif dense:
        parts.append(_dense(store, dense, axis_name))
    for changes in parts:
        store = with_changes(store, changes)
    return store


def flush(store: KVStore, *, axis_name: str | None = None) -> KVStore:
    """The store after everything that waits in it was applied, the oldest push first: for the end of training.

    Args:
        store: any store; without a staleness there is nothing to do.
        axis_name: inside `pmap` or `shard_map`, the axis over which the store is spread.

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
    return _staleness.flush(store, axis_name, functools.partial(_dense, axis_name=axis_name))


def _dense(store: KVStore, pushed: dict[int, list[jax.Array]], axis_name: str | None) -> Changes:
    if _across_processes(store, pushed, axis_name):
        return _eager_processes.push(store, pushed)
    if axis_name is None and not _traced(store, pushed):
        return _eager.push(store, pushed)
    if axis_name is None:
        _warn_unsummed(store)
    return _aggregate.push(store, pushed, axis_name)


def _warn_unsummed(store: KVStore) -> None:
    """A push inside `pmap` or `shard_map` without `axis_name` is allowed, and hardly ever meant."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if axes and store.kind != "local":
        warnings.warn(
            f"kv.push: inside a pmap or shard_map over {', '.join(map(repr, axes))}, without axis_name, nothing is "
            f"summed over the devices; give axis_name={axes[0]!r}, or use kind='local' for a store of its own on each",
            stacklevel=4,
        )


def _across_processes(store: KVStore, pushed: Any, axis_name: str | None) -> bool:
    """Whether this is a push at the prompt that other processes make too."""
    several = store.kind.startswith("dist_") and jax.process_count() > 1
    return several and axis_name is None and not _traced(store, pushed)


def _check_within_process(store: KVStore, pushed: Any) -> None:
    for k in pushed:
        if spans_processes(store.values[k]):
            raise ValueError(
                f"kv.push: key {k}: the store, of kind {store.kind!r}, lies on devices of several processes, and a "
                "push at the prompt is of one of them; push inside pmap or shard_map with axis_name, as a training "
                "step does, or use kind 'dist_sync' or 'dist_device_sync'"
            )


def _traced(store: KVStore, pushed: Any) -> bool:
    part = [(store.values[k], store.updater_state[k], store.residuals.get(k)) for k in pushed]
    return is_traced((part, pushed))


@overload
def pushpull(
    store: KVStore, key: int, value: Any, *, devices: None = None, axis_name: str | None = None
) -> tuple[KVStore, jax.Array]: ...


@overload
def pushpull(
    store: KVStore, key: int, value: Any, *, devices: Sequence[Device], axis_name: str | None = None
) -> tuple[KVStore, list[jax.Array]]: ...


@overload
def pushpull(
    store: KVStore, key: Sequence[int], value: Any, *, devices: None = None, axis_name: str | None = None
) -> tuple[KVStore, list[jax.Array]]: ...


@overload
def pushpull(
    store: KVStore, key: Sequence[int], value: Any, *, devices: Sequence[Device], axis_name: str | None = None
) -> tuple[KVStore, list[list[jax.Array]]]: ...


def pushpull(
    store: KVStore,
    key: Key,
    value: Any,
    *,
    devices: Sequence[Device] | None = None,
    axis_name: str | None = None,
) -> tuple[KVStore, Any]:
    """`push`, then `pull` of the same keys; a store without updater gives the sums back.

    Args:
        store, key, value, axis_name: as in `push`.
        devices: as in `pull`.

    Returns:
        (the new store, what was pulled).

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import kv
        >>> store = kv.init(kv.create("device"), 0, jnp.zeros(2))
        >>> store, total = kv.pushpull(store, 0, [jnp.ones(2), jnp.ones(2)])
        >>> total.tolist()
        [2.0, 2.0]
    """
    store = push(store, key, value, axis_name=axis_name)
    return store, pull(store, key, devices=devices, axis_name=axis_name)


def _request(store: KVStore, key: Key, value: Any) -> dict[int, list[Any]]:
    """The values of each key, checked, in ascending order of the keys; keys with no value are left out."""
    keys, many = checks.as_keys(key)
    checks.known(keys, store.values, "kv.push")
    shapes = shapes_of(store) if len(keys) > 1 else {keys[0]: _shape(store, keys[0])} if keys else {}
    pushed: dict[int, list[Any]] = {}
    for k, given in zip(keys, checks.as_values(keys, value, many, "kv.push"), strict=True):
        values = given if isinstance(given, (list, tuple)) else [given]
        pushed.setdefault(k, []).extend(_checked(v, k, shapes[k], store.values[k].dtype) for v in values)
    for k, values in pushed.items():
        if len({isinstance(v, RowSparse) for v in values}) > 1:
            raise TypeError(f"kv.push: key {k}: RowSparse and dense values cannot be pushed together")
    return {k: pushed[k] for k in sorted(pushed) if pushed[k]}


def _shape(store: KVStore, key: int) -> tuple[int, ...]:
    return shapes_of(store)[key] if store.kind == "sharded" else store.values[key].shape


def _checked(value: Any, key: int, shape: tuple[int, ...], dtype: Any) -> Any:
    if not isinstance(value, (jax.Array, RowSparse)):
        value = checks.array(value, f"kv.push: value for key {key}")
    if value.shape != shape:
        checks.same_shape(value, shape, f"kv.push: value for key {key}")
    given = value.values.dtype if isinstance(value, RowSparse) else value.dtype
    if given != dtype:
        checks.castable(given, dtype, f"kv.push: value for key {key}")
    return value
