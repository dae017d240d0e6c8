"""A state taken apart, as compiled steps take and give it.

A state has so many parts that to put one together and to take it apart again takes 15 microseconds, as long as a small
step. So a step hands out a state that still is in its parts, and takes it so if it comes back; they are put together
when one of them is asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax

from ._state import TrainState


class Apart:
    """A state without its `rng`, as its leaves; a pytree in which they are called as they are in the state."""

    __slots__ = ("leaves", "structure")

    def __init__(self, structure: Any, leaves: Iterable[Any]):
        self.structure, self.leaves = structure, tuple(leaves)

    @classmethod
    def of(cls, state: TrainState) -> Apart:
        if "_apart" in vars(state):
            return vars(state)["_apart"]
        leaves, structure = jax.tree.flatten(dataclasses.replace(state, rng=None))
        return cls(structure, leaves)

    def like(self, other: Apart) -> Apart:
        """The same, with the structure of `other` itself where it is equal: that it is equal takes long to find out."""
        return Apart(other.structure, self.leaves) if self.structure == other.structure else self

    def together(self, rng: Any) -> TrainState:
        return dataclasses.replace(self.structure.unflatten(self.leaves), rng=rng)

    def named(self) -> tuple[list[tuple[str, Any]], Any]:
        found, _ = jax.tree_util.tree_flatten_with_path(self.together(None))
        return [(jax.tree_util.keystr(path), leaf) for path, leaf in found], self.structure


jax.tree_util.register_pytree_with_keys(Apart, Apart.named, Apart, lambda apart: (apart.leaves, apart.structure))


def made_of(apart: Apart, rng: jax.Array, by: Any) -> TrainState:
    """The state that `by` made; its parts are put together when one of them is first asked for."""
    state = object.__new__(TrainState)
    vars(state).update(rng=rng, _apart=apart, _by=by)
    return state


def maker(state: TrainState) -> Any:
    """What `made_of` was told that made the state; None for one that was made otherwise."""
    return vars(state).get("_by")
