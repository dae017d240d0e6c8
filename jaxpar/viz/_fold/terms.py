"""Questions that patterns ask: of cells, and of the equations that a value is computed by.

A question is of cells where it is about layers that are found already, and of equations where a layer is written out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from .._read.raw import Eqn
from .cells import COLLECTIVES, Cell, Cells


def single(cells: Cells, cell: Cell) -> Eqn | None:
    """The equation of a cell that has one, or None."""
    return cells.raw.eqns[cell.eqns[0]] if len(cell.eqns) == 1 else None


def is_scale(cells: Cells, cell: Cell) -> bool:
    """Whether a cell only scales, shifts by a constant, or changes the sign. The reciprocal of an array is no scale."""
    eqn = single(cells, cell)
    if eqn is None or eqn.prim not in ("mul", "div", "add", "sub", "neg", "copysign"):
        return False
    data = [value for value in eqn.ins if not (is_fixed(cells, value) and elements(cells, value) == 1)]
    if eqn.prim == "div" and eqn.ins[1] in data:
        return False
    return len(data) == 1 and cells.raw.weight_of(data[0]) is None


def divides_by(cells: Cells, cell: Cell, count: float) -> bool:
    """Whether a cell only divides by this number, or multiplies by its inverse."""
    eqn = single(cells, cell)
    if eqn is None or eqn.prim not in ("div", "mul") or len(eqn.ins) != 2:
        return False
    sides = eqn.ins[1:] if eqn.prim == "div" else eqn.ins
    factors = [number(cells, value) for value in sides]
    wanted = count if eqn.prim == "div" else 1 / max(count, 1)
    return any(factor is not None and math.isclose(factor, wanted, rel_tol=1e-2) for factor in factors)


def has_one_axis(cells: Cells, value: int) -> bool:
    """Whether a value is, or shows, an array with at most one axis that is longer than 1, as a scale and a bias have.

    Those of all layers may be stacked in one array, of which a loop reads a row in each pass.
    """
    shapes = (cells.raw.values[shown].shape for shown in cells.raw.shown(value))
    return any(max(shape, default=1) == math.prod(shape) for shape in shapes)


def number(cells: Cells, value: int) -> float | None:
    """The real number that a value is everywhere. None for all other values."""
    literal = constant(cells, value)
    return None if literal is None or literal.imag else literal.real


def constant(cells: Cells, value: int) -> complex | None:
    """The number that a value is everywhere. None for all other values."""
    known = cells.raw.of(value).number
    return None if known is None else complex(known)


def bias(cells: Cells, cell: Cell) -> tuple[Cell, ...]:
    """The addition of a parameter that follows a cell, if any. Its parts may be joined before."""
    user = cells.sole_user(cell)
    eqn = single(cells, user) if user is not None and user.op == "add" else None
    if user is None or eqn is None:
        return ()
    if any(cells.raw.weight_of(value) is not None for value in eqn.ins):
        return (user,)
    made = next((made for value in eqn.ins if (made := made_of_params(cells, value, user))), ())
    # A constant that went through layers, such as a time, is no bias: its layers are drawn.
    has_layers = any(cells.prims(cell) & {"dot_general", "conv_general_dilated"} for cell in made)
    return (*made, user) if made and not has_layers else ()


_ARITHMETIC = 24  # cells of the arithmetic of a param, above which it is a network of its own


def made_of_params(cells: Cells, value: int, reader: Cell) -> tuple[Cell, ...]:
    """The cells that make a value of params and constants alone, for one reader: an adapter, a normalized weight."""
    if cells.raw.root(value) in cells.of_data:
        return ()
    made: dict[int, Cell] = {}
    todo, has_params = [cells.producer(value)], False
    while todo:
        cell = todo.pop()
        if cell is None or cell.id in made:
            continue
        made[cell.id] = cell
        read = [cells.raw.values[root] for root in cells.inputs(cell)]
        params = {shown.shape for shown in read if shown.kind == "weight"}
        for shown in read:
            # What a loop carries has no producer. A gradient is that of a param only where the param is updated by it.
            is_carried = shown.kind == "op" and shown.producer is None
            is_gradient = shown.producer is not None and cells.raw.eqns[shown.producer].backward
            if shown.kind == "input" or is_carried or (is_gradient and shown.shape not in params):
                return ()
        if cell.op in COLLECTIVES or cell.op == "cond" or len(made) > _ARITHMETIC:
            return ()
        has_params |= bool(params)
        todo += cells.sources(cell)
    # Nothing else reads what they make, also not in another loop.
    for cell in made.values():
        outs = [out for eqn in cells.eqns(cell) for out in eqn.outs]
        if cells.is_backward(cell) or any(map(cells.is_returned, outs)) or not cells.are_in_one_loop(cell, reader):
            return ()
        if any(user.id not in made and user is not reader for user in cells.users(cell)):
            return ()
    return tuple(made.values()) if has_params else ()


def tail(cells: Cells, cell: Cell, ops: frozenset[str]) -> tuple[Cell, ...]:
    """The chain of cells of these kinds, or changes of scale, that follows."""
    chain: list[Cell] = []
    while (user := cells.sole_user(cell)) is not None and (user.op in ops or is_scale(cells, user)):
        if is_of_several(cells, user):
            break
        chain.append(user)
        cell = user
    return tuple(chain)


def is_of_several(cells: Cells, cell: Cell) -> bool:
    """Whether a sum or mean is one of several arrays, as of the loss and the metrics of a step."""
    return cell.op in ("sum", "mean", "neg") and len(set(cells.data(cell))) > 1


def takes_scale(cells: Cells, cell: Cell, scale: Cell) -> bool:
    """Whether a change of scale may become part of a cell."""
    if cell.op in COLLECTIVES or cell.op in ("Flatten", "cond"):
        return False
    return cells.raw.eqns[cell.eqns[0]].scope == cells.raw.eqns[scale.eqns[0]].scope


def by(sizes: Iterable[int]) -> str:
    """ "2x3" for (2, 3)."""
    return "x".join(map(str, sizes))


def maker(cells: Cells, value: int) -> Eqn | None:
    """The forward equation that computes a value, behind views. None for inputs, parameters and constants."""
    shown = cells.raw.of(value)
    eqn = None if shown.kind != "op" or shown.producer is None else cells.raw.eqns[shown.producer]
    return None if eqn is None or eqn.backward else eqn


def is_fixed(cells: Cells, value: int) -> bool:
    """Whether a value is a literal or a constant."""
    return cells.raw.of(value).kind in ("literal", "const")


def squared(cells: Cells, value: int) -> tuple[int, Eqn] | None:
    """The value that this is the square of, and the equation."""
    eqn = maker(cells, value)
    if eqn is None:
        return None
    twice = eqn.prim == "mul" and cells.raw.root(eqn.ins[0]) == cells.raw.root(eqn.ins[1])
    power = eqn.prim == "integer_pow" and eqn.params["y"] == 2
    power = power or (eqn.prim == "pow" and number(cells, eqn.ins[1]) == 2)
    return (cells.raw.root(eqn.ins[0]), eqn) if twice or power or eqn.prim == "square" else None


def elements(cells: Cells, value: int) -> int:
    """How many elements the array behind a value has."""
    return math.prod(cells.raw.of(value).shape)


def readers(cells: Cells, value: int) -> list[Eqn]:
    """The forward equations that read a value, behind views."""
    return [eqn for eqn in cells.consumers(value) if not (eqn.backward or eqn.residual)]


def owners(cells: Cells, eqns: Iterable[Eqn], layers: Collection[str] = ()) -> tuple[Cell, ...] | None:
    """The cells of these equations. None where one has other equations too, or is a layer of another kind."""
    numbers = {eqn.id for eqn in eqns}
    by_id: dict[int, Cell] = {}
    for n in sorted(numbers):
        cell = cells.owner[n]
        if cell is None:
            continue
        if (cell.major and cell.op not in layers) or not numbers.issuperset(cell.eqns):
            return None
        by_id[cell.id] = cell
    return tuple(by_id.values())


def is_convex(cells: Cells, eqns: Collection[Eqn]) -> bool:
    """Whether nothing outside of these equations reads one and is read by another."""
    inside = {eqn.id for eqn in eqns}
    outside: set[int] = set()
    made = {out for eqn in eqns for out in eqn.outs}
    for eqn in cells.raw.eqns[min(inside) : max(inside) + 1]:
        roots = {cells.raw.root(value) for value in eqn.ins}
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
