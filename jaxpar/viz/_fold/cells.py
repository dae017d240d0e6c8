"""Cells: sets of equations, each of which will be one node. Cycles between them are found and broken.

Read `Cell` and `Cells` first: all folds ask them what reads what, behind views, and make one cell of several. Two cells
that read each other could not be drawn, so `break_cycles` comes last.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from .._graph import BACKWARD
from .._read.raw import Eqn, Raw
from .._read.source import function_of
from .._scopes import Path, main_prefix
from .._searches import circles, connected, reach, readers

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
    "integer_pow": "pow",  # `label_of` says which
    "select_n": "where",
    "dot_general": "MatMul",
    "ragged_dot": "MatMul",
    "ragged_dot_general": "MatMul",
    "conv_general_dilated": "conv",
    "concatenate": "Concat",
    "reshape": "Flatten",
    "pallas_call": "Pallas",
    "psum2": "psum",
    "psum_invariant": "psum",
    "all_gather_invariant": "all_gather",
    "select_if_vmap": "where",  # of Equinox
    "maybe_set": "scatter",
}

COLLECTIVES = frozenset(
    "psum pmean pmax pmin all_gather all_to_all ragged_all_to_all reduce_scatter psum_scatter ppermute pgather "
    "axis_index".split()
)
SENT = COLLECTIVES - {"axis_index"}
_Item = TypeVar("_Item")
_Key = TypeVar("_Key")
# Scopes that run another number of times, or elsewhere.
_LOOPS = ("scan ×", "while", "cond", "branch ", "pmap ", "shard_map ")


@dataclass(slots=True, eq=False)
class Cell:
    """Equations that are drawn as one node."""

    id: int
    op: str  # the kind of layer, as in a `Node`
    eqns: list[int]  # the ids of its equations, in order
    detail: str = ""
    major: bool = False  # whether it is a layer, not a small step between layers
    forward: Cell | None = None  # of a backward cell, the layer whose gradient it is


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
        self._behind_loops = _behind_loops(raw)
        self._made = 0
        self._results = {raw.root(value) for value in raw.outputs}

    def __iter__(self):
        return iter(self.of_kinds(()))

    def new(self, eqns: Iterable[int], op: str, detail: str = "", major: bool = False) -> Cell:
        """Make one cell of equations. Cells that had them lose them."""
        numbers = sorted(set(eqns))
        for number in numbers:
            if (old := self.owner[number]) is not None:
                old.eqns.remove(number)
                self._inputs.pop(old.id, None)
                if not old.eqns:
                    del self.cells[old.id], self.by_op[old.op][old.id]
        self._made += 1
        cell = Cell(self._made, op, numbers, detail, major)
        for number in numbers:
            self.owner[number] = cell
        self.cells[cell.id] = self.by_op.setdefault(op, {})[cell.id] = cell
        return cell

    def fold(self, parts: Iterable[Cell], op: str, detail: str = "", major: bool = False) -> Cell:
        """Make one cell of several."""
        return self.new([number for part in parts for number in part.eqns], op, detail, major)

    def add(self, number: int, cell: Cell) -> None:
        """Make an equation part of a cell."""
        self.owner[number] = cell
        bisect.insort(cell.eqns, number)
        self._inputs.pop(cell.id, None)

    def of_kinds(self, ops: Iterable[str]) -> list[Cell]:
        """The cells of these kinds, in order. All cells, where there are no kinds."""
        ops = tuple(ops)
        matching = [cell for op in ops for cell in self.by_op.get(op, {}).values()] if ops else self.cells.values()
        return sorted(matching, key=lambda cell: cell.eqns[0])

    @functools.cached_property
    def after_gradient(self) -> set[int]:
        """The values that are computed from a gradient, and gradients."""
        after: set[int] = set()
        count_before = -1
        while count_before < len(after):  # more than once where a loop reads what comes later
            count_before = len(after)
            for eqn in self.raw.eqns:
                if eqn.backward or any(self.raw.root(value) in after for value in eqn.ins):
                    after.update(eqn.outs)
        return after

    @functools.cached_property
    def of_data(self) -> set[int]:
        """The values that are computed forward from inputs, or from what a loop carries."""
        roots = ((number, value) for number, value in enumerate(self.raw.values) if value.root == number)
        of_data = {n for n, v in roots if v.kind == "input" or (v.kind == "op" and v.producer is None)}
        for eqn in self.raw.eqns:
            if not eqn.backward and any(self.raw.root(value) in of_data for value in eqn.ins):
                of_data.update(eqn.outs)
        return of_data

    @functools.cached_property
    def by_prim(self) -> dict[str, list[Eqn]]:
        """The equations of each primitive, in order."""
        eqns_of: dict[str, list[Eqn]] = {}
        for eqn in self.raw.eqns:
            eqns_of.setdefault(eqn.prim, []).append(eqn)
        return eqns_of

    @functools.cached_property
    def read_by(self) -> dict[int, list[int]]:
        """The equations that read each value, also from inside a nested jaxpr, where it has another number."""
        read_by: dict[int, list[int]] = {}
        for eqn in self.raw.eqns:
            for value in eqn.ins:
                outside: int | None = value
                while outside is not None:
                    read_by.setdefault(outside, []).append(eqn.id)
                    shown = self.raw.values[outside]
                    same_array = shown.shows if shown.producer is None else None
                    outside = self.raw.first_pass.get(outside, same_array)
        return read_by

    def eqns(self, cell: Cell) -> list[Eqn]:
        """The equations of a cell, in order."""
        return [self.raw.eqns[number] for number in cell.eqns]

    def scope(self, cell: Cell) -> Path:
        """The scope that most of its FLOPs are in. A small step from elsewhere does not move a layer."""
        return main_prefix((eqn.scope, 1 + eqn.flops) for eqn in self.steps(cell))

    def is_backward(self, cell: Cell) -> bool:
        """Whether a cell is of a gradient."""
        return self.raw.eqns[cell.eqns[0]].backward

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
            real = [eqn for eqn in self.eqns(cell) if not eqn.view]
            inside = {out for eqn in real for out in eqn.outs}
            roots = dict.fromkeys(self.raw.root(value) for eqn in real for value in eqn.ins if value not in inside)
            outside = (root for root in roots if root not in inside)
            self._inputs[cell.id] = [root for root in outside if self.raw.values[root].kind != "literal"]
        return self._inputs[cell.id]

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

    def sources(self, cell: Cell) -> list[Cell]:
        """The cells that a cell reads, in order."""
        behind = map(self.raw.root, self.behind_loops(cell))
        made = (self.producer(root) for root in (*self.inputs(cell), *behind))
        return list({source.id: source for source in made if source is not None and source is not cell}.values())

    def behind_loops(self, cell: Cell) -> list[int]:
        """What a cell reads of the last pass of loops, where it is given what a pass was given."""
        return [value for number in cell.eqns for value in self._behind_loops.get(number, ())]

    def users(self, cell: Cell) -> list[Cell]:
        """The forward cells that read a cell, in order."""
        readers = (
            reader for eqn in self.eqns(cell) if not eqn.view for out in eqn.outs for reader in self.consumers(out)
        )
        owners = (self.owner[reader.id] for reader in readers if not (reader.backward or reader.residual))
        return list({user.id: user for user in owners if user is not None and user is not cell}.values())

    def consumers(self, root: int) -> list[Eqn]:
        """The equations that read a value, behind views."""
        return [self.raw.eqns[number] for number in self._consumers.get(root, ())]

    def is_returned(self, root: int) -> bool:
        """Whether the function returns a value."""
        return root in self._results

    def sole_user(self, cell: Cell) -> Cell | None:
        """The only forward cell that reads a cell. None for a result of the function, or of a pass of a loop."""
        users = self.users(cell)
        if len(users) != 1 or any(out in self._results for eqn in self.eqns(cell) for out in eqn.outs):
            return None
        return users[0] if self.are_in_one_loop(cell, users[0]) else None

    def are_in_one_loop(self, *cells: Cell) -> bool:
        """Whether these cells run as often, and on the same devices."""
        scopes = (self.raw.eqns[cell.eqns[0]].scope for cell in cells)
        return len({tuple(name for name in scope if name.startswith(_LOOPS)) for scope in scopes}) == 1

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


def _behind_loops(raw: Raw) -> dict[int, list[int]]:
    """What equations behind a loop read of its last pass, where they are given a value that a pass was given.

    Such a value shows what the loop begins with. So the way to what the pass before computed is here.
    """
    results, behind = {read: (result, scope) for read, result, scope in raw.carries}, dict[int, list[int]]()
    for eqn in raw.eqns if results else ():
        for value in () if eqn.view else eqn.ins:
            for read in carries_of(raw, value, results):
                result, scope = results[read]
                if eqn.scope[: len(scope)] != scope and not carries_of(raw, result, results):
                    behind.setdefault(eqn.id, []).append(result)
    return behind


def carries_of(raw: Raw, value: int, carried: Container[int]) -> list[int]:
    """The carried values that a value shows: of a loop, and of those around it that it begins with."""
    return [shown for shown in raw.shown(value) if shown in carried]


def runs(
    items: Iterable[_Item],
    key: Callable[[_Item], _Key | None],
    begins_again: Callable[[_Item, list[_Item]], bool] = lambda item, run: False,
) -> list[tuple[_Key, list[_Item]]]:
    """Neighbours with the same key, which belong to one call. None is no key, and ends a run.

    >>> runs([1, 1, 2, 3, 3], lambda number: number if number != 2 else None)
    [(1, [1, 1]), (3, [3, 3])]
    """
    collected: list[tuple[_Key, list[_Item]]] = []
    last = None
    for item in items:
        new = key(item)
        if new is not None:
            if new != last or begins_again(item, collected[-1][1]):
                collected.append((new, []))
            collected[-1][1].append(item)
        last = new
    return collected


def plain_name(prim: str) -> str:
    """The name of a primitive in a picture."""
    return _PLAIN_NAMES.get(prim, prim)


def axis_names(eqn: Eqn) -> str:
    """The axes of a collective: "data, model". Empty where it has none."""
    names = next((axes for name in ("axes", "axis_name") if (axes := eqn.params.get(name)) is not None), ())
    return ", ".join(map(str, names if isinstance(names, (tuple, list, frozenset)) else (names,)))


def label_of(raw: Raw, eqn: Eqn) -> tuple[str, str]:
    """The kind and the detail of an equation by itself: "pow" and "x^3", "psum" and "over data"."""
    op = plain_name(eqn.prim)
    if op == "Pallas":
        return op, str(eqn.params.get("name") or function_of(eqn.params["jaxpr"]).partition(" at ")[0])
    if op in SENT and (axes := axis_names(eqn)):
        return op, f"over {axes}"
    exponent = None
    if op == "pow":
        exponent = eqn.params["y"] if eqn.prim == "integer_pow" else raw.of(eqn.ins[1]).literal
    if exponent is None or np.ndim(exponent):
        return op, ""
    return ("square", "") if exponent == 2 else (op, f"x^{float(exponent):g}")


def sources_of(cells: Cells) -> dict[int, set[int]]:
    """The other cells that each cell reads."""
    return {cell.id: {source.id for source in cells.sources(cell)} for cell in cells}


def after_gradients(cells: Cells, sources: dict[int, set[int]]) -> set[int]:
    """The cells of gradients, and those that read one."""
    return reach((cell.id for cell in cells if cell.op.endswith(BACKWARD)), readers(sources))


def components(cells: Cells, chosen: list[Cell]) -> list[list[Cell]]:
    """These cells as connected sets."""
    by_id = {cell.id: cell for cell in chosen}
    edges = ((cell.id, other.id) for cell in chosen for other in cells.sources(cell) if other.id in by_id)
    return [[by_id[number] for number in group] for group in connected(by_id, edges)]


_LARGE = 20  # cells in a cycle, above which all its small steps are split at once


def break_cycles(cells: Cells) -> None:
    """Split cells until there is no cycle, small steps before layers."""
    # Small steps are given up first: a layer that is drawn as its equations is a loss for the reader. A set of
    # equations is made a cell once only, so this ends.
    tried: set[frozenset[int]] = set()
    todo = _cycles(cells, list(cells))
    while todo:
        cycle = todo.pop()
        divisible = [cell for cell in cycle if sum(not eqn.view for eqn in cells.eqns(cell)) > 1]
        divisible.sort(key=lambda cell: (not cell.major, len(cell.eqns), cell.id))
        small = [cell for cell in divisible if not cell.major] if len(cycle) > _LARGE else []
        victims = small or divisible[-1:]
        remaining = [cell for cell in cycle if cell not in victims]
        for victim in victims:
            remaining += _split(cells, victim, tried)
        todo += _cycles(cells, remaining)


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
            eqn.residual = False  # it is a step of its own now, with a result of its own
            op, detail = label_of(cells.raw, eqn)
            made.append(cells.new([eqn.id, *views], op + suffix, detail))
            made[-1].forward, views = forward, []
    return made


def _cycles(cells: Cells, among: list[Cell]) -> list[list[Cell]]:
    """Sets of these cells that reach each other."""
    by_id = {cell.id: cell for cell in among}
    sources = {cell.id: [source.id for source in cells.sources(cell) if source.id in by_id] for cell in among}
    return [[by_id[number] for number in circle] for circle in circles(sources)]
