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
from .._searches import reach
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
    wanted = {
        at: (net.raw.eqns[made].prim, net.raw.values[draft.value].shape)
        for at, draft in drafts.items()
        if (made := net.raw.values[draft.value].producer) is not None
    }
    local = local_shapes(program, places, wanted, devices)
    found: dict[tuple[str, str, Phase], StepEdge] = {}
    for source, target, number in sorted(net.edges):
        ends = _ends(drafts[source], drafts[target], phases, names)
        value = net.raw.values[number]
        if ends is None or ends in found or (drafts[source].op == "input" and ends[2] != "forward"):
            continue
        is_mapped = any(name.startswith(_MAPPED) for name in drafts[source].scope)
        part = value.shape if is_mapped else local.get(source) if drafts[source].value == number else None
        whole = part != value.shape or drafts[source].scope == drafts[target].scope
        spec = spec_from_shapes(value.shape, part, mesh) if part is not None and whole and not is_mapped else None
        found[ends] = StepEdge(*ends, value.shape, value.dtype, part, spec)
    return (*found.values(), *_gradients(net, phases, names))


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
) -> list[StepEdge]:
    """One edge from each layer's gradient to each optimizer that reads it, through what hands it on."""
    readers: dict[int, list[tuple[int, int]]] = {}
    for source, target, value in sorted(net.edges):
        readers.setdefault(source, []).append((target, value))
    goals = {draft.at for draft in phases.optimizers}
    on = {draft.at: [target for target, _ in readers.get(draft.at, ())] for draft in phases.glue}
    found: dict[tuple[str, str], StepEdge] = {}
    for row in phases.rows:
        for target, value in (way for draft in row.backward for way in readers.get(draft.at, ())):
            array = net.raw.values[value]
            for at in sorted(reach([target], on) & goals):
                ends = names[row.draft.at], names[at]
                found.setdefault(ends, StepEdge(*ends, "gradients", array.shape, array.dtype))
    return list(found.values())


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
    parts = [*sharding.spec, *(None for _ in shape)][: len(shape)]
    spec = tuple("+".join(map(str, part)) if isinstance(part, tuple) else str(part or "") for part in parts)
    return StepArgument(name, shape, dtype, tuple(sharding.shard_shape(shape)), spec)


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
    ways = (
        [[n for n, at in zip(names, way, strict=True) if at == axis] for axis in range(len(shape))] for way in every
    )
    fitting = [way for way in ways if [math.prod(mesh[name] for name in split) for split in way] == factors]
    return tuple(map("+".join, fitting[0])) if len(fitting) == 1 else None


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
