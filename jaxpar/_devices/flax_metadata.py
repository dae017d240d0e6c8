"""How Flax says that a parameter is split: boxes of Linen, variables of NNX."""

from __future__ import annotations

import importlib
from typing import Any

import jax
from jax.sharding import PartitionSpec


def specs_in(params: Any) -> list[PartitionSpec | None]:
    """The spec that the metadata of Flax gives for each leaf, None where there is none.

    Flax is imported only if some node of the pytree is of Flax.
    """
    specs: list[PartitionSpec | None] = []
    for node in jax.tree.leaves(params, is_leaf=_has_metadata):
        count = len(jax.tree.leaves(node))
        specs += [_spec(node) if _has_metadata(node) else None] * count
    return specs


def _has_metadata(node: Any) -> bool:
    if not any(base.__module__.partition(".")[0] == "flax" for base in type(node).__mro__):
        return False
    box = importlib.import_module("flax.core.meta").AxisMetadata
    return isinstance(node, (box, importlib.import_module("flax.nnx").Variable))


def _spec(node: Any) -> PartitionSpec | None:
    """The spec of a box or variable. Logical names become mesh axes by Flax's rules."""
    nnx = importlib.import_module("flax.nnx")
    if isinstance(node, nnx.Variable):
        return jax.tree.leaves(nnx.get_partition_spec(node))[0]
    if not hasattr(node, "get_partition_spec"):  # a box with other metadata
        return None
    linen = importlib.import_module("flax.linen")
    rules = getattr(node, "rules", None) or linen.get_logical_axis_rules()
    is_logical = isinstance(node, linen.LogicallyPartitioned) and rules
    spec = node.get_partition_spec()
    return linen.logical_to_mesh_axes(tuple(spec), rules) if is_logical else spec
