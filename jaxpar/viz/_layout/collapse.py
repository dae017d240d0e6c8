"""Large graphs made small: deep scopes first, then whole stretches."""

from __future__ import annotations

import itertools

from .._graph import BACKWARD
from .._scopes import Path
from .._searches import circles, order
from .net import Draft, Net, shared_scope
from .parts import MOST, add_parts, items_of, name_part

_Part = tuple[tuple[Path, bool], list[Draft]]  # the scope that closes, whether these are gradients, and drafts of it
_EDGES, _FEW = 4, 20  # edges for each layer, and layers from which that matters


def collapse_scopes(net: Net, depth: int) -> None:
    """Merge each scope deeper than `depth`. A scope around everything does not count."""
    depth += len(shared_scope(net.layers))
    groups: dict[tuple[Path, bool], list[Draft]] = {}
    for draft in net.drafts:
        if len(draft.scope) > depth:
            groups.setdefault((draft.scope[: depth + 1], draft.forward is not None), []).append(draft)
    sources = net.sources()
    ordered = _ordered(net, sources) if groups else []
    merged: list[tuple[list[Draft], Draft]] = []
    for (path, is_backward), part in _without_circles(ordered, sources, list(groups.items())):
        if len(part) > 1:
            op = path[-1].numbered(1) + (BACKWARD if is_backward else "")
            merged.append((part, _sum(part, op, path[:-1])))
    net.merge(merged)


def _without_circles(ordered: list[Draft], sources: dict[int, set[int]], parts: list[_Part]) -> list[_Part]:
    """The parts, cut where a path leaves one and comes back, so that what they become has no circle.

    `ordered` has all drafts, each after those that it reads.
    """
    whose = {draft.at: draft.at for draft in ordered}
    for _, part in parts:
        whose |= dict.fromkeys((draft.at for draft in part), part[0].at)
    large = {part[0].at for _, part in parts if len(part) > 1}
    wires: dict[int, set[int]] = {number: set() for number in whose.values()}
    for at, number in whose.items():
        wires[number] |= {whose[source] for source in sources.get(at, ())} - {number}
    circle_of = {number: circle for circle, members in enumerate(circles(wires)) for number in members}
    level: dict[int, int] = {}  # how often a path on the way here has left a part of its circle
    for at in (draft.at for draft in ordered if whose[draft.at] in circle_of):
        inside = [s for s in sources.get(at, ()) if circle_of.get(whose[s]) == circle_of[whose[at]]]
        level[at] = max((level[s] + (whose[s] != whose[at] and whose[s] in large) for s in inside), default=0)
    found: dict[tuple[int, int], _Part] = {}
    for key, part in parts:
        for draft in part:
            found.setdefault((part[0].at, level.get(draft.at, 0)), (key, []))[1].append(draft)
    return list(found.values())


def _ordered(net: Net, sources: dict[int, set[int]]) -> list[Draft]:
    """Drafts after all that they read."""
    by_at = {draft.at: draft for draft in net.drafts}
    rank = {at: number for number, at in enumerate(by_at)}
    return [by_at[at] for at in order({at: sources.get(at, set[int]()) for at in by_at}, rank.__getitem__)]


def _sum(group: list[Draft], op: str, scope: Path) -> Draft:
    """One draft for a group, with the sums of its costs. Gradients become the gradient of what their layers become."""
    last = next((draft for draft in reversed(group) if draft.outputs), group[-1])
    layers = sum(draft.layers for draft in group)
    made = Draft(group[0].at, op, f"{layers} layers", last.value, scope, group[0].source, name=op, layers=layers)
    made.equations, made.forward = sum(draft.equations for draft in group), group[0].forward
    made.add(group)
    return made


def limit_nodes(net: Net, most: int) -> None:
    """Close until at most `most` layers are left.

    The deepest modules and scopes close first. Then the parts with one way in and one way out, again the deepest first.
    """
    if len(net.layers) <= most:
        return
    _close_deepest(net, most)
    room = min(MOST, most)
    while _is_too_much(net, most) and room > 1:
        add_parts(net, room)
        _close_deepest(net, most)
        room //= 2
    if len(net.layers) > most:
        _cut(net, most)


def _close_deepest(net: Net, most: int) -> None:
    depth = max((len(draft.scope) for draft in net.drafts), default=0) - len(shared_scope(net.layers))
    while _is_too_much(net, most) and depth > 0:
        depth -= 1
        collapse_scopes(net, depth)


def _is_too_much(net: Net, most: int) -> bool:
    """Whether there are more layers than `most`, or too many edges for a picture of them."""
    edges = {(source, target) for source, target, _ in net.edges}
    return len(net.layers) > most or len(edges) > _EDGES * max(_FEW, len(net.layers))


def _cut(net: Net, most: int) -> None:
    """Merge neighbours, whatever they are. Only gradients that no layer owns come here, or very few nodes."""
    ordered = [draft for draft in _ordered(net, net.sources()) if draft.op != "input"]
    cuts = [part * len(ordered) // most for part in range(most + 1)]
    parts = [ordered[start:end] for start, end in itertools.pairwise(cuts) if end - start > 1]
    groups = ((part, name_part(items_of(net, part, 0))) for part in parts)
    net.merge([(part, _sum(part, name, ())) for part, name in groups])
