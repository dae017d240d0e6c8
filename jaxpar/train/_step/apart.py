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

from .state import TrainState


class Apart:
    """A state without its `rng`, as its leaves; a pytree in which they are called as they are in the state.

    Attributes:
        structure: that of the state. Arguments of a program have only the names of the leaves here: JAX keeps the
            structures of arguments for ever, and this one refers to the optimizer.
        leaves: the arrays.
    """

    __slots__ = ("leaves", "structure")

    def __init__(self, structure: Any, leaves: Iterable[Any]):
        self.structure, self.leaves = structure, tuple(leaves)

    @classmethod
    def of(cls, state: TrainState) -> Apart:
        if "_apart" in vars(state):
            return vars(state)["_apart"]
        leaves, structure = jax.tree.flatten(dataclasses.replace(state, rng=None))
        return cls(structure, leaves)

    def together(self, rng: Any) -> TrainState:
        return dataclasses.replace(self.structure.unflatten(self.leaves), rng=rng)

    def names(self) -> tuple[str, ...]:
        if isinstance(self.structure, tuple):
            return self.structure
        return tuple(jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(self.together(None)))

    def named(self) -> tuple[list[tuple[str, Any]], Any]:
        return list(zip(self.names(), self.leaves, strict=True)), self.structure


jax.tree_util.register_pytree_with_keys(Apart, Apart.named, Apart, lambda apart: (apart.leaves, apart.structure))


def made_of(apart: Apart, rng: jax.Array, by: Any) -> TrainState:
    """The state that a program made whose key is `by`; its parts are put together when one of them is asked for.

    It is the key, since a state that is held would hold a program.
    """
    state = object.__new__(TrainState)
    vars(state).update(rng=rng, _apart=apart, _by=by)
    return state


def maker(state: TrainState) -> Any:
    """The key of the program that made the state; None for one that was made otherwise."""
    return vars(state).get("_by")
