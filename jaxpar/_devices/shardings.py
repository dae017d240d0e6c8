"""The sharding of each parameter: by a rule of its size or name, by a pytree of specs, or kept.

A rule is any function `(path, shape, mesh) -> PartitionSpec`. `fsdp` and `sharding_rules` make the two that most models
need. Rules made alike are equal and have one hash, so that a program that is kept for one is found by the other.
`shardings_of` is where all ways of saying it meet.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._core import checks
from .._core.arrays import PyTree, is_traced
from .._core.portable import param_name

Shape = tuple[int, ...]
AnyMesh = Mesh | AbstractMesh
ShardingRule = Callable[[str, Shape, AnyMesh], PartitionSpec]

_MIN_SIZE = 1024
_REPLICATED = PartitionSpec()


@dataclasses.dataclass(frozen=True, repr=False)
class FullyShardedRule:
    """What `fsdp` gives: a rule `(path, shape, mesh) -> PartitionSpec`."""

    axes: tuple[str, ...]  # the names of the mesh axes that a parameter is split over
    min_size: int = _MIN_SIZE  # a parameter with fewer elements stays whole
    stacked_dims: int = 0  # how many leading dimensions are never split

    def __call__(self, path: str, shape: Shape, mesh: AnyMesh, spec: PartitionSpec = _REPLICATED) -> PartitionSpec:
        """Split one more dimension of a valid spec, over axes that the spec does not use."""
        for name in self.axes:
            if name not in mesh.shape:
                raise ValueError(
                    f"parallel.fsdp: {path!r} of shape {shape} cannot be split over axis {name!r}, which the "
                    f"{describe_mesh(mesh)} lacks"
                )
        used = axes_of(spec)
        axes = tuple(name for name in self.axes if name not in used)
        if not axes:
            return spec
        # The elements that one device has by the spec so far, and the number of shards that one more dimension gets.
        local_size = math.prod(shape) // math.prod(mesh.shape[name] for name in used)
        shards = math.prod(mesh.shape[name] for name in axes)
        entries = [*spec, *[None] * (len(shape) - len(spec))]
        # JAX splits a dimension into equal shards or not at all.
        free = [i for i in range(self.stacked_dims, len(shape)) if entries[i] is None and shape[i] % shards == 0]
        if not free or local_size < self.min_size:
            return spec
        largest = max(free, key=lambda i: shape[i])  # the first of equal ones
        entries[largest] = axes[0] if len(axes) == 1 else axes
        while entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    def __repr__(self) -> str:
        arguments = [repr(self.axes[0] if len(self.axes) == 1 else self.axes)]
        arguments += [f"min_size={self.min_size}"] if self.min_size != _MIN_SIZE else []
        arguments += [f"stacked_dims={self.stacked_dims}"] if self.stacked_dims else []
        return f"fsdp({', '.join(arguments)})"


@dataclasses.dataclass(frozen=True, repr=False)
class NameRules:
    """What `sharding_rules` gives: a rule `(path, shape, mesh) -> PartitionSpec`."""

    # Pairs of a pattern and the spec or rule of the parameters that it matches. The first match counts.
    patterns: tuple[tuple[str, PartitionSpec | ShardingRule], ...]
    default: PartitionSpec | ShardingRule = _REPLICATED  # the spec or rule of all other parameters
    then: FullyShardedRule | None = None  # a rule that splits one more dimension of every parameter, or None

    def __call__(self, path: str, shape: Shape, mesh: AnyMesh) -> PartitionSpec:
        position = self.first_match(path)
        pattern, chosen = ("", self.default) if position is None else self.patterns[position]
        origin = f"pattern {pattern!r}" if position is not None else "its default"
        spec = chosen if isinstance(chosen, PartitionSpec) else chosen(path, shape, mesh)
        checked(spec, path, shape, mesh, f"parallel.sharding_rules, {origin}")
        return spec if self.then is None else self.then(path, shape, mesh, spec)

    def first_match(self, path: str) -> int | None:
        """The position of the first pattern that matches, or None."""
        return next((i for i, (pattern, _) in enumerate(self.patterns) if fnmatch.fnmatchcase(path, pattern)), None)

    def why_idle(self, position: int, paths: Sequence[str]) -> str:
        """The reason why a pattern decides for no parameter."""
        pattern = self.patterns[position][0]
        if matched := [path for path in paths if fnmatch.fnmatchcase(path, pattern)]:
            earlier = self.patterns[self.first_match(matched[0]) or 0][0]
            return (
                f"is never used, because {earlier!r} comes before it and matches {matched[0]!r}; put {pattern!r} first"
            )
        near = difflib.get_close_matches(pattern, paths, 3, cutoff=0.0)
        return f"matches no parameter; near are {checks.shorten([*map(repr, near)])}, of {len(paths)} in all"

    def __repr__(self) -> str:
        arguments = [repr(dict(self.patterns))]
        arguments += [f"default={self.default!r}"] if self.default != _REPLICATED else []
        arguments += [f"then={self.then!r}"] if self.then is not None else []
        return f"sharding_rules({', '.join(arguments)})"


def fsdp(axis: str | Iterable[str] = "data", *, min_size: int = _MIN_SIZE, stacked_dims: int = 0) -> FullyShardedRule:
    """Make a rule that splits each large parameter over one mesh axis.

    The rule splits the largest dimension that the size of the axis divides. Among equal dimensions it splits the first,
    whose parts are contiguous in memory. A parameter without such a dimension stays whole.

    Args:
        axis: the name of a mesh axis, or several names. Several names split the dimension by the product of their
            sizes.
        min_size: a parameter with fewer elements stays whole, because gathering it costs more than it saves. After
            another rule, `min_size` counts the elements that one device holds.
        stacked_dims: how many leading dimensions are never split. Use 1 for layers that are stacked for `jax.lax.scan`:
            every device needs its part of each layer.

    Returns:
        A rule `(path, shape, mesh) -> PartitionSpec`, for `kv.from_params(sharding=)`, `sharding_rules` and
        `shardings_of`. Rules made alike are equal and have the same hash. The rule raises `ValueError` for a mesh that
        lacks the axis.

    Raises:
        ValueError: `min_size` or `stacked_dims` is negative.

    Example:
        >>> import jax
        >>> mesh = jax.make_mesh((2, 2), ("data", "model"))
        >>> rule = fsdp("data")
        >>> rule("dense/kernel", (768, 3072), mesh)
        P(None, 'data')
        >>> rule("dense/bias", (12,), mesh)
        P()
        >>> fsdp(("data", "model"))("dense/kernel", (768, 3072), mesh)
        P(None, ('data', 'model'))
    """
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    return FullyShardedRule(
        axes,
        checks.whole_number(min_size, "parallel.fsdp", "min_size", least=0),
        checks.whole_number(stacked_dims, "parallel.fsdp", "stacked_dims", least=0),
    )


def sharding_rules(
    patterns: Mapping[str, PartitionSpec | ShardingRule],
    *,
    default: PartitionSpec | ShardingRule | None = None,
    then: FullyShardedRule | None = None,
) -> NameRules:
    """Make a sharding rule from patterns of parameter names.

    A pattern must match the whole path of a parameter, as `kv.names` gives it: `"decoder/attention/kernel"`.
    `*` matches any text, also `/`. `?` matches one character, and `[ab]` matches `a` or `b`. The first matching pattern
    decides.

    Args:
        patterns: a dict from patterns to a `PartitionSpec` or to another rule.
        default: the spec or rule for parameters that no pattern matches. None keeps them whole.
        then: a rule of `fsdp` that splits one more dimension of every parameter. `then=fsdp("data")` adds FSDP to
            patterns for tensor parallelism.

    Returns:
        A rule `(path, shape, mesh) -> PartitionSpec`. Rules made alike are equal and have the same hash. The rule
        raises `ValueError` for a spec that does not fit the shape or the mesh. `kv.from_params` and `shardings_of`
        raise `ValueError` for a pattern that decides for no parameter.

    Example:
        >>> import jax
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((2, 2), ("data", "model"))
        >>> attention = {"*/attention/*/kernel": P(None, "model")}
        >>> rule = sharding_rules(attention, default=fsdp("data"))
        >>> rule("layer_0/attention/query/kernel", (768, 768), mesh)
        P(None, 'model')
        >>> rule("layer_0/mlp/kernel", (768, 3072), mesh)
        P(None, 'data')
        >>> sharding_rules(attention, then=fsdp("data"))("layer_0/attention/query/kernel", (768, 768), mesh)
        P('data', 'model')
    """
    return NameRules(tuple(patterns.items()), _REPLICATED if default is None else default, then)


def check_rule_paths(rule: object, paths: Sequence[str]) -> None:
    """`ValueError` if a pattern of the rule decides for no parameter."""
    if not isinstance(rule, NameRules):
        return
    matches = [rule.first_match(path) for path in paths]
    for i, (pattern, chosen) in enumerate(rule.patterns):
        if i not in matches:
            raise ValueError(f"parallel.sharding_rules: pattern {pattern!r} {rule.why_idle(i, paths)}")
        check_rule_paths(chosen, [path for path, match in zip(paths, matches, strict=True) if match == i])
    check_rule_paths(rule.default, [path for path, match in zip(paths, matches, strict=True) if match is None])


# Whether a spec fits a shape and a mesh.


def describe_mesh(mesh: AnyMesh) -> str:
    """A mesh in words: `mesh (data=2, model=4)`."""
    return f"mesh ({', '.join(f'{name}={size}' for name, size in mesh.shape.items())})"


def axes_of(spec: PartitionSpec) -> list[str]:
    """The mesh axes that a spec names, in its order."""
    entries = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
    return [name for entry in entries for name in entry]


def checked(spec: object, path: str, shape: Shape, mesh: AnyMesh, caller: str) -> NamedSharding:
    """The sharding by a `PartitionSpec` that can split the array."""
    what = f"{caller}: {path!r} of shape {shape}"
    if not isinstance(spec, PartitionSpec):
        raise TypeError(f"{what}: expected a PartitionSpec, got {spec!r}")
    problem = ""
    if len(spec) > len(shape):
        problem = f"it has {len(spec)} entries for {len(shape)} dimensions"
    elif spec.unreduced or spec.reduced or PartitionSpec.UNCONSTRAINED in tuple(spec):  # jax would take it
        problem = "a stored array needs a full layout; name axes or None for each dimension"
    else:
        try:  # jax says which axis is not there or is used twice, and which dimension it does not divide
            sharding = NamedSharding(mesh, spec)
            sharding.shard_shape(shape)
            return sharding
        except Exception as error:  # of an axis that is used twice it is no ValueError
            problem = str(error)
    raise ValueError(f"{what} cannot be split as {spec} on the {describe_mesh(mesh)}: {problem}")


# The shardings of a pytree of parameters.


def shardings_of(params: PyTree, sharding: PyTree, mesh: AnyMesh, *, where: str = "parallel.shardings_of") -> PyTree:
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
    # A prefix: each choice is for all parameters below its place, and None is a choice too, so it must count as a leaf.
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    names, metadata = [param_name(path) for path, _ in leaves], specs_in(params)
    choices, prefix = jax.tree.flatten(sharding, is_leaf=lambda node: node is None)
    subtrees = prefix.flatten_up_to(params)
    result: list[NamedSharding] = []
    for chosen, subtree in zip(choices, subtrees, strict=True):  # each choice is for the parameters of a subtree
        positions = range(len(result), len(result) + len(jax.tree.leaves(subtree)))
        check_rule_paths(chosen, [names[i] for i in positions])
        result += [_sharding(chosen, names[i], leaves[i][1], metadata[i], mesh, where) for i in positions]
    return structure.unflatten(result)


def _sharding(
    chosen: Any, path: str, leaf: object, metadata: PartitionSpec | None, mesh: AnyMesh, caller: str
) -> NamedSharding:
    """The sharding of one parameter. `metadata`: the spec in that of Flax, or None."""
    # A rule decides by name and shape.
    shape = tuple(np.shape(leaf))
    if callable(chosen):
        return checked(chosen(path, shape, mesh), path, shape, mesh, f"{caller}, {chosen!r}")
    if chosen is None:  # what the parameter comes with: its own sharding, then its metadata, then whole copies
        if is_traced(leaf):
            raise ValueError(
                f"{caller}: the sharding of {path!r} is not known under jit and in train.plan; give a rule"
            )
        chosen = getattr(leaf, "sharding", None)
        if chosen is None or chosen.is_fully_replicated:
            spec = _REPLICATED if metadata is None else metadata
            return checked(spec, path, shape, mesh, f"{caller}, metadata of Flax")
    # A spec is of this mesh. A sharding names one, which must be this one: on another one its axes mean other devices.
    if isinstance(chosen, PartitionSpec):
        return checked(chosen, path, shape, mesh, caller)
    if not isinstance(chosen, NamedSharding) or not _is_same_mesh(chosen.mesh, mesh):
        raise ValueError(
            f"{caller}: {path!r} of shape {shape} has the sharding {chosen}, which is not on the "
            f"{describe_mesh(mesh)}; give that mesh, or a rule, a PartitionSpec or None"
        )
    on_mesh = checked(chosen.spec, path, shape, mesh, caller)
    return chosen if chosen.mesh == mesh else on_mesh  # the axes of its mesh may be of other types


def _is_same_mesh(mesh: AnyMesh, other: AnyMesh) -> bool:
    """Whether both have the same axes and devices, whatever the types of the axes."""
    if isinstance(mesh, Mesh) and isinstance(other, Mesh):
        return mesh.axis_names == other.axis_names and np.array_equal(mesh.devices, other.devices)
    return dict(mesh.shape) == dict(other.shape)


# How Flax says that a parameter is split: boxes of Linen, variables of NNX.


def specs_in(params: PyTree) -> list[PartitionSpec | None]:
    """The spec in the metadata of Flax for each leaf, or None."""
    # Flax is imported only if some node of the pytree is of Flax.
    nodes = jax.tree.leaves(params, is_leaf=_has_metadata)
    return [spec for n in nodes for spec in [_spec(n) if _has_metadata(n) else None] * len(jax.tree.leaves(n))]


def _has_metadata(node: object) -> bool:
    if not any(base.__module__.partition(".")[0] == "flax" for base in type(node).__mro__):
        return False
    box = importlib.import_module("flax.core.meta").AxisMetadata
    return isinstance(node, (box, importlib.import_module("flax.nnx").Variable))


def _spec(node: PyTree) -> PartitionSpec | None:
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
