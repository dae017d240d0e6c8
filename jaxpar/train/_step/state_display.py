"""A training state as text and as an HTML table: its step, its store, and what else it carries."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterator
from typing import Any

import jax

from ..._core.arrays import is_traced, nbytes
from ..._devices.donation import is_donated


def as_text(state: Any) -> str:
    """A line about the state, the store, a line for each other part that is there."""
    rest = [f"{name}: {words}" for name, words in _parts(state)]
    return "\n".join([f"TrainState({_summary(state)})", str(state.store), *rest])


def as_html(state: Any) -> str:
    """The same as HTML."""
    rest = "".join(f"<p>{name}: {html.escape(words)}</p>" for name, words in _parts(state))
    return f"<div><p>TrainState({html.escape(_summary(state))})</p>{state.store._repr_html_()}{rest}</div>"


def _summary(state: Any) -> str:
    if is_donated(state):
        return "given away to a later step; use the state that it returned"
    known = isinstance(state.step, jax.Array) and not is_traced(state.step)
    return f"step={int(state.step) if known else 'traced'}, rng={getattr(state.rng, 'dtype', state.rng)}"


def _parts(state: Any) -> Iterator[tuple[str, str]]:
    for field in dataclasses.fields(state):
        leaves = jax.tree.leaves(getattr(state, field.name))
        if field.name not in ("store", "step", "rng") and leaves:
            size = sum(nbytes(leaf) for leaf in leaves if hasattr(leaf, "dtype"))
            yield field.name, f"{len(leaves)} array{'s' if len(leaves) != 1 else ''}, {size:,} bytes"
