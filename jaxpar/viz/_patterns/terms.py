"""Expressions of equations: what patterns that are larger than two or three cells are read from."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from .._fold.cells import Cell, Cells
from .._fold.patterns import number
from .._read.raw import Eqn

MOVES = frozenset("convert_element_type broadcast_in_dim reshape squeeze transpose copy stop_gradient".split())


def maker(cells: Cells, value: int) -> Eqn | None:
    """The forward equation that computes a value, behind views. None for inputs, parameters and constants."""
    shown = cells.raw.of(value)
    eqn = None if shown.kind != "op" or shown.producer is None else cells.raw.eqns[shown.producer]
    return None if eqn is None or eqn.backward else eqn


def root(cells: Cells, value: int) -> int:
    """The value behind views."""
    return cells.raw.root(value)


def is_fixed(cells: Cells, value: int) -> bool:
    """Whether a value is a literal or a constant."""
    return cells.raw.of(value).kind in ("literal", "const")


def is_weight(cells: Cells, value: int, steps: int = 3) -> list[Eqn] | None:
    """The equations that make a value of parameters and constants only, as `1 + scale`. None for other values."""
    shown = cells.raw.of(value)
    if shown.kind in ("literal", "const", "weight"):
        return []
    eqn = maker(cells, value)
    if eqn is None or steps == 0 or eqn.prim not in ("add", "sub", "mul", "div", "neg", "exp", "integer_pow"):
        return None
    parts = [is_weight(cells, operand, steps - 1) for operand in eqn.ins]
    known = [part for part in parts if part is not None]
    return [*(eqn for part in known for eqn in part), eqn] if len(known) == len(parts) else None


def squared(cells: Cells, value: int) -> tuple[int, Eqn] | None:
    """The value that this is the square of, and the equation."""
    eqn = maker(cells, value)
    if eqn is None:
        return None
    twice = eqn.prim == "mul" and root(cells, eqn.ins[0]) == root(cells, eqn.ins[1])
    power = eqn.prim == "integer_pow" and eqn.params["y"] == 2
    power = power or (eqn.prim == "pow" and number(cells, eqn.ins[1]) == 2)
    return (root(cells, eqn.ins[0]), eqn) if twice or power or eqn.prim == "square" else None


def elements(cells: Cells, value: int) -> int:
    """How many elements the array behind a value has."""
    return math.prod(cells.raw.of(value).shape)


def readers(cells: Cells, value: int) -> list[Eqn]:
    """The forward equations that read a value, behind views."""
    return [eqn for eqn in cells.consumers(value) if not (eqn.backward or eqn.residual)]


def owners(cells: Cells, eqns: Iterable[Eqn], layers: Collection[str] = ()) -> tuple[Cell, ...] | None:
    """The cells of these equations. None where one has other equations too, or is a layer of another kind."""
    numbers = {eqn.id for eqn in eqns}
    found: dict[int, Cell] = {}
    for n in sorted(numbers):
        cell = cells.owner[n]
        if cell is None:
            continue
        if (cell.major and cell.op not in layers) or not numbers.issuperset(cell.eqns):
            return None
        found[cell.id] = cell
    return tuple(found.values())


def is_convex(cells: Cells, eqns: Collection[Eqn]) -> bool:
    """Whether nothing outside of these equations reads one and is read by another."""
    inside = {eqn.id for eqn in eqns}
    outside: set[int] = set()
    made = {out for eqn in eqns for out in eqn.outs}
    for eqn in cells.raw.eqns[min(inside) : max(inside) + 1]:
        roots = {root(cells, value) for value in eqn.ins}
        if eqn.id in inside:
            if roots & outside:
                return False
        elif not eqn.view and roots & (made | outside):
            outside.update(eqn.outs)
    return True


def loose_ends(cells: Cells, eqns: Collection[Eqn]) -> set[int]:
    """The values that these equations make and something else reads, or the function returns."""
    inside = {eqn.id for eqn in eqns}
    return {
        out
        for eqn in eqns
        for out in eqn.outs
        if cells.is_returned(out) or any(reader.id not in inside for reader in readers(cells, out))
    }
