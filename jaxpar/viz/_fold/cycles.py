"""Cycles between cells are found and broken. A fold that is not convex makes them."""

from __future__ import annotations

from .._circles import circles
from .._graph import BACKWARD
from .cells import Cell, Cells, components, plain_name
from .patterns import SENT, axis_names

_LARGE = 20  # cells in a cycle, above which all its small steps are split at once


def break_cycles(cells: Cells) -> None:
    """Split cells until there is no cycle, small steps before layers."""
    tried: set[frozenset[int]] = set()
    todo = _cycles(cells, list(cells))
    while todo:
        cycle = todo.pop()
        parts = [cell for cell in cycle if sum(not eqn.view for eqn in cells.eqns(cell)) > 1]
        parts.sort(key=lambda cell: (not cell.major, len(cell.eqns), cell.id))
        small = [cell for cell in parts if not cell.major] if len(cycle) > _LARGE else []
        victims = small or parts[-1:]
        rest = [cell for cell in cycle if cell not in victims]
        for victim in victims:
            rest += _split(cells, victim, tried)
        todo += _cycles(cells, rest)


def _split(cells: Cells, victim: Cell, tried: set[frozenset[int]]) -> list[Cell]:
    """Split a cell into its connected parts, or else into equations."""
    op, detail, forward = victim.op, victim.detail, victim.forward
    pieces, made = components(cells, _singles(cells, victim)), list[Cell]()
    for piece in pieces:
        numbers = frozenset(number for cell in piece for number in cell.eqns)
        if len(pieces) > 1 and len(piece) > 1 and numbers not in tried:
            tried.add(numbers)
            piece = [cells.new(numbers, op, detail)]
            piece[0].forward = forward
        made += piece
    return made


def _singles(cells: Cells, victim: Cell) -> list[Cell]:
    """Every equation of a cell as a cell. Views stay with the first."""
    eqns, forward = cells.eqns(victim), victim.forward
    views = [eqn.id for eqn in eqns if eqn.view]
    suffix = BACKWARD if victim.op.endswith(BACKWARD) else ""
    made: list[Cell] = []
    for eqn in eqns:
        if not eqn.view:
            detail = f"over {axis_names(eqn)}" if plain_name(eqn.prim) in SENT else ""
            made.append(cells.new([eqn.id, *views], plain_name(eqn.prim) + suffix, detail))
            made[-1].forward, views = forward, []
    return made


def _cycles(cells: Cells, among: list[Cell]) -> list[list[Cell]]:
    """Sets of these cells that reach each other."""
    by_id = {cell.id: cell for cell in among}
    sources: dict[int, list[int]] = {}
    for cell in among:
        producers = (cells.producer(value) for value in cells.inputs(cell))
        sources[cell.id] = list(dict.fromkeys(p.id for p in producers if p is not None and p.id in by_id))
    return [[by_id[number] for number in circle] for circle in circles(sources)]
