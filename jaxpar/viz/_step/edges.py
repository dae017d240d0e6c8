"""The arguments of a step and the arrays between its layers, and each device's part of them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from .._graph import BACKWARD
from .._layout.net import Draft, Net
from .._program.hlo import Program
from .._read.raw import Eqn
from .graph import Phase, StepArgument, StepEdge
from .phases import Phases
from .places import Places, is_part, primitive_of

_MAPPED = ("pmap ", "shard_map ")


def edges_of(
    net: Net,
    phases: Phases,
    names: dict[int, str],
    program: Program,
    places: Places,
    mesh: dict[str, int],
    devices: int,
) -> tuple[StepEdge, ...]:
    """The edges of a step: between layers, between their gradients, and from gradients to the optimizer."""
    drafts = {draft.at: draft for draft in net.drafts}
    wanted = {at: made for at, draft in drafts.items() if (made := _result(net, draft)) is not None}
    local = local_shapes(program, places, wanted, devices)
    found: dict[tuple[str, str, Phase], StepEdge] = {}
    for source, target, number in sorted(net.edges):
        ends = _ends(drafts[source], drafts[target], phases, names)
        value = net.raw.values[number]
        if ends is None or ends in found or (drafts[source].op == "input" and ends[2] != "forward"):
            continue
        part = local.get(source) if drafts[source].value == number else None
        if any(name.startswith(_MAPPED) for name in drafts[source].scope):
            part = value.shape
        whole = part != value.shape or drafts[source].scope == drafts[target].scope
        spec = spec_from_shapes(value.shape, part, mesh) if part is not None and whole else None
        mapped = part == value.shape and any(name.startswith(_MAPPED) for name in drafts[source].scope)
        found[ends] = StepEdge(*ends, value.shape, value.dtype, part, None if mapped else spec)
    return (*found.values(), *_gradients(net, phases, names, drafts, found))


def _ends(source: Draft, target: Draft, phases: Phases, names: dict[int, str]) -> tuple[str, str, Phase] | None:
    """The layers at both ends of an edge, and its phase. None for one inside a layer, or that the picture implies."""
    first = names[source.at] if source.op == "input" else _layer(source, phases, names)
    second = _layer(target, phases, names)
    if first is None or second is None or first == second:
        return None
    of = phases.of
    if of.get(target.at) == "backward":  # what is computed again for a gradient is part of its layer
        both = source.op.endswith(BACKWARD) and target.op.endswith(BACKWARD)
        return (first, second, "backward") if both else None
    if of.get(target.at) == "forward" and of.get(source.at, "forward") == "forward":
        return first, second, "forward"
    return None


def _layer(draft: Draft, phases: Phases, names: dict[int, str]) -> str | None:
    row = phases.row_of.get(draft.at)
    return names[row.draft.at] if row is not None else None


def _gradients(
    net: Net,
    phases: Phases,
    names: dict[int, str],
    drafts: dict[int, Draft],
    known: dict[tuple[str, str, Phase], StepEdge],
) -> list[StepEdge]:
    """One edge from each layer's gradient to each optimizer that reads it, through what hands it on."""
    readers: dict[int, list[tuple[int, int]]] = {}
    for source, target, value in sorted(net.edges):
        readers.setdefault(source, []).append((target, value))
    glue = {draft.at for draft in phases.glue}
    goals = {draft.at for draft in phases.optimizers}
    found: dict[tuple[str, str], StepEdge] = {}
    for row in phases.rows:
        for draft in row.backward:
            work = [(target, value) for target, value in readers.get(draft.at, ()) if target in glue | goals]
            seen: set[int] = set()
            while work:
                at, value = work.pop(0)
                if at in goals:
                    array = net.raw.values[value]
                    ends = names[row.draft.at], names[at]
                    found.setdefault(ends, StepEdge(*ends, "gradients", array.shape, array.dtype))
                elif at not in seen:
                    seen.add(at)
                    work += [(target, value) for target, _ in readers.get(at, ()) if target in glue | goals]
    return list(found.values())


def _result(net: Net, draft: Draft) -> tuple[str, tuple[int, ...]] | None:
    """The primitive and the shape of what a draft is known by."""
    value = net.raw.values[draft.value]
    if value.producer is None:
        return None
    eqn: Eqn = net.raw.eqns[value.producer]
    return eqn.prim, value.shape


def mesh_of(compiled: Any, args: Any) -> dict[str, int]:
    """The name and the size of each axis of the mesh that a step runs on. Empty for one device."""
    placed = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args))
    for sharding in (*jax.tree.leaves(compiled.input_shardings), *placed):
        if isinstance(sharding, NamedSharding):
            return {str(name): int(size) for name, size in sharding.mesh.shape.items()}
    return {}


def device_count(compiled: Any) -> int:
    """How many devices a compiled program runs on."""
    found = [len(sharding.device_set) for sharding in jax.tree.leaves(compiled.input_shardings)]
    return max(found, default=1)


def arguments_of(program: Program, compiled: Any, names: list[str], args: Any) -> tuple[StepArgument, ...]:
    """The arguments of a step, split as the compiled program takes them.

    A step may hand other arguments to its program. Those that have no name in it are split as they are placed.
    """
    leaves = jax.tree.leaves(args)
    taken = jax.tree.leaves(compiled.input_shardings[0])
    direct = len(taken) == len(leaves)
    shardings = taken if direct else [getattr(leaf, "sharding", None) for leaf in leaves]
    inside = {} if direct else _parameters(program)
    return tuple(_argument(*one, inside) for one in zip(names, leaves, shardings, strict=True))


def _parameters(program: Program) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter of a program on one device, by its name."""
    instructions = program.computations[program.entry].instructions.values()
    found = (one for one in instructions if one.opcode == "parameter" and one.op_name and one.arrays)
    return {one.op_name.replace("\\'", "'"): one.arrays[0].shape for one in found}


def _argument(name: str, leaf: Any, sharding: Any, inside: Mapping[str, tuple[int, ...]]) -> StepArgument:
    shape, dtype = tuple(np.shape(leaf)), str(getattr(leaf, "dtype", type(leaf).__name__))
    if name in inside:
        return StepArgument(name, shape, dtype, inside[name], None)
    if not isinstance(sharding, NamedSharding):
        return StepArgument(name, shape, dtype, shape, None)
    return StepArgument(name, shape, dtype, tuple(sharding.shard_shape(shape)), spec_of(sharding, len(shape)))


def spec_of(sharding: Any, dimensions: int) -> tuple[str, ...] | None:
    """The axes that each dimension is split over, "" for none. None without a mesh."""
    if not isinstance(sharding, NamedSharding):
        return None
    parts = [*sharding.spec, *(None for _ in range(dimensions - len(sharding.spec)))]
    names = tuple("+".join(map(str, part)) if isinstance(part, tuple) else str(part or "") for part in parts)
    return names[:dimensions]


def spec_from_shapes(shape: tuple[int, ...], local: tuple[int, ...], mesh: Mapping[str, int]) -> tuple[str, ...] | None:
    """The axes that each dimension is split over, from the shape of one device's part.

    Each axis splits one dimension. None where the sizes fit no or several ways.

    >>> spec_from_shapes((64, 256), (32, 64), {"data": 2, "model": 4})
    ('data', 'model')
    """
    if len(shape) != len(local) or any(length % part for length, part in zip(shape, local, strict=True) if part):
        return None
    factors = [length // part if part else 1 for length, part in zip(shape, local, strict=True)]
    names = [name for name, size in mesh.items() if size > 1]
    every = itertools.product(range(-1, len(shape)), repeat=len(names))
    ways = [way for way in every if _fits(way, names, factors, mesh)]
    if len(ways) != 1:
        return None
    return tuple("+".join(n for n, at in zip(names, ways[0], strict=True) if at == axis) for axis in range(len(shape)))


def _fits(way: tuple[int, ...], names: list[str], factors: list[int], mesh: Mapping[str, int]) -> bool:
    made = [1] * len(factors)
    for name, at in zip(names, way, strict=True):
        if at >= 0:
            made[at] *= mesh[name]
    return made == factors


def local_shapes(
    program: Program, places: Places, wanted: Mapping[int, tuple[str, tuple[int, ...]]], devices: int
) -> dict[int, tuple[int, ...]]:
    """The shape of one device's part of what each draft computes, where the program shows it.

    `wanted` has the primitive and the whole shape of each draft's result.
    """
    seen: dict[int, Counter[tuple[int, ...]]] = {}
    for one in program:
        at = places.draft_of(one) if one.op_name and one.opcode not in ("parameter", "constant") else None
        if at in wanted and at is not None and primitive_of(one.op_name) == wanted[at][0]:
            whole = wanted[at][1]
            parts = (
                array.shape
                for array in one.arrays
                if is_part(array.shape, whole) and math.prod(whole) <= devices * array.size
            )
            seen.setdefault(at, Counter()).update(parts)
    return {at: shapes.most_common(1)[0][0] for at, shapes in seen.items() if len(shapes) == 1}
