"""Parts of a network with one way in and one way out, as scopes of their own."""

from __future__ import annotations

from .._graph import BACKWARD
from .divide import Part, divide
from .items import Item, items_of, wires_of
from .net import Draft, Net
from .region_names import name_region

MOST = 24  # children of a scope that a person can overlook

_Path = tuple[str, ...]
_Inserts = dict[int, list[tuple[int, _Path]]]  # of each draft: regions, and the depth of the scope that they are in


def add_regions(net: Net, most: int = MOST) -> None:
    """Give each scope that holds more than `most` layers or scopes regions inside.

    A region is a scope like any other: clusters, `depth` and closing see no difference. Gradients follow their layers.
    """
    forward = [draft for draft in net.layers if draft.forward is None and not draft.op.endswith(BACKWARD)]
    sources, inserts = net.sources(), _Inserts()
    _add_in_scope(net, sources, forward, (), most, inserts)
    first, renamed = _first_inside(net), dict[_Path, _Path]()
    for path in net.repeats:
        inside = first.get(path)
        renamed[path] = _inserted(path, _of(inserts, inside), len(path) - 1) if inside is not None else path
    net.repeats = {renamed[path]: count for path, count in net.repeats.items()}
    for draft in net.drafts:
        draft.scope = _inserted(draft.scope, _of(inserts, draft), len(draft.scope))


def _first_inside(net: Net) -> dict[_Path, Draft]:
    """The first draft of each scope, at any depth."""
    found: dict[_Path, Draft] = {}
    for draft in net.drafts:
        for length in range(len(draft.scope) + 1):
            found.setdefault(draft.scope[:length], draft)
    return found


def _of(inserts: _Inserts, draft: Draft) -> list[tuple[int, _Path]]:
    layer = draft if draft.forward is None else draft.forward
    return inserts.get(layer.at, [])


def _inserted(scope: _Path, inserts: list[tuple[int, _Path]], deepest: int) -> _Path:
    """A scope with regions in it, as far as `deepest`."""
    for depth, path in sorted(inserts, reverse=True):
        if depth <= deepest:
            scope = (*scope[:depth], *path, *scope[depth:])
    return scope


def _add_in_scope(
    net: Net, sources: dict[int, set[int]], drafts: list[Draft], scope: _Path, most: int, inserts: _Inserts
) -> None:
    """Find the regions directly inside a scope, and those in the scopes inside it."""
    items = items_of(net, drafts, len(scope))
    for item in items:
        if item.scope is not None:
            _add_in_scope(net, sources, item.drafts, item.scope, most, inserts)
    if len(items) > most:
        items, wires = wires_of(items, sources)
        _name_parts(net, items, divide(items, wires, most), (), len(scope), inserts, set())


def _name_parts(
    net: Net, items: list[Item], parts: list[Part], path: _Path, depth: int, inserts: _Inserts, taken: set[str]
) -> None:
    """Write the path of its regions on each draft."""
    for part in parts:
        if isinstance(part, int):
            for draft in items[part].drafts if path else ():
                inserts.setdefault(draft.at, []).append((depth, path))
            continue
        inside = [items[number] for number in flat(part)]
        name = name_region(inside)
        if (scope := _only_scope(inside, name)) is not None:
            for draft in (draft for item in inside for draft in item.drafts):
                added = path if draft in scope.drafts else (*path, name)
                inserts.setdefault(draft.at, []).append((depth, added))
            continue
        name = _unique(name, taken)
        _name_parts(net, items, part, (*path, name), depth, inserts, {name})


def _only_scope(items: list[Item], name: str) -> Item | None:
    """The scope of this name, where it is the only one and no layer beside it has parameters. They belong to it."""
    scopes = [item for item in items if item.scope is not None]
    others = any(item.path for item in items if item.scope is None)
    return scopes[0] if len(scopes) == 1 and scopes[0].path == (name,) and not others else None


def _unique(name: str, taken: set[str]) -> str:
    """A name that its neighbours do not have."""
    found, number = name, 1
    while found in taken:
        number += 1
        found = f"{name} ({number})"
    taken.add(found)
    return found


def flat(parts: list[Part]) -> list[int]:
    """The numbers of all items in these parts, however deep."""
    found: list[int] = []
    for part in parts:
        found += [part] if isinstance(part, int) else flat(part)
    return found
