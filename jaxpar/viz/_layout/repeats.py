"""Repeated blocks, drawn once with "×12"."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .borders import Block, best_start
from .net import Draft, Net, shared_scope
from .region_names import name_copies

_Sources = dict[int, set[int]]  # which drafts each draft reads

_FORWARD = -(1 << 60)  # in place of a layer, where a gradient reads it
_LONGEST = 400  # layers in a repeated block
_FEW_BRANCHES = 6  # beside each other, which stay apart
_CANDIDATES = 6  # lengths tried from one place


def collapse_repeats(net: Net) -> None:
    """Draw neighbouring copies of a block once. Blocks may contain blocks, up to three deep."""
    for _ in range(3):
        if not _collapse_once(net):
            return


def _collapse_once(net: Net) -> bool:
    layers, sources = net.layers, _sources(net)
    known: dict[object, int] = {}
    signs = [known.setdefault(_signature(net, draft), len(known)) for draft in layers]
    places: dict[int, list[int]] = {}
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
        block = Block(net, layers, sources, period, count)
        start = best_start(block, _starts(layers, signs, sources, start, period, count))
        copies = [layers[start + c * period : start + (c + 1) * period] for c in range(count)]
        names = _merge_copies(net, copies)
        for draft in layers[start + period * count :]:
            if not sources.get(draft.at, set()).isdisjoint(names):
                sources[draft.at] = {names.get(source, source) for source in sources[draft.at]}
        start += period * count
        done = True
    return done


def _sources(net: Net) -> _Sources:
    """The drafts that each draft reads. A gradient reads one thing of the layers: the first block's are others."""
    found = net.sources()
    gradients = {draft.at for draft in net.layers if draft.forward is not None}
    for at in gradients & found.keys():
        found[at] = {source if source in gradients else _FORWARD for source in found[at]}
    return found


def _signature(net: Net, draft: Draft) -> object:
    """What copies of a layer have in common."""
    value = net.raw.values[draft.value]
    weights = tuple(net.raw.values[weight].shape for weight in draft.weights)
    scope = tuple(re.sub(r" \(\d+\)|_?\d+", "", part) for part in draft.scope)
    return (draft.op, draft.detail, value.shape, value.dtype, weights, scope, draft.repeat)


def _repeat_at(
    layers: list[Draft], signs: list[int], same: list[int], order: dict[int, int], start: int, sources: _Sources
) -> tuple[int, int] | None:
    """Length and count of the shortest copies that begin here."""
    at = order[signs[start]]
    while at < len(same) and same[at] <= start:
        at += 1
    order[signs[start]] = at
    for next_start in same[at : at + _CANDIDATES]:
        period = next_start - start
        if period > _LONGEST:
            return None
        count = _copies(layers, signs, sources, start, period)
        if (count >= 3 and (count - 1) * period >= 4) or (count == 2 and period >= 5):
            return period, count
    return None


def _starts(
    layers: list[Draft], signs: list[int], sources: _Sources, start: int, period: int, count: int
) -> Iterator[int]:
    """Where as many copies may begin: here, or up to a copy later."""
    yield start
    for at in range(start + 1, min(start + period, len(layers) - period * count) + 1):
        if signs[at - 1] != signs[at - 1 + period * count]:
            return
        if _copies(layers, signs, sources, at, period, count) == count:
            yield at


def _copies(
    layers: list[Draft], signs: list[int], sources: _Sources, start: int, period: int, most: int | None = None
) -> int:
    """How many copies of this length follow each other, with the same layers and the same edges.

    Those are the edges inside, from the copy before, and from others that are the same for all copies. Few copies
    beside each other are no repeat.
    """
    most = (len(layers) - start) // period if most is None else most
    kinds = signs[start : start + period]
    if most < 2 or signs[start + period : start + 2 * period] != kinds:
        return 1
    where: dict[int, int] = {}
    first, second = (_wires(layers, sources, where, start, period, copy) for copy in range(2))
    if not all(map(_is_begun, first, second)):
        return 1
    count = 2
    while (
        count < most
        and signs[start + count * period : start + (count + 1) * period] == kinds
        and _wires(layers, sources, where, start, period, count) == second
    ):
        count += 1
    return count if count > _FEW_BRANCHES or _is_row(second) else 1


def _is_begun(first: set[tuple[str, int]], second: set[tuple[str, int]]) -> bool:
    """Whether a layer of the first copy reads as much as that of the second, and the same inside the copy."""
    inside = ({wire for wire in wires if wire[0] == "in"} for wires in (first, second))
    return next(inside) == next(inside) and len(first) == len(second)


def _is_row(wires: list[set[tuple[str, int]]]) -> bool:
    """Whether a path through at least half of a copy goes on from copy to copy. A sum of branches has no such path."""
    reads = [{at for kind, at in found if kind == "in" or kind.startswith("back")} for found in wires]
    read_by = [{at for at, found in enumerate(reads) if n in found} for n in range(len(wires))]
    ends = {at for found in wires for kind, at in found if kind.startswith("back")}
    return any(2 * len(_reached(reads, end) & _reached(read_by, end)) >= len(wires) for end in ends)


def _reached(wires: list[set[int]], start: int) -> set[int]:
    found, work = set[int](), [start]
    while work:
        new = wires[work.pop()] - found
        found |= new
        work += new
    return found


def _wires(
    layers: list[Draft], sources: _Sources, where: dict[int, int], start: int, period: int, copy: int
) -> list[set[tuple[str, int]]]:
    """What each layer of a copy reads: in the copy, n copies back, or outside.

    `where` has the places of the layers of the copies before, and grows.
    """
    begin = start + copy * period
    where |= {layers[begin + n].at: copy * period + n for n in range(period)}
    found: list[set[tuple[str, int]]] = []
    for n in range(period):
        wires: set[tuple[str, int]] = set()
        for source in sources.get(layers[begin + n].at, ()):
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
    """Keep the first copy, with the sums of all. Returns which draft replaces which."""
    first, names = copies[0], dict[int, int]()
    scope, owns = shared_scope(*copies), [shared_scope(copy) for copy in copies]
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
            kept.eqns += other.eqns
        kept.repeat *= len(copies)
    by_at = {draft.at: draft for draft in first}
    net.drafts = [draft for draft in net.drafts if draft.at not in names]
    for draft in net.drafts:
        if draft.forward is not None and draft.forward.at in names:
            draft.forward = by_at[names[draft.forward.at]]
    net.redirect(names)
    _name_block(net, first, scope, owns)
    return names


def _name_block(net: Net, first: list[Draft], shared: tuple[str, ...], owns: list[tuple[str, ...]]) -> None:
    """Write the count on the block's own scope, or on a new one. `owns` are the scopes of the copies."""
    count, rest, others = len(owns), len(shared) + 1, set(net.drafts) - set(first)
    if len(owns[0]) > len(shared):
        inside = {d.scope[len(shared)] for d in others if d.scope[: len(shared)] == shared != d.scope}
        label = name_copies([(*own, "")[len(shared)] for own in owns], inside)
    else:
        inner = {draft.scope for draft in others if draft.op != "input"}
        whole = bool(shared) and not any(scope[: len(shared)] == shared for scope in inner)
        label = f"{shared[-1]} ×{count}" if whole else f"×{count}"
        shared = shared[:-1] if whole else shared
        rest = len(shared) + 1 if whole else len(shared)
    unique, number = (*shared, label), 1
    taken = {draft.scope[: len(shared) + 1] for draft in others}
    if all(draft.forward is not None and draft.forward.scope[: len(unique)] == unique for draft in first):
        taken.discard(unique)  # gradients are in the scope of their layers
    while unique in taken:
        number += 1
        unique = (*shared, f"{label} ({number})")
    for draft in first:
        draft.scope = (*unique, *draft.scope[rest:])
    net.repeats[unique] = count
