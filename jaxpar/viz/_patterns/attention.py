"""Rules for softmax and attention, however they are written."""

from __future__ import annotations

from .._fold.cells import Cell, Cells
from .._fold.patterns import Fold, is_scale, single
from .._read.raw import Eqn
from .terms import is_convex, loose_ends, maker, owners, root

_MASKS = frozenset(("where", "select_n", "add", "sub", "mul", "clamp", "min", "max", "div"))
_UPDATES = frozenset(("dynamic_update_slice", "scatter", "Concat", "repeat", "dynamic_update_index_in_dim"))
_COMPARED = frozenset("eq ne lt le gt ge and or not iota select_n broadcast_in_dim convert_element_type".split())


def softmax(cells: Cells, cell: Cell) -> Fold | None:
    """Exponentials divided by their sum, with or without the largest subtracted before."""
    eqn = single(cells, cell)
    if eqn is None or eqn.prim not in ("div", "mul"):
        return None
    top, total = _quotient(cells, eqn)
    if top is None or total is None or top.prim != "exp" or total.prim != "reduce_sum":
        return None
    if root(cells, total.ins[0]) != top.outs[0] or not total.params["axes"]:
        return None
    found = [eqn, top, total, *_inverse(cells, eqn), *_shift(cells, top)]
    parts = owners(cells, found)
    if parts is None or len(loose_ends(cells, found)) != 1 or not is_convex(cells, found):
        return None
    return Fold(parts, "Softmax")


def _quotient(cells: Cells, eqn: Eqn) -> tuple[Eqn | None, Eqn | None]:
    """What makes the numerator and the denominator."""
    top, total = (maker(cells, value) for value in eqn.ins)
    if eqn.prim == "mul" and total is not None and total.prim == "integer_pow" and total.params["y"] == -1:
        total = maker(cells, total.ins[0])
    elif eqn.prim == "mul":
        total = None
    return top, total


def _inverse(cells: Cells, eqn: Eqn) -> list[Eqn]:
    """The equation `1 / sum`, where it is one of its own."""
    made = maker(cells, eqn.ins[1])
    return [made] if eqn.prim == "mul" and made is not None else []


def _shift(cells: Cells, top: Eqn) -> list[Eqn]:
    """The equations of `x - max(x)` below the exponential."""
    shifted = maker(cells, top.ins[0])
    if shifted is None or shifted.prim != "sub":
        return []
    largest = maker(cells, shifted.ins[1])
    floor = []
    if largest is not None and largest.prim == "max":
        floor, largest = [largest], next((made for v in largest.ins if (made := maker(cells, v)) is not None), None)
    if largest is None or largest.prim != "reduce_max" or root(cells, largest.ins[0]) != root(cells, shifted.ins[0]):
        return []
    return [shifted, *floor, largest]


def attention(cells: Cells, cell: Cell) -> Fold | None:
    """A product, scaled and masked, its softmax, and the product of that with the values."""
    above, scores = _chain(cells, cell, up=True)
    below, mixed = _chain(cells, cell, up=False)
    if scores is None or mixed is None or _reads_weights(cells, scores) or _reads_weights(cells, mixed):
        return None
    found = {part.id: part for part in (scores, *above, cell, *below, mixed)}
    for part in tuple(found.values()):
        _add_feeders(cells, part, found)
    parts = tuple(found.values())
    if not is_convex(cells, [eqn for part in parts for eqn in cells.eqns(part) if not eqn.view]):
        parts = (scores, *above, cell, *below, mixed)
    return Fold(parts, "Attention")


def cache(cells: Cells, cell: Cell) -> Fold | None:
    """The caches, repeated heads and masks that only a known attention function reads."""
    found = {cell.id: cell}
    _add_feeders(cells, cell, found)
    parts = tuple(found.values())
    convex = is_convex(cells, [eqn for part in parts for eqn in cells.eqns(part) if not eqn.view])
    return Fold(parts, cell.op, cell.detail) if len(parts) > 1 and convex else None


def _chain(cells: Cells, cell: Cell, *, up: bool) -> tuple[list[Cell], Cell | None]:
    """The scales and masks between a softmax and the matrix product before or after it, and that product."""
    found: list[Cell] = []
    for _ in range(10):
        step = _before(cells, cell) if up else cells.sole_user(cell)
        if step is None or (up and cells.sole_user(step) is not cell):
            break
        if step.op == "MatMul":
            return found, step
        masks = step.op in _MASKS or is_scale(cells, step) or step.op == "Dropout"
        if not masks and not (up and step.op in ("tanh", "Activation")):
            break
        found.append(step)
        cell = step
    return found, None


def _before(cells: Cells, cell: Cell) -> Cell | None:
    """The cell of the scores that a cell reads: the one with the most elements that only it reads."""
    values = [value for value in cells.data(cell) if cells.raw.values[value].dtype != "bool"]
    makers = {p.id: p for value in values if (p := cells.producer(value)) is not None}
    own = [part for part in makers.values() if cells.sole_user(part) is cell and part.op not in ("OneHot", "where")]
    masked = [part for part in makers.values() if cells.sole_user(part) is cell and part.op == "where"]
    scored = [part for part in masked if any(cells.raw.values[v].dtype != "bool" for v in cells.data(part))]
    return next((part for part in own if part.op == "MatMul"), next(iter([*own, *scored]), None))


def _reads_weights(cells: Cells, cell: Cell) -> bool:
    return any(
        eqn.prim == "dot_general" and any(cells.raw.weight_of(value) is not None for value in eqn.ins)
        for eqn in cells.eqns(cell)
    )


def _add_feeders(cells: Cells, part: Cell, found: dict[int, Cell]) -> None:
    """Add what only these cells read: caches that are updated, heads that are repeated, masks that are compared."""
    for value in cells.data(part):
        before = cells.producer(value)
        if before is None or before.id in found or before.major:
            continue
        compared = cells.prims(before) <= _COMPARED
        updated = before.op in _UPDATES or bool(cells.prims(before) & {"dynamic_update_slice"})
        position = part.op in ("le", "lt", "ge", "gt", "eq") and before.op in ("add", "sub")
        if (compared or updated or position) and all(user.id in found for user in cells.users(before)):
            found[before.id] = before
            _add_feeders(cells, before, found)
