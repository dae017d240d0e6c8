"""Repeated blocks, drawn once with "×12"."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .borders import Block, best_start
from .merges import Merges, gradients_of
from .net import Draft, Net

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
    backward: dict[int, list[Draft]] = {}
    for draft in layers:
        if draft.forward is not None:
            backward.setdefault(draft.forward.at, []).append(draft)
    merges, start = Merges(net, sources), 0
    while start < len(layers):
        found = _repeat_at(layers, signs, places[signs[start]], order, start, sources)
        if found is None:
            start += 1
            continue
        period, count = found
        block = Block(net, layers, sources, period, count)
        start = best_start(block, _starts(layers, signs, sources, start, period, count))
        copies = [layers[start + c * period : start + (c + 1) * period] for c in range(count)]
        gradients = gradients_of(copies, backward, sources)
        merges.merge(copies)
        if gradients:
            merges.merge_gradients(gradients)
            _set_apart({draft.at for same in gradients for draft in same.values()}, layers, signs, places, order)
        start += period * count
    if merges.kept:
        merges.finish()
    return bool(merges.kept)


def _set_apart(
    done: set[int], layers: list[Draft], signs: list[int], places: dict[int, list[int]], order: dict[int, int]
) -> None:
    """Give what is merged signs of its own, so that it is in no other repeat."""
    for number, draft in enumerate(layers):
        if draft.at in done:
            signs[number] = ~number
            places[~number], order[~number] = [number], 0


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
