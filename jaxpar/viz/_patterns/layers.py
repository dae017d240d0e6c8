"""Rules for layers: convolution, dense, embedding, activation, collectives, and factors that disappear."""

from __future__ import annotations

import math
from collections.abc import Iterable

from .._fold.cells import Cell, Cells
from .._fold.patterns import Fold, axis_names, bias, by, is_float, is_scale, joined_weights, number, single, takes_scale
from .._read.raw import Eqn

_BIASED = ("add", "Convolution", "Deconvolution", "FullyConnected", "MatMul")


def convolution(cells: Cells, cell: Cell) -> Fold | None:
    """A convolution, or a transposed one, with its bias."""
    eqn = single(cells, cell)
    if eqn is None:
        return None
    numbers = eqn.params["dimension_numbers"]
    kernel_shape = eqn.in_shapes[1]
    kernel = [kernel_shape[axis] for axis in numbers.rhs_spec[2:]]
    dilated = any(step > 1 for step in eqn.params["lhs_dilation"])
    strides = eqn.params["lhs_dilation"] if dilated else eqn.params["window_strides"]
    detail = f"{by(kernel)}/{_stride(strides)}, {kernel_shape[numbers.rhs_spec[0]]}"
    groups = eqn.params["feature_group_count"]
    detail += f", {groups} groups" if groups > 1 else ""
    apart = eqn.params["rhs_dilation"]
    detail += f", dilated {_stride(apart)}" if any(step > 1 for step in apart) else ""
    parts = (*_padding(cells, cell, eqn), cell, *bias(cells, cell))
    return Fold(parts, "Deconvolution" if dilated else "Convolution", detail)


def _padding(cells: Cells, cell: Cell, eqn: Eqn) -> tuple[Cell, ...]:
    """The zeros that only this convolution has around its images, as of a causal one."""
    before = cells.producer(eqn.ins[0])
    pad = single(cells, before) if before is not None else None
    if before is None or pad is None or pad.prim != "pad" or number(cells, pad.ins[1]) != 0:
        return ()
    return (before,) if cells.sole_user(before) is cell else ()


def _stride(strides: Iterable[int]) -> str:
    """One number where all axes have the same stride."""
    strides = tuple(strides)
    return str(strides[0]) if strides and len(set(strides)) == 1 else by(strides)


def fully_connected(cells: Cells, cell: Cell) -> Fold | None:
    """A product with a parameter, or with several in one array, and its bias. Other products are "MatMul"."""
    eqn = single(cells, cell)
    if eqn is None:
        return None
    joined = [joined_weights(cells, value, cell) for value in eqn.ins]
    pairs = zip(eqn.ins, joined, strict=True)
    weights = [cells.raw.weight_of(value) is not None or part is not None for value, part in pairs]
    if sum(weights) != 1:
        return Fold((cell,), "MatMul")
    side = weights.index(True)
    contracted, batched = eqn.params["dimension_numbers"]
    fixed = {*contracted[side], *batched[side]}
    features = math.prod(d for axis, d in enumerate(eqn.in_shapes[side]) if axis not in fixed)
    parts = [part for part in joined if part is not None]
    return Fold((*parts, cell, *bias(cells, cell)), "FullyConnected", str(features))


def late_bias(cells: Cells, cell: Cell) -> Fold | None:
    """A bias added later, as in `x + h @ w + b`."""
    eqn = single(cells, cell)
    if eqn is None or eqn.prim != "add" or cell.major:
        return None
    shapes = zip(eqn.ins, eqn.in_shapes, strict=True)
    weights = [shape for value, shape in shapes if cells.raw.weight_of(value) is not None]
    before = cells.producer(cells.data(cell)[0]) if len(weights) == 1 and cells.data(cell) else None
    if (
        before is None
        or before.op not in _BIASED
        or cells.sole_user(before) is not cell
        or not takes_scale(cells, before, cell)
    ):
        return None
    if max(weights[0], default=1) != math.prod(weights[0]):
        return None
    return Fold((before, cell), before.op, before.detail, before.major)


def embedding(cells: Cells, cell: Cell) -> Fold | None:
    """Rows of a parameter."""
    for eqn in () if cell.major else cells.eqns(cell):
        table = cells.raw.weight_of(eqn.ins[0]) if eqn.prim == "gather" else None
        if table is not None:
            shape = cells.raw.values[table].shape
            return Fold((cell,), "Embedding", by(shape))
    return None


def activation(cells: Cells, cell: Cell) -> Fold | None:
    """An activation of one equation. A maximum is one where the other operand is 0."""
    eqn = single(cells, cell)
    if eqn is None:
        return None
    if eqn.prim == "max":
        zero = any(number(cells, value) == 0 for value in eqn.ins)
        return Fold((cell,), "Activation", "relu") if zero and is_float(cells, cell) else None
    return Fold((cell,), "Activation", {"logistic": "sigmoid"}.get(eqn.prim, eqn.prim))


def flatten(cells: Cells, cell: Cell) -> Fold | None:
    """A reshape that keeps the first axis."""
    return Fold((cell,), "Flatten", cell.detail)


def concat(cells: Cells, cell: Cell) -> Fold | None:
    """Arrays joined along an axis."""
    return Fold((cell,), "Concat", cell.detail)


def collective(cells: Cells, cell: Cell) -> Fold | None:
    """A collective, with the names of its axes."""
    axes = next((names for eqn in cells.eqns(cell) if (names := axis_names(eqn))), "")
    return Fold((cell,), cell.op, f"over {axes}", major=False) if axes and cell.op != "axis_index" else None


def scale(cells: Cells, cell: Cell) -> Fold | None:
    """A constant factor or offset, as part of a neighbour. The cell before it comes first."""
    if not is_scale(cells, cell):
        return None
    value = next(iter(cells.data(cell)), None)
    before = cells.producer(value) if value is not None else None
    if before is not None and takes_scale(cells, before, cell) and cells.sole_user(before) is cell:
        return Fold((before, cell), before.op, before.detail, before.major)
    after = cells.sole_user(cell)
    if after is not None and takes_scale(cells, after, cell):
        return Fold((cell, after), after.op, after.detail, after.major)
    return None


def pallas(cells: Cells, cell: Cell) -> Fold | None:
    """A Pallas kernel, by its name."""
    eqn = single(cells, cell)
    if eqn is None or eqn.prim != "pallas_call":
        return None
    info = getattr(eqn.params["jaxpr"], "debug_info", None)
    name = eqn.params.get("name") or str(getattr(info, "func_src_info", "") or "").partition(" at ")[0]
    return Fold((cell,), "Pallas", str(name))


def transform(cells: Cells, cell: Cell) -> Fold | None:
    """A Fourier transform, by its kind and lengths."""
    found = [eqn for eqn in cells.eqns(cell) if eqn.prim == "fft"]
    if len(found) != 1 or cell.major:
        return None
    kind = str(getattr(found[0].params["fft_type"], "name", found[0].params["fft_type"])).lower()
    return Fold((cell,), "FFT", f"{kind}, {by(found[0].params['fft_lengths'])}")
