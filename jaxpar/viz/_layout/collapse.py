"""Large graphs made small: deep scopes first, then whole stretches."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from .._circles import circles
from .._graph import BACKWARD
from .items import items_of
from .net import Draft, Net, shared_scope
from .region_names import name_region
from .regions import MOST, add_regions

_Part = tuple[tuple[str, ...], list[Draft]]  # the scope that closes, and drafts of it
_EDGES, _FEW = 4, 20  # edges for each layer, and layers from which that matters


def collapse_scopes(net: Net, depth: int) -> None:
    """Merge each scope deeper than `depth`. A scope around everything does not count."""
    depth += _depth_of_all(net)
    groups: dict[tuple[str, ...], list[Draft]] = {}
    for draft in net.drafts:
        if len(draft.scope) > depth:
            backward = " backward" if draft.forward is not None else ""
            groups.setdefault((*draft.scope[: depth + 1], backward), []).append(draft)
    sources = net.sources()
    order = list(_sort(net, sources)) if groups else []
    place = {draft.at: number for number, draft in enumerate(order)}
    parts: list[_Part] = []
    for key, group in groups.items():
        places = [place[draft.at] for draft in group]
        around = order[min(places) : max(places) + 1]  # no path leaves it and comes back
        parts += [(key, part) for part in _convex(around, sources, group)]
    merged: list[tuple[list[Draft], Draft]] = []
    for (*scope, backward), part in _apart(order, sources, parts):
        if len(part) > 1:
            op = re.sub(r" \(\d+\)$", "", scope[-1]) + (BACKWARD if backward else "")
            merged.append((part, _sum(part, op, tuple(scope[:-1]), op)))
    net.merge(merged)


def _depth_of_all(net: Net) -> int:
    """How many scopes are around everything."""
    return len(shared_scope(net.layers))


def _convex(around: list[Draft], sources: dict[int, set[int]], group: list[Draft]) -> list[list[Draft]]:
    """The group, cut where a path leaves it and comes back. `around` has all in between, in order."""
    if len(around) == len(group):
        return [group]
    members = {draft.at for draft in group}
    reached: dict[int, int] = {}  # how often a path has left the group on the way here
    for draft in around:
        level = 0
        for source in sources.get(draft.at, ()):
            left = source in members and draft.at not in members
            level = max(level, reached.get(source, 0) + left)
        reached[draft.at] = level
    parts: dict[int, list[Draft]] = {}
    for draft in group:
        parts.setdefault(reached[draft.at], []).append(draft)
    return list(parts.values())


def _apart(order: list[Draft], sources: dict[int, set[int]], parts: list[_Part]) -> list[_Part]:
    """The parts, cut where two of them read each other, so that what they become has no circle.

    Args:
        order: all drafts, each after those that it reads.
        sources: what each draft reads.
        parts: of the drafts that will be one.
    """
    whose = {draft.at: draft.at for draft in order}
    for _, part in parts:
        whose |= dict.fromkeys((draft.at for draft in part), part[0].at)
    wires: dict[int, set[int]] = {number: set() for number in whose.values()}
    for at, number in whose.items():
        wires[number] |= {whose[source] for source in sources.get(at, ())} - {number}
    circle_of = {number: circle for circle, members in enumerate(circles(wires)) for number in members}
    level: dict[int, int] = {}  # how often a path on the way here has gone from part to part of a circle
    for at in (draft.at for draft in order if whose[draft.at] in circle_of):
        inside = [s for s in sources.get(at, ()) if circle_of.get(whose[s]) == circle_of[whose[at]]]
        level[at] = max((level[s] + (whose[s] != whose[at]) for s in inside), default=0)
    found: dict[tuple[int, int], _Part] = {}
    for key, part in parts:
        for draft in part:
            found.setdefault((part[0].at, level.get(draft.at, 0)), (key, []))[1].append(draft)
    return list(found.values())


def _sort(net: Net, sources: dict[int, set[int]]) -> Iterable[Draft]:
    """Drafts after all that they read."""
    by_at = {draft.at: draft for draft in net.drafts}
    done: set[int] = set()
    for root in net.drafts:
        work = [root.at]
        while work:
            at = work[-1]
            missing = [source for source in sources.get(at, ()) if source not in done]
            if at in done or not missing:
                work.pop()
                if at not in done:
                    done.add(at)
                    yield by_at[at]
            else:
                work += missing


def _sum(group: list[Draft], op: str, scope: tuple[str, ...], name: str) -> Draft:
    """One draft for a group, with the sums of its costs. Gradients become the gradient of what their layers become."""
    last = next((draft for draft in reversed(group) if draft.outputs), group[-1])
    layers = sum(draft.layers for draft in group)
    return Draft(
        at=group[0].at,
        op=op,
        detail=f"{layers} layers",
        value=last.value,
        scope=scope,
        source=group[0].source,
        flops=sum(draft.flops for draft in group),
        bytes=sum(draft.bytes for draft in group),
        equations=sum(draft.equations for draft in group),
        eqns=[number for draft in group for number in draft.eqns],
        weights=list(dict.fromkeys(weight for draft in group for weight in draft.weights)),
        outputs=[output for draft in group for output in draft.outputs],
        name=name,
        forward=group[0].forward,
        layers=layers,
    )


def limit_nodes(net: Net, most: int) -> None:
    """Close until at most `most` layers are left.

    The deepest modules and scopes close first. Then the parts with one way in and one way out, again the deepest first.
    """
    if len(net.layers) <= most:
        return
    _close_deepest(net, most)
    room = min(MOST, most)
    while _is_too_much(net, most) and room > 1:
        add_regions(net, room)
        _close_deepest(net, most)
        room //= 2
    if len(net.layers) > most:
        _cut(net, most)


def _close_deepest(net: Net, most: int) -> None:
    depth = max((len(draft.scope) for draft in net.drafts), default=0) - _depth_of_all(net)
    while _is_too_much(net, most) and depth > 0:
        depth -= 1
        collapse_scopes(net, depth)


def _is_too_much(net: Net, most: int) -> bool:
    """Whether there are more layers than `most`, or too many edges for a picture of them."""
    edges = {(source, target) for source, target, _ in net.edges}
    return len(net.layers) > most or len(edges) > _EDGES * max(_FEW, len(net.layers))


def _cut(net: Net, most: int) -> None:
    """Merge neighbours, whatever they are. Only gradients that no layer owns come here, or very few nodes."""
    ordered = [draft for draft in _sort(net, net.sources()) if draft.op != "input"]
    cuts = [part * len(ordered) // most for part in range(most + 1)]
    parts = [ordered[start:end] for start, end in itertools.pairwise(cuts) if end - start > 1]
    groups = ((part, name_region(items_of(net, part, 0))) for part in parts)
    net.merge([(part, _sum(part, name, (), name)) for part, name in groups])
