"""The arrays between layers, and each device's part of them."""

from __future__ import annotations

from .._graph import BACKWARD
from .._layout.net import Draft, Net
from .._program.hlo import Program
from .._read.raw import Eqn
from .graph import Phase, StepEdge
from .phases import Phases
from .places import Places
from .shards import local_shapes, spec_from_shapes

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
