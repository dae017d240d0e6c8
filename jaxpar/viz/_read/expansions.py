"""Primitives of jax 0.12 that a jaxpr holds unexpanded, as `jnp.searchsorted`, by what they expand to."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax


def expand(eqn: Any) -> tuple[str, Any] | None:
    """The name of such a primitive, and the jaxpr that it stands for. None of other equations."""
    if eqn.primitive.name != "call_hi_primitive":
        return None
    meant = eqn.params["_prim"]
    if not all(hasattr(atom.aval, "shape") for atom in eqn.invars):
        return None  # of types that are no arrays
    arrays = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in eqn.invars]
    return _name_of(meant), jax.make_jaxpr(_flat(meant))(*arrays)


def _flat(meant: Any) -> Callable[..., list[Any]]:
    """What it computes, as a function of flat arrays."""

    def call(*arrays: Any) -> list[Any]:
        return jax.tree.leaves(meant.expand(*jax.tree.unflatten(meant.in_tree, arrays)))

    return call


def _name_of(meant: Any) -> str:
    """As functions are written.

    >>> class CustomRoot: ...
    >>> _name_of(CustomRoot())
    'custom_root'
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(meant).__name__).lower()
