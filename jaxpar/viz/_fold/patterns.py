"""A pattern of cells as one layer. A `Rule` finds it, a `Fold` says what it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..._core.checks import describe
from .._read.raw import Eqn
from .cells import Cell, Cells

COLLECTIVES = frozenset(
    "psum pmean pmax pmin all_gather all_to_all ragged_all_to_all reduce_scatter psum_scatter ppermute pgather "
    "axis_index".split()
)
SENT = COLLECTIVES - {"axis_index"}


@dataclass(frozen=True, slots=True)
class Fold:
    """Cells that are one layer.

    Attributes:
        cells: all of them.
        op, detail: of the layer, as in a `Node`.
        major: whether it is a layer, not a small step between layers.
    """

    cells: tuple[Cell, ...]
    op: str
    detail: str = ""
    major: bool = True


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern of cells.

    Attributes:
        name: for people.
        ops: the kinds of cells that it is tried on. Empty for all.
        match: called as `match(cells, cell)`. Returns a `Fold` with the cell, or None.
    """

    name: str
    ops: frozenset[str]
    match: Callable[[Cells, Cell], Fold | None]


def fold_patterns(cells: Cells, rules: Iterable[Rule]) -> None:
    """Apply each rule to all forward cells, one rule after the other."""
    for rule in rules:
        for cell in cells.of_kinds(rule.ops):
            if cell.id not in cells.cells:
                continue
            found = rule.match(cells, cell)
            if found is not None and not isinstance(found, Fold):
                got = describe(found)
                raise TypeError(f"viz: the match of viz.Rule {rule.name!r} must return a viz.Fold or None, got {got}")
            if found is not None:
                eqns = [number for part in found.cells for number in part.eqns]
                cells.new(eqns, found.op, found.detail, found.major)


def single(cells: Cells, cell: Cell) -> Eqn | None:
    """The equation of a cell that has one, or None."""
    return cells.raw.eqns[cell.eqns[0]] if len(cell.eqns) == 1 else None


def is_scalar(cells: Cells, value: int) -> bool:
    """Whether a value is a literal or a constant of one element."""
    shown = cells.raw.of(value)
    return shown.kind in ("literal", "const") and math.prod(shown.shape) == 1


def is_scale(cells: Cells, cell: Cell) -> bool:
    """Whether a cell only scales, shifts by a constant, or changes the sign. The reciprocal of an array is no scale."""
    eqn = single(cells, cell)
    if eqn is None or eqn.prim not in ("mul", "div", "add", "sub", "neg", "copysign"):
        return False
    data = [value for value in eqn.ins if not is_scalar(cells, value)]
    if eqn.prim == "div" and not is_scalar(cells, eqn.ins[1]):
        return False
    return len(data) == 1 and cells.raw.weight_of(data[0]) is None


def divides_by(cells: Cells, cell: Cell, count: float) -> bool:
    """Whether a cell only divides by this number, or multiplies by its inverse."""
    eqn = single(cells, cell)
    if eqn is None or eqn.prim not in ("div", "mul") or len(eqn.ins) != 2:
        return False
    sides = eqn.ins[1:] if eqn.prim == "div" else eqn.ins
    known = [number(cells, value) for value in sides]
    wanted = count if eqn.prim == "div" else 1 / max(count, 1)
    return any(one is not None and math.isclose(one, wanted, rel_tol=1e-2) for one in known)


def number(cells: Cells, value: int) -> float | None:
    """A literal of one element. None for all other values."""
    shown = cells.raw.of(value)
    if shown.kind != "literal" or math.prod(shown.shape) != 1 or "key" in shown.dtype:
        return None
    try:
        return float(shown.literal)
    except (TypeError, ValueError):
        return None


def is_float(cells: Cells, cell: Cell) -> bool:
    """Whether the result of a cell is real and floating."""
    return cells.raw.values[cells.output(cell)].dtype.startswith(("float", "bfloat"))


def bias(cells: Cells, cell: Cell) -> tuple[Cell, ...]:
    """The addition of a parameter that follows a cell, if any. Its parts may be joined before."""
    user = cells.sole_user(cell)
    eqn = single(cells, user) if user is not None and user.op == "add" else None
    if user is None or eqn is None:
        return ()
    if any(cells.raw.weight_of(value) is not None for value in eqn.ins):
        return (user,)
    joined = next((found for value in eqn.ins if (found := joined_weights(cells, value, user)) is not None), None)
    return (joined, user) if joined is not None else ()


def joined_weights(cells: Cells, value: int, reader: Cell) -> Cell | None:
    """The cell that only joins parameters along an axis to this value, for one reader. Else None."""
    cell = cells.producer(value)
    eqn = single(cells, cell) if cell is not None else None
    if cell is None or eqn is None or eqn.prim != "concatenate" or cells.sole_user(cell) is not reader:
        return None
    return cell if all(cells.raw.weight_of(part) is not None for part in eqn.ins) else None


def tail(cells: Cells, cell: Cell, ops: frozenset[str]) -> tuple[Cell, ...]:
    """The chain of cells of these kinds, or changes of scale, that follows."""
    found: list[Cell] = []
    while (user := cells.sole_user(cell)) is not None and (user.op in ops or is_scale(cells, user)):
        found.append(user)
        cell = user
    return tuple(found)


def _same_scope(cells: Cells, a: Cell, b: Cell) -> bool:
    return cells.raw.eqns[a.eqns[0]].scope == cells.raw.eqns[b.eqns[0]].scope


def takes_scale(cells: Cells, cell: Cell, scale: Cell) -> bool:
    """Whether a change of scale may become part of a cell."""
    return cell.op not in COLLECTIVES and cell.op not in ("Flatten", "cond") and _same_scope(cells, cell, scale)


def by(sizes: Iterable[int]) -> str:
    """ "2x3" for (2, 3)."""
    return "x".join(map(str, sizes))


def axis_names(eqn: Eqn) -> str:
    """The axes of a collective: "data, model". Empty where it has none."""
    known = next((axes for name in ("axes", "axis_name") if (axes := eqn.params.get(name)) is not None), ())
    return ", ".join(map(str, known if isinstance(known, (tuple, list, frozenset)) else (known,)))
