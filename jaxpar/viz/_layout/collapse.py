"""Making a large graph small: repeated blocks once with ×N, deep scopes as one node, and at last whole stretches."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from .._graph import BACKWARD, common_prefix
from .net import Draft, Net

_Sources = dict[int, set[int]]  # where a layer's inputs come from

_LONGEST = 400  # layers in a repeated block
_CANDIDATES = 6  # lengths tried from one place


def collapse_repeats(net: Net) -> None:
    """Neighbouring copies of a block are drawn once, "×12"; once more where blocks hold blocks."""
    for _ in range(3):
        if not _collapse_once(net):
            return


def _collapse_once(net: Net) -> bool:
    layers = [draft for draft in net.drafts if draft.op != "input"]
    sources = _sources(net)
    signs = [_signature(net, draft) for draft in layers]
    places: dict[object, list[int]] = {}
    for number, sign in enumerate(signs):
        places.setdefault(sign, []).append(number)
    order = dict.fromkeys(places, 0)
    done, start = False, 0
    while start < len(layers):
        found = _repeat_at(layers, signs, places[signs[start]], order, start, sources)
        if found is None:
            start += 1
            continue
        period, count = found
        start = _aligned(layers, signs, sources, start, period, count)
        copies = [layers[start + c * period : start + (c + 1) * period] for c in range(count)]
        names = _merge_copies(net, copies)
        for draft in layers[start + period * count :]:
            if not sources.get(draft.at, set()).isdisjoint(names):
                sources[draft.at] = {names.get(source, source) for source in sources[draft.at]}
        start += period * count
        done = True
    return done


def _signature(net: Net, draft: Draft) -> object:
    value = net.raw.values[draft.value]
    weights = tuple(net.raw.values[weight].shape for weight in draft.weights)
    scope = tuple(re.sub(r" \(\d+\)|_?\d+", "", part) for part in draft.scope)
    return (draft.op, draft.detail, value.shape, value.dtype, weights, scope, draft.repeat)


def _sources(net: Net) -> _Sources:
    found: _Sources = {}
    for source, target, _ in net.edges:
        found.setdefault(target, set()).add(source)
    return found


def _repeat_at(
    layers: list[Draft], signs: list[object], same: list[int], order: dict[object, int], start: int, sources: _Sources
) -> tuple[int, int] | None:
    """Length and count of the copies that begin here: the shortest that is worth it."""
    at = order[signs[start]]
    while at < len(same) and same[at] <= start:
        at += 1
    order[signs[start]] = at
    for next_start in same[at : at + _CANDIDATES]:
        period = next_start - start
        if period > _LONGEST:
            return None
        count = 1
        while signs[start + count * period : start + (count + 1) * period] == signs[start : start + period]:
            count += 1
        while count > 1 and not _alike(layers, sources, start, period, count):
            count -= 1 if count <= 3 else count // 2
        if (count >= 3 and (count - 1) * period >= 4) or (count == 2 and period >= 5):
            return period, count
    return None


def _aligned(layers: list[Draft], signs: list[object], sources: _Sources, start: int, period: int, count: int) -> int:
    """Where to cut the copies: at the borders of a module, where they can be shifted there."""

    def inside(at: int) -> int:
        copies = [layers[at + c * period : at + (c + 1) * period] for c in range(count)]
        own = min(len(common_prefix(draft.scope for draft in copy)) for copy in copies)
        return own - len(_shared_scope(copies))

    best, at = start, start
    while at - start < period and at + period * count < len(layers):
        at += 1
        block = signs[at : at + period]
        same = all(signs[at + c * period : at + (c + 1) * period] == block for c in range(1, count))
        if not same:
            break
        if inside(at) > inside(best) and _alike(layers, sources, at, period, count):
            best = at
    return best


def _alike(layers: list[Draft], sources: _Sources, start: int, period: int, count: int) -> bool:
    """Whether every copy is wired as the one before: inside itself, to its predecessor, and to fixed others."""
    where = {layers[start + n].at: n for n in range(period * count)}
    patterns = [_wires(layers, sources, where, start, period, copy) for copy in range(count)]
    first, second = patterns[0], patterns[1]
    if count < 4 and not any(wire[0].startswith("back") for wires in second for wire in wires):
        return False  # a few branches side by side are no tower
    if any(pattern != second for pattern in patterns[2:]):
        return False
    for mine, others in zip(first, second, strict=True):
        inside = {wire for wire in mine if wire[0] == "in"}
        if inside != {wire for wire in others if wire[0] == "in"} or len(mine) != len(others):
            return False
    return True


def _wires(
    layers: list[Draft], sources: _Sources, where: dict[int, int], start: int, period: int, copy: int
) -> list[set[tuple[str, int]]]:
    found: list[set[tuple[str, int]]] = []
    for n in range(period):
        wires: set[tuple[str, int]] = set()
        for source in sources.get(layers[start + copy * period + n].at, ()):
            at = where.get(source)
            if at is None:
                wires.add(("out", source))
            elif at // period == copy:
                wires.add(("in", at % period))
            else:
                wires.add((f"back {copy - at // period}", at % period))
        found.append(wires)
    return found


def _merge_copies(net: Net, copies: list[list[Draft]]) -> dict[int, int]:
    """Keep the first copy, with the sums of all; what reads a later copy reads the first. Returns who went where."""
    first, names = copies[0], {}
    scope = _shared_scope(copies)
    copy_of = {draft.at: number for number, copy in enumerate(copies) for draft in copy}
    for edge in list(net.edges):  # from one copy to the next
        if copy_of.get(edge[0], 0) != copy_of.get(edge[1], 0) and edge[0] in copy_of and edge[1] in copy_of:
            del net.edges[edge]
    for number, kept in enumerate(first):
        kept.own = len(kept.weights) if kept.own is None else kept.own
        for copy in copies[1:]:
            other = copy[number]
            names[other.at] = kept.at
            kept.flops += other.flops
            kept.bytes += other.bytes
            kept.weights = list(dict.fromkeys((*kept.weights, *other.weights)))
            kept.outputs += other.outputs
        kept.repeat *= len(copies)
    by_at = {draft.at: draft for draft in first}
    net.drafts = [draft for draft in net.drafts if draft.at not in names]
    for draft in net.drafts:
        if draft.forward is not None and draft.forward.at in names:
            draft.forward = by_at[names[draft.forward.at]]
    net.rename(names)
    _scope_of_copies(net, first, scope, len(copies))
    return names


def _shared_scope(copies: list[list[Draft]]) -> tuple[str, ...]:
    return common_prefix(draft.scope for copy in copies for draft in copy)


def _scope_of_copies(net: Net, first: list[Draft], shared: tuple[str, ...], count: int) -> None:
    """The block gets the scope that only it has, or a new one, to say how often it comes."""
    own = common_prefix(draft.scope for draft in first)
    if len(own) > len(shared):
        label = f"{own[len(shared)]} ×{count}"
        rest = len(shared) + 1
    else:
        inner = {draft.scope for draft in net.drafts if draft not in first and draft.op != "input"}
        whole = bool(shared) and not any(scope[: len(shared)] == shared for scope in inner)
        label = f"{shared[-1]} ×{count}" if whole else f"×{count}"
        shared = shared[:-1] if whole else shared
        rest = len(shared) + 1 if whole else len(shared)
    taken = {draft.scope[: len(shared) + 1] for draft in net.drafts}
    unique, number = (*shared, label), 1
    while unique in taken:
        number += 1
        unique = (*shared, f"{label} ({number})")
    for draft in first:
        draft.scope = (*unique, *draft.scope[rest:])
    net.repeats[unique] = count


def collapse_scopes(net: Net, depth: int) -> None:
    """Scopes deeper than `depth` become one node each; 0 leaves none open but what is around everything."""
    depth += _around_everything(net)
    groups: dict[tuple[str, ...], list[Draft]] = {}
    for draft in net.drafts:
        if len(draft.scope) > depth:
            backward = " backward" if draft.forward is not None else ""
            groups.setdefault((*draft.scope[: depth + 1], backward), []).append(draft)
    merged = []
    for (*scope, backward), group in groups.items():
        op = scope[-1] + (BACKWARD if backward else "")
        parts = [part for part in _convex(net, group) if len(part) > 1]
        merged += [(part, _sum(net, part, op, tuple(scope[:-1]))) for part in parts]
        for _, new in merged[len(merged) - len(parts) :]:
            new.name = op
    net.merge(merged)


def _around_everything(net: Net) -> int:
    return len(common_prefix(draft.scope for draft in net.drafts if draft.op != "input"))


def _convex(net: Net, group: list[Draft]) -> list[list[Draft]]:
    """The group cut where a path would leave it and come back."""
    members = {draft.at for draft in group}
    reached: dict[int, int] = {}  # how often a path has left the group on the way here
    sources = _sources(net)
    for draft in _sorted(net, sources):
        level = 0
        for source in sources.get(draft.at, ()):
            left = source in members and draft.at not in members
            level = max(level, reached.get(source, 0) + left)
        reached[draft.at] = level
    parts: dict[int, list[Draft]] = {}
    for draft in group:
        parts.setdefault(reached[draft.at], []).append(draft)
    return list(parts.values())


def _sorted(net: Net, sources: dict[int, set[int]]) -> Iterable[Draft]:
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


def _sum(net: Net, group: list[Draft], op: str, scope: tuple[str, ...], detail: str = "") -> Draft:
    last = next((draft for draft in reversed(group) if draft.outputs), group[-1])
    return Draft(
        at=group[0].at,
        op=op,
        detail=detail or f"{len(group)} layers",
        value=last.value,
        scope=scope,
        source=group[0].source,
        flops=sum(draft.flops for draft in group),
        bytes=sum(draft.bytes for draft in group),
        equations=sum(draft.equations for draft in group),
        weights=list(dict.fromkeys(weight for draft in group for weight in draft.weights)),
        outputs=[name for draft in group for name in draft.outputs],
    )


def limit(net: Net, most: int) -> None:
    """At most so many drawn nodes: the deepest scopes first, then stretches of neighbours."""
    depth = max((len(draft.scope) for draft in net.drafts), default=0) - _around_everything(net)
    while len(net.drafts) > most and depth > 0:
        depth -= 1
        collapse_scopes(net, depth)
    layers = [draft for draft in net.drafts if draft.op != "input"]
    inputs = len(net.drafts) - len(layers)
    if len(net.drafts) <= most:
        return
    room = max(1, most - inputs)
    ordered = [draft for draft in _sorted(net, _sources(net)) if draft.op != "input"]
    cuts = [part * len(ordered) // room for part in range(room + 1)]
    parts = [ordered[start:end] for start, end in itertools.pairwise(cuts) if end - start > 1]
    net.merge([(part, _sum(net, part, "...", (), f"{len(part)} steps")) for part in parts])
