"""Repeated blocks, drawn once with "×12", from where a person would cut them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from .._scopes import Path, Scope, common_prefix, unique
from .._searches import reach, readers
from .names import name_copies, name_kinds, names_of_parameters, without_numbers
from .net import Draft, Net, shared_scope
from .parts import items_of

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
        block = Copies(net, layers, sources, period, count)
        start = best_start(block, _possible_starts(layers, signs, sources, start, period, count))
        copies = block.copies(start)
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
    scope = tuple((re.sub(r"_?\d+", "", part.name), part.times is None) for part in draft.scope)
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


def _possible_starts(
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
    reads = {n: {at for kind, at in found if kind == "in" or kind.startswith("back")} for n, found in enumerate(wires)}
    read_by = readers(reads)
    ends = {at for found in wires for kind, at in found if kind.startswith("back")}
    return any(2 * len(reach(reads[end], reads) & reach(read_by.get(end, ()), read_by)) >= len(wires) for end in ends)


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


_FOLLOWERS = frozenset("Activation LayerNorm BatchNorm GroupNorm InstanceNorm RMSNorm Normalization Dropout".split())


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of a block among the layers, wherever they begin."""

    net: Net
    layers: list[Draft]
    sources: dict[int, set[int]]
    period: int
    count: int

    def copies(self, start: int) -> list[list[Draft]]:
        """The layers of each copy."""
        starts = (start + copy * self.period for copy in range(self.count))
        return [self.layers[at : at + self.period] for at in starts]


def best_start(block: Copies, starts: Iterable[int]) -> int:
    """The best place to begin: the border of a module, else of a region, else of a name. Else the first."""
    starts = list(starts)
    if len(starts) == 1:
        return starts[0]
    end = starts[-1] + block.period * block.count
    paths = {draft.at: draft.layer.path for draft in block.layers[starts[0] : end]}
    return max(
        starts,
        key=lambda at: (
            _own_scopes(block, at),
            _has_one_way_out(block, at),
            _own_keys(block, at, paths),
            block.layers[at].op not in _FOLLOWERS,  # decides between places that are as good
        ),
    )


def _own_scopes(block: Copies, start: int) -> int:
    """How many scopes each copy has for itself."""
    copies = block.copies(start)
    return min(len(shared_scope(copy)) for copy in copies) - len(shared_scope(*copies))


def _has_one_way_out(block: Copies, start: int) -> bool:
    """Whether one layer alone hands on from a copy to what follows."""
    end = start + block.period
    before = {draft.at: draft for draft in block.layers[start:end]}
    read: set[int] = set()
    for draft in block.layers[end : end + 2 * block.period]:
        # What a gradient reads of its layer is no way out of a block.
        same = {at for at, source in before.items() if (source.forward is None) == (draft.forward is None)}
        read |= same & block.sources.get(draft.at, set())
    return len(read) == 1


def _own_keys(block: Copies, start: int, paths: dict[int, tuple[str, ...]]) -> int:
    """How many keys the parameters of each copy share, which the copies do not share."""
    copies = [[path for draft in copy if (path := paths[draft.at])] for copy in block.copies(start)]
    if not all(copies):
        return 0
    shared = [common_prefix(copy) for copy in copies]
    return min(map(len, shared)) - len(common_prefix(shared))


class Merges:
    """The copies of blocks that are merged in one pass over a net.

    Each merge looks at its own drafts only. `finish` then changes the edges of all.

    Attributes:
        kept: which draft replaces which.
    """

    def __init__(self, net: Net, sources: dict[int, set[int]]) -> None:
        """Begin a pass.

        Args:
            net: whose drafts are merged.
            sources: what each draft reads. A merge writes there what replaces what.
        """
        self.net = net
        self.kept: dict[int, Draft] = {}
        self._sources = sources
        self._readers: dict[int, set[int]] = {}
        for target, found in sources.items():
            for source in found:
                self._readers.setdefault(source, set()).add(target)
        self._copy_of: dict[int, tuple[int, int]] = {}  # of a merged draft: the place of its block, and which copy
        self._inside: Counter[Path] = Counter()  # the layers of each scope, at any depth
        self._names: dict[Path, dict[Scope, None]] = {}  # the scopes directly in each scope, those that are gone too
        for draft in net.layers:
            self._count(draft, 1)

    def merge(self, copies: list[list[Draft]]) -> None:
        """Keep the first of these copies, with the sums of all."""
        scope, owns = shared_scope(*copies), [shared_scope(copy) for copy in copies]
        self._join([dict(enumerate(same)) for same in zip(*copies, strict=True)])
        self._name_block(copies, scope, owns)
        for draft in copies[0]:
            self._count(draft, 1)

    def merge_gradients(self, found: list[dict[int, Draft]]) -> None:
        """Keep the first of each of these gradients of a block that is merged, in the scopes of its layers."""
        self._join(found)
        for kept in (next(iter(same.values())) for same in found):
            assert kept.forward is not None
            kept.scope = self.kept.get(kept.forward.at, kept.forward).scope
            self._count(kept, 1)

    def _join(self, found: list[dict[int, Draft]]) -> None:
        """Join drafts that are given by the number of their copy. The first of each stays."""
        block = next(iter(found[0].values())).at
        for same in found:
            kept, *others = same.values()
            for number, draft in same.items():
                self._copy_of[draft.at] = block, number
                self._count(draft, -1)
            _add(kept, others)
            for other in others:
                self._replace(other, kept)

    def _replace(self, draft: Draft, kept: Draft) -> None:
        self.kept[draft.at] = kept
        readers = self._readers.pop(draft.at, set[int]())
        for reader in readers:
            self._sources[reader].discard(draft.at)
            self._sources[reader].add(kept.at)
        self._readers.setdefault(kept.at, set()).update(readers)

    def finish(self) -> None:
        """Drop the copies, and send their edges to what replaces them."""
        net = self.net
        for edge in list(net.edges):  # from one copy to the next
            source, target = self._copy_of.get(edge[0]), self._copy_of.get(edge[1])
            if source is not None and target is not None and source[0] == target[0] and source[1] != target[1]:
                del net.edges[edge]
        net.drafts = [draft for draft in net.drafts if draft.at not in self.kept]
        for draft in net.drafts:
            if draft.forward is not None:
                draft.forward = self.kept.get(draft.forward.at, draft.forward)
        net.redirect({at: kept.at for at, kept in self.kept.items()})

    def _count(self, draft: Draft, change: int) -> None:
        for length, name in enumerate(draft.scope):
            self._names.setdefault(draft.scope[:length], {})[name] = None
            self._inside[draft.scope[: length + 1]] += change

    def _name_block(self, copies: list[list[Draft]], shared: Path, owns: list[Path]) -> None:
        """Write the count on the block's own scope, or on a new one. `owns` are the scopes of the copies."""
        rest = len(shared) + (len(owns[0]) > len(shared))
        block = self._scope_of_layers(copies, len(shared) + 1)
        if block is None:
            named = [own[len(shared)] for own in owns if len(own) > len(shared)]
            label = name_copies(named, self._children(shared)) if named else self._label(copies, shared)
            block = (*shared, unique(label, lambda scope: self._inside[*shared, scope]))
        for first, *others in zip(*copies, strict=True):
            first.scope = (*block, *_scopes_of_all(first.scope[rest:], [draft.scope[rest:] for draft in others]))
            first.path = _names_of_all(first.path, [draft.path for draft in others])
        self.net.repeats[block] = len(copies)

    def _scope_of_layers(self, copies: list[list[Draft]], depth: int) -> Path | None:
        """The scope of the block whose gradients these are. None for layers."""
        layers = [None if d.forward is None else self.kept.get(d.forward.at, d.forward) for d in copies[0]]
        scopes = {layer.scope[:depth] if layer is not None else () for layer in layers}
        found = scopes.pop()
        return found if not scopes and self.net.repeats.get(found) == len(copies) else None

    def _label(self, copies: list[list[Draft]], shared: Path) -> Scope:
        """What the parameters of a block without a scope are called, else what is in it, with the count."""
        layers = [[draft.layer for draft in copy] for copy in copies]
        names = names_of_parameters([[path for draft in copy for path in self._paths(draft)] for copy in layers])
        if len(names) == len(copies):
            return name_copies(list(map(Scope, names)), self._children(shared))
        kinds = ((item.kind, item.flops) for item in items_of(self.net, layers[0], len(shared)))
        return Scope(without_numbers(names) if names else name_kinds(kinds), "module" if names else "part", len(copies))

    def _paths(self, draft: Draft) -> list[tuple[str, ...]]:
        """Where the parameters of a layer are, those of its first copy."""
        found = (self.net.raw.values[weight].path for weight in draft.weights[: draft.own])
        return [] if draft.tied else [path for path in found if path]

    def _children(self, scope: Path) -> list[Scope]:
        """The scopes directly inside a scope."""
        return [name for name in self._names.get(scope, ()) if self._inside[*scope, name]]


def _names_of_all(first: tuple[str, ...], others: list[tuple[str, ...]]) -> tuple[str, ...]:
    """The path of a layer in a copy, as it is for all of them: a number that tells copies apart is left out.

    >>> _names_of_all(("layers.0", "mlp"), [("layers.1", "mlp"), ("layers.2", "mlp")])
    ('layers', 'mlp')
    """
    if any(len(path) != len(first) for path in others):
        return first
    return tuple(map(without_numbers, zip(first, *others, strict=True)))


def _scopes_of_all(first: Path, others: list[Path]) -> Path:
    """The same for the scopes inside a copy, which keep their counts. Copies have other numbers of calls."""
    names = _names_of_all(tuple(own.name for own in first), [tuple(own.name for own in path) for path in others])
    same = [all(path[at : at + 1] == (own,) for path in others) for at, own in enumerate(first)]
    return tuple(
        own if is_same else Scope(name, own.kind, own.times)
        for name, own, is_same in zip(names, first, same, strict=True)
    )


def _add(kept: Draft, others: list[Draft]) -> None:
    """Add what the copies of a layer cost."""
    same = [kept, *others]
    kept.own = len(kept.weights) if kept.own is None else kept.own
    kept.flops = sum(draft.flops for draft in same)
    kept.bytes = sum(draft.bytes for draft in same)
    kept.weights = list(dict.fromkeys(weight for draft in same for weight in draft.weights))
    kept.outputs = [output for draft in same for output in draft.outputs]
    kept.eqns = [eqn for draft in same for eqn in draft.eqns]
    kept.repeat *= len(same)


def gradients_of(
    copies: list[list[Draft]], backward: dict[int, list[Draft]], sources: dict[int, set[int]]
) -> list[dict[int, Draft]]:
    """The gradients of each layer of a block, by the number of the copy, which become one as the layers do.

    A copy may read less than the others, as where a sum begins that goes through all of them. One copy may lack a
    gradient, as what begins a network has none for its input.

    Args:
        copies: the layers of each copy.
        backward: by the place of a layer, its gradients.
        sources: what each draft reads.

    Returns:
        Each with the first to be computed in front. Nothing where the copies have different gradients, or where what
        is between them would be in a circle.
    """
    found: list[dict[int, Draft]] = []
    for layers in zip(*copies, strict=True):
        for same in zip_longest(*(backward.get(layer.at, ()) for layer in layers)):
            there = [(copy, gradient) for copy, gradient in enumerate(same) if gradient is not None]
            found.append(dict(sorted(there, key=lambda each: each[1].at)))
    few = any(len(same) < max(2, len(copies) - 1) for same in found)
    alike = all(len({_kind(gradient) for gradient in same.values()}) == 1 for same in found)
    in_place = all(g.forward is not None and g.scope == g.forward.scope for same in found for g in same.values())
    return found if alike and in_place and not few and _is_in_order(found, sources) else []


def _kind(gradient: Draft) -> tuple[str, str, int]:
    return gradient.op, gradient.detail, gradient.repeat


def _is_in_order(found: list[dict[int, Draft]], sources: dict[int, set[int]]) -> bool:
    """Whether the first of each, in the place of all, comes after all that any of them reads. So there is no circle."""
    kept = {draft.at: next(iter(same.values())).at for same in found for draft in same.values()}
    copy_of = {draft.at: copy for same in found for copy, draft in same.items()}
    return all(
        copy_of.get(source, copy_of[at]) != copy_of[at] or kept.get(source, source) < kept[at]
        for at in kept
        for source in sources.get(at, ())
    )
