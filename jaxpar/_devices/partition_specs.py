"""Whether a `PartitionSpec` fits a shape and a mesh, and words for all three."""

from __future__ import annotations

import collections
import math
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec


def sizes_of(mesh: Mesh | AbstractMesh) -> dict[str, int]:
    """{axis name: size}, in the order of the mesh."""
    return dict(mesh.shape)


def describe_mesh(mesh: Mesh | AbstractMesh) -> str:
    """A mesh in words: `mesh (data=2, model=4)`."""
    return f"mesh ({', '.join(f'{name}={size}' for name, size in sizes_of(mesh).items())})"


def axes_of(spec: PartitionSpec) -> list[Any]:
    """The mesh axes that a spec names, in its order."""
    return [name for entry in spec for name in _axes(entry)]


def check_spec(spec: Any, path: str, shape: tuple[int, ...], mesh: Mesh | AbstractMesh, where: str) -> None:
    """Check that an array can be split so.

    Args:
        spec: what should be a `PartitionSpec`.
        path: of the array in its pytree.
        shape: of the array.
        mesh: that the spec is for.
        where: the words that the message begins with.

    Raises:
        TypeError: it is no `PartitionSpec`.
        ValueError: an axis that the mesh lacks or that appears twice; more entries than dimensions; a dimension that
            its axes do not divide; an entry that leaves a dimension to the compiler.
    """
    what = f"{where}: {path!r} of shape {shape}"
    if not isinstance(spec, PartitionSpec):
        raise TypeError(f"{what}: expected a PartitionSpec, got {spec!r}")
    if problem := _problem(spec, shape, sizes_of(mesh)):
        raise ValueError(f"{what} cannot be split as {spec} on the {describe_mesh(mesh)}: {problem}")


def _problem(spec: PartitionSpec, shape: tuple[int, ...], sizes: dict[str, int]) -> str:
    """What is wrong, and what to do. Empty: nothing."""
    if spec.unreduced or spec.reduced or PartitionSpec.UNCONSTRAINED in tuple(spec):
        return "a stored array needs a full layout; name axes or None for each dimension"
    names = axes_of(spec)
    if unknown := [name for name in names if name not in sizes]:
        return f"the mesh has no axis {unknown[0]!r}; its axes are {', '.join(map(repr, sizes))}"
    if twice := [name for name, count in collections.Counter(names).items() if count > 1]:
        return f"axis {twice[0]!r} is used twice; one axis can split one dimension"
    if len(spec) > len(shape):
        return f"it has {len(spec)} entries for {len(shape)} dimensions; give at most one for each"
    return _uneven(spec, shape, sizes)


def _uneven(spec: PartitionSpec, shape: tuple[int, ...], sizes: dict[str, int]) -> str:
    for i, (length, entry) in enumerate(zip(shape, spec, strict=False)):
        parts = math.prod(sizes[name] for name in _axes(entry))
        if length % parts:
            padded = -(-length // parts) * parts
            return (
                f"dimension {i} of length {length} cannot be divided by {parts}; pad it to {padded} or put None there"
            )
    return ""


def _axes(entry: Any) -> tuple[Any, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)
