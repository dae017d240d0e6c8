"""The third fold: small steps, by their place in the program.

A stack has places, not calls. So the order of the places tells where a function began again, and what was read tells
branches of a network from the leaves of a tree.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

from .._read.source import ANONYMOUS, Frame
from .calls import OPTIMIZERS
from .cells import COLLECTIVES, Cell, Cells, components, runs

_DEEPEST = 12  # calls around a step, below which functions stay as they are


def fold_helpers(cells: Cells) -> None:
    """Make one cell of each function call that has only small steps."""
    deepest = max((len(own_stack(cells, cell)) for cell in cells), default=0)
    for depth in range(1, min(deepest, _DEEPEST)):

        def call(cell: Cell, depth: int = depth) -> tuple[object, ...] | None:
            stack = own_stack(cells, cell)
            if len(stack) <= depth or stack[depth].name.endswith(ANONYMOUS):
                return None
            return (*(frame.call for frame in stack[:depth]), -2 - stack[depth].function)

        for _, run in runs((cell for cell in cells if not cells.is_backward(cell)), call):
            small = not any(cell.major or cell.op in COLLECTIVES for cell in run)
            for part in _split_calls(cells, run, depth) if small else ():
                if len(part) > 1 and sum(len(cell.eqns) for cell in part) >= 3:
                    cells.fold(part, _helper_name(own_stack(cells, part[0])[depth]))


def _helper_name(frame: Frame) -> str:
    parts = [part for part in frame.name.split(".") if part not in ("<locals>", "__call__")]
    name = parts[-1].strip("_")
    if frame.origin != "library":
        return name
    return f"{frame.package}.{'update' if name == 'update_fn' else name}"


def fold_statements(cells: Cells) -> None:
    """Make one cell of three or more connected steps of one line."""

    def line(cell: Cell) -> tuple[object, ...] | None:
        stack = own_stack(cells, cell)
        if cells.is_backward(cell) or cell.major or cell.op in (*COLLECTIVES, "cond", "Activation") or not stack:
            return None
        return (cells.raw.eqns[cell.eqns[0]].scope, *(f.call for f in stack[:-1]), stack[-1].function, stack[-1].line)

    for _, run in runs(cells, line, lambda cell, run: _begins_again(cells, cell, run)):
        for part in components(cells, run):
            if len(part) >= 3:
                names = list(dict.fromkeys(cell.op for cell in part))
                cells.fold(part, "Elementwise", ", ".join(names[:3]) + (", ..." if len(names) > 3 else ""))


def fold_siblings(cells: Cells) -> None:
    """Make one cell "×8" of the steps that one line does for each leaf."""
    for _, run in runs(cells, lambda cell: None if cell.major or cells.is_backward(cell) else True):
        groups: dict[tuple[str, str, object], list[Cell]] = {}
        for cell in run:
            place = (cells.raw.eqns[cell.eqns[0]].scope, *(frame.call for frame in own_stack(cells, cell)))
            groups.setdefault((cell.op, cell.detail, place), []).append(cell)
        for (op, detail, _), same in groups.items():
            if len(same) > 1 and _is_of_leaves(cells, [[cell] for cell in same]):
                cells.fold(same, op, f"{detail} ×{len(same)}".strip())


def own_stack(cells: Cells, cell: Cell) -> tuple[Frame, ...]:
    """The calls around a cell, without those inside of JAX."""
    return cells.raw.own_stack(cells.raw.eqns[cell.eqns[0]])


def _begins_again(cells: Cells, cell: Cell, run: list[Cell]) -> bool:
    """Whether a cell repeats the first of a run, and reads the run."""
    first, new = cells.raw.eqns[run[0].eqns[0]], cells.raw.eqns[cell.eqns[0]]
    return first.position == new.position and first.prim == new.prim and _reads(cells, [cell], _ids(run))


def _reads(cells: Cells, part: list[Cell], others: set[int]) -> bool:
    """Whether one of these cells reads one of those, which are given by their ids."""
    return any(source.id in others for cell in part for source in cells.sources(cell))


def _ids(part: Iterable[Cell]) -> set[int]:
    return {cell.id for cell in part}


def _split_calls(cells: Cells, run: list[Cell], depth: int) -> list[list[Cell]]:
    """The calls of one function. Those that each handle a leaf of a tree are one."""
    parts = _equal_parts(cells, run) or _returns(cells, run, depth)
    return [run] if len(parts) > 1 and _is_of_leaves(cells, parts) else parts


def _equal_parts(cells: Cells, run: list[Cell]) -> list[list[Cell]]:
    """The run as the largest number of equal sequences of steps. Empty where it is none."""
    steps = [(cells.raw.eqns[cell.eqns[0]].position, cell.op) for cell in run]
    for size in (size for size in range(1, len(run) // 2 + 1) if len(run) % size == 0):
        if steps[size:] == steps[:-size]:
            return [run[at : at + size] for at in range(0, len(run), size)]
    return []


def _returns(cells: Cells, run: list[Cell], depth: int) -> list[list[Cell]]:
    """The run, split where a step returns to the first one.

    A call begins where the step reads what came before, or where nothing does until the next return.
    """
    calls = [own_stack(cells, cell)[depth].call for cell in run]
    position = cells.raw.eqns[run[0].eqns[0]].position
    parts: list[list[Cell]] = []
    for number, cell in enumerate(run):
        first = cells.raw.eqns[cell.eqns[0]].position == position
        if number == 0 or (first and (calls[number - 1] != calls[0] or _begins_again(cells, cell, parts[-1]))):
            parts.append([])
        parts[-1].append(cell)
    found, before = parts[:1], _ids(parts[0])
    for part in parts[1:]:
        if _reads(cells, part[:1], before) or not _reads(cells, part, before):
            found.append(part)
        else:
            found[-1] += part
        before |= _ids(part)
    return found


def _is_of_leaves(cells: Cells, parts: list[list[Cell]]) -> bool:
    """Whether equal steps each handle a leaf of a tree, as an optimizer does, and are no branches of a network.

    Each has arrays of its own: parameters, gradients, arguments, or what such steps made of them. Most come after a
    gradient: some parameters are frozen, or have none. Where fewer do, nothing may read two of them.
    """
    own = [_arrays(cells, part) for part in parts]
    shared = sum(map(len, own)) > len(set[int]().union(*own))
    if shared or _reads_another(cells, parts):
        return False
    others = [arrays for arrays in own if arrays.isdisjoint(cells.after_gradient)]
    if 2 * len(others) < len(own):
        return True
    return all(others) and not any(_layer_reads(cells, arrays) for arrays in others) and not _joins(cells, parts)


def _reads_another(cells: Cells, parts: list[list[Cell]]) -> bool:
    """Whether one of these parts reads another one."""
    whose = {cell.id: number for number, part in enumerate(parts) for cell in part}
    read = ((n, source.id) for n, part in enumerate(parts) for cell in part for source in cells.sources(cell))
    return any(whose.get(source, number) != number for number, source in read)


def _arrays(cells: Cells, part: list[Cell]) -> set[int]:
    """The arrays that these cells read from outside. Scalars do not count."""
    made = {out for cell in part for eqn in cells.eqns(cell) for out in eqn.outs}
    roots = {root for cell in part for root in cells.inputs(cell)} - made
    return {root for root in roots if math.prod(cells.raw.values[root].shape) != 1 or cells.producer(root) is None}


def _layer_reads(cells: Cells, roots: set[int]) -> bool:
    """Whether one of these values is of a layer. An optimizer is none."""
    made = (cells.producer(root) for root in roots)
    return any(cell is not None and cell.major and cell.op not in OPTIMIZERS for cell in made)


def _joins(cells: Cells, parts: list[list[Cell]]) -> bool:
    """Whether something is computed from two of these."""
    whose: dict[int, int] = {
        out: n for n, part in enumerate(parts) for c in part for e in cells.eqns(c) for out in e.outs
    }
    inside = {number for part in parts for cell in part for number in cell.eqns}
    waiting = {eqn.id for value in whose for eqn in cells.consumers(value)} - inside
    queue = sorted(waiting)
    while queue:
        eqn = cells.raw.eqns[heapq.heappop(queue)]
        found = {whose[root] for value in eqn.ins if (root := cells.raw.root(value)) in whose}
        if len(found) > 1:
            return True
        whose |= dict.fromkeys(eqn.outs, found.pop())
        new = {reader.id for out in eqn.outs for reader in cells.consumers(out)} - inside - waiting
        waiting |= new
        for number in new:
            heapq.heappush(queue, number)
    return False
