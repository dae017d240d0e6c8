"""Large graphs made small: deep scopes first, then whole stretches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from .._graph import BACKWARD
from .net import Draft, Net, shared_scope


def collapse_scopes(net: Net, depth: int) -> None:
    """Merge each scope deeper than `depth`. A scope around everything does not count."""
    depth += _depth_of_all(net)
    groups: dict[tuple[str, ...], list[Draft]] = {}
    for draft in net.drafts:
        if len(draft.scope) > depth:
            backward = " backward" if draft.forward is not None else ""
            groups.setdefault((*draft.scope[: depth + 1], backward), []).append(draft)
    merged: list[tuple[list[Draft], Draft]] = []
    for (*scope, backward), group in groups.items():
        op = scope[-1] + (BACKWARD if backward else "")
        parts = [part for part in _convex(net, group) if len(part) > 1]
        merged += [(part, _sum(part, op, tuple(scope[:-1]), f"{len(part)} layers", name=op)) for part in parts]
    net.merge(merged)


def _depth_of_all(net: Net) -> int:
    """How many scopes are around everything."""
    return len(shared_scope(net.layers))


def _convex(net: Net, group: list[Draft]) -> list[list[Draft]]:
    """The group, cut where a path leaves it and comes back."""
    members = {draft.at for draft in group}
    reached: dict[int, int] = {}  # how often a path has left the group on the way here
    sources = net.sources()
    for draft in _sort(net, sources):
        level = 0
        for source in sources.get(draft.at, ()):
            left = source in members and draft.at not in members
            level = max(level, reached.get(source, 0) + left)
        reached[draft.at] = level
    parts: dict[int, list[Draft]] = {}
    for draft in group:
        parts.setdefault(reached[draft.at], []).append(draft)
    return list(parts.values())


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


def _sum(group: list[Draft], op: str, scope: tuple[str, ...], detail: str, name: str = "") -> Draft:
    """One draft for a group, with the sums of its costs."""
    last = next((draft for draft in reversed(group) if draft.outputs), group[-1])
    return Draft(
        at=group[0].at,
        op=op,
        detail=detail,
        value=last.value,
        scope=scope,
        source=group[0].source,
        flops=sum(draft.flops for draft in group),
        bytes=sum(draft.bytes for draft in group),
        equations=sum(draft.equations for draft in group),
        weights=list(dict.fromkeys(weight for draft in group for weight in draft.weights)),
        outputs=[output for draft in group for output in draft.outputs],
        name=name,
    )


def limit_nodes(net: Net, most: int) -> None:
    """Merge until at most `most` layers are left. The deepest scopes come first, then neighbours."""
    depth = max((len(draft.scope) for draft in net.drafts), default=0) - _depth_of_all(net)
    while len(net.layers) > most and depth > 0:
        depth -= 1
        collapse_scopes(net, depth)
    if len(net.layers) <= most:
        return
    room = most
    ordered = [draft for draft in _sort(net, net.sources()) if draft.op != "input"]
    cuts = [part * len(ordered) // room for part in range(room + 1)]
    parts = [ordered[start:end] for start, end in itertools.pairwise(cuts) if end - start > 1]
    net.merge([(part, _sum(part, "...", (), f"{len(part)} steps")) for part in parts])
