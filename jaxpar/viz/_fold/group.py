"""The third fold: what no pattern names, by where in the program it was made."""

from __future__ import annotations

from dataclasses import dataclass

from .._graph import BACKWARD
from .._read.source import Frame
from .cells import Cell, Cells, plain_name
from .table import COLLECTIVES

_ANONYMOUS = ("<lambda>", "<genexpr>", "<listcomp>", "<dictcomp>", "<module>")


@dataclass(slots=True)
class _Run:
    key: object
    cells: list[Cell]
    name: str = ""


def fold_helpers(cells: Cells) -> None:
    """A function of the user's, or a call into a library, that makes only small steps is one cell of its name."""
    for depth in range(1, 12):
        for run in _helper_runs(cells, depth):
            steps = sum(len(cell.eqns) for cell in run.cells)
            if (
                steps >= 3
                and len(run.cells) > 1
                and not any(cell.major or cell.op in COLLECTIVES for cell in run.cells)
            ):
                cells.new([n for cell in run.cells for n in cell.eqns], run.name)


def _helper_runs(cells: Cells, depth: int) -> list[_Run]:
    """Neighbouring cells inside one call of the function at this depth of the stack."""
    runs: list[_Run] = []
    for cell in cells:
        if cells.raw.eqns[cell.eqns[0]].backward:
            continue
        stack = tuple(f for f in cells.raw.eqns[cell.eqns[0]].stack if f.origin != "jax")
        found = len(stack) > depth and not stack[depth].name.endswith(_ANONYMOUS)
        key = (*(f.call for f in stack[:depth]), -2 - stack[depth].function) if found else None
        same = key is not None and runs and runs[-1].key == key
        if not same or _again(cells, cell, runs[-1].cells):
            runs.append(_Run(key, [], _helper_name(stack, depth) if found else ""))
        runs[-1].cells.append(cell)
    return [run for run in runs if run.key is not None]


def _again(cells: Cells, cell: Cell, run: list[Cell]) -> bool:
    first, new = cells.raw.eqns[run[0].eqns[0]], cells.raw.eqns[cell.eqns[0]]
    connected = any(cells.producer(value) in run for value in cells.inputs(cell))
    return first.position == new.position and first.prim == new.prim and connected


def _helper_name(stack: tuple[Frame, ...], depth: int) -> str:
    frame = stack[depth]
    parts = [part for part in frame.name.split(".") if part not in ("<locals>", "__call__")]
    name = parts[-1].strip("_")
    if frame.origin != "library":
        return name
    return f"{frame.package}.{'update' if name == 'update_fn' else name}"


def fold_statements(cells: Cells) -> None:
    """Three or more small steps that one line makes, and that feed each other, are one cell."""
    runs: list[_Run] = []
    for cell in cells:
        eqn = cells.raw.eqns[cell.eqns[0]]
        if eqn.backward or cell.major or cell.op in COLLECTIVES or cell.op == "cond":
            runs.append(_Run(None, []))
            continue
        stack = [f for f in eqn.stack if f.origin != "jax"]
        key = (eqn.scope, *(f.call for f in stack[:-1]), stack[-1].function, stack[-1].line) if stack else None
        if key is None or not runs or runs[-1].key != key or _again(cells, cell, runs[-1].cells):
            runs.append(_Run(key, []))
        runs[-1].cells.append(cell)
    for run in runs:
        for part in _components(cells, run.cells):
            if len(part) >= 3:
                names = list(dict.fromkeys(cell.op for cell in part))
                detail = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
                cells.new([n for cell in part for n in cell.eqns], "Elementwise", detail)


def _components(cells: Cells, part: list[Cell]) -> list[list[Cell]]:
    """Connected sets of cells."""
    group = {cell.id: {cell.id} for cell in part}
    for cell in part:
        for value in cells.inputs(cell):
            other = cells.producer(value)
            if other is not None and other.id in group and group[other.id] is not group[cell.id]:
                merged = group[other.id] | group[cell.id]
                for member in merged:
                    group[member] = merged
    distinct = {id(members): members for members in group.values()}
    return [[cell for cell in part if cell.id in members] for members in distinct.values()]


def fold_siblings(cells: Cells) -> None:
    """The same small step or collective for every leaf of a tree, made by one line, is one cell "×8"."""
    run: list[Cell] = []
    for cell in [*cells, None]:
        if cell is not None and not cell.major and not cells.raw.eqns[cell.eqns[0]].backward:
            run.append(cell)
            continue
        _merge_siblings(cells, run)
        run = []


def _merge_siblings(cells: Cells, run: list[Cell]) -> None:
    groups: dict[object, list[Cell]] = {}
    for cell in run:
        eqn = cells.raw.eqns[cell.eqns[0]]
        place = tuple(f.call for f in eqn.stack if f.origin != "jax")
        groups.setdefault((cell.op, cell.detail, eqn.scope, place), []).append(cell)
    for (op, detail, *_), same in groups.items():  # pyright: ignore[reportGeneralTypeIssues]
        if len(same) < 2 or any(cells.producer(v) in same for cell in same for v in cells.inputs(cell)):
            continue
        count = f"×{len(same)}"
        merged = cells.new([n for cell in same for n in cell.eqns], op, f"{detail} {count}".strip())
        merged.major = False


def break_cycles(cells: Cells) -> None:
    """Folding what is not convex makes a cycle: take such cells apart again, the least known first."""
    tried: set[frozenset[int]] = set()
    todo = _cycles(cells, list(cells))
    while todo:
        cycle = todo.pop()
        parts = [cell for cell in cycle if sum(not eqn.view for eqn in cells.eqns(cell)) > 1]
        parts.sort(key=lambda cell: (not cell.major, len(cell.eqns), cell.id))
        victims = [cell for cell in parts if not cell.major] if len(cycle) > _LARGE else []
        inside = [cell for cell in cycle if cell not in (victims := victims or parts[-1:])]
        for victim in victims:
            inside += _take_apart(cells, victim, tried)
        todo += _cycles(cells, inside)


_LARGE = 20  # cells in a cycle, above which all the small steps in it are taken apart at once


def _take_apart(cells: Cells, victim: Cell, tried: set[frozenset[int]]) -> list[Cell]:
    """Its connected parts where it has several, else its equations."""
    op, detail, forward = victim.op, victim.detail, victim.forward
    pieces, made = _components(cells, _singles(cells, victim)), []
    for piece in pieces:
        numbers = frozenset(number for cell in piece for number in cell.eqns)
        if len(pieces) > 1 and len(piece) > 1 and numbers not in tried:
            tried.add(numbers)
            piece = [cells.new(numbers, op, detail)]
            piece[0].forward = forward
        made += piece
    return made


def _singles(cells: Cells, victim: Cell) -> list[Cell]:
    """Every equation of a cell on its own; views stay with the first."""
    eqns, forward = cells.eqns(victim), victim.forward
    views = [eqn.id for eqn in eqns if eqn.view]
    suffix = BACKWARD if victim.op.endswith(BACKWARD) else ""
    made = []
    for eqn in eqns:
        if not eqn.view:
            made.append(cells.new([eqn.id, *views], plain_name(eqn.prim) + suffix))
            made[-1].forward, views = forward, []
    return made


def _cycles(cells: Cells, among: list[Cell]) -> list[list[Cell]]:
    """Sets of these cells that reach each other (Tarjan 1972, without recursion)."""
    members = {cell.id for cell in among}
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[Cell] = []
    on_stack: set[int] = set()
    found: list[list[Cell]] = []
    sources = {
        cell.id: list(
            {p.id: p for v in cells.inputs(cell) if (p := cells.producer(v)) is not None and p.id in members}.values()
        )
        for cell in among
    }
    for root in among:
        if root.id in order:
            continue
        work = [(root, iter(sources[root.id]))]
        order[root.id] = low[root.id] = len(order)
        stack.append(root)
        on_stack.add(root.id)
        while work:
            cell, rest = work[-1]
            for other in rest:
                if other.id not in order:
                    order[other.id] = low[other.id] = len(order)
                    stack.append(other)
                    on_stack.add(other.id)
                    work.append((other, iter(sources[other.id])))
                    break
                if other.id in on_stack:
                    low[cell.id] = min(low[cell.id], order[other.id])
            else:
                work.pop()
                if work:
                    low[work[-1][0].id] = min(low[work[-1][0].id], low[cell.id])
                if low[cell.id] == order[cell.id]:
                    component = []
                    while True:
                        member = stack.pop()
                        on_stack.discard(member.id)
                        component.append(member)
                        if member is cell:
                            break
                    if len(component) > 1:
                        found.append(component)
    return found
