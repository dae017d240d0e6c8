"""The sharding of each parameter: by a rule, by a pytree of specs, or kept."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._core import checks
from .._core.arrays import is_traced
from .._core.calls import answers
from .sharding_rules import AnyMesh, check_rule_paths, check_spec, describe_mesh


@answers("parallel.shardings_of")
def shardings_of(params: Any, sharding: Any, mesh: AnyMesh, *, where: str = "parallel.shardings_of") -> Any:
    """The `NamedSharding` of each parameter on a mesh.

    No array is moved. `jax.device_put(params, shardings)` moves existing parameters. For a model larger than one
    device, `jax.jit(init, out_shardings=shardings)(rng)` creates each part on its own device.

    Args:
        params: a pytree of arrays, or of the `jax.ShapeDtypeStruct`s that `jax.eval_shape(init, rng)` returns.
        sharding: one of the following, or a pytree prefix of `params` with these as leaves: a rule, of `fsdp` or
            `sharding_rules` or any function `(path, shape, mesh) -> PartitionSpec`; a `PartitionSpec`; a
            `NamedSharding` on this mesh; None, which keeps the sharding of the parameters. An array that is split over
            this mesh keeps its sharding. Otherwise the metadata of Flax decide: `Partitioned` and
            `LogicallyPartitioned` of Linen, `out_sharding` of an NNX variable. All other parameters are replicated.
            Inside `jit`, None is an error.
        mesh: the mesh of all shardings.
        where: the beginning of error messages.

    Returns:
        A pytree of the structure of `params` with a `NamedSharding` for each leaf.

    Raises:
        TypeError: `mesh` is not a mesh; a leaf of `sharding` is of another type.
        ValueError: `sharding` is not a prefix of `params`; a spec does not fit the shape or the mesh; a pattern of
            `sharding_rules` decides for no parameter; an array is split over other devices; None is given for a traced
            array.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import parallel
        >>> mesh = jax.make_mesh((2,), ("data",))
        >>> params = {"w": jnp.ones((2048, 4)), "b": jnp.ones(4)}
        >>> shardings = parallel.shardings_of(params, parallel.fsdp("data"), mesh)
        >>> shardings["w"].spec, shardings["b"].spec
        (P('data',), P())
    """
    found, structure = jax.tree_util.tree_flatten_with_path(params)
    leaves = [
        _Leaf(jax.tree_util.keystr(path, simple=True, separator="/"), leaf, spec)
        for (path, leaf), spec in zip(found, specs_in(params), strict=True)
    ]
    result: list[NamedSharding] = []
    for chosen, count in _subtrees(sharding, params, where):
        part = leaves[len(result) : len(result) + count]
        check_rule_paths(chosen, [leaf.path for leaf in part])
        result += [_sharding(chosen, leaf, mesh, where) for leaf in part]
    return structure.unflatten(result)


class _Leaf(NamedTuple):
    """A parameter."""

    path: str  # in the pytree
    array: Any  # or anything with a shape
    spec: Any  # of its metadata, or None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(np.shape(self.array))


def _subtrees(sharding: Any, params: Any, where: str) -> Iterator[tuple[Any, int]]:
    """Each leaf of the prefix `sharding`, and how many parameters it is for."""
    chosen, structure = jax.tree.flatten(sharding, is_leaf=lambda node: node is None)
    try:
        subtrees = structure.flatten_up_to(params)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: sharding must be a rule, or a pytree prefix of the parameters: {error}") from None
    for leaf, subtree in zip(chosen, subtrees, strict=True):
        yield leaf, len(jax.tree.leaves(subtree))


def _sharding(chosen: Any, leaf: _Leaf, mesh: AnyMesh, where: str) -> NamedSharding:
    if chosen is None:
        return _kept(leaf, mesh, where)
    if isinstance(chosen, NamedSharding):
        return _on(mesh, chosen, leaf, where)
    if callable(chosen):
        return _checked(chosen(leaf.path, leaf.shape, mesh), leaf, mesh, f"{where}, {chosen!r}")
    if not isinstance(chosen, PartitionSpec):
        wanted = "a rule, a PartitionSpec, a NamedSharding or None"
        raise TypeError(f"{where}: sharding for {leaf.path!r} must be {wanted}, got {checks.describe(chosen)}")
    return _checked(chosen, leaf, mesh, where)


def _kept(leaf: _Leaf, mesh: AnyMesh, where: str) -> NamedSharding:
    """What the parameter comes with: its own sharding, then its metadata, then whole copies."""
    if is_traced(leaf.array):
        unknown = f"the sharding of {leaf.path!r} is not known under jit and in train.plan"
        raise ValueError(f"{where}: {unknown}; give a spec or a rule")
    own = getattr(leaf.array, "sharding", None)
    if own is not None and not own.is_fully_replicated:
        return _on(mesh, own, leaf, where)
    spec = PartitionSpec() if leaf.spec is None else leaf.spec
    return _checked(spec, leaf, mesh, f"{where}, metadata of Flax")


def _on(mesh: AnyMesh, sharding: Any, leaf: _Leaf, where: str) -> NamedSharding:
    """A sharding of arrays as one on this mesh."""
    if not isinstance(sharding, NamedSharding) or not _is_same_mesh(sharding.mesh, mesh):
        raise ValueError(
            f"{where}: {leaf.path!r} of shape {leaf.shape} has the sharding {sharding}, which is not on the "
            f"{describe_mesh(mesh)}; give that mesh, or a rule or a PartitionSpec for this parameter"
        )
    checked = _checked(sharding.spec, leaf, mesh, where)
    return sharding if sharding.mesh == mesh else checked


def _is_same_mesh(one: AnyMesh, other: AnyMesh) -> bool:
    """Whether both have the same axes and devices, whatever the types of the axes."""
    if isinstance(one, Mesh) and isinstance(other, Mesh):
        return one.axis_names == other.axis_names and np.array_equal(one.devices, other.devices)
    return dict(one.shape) == dict(other.shape)


def _checked(spec: Any, leaf: _Leaf, mesh: AnyMesh, where: str) -> NamedSharding:
    check_spec(spec, leaf.path, leaf.shape, mesh, where)
    return NamedSharding(mesh, spec)


# How Flax says that a parameter is split: boxes of Linen, variables of NNX.


def specs_in(params: Any) -> list[PartitionSpec | None]:
    """The spec in the metadata of Flax for each leaf, or None."""
    # Flax is imported only if some node of the pytree is of Flax.
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
        return next(iter(jax.tree.leaves(nnx.get_partition_spec(node))), None)  # none for what is no array
    if not hasattr(node, "get_partition_spec"):  # a box with other metadata
        return None
    linen = importlib.import_module("flax.linen")
    rules = getattr(node, "rules", None) or linen.get_logical_axis_rules()
    is_logical = isinstance(node, linen.LogicallyPartitioned) and rules
    spec = node.get_partition_spec()
    return linen.logical_to_mesh_axes(tuple(spec), rules) if is_logical else spec
