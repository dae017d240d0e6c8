"""What a checkpoint holds of a store for each pushing device: grouped by the keys of the store, and checked."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ..kv import KVStore, _staleness
from ..kv._store import shapes_of

Saved = dict[str, Any]  # (record, array) by name


def by_key(saved: Saved, prefix: str, store: KVStore) -> dict[int, Saved]:
    """What was saved below a prefix, for each key of the store; the names are the rest after the key.

    Raises:
        ValueError: a key that the store does not have.
    """
    keys, found = {str(k): k for k in store.values}, dict[int, Saved]()
    for name, (record, array) in saved.items():
        if name.startswith(prefix + "/"):
            key, _, rest = name.removeprefix(prefix + "/").partition("/")
            if key not in keys:
                raise ValueError(f"{record['words']}: found {name!r}, but the store of `like` has no such key")
            found.setdefault(keys[key], {})[rest] = record, array
    return found


def check_rows(saved: Saved) -> None:
    """`ValueError` for an array that does not have a row for each device."""
    for record, array in saved.values():
        if not array.ndim or not array.shape[0]:
            raise ValueError(f"{record['words']}: expected a row for each device, found the shape {list(array.shape)}")


def waiting(store: KVStore, k: int, found: Saved, count: int | None) -> _staleness.PendingPushes:
    """What waits for a key, regrouped for `count` devices; None for as many as before.

    Raises:
        ValueError: it waits for another number of pushes, or is not of the key's shape and dtype.
    """
    record = next(iter(found.values()))[0]
    words, staleness = record["words"].partition(":")[0], len(found) - 1
    if found.keys() != {"count", *(f"values/{i}" for i in range(staleness))}:
        raise ValueError(f"{words}: expected a count and the values that wait, found {sorted(found)}")
    if staleness != store.staleness:
        raise ValueError(
            f"{words}: values wait for {staleness} pushes, but the store of `like` has staleness {store.staleness}; "
            f"make it with kv.from_params(..., kind='dist_async', staleness={staleness}), or apply what waits before "
            "saving (step.finish, kv.flush)"
        )
    arrays = [found[f"values/{i}"][1] for i in range(staleness)]
    rows, pushes = max((a.shape[0] for a in arrays if a.ndim), default=0), found["count"][1]
    expected = (rows, *shapes_of(store)[k]), store.values[k].dtype
    if not rows or any((a.shape, a.dtype) != expected for a in arrays) or (pushes.shape, pushes.dtype) != ((), "int32"):
        raise ValueError(f"{words}: what waits must be of the key's shape and dtype, with a row for each device")
    held = _staleness.PendingPushes(tuple(map(jnp.asarray, arrays)), jnp.asarray(pushes))
    return held if count is None else _staleness.regrouped(held, count)
