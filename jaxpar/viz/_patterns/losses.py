"""Rules for losses: means, squared errors, cross-entropy."""

from __future__ import annotations

import math

from .._fold.cells import Cell, Cells
from .._fold.patterns import Fold, divides_by, is_scale, single, tail

_REDUCTIONS = frozenset(("sum", "mean", "neg"))
_PICKS = frozenset("take_along_axis take gather getitem rewriting_take mul where sum mean neg squeeze".split())
_MEANS = ("mean", "sum", "pmean", "Pooling")
_LABELS = ("OneHot", "eq", "neg", "arange", "iota")


def mean(cells: Cells, cell: Cell) -> Fold | None:
    """A sum divided by the number of its terms."""
    user, eqn = cells.sole_user(cell), single(cells, cell)
    if user is None or eqn is None or eqn.prim != "reduce_sum":
        return None
    if not divides_by(cells, user, math.prod(eqn.in_shapes[0]) / max(1, math.prod(eqn.out_shape))):
        return None
    return Fold((cell, user), "mean", "", major=False)


def squared_error(cells: Cells, cell: Cell) -> Fold | None:
    """A difference, its square, and the sum or mean of that. A variance is none, nor are distances of pairs."""
    square = cells.sole_user(cell)
    eqn = single(cells, square) if square is not None else None
    if square is None or eqn is None or single(cells, cell) is None or len(cells.data(cell)) < 2:
        return None
    squares = eqn.prim == "square" or (eqn.prim == "integer_pow" and eqn.params["y"] == 2)
    squares = squares or (eqn.prim == "mul" and cells.raw.root(eqn.ins[0]) == cells.raw.root(eqn.ins[1]))
    rest = tail(cells, square, _REDUCTIONS)
    if not squares or not any(part.op in _REDUCTIONS for part in rest) or _centres(cells, cell):
        return None
    if len(cells.raw.values[cells.output(rest[-1])].shape) > 1:
        return None
    return Fold((cell, square, *rest), "Loss", "squared error")


def _centres(cells: Cells, cell: Cell) -> bool:
    """Whether a difference is that of a value and its own mean."""
    operands = cells.data(cell)
    means = [below for value in operands if (below := cells.producer(value)) is not None and below.op in _MEANS]
    return any(value in operands for below in means for value in cells.data(below))


def cross_entropy(cells: Cells, cell: Cell) -> Fold | None:
    """A log-softmax, the picked label, the mean, and what prepares the labels."""
    found = [cell]
    while (user := cells.sole_user(found[-1])) is not None:
        if user.op not in _PICKS and not is_scale(cells, user):
            break
        found.append(user)
    while len(found) > 1 and not _reduces(cells, found[-1]) and not is_scale(cells, found[-1]):
        found.pop()
    if not any(_reduces(cells, part) for part in found[1:]) or not _picks(cells, found):
        return None
    for part in tuple(found):
        for value in cells.data(part):
            label = cells.producer(value)
            if label is not None and label not in found and label.op in _LABELS:
                found += [label] if cells.sole_user(label) is not None else []
    return Fold(tuple(found), "Loss", "softmax cross-entropy")


def _picks(cells: Cells, found: list[Cell]) -> bool:
    """Whether labels choose among the logits. An entropy weighs them by themselves."""
    logits = set(cells.data(found[0]))
    for part in found[1:]:
        if "gather" in cells.prims(part):
            return True
        if part.op == "mul" and not is_scale(cells, part):
            others = [cells.producer(value) for value in cells.data(part)]
            return not any(o is not None and o not in found and logits & set(cells.data(o)) for o in others)
    return False


def _reduces(cells: Cells, cell: Cell) -> bool:
    return bool(cells.prims(cell) & {"gather", "reduce_sum"})


def reduction(cells: Cells, cell: Cell) -> Fold | None:
    """The sum or mean of a loss."""
    rest = tail(cells, cell, _REDUCTIONS)
    return Fold((cell, *rest), "Loss", cell.detail) if rest else None
