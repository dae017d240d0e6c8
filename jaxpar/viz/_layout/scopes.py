"""The scopes of drafts: named scopes, regions, and the modules of their parameters."""

from __future__ import annotations

import itertools
import re

from .._fold.cells import Cell, Cells
from .._fold.frames import frames_of, plain_stack
from .._graph import BACKWARD, common_prefix, is_region
from .._read.paths import RANDOM
from .._read.source import Frame
from .modules import Step, find_modules, join_scopes
from .net import Draft, Net

_KINDS = ("eqx.nn.",)  # scopes that a library names after a class, not after what its author called it
_LONGEST = 24  # letters in the name of a layer that has the parameters of several modules
GENERIC = frozenset(
    "w W weight weights kernel b B bias scale offset embedding embeddings table gamma beta g mean var average "
    "moving_mean moving_variance hidden counter".split()
) | {RANDOM}


def set_scopes(cells: Cells, by_cell: dict[int, Draft]) -> bool:
    """Write the scopes of the drafts of a network. What comes after a gradient keeps the named scopes.

    Returns whether the scopes are the modules of parameters.
    """
    known: dict[int, tuple[Frame, ...]] = {}
    forward = _network(cells)
    calls = {cell.id: frames_of(cells, cell, known) for cell in forward}
    _mark_tied(cells, forward, calls, by_cell)
    steps = [_step(cells, cell, by_cell[cell.id], calls[cell.id]) for cell in forward]
    if not find_modules(steps):
        return False
    for cell, scope in zip(forward, join_scopes(steps, lambda name: name.startswith(_KINDS)), strict=True):
        by_cell[cell.id].scope = scope
    return True


def number_calls(drafts: list[Draft]) -> None:
    """Number modules that are called again, "encoder (2)". One that goes on with other parameters is the same call."""
    _number_calls([draft for draft in drafts if draft.op != "input" and draft.forward is None], (), {})


def _number_calls(drafts: list[Draft], around: tuple[str, ...], calls: dict[tuple[str, ...], list[set[int]]]) -> None:
    """Number the scopes inside `around`. `calls` has the parameters that each call of a module has read, and grows."""
    depth = len(around)
    for name, group in itertools.groupby(drafts, lambda draft: draft.scope[depth : depth + 1]):
        run = list(group)
        if not name:
            continue
        used = {weight for draft in run for weight in draft.weights}
        known = calls.setdefault((*around, *name), [set()])
        if is_region(name[0]) or known[-1].isdisjoint(used):
            known[-1] |= used
        else:
            known.append(used)
        numbered = (*around, name[0] if len(known) == 1 else f"{name[0]} ({len(known)})")
        for draft in run:
            draft.scope = (*numbered, *draft.scope[depth + 1 :])
        _number_calls(run, numbered, calls)


def _network(cells: Cells) -> list[Cell]:
    """The forward cells that read no gradient, in the order of the trace."""
    late: set[int] = set()
    found: list[Cell] = []
    for cell in sorted(cells, key=lambda cell: _first(cells, cell)):
        sources = [source for root in cells.inputs(cell) if (source := cells.producer(root)) is not None]
        if cell.op.endswith(BACKWARD) or any(s.id in late or s.op.endswith(BACKWARD) for s in sources):
            late.add(cell.id)
        else:
            found.append(cell)
    return found


def _first(cells: Cells, cell: Cell) -> int:
    """The first equation of a cell in its scope."""
    scope = cells.scope(cell)
    return next(eqn.id for eqn in cells.steps(cell) if eqn.scope[: len(scope)] == scope)


def _mark_tied(
    cells: Cells, forward: list[Cell], calls: dict[int, tuple[Frame, ...]], by_cell: dict[int, Draft]
) -> None:
    """Mark layers that borrow the parameters of another kind of layer, and steps that share random state."""
    owners: dict[int, tuple[str, int]] = {}
    readers: dict[int, int] = {}
    for cell in forward:
        mine = (cell.op, calls[cell.id][-1].function if calls[cell.id] else -1)
        weights = by_cell[cell.id].weights
        by_cell[cell.id].tied = bool(weights) and all(owners.setdefault(weight, mine) != mine for weight in weights)
        for weight in weights:
            readers[weight] = readers.get(weight, 0) + 1
    for cell in forward:
        paths = {weight: cells.raw.values[weight].path for weight in by_cell[cell.id].weights}
        random = bool(paths) and all(path[-1:] == (RANDOM,) for path in paths.values())
        by_cell[cell.id].tied |= random and any(readers[weight] > 1 for weight in paths)


def _step(cells: Cells, cell: Cell, draft: Draft, frames: tuple[Frame, ...]) -> Step:
    eqn = cells.raw.eqns[_first(cells, cell)]
    levels = tuple(level if level < 0 else len(plain_stack(eqn.stack[:level])) for level in eqn.levels)
    paths = [path[:-1] for weight in draft.weights if (path := cells.raw.values[weight].path)]
    path = common_prefix(paths) if paths and not draft.tied else None
    return Step(frames, path, draft.scope, levels[: len(draft.scope)])


def set_paths(net: Net) -> None:
    """Write the path of each layer: its modules and its own name. A module of one layer is the layer."""
    members: dict[tuple[str, ...], int] = {}
    forward = [draft for draft in net.layers if draft.forward is None]
    for draft in forward:
        for depth in range(1, len(draft.scope) + 1):
            members[draft.scope[:depth]] = members.get(draft.scope[:depth], 0) + 1
    for draft in forward:
        scope = draft.scope
        weights = () if draft.tied else draft.weights
        own = _name_of_weights([path for weight in weights if (path := net.raw.values[weight].path)])
        if scope and members[scope] == 1 and not is_region(scope[-1]) and "=" not in scope[-1]:
            own, draft.scope = scope[-1], scope[:-1]
        if own:
            draft.path = tuple(re.sub(r" \(\d+\)$", "", part) for part in (*draft.scope, own) if not is_region(part))
    for draft in net.layers:
        if draft.forward is not None and draft.scope and members.get(draft.scope) == 1:
            draft.scope = draft.forward.scope


def _name_of_weights(paths: list[tuple[str, ...]]) -> str:
    """A name for a layer with these weights: that of the weight, or of the module around "kernel" and "bias".

    >>> _name_of_weights([("conv1", "weight"), ("conv1", "bias")]), _name_of_weights([("attn", "q")])
    ('conv1', 'q')
    >>> _name_of_weights([("lstm", "hi", "kernel"), ("lstm", "hf", "kernel")])
    'hi, hf'
    """
    if not paths:
        return ""
    around = common_prefix(path[:-1] for path in paths)
    inner = dict.fromkeys(path[len(around)] for path in paths)
    if len(inner) > 1 and all(len(path) == len(around) + 2 and path[-1] in GENERIC for path in paths):
        joined = ", ".join(inner)  # modules whose parameters are used together
        return joined if len(joined) <= _LONGEST else around[-1] if around else ""
    if {path[-1] for path in paths} <= GENERIC or any(path[:-1] != around for path in paths):
        return around[-1] if around else ""
    stems = {path[-1].rstrip("0123456789") for path in paths}
    pair = len(paths) > 1 and len(stems) == 1 and paths[0][-1] not in stems
    return stems.pop().rstrip(".") if pair else paths[0][-1]  # "enc" for the pair enc[0], enc[1]
