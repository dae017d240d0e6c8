"""What a store looks like at the prompt and in a notebook."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from .._core.arrays import is_traced, nbytes
from .._core.text import Table, plural
from ..updaters import accumulate, assign

_COLUMNS = ("key", "name", "value", "bytes", "devices")


def table(store: Any, names: Mapping[int, str], shapes: Mapping[int, tuple[int, ...]]) -> Table:
    """A line about a store, or a pytree of its structure, then a row for each key. `shapes` is empty for no arrays."""
    return Table(f"KVStore({_summary(store)})", _COLUMNS, list(_rows(store, names, shapes)))


def _summary(store: Any) -> str:
    words = [f"kind={store.kind!r}", f"updater={_updater_name(store.updater)}"]
    words += [f"compression={store.compressor}"] if store.compressor is not None else []
    words += [f"staleness={store.staleness}"] if store.staleness else []
    if not store.values:
        return ", ".join([*words, "empty"])
    words.append(f"{plural(len(store.values), 'key')}, {_bytes(store.values):,} bytes")
    state = _bytes((store.updater_state, store.optimizer_state))
    pending = _bytes([leaf for leaf in jax.tree.leaves(store.pending) if getattr(leaf, "ndim", 0)])  # not the counts
    words += [f"updater state {state:,} bytes"] if state else []
    words += [f"pending {pending:,} bytes"] if pending else []
    return ", ".join(words)


def _bytes(tree: Any) -> int:
    return sum(nbytes(leaf) for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype"))


def _updater_name(updater: Any) -> str:
    for name, known in (("assign", assign), ("accumulate", accumulate)):
        if updater == known:
            return name
    inner = getattr(updater, "update", updater)
    if hasattr(updater, "tx"):
        return "optax transform of all params"
    if hasattr(inner, "tx"):
        return "optax transform"
    if hasattr(inner, "rule"):
        return f"mxnet_{inner.rule.__name__}"
    inner = getattr(inner, "fn", inner)
    return getattr(inner, "__name__", type(inner).__name__)


def _rows(store: Any, names: Mapping[int, str], shapes: Mapping[int, tuple[int, ...]]) -> Iterator[tuple[str, ...]]:
    for key in sorted(store.values):
        value = store.values[key]
        if not hasattr(value, "dtype"):
            yield str(key), names[key], repr(value), "", ""
            continue
        shape = ",".join(map(str, shapes[key]))
        name = f"{names[key]} (frozen)" if key in store.frozen else names[key]
        yield str(key), name, f"{value.dtype}[{shape}]", f"{nbytes(value):,}", _place(value)


def _place(value: Any) -> str:
    if is_traced(value) or not isinstance(value, jax.Array):
        return "traced"
    devices = sorted(value.sharding.device_set, key=lambda d: d.id)
    place = ", ".join(f"{d.platform}:{d.id}" for d in devices[:8]) + (", ..." if len(devices) > 8 else "")
    if len(devices) == 1:
        return place
    return f"a copy on {place}" if value.sharding.is_fully_replicated else f"spread over {place}"
