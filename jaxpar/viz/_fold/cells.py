"""Cells: sets of equations, each of which will be one node."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .._circles import connected
from .._graph import main_prefix
from .._read.raw import Eqn, Raw

_PLAIN_NAMES = {
    "add_any": "add",
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "prod",
    "reduce_and": "all",
    "reduce_or": "any",
    "max": "maximum",
    "min": "minimum",
    "integer_pow": "pow",  # `power_of` says which
    "select_n": "where",
    "dot_general": "MatMul",
    "conv_general_dilated": "conv",
    "concatenate": "Concat",
    "reshape": "Flatten",
    "psum2": "psum",
    "psum_invariant": "psum",
    "all_gather_invariant": "all_gather",
}

_LOOPS = ("scan ×", "while", "cond", "branch ", "pmap ", "shard_map ")


@dataclass(slots=True, eq=False)
class Cell:
    """Equations that are drawn as one node.

    Attributes:
        op, detail: the kind of layer, as in a `Node`.
        eqns: the ids of its equations, in order.
        major: whether it is a layer, not a small step between layers.
        forward: of a backward cell, the layer whose gradient it is.
    """

    id: int
    op: str
    eqns: list[int]
    detail: str = ""
    major: bool = False
    forward: Cell | None = None


class Cells:
    """The cells of a `Raw`, and which cell reads which."""

    def __init__(self, raw: Raw) -> None:
        self.raw = raw
        self.owner: list[Cell | None] = [None] * len(raw.eqns)
        self.cells: dict[int, Cell] = {}
        self.by_op: dict[str, dict[int, Cell]] = {}
        self._inputs: dict[int, list[int]] = {}
        self._consumers: dict[int, list[int]] = {}
        for eqn in raw.eqns:
            if not eqn.view:
                for value in eqn.ins:
                    self._consumers.setdefault(raw.root(value), []).append(eqn.id)
        self._made = 0
        self._results = {raw.root(value) for value in raw.outputs}

    def __iter__(self):
        return iter(self.of_kinds(()))

    def new(self, eqns: Iterable[int], op: str, detail: str = "", major: bool = False) -> Cell:
        """Make one cell of equations. Cells that had them lose them."""
        numbers = sorted(set(eqns))
        for number in numbers:
            old = self.owner[number]
            if old is not None:
                self._take(number, old)
        self._made += 1
        cell = Cell(self._made, op, numbers, detail, major)
        for number in numbers:
            self.owner[number] = cell
        self.cells[cell.id] = self.by_op.setdefault(op, {})[cell.id] = cell
        return cell

    def add(self, number: int, cell: Cell) -> None:
        """Make an equation part of a cell."""
        self.owner[number] = cell
        bisect.insort(cell.eqns, number)
        self._inputs.pop(cell.id, None)

    def _take(self, number: int, cell: Cell) -> None:
        """Take an equation out of a cell, which goes with its last one."""
        cell.eqns.remove(number)
        self._inputs.pop(cell.id, None)
        if not cell.eqns:
            del self.cells[cell.id], self.by_op[cell.op][cell.id]

    def of_kinds(self, ops: Iterable[str]) -> list[Cell]:
        """The cells of these kinds, in order. All cells, where there are no kinds."""
        ops = tuple(ops)
        found = [cell for op in ops for cell in self.by_op.get(op, {}).values()] if ops else self.cells.values()
        return sorted(found, key=lambda cell: cell.eqns[0])

    @functools.cached_property
    def after_gradient(self) -> set[int]:
        """The values that are computed from a gradient, and gradients."""
        found: set[int] = set()
        known = -1
        while known < len(found):  # more than once where a loop reads what comes later
            known = len(found)
            for eqn in self.raw.eqns:
                if eqn.backward or any(self.raw.root(value) in found for value in eqn.ins):
                    found.update(eqn.outs)
        return found

    def eqns(self, cell: Cell) -> list[Eqn]:
        """The equations of a cell, in order."""
        return [self.raw.eqns[number] for number in cell.eqns]

    def scope(self, cell: Cell) -> tuple[str, ...]:
        """The scope that most of its FLOPs are in. A small step from elsewhere does not move a layer."""
        return main_prefix((eqn.scope, 1 + eqn.flops) for eqn in self.steps(cell))

    def steps(self, cell: Cell) -> list[Eqn]:
        """The equations of a cell that compute something. All, where none does."""
        eqns = self.eqns(cell)
        return [eqn for eqn in eqns if not eqn.view] or eqns

    def prims(self, cell: Cell) -> set[str]:
        """The names of the primitives in a cell."""
        return {self.raw.eqns[number].prim for number in cell.eqns}

    def inputs(self, cell: Cell) -> list[int]:
        """The values from outside that a cell reads, in order, without literals."""
        if cell.id not in self._inputs:
            self._inputs[cell.id] = self._find_inputs(cell)
        return self._inputs[cell.id]

    def _find_inputs(self, cell: Cell) -> list[int]:
        real = [eqn for eqn in self.eqns(cell) if not eqn.view]
        inside = {out for eqn in real for out in eqn.outs}
        roots = dict.fromkeys(self.raw.root(value) for eqn in real for value in eqn.ins)
        return [root for root in roots if root not in inside and self.raw.values[root].kind != "literal"]

    def weights(self, cell: Cell) -> list[int]:
        """The parameters that a cell reads."""
        return [root for root in self.inputs(cell) if self.raw.values[root].kind == "weight"]

    def data(self, cell: Cell) -> list[int]:
        """The inputs of a cell that are neither parameters nor constants."""
        return [root for root in self.inputs(cell) if self.raw.values[root].kind in ("op", "input")]

    def producer(self, value: int) -> Cell | None:
        """The cell that computes a value. None for inputs, parameters and constants."""
        shown = self.raw.of(value)
        return None if shown.kind != "op" or shown.producer is None else self.owner[shown.producer]

    def users(self, cell: Cell) -> list[Cell]:
        """The forward cells that read a cell, in order."""
        found: dict[int, Cell] = {}
        for eqn in self.eqns(cell):
            for out in () if eqn.view else eqn.outs:
                for reader in self._consumers.get(out, ()):
                    owner = self.owner[reader]
                    if (
                        owner is not None
                        and owner is not cell
                        and not self.raw.eqns[reader].backward
                        and not self.raw.eqns[reader].residual
                    ):
                        found[owner.id] = owner
        return list(found.values())

    def consumers(self, root: int) -> list[Eqn]:
        """The equations that read a value, behind views."""
        return [self.raw.eqns[number] for number in self._consumers.get(root, ())]

    def is_returned(self, root: int) -> bool:
        """Whether the function returns a value."""
        return root in self._results

    def sole_user(self, cell: Cell) -> Cell | None:
        """The only forward cell that reads a cell. None for a result of the function, or of a pass of a loop."""
        users = self.users(cell)
        is_sole = len(users) == 1 and not self.is_result(cell)
        return users[0] if is_sole and self._loops(users[0]) == self._loops(cell) else None

    def _loops(self, cell: Cell) -> tuple[str, ...]:
        """The loops, branches and device maps around a cell."""
        return loops_of(self.raw.eqns[cell.eqns[0]].scope)

    def is_result(self, cell: Cell) -> bool:
        """Whether the function returns a value of a cell."""
        return any(out in self._results for eqn in self.eqns(cell) for out in eqn.outs)

    def output(self, cell: Cell) -> int:
        """The value that a cell is known by.

        That is the last one that other layers read. Else the last one returned, else the last one that its gradient
        reads.
        """
        inside = set(cell.eqns)
        outs = [out for eqn in reversed(self.eqns(cell)) if not (eqn.residual or eqn.view) for out in eqn.outs]
        readers = {out: [r for r in self._consumers.get(out, ()) if r not in inside] for out in outs}
        backward = self.raw.eqns[cell.eqns[0]].backward
        forward = [o for o in outs if any(backward or not self.raw.eqns[r].backward for r in readers[o])]
        results = [out for out in outs if out in self._results]
        return next(iter([*forward, *results, *(out for out in outs if readers[out]), *outs]))


def loops_of(scope: tuple[str, ...]) -> tuple[str, ...]:
    """The parts of a scope that run another number of times, or elsewhere."""
    return tuple(part for part in scope if part.startswith(_LOOPS)) if scope else ()


def plain_name(prim: str) -> str:
    """The name of a primitive in a picture."""
    return _PLAIN_NAMES.get(prim, prim)


def power_of(raw: Raw, eqn: Eqn) -> tuple[str, str]:
    """The name of a power, and what a label adds: "pow" and "x^3". A square has a name of its own."""
    exponent = eqn.params["y"] if eqn.prim == "integer_pow" else raw.of(eqn.ins[1]).literal
    if exponent is None or np.ndim(exponent):
        return "pow", ""
    return ("square", "") if exponent == 2 else ("pow", f"x^{float(exponent):g}")


def components(cells: Cells, part: list[Cell]) -> list[list[Cell]]:
    """These cells as connected sets."""
    inside = {cell.id for cell in part}
    edges: list[tuple[int, int]] = []
    for cell in part:
        made = (cells.producer(value) for value in cells.inputs(cell))
        edges += [(cell.id, other.id) for other in made if other is not None and other.id in inside]
    by_id = {cell.id: cell for cell in part}
    return [[by_id[number] for number in found] for found in connected(by_id, edges)]
