"""What is directly inside a scope: layers and scopes, and which reads which."""

from __future__ import annotations

from dataclasses import dataclass

from .._graph import common_prefix, scope_stem
from .._shared_names import keys_of
from .net import Draft, Net


@dataclass(slots=True)
class Item:
    """A layer or a scope.

    Attributes:
        drafts: the layers in it.
        scope: of a scope, its path. None for a layer.
        kind: of layer or of scope, without numbers.
        path: where its parameters are, or the name of the scope. Empty where nothing names it.
        shape: of its last layer.
    """

    drafts: list[Draft]
    scope: tuple[str, ...] | None
    kind: str
    path: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def flops(self) -> int:
        """Of all its layers."""
        return sum(draft.flops for draft in self.drafts)


def items_of(net: Net, drafts: list[Draft], depth: int) -> list[Item]:
    """The items in a scope of this depth, in the order of their first layers."""
    groups: dict[object, list[Draft]] = {}
    for draft in drafts:
        key: object = draft.scope[: depth + 1] if len(draft.scope) > depth else draft.at
        groups.setdefault(key, []).append(draft)
    return [_item(net, group, depth) for group in groups.values()]


def _item(net: Net, group: list[Draft], depth: int) -> Item:
    first, shape = group[0], net.raw.values[group[-1].value].shape
    if len(first.scope) > depth:
        name = first.scope[depth]
        return Item(group, first.scope[: depth + 1], scope_stem(name), (name,), shape)
    return Item(group, None, first.op, (first.name,) if first.name else path_of(net, first), shape)


def path_of(net: Net, draft: Draft) -> tuple[str, ...]:
    """The keys that the parameters of a layer share, without the argument and their own names."""
    return common_prefix(keys_of(net.raw.values[weight].name) for weight in draft.weights[: draft.own])


def wires_of(items: list[Item], sources: dict[int, set[int]]) -> tuple[list[Item], list[set[int]]]:
    """The items that each one reads, by number, all of them before it.

    Items that read each other become one, with all between them.
    """
    owner = {draft.at: number for number, item in enumerate(items) for draft in item.drafts}
    reads = [
        {owner[s] for draft in item.drafts for s in sources.get(draft.at, ()) if owner.get(s, number) != number}
        for number, item in enumerate(items)
    ]
    last = list(range(len(items)))  # the last item that has to be in one with this
    for number, found in enumerate(reads):
        last[number] = max(number, *found) if found else number
    into, joined, end = [0] * len(items), list[Item](), -1
    for number, item in enumerate(items):
        if number > end:
            joined.append(item)
        else:
            before = joined[-1]
            joined[-1] = Item(before.drafts + item.drafts, None, before.kind, before.path, item.shape)
        into[number] = len(joined) - 1
        end = max(end, last[number])
    wires: list[set[int]] = [set() for _ in joined]
    for number, found in enumerate(reads):
        wires[into[number]] |= {into[source] for source in found} - {into[number]}
    return joined, wires
