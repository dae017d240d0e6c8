"""What a loop hands from one pass to the next, as edges back."""

from __future__ import annotations

from collections.abc import Container

from .._fold.cells import Cell, Cells
from .net import Draft

_Edges = dict[tuple[int, int, int], None]


def carry_edges(cells: Cells, by_cell: dict[int, Draft]) -> tuple[_Edges, _Edges]:
    """From what computes each carried value to what reads it: in the next pass, and behind the loop.

    What a pass hands on as it got it has no edge. A layer hands on to itself where no other layer reads the value.
    """
    back, on = _Edges(), _Edges()
    inside, behind = _readers(cells, by_cell)
    for read, result, _ in cells.raw.carries:
        maker = None if _carry_of(cells, result, inside) is not None else cells.producer(cells.raw.root(result))
        if maker is not None:
            at, value = by_cell[maker.id].at, cells.raw.root(result)
            others = [reader for reader in inside[read] if reader is not maker]
            back |= dict.fromkeys((at, by_cell[reader.id].at, value) for reader in others or inside[read])
            on |= dict.fromkeys((at, by_cell[reader.id].at, value) for reader in behind[read])
    return back, on


def _readers(cells: Cells, by_cell: dict[int, Draft]) -> tuple[dict[int, list[Cell]], dict[int, list[Cell]]]:
    """The cells that read each carried value, in order: those in the loop, and the forward ones behind it."""
    loops = {read: scope for read, _, scope in cells.raw.carries}
    inside: dict[int, list[Cell]] = {read: [] for read in loops}
    behind: dict[int, list[Cell]] = {read: [] for read in loops}
    for cell in sorted(cells, key=lambda cell: by_cell[cell.id].at) if loops else ():
        for eqn in cells.eqns(cell):
            for value in () if eqn.view else eqn.ins:
                read = _carry_of(cells, value, loops)
                if read is not None and eqn.scope[: len(loops[read])] == loops[read]:
                    inside[read].append(cell)
                elif read is not None and not eqn.backward:
                    behind[read].append(cell)
    return inside, behind


def _carry_of(cells: Cells, value: int, carried: Container[int]) -> int | None:
    """The carried value that a value shows, or None."""
    while value not in carried:
        if cells.raw.values[value].root == value:
            return None
        value = cells.raw.values[value].root
    return value
