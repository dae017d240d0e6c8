"""Repeated blocks, drawn once with "×12", from where a person would cut them.

A copy is a run of layers with the same signs that read the same as the run before (`_Pass._count`). Of all places where
the copies could begin, `_borders` prefers that of a module.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterator
from itertools import zip_longest

from .._scopes import Path, Scope, unique
from .._searches import reach, readers
from .collapse import items_of
from .names import name_copies, name_kinds, names_of_parameters, without_numbers
from .net import Draft, Net, shared_scope

_FORWARD = -(1 << 60)  # in place of a layer, where a gradient reads it
_LONGEST = 400  # layers in a repeated block
_FEW_BRANCHES = 6  # beside each other, which stay apart
_CANDIDATES = 6  # lengths tried from one place
_FOLLOWERS = frozenset("Activation LayerNorm BatchNorm GroupNorm InstanceNorm RMSNorm Normalization Dropout".split())

_Wires = list[set[tuple[str, int]]]


def collapse_repeats(net: Net) -> None:
    """Draw neighbouring copies of a block once. Blocks may contain blocks, up to three deep."""
    for _ in range(3):
        if not _Pass(net).collapse():
            return


class _Pass:
    """One way through the layers of a net, from the first to the last.

    A block is given by where it begins, its length and the number of its copies. What is merged is noted in `into`, by
    the layer that it becomes part of, and in `copy_of`, by its block and its copy. The net changes at the end.
    """

    def __init__(self, net: Net) -> None:
        self.net, self.layers, self.sources = net, net.layers, net.sources()
        # A gradient reads one thing of the layers: those of the first block are others. A mean over devices between two
        # gradients is no such thing.
        gradients = {draft.at for draft in self.layers if draft.forward is not None}
        late = reach(gradients, readers(self.sources))
        for at in gradients & self.sources.keys():
            self.sources[at] = {source if source in late else _FORWARD for source in self.sources[at]}
        self.into: dict[int, Draft] = {}
        self.copy_of: dict[int, tuple[int, int]] = {}
        numbers: dict[object, int] = {}
        self.signs = [numbers.setdefault(_signature(net, draft), len(numbers)) for draft in self.layers]
        self.places: dict[int, list[int]] = {}  # of each sign
        self.backward: dict[int, list[Draft]] = {}  # the gradients of each layer
        for number, draft in enumerate(self.layers):
            self.places.setdefault(self.signs[number], []).append(number)
            if draft.forward is not None:
                self.backward.setdefault(draft.forward.at, []).append(draft)

    def collapse(self) -> bool:
        """Merge the copies of each block. Whether there was one."""
        start = 0
        while start < len(self.layers):
            if (repeat := self._repeat_at(start)) is None:
                start += 1
                continue
            period, count = repeat
            # As many copies may begin at several places: in "conv, norm, relu" at each of the three. A person would cut
            # at the border of a module.
            start = max(self._starts(start, period, count), key=lambda at: self._borders(at, period, count))
            copies = self._copies(start, period, count)
            gradients = gradients_of(copies, self.backward, self._read)
            self._merge(copies)
            self._join(gradients)
            for kept in (next(iter(same.values())) for same in gradients):  # in the scopes of their layers
                kept.scope = self._layer_of(kept).scope
            done = {draft.at for same in gradients for draft in same.values()}
            for number, draft in enumerate(self.layers) if done else ():
                if draft.at in done:  # signs of their own, so that they are in no other repeat
                    self.signs[number], self.places[~number] = ~number, [number]
            start += period * count
        if self.into:
            self._finish()
        return bool(self.into)

    def _read(self, at: int) -> set[int]:
        """What a layer reads by now."""
        return {self.into[source].at if source in self.into else source for source in self.sources.get(at, ())}

    def _repeat_at(self, start: int) -> tuple[int, int] | None:
        """Length and count of the shortest copies that begin here."""
        same = self.places[self.signs[start]]
        after = bisect.bisect_right(same, start)
        for next_start in same[after : after + _CANDIDATES]:
            period = next_start - start
            if period > _LONGEST:
                return None
            count = self._count(start, period, (len(self.layers) - start) // period)
            if (count >= 3 and (count - 1) * period >= 4) or (count == 2 and period >= 5):
                return period, count
        return None

    def _starts(self, start: int, period: int, count: int) -> Iterator[int]:
        """Where as many copies may begin: here, or up to a copy later."""
        yield start
        for at in range(start + 1, min(start + period, len(self.layers) - period * count) + 1):
            if self.signs[at - 1] != self.signs[at - 1 + period * count]:
                return
            if self._count(at, period, count) == count:
                yield at

    def _count(self, start: int, period: int, most: int) -> int:
        """How many copies of this length follow each other, with the same layers, which read the same."""
        kinds = self.signs[start : start + period]
        if most < 2 or self.signs[start + period : start + 2 * period] != kinds:
            return 1
        # The first copy reads what is before the row where the others read a copy. So the second one is the pattern,
        # where the first one has the same edges inside, and as many in all.
        places: dict[int, int] = {}
        first, second = (self._wires(places, start, period, copy) for copy in range(2))
        for wires, pattern in zip(first, second, strict=True):
            inside = ({wire for wire in each if wire[0] == "in"} for each in (wires, pattern))
            if next(inside) != next(inside) or len(wires) != len(pattern):
                return 1
        count = 2
        while (
            count < most
            and self.signs[start + count * period : start + (count + 1) * period] == kinds
            and self._wires(places, start, period, count) == second
        ):
            count += 1
        return count if count > _FEW_BRANCHES or _is_row(second) else 1  # few copies beside each other are no repeat

    def _wires(self, places: dict[int, int], start: int, period: int, copy: int) -> _Wires:
        """What each layer of a copy reads: in it, n copies back, or outside. `places` has theirs, and grows."""
        block = self.layers[start + copy * period : start + (copy + 1) * period]
        places |= {draft.at: copy * period + n for n, draft in enumerate(block)}
        wires_of: _Wires = []
        for draft in block:
            wires: set[tuple[str, int]] = set()
            for source in self._read(draft.at):
                at = places.get(source)
                if at is None:
                    wires.add(("out", source))
                elif at // period == copy:
                    wires.add(("in", at % period))
                else:
                    wires.add((f"back {copy - at // period}", at % period))
            wires_of.append(wires)
        return wires_of

    def _copies(self, start: int, period: int, count: int) -> list[list[Draft]]:
        """The layers of each copy."""
        return [self.layers[at : at + period] for at in range(start, start + period * count, period)]

    def _borders(self, start: int, period: int, count: int) -> tuple[int, bool, bool]:
        """What speaks for a place to begin: the border of a module or a region, else one way out, else its layer."""
        copies = self._copies(start, period, count)
        own_scopes = min(len(shared_scope(copy)) for copy in copies) - len(shared_scope(*copies))
        # Whether one layer alone hands on from a copy to what follows. A gradient that reads its layer is no way out.
        end, read = start + period, set[int]()
        for draft in self.layers[end : end + 2 * period]:
            same = {layer.at for layer in self.layers[start:end] if (layer.forward is None) == (draft.forward is None)}
            read |= same & self._read(draft.at)
        is_layer = self.layers[start].op not in _FOLLOWERS  # decides between places that are as good
        return own_scopes, len(read) == 1, is_layer

    def _merge(self, copies: list[list[Draft]]) -> None:
        """Keep the first of these copies, with the sums of all."""
        shared, owns = shared_scope(*copies), [shared_scope(copy) for copy in copies]
        # From here on only the layers of the first copy remain, with the weights of all and how often each repeats.
        self._join([dict(enumerate(same)) for same in zip(*copies, strict=True)])
        inner_from = len(shared) + (len(owns[0]) > len(shared))
        # Gradients of a block's layers go to its box. Another row gets a box, with a name that nothing beside it has.
        around = (() if d.forward is None else self._layer_of(d).scope[: len(shared) + 1] for d in copies[0])
        scopes = set[Path](around)
        block = scopes.pop()
        if scopes or self.net.repeats.get(block) != len(copies):
            scopes_beside = (
                draft.scope for draft in self.layers if draft.at not in self.into and draft not in copies[0]
            )
            beside = {scope[len(shared)] for scope in scopes_beside if scope[: len(shared)] == shared != scope}
            named = [module for copy in copies if (module := _module_of(copy, len(shared))) is not None]
            are_named = len(named) == len(copies)
            label = name_copies(named, beside) if are_named else _label(self.net, copies, shared, beside)
            block = (*shared, unique(label, beside.__contains__))
        for first, *same in zip(*copies, strict=True):
            inner = _scopes_of_all(first.scope[inner_from:], [draft.scope[inner_from:] for draft in same])
            if inner and inner[0] == block[-1].name:  # a step beside the module of each copy: one frame is enough
                inner = inner[1:]
            first.scope = (*block, *inner)
            first.path = _names_of_all(first.path, [draft.path for draft in same])
        self.net.repeats[block] = len(copies)

    def _join(self, groups: list[dict[int, Draft]]) -> None:
        """Join drafts that are given by the number of their copy. The first of each stays."""
        for same in groups:
            block = next(iter(groups[0].values())).at
            self.copy_of |= {draft.at: (block, copy) for copy, draft in same.items()}
            kept, *copies = same.values()
            kept.own = len(kept.weights) if kept.own is None else kept.own
            kept.add(copies)
            kept.repeat *= len(same)
            self.into |= {draft.at: kept for draft in copies}

    def _layer_of(self, draft: Draft) -> Draft:
        """The layer whose gradient this is, or what it is merged into."""
        return self.into.get(draft.layer.at, draft.layer)

    def _finish(self) -> None:
        """Drop the copies, and send their edges to what replaces them."""
        for edge in list(self.net.edges):  # from one copy to the next
            source, target = self.copy_of.get(edge[0]), self.copy_of.get(edge[1])
            if source is not None and target is not None and source[0] == target[0] and source[1] != target[1]:
                del self.net.edges[edge]
        # What each copy hands on to its own next pass is one array of the block.
        own = [carry for carry in self.net.carries if self.copy_of.get(carry[0], 0) == self.copy_of.get(carry[1], 1)]
        first = {carry[:2] for carry in own if self.copy_of[carry[0]][1] == 0}
        for carry in own:
            kept = tuple(self.into[end].at if end in self.into else end for end in carry[:2])
            if kept != carry[:2] and kept in first:
                del self.net.carries[carry]
        self.net.substitute(self.into)
        self.net.drafts = self.net.ordered()  # a first copy may read what came after it, of a later one


def _signature(net: Net, draft: Draft) -> object:
    """What copies of a layer have in common."""
    value = net.raw.of(draft.value)  # the copies may return it to others, which are given other views of it
    weights = tuple(net.raw.values[weight].shape for weight in draft.weights)
    scope = tuple((re.sub(r"_?\d+", "", scope_part.name), scope_part.times is None) for scope_part in draft.scope)
    return (draft.op, draft.detail, value.shape, value.dtype, weights, scope, draft.repeat)


def _is_row(wires: _Wires) -> bool:
    """Whether a path through at least half of a copy goes on from copy to copy. A sum of branches has no such path."""
    reads = {
        n: {at for kind, at in wires_of if kind == "in" or kind.startswith("back")} for n, wires_of in enumerate(wires)
    }
    read_by = readers(reads)
    ends = {at for wires_of in wires for kind, at in wires_of if kind.startswith("back")}
    return any(2 * len(reach(reads[end], reads) & reach(read_by.get(end, ()), read_by)) >= len(wires) for end in ends)


def _module_of(copy: list[Draft], depth: int) -> Scope | None:
    """The scope that a copy is in. Steps without parameters may be beside a module, but not beside a loop."""
    scopes = {draft.scope[depth] for draft in copy if len(draft.scope) > depth}
    beside = [draft for draft in copy if len(draft.scope) <= depth]
    if len(scopes) != 1 or any(draft.weights for draft in beside):
        return None
    scope = scopes.pop()
    return None if beside and (scope.is_region or scope.times is not None) else scope


def _label(net: Net, copies: list[list[Draft]], shared: Path, beside: set[Scope]) -> Scope:
    """What the parameters of a block without a scope are called, else what is in it, with the count."""
    layers = [[draft.layer for draft in copy] for copy in copies]
    names = names_of_parameters([[path for draft in copy for path in _paths(net, draft)] for copy in layers])
    if len(names) == len(copies):
        return name_copies(list(map(Scope, names)), beside)
    kinds = ((item.kind, item.flops) for item in items_of(layers[0], len(shared)))
    return Scope(without_numbers(names) if names else name_kinds(kinds), "module" if names else "part", len(copies))


def _paths(net: Net, draft: Draft) -> list[tuple[str, ...]]:
    """Where the parameters of a layer are, those of its first copy."""
    paths = (net.raw.values[weight].path for weight in draft.weights[: draft.own])
    return [] if draft.tied else [path for path in paths if path]


def _names_of_all(first: tuple[str, ...], paths: list[tuple[str, ...]]) -> tuple[str, ...]:
    """The path of a layer in a copy, as it is for all of them: a number that tells copies apart is left out.

    >>> _names_of_all(("layers.0", "mlp"), [("layers.1", "mlp"), ("layers.2", "mlp")])
    ('layers', 'mlp')
    """
    if any(len(path) != len(first) for path in paths):
        return first
    return tuple(map(without_numbers, zip(first, *paths, strict=True)))


def _scopes_of_all(first: Path, paths: list[Path]) -> Path:
    """The same for the scopes inside a copy, which keep their counts. Copies have other numbers of calls."""
    names = _names_of_all(tuple(scope.name for scope in first), [tuple(scope.name for scope in path) for path in paths])
    same = [all(path[at : at + 1] == (scope,) for path in paths) for at, scope in enumerate(first)]
    return tuple(
        scope if is_same else Scope(name, scope.kind, scope.times)
        for name, scope, is_same in zip(names, first, same, strict=True)
    )


def gradients_of(
    copies: list[list[Draft]], backward: dict[int, list[Draft]], read: Callable[[int], set[int]]
) -> list[dict[int, Draft]]:
    """The gradients of each layer of a block, by the number of the copy, the first to be computed in front.

    They become one as the layers do. None where they differ, or where what is between them would be in a circle. Those
    that a copy has in itself, as a step of an inner optimizer, become one with it.
    """
    inside = {draft.at for copy in copies for draft in copy}
    # A copy may read less than the others, as where a sum begins that goes through all of them, and one copy may lack
    # a gradient, as what begins a network has none for its input.
    groups: list[dict[int, Draft]] = []
    for layers in zip(*copies, strict=True):
        for same in zip_longest(*([g for g in backward.get(layer.at, ()) if g.at not in inside] for layer in layers)):
            present = [(copy, gradient) for copy, gradient in enumerate(same) if gradient is not None]
            groups.append(dict(sorted(present, key=lambda each: each[1].at)))
    few = any(len(same) < max(2, len(copies) - 1) for same in groups)
    alike = all(
        len({(gradient.op, gradient.detail, gradient.repeat) for gradient in same.values()}) == 1 for same in groups
    )
    in_place = all(g.forward is not None and g.scope == g.forward.scope for same in groups for g in same.values())
    if few or not (alike and in_place):
        return []
    # The first of each, in the place of all, comes after all that any of them reads. So there is no circle.
    kept = {draft.at: next(iter(same.values())).at for same in groups for draft in same.values()}
    copy_of = {draft.at: copy for same in groups for copy, draft in same.items()}
    in_order = all(
        copy_of.get(source, copy_of[at]) != copy_of[at] or kept.get(source, source) < kept[at]
        for at in kept
        for source in read(at)
    )
    return groups if in_order else []
