"""The sharding of each parameter: by a rule, by a pytree of specs, or as the parameters come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._core import checks
from .._core.arrays import is_traced
from .._core.calls import answers
from .flax_metadata import specs_in
from .partition_specs import check_spec, describe_mesh, sizes_of
from .sharding_rules import AnyMesh, check_rule_paths


@answers("parallel.shardings_of")
def shardings_of(params: Any, sharding: Any, mesh: AnyMesh, *, where: str = "parallel.shardings_of") -> Any:
    """The `NamedSharding` of each parameter on a mesh.

    Nothing is moved. `jax.device_put(params, shardings)` moves parameters that exist. For a model that does not fit one
    device, `jax.jit(init, out_shardings=shardings)(rng)` makes each part where it belongs.

    Args:
        params: a pytree of arrays, or of `jax.ShapeDtypeStruct` as `jax.eval_shape(init, rng)` gives them.
        sharding: one of these, or a pytree prefix of `params` with these as leaves:
            a rule, of `fsdp` or `sharding_rules` or any function `(path, shape, mesh) -> PartitionSpec`;
            a `PartitionSpec`;
            a `NamedSharding` on this mesh;
            None, which keeps what the parameters come with. An array that is split over this mesh stays split so. Then
            comes the metadata of Flax: `Partitioned` and `LogicallyPartitioned` of Linen, `out_sharding` of a variable
            of NNX. All others get a whole copy on each device. Inside `jit` None is an error.
        mesh: of all shardings.
        where: the words that messages begin with.

    Returns:
        A pytree of the structure of `params` with a `NamedSharding` for each leaf.

    Raises:
        TypeError: `mesh` is no mesh; a leaf of `sharding` is none of the above.
        ValueError: `sharding` is no prefix of `params`; a spec that does not fit the shape or the mesh; a pattern of
            `sharding_rules` that decides on no parameter; an array that is split over other devices; None for an array
            that is traced.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import parallel
        >>> mesh = jax.make_mesh((2,), ("data",))
        >>> params = {"w": jnp.ones((2048, 4)), "b": jnp.ones(4)}
        >>> shardings = parallel.shardings_of(params, parallel.fsdp("data"), mesh)
        >>> shardings["w"].spec, shardings["b"].spec
        (P('data',), P())
    """
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise TypeError(f"{where}: mesh must be a jax.sharding.Mesh, got {checks.describe(mesh)}")
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
    """A parameter.

    Attributes:
        path: in the pytree.
        array: or anything with a shape.
        spec: of its metadata, or None.
    """

    path: str
    array: Any
    spec: Any

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
        raise TypeError(
            f"{where}: sharding for {leaf.path!r} must be a rule, a PartitionSpec, a NamedSharding or None, got "
            f"{checks.describe(chosen)}"
        )
    return _checked(chosen, leaf, mesh, where)


def _kept(leaf: _Leaf, mesh: AnyMesh, where: str) -> NamedSharding:
    """What the parameter comes with: its own sharding, then its metadata, then whole copies.

    Raises:
        ValueError: it is traced, so that nobody knows its sharding.
    """
    if is_traced(leaf.array):
        raise ValueError(
            f"{where}: the sharding of {leaf.path!r} is not known while a function is traced; give a rule or a "
            "PartitionSpec, or call this outside of the function"
        )
    own = getattr(leaf.array, "sharding", None)
    if own is not None and not own.is_fully_replicated:
        return _on(mesh, own, leaf, where)
    spec = PartitionSpec() if leaf.spec is None else leaf.spec
    return _checked(spec, leaf, mesh, f"{where}, metadata of Flax")


def _on(mesh: AnyMesh, sharding: Any, leaf: _Leaf, where: str) -> NamedSharding:
    """A sharding of arrays as one on this mesh.

    Raises:
        ValueError: it is on another mesh.
    """
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
    return sizes_of(one) == sizes_of(other)


def _checked(spec: Any, leaf: _Leaf, mesh: AnyMesh, where: str) -> NamedSharding:
    check_spec(spec, leaf.path, leaf.shape, mesh, where)
    return NamedSharding(mesh, spec)
