"""The arguments of a step and the arrays between its layers, and each device's part of them.

The trace has whole arrays, the program each device's part. `edges_of` and `arguments_of` put them together.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from ..._core.arrays import PyTree
from .._graph import BACKWARD
from .._layout.net import Draft
from .._program.hlo import Program
from .._read.costs import Jaxpr
from .._read.jaxpr import body_of
from .._searches import reach
from .graph import Phase, StepArgument, StepEdge
from .phases import changes_params
from .places import Places, is_part, primitive_of

_MAPPED = ("pmap ", "shard_map ")


def edges_of(places: Places, mesh: dict[str, int], devices: int) -> tuple[StepEdge, ...]:
    """The edges of a step: between layers, between their gradients, and from gradients to the optimizer."""
    net = places.net
    drafts, local = {draft.at: draft for draft in net.drafts}, _local_shapes(places, devices)
    edges: dict[tuple[str, str, Phase], StepEdge] = {}
    for source, target, number in sorted(net.edges):
        first, value = drafts[source], net.raw.values[number]
        ends = _ends(first, drafts[target], places)
        if ends is None or ends in edges or (first.op == "input" and ends[2] != "forward"):
            continue
        # Inside of pmap and shard_map the trace has the shapes of one device. Elsewhere the program shows them.
        is_mapped = any(name.startswith(_MAPPED) for name in first.scope)
        local_shape = value.shape if is_mapped else local.get(source) if first.value == number else None
        is_reliable = local_shape != value.shape or first.scope == drafts[target].scope
        spec = (
            spec_from_shapes(value.shape, local_shape, mesh)
            if local_shape is not None and is_reliable and not is_mapped
            else None
        )
        edges[ends] = StepEdge(*ends, value.shape, value.dtype, local_shape, spec)
    return (*edges.values(), *_gradients(places), *_followers(places), *_moved(places), *_metrics(places))


def _ends(source: Draft, target: Draft, places: Places) -> tuple[str, str, Phase] | None:
    """The layers at both ends of an edge, and its phase. None for one inside a layer, or that the picture implies."""
    names, of, row_of = places.names, places.phases.of, places.phases.row_of
    ends = [row_of[draft.at].draft.at if draft.at in row_of else None for draft in (source, target)]
    first, second = (source.at if source.op == "input" else ends[0]), ends[1]
    if first is None or second is None or first == second:
        return None
    if of.get(target.at) == "backward":  # what is computed again for a gradient is part of its layer
        are_backward = source.op.endswith(BACKWARD) and target.op.endswith(BACKWARD)
        return (names[first], names[second], "backward") if are_backward else None
    if of.get(target.at) == "forward" and of.get(source.at, "forward") == "forward":
        return names[first], names[second], "forward"
    return None


def _gradients(places: Places) -> list[StepEdge]:
    """One edge from each layer's gradient to each optimizer that reads it, through what hands it on."""
    net, phases, names = places.net, places.phases, places.names
    readers: dict[int, list[tuple[int, int]]] = {}
    for source, target, value in sorted(net.edges):
        if source in phases.given.get(target, ()):
            readers.setdefault(source, []).append((target, value))
    goals = {draft.at for draft in phases.optimizers}
    # Codes of compressed gradients are new state too, and stand before the optimizer.
    params = {weight for row in phases.rows for each in (row.draft, *row.gathered) for weight in each.weights}
    hands_on = [d for d in phases.optimizers if not (changes_params(d, params) or d.at in phases.moves)]
    hands_on += phases.glue
    goals -= phases.follows.keys()
    on = {draft.at: [target for target, _ in readers.get(draft.at, ())] for draft in hands_on}
    edges: dict[tuple[str, str], StepEdge] = {}
    sources = net.sources()
    for row in phases.rows:
        for target, value in (way for draft in row.backward for way in readers.get(draft.at, ())):
            array = net.raw.values[value]
            later = phases.late if row.draft.at in phases.waiting else set[int]()
            layers = phases.whose_gradients(row.draft.at, sources)
            for ends in itertools.product(layers, sorted(reach([target], on) & goals | later)):
                source, goal = names[ends[0]], names[ends[1]]
                edges.setdefault((source, goal), StepEdge(source, goal, "gradients", array.shape, array.dtype))
    return list(edges.values())


def _followers(places: Places) -> list[StepEdge]:
    """One edge from each update to what follows it."""
    phases, names, drafts = places.phases, places.names, {draft.at: draft for draft in places.net.drafts}
    edges: list[StepEdge] = []
    for follower, update in phases.follows.items():
        array = places.net.raw.values[drafts[update].value]
        phase: Phase = "elsewhere" if follower in phases.beside else "optimizer"
        edges.append(StepEdge(names[update], names[follower], phase, array.shape, array.dtype))
    return edges


def _moved(places: Places) -> list[StepEdge]:
    """One edge from what moves params to each layer of the pass that reads these."""
    names, drafts, values = places.names, {draft.at: draft for draft in places.net.drafts}, places.net.raw.values
    made = {at: values[drafts[at].value] for at in places.phases.moves}
    return [
        StepEdge(names[at], names[layer], "parameters", made[at].shape, made[at].dtype)
        for at, layers in places.phases.moves.items()
        for layer in layers
    ]


def _metrics(places: Places) -> list[StepEdge]:
    """One edge from each layer to each result that it is part of, such as the loss."""
    raw, drafts = places.net.raw, {draft.at: draft for draft in places.net.drafts}
    values = {at: raw.values[draft.value] for at, draft in drafts.items()}
    return [
        StepEdge(places.names[at], name, "metrics", values[at].shape, values[at].dtype)
        for name, rows in places.phases.metrics.items()
        for at in rows
    ]


def mesh_of(compiled: jax.stages.Compiled, args: PyTree, traced: Jaxpr) -> dict[str, int]:
    """The name and the size of each axis of the mesh that a step runs on. Empty for one device."""
    placed = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args))
    for sharding in (*jax.tree.leaves(compiled.input_shardings), *placed):
        if isinstance(sharding, NamedSharding):
            return _sizes(sharding.mesh.shape)
    # Of arrays of the host, only a map over devices in the step says where they go.
    mesh = _sizes(_mapped_axes(traced))
    return mesh if math.prod(mesh.values()) == device_count(compiled) else {}


def _sizes(axes: Mapping[Any, int]) -> dict[str, int]:
    return {str(name): int(size) for name, size in axes.items()}


def _mapped_axes(traced: Jaxpr) -> Mapping[Any, int]:
    """The axes of the first map over devices in a jaxpr."""
    for eqn in getattr(traced, "jaxpr", traced).eqns:
        if eqn.primitive.name == "shard_map":
            return eqn.params["mesh"].shape
        if (body := body_of(eqn)) is not None and (axes := _mapped_axes(body)):
            return axes
    return {}


def device_count(compiled: jax.stages.Compiled) -> int:
    """How many devices a compiled program runs on."""
    counts = [len(sharding.device_set) for sharding in jax.tree.leaves(compiled.input_shardings)]
    return max(counts, default=1)


def arguments_of(
    program: Program, compiled: jax.stages.Compiled, names: list[str], args: PyTree, mesh: Mapping[str, int]
) -> tuple[StepArgument, ...]:
    """The arguments of a step, split as the compiled program takes them.

    A step may hand other arguments to its program. Those that have no name in it are split as they are placed.
    """
    leaves = jax.tree.leaves(args)
    taken = jax.tree.leaves(compiled.input_shardings[0])
    direct = len(taken) == len(leaves)
    shardings = taken if direct else [getattr(leaf, "sharding", None) for leaf in leaves]
    inside = {} if direct else {entry.op_name: entry.arrays[0].shape for entry in program.arguments if entry.op_name}
    return tuple(_argument(*entry, inside, mesh) for entry in zip(names, leaves, shardings, strict=True))


def _argument(
    name: str, leaf: object, sharding: object, inside: Mapping[str, tuple[int, ...]], mesh: Mapping[str, int]
) -> StepArgument:
    shape, dtype = tuple(np.shape(leaf)), str(getattr(leaf, "dtype", type(leaf).__name__))
    if name in inside:
        return StepArgument(name, shape, dtype, inside[name], None)
    if not isinstance(sharding, NamedSharding):  # of an array of the host, the compiler says how it is split
        local_shape = tuple(sharding.shard_shape(shape)) if isinstance(sharding, Sharding) else shape
        spec = spec_from_shapes(shape, local_shape, mesh) if mesh else None
        return StepArgument(name, shape, dtype, local_shape, spec)
    axes_of = [*sharding.spec, *(None for _ in shape)][: len(shape)]
    spec = tuple("+".join(map(str, axes)) if isinstance(axes, tuple) else str(axes or "") for axes in axes_of)
    return StepArgument(name, shape, dtype, tuple(sharding.shard_shape(shape)), spec)


def spec_from_shapes(shape: tuple[int, ...], local: tuple[int, ...], mesh: Mapping[str, int]) -> tuple[str, ...] | None:
    """The axes that each dimension is split over, from the shape of one device's part.

    Each axis splits one dimension. None where the sizes fit no or several ways.

    >>> spec_from_shapes((64, 256), (32, 64), {"data": 2, "model": 4})
    ('data', 'model')
    """
    if len(shape) != len(local) or any(
        length % local_length for length, local_length in zip(shape, local, strict=True) if local_length
    ):
        return None
    factors = [length // local_length if local_length else 1 for length, local_length in zip(shape, local, strict=True)]
    names = [name for name, size in mesh.items() if size > 1]
    every = itertools.product(range(-1, len(shape)), repeat=len(names))
    ways = (
        [[n for n, at in zip(names, way, strict=True) if at == axis] for axis in range(len(shape))] for way in every
    )
    fitting = [way for way in ways if [math.prod(mesh[name] for name in split) for split in way] == factors]
    return tuple(map("+".join, fitting[0])) if len(fitting) == 1 else None


def _local_shapes(places: Places, devices: int) -> dict[int, tuple[int, ...]]:
    """The shape of one device's part of what each draft computes, where the program shows it."""
    raw = places.net.raw
    made = {draft.at: raw.values[draft.value] for draft in places.net.drafts}
    seen: dict[int, Counter[tuple[int, ...]]] = {}
    for instruction in places.program:
        at = places.draft_at.get(instruction.name)
        if (
            at is None
            or (producer := made[at].producer) is None
            or primitive_of(instruction.op_name) != raw.eqns[producer].prim
        ):
            continue
        # XLA fuses, splits and transposes. A shape counts that may be a part of the array, if there is only one.
        full_shape = made[at].shape
        shapes = (array.shape for array in instruction.arrays if math.prod(full_shape) <= devices * array.size)
        seen.setdefault(at, Counter()).update(shape for shape in shapes if is_part(shape, full_shape))
    return {at: shapes.most_common(1)[0][0] for at, shapes in seen.items() if len(shapes) == 1}
