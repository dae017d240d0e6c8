"""Rules for what chooses: the routing of a mixture of experts, and a selective scan."""

from __future__ import annotations

from .._fold.cells import Cell, Cells
from .._fold.patterns import Fold
from .terms import is_convex

_LAYERS = frozenset(("MatMul", "FullyConnected", "Convolution", "Loss", "Attention", "Embedding", "Softmax"))
_DECAYS = frozenset("mul exp neg add sub div square convert_element_type".split())


def routing(cells: Cells, cell: Cell) -> Fold | None:
    """The largest scores of each row, and what is made of them for the products that send rows to experts."""
    tops = [eqn for eqn in cells.eqns(cell) if eqn.prim == "top_k"]
    if not tops or cell.major:
        return None
    rows = tops[0].in_shapes[0]
    sources = {before.id for value in cells.data(cell) if (before := cells.producer(value)) is not None}
    found = {cell.id: cell}
    for _ in range(40):
        users = {user.id: user for part in found.values() for user in cells.users(part) if user.id not in found}
        new = next((user for user in users.values() if _is_of_rows(cells, user, found, sources, rows[0])), None)
        if new is None:
            break
        found[new.id] = new
    parts = tuple(found.values())
    sends = any(user.op in ("MatMul", "FullyConnected") for part in parts for user in cells.users(part))
    chosen = any(cells.prims(part) & {"eq", "scatter"} for part in parts)
    eqns = [eqn for part in parts for eqn in cells.eqns(part) if not eqn.view]
    if not (sends and chosen and len(rows) >= 2 and is_convex(cells, eqns)):
        return None
    return Fold(parts, "Routing", f"top {tops[0].params['k']} of {rows[-1]}")


def _is_of_rows(cells: Cells, user: Cell, found: dict[int, Cell], sources: set[int], rows: int) -> bool:
    """Whether a cell is a small step that reads only these and the scores, and keeps the rows."""
    if user.op in _LAYERS or user.op == "slice" or (user.major and user.op not in ("Activation", "OneHot")):
        return False
    makers = [cells.producer(value) for value in cells.data(user)]
    known = all(before is not None and (before.id in found or before.id in sources) for before in makers)
    shape = cells.raw.values[cells.output(user)].shape
    return known and bool(shape) and shape[0] % rows == 0 and not cells.is_result(user)


def selective_scan(cells: Cells, cell: Cell) -> Fold | None:
    """An associative scan with its decay, an exponential, what it adds, and the product that reads the state."""
    found = {cell.id: cell}
    todo = [cell]
    while todo:
        for value in cells.data(todo.pop()):
            before = cells.producer(value)
            if before is None or before.id in found or before.major or not cells.prims(before) <= _DECAYS:
                continue
            if all(user.id in found for user in cells.users(before)) and not cells.is_result(before):
                found[before.id] = before
                todo.append(before)
    if not any("exp" in cells.prims(part) for part in found.values() if part is not cell):
        return None
    product = cells.sole_user(cell)
    total = cells.sole_user(product) if product is not None and product.op == "mul" else None
    if product is not None and total is not None and total.op == "sum":
        found |= {product.id: product, total.id: total}
    elif product is not None and product.op == "MatMul":
        found[product.id] = product
    parts = tuple(found.values())
    eqns = [eqn for part in parts for eqn in cells.eqns(part) if not eqn.view]
    return Fold(parts, "SelectiveScan") if is_convex(cells, eqns) else None
