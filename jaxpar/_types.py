"""Names that jax has at run time and type checkers cannot see, and the question whether arrays are traced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.core

if TYPE_CHECKING:
    Device = Any
else:
    Device = jax.Device


def traced(tree: Any) -> bool:
    """Whether some array of the pytree is a tracer: no values, no devices yet."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))
