"""Copies of blocks that become one, all of a net at once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

from .net import Draft, Net, shared_scope
from .region_names import name_copies

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
        count, rest = len(owns), len(shared) + 1
        if len(owns[0]) > len(shared):
            label = name_copies([(*own, "")[len(shared)] for own in owns], self._children(shared))
        else:
            whole = bool(shared) and not self._inside[shared]
            label = f"{shared[-1]} ×{count}" if whole else f"×{count}"
            shared = shared[:-1] if whole else shared
            rest = len(shared) + 1 if whole else len(shared)
        unique = self._unique(shared, label, copies[0])
        for first, *others in zip(*copies, strict=True):
            first.scope = (*unique, *_names_of_all(first.scope[rest:], [draft.scope[rest:] for draft in others]))
        self.net.repeats[unique] = count

    def _unique(self, shared: _Path, label: str, first: list[Draft]) -> _Path:
        """A scope that no other layer is in. Gradients are in the scope of their layers."""
        unique, number = (*shared, label), 1
        layers = (None if d.forward is None else self.kept.get(d.forward.at, d.forward) for d in first)
        if all(layer is not None and layer.scope[: len(unique)] == unique for layer in layers):
            return unique
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
    return tuple(map(_without_number, zip(first, *others, strict=True)))


def _without_number(names: Sequence[str]) -> str:
    """What the names of copies have in common before a number. Other names stay that of the first one."""
    same = len({re.sub(r"\d+", "", name) for name in names}) == 1 < len(set(names))
    return (re.split(r"[._\-\[ ]*\d", names[0])[0] if same else "") or names[0]


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
