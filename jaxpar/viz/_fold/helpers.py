"""The third fold: small steps, by their place in the program."""

from __future__ import annotations

from dataclasses import dataclass

from .._read.source import ANONYMOUS, Frame
from .again import begins_again, is_of_leaves, own_stack, split_calls
from .cells import Cell, Cells, components
from .patterns import COLLECTIVES

_DEEPEST = 12  # calls around a step, below which functions stay as they are


@dataclass(slots=True)
class _Run:
    """Neighbouring cells of one place. The key None is no place."""

    key: object
    cells: list[Cell]
    name: str = ""


def fold_helpers(cells: Cells) -> None:
    """Make one cell of each function call that has only small steps."""
    deepest = max((len(own_stack(cells, cell)) for cell in cells), default=0)
    for depth in range(1, min(deepest, _DEEPEST)):
        for run in _helper_runs(cells, depth):
            small = not any(cell.major or cell.op in COLLECTIVES for cell in run.cells)
            for part in split_calls(cells, run.cells, depth) if small else ():
                if len(part) > 1 and sum(len(cell.eqns) for cell in part) >= 3:
                    cells.new([n for cell in part for n in cell.eqns], run.name)


def _helper_runs(cells: Cells, depth: int) -> list[_Run]:
    """Neighbouring cells inside one function at this depth of the stack, called from one place."""
    runs: list[_Run] = []
    for cell in cells:
        if cells.raw.eqns[cell.eqns[0]].backward:
            continue
        stack = own_stack(cells, cell)
        found = len(stack) > depth and not stack[depth].name.endswith(ANONYMOUS)
        key = (*(f.call for f in stack[:depth]), -2 - stack[depth].function) if found else None
        if key is None or not runs or runs[-1].key != key:
            runs.append(_Run(key, [], _helper_name(stack, depth) if found else ""))
        runs[-1].cells.append(cell)
    return [run for run in runs if run.key is not None]


def _helper_name(stack: tuple[Frame, ...], depth: int) -> str:
    frame = stack[depth]
    parts = [part for part in frame.name.split(".") if part not in ("<locals>", "__call__")]
    name = parts[-1].strip("_")
    if frame.origin != "library":
        return name
    return f"{frame.package}.{'update' if name == 'update_fn' else name}"


def fold_statements(cells: Cells) -> None:
    """Make one cell of three or more connected steps of one line."""
    runs: list[_Run] = []
    for cell in cells:
        eqn = cells.raw.eqns[cell.eqns[0]]
        if eqn.backward or cell.major or cell.op in COLLECTIVES or cell.op in ("cond", "Activation"):
            runs.append(_Run(None, []))
            continue
        stack = own_stack(cells, cell)
        key = (eqn.scope, *(f.call for f in stack[:-1]), stack[-1].function, stack[-1].line) if stack else None
        if key is None or not runs or runs[-1].key != key or begins_again(cells, cell, runs[-1].cells):
            runs.append(_Run(key, []))
        runs[-1].cells.append(cell)
    for run in runs:
        for part in components(cells, run.cells):
            if len(part) >= 3:
                names = list(dict.fromkeys(cell.op for cell in part))
                detail = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
                cells.new([n for cell in part for n in cell.eqns], "Elementwise", detail)


def fold_siblings(cells: Cells) -> None:
    """Make one cell "×8" of the steps that one line does for each leaf."""
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
        place = tuple(frame.call for frame in own_stack(cells, cell))
        groups.setdefault((cell.op, cell.detail, cells.raw.eqns[cell.eqns[0]].scope, place), []).append(cell)
    for (op, detail, *_), same in groups.items():  # pyright: ignore[reportGeneralTypeIssues]
        if len(same) < 2 or not is_of_leaves(cells, [[cell] for cell in same]):
            continue
        count = f"×{len(same)}"
        cells.new([n for cell in same for n in cell.eqns], op, f"{detail} {count}".strip())
