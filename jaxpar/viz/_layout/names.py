"""The names of nodes, after their parameters, their module or their kind."""

from __future__ import annotations

import re

from .._graph import BACKWARD
from .net import Draft, Net

_GENERIC = frozenset("w W weight weights kernel b B bias scale offset embedding embeddings table gamma beta g".split())


def name_drafts(net: Net) -> dict[int, str]:
    """A unique name for each draft, the same for the same function."""
    members: dict[tuple[str, ...], int] = {}
    for draft in net.drafts:
        if not draft.op.endswith(BACKWARD):
            for depth in range(1, len(draft.scope) + 1):
                members[draft.scope[:depth]] = members.get(draft.scope[:depth], 0) + 1
    names: dict[int, str] = {draft.at: draft.name for draft in net.drafts if draft.op == "input"}
    taken = set(names.values()) | {value.name for value in net.raw.values if value.kind == "weight"}
    numbers: dict[str, int] = {}
    used: set[int] = set()
    for draft in net.drafts:
        if draft.op != "input" and draft.forward is None:
            tied = bool(draft.weights) and used.issuperset(draft.weights)
            used.update(draft.weights)
            wanted = "" if tied and not draft.name else _own_name(net, draft, members)
            names[draft.at] = _unique(wanted, _base(draft), taken, numbers)
    for draft in net.drafts:
        if draft.forward is not None:
            base = names.get(draft.forward.at, _base(draft)) + BACKWARD
            names[draft.at] = _unique(base, base, taken, numbers)
    return names


def _own_name(net: Net, draft: Draft, members: dict[tuple[str, ...], int]) -> str:
    """The name of a draft's own scope, or of its weights. Empty for none."""
    if draft.name:
        return draft.name
    if draft.scope and members.get(draft.scope) == 1 and "×" not in draft.scope[-1] and "=" not in draft.scope[-1]:
        return draft.scope[-1] if len(draft.scope) == 1 else "/".join(draft.scope[-2:])
    if draft.weights and not draft.op.endswith(BACKWARD):
        return _name_of_weights([net.raw.values[weight].name for weight in draft.weights[: draft.own]])
    return ""


def _name_of_weights(names: list[str]) -> str:
    """A short name for a layer with these weights.

    >>> _name_of_weights(["params['conv1']['weight']", "params['conv1']['bias']"]), _name_of_weights(["p['attn']['q']"])
    ('conv1', 'attn/q')
    """
    keys = re.findall(r"[\w-]+", names[0])[1:]
    path = [key for key in keys if not key.isdigit()]
    if not path or keys[-1].isdigit() or path[0] in _GENERIC:
        return ""  # a number or "weight" tells layers apart no better than their kind does
    leaves = {key for name in names for key in re.findall(r"[\w-]+", name)[-1:]}
    if len(path) > 1 and leaves <= _GENERIC:
        path = path[:-1]
    return "/".join(path[-2:])


def _base(draft: Draft) -> str:
    """The name of a draft without its own, before the number."""
    name = draft.detail if draft.op == "Activation" and draft.detail else draft.op
    return re.sub(r"[^\w.]+", "_", name).strip("_").lower()


def _unique(wanted: str, base: str, taken: set[str], numbers: dict[str, int]) -> str:
    """The wanted name, with a number where it is taken or empty. `taken` and `numbers` grow."""
    if wanted and wanted not in taken:
        taken.add(wanted)
        return wanted
    base = wanted or base
    while True:
        number = numbers[base] = numbers.get(base, -1) + 1
        name = f"{base}{number}" if not wanted else f"{base} {number + 2}"
        if name not in taken:
            taken.add(name)
            return name
