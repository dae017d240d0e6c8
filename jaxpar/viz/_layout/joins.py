"""Layers between the layers of one module: a sum with what went around it is a part of the module."""

from __future__ import annotations

import itertools

from .._graph import BACKWARD, is_region
from .net import Draft


def fill_modules(drafts: list[Draft], edges: dict[tuple[int, int, int], None]) -> None:
    """Give the scope of a call to layers that no scope has and that are inside it.

    A layer without parameters is inside a call whose layers come before and after it. One that joins several results
    of a call, directly after it, ends the call. One that joins the results of two modules is in none of them.
    """
    sources: dict[int, set[int]] = {}
    for source, target, _ in edges:
        sources.setdefault(target, set()).add(source)
    by_at = {draft.at: draft for draft in drafts}
    forward = [d for d in drafts if d.op != "input" and d.forward is None and not d.op.endswith(BACKWARD)]
    _fill((), forward, {at: [by_at[source] for source in found] for at, found in sources.items()})


def _fill(around: tuple[str, ...], drafts: list[Draft], sources: dict[int, list[Draft]]) -> None:
    """Fill the calls directly inside a scope, then those inside them."""
    depth = len(around)
    runs = [(name, list(run)) for name, run in itertools.groupby(drafts, lambda draft: draft.scope[depth : depth + 1])]
    for number, (name, run) in enumerate(runs):
        before = runs[number - 1][0] if number else ()
        if name or not before or is_region(before[0]):
            continue
        scope = (*around, *before)
        if number + 1 < len(runs) and runs[number + 1][0] == before and not any(draft.weights for draft in run):
            for draft in run:
                draft.scope = scope
        for draft in run:
            if draft.scope != scope and _ends(draft, scope, sources):
                draft.scope = scope
    for name, run in itertools.groupby(drafts, lambda draft: draft.scope[depth : depth + 1]):
        if name:
            _fill((*around, *name), list(run), sources)


def _ends(draft: Draft, scope: tuple[str, ...], sources: dict[int, list[Draft]]) -> bool:
    """Whether a layer without parameters joins several results of a call, and reads nothing else."""
    read = sources.get(draft.at, [])
    return not draft.weights and len(read) > 1 and all(source.scope[: len(scope)] == scope for source in read)
