"""What a loop hands from one pass to the next, as edges back."""

from __future__ import annotations

from .._fold.cells import Cell, Cells
from .net import Draft


def carry_edges(cells: Cells, by_cell: dict[int, Draft]) -> dict[tuple[int, int, int], None]:
    """From what computes each carried value to the first layer that reads it in the next pass.

    What a pass hands on as it got it has no edge.
    """
    if not cells.raw.carries:
        return {}
    first = _first_readers(cells, by_cell)
    found: dict[tuple[int, int, int], None] = {}
    for read, result in cells.raw.carries:
        maker = None if _carry_of(cells, result, first) is not None else cells.producer(cells.raw.root(result))
        if maker is not None and (reader := first.get(read)) is not None:
            found[by_cell[maker.id].at, by_cell[reader.id].at, cells.raw.root(result)] = None
    return found


def _first_readers(cells: Cells, by_cell: dict[int, Draft]) -> dict[int, Cell | None]:
    """The first cell that reads each carried value."""
    first: dict[int, Cell | None] = {read: None for read, _ in cells.raw.carries}
    for cell in sorted(cells, key=lambda cell: by_cell[cell.id].at):
        for eqn in cells.eqns(cell):
            for value in () if eqn.view else eqn.ins:
                read = _carry_of(cells, value, first)
                if read is not None and first[read] is None:
                    first[read] = cell
    return first


def _carry_of(cells: Cells, value: int, carried: dict[int, Cell | None]) -> int | None:
    """The carried value that a value shows, or None."""
    while value not in carried:
        if cells.raw.values[value].root == value:
            return None
        value = cells.raw.values[value].root
    return value
