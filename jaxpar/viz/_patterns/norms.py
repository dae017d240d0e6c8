"""The rule for normalization, however it is written: layer, RMS, group, instance, batch, and unit length.

It begins at the root. Above it is the mean of squares, of centred values or plain ones. Below it the same values are
divided by the root, and scaled and shifted by parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .._fold.cells import Cell, Cells
from .._fold.templates import Fold
from .._fold.terms import (
    elements,
    is_convex,
    is_fixed,
    is_weight,
    loose_ends,
    maker,
    number,
    owners,
    readers,
    root,
    squared,
)
from .._read.raw import Eqn

_ROOTS = ("rsqrt", "sqrt", "pow")
_STEPS = frozenset(("add", "sub", "max", "div", "mul", "select_n", "square", "integer_pow", "abs"))


@dataclass(slots=True)
class _Norm:
    """A normalization that is being found.

    Attributes:
        source: the value that is normalized, or -1.
        eqns: its equations so far.
        reduces: the reductions of squares.
        centred: whether the mean is subtracted.
        averaged: whether the sum of squares is divided by a number.
        running: whether its statistics are stored, not computed.
    """

    source: int = -1
    eqns: dict[int, Eqn] = field(default_factory=dict)
    reduces: list[Eqn] = field(default_factory=list)
    centred: bool = False
    averaged: bool = False
    running: bool = False

    def add(self, *eqns: Eqn) -> None:
        """Make equations part of it."""
        self.eqns |= {eqn.id: eqn for eqn in eqns}


def normalization(cells: Cells, cell: Cell) -> Fold | None:
    """A layer, RMS, group, instance or batch normalization, or a division by the length."""
    for eqn in () if cell.major else cells.eqns(cell):
        if eqn.prim in _ROOTS and not eqn.residual:
            found = _Norm()
            if _is_statistic(cells, eqn, found) and _apply(cells, eqn, found):
                return _fold(cells, found)
    return None


def _fold(cells: Cells, found: _Norm) -> Fold | None:
    eqns = list(found.eqns.values())
    parts = owners(cells, eqns)
    full = [out for out in loose_ends(cells, eqns) if elements(cells, out) >= elements(cells, found.source)]
    if parts is None or len(full) > 1 or not is_convex(cells, eqns):
        return None
    op, detail = _label(cells, found)
    return Fold(parts, op, detail)


def _is_statistic(cells: Cells, eqn: Eqn, found: _Norm) -> bool:
    """Whether an equation is the root of a mean of squares. Fills in what it finds."""
    if eqn.prim == "pow" and number(cells, eqn.ins[1]) not in (0.5, -0.5):
        return False
    found.add(eqn)
    todo, stored = [eqn.ins[0]], 0
    while todo and len(found.eqns) < 24:
        value = todo.pop()
        part = maker(cells, value)
        if is_fixed(cells, value):
            continue
        if part is None:
            stored += 1
        elif part.prim == "reduce_sum":
            if not _is_square(cells, part, found):
                return False
        elif part.prim in _STEPS:
            found.add(part)
            found.averaged |= part.prim in ("div", "mul") and any(number(cells, v) is not None for v in part.ins)
            todo += part.ins
        else:
            return False
    found.running = stored == 1 and not found.reduces
    return not todo and (found.running or (bool(found.reduces) and not stored))


def _is_square(cells: Cells, part: Eqn, found: _Norm) -> bool:
    """Whether a sum is of squares of the source, or of the source itself where its mean is squared later."""
    found.add(part)
    square = squared(cells, part.ins[0])
    value = root(cells, part.ins[0]) if square is None else square[0]
    if square is not None:
        found.add(square[1])
        found.reduces.append(part)
    else:
        found.centred = True
    absolute = maker(cells, value)
    if absolute is not None and absolute.prim in ("abs", "real", "conj"):
        found.add(absolute)
        value = root(cells, absolute.ins[0])
    value = _uncentred(cells, value, found)
    if found.source not in (-1, value):
        return False
    found.source = value
    return True


def _uncentred(cells: Cells, value: int, found: _Norm) -> int:
    """The x of `x - mean(x)`. Other values are returned as they are."""
    eqn = maker(cells, value)
    if eqn is None or eqn.prim != "sub":
        return value
    source = root(cells, eqn.ins[0])
    mean = _mean_of(cells, eqn.ins[1], source)
    if mean is None:
        return value
    found.add(eqn, *mean)
    found.centred = True
    return source


def _mean_of(cells: Cells, value: int, source: int) -> list[Eqn] | None:
    """The equations of a mean of the source. None for other values."""
    found: list[Eqn] = []
    eqn = maker(cells, value)
    while eqn is not None and eqn.prim in ("div", "mul") and len(found) < 3:
        found.append(eqn)
        value = next((v for v in eqn.ins if not is_fixed(cells, v)), eqn.ins[0])
        eqn = maker(cells, value)
    if eqn is None or eqn.prim != "reduce_sum" or root(cells, eqn.ins[0]) != source:
        return None
    return [*found, eqn]


def _apply(cells: Cells, eqn: Eqn, found: _Norm) -> bool:
    """Whether the source is divided by the root. Adds that, and the parameters that scale and shift."""
    value, is_full, shifts = eqn.outs[0], False, 0
    while not (is_full and cells.is_returned(value)):
        users = [user for user in readers(cells, value) if user.id not in found.eqns]
        if not users or (is_full and len(users) > 1):
            break
        step = max(users, key=lambda user: elements(cells, user.outs[0]))
        shift = step.prim in ("add", "sub")
        extra = _extra(cells, step, value, found, is_full)
        if extra is None or (shift and is_full and shifts):
            break
        shifts += shift and is_full
        found.add(step, *extra)
        is_full = is_full or _is_full(cells, step, found)
        value = step.outs[0]
    return is_full and (found.centred or not found.running)


def _extra(cells: Cells, step: Eqn, value: int, found: _Norm, is_full: bool) -> list[Eqn] | None:
    """The equations of the other operand of a step. None where the step is none of a normalization."""
    others = [other for other in step.ins if root(cells, other) != root(cells, value)]
    if step.prim == "integer_pow":
        return [] if step.params["y"] == -1 else None
    if step.prim not in ("mul", "div", "add", "sub") or len(others) != 1:
        return None
    if step.prim in ("add", "sub") and not is_full:
        return [] if is_fixed(cells, others[0]) else None
    return _small(cells, others[0], found) if is_full else _operand(cells, others[0], found)


def _is_full(cells: Cells, step: Eqn, found: _Norm) -> bool:
    full = elements(cells, step.outs[0]) >= elements(cells, found.source) > 0 if found.source != -1 else False
    operands = {root(cells, value) for value in step.ins}
    scaled = {e.outs[0] for e in found.eqns.values() if found.source in {root(cells, value) for value in e.ins}}
    return full and bool(operands & ({found.source} | _centres(cells, found) | scaled))


def _centres(cells: Cells, found: _Norm) -> set[int]:
    """The values `x - mean` among its equations."""
    return {
        eqn.outs[0]
        for eqn in found.eqns.values()
        if eqn.prim == "sub" and root(cells, eqn.ins[0]) == found.source and elements(cells, eqn.outs[0]) > 1
    }


def _operand(cells: Cells, value: int, found: _Norm) -> list[Eqn] | None:
    """The equations of what meets the root: the source, centred or scaled, or a parameter. Else None."""
    own, eqn = is_weight(cells, value), maker(cells, value)
    if own is not None:
        return own
    at = root(cells, value)
    if found.running and found.source == -1:
        return _stored(cells, at, found)
    if at == found.source or at in _centres(cells, found):
        return []
    if eqn is not None and eqn.prim == "sub" and root(cells, eqn.ins[0]) == found.source:
        mean = _mean_of(cells, eqn.ins[1], found.source)
        found.centred |= mean is not None
        return None if mean is None else [eqn, *mean]
    if eqn is not None and eqn.prim == "mul" and found.source in {root(cells, operand) for operand in eqn.ins}:
        scales = [is_weight(cells, operand) for operand in eqn.ins if root(cells, operand) != found.source]
        return [eqn, *scales[0]] if len(scales) == 1 and scales[0] is not None else None
    return None


def _stored(cells: Cells, at: int, found: _Norm) -> list[Eqn]:
    """The source, where its statistics are stored: `x - mean`, or `x` where the shift has the mean."""
    eqn = maker(cells, at)
    if eqn is not None and eqn.prim == "sub" and cells.raw.of(eqn.ins[1]).kind in ("weight", "input"):
        found.source, found.centred = root(cells, eqn.ins[0]), True
        return [eqn]
    found.source = at
    return []


def _small(cells: Cells, value: int, found: _Norm, steps: int = 4) -> list[Eqn] | None:
    """The equations of a scale or a shift: of parameters, and of `mean * scale` where the source is not centred."""
    own = is_weight(cells, value)
    if own is not None:
        return own
    eqn = maker(cells, value)
    if eqn is None or steps == 0 or elements(cells, value) >= elements(cells, found.source):
        return None
    if eqn.id in found.eqns:
        return []
    mean = _mean_of(cells, value, found.source)
    if mean is not None:
        return mean
    parts = [_small(cells, operand, found, steps - 1) for operand in eqn.ins]
    if eqn.prim not in ("add", "sub", "mul", "neg") or any(part is None for part in parts):
        return None
    found.centred = True
    return [eqn, *(one for part in parts if part is not None for one in part)]


def _label(cells: Cells, found: _Norm) -> tuple[str, str]:
    """The kind of normalization, by the axes that are reduced."""
    if found.running:
        return ("Normalization" if cells.raw.values[found.source].kind == "input" else "BatchNorm"), ""
    reduced = found.reduces[0]
    shape, axes = reduced.in_shapes[0], set(reduced.params["axes"])
    rank = len(shape)
    kept = [axis for axis in range(rank) if axis not in axes and shape[axis] != 1]
    weights = [cells.raw.weight_of(value) for eqn in found.eqns.values() for value in eqn.ins]
    if len(axes) == rank and all(weight is None for weight in weights):  # a vector of rewards
        return "Normalization", "" if found.centred or found.averaged else "unit length"
    if not found.centred:
        mean = found.averaged and axes == {rank - 1}
        return ("RMSNorm", "") if mean else ("Normalization", "" if found.averaged else "unit length")
    split = math.prod(shape) == elements(cells, found.source) and rank > len(cells.raw.of(found.source).shape)
    if split and kept:
        return "GroupNorm", f"{shape[kept[-1]]} groups"
    if axes == {rank - 1} or (len(axes) > 1 and axes == set(range(min(axes), rank)) and 0 not in axes and rank != 4):
        return "LayerNorm", ""
    if rank == 4 and axes == {1, 2, 3}:
        return "LayerNorm", ""
    if 0 in axes and len(axes) == rank - 1:
        return "BatchNorm", ""
    return ("InstanceNorm", "") if 0 not in axes and rank > 2 else ("Normalization", "")
