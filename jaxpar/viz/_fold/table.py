"""The second fold: patterns of cells that people know as one layer. The rules are a table to add to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .._read.jaxpr import Eqn
from .cells import Cell, Cells


@dataclass(frozen=True, slots=True)
class Fold:
    """What a rule found: these cells are one layer."""

    cells: tuple[Cell, ...]
    op: str
    detail: str = ""
    major: bool = True


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern.

    Attributes:
        name: for people.
        ops: the cells it is tried on, by their `op`; empty for all.
        match: called as `match(cells, cell)`; returns a `Fold` that holds the cell, or None.
    """

    name: str
    ops: frozenset[str]
    match: Callable[[Cells, Cell], Fold | None]


def fold_patterns(cells: Cells, rules: Iterable[Rule]) -> None:
    """Apply each rule to the forward cells, in the order of the table."""
    for rule in rules:
        for cell in list(cells):
            if cell.id not in cells.cells or (rule.ops and cell.op not in rule.ops):
                continue
            found = rule.match(cells, cell)
            if found is not None:
                eqns = [number for part in found.cells for number in part.eqns]
                cells.new(eqns, found.op, found.detail, found.major)


# What rules look at.


def _single(cells: Cells, cell: Cell) -> Eqn | None:
    return cells.raw.eqns[cell.eqns[0]] if len(cell.eqns) == 1 else None


def _is_scalar(cells: Cells, value: int) -> bool:
    """A literal or a constant of one element."""
    shown = cells.raw.of(value)
    return shown.kind in ("literal", "const") and math.prod(shown.shape) == 1


def _is_scale(cells: Cells, cell: Cell) -> bool:
    """One step that scales or shifts by a constant, or changes the sign."""
    eqn = _single(cells, cell)
    if eqn is None or eqn.prim not in ("mul", "div", "add", "sub", "neg", "copysign"):
        return False
    data = [value for value in eqn.ins if not _is_scalar(cells, value)]
    return len(data) == 1 and cells.raw.weight_of(data[0]) is None


def _same_scope(cells: Cells, a: Cell, b: Cell) -> bool:
    return cells.raw.eqns[a.eqns[0]].scope == cells.raw.eqns[b.eqns[0]].scope


def _bias(cells: Cells, cell: Cell) -> tuple[Cell, ...]:
    """The addition of a parameter that follows, if it does."""
    user = cells.sole_user(cell)
    eqn = _single(cells, user) if user is not None and user.op == "add" else None
    if user is None or eqn is None:
        return ()
    return (user,) if any(cells.raw.weight_of(value) is not None for value in eqn.ins) else ()


def _tail(cells: Cells, cell: Cell, ops: frozenset[str]) -> tuple[Cell, ...]:
    """The cells that follow, each the only reader of the one before: of these ops, or a change of scale."""
    found: list[Cell] = []
    while (user := cells.sole_user(cell)) is not None and (user.op in ops or _is_scale(cells, user)):
        found.append(user)
        cell = user
    return tuple(found)


# The rules.


def _convolution(cells: Cells, cell: Cell) -> Fold | None:
    eqn = _single(cells, cell)
    if eqn is None:
        return None
    numbers = eqn.params["dimension_numbers"]
    kernel_shape = eqn.in_shapes[1]
    kernel = [kernel_shape[axis] for axis in numbers.rhs_spec[2:]]
    dilated = any(step > 1 for step in eqn.params["lhs_dilation"])
    strides = eqn.params["lhs_dilation"] if dilated else eqn.params["window_strides"]
    detail = f"{_by(kernel)}/{_stride(strides)}, {kernel_shape[numbers.rhs_spec[0]]}"
    groups = eqn.params["feature_group_count"]
    detail += f", {groups} groups" if groups > 1 else ""
    return Fold((cell, *_bias(cells, cell)), "Deconvolution" if dilated else "Convolution", detail)


def _fully_connected(cells: Cells, cell: Cell) -> Fold | None:
    eqn = _single(cells, cell)
    if eqn is None:
        return None
    weights = [cells.raw.weight_of(value) is not None for value in eqn.ins]
    if sum(weights) != 1:
        return Fold((cell,), "MatMul")
    side = weights.index(True)
    contracted, batched = eqn.params["dimension_numbers"]
    fixed = {*contracted[side], *batched[side]}
    features = math.prod(d for axis, d in enumerate(eqn.in_shapes[side]) if axis not in fixed)
    return Fold((cell, *_bias(cells, cell)), "FullyConnected", str(features))


def _embedding(cells: Cells, cell: Cell) -> Fold | None:
    for eqn in cells.eqns(cell):
        table = cells.raw.weight_of(eqn.ins[0]) if eqn.prim == "gather" else None
        if table is not None:
            shape = cells.raw.values[table].shape
            return Fold((cell,), "Embedding", _by(shape))
    return None


def _window_pooling(cells: Cells, cell: Cell) -> Fold | None:
    windows = [eqn for eqn in cells.eqns(cell) if eqn.prim.startswith("reduce_window")]
    if not windows:
        return None
    eqn = windows[0]
    kind = {"reduce_window_max": "max", "reduce_window_min": "min"}.get(eqn.prim, "sum")
    tail: tuple[Cell, ...] = ()
    if kind == "sum":
        tail = _divided(cells, cell)
        kind = "avg" if tail or "div" in cells.prims(cell) else kind
    window, stride = eqn.params["window_dimensions"], eqn.params["window_strides"]
    axes = [i for i, (w, s) in enumerate(zip(window, stride, strict=True)) if w > 1 or s > 1]
    detail = f"{kind}, {_by(window[i] for i in axes)}/{_by(stride[i] for i in axes)}"
    return Fold((cell, *tail), "Pooling", detail)


def _divided(cells: Cells, cell: Cell) -> tuple[Cell, ...]:
    """A division by the size of the window, given or counted."""
    user = cells.sole_user(cell)
    if user is None or user.op not in ("div", "mul"):
        return ()
    if _is_scale(cells, user):
        return (user,)
    others = [cells.producer(value) for value in cells.inputs(user)]
    counts = [other for other in others if other is not None and other is not cell]
    if len(counts) == 1 and not cells.data(counts[0]) and cells.sole_user(counts[0]) is user:
        return counts[0], user
    return ()


def _slice_pooling(cells: Cells, cell: Cell) -> Fold | None:
    """Strided slices of one array, added (or their maximum taken): rows, then columns, or all at once."""
    users = cells.users(cell)
    if (users and all(user.op == "slice" for user in users)) or any(user.op == cell.op for user in users[:1]):
        return None  # a step of a larger one
    found: list[Cell] = []
    windows: dict[int, tuple[int, int]] = {}
    top: Cell | None = cell
    while top is not None and (step := _added_slices(cells, top)) is not None:
        parts, source, axes = step
        found += parts
        windows |= axes
        below = cells.producer(source)
        inner = below is not None and all(user in parts for user in cells.users(below))
        top = below if inner and below is not None and below.op == cell.op else None
        if inner and below is not None and below.op == "slice" and _single(cells, below) is not None:
            found.append(below)  # an odd last row or column cut off
    if not windows:
        return None
    tail = _divided(cells, cell) if cell.op == "add" else ()
    kind = "max" if cell.op == "maximum" else "avg" if tail else "sum"
    sizes = [windows[axis] for axis in sorted(windows)]
    detail = f"{kind}, {_by(k for k, _ in sizes)}/{_by(s for _, s in sizes)}"
    return Fold((*found, *tail), "Pooling", detail)


def _added_slices(cells: Cells, top: Cell) -> tuple[list[Cell], int, dict[int, tuple[int, int]]] | None:
    """The cells of one level, the array they slice, and window and stride of each axis that it strides."""
    parts, slices, todo = [], [], [top]
    while todo:
        cell = todo.pop()
        eqn = _single(cells, cell)
        if eqn is None:
            return None
        if cell.op == "slice" and cell is not top:
            slices.append(eqn)
        elif cell.op == top.op and (cell is top or cells.sole_user(cell) is not None):
            producers = [cells.producer(value) for value in eqn.ins]
            if len(producers) != 2 or any(other is None for other in producers):
                return None
            todo += [other for other in producers if other is not None]
        else:
            return None
        parts.append(cell)
    sources = {cells.raw.root(eqn.ins[0]) for eqn in slices}
    if len(sources) != 1 or len(slices) < 2:
        return None
    axes: dict[int, tuple[int, int]] = {}
    for axis in range(len(slices[0].in_shapes[0])):
        starts = {eqn.params["start_indices"][axis] for eqn in slices}
        strides = {(eqn.params["strides"] or (1,) * 9)[axis] for eqn in slices}
        if len(strides) != 1:
            return None
        stride = strides.pop()
        if stride > 1:
            axes[axis] = (len(starts), stride)
        elif len(starts) > 1:
            return None
    return (parts, sources.pop(), axes) if axes else None


def _reshape_pooling(cells: Cells, cell: Cell) -> Fold | None:
    """(n, h, w, c) seen as (n, h/2, 2, w/2, 2, c), and the twos reduced."""
    eqn = cells.raw.eqns[cell.eqns[0]]
    if not eqn.prim.startswith("reduce_") or "axes" not in eqn.params or not eqn.ins:
        return None
    axes, shape, seen = eqn.params["axes"], eqn.in_shapes[0], cells.raw.of(eqn.ins[0]).shape
    if len(shape) != len(seen) + len(axes) or len(axes) < 1 or len(seen) < 3:
        return None
    merged = [d * shape[i + 1] if i + 1 in axes else d for i, d in enumerate(shape) if i not in axes]
    if tuple(merged) != seen:
        return None
    sizes = _by(shape[axis] for axis in axes)
    if eqn.prim == "reduce_max":
        return Fold((cell,), "Pooling", f"max, {sizes}/{sizes}")
    tail = () if cell.op == "mean" else _divided(cells, cell)
    kind = "avg" if cell.op == "mean" or tail else "sum"
    return Fold((cell, *tail), "Pooling", f"{kind}, {sizes}/{sizes}")


def _activation(cells: Cells, cell: Cell) -> Fold | None:
    eqn = _single(cells, cell)
    if eqn is None:
        return None
    if eqn.prim == "max":
        zero = any(
            _is_scalar(cells, value) and cells.raw.of(value).kind == "literal" and cells.raw.of(value).literal == 0
            for value in eqn.ins
        )
        return Fold((cell,), "Activation", "relu") if zero else None
    return Fold((cell,), "Activation", {"logistic": "sigmoid"}.get(eqn.prim, eqn.prim))


def _silu(cells: Cells, cell: Cell) -> Fold | None:
    user = cells.sole_user(cell)
    eqn = _single(cells, user) if user is not None else None
    if user is None or eqn is None or eqn.prim != "mul" or cell.detail != "sigmoid":
        return None
    return Fold((cell, user), "Activation", "silu") if cells.inputs(cell)[0] in cells.inputs(user) else None


def _mean(cells: Cells, cell: Cell) -> Fold | None:
    user = cells.sole_user(cell)
    if user is None or _single(cells, cell) is None or user.op != "div" or not _is_scale(cells, user):
        return None
    return Fold((cell, user), "mean", "", major=False)


_REDUCTIONS = frozenset(("sum", "mean", "neg"))


def _squared_error(cells: Cells, cell: Cell) -> Fold | None:
    square = cells.sole_user(cell)
    eqn = _single(cells, square) if square is not None else None
    if square is None or eqn is None or _single(cells, cell) is None or len(cells.data(cell)) < 2:
        return None
    squares = eqn.prim == "square" or (eqn.prim == "integer_pow" and eqn.params["y"] == 2)
    squares = squares or (eqn.prim == "mul" and cells.raw.root(eqn.ins[0]) == cells.raw.root(eqn.ins[1]))
    tail = _tail(cells, square, _REDUCTIONS)
    if not squares or not any(part.op in _REDUCTIONS for part in tail):
        return None
    return Fold((cell, square, *tail), "Loss", "squared error")


_PICKS = frozenset(
    ["take_along_axis", "take", "gather", "getitem", "rewriting_take", "mul", "where", "sum", "mean", "neg", "squeeze"]
)


def _cross_entropy(cells: Cells, cell: Cell) -> Fold | None:
    """log_softmax, the picked label, and the mean; whatever reads the labels for it belongs to it."""
    found = [cell]
    while (user := cells.sole_user(found[-1])) is not None:
        if user.op not in _PICKS and not _is_scale(cells, user):
            break
        found.append(user)
    while len(found) > 1 and not _reduces(cells, found[-1]) and not _is_scale(cells, found[-1]):
        found.pop()
    if not any(_reduces(cells, part) for part in found[1:]):
        return None
    for part in tuple(found):
        for value in cells.data(part):
            label = cells.producer(value)
            if label is not None and label not in found and label.op in ("OneHot", "eq", "neg", "arange", "iota"):
                found += [label] if cells.sole_user(label) is not None else []
    return Fold(tuple(found), "Loss", "softmax cross-entropy")


def _reduces(cells: Cells, cell: Cell) -> bool:
    return bool(cells.prims(cell) & {"gather", "reduce_sum"})


def _loss_tail(cells: Cells, cell: Cell) -> Fold | None:
    tail = _tail(cells, cell, _REDUCTIONS)
    return Fold((cell, *tail), "Loss", cell.detail) if tail else None


def _flatten(cells: Cells, cell: Cell) -> Fold | None:
    return Fold((cell,), "Flatten", cell.detail)


def _scale(cells: Cells, cell: Cell) -> Fold | None:
    """A constant factor or offset disappears into the cell before it, else into the one after."""
    if not _is_scale(cells, cell):
        return None
    value = next(iter(cells.data(cell)), None)
    before = cells.producer(value) if value is not None else None
    if before is not None and _takes(cells, before, cell) and cells.sole_user(before) is cell:
        return Fold((before, cell), before.op, before.detail, before.major)
    after = cells.sole_user(cell)
    if after is not None and _takes(cells, after, cell):
        return Fold((cell, after), after.op, after.detail, after.major)
    return None


COLLECTIVES = frozenset(
    [
        "psum",
        "pmean",
        "pmax",
        "pmin",
        "all_gather",
        "all_to_all",
        "reduce_scatter",
        "psum_scatter",
        "ppermute",
        "pgather",
        "axis_index",
    ]
)


def _takes(cells: Cells, cell: Cell, scale: Cell) -> bool:
    return cell.op not in COLLECTIVES and cell.op not in ("Flatten", "cond") and _same_scope(cells, cell, scale)


def _collective(cells: Cells, cell: Cell) -> Fold | None:
    axes = [eqn.params.get("axes", eqn.params.get("axis_name")) for eqn in cells.eqns(cell)]
    known = next((axis for axis in axes if axis is not None), None)
    if known is None or cell.op == "axis_index":
        return None
    names = known if isinstance(known, (tuple, list, frozenset)) else (known,)
    return Fold((cell,), cell.op, "over " + ", ".join(map(str, names)), major=False)


def _late_bias(cells: Cells, cell: Cell) -> Fold | None:
    """A vector of parameters added to anything else, as in `x + h @ w + b`."""
    eqn = _single(cells, cell)
    if eqn is None or eqn.prim != "add":
        return None
    shapes = zip(eqn.ins, eqn.in_shapes, strict=True)
    weights = [shape for value, shape in shapes if cells.raw.weight_of(value) is not None]
    before = cells.producer(cells.data(cell)[0]) if len(weights) == 1 and cells.data(cell) else None
    if before is None or cells.sole_user(before) is not cell or not _takes(cells, before, cell):
        return None
    if max(weights[0], default=1) != math.prod(weights[0]):
        return None
    return Fold((before, cell), before.op, before.detail, before.major)


def _concat(cells: Cells, cell: Cell) -> Fold | None:
    return Fold((cell,), "Concat", cell.detail)


def _by(sizes: Iterable[int]) -> str:
    return "x".join(map(str, sizes))


def _stride(strides: Iterable[int]) -> str:
    strides = tuple(strides)
    return str(strides[0]) if strides and len(set(strides)) == 1 else _by(strides)


RULES: tuple[Rule, ...] = (
    Rule("convolution and its bias", frozenset(("conv",)), _convolution),
    Rule("matrix product with a parameter, and its bias", frozenset(("MatMul",)), _fully_connected),
    Rule("rows of a table", frozenset(), _embedding),
    Rule("windows reduced", frozenset(), _window_pooling),
    Rule("slices added and scaled", frozenset(("add", "maximum")), _slice_pooling),
    Rule("axes split and reduced", frozenset(("sum", "mean", "max")), _reshape_pooling),
    Rule("activation", frozenset(("maximum", "tanh", "logistic")), _activation),
    Rule("x times sigmoid(x)", frozenset(("Activation",)), _silu),
    Rule("mean", frozenset(("sum",)), _mean),
    Rule("squared error", frozenset(("sub",)), _squared_error),
    Rule("cross-entropy", frozenset(("LogSoftmax", "logsumexp")), _cross_entropy),
    Rule("reduction of a loss", frozenset(("Loss",)), _loss_tail),
    Rule("flatten", frozenset(("Flatten",)), _flatten),
    Rule("concatenate", frozenset(("Concat", "stack")), _concat),
    Rule("collective", COLLECTIVES, _collective),
    Rule("bias added late", frozenset(("add",)), _late_bias),
    Rule("constant factor", frozenset(("mul", "div", "add", "sub", "neg")), _scale),
)
