"""The names of nodes, after their parameters, their module or their kind."""

from __future__ import annotations

import re

from .._graph import BACKWARD
from .net import Draft, Net


def name_drafts(net: Net) -> dict[int, str]:
    """A unique name for each draft, the same for the same function."""
    names: dict[int, str] = {draft.at: draft.name for draft in net.drafts if draft.op == "input"}
    taken = set(names.values()) | {value.name for value in net.raw.values if value.kind == "weight"}
    ends = _ends(net)
    numbers: dict[str, int] = {}
    for draft in net.drafts:
        if draft.op != "input" and draft.forward is None:
            names[draft.at] = _unique(draft.name or _short(draft, ends), _base(draft), taken, numbers)
    for draft in net.drafts:
        if draft.forward is not None:
            base = names.get(draft.forward.at, _base(draft)) + BACKWARD
            names[draft.at] = _unique(base, base, taken, numbers)
    return names


def _ends(net: Net) -> dict[tuple[str, ...], set[tuple[str, ...]]]:
    """The paths of layers that end alike."""
    found: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for draft in net.drafts:
        for start in range(len(draft.path)):
            found.setdefault(draft.path[start:], set()).add(draft.path)
    return found


def _short(draft: Draft, ends: dict[tuple[str, ...], set[tuple[str, ...]]]) -> str:
    """The end of a draft's path, as much of it as no other layer has. Empty for none."""
    for start in range(len(draft.path) - 1, -1, -1):
        if len(ends[draft.path[start:]]) == 1:
            return "/".join(draft.path[start:])
    return "/".join(draft.path)


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
