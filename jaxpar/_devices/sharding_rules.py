"""Rules that say how a parameter is split over a mesh: by its size, or by its name."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .._core import checks
from .._core.calls import answers
from .partition_specs import axes_of, check_spec, describe_mesh, sizes_of

Shape = tuple[int, ...]
AnyMesh = Mesh | AbstractMesh
ShardingRule = Callable[[str, Shape, AnyMesh], PartitionSpec]

_MIN_SIZE = 1024
_WHOLE = PartitionSpec()


@dataclasses.dataclass(frozen=True, repr=False)
class FullyShardedRule:
    """What `fsdp` gives: a rule `(path, shape, mesh) -> PartitionSpec`.

    Attributes:
        axes: the names of the mesh axes that a parameter is split over.
        min_size: a parameter with fewer elements stays whole.
        stacked_dims: how many leading dimensions are never split.
    """

    axes: tuple[str, ...]
    min_size: int = _MIN_SIZE
    stacked_dims: int = 0

    def __call__(self, path: str, shape: Shape, mesh: AnyMesh) -> PartitionSpec:
        return self.fill(path, shape, mesh, _WHOLE)

    def fill(self, path: str, shape: Shape, mesh: AnyMesh, spec: PartitionSpec) -> PartitionSpec:
        """The spec with one more dimension split, of those that it leaves whole.

        Args:
            path, shape, mesh: as for a rule.
            spec: a valid spec of this shape on this mesh. Axes that it uses are not used again.
        """
        sizes = self._sizes(path, shape, mesh)
        used = axes_of(spec)
        axes = tuple(name for name in self.axes if name not in used)
        if not axes:
            return spec
        held = math.prod(shape) // math.prod(sizes[name] for name in used)
        parts = math.prod(sizes[name] for name in axes)
        entries = [*spec, *[None] * (len(shape) - len(spec))]
        free = [i for i in range(self.stacked_dims, len(shape)) if entries[i] is None and shape[i] % parts == 0]
        if not free or held < self.min_size:
            return spec
        largest = max(free, key=lambda i: shape[i])  # the first of equal ones
        entries[largest] = axes[0] if len(axes) == 1 else axes
        return _trimmed(entries)

    def _sizes(self, path: str, shape: Shape, mesh: AnyMesh) -> dict[str, int]:
        sizes = sizes_of(mesh)
        if unknown := [name for name in self.axes if name not in sizes]:
            raise ValueError(
                f"parallel.fsdp: {path!r} of shape {shape} cannot be split over axis {unknown[0]!r}, which the "
                f"{describe_mesh(mesh)} lacks; give fsdp an axis of the mesh"
            )
        return sizes

    def __repr__(self) -> str:
        axis = self.axes[0] if len(self.axes) == 1 else self.axes
        words = [repr(axis)]
        words += [f"min_size={self.min_size}"] if self.min_size != _MIN_SIZE else []
        words += [f"stacked_dims={self.stacked_dims}"] if self.stacked_dims else []
        return f"fsdp({', '.join(words)})"


@dataclasses.dataclass(frozen=True, repr=False)
class NameRules:
    """What `sharding_rules` gives: a rule `(path, shape, mesh) -> PartitionSpec`.

    Attributes:
        patterns: pairs of a pattern and the spec or rule of the parameters that it matches. The first match counts.
        default: the spec or rule of all other parameters.
        then: a rule that splits one more dimension of every parameter, or None.
    """

    patterns: tuple[tuple[str, PartitionSpec | ShardingRule], ...]
    default: PartitionSpec | ShardingRule = _WHOLE
    then: FullyShardedRule | None = None

    def __call__(self, path: str, shape: Shape, mesh: AnyMesh) -> PartitionSpec:
        place = self.first_match(path)
        origin, chosen = ("its default", self.default) if place is None else self._named(place)
        spec = chosen if isinstance(chosen, PartitionSpec) else chosen(path, shape, mesh)
        check_spec(spec, path, shape, mesh, f"parallel.sharding_rules, {origin}")
        return spec if self.then is None else self.then.fill(path, shape, mesh, spec)

    def first_match(self, path: str) -> int | None:
        """The position of the first pattern that matches, or None."""
        matches = (i for i, (pattern, _) in enumerate(self.patterns) if fnmatch.fnmatchcase(path, pattern))
        return next(matches, None)

    def check_paths(self, paths: Sequence[str]) -> None:
        """`ValueError` for a pattern that decides on none of these parameters."""
        decisive = {self.first_match(path) for path in paths}
        for i, (pattern, chosen) in enumerate(self.patterns):
            if i not in decisive:
                raise ValueError(f"parallel.sharding_rules: pattern {pattern!r} {self._idle(i, paths)}")
            check_rule_paths(chosen, [path for path in paths if self.first_match(path) == i])
        check_rule_paths(self.default, [path for path in paths if self.first_match(path) is None])

    def _idle(self, place: int, paths: Sequence[str]) -> str:
        """Why a pattern decides on nothing."""
        pattern = self.patterns[place][0]
        if matched := [path for path in paths if fnmatch.fnmatchcase(path, pattern)]:
            earlier = self.patterns[self.first_match(matched[0]) or 0][0]
            return (
                f"is never used, because the first match counts and {earlier!r} comes before it and matches "
                f"{checks.shorten([*map(repr, matched)])}; put {pattern!r} first"
            )
        near = difflib.get_close_matches(pattern, paths, 3, cutoff=0.0)
        return f"matches no parameter; near are {checks.shorten([*map(repr, near)])}, of {len(paths)} in all"

    def _named(self, place: int) -> tuple[str, PartitionSpec | ShardingRule]:
        pattern, chosen = self.patterns[place]
        return f"pattern {pattern!r}", chosen

    def __repr__(self) -> str:
        words = [repr(dict(self.patterns))]
        words += [f"default={self.default!r}"] if self.default != _WHOLE else []
        words += [f"then={self.then!r}"] if self.then is not None else []
        return f"sharding_rules({', '.join(words)})"


@answers("parallel.fsdp")
def fsdp(axis: str | Iterable[str] = "data", *, min_size: int = _MIN_SIZE, stacked_dims: int = 0) -> FullyShardedRule:
    """Make a rule that splits each large parameter over one mesh axis.

    It picks the largest dimension that the size of the axis divides, so that the parts are not slim. Of equal
    dimensions it picks the first: its parts are contiguous in memory. A parameter without such a dimension stays whole.

    Args:
        axis: the name of a mesh axis, or several names. Several split the one dimension by the product of their sizes.
        min_size: a parameter with fewer elements stays whole. Its memory is not worth a message. After another rule
            the elements that a device holds are counted.
        stacked_dims: how many leading dimensions are never split. Give 1 for the parameters of layers that are stacked
            for `jax.lax.scan`: each turn of the scan must find its part of every layer on its own device.

    Returns:
        A rule `(path, shape, mesh) -> PartitionSpec`, for `kv.from_params(sharding=)`, `sharding_rules` and
        `shardings_of`. Rules made alike are equal and have the same hash. The rule raises `ValueError` for a mesh that
        lacks the axis.

    Raises:
        TypeError: `axis` is no name and no list of names; `min_size` or `stacked_dims` is no int.
        ValueError: no name, or one appears twice; `min_size` or `stacked_dims` is negative.

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
    axes = (axis,) if isinstance(axis, str) else _names(axis)
    if not axes or len(set(axes)) < len(axes):
        raise ValueError(f"parallel.fsdp: axis must be one or more different names, got {axis!r}")
    return FullyShardedRule(
        axes,
        checks.whole_number(min_size, "parallel.fsdp", "min_size", least=0),
        checks.whole_number(stacked_dims, "parallel.fsdp", "stacked_dims", least=0),
    )


@answers("parallel.sharding_rules")
def sharding_rules(
    patterns: Mapping[str, PartitionSpec | ShardingRule],
    *,
    default: PartitionSpec | ShardingRule | None = None,
    then: FullyShardedRule | None = None,
) -> NameRules:
    """Make a rule out of patterns of names.

    A pattern is matched with the whole path of a parameter, as `kv.names` gives it: `"decoder/attention/kernel"`.
    `*` stands for any text, `?` for one character, `[ab]` for one of these. `*` matches `/` too. The first pattern that
    matches counts. The names of Flax NNX, and of boxed parameters of Linen, end in `/value`: `"*/kernel/value"`.

    Args:
        patterns: from a pattern to a `PartitionSpec`, or to another rule.
        default: of parameters that no pattern matches. None keeps them whole.
        then: splits one more dimension of every parameter, of those still whole. `then=fsdp("data")` adds FSDP to
            patterns for tensor parallelism.

    Returns:
        A rule `(path, shape, mesh) -> PartitionSpec`. Rules made alike are equal and have the same hash. The rule
        raises `ValueError` for a spec that does not fit the shape or the mesh. `kv.from_params` and `shardings_of`
        raise `ValueError` for a pattern that decides on no parameter.

    Raises:
        TypeError: a pattern is no text; a value is neither a `PartitionSpec` nor a function; `then` was not made by
            `fsdp`.

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
    if not isinstance(patterns, Mapping):
        raise TypeError(f"parallel.sharding_rules: patterns must be a dict, got {checks.describe(patterns)}")
    for pattern, chosen in patterns.items():
        if not isinstance(pattern, str):
            raise TypeError(f"parallel.sharding_rules: a pattern must be a str, got {pattern!r}")
        _check_chosen(chosen, f"pattern {pattern!r}")
    default = _WHOLE if default is None else default
    _check_chosen(default, "default")
    if then is not None and not isinstance(then, FullyShardedRule):
        raise TypeError(f"parallel.sharding_rules: then must be made by parallel.fsdp, got {checks.describe(then)}")
    return NameRules(tuple(patterns.items()), default, then)


def check_rule_paths(rule: object, paths: Sequence[str]) -> None:
    """`ValueError` if the rule has a pattern that decides on none of these parameters."""
    if isinstance(rule, NameRules):
        rule.check_paths(paths)


def _check_chosen(chosen: object, what: str) -> None:
    if not isinstance(chosen, PartitionSpec) and not callable(chosen):
        raise TypeError(
            f"parallel.sharding_rules: {what} must have a PartitionSpec or a rule, got {checks.describe(chosen)}"
        )
    checks.hashable(chosen, f"parallel.sharding_rules: {what}")


def _names(axis: object) -> tuple[str, ...]:
    names = tuple(axis) if isinstance(axis, Iterable) else (axis,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"parallel.fsdp: axis must be the name of a mesh axis or a list of names, got {axis!r}")
    return names  # pyright: ignore[reportReturnType]


def _trimmed(entries: Sequence[object]) -> PartitionSpec:
    """The spec of these entries, without those at the end that say nothing."""
    last = max(i for i, entry in enumerate(entries) if entry is not None)
    return PartitionSpec(*entries[: last + 1])
