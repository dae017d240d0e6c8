"""What a store looks like at the prompt and in a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any

import jax

from .._core.arrays import is_traced, nbytes
from ..updaters import accumulate, assign
from ._store import KVStore, names, shapes_of

_MOST = 20


def as_text(store: KVStore) -> str:
    """A line about the store, then a line for each key, cut after 20."""
    head = f"KVStore({_summary(store)})"
    if not store.values:
        return head
    rows = list(_rows(store))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    if len(store.values) > _MOST:
        lines.append(f"  ... and {len(store.values) - _MOST} more")
    return "\n".join([head, *lines])


def as_html(store: KVStore) -> str:
    """The same as an HTML table; colours and fonts are the notebook's."""
    cells = "".join(
        "<tr>" + "".join(f'<td style="text-align:left">{html.escape(c)}</td>' for c in row) + "</tr>"
        for row in _rows(store)
    )
    titles = "".join(
        f'<th style="text-align:left">{t}</th>' for t in ("key", "name", "value", "bytes", "where it lives")
    )
    more = f"<p>... and {len(store.values) - _MOST} more</p>" if len(store.values) > _MOST else ""
    return (
        f"<div><p>KVStore({html.escape(_summary(store))})</p>"
        f"<table><thead><tr>{titles}</tr></thead><tbody>{cells}</tbody></table>{more}</div>"
    )


def _summary(store: KVStore) -> str:
    words = [f"kind={store.kind!r}", f"updater={_updater_name(store.updater)}"]
    if store.compressor is not None:
        words.append(f"compression={store.compressor}")
    if store.staleness:
        words.append(f"staleness={store.staleness}")
    if not store.values:
        return ", ".join([*words, "empty"])
    total = sum(nbytes(v) for v in jax.tree.leaves(store.values) if hasattr(v, "dtype"))
    state = sum(nbytes(v) for v in jax.tree.leaves(store.updater_state) if hasattr(v, "dtype"))
    waiting = sum(nbytes(v) for w in store.pending.values() for v in jax.tree.leaves(w) if getattr(v, "ndim", 0))
    count = len(store.values)
    words.append(f"{count} key{'s' if count != 1 else ''}, {total:,} bytes")
    words += [f"updater state {state:,} bytes"] if state else []
    words += [f"waiting {waiting:,} bytes"] if waiting else []
    return ", ".join(words)


def _updater_name(updater: Any) -> str:
    for name, known in (("assign", assign), ("accumulate", accumulate)):
        if updater == known:
            return name
    inner = getattr(updater, "update", updater)
    if hasattr(inner, "tx"):
        return "optax transform"
    if hasattr(inner, "rule"):
        return f"mxnet_{inner.rule.__name__}"
    inner = getattr(inner, "fn", inner)
    return getattr(inner, "__name__", type(inner).__name__)


def _rows(store: KVStore) -> Iterator[tuple[str, str, str, str, str]]:
    named, shapes = names(store), shapes_of(store) if _has_arrays(store) else {}
    for key in sorted(store.values)[:_MOST]:
        value = store.values[key]
        if not hasattr(value, "dtype"):
            yield str(key), named[key], repr(value), "", ""
            continue
        shape = ",".join(map(str, shapes[key]))
        yield str(key), named[key], f"{value.dtype}[{shape}]", f"{nbytes(value):,}", _where(value)


def _has_arrays(store: KVStore) -> bool:
    return all(hasattr(v, "shape") for v in store.values.values())


def _where(value: Any) -> str:
    if is_traced(value) or not isinstance(value, jax.Array):
        return "traced"
    devices = sorted(value.sharding.device_set, key=lambda d: d.id)
    place = ", ".join(f"{d.platform}:{d.id}" for d in devices[:8]) + (", ..." if len(devices) > 8 else "")
    if len(devices) == 1:
        return place
    return f"a copy on {place}" if value.sharding.is_fully_replicated else f"spread over {place}"
