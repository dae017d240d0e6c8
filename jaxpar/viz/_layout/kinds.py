"""What captured arrays and batch statistics are, now that layers are known."""

from __future__ import annotations

import math

from .._fold.cells import Cell, Cells
from .._graph import BACKWARD

_NORMS = frozenset(("BatchNorm", "InstanceNorm", "Normalization", "GroupNorm", "LayerNorm", "RMSNorm"))
_TRAINED = _NORMS | {"FullyConnected", "Convolution", "Deconvolution", "Embedding", "Attention"}


def demote_constants(cells: Cells) -> bool:
    """Make constants of captured arrays that no layer reads as its weights. Whether there are such."""
    found = [
        cells.raw.values[root]
        for root, readers in _readers(cells).items()
        if cells.raw.values[root].captured and not any(_is_weight_of(cells, cell, root) for cell in readers)
    ]
    found = [value for value in found if value.kind == "weight"]
    for value in found:
        value.kind = "const"
    return bool(found)


def _is_weight_of(cells: Cells, cell: Cell, root: int) -> bool:
    """Whether a cell reads an array as its weights. An attention also reads masks."""
    if _kind(cell) != "Attention":
        return _kind(cell) in _TRAINED
    return any(
        eqn.prim == "dot_general" and any(cells.raw.root(value) == root for value in eqn.ins)
        for eqn in cells.eqns(cell)
    )


def _readers(cells: Cells) -> dict[int, list[Cell]]:
    """The cells that read each value."""
    found: dict[int, list[Cell]] = {}
    for cell in cells:
        for root in cells.inputs(cell):
            found.setdefault(root, []).append(cell)
    return found


def mark_state(cells: Cells) -> None:
    """Make state of an argument that normalizations read, where each array has one value a channel."""
    readers = _readers(cells)
    groups: dict[str, list[int]] = {}
    for root in readers:
        value = cells.raw.values[root]
        if value.kind == "input" and value.group:
            groups.setdefault(value.group, []).append(root)
    for roots in groups.values():
        if all(_is_statistic(cells, root, readers[root]) for root in roots):
            for root in roots:
                cells.raw.values[root].kind, cells.raw.values[root].state = "weight", True


def _kind(cell: Cell) -> str:
    return cell.op.removesuffix(BACKWARD)


def _is_statistic(cells: Cells, root: int, readers: list[Cell]) -> bool:
    """Whether only normalizations read an array, and it has one value a channel of what they normalize."""
    shape = cells.raw.values[root].shape
    flat = max(shape, default=1) == math.prod(shape)
    return flat and all(
        _kind(cell) in _NORMS and len(cells.raw.values[cells.output(cell)].shape) > 1 for cell in readers
    )
