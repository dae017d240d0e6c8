"""The rule for normalization, however it is written: layer, RMS, group, instance, batch, and unit length.

It begins at the root. Above it is the mean of squares of a source, centred or plain, or a stored variance. Below it the
source is divided by the root, and scaled and shifted by parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .._read.raw import Eqn
from .cells import Cell, Cells
from .templates import Fold
from .terms import elements, is_convex, is_fixed, loose_ends, maker, number, owners, readers, root, squared

_ROOTS = ("rsqrt", "sqrt", "pow")
_STEPS = frozenset("add sub max div mul neg abs real conj select_n square integer_pow exp reduce_sum".split())
_MOST, _DEEPEST = 24, 12  # steps of a statistic, and between it and its source
_Eqns = dict[int, Eqn]


@dataclass(slots=True)
class _Norm:
    """A normalization that is being found."""

    source: int  # the value that is normalized. -1 for stored statistics, until it is found.
    eqns: _Eqns
    squares: Eqn | None  # the sum of squares. None for stored statistics.
    averaged: bool  # whether the sum of squares is divided by a number

    @property
    def is_centred(self) -> bool:
        """Whether the mean is subtracted: another sum than that of squares, or a stored one."""
        prims = [eqn.prim for eqn in self.eqns.values()]
        return "sub" in prims or "neg" in prims if self.squares is None else prims.count("reduce_sum") > 1


def normalization(cells: Cells, cell: Cell) -> Fold | None:
    """A layer, RMS, group, instance or batch normalization, or a division by the length."""
    for eqn in () if cell.major else cells.eqns(cell):
        if eqn.prim in _ROOTS and not eqn.residual:
            norm = _statistic(cells, eqn)
            if norm is not None and _divides(cells, eqn, norm):
                return _fold(cells, norm)
    return None


def _fold(cells: Cells, norm: _Norm) -> Fold | None:
    eqns = list(norm.eqns.values())
    members = owners(cells, eqns)
    full = [out for out in loose_ends(cells, eqns) if elements(cells, out) >= elements(cells, norm.source)]
    if members is None or len(full) > 1 or not is_convex(cells, eqns):
        return None
    return Fold(members, *_label(cells, norm))


def _statistic(cells: Cells, eqn: Eqn) -> _Norm | None:
    """What is above a root: a mean of squares, or one stored array. None for something else."""
    if eqn.prim == "pow" and number(cells, eqn.ins[1]) not in (0.5, -0.5):
        return None
    # Upwards from the root, through what a variance is made of, as far as the sums and what is given.
    sums, stored, seen, todo = list[Eqn](), set[int](), set[int](), [eqn.ins[0]]
    while todo:
        value = todo.pop()
        step = maker(cells, value)
        if step is None and not is_fixed(cells, value):
            stored.add(root(cells, value))
        elif step is not None and step.id not in seen:
            seen.add(step.id)
            if step.prim not in _STEPS or len(seen) > _MOST:
                return None
            sums += [step] if step.prim == "reduce_sum" else []
            todo += step.ins if step.prim != "reduce_sum" else ()
    # Where there are sums, one is of squares, all are of one array, and nothing else is read.
    squares = next((step for step in sums if squared(cells, step.ins[0]) is not None), None)
    sources = {_source(cells, step) for step in sums} or stored
    if len(sources) != 1 or (sums and (stored or squares is None)):
        return None
    (source,) = sources
    above = _made_of(cells, eqn.ins[0], source, {})
    if above is None:
        return None
    divided = [step for step in above.values() if step.prim in ("div", "mul")]
    averaged = any(number(cells, value) is not None for step in divided for value in step.ins)
    return _Norm(-1 if squares is None else source, {eqn.id: eqn, **above}, squares, averaged)


def _source(cells: Cells, squares: Eqn) -> int:
    """The array whose squares are summed, before its mean was subtracted."""
    square = squared(cells, squares.ins[0])
    value = root(cells, squares.ins[0]) if square is None else square[0]
    eqn = maker(cells, value)
    if eqn is not None and eqn.prim in ("abs", "real", "conj"):
        value = root(cells, eqn.ins[0])
        eqn = maker(cells, value)
    if eqn is not None and eqn.prim == "sub":
        mean = _made_of(cells, eqn.ins[1], root(cells, eqn.ins[0]), {})
        if mean is not None and any(step.prim == "reduce_sum" for step in mean.values()):
            return root(cells, eqn.ins[0])
    return value


def _made_of(cells: Cells, value: int, source: int, left_out: _Eqns, steps: int = _DEEPEST) -> _Eqns | None:
    """The equations, but for known ones, that make a value of a source, parameters and constants. None for others."""
    if root(cells, value) == source or cells.raw.of(value).kind in ("literal", "const", "weight"):
        return {}
    eqn = maker(cells, value)
    if eqn is not None and eqn.id in left_out:
        return {}
    if eqn is None or steps == 0 or eqn.prim not in _STEPS:
        return None
    made = {eqn.id: eqn}
    for operand in eqn.ins:
        of_operand = _made_of(cells, operand, source, left_out | made, steps - 1)
        if of_operand is None:
            return None
        made |= of_operand
    return made


def _divides(cells: Cells, eqn: Eqn, norm: _Norm) -> bool:
    """Whether the source is divided by the root. Adds that, and the parameters that scale and shift."""
    # Downwards from the root, always along the largest result. Before it meets the source, only constants are added.
    # Then it may be scaled by parameters, and shifted once.
    value, is_full, shifts = eqn.outs[0], False, 0
    while not (is_full and cells.is_returned(value)):
        users = [user for user in readers(cells, value) if user.id not in norm.eqns]
        if not users or (is_full and len(users) > 1):
            break
        step = max(users, key=lambda user: elements(cells, user.outs[0]))
        operands = [other for other in step.ins if root(cells, other) != root(cells, value)]
        shift = step.prim in ("add", "sub")
        inverted = step.prim == "integer_pow" and step.params["y"] == -1
        extra, is_whole = (_Eqns(), False) if inverted else _other(cells, step, operands, norm)
        if extra is None or (is_full and is_whole):
            break
        if shift and (shifts if is_full else not is_fixed(cells, operands[0])):
            break
        shifts += shift and is_full
        norm.eqns |= {step.id: step, **extra}
        is_full, value = is_full or is_whole, step.outs[0]
    return is_full and (norm.squares is not None or norm.is_centred)


def _other(cells: Cells, step: Eqn, operands: list[int], norm: _Norm) -> tuple[_Eqns | None, bool]:
    """The equations of what a step reads besides, None where it is something else, and whether it is the source."""
    if step.prim not in ("mul", "div", "add", "sub") or len(operands) != 1:
        return None, False
    value = operands[0]
    eqn, own_eqns = maker(cells, value), _made_of(cells, value, -1, {})
    reads = [value, *(operand for made in (own_eqns or {}).values() for operand in made.ins)]
    if own_eqns is not None and norm.source not in [root(cells, each) for each in reads]:
        return own_eqns, False
    if norm.source == -1:  # the first array that meets what is stored, less its stored mean
        centred = eqn is not None and eqn.prim == "sub" and cells.raw.of(eqn.ins[1]).kind in ("weight", "input")
        norm.source = root(cells, eqn.ins[0] if eqn is not None and centred else value)
        return ({eqn.id: eqn} if eqn is not None and centred else {}), True
    is_whole = elements(cells, value) >= elements(cells, norm.source)
    if is_whole and root(cells, value) != norm.source and (eqn is None or not _shows(cells, eqn, norm.source)):
        return None, True
    return _made_of(cells, value, norm.source, norm.eqns), is_whole


def _shows(cells: Cells, eqn: Eqn, source: int) -> bool:
    """Whether an equation is `source - mean`, or `source * scale` with a parameter."""
    operands = [operand for operand in eqn.ins if root(cells, operand) != source]
    if eqn.prim == "mul":
        return len(operands) == 1 and _made_of(cells, operands[0], -1, {}) is not None
    return eqn.prim == "sub" and root(cells, eqn.ins[0]) == source


def _label(cells: Cells, norm: _Norm) -> tuple[str, str]:
    """The kind of normalization, by the axes that are reduced."""
    if norm.squares is None:
        return ("Normalization" if cells.raw.values[norm.source].kind == "input" else "BatchNorm"), ""
    shape, axes = norm.squares.in_shapes[0], set(norm.squares.params["axes"])
    rank = len(shape)
    kept = [axis for axis in range(rank) if axis not in axes and shape[axis] != 1]
    weights = [cells.raw.weight_of(value) for eqn in norm.eqns.values() for value in eqn.ins]
    plain = "" if norm.is_centred or norm.averaged else "unit length"
    if len(axes) == rank and all(weight is None for weight in weights):  # a vector of rewards
        return "Normalization", plain
    if not norm.is_centred:
        return ("RMSNorm", "") if norm.averaged and axes == {rank - 1} else ("Normalization", plain)
    if kept and math.prod(shape) == elements(cells, norm.source) and rank > len(cells.raw.of(norm.source).shape):
        return "GroupNorm", f"{shape[kept[-1]]} groups"
    if axes in ({rank - 1}, set(range(1, rank))):
        return "LayerNorm", ""
    if 0 in axes and len(axes) == rank - 1:
        return "BatchNorm", ""
    return ("InstanceNorm", "") if 0 not in axes and rank > 2 else ("Normalization", "")
