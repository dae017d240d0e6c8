"""Copies of blocks that become one, all of a net at once."""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest

from .._graph import name_kinds
from .items import items_of
from .net import Draft, Net, shared_scope
from .region_names import name_copies, names_of_parameters, without_numbers

_Path = tuple[str, ...]


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
        self._inside: Counter[_Path] = Counter()  # the layers of each scope, at any depth
        self._names: dict[_Path, dict[str, None]] = {}  # the scopes directly in each scope, those that are gone too
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

    def _name_block(self, copies: list[list[Draft]], shared: _Path, owns: list[_Path]) -> None:
        """Write the count on the block's own scope, or on a new one. `owns` are the scopes of the copies."""
        rest = len(shared) + (len(owns[0]) > len(shared))
        unique = self._scope_of_layers(copies, len(shared) + 1)
        if unique is None:
            named = [own[len(shared)] for own in owns if len(own) > len(shared)]
            label = name_copies(named, self._children(shared)) if named else self._label(copies, shared)
            unique = self._unique(shared, label)
        for first, *others in zip(*copies, strict=True):
            first.scope = (*unique, *_names_of_all(first.scope[rest:], [draft.scope[rest:] for draft in others]))
            first.path = _names_of_all(first.path, [draft.path for draft in others])
        self.net.repeats[unique] = len(copies)

    def _scope_of_layers(self, copies: list[list[Draft]], depth: int) -> _Path | None:
        """The scope of the block whose gradients these are. None for layers."""
        layers = [None if d.forward is None else self.kept.get(d.forward.at, d.forward) for d in copies[0]]
        scopes = {layer.scope[:depth] if layer is not None else () for layer in layers}
        found = scopes.pop()
        return found if not scopes and self.net.repeats.get(found) == len(copies) else None

    def _label(self, copies: list[list[Draft]], shared: _Path) -> str:
        """What the parameters of a block without a scope are called, else what is in it, with the count."""
        layers = [[draft if draft.forward is None else draft.forward for draft in copy] for copy in copies]
        names = names_of_parameters([[path for draft in copy for path in self._paths(draft)] for copy in layers])
        if len(names) == len(copies):
            return name_copies(names, self._children(shared))
        kinds = ((item.kind, item.flops) for item in items_of(self.net, layers[0], len(shared)))
        return f"{without_numbers(names) if names else name_kinds(kinds)} ×{len(copies)}"

    def _paths(self, draft: Draft) -> list[_Path]:
        """Where the parameters of a layer are, those of its first copy."""
        found = (self.net.raw.values[weight].path for weight in draft.weights[: draft.own])
        return [] if draft.tied else [path for path in found if path]

    def _unique(self, shared: _Path, label: str) -> _Path:
        """A scope that no other layer is in."""
        unique, number = (*shared, label), 1
        while self._inside[unique]:
            number += 1
            unique = (*shared, f"{label} ({number})")
        return unique

    def _children(self, scope: _Path) -> list[str]:
        """The scopes directly inside a scope."""
        return [name for name in self._names.get(scope, ()) if self._inside[*scope, name]]


def _names_of_all(first: _Path, others: list[_Path]) -> _Path:
    """The scopes inside a copy, as they are for all of them: a number that tells copies apart is left out.

    >>> _names_of_all(("layers.0", "mlp"), [("layers.1", "mlp"), ("layers.2", "mlp")])
    ('layers', 'mlp')
    """
    if any(len(path) != len(first) for path in others):
        return first
    return tuple(map(without_numbers, zip(first, *others, strict=True)))


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
