"""The rule for rotary position embeddings: pairs of one array's numbers, turned by angles."""

from __future__ import annotations

from dataclasses import dataclass, field

from .._fold.cells import Cell, Cells
from .._fold.patterns import Fold
from .._read.raw import Eqn
from .terms import elements, is_convex, is_fixed, loose_ends, maker, owners, readers, root

_ARRAYS = ("concatenate", "stack")
_JOINS = (*_ARRAYS, "add")


@dataclass(slots=True)
class _Turn:
    """What a rotation is made of.

    Attributes:
        eqns: its equations.
        parts: the slices of the array that is turned, and their source.
        tables: the sines and cosines, behind their slices.
        signs: how often a product is subtracted or its sign changed.
        products: of a part of the array and a table.
    """

    eqns: dict[int, Eqn] = field(default_factory=dict)
    parts: dict[int, int] = field(default_factory=dict)
    tables: set[int] = field(default_factory=set)
    signs: int = 0
    products: int = 0


def rotary(cells: Cells, cell: Cell) -> Fold | None:
    """Halves, or neighbours, of the last axis turned by sines and cosines; or complex numbers by others."""
    ends = [eqn for eqn in cells.eqns(cell) if eqn.prim in _JOINS]
    if cell.major or not ends:
        return None
    end, turn = ends[-1], _Turn()
    if not _read(cells, end.outs[0], turn, 0) or not _is_rotation(cells, end, turn):
        return None
    eqns = list(turn.eqns.values())
    eqns += [eqn for eqn in cells.eqns(cell) if eqn.id not in turn.eqns and eqn.view]
    _add_flat_end(cells, eqns)
    parts = owners(cells, eqns)
    if parts is None or len(loose_ends(cells, eqns)) != 1 or not is_convex(cells, eqns):
        return None
    return Fold(parts, "RoPE")


def _add_flat_end(cells: Cells, eqns: list[Eqn]) -> None:
    """Add the join of real and imaginary parts."""
    while len(users := {user.id: user for eqn in eqns[-1:] for user in readers(cells, eqn.outs[0])}) == 1:
        user = next(iter(users.values()))
        if user.prim not in _ARRAYS or user in eqns:
            return
        eqns.append(user)


def _is_rotation(cells: Cells, end: Eqn, turn: _Turn) -> bool:
    """Whether parts of one array meet tables as in a rotation."""
    sources = set(turn.parts.values())
    if len(sources) != 1 or not turn.tables or elements(cells, end.outs[0]) != elements(cells, next(iter(sources))):
        return False
    joined = any(eqn.prim in _ARRAYS for eqn in turn.eqns.values())
    is_complex = any(eqn.prim in ("complex", "imag") for eqn in turn.eqns.values())
    if is_complex:
        return turn.products == 1 and len(turn.tables) == 1
    return joined and turn.signs == 1 and turn.products in (2, 4) and 2 <= len(turn.tables) <= 4


def _read(cells: Cells, value: int, turn: _Turn, depth: int) -> bool:
    """Collect the expression of a value. False where it is of no rotation."""
    eqn = maker(cells, value)
    if eqn is None or depth > 8 or len(turn.eqns) > 24:
        return False
    if eqn.id in turn.eqns:
        return True
    if eqn.prim in ("add", "sub", "neg", *_ARRAYS, "real", "imag"):
        turn.signs += eqn.prim in ("sub", "neg")
        turn.eqns[eqn.id] = eqn
        return all(_read(cells, operand, turn, depth + 1) for operand in eqn.ins)
    if eqn.prim == "mul" and len(eqn.ins) == 2:
        turn.eqns[eqn.id] = eqn
        return _is_product(cells, eqn, turn, depth)
    return _is_part(cells, eqn, turn)


def _is_product(cells: Cells, eqn: Eqn, turn: _Turn, depth: int) -> bool:
    """Whether one operand is a part of the array, and the other a table."""
    left, right = eqn.ins
    if elements(cells, left) < elements(cells, right) or (_is_table(cells, left) and not _is_table(cells, right)):
        left, right = right, left
    if not _is_table(cells, right):
        return False
    turn.products += 1
    turn.tables.add(root(cells, right))
    _add_slices(cells, right, turn)
    made = maker(cells, left)
    if made is not None and made.prim == "add" and "complex" in cells.raw.values[made.outs[0]].dtype:
        return _is_complex(cells, made, turn)
    if made is not None and made.prim in (*_ARRAYS, "neg", "complex"):
        turn.eqns[made.id] = made
        turn.signs += made.prim == "neg"
        return all(_read(cells, operand, turn, depth + 1) for operand in made.ins)
    if made is not None and made.prim in ("slice", "split", "gather"):
        return _is_part(cells, made, turn)
    turn.parts[root(cells, left)] = root(cells, left)
    return True


def _is_complex(cells: Cells, eqn: Eqn, turn: _Turn) -> bool:
    """Whether a sum is `real + 1j * imaginary`, of parts of the array."""
    turn.eqns[eqn.id] = eqn
    for operand in eqn.ins:
        made = maker(cells, operand)
        if made is not None and made.prim == "mul" and any(is_fixed(cells, value) for value in made.ins):
            turn.eqns[made.id] = made
            made = next((inner for value in made.ins if (inner := maker(cells, value)) is not None), None)
        if made is None or not _is_part(cells, made, turn):
            return False
    return True


def _is_table(cells: Cells, value: int) -> bool:
    """Whether a value may be sines and cosines: constants, parameters, or what is computed from them or from ids."""
    todo, steps = [root(cells, value)], 0
    while todo:
        at, steps = todo.pop(), steps + 1
        shown = cells.raw.values[at]
        eqn = maker(cells, at)
        if steps > 24 or (eqn is None and shown.kind == "input" and shown.dtype.startswith(("float", "bfloat"))):
            return steps == 1 and shown.kind == "input" and elements(cells, value) < 1 << 40
        if eqn is not None:
            if eqn.prim in ("cos", "sin", "exp"):
                return True
            if eqn.prim in ("dot_general", "conv_general_dilated", "reduce_sum", "rsqrt"):
                return False
            todo += [root(cells, operand) for operand in eqn.ins if eqn.prim != "gather" or operand == eqn.ins[0]]
    return True


def _add_slices(cells: Cells, value: int, turn: _Turn) -> None:
    """Add what takes a table apart, where only this does so."""
    made = maker(cells, value)
    while made is not None and made.prim in ("slice", *_ARRAYS) and len(readers(cells, made.outs[0])) == 1:
        turn.eqns[made.id] = made
        made = maker(cells, made.ins[0]) if made.prim == "slice" else None


def _is_part(cells: Cells, eqn: Eqn, turn: _Turn) -> bool:
    """Whether an equation takes a part of the last axis of the array."""
    if eqn.prim not in ("slice", "split", "gather") or elements(cells, eqn.outs[0]) * 2 != elements(cells, eqn.ins[0]):
        return False
    if eqn.in_shapes[0][:-1] != cells.raw.values[eqn.outs[0]].shape[: len(eqn.in_shapes[0]) - 1]:
        return False
    turn.eqns[eqn.id] = eqn
    turn.parts[eqn.outs[0]] = root(cells, eqn.ins[0])
    return True
