"""Rules for pooling: windows reduced, strided slices added, axes split and reduced."""

from __future__ import annotations

import math

from .._fold.cells import Cell, Cells
from .._fold.templates import Fold
from .._fold.terms import by, divides_by, is_scale, single
from .._read.raw import Eqn

_KINDS = {"reduce_window_max": "max", "reduce_window_min": "min", "reduce_window_sum": "sum"}


def window_pooling(cells: Cells, cell: Cell) -> Fold | None:
    """A `reduce_window`, and the division by its size."""
    windows = [eqn for eqn in cells.eqns(cell) if eqn.prim in _KINDS]
    if not windows or cell.major:
        return None
    eqn = windows[0]
    kind = _KINDS[eqn.prim]
    tail: tuple[Cell, ...] = ()
    if kind == "sum":
        tail = _division(cells, cell, math.prod(eqn.params["window_dimensions"]))
        kind = "avg" if tail or "div" in cells.prims(cell) else kind
    window, stride = eqn.params["window_dimensions"], eqn.params["window_strides"]
    axes = [i for i, (w, s) in enumerate(zip(window, stride, strict=True)) if w > 1 or s > 1]
    detail = f"{kind}, {by(window[i] for i in axes)}/{by(stride[i] for i in axes)}"
    return Fold((cell, *tail), "Pooling", detail)


def _division(cells: Cells, cell: Cell, count: int) -> tuple[Cell, ...]:
    """The cells that divide by the size of the window, if any."""
    user = cells.sole_user(cell)
    if user is None or user.op not in ("div", "mul"):
        return ()
    if is_scale(cells, user):
        return (user,) if divides_by(cells, user, count) else ()
    if _divides_by_counts(cells, user):
        return (user,)
    counts = [other for other in cells.sources(user) if other is not cell]
    if len(counts) == 1 and not cells.data(counts[0]) and cells.sole_user(counts[0]) is user:
        return counts[0], user
    return ()


def _divides_by_counts(cells: Cells, cell: Cell) -> bool:
    """Whether a cell divides by the constant number of elements in each window, fewer at the borders."""
    eqn = single(cells, cell)
    made = cells.raw.of(eqn.ins[1]).producer if eqn is not None and eqn.prim == "div" else None
    return made is not None and cells.raw.eqns[made].view and cells.raw.eqns[made].prim == "reduce_window_sum"


def slice_pooling(cells: Cells, cell: Cell) -> Fold | None:
    """The sum or maximum of strided slices of one array. Rows and columns may be separate steps."""
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
        if inner and below is not None and below.op == "slice" and single(cells, below) is not None:
            found.append(below)  # an odd last row or column cut off
    if not windows:
        return None
    tail = _division(cells, cell, math.prod(size for size, _ in windows.values())) if cell.op == "add" else ()
    kind = "max" if cell.op == "maximum" else "avg" if tail else "sum"
    sizes = [windows[axis] for axis in sorted(windows)]
    detail = f"{kind}, {by(k for k, _ in sizes)}/{by(s for _, s in sizes)}"
    return Fold((*found, *tail), "Pooling", detail)


def _added_slices(cells: Cells, top: Cell) -> tuple[list[Cell], int, dict[int, tuple[int, int]]] | None:
    """The cells of one step, the array sliced, and its `_strided_axes`."""
    parts, slices, todo = list[Cell](), list[Eqn](), [top]
    while todo:
        cell = todo.pop()
        eqn = single(cells, cell)
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
    axes = _strided_axes(slices) if len(sources) == 1 and len(slices) >= 2 else {}
    return (parts, sources.pop(), axes) if axes else None


def _strided_axes(slices: list[Eqn]) -> dict[int, tuple[int, int]]:
    """Window and stride of each strided axis. Empty where the slices are no windows."""
    axes: dict[int, tuple[int, int]] = {}
    for axis in range(len(slices[0].in_shapes[0])):
        starts = {eqn.params["start_indices"][axis] for eqn in slices}
        strides = {(eqn.params["strides"] or (1,) * 9)[axis] for eqn in slices}
        if len(strides) != 1 or max(starts) - min(starts) >= len(starts):
            return {}
        stride = strides.pop()
        if stride > 1:
            axes[axis] = (len(starts), stride)
        elif len(starts) > 1:
            return {}
    return axes if math.prod(size for size, _ in axes.values()) == len(slices) else {}


def space_to_depth(cells: Cells, cell: Cell) -> Fold | None:
    """All strided slices of one array, joined: each window becomes channels."""
    eqn = single(cells, cell)
    parts = [cells.producer(value) for value in eqn.ins] if eqn is not None else []
    slices = [one for part in parts if part is not None and part.op == "slice" and (one := single(cells, part))]
    inner = [part for part in parts if part is not None and cells.sole_user(part) is cell]
    if len(slices) < 2 or len(inner) < len(parts) or len({cells.raw.root(one.ins[0]) for one in slices}) > 1:
        return None
    axes = _strided_axes(slices)
    if eqn is None or not axes or eqn.params["dimension"] in axes:
        return None
    if any(size != stride for size, stride in axes.values()):
        return None
    return Fold((*inner, cell), "SpaceToDepth", by(stride for _, stride in axes.values()))


def reshape_pooling(cells: Cells, cell: Cell) -> Fold | None:
    """A reshape such as (n, h, w, c) to (n, h/2, 2, w/2, 2, c), reduced over the twos."""
    eqn = cells.raw.eqns[cell.eqns[0]]
    if not eqn.prim.startswith("reduce_") or "axes" not in eqn.params or not eqn.ins:
        return None
    axes, shape, seen = eqn.params["axes"], eqn.in_shapes[0], cells.raw.of(eqn.ins[0]).shape
    if len(shape) != len(seen) + len(axes) or len(axes) < 1 or len(seen) < 3:
        return None
    merged = [d * shape[i + 1] if i + 1 in axes else d for i, d in enumerate(shape) if i not in axes]
    if tuple(merged) != seen or axes == (len(shape) - 1,):
        return None  # one last axis split is groups of channels
    sizes = by(shape[axis] for axis in axes)
    if eqn.prim == "reduce_max":
        return Fold((cell,), "Pooling", f"max, {sizes}/{sizes}")
    tail = () if cell.op == "mean" else _division(cells, cell, math.prod(shape[axis] for axis in axes))
    kind = "avg" if cell.op == "mean" or tail else "sum"
    return Fold((cell, *tail), "Pooling", f"{kind}, {sizes}/{sizes}")
