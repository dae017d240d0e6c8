"""Cycles between cells are found and broken. A fold that is not convex makes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

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
    members = {cell.id for cell in among}
    sources: dict[int, list[Cell]] = {}
    for cell in among:
        producers = (cells.producer(value) for value in cells.inputs(cell))
        inside = {p.id: p for p in producers if p is not None and p.id in members}
        sources[cell.id] = list(inside.values())
    search = _Search(sources)
    for root in among:
        search.visit(root)
    return search.found


@dataclass(slots=True)
class _Search:
    """Strongly connected components of two cells or more (Tarjan 1972), without recursion.

    Attributes:
        sources: the cells that each cell reads, by id.
        order: when each cell was met.
        low: the earliest cell on the stack that each one reaches.
        stack: cells whose component is not complete.
    """

    sources: dict[int, list[Cell]]
    order: dict[int, int] = field(default_factory=dict)
    low: dict[int, int] = field(default_factory=dict)
    stack: dict[int, Cell] = field(default_factory=dict)
    found: list[list[Cell]] = field(default_factory=list)

    def visit(self, root: Cell) -> None:
        """Search everything that a cell reaches."""
        work: list[tuple[Cell, Iterator[Cell]]] = []
        new: Cell | None = None if root.id in self.order else root
        while new is not None or work:
            if new is not None:
                self.order[new.id] = self.low[new.id] = len(self.order)
                self.stack[new.id] = new
                work.append((new, iter(self.sources[new.id])))
            cell, rest = work[-1]
            new = self._next(cell, rest)
            if new is None:
                work.pop()
                self._finish(cell, work[-1][0] if work else None)

    def _next(self, cell: Cell, rest: Iterator[Cell]) -> Cell | None:
        """The next source that was not met before."""
        for other in rest:
            if other.id not in self.order:
                return other
            if other.id in self.stack:
                self.low[cell.id] = min(self.low[cell.id], self.order[other.id])
        return None

    def _finish(self, cell: Cell, parent: Cell | None) -> None:
        """Hand what a cell reaches to its parent. Take its component off the stack where it is the first."""
        if parent is not None:
            self.low[parent.id] = min(self.low[parent.id], self.low[cell.id])
        if self.low[cell.id] == self.order[cell.id]:
            component: list[Cell] = []
            while not component or component[-1] is not cell:
                component.append(self.stack.popitem()[1])
            if len(component) > 1:
                self.found.append(component)
