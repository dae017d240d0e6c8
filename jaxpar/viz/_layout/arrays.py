"""What the arrays of a function are: params, state that no optimizer trains, an optimizer's own, constants.

Nobody says so in a function, so what reads an array tells. `set_sizes` writes the bytes of each kind.
"""

from __future__ import annotations

import math

import numpy as np

from .._fold.calls import OPTIMIZERS
from .._fold.cells import Cell, Cells
from .._graph import BACKWARD, Sizes
from .._read.costs import is_uncounted
from .._read.raw import Raw
from .._searches import reach
from .net import Net, output_bytes, turns

_NORMS = frozenset(("BatchNorm", "InstanceNorm", "Normalization", "GroupNorm", "LayerNorm", "RMSNorm"))
_TRAINED = _NORMS | {"FullyConnected", "Convolution", "Deconvolution", "Embedding", "Attention"}


def demote_constants(cells: Cells) -> bool:
    """Make constants of captured arrays that no layer reads as its weights. Whether there are such."""
    demoted = False
    for root, readers in _cells_reading(cells).items():
        value = cells.raw.values[root]
        if not (value.captured and value.kind == "weight"):
            continue
        # An attention also reads masks: its weights are in a product.
        is_weight = any(
            any(eqn.prim == "dot_general" and root in map(cells.raw.root, eqn.ins) for eqn in cells.eqns(cell))
            if _kind(cell) == "Attention"
            else _kind(cell) in _TRAINED
            for cell in readers
        )
        if not is_weight:
            value.kind, demoted = "const", True
    return demoted


def _cells_reading(cells: Cells) -> dict[int, list[Cell]]:
    """The cells that read each value."""
    readers: dict[int, list[Cell]] = {}
    for cell in cells:
        for root in cells.inputs(cell):
            readers.setdefault(root, []).append(cell)
    return readers


def mark_state(cells: Cells) -> None:
    """Make state of an argument that normalizations read, where each array has one value a channel."""
    raw, readers = cells.raw, _cells_reading(cells)
    groups: dict[str, list[int]] = {}
    for root in readers:
        if raw.values[root].kind == "input" and raw.values[root].group:
            groups.setdefault(raw.values[root].group, []).append(root)
    for roots in groups.values():
        shapes = [raw.values[root].shape for root in roots]
        are_flat = all(max(shape, default=1) == math.prod(shape) for shape in shapes)
        # Only normalizations read them, each of what has more axes than the one of its channels.
        norms = {cell for root in roots for cell in readers[root]}
        if are_flat and all(_kind(c) in _NORMS and len(raw.values[cells.output(c)].shape) > 1 for c in norms):
            for root in roots:
                raw.values[root].kind, raw.values[root].state = "weight", True


def _kind(cell: Cell) -> str:
    return cell.op.removesuffix(BACKWARD)


def set_sizes(net: Net) -> None:
    """Write the sizes of a net, before anything in it is collapsed, and what only an optimizer reads."""
    raw, loose = net.raw, _read_by_optimizer(net)
    numbers = {kind: [n for n, v in enumerate(raw.values) if v.kind == kind] for kind in ("weight", "input")}
    used = {weight for draft in net.drafts for weight in draft.weights}
    state = {weight for weight in used if raw.values[weight].state}
    # A new value of an optimizer's state is returned. What is read beside gradients and stays is a param.
    ends = _results_by_end(raw)
    net.state = {weight for weight in loose & used - state if _results(raw, ends, weight)}
    params = used - net.state - state
    unused = [raw.values[number] for number in numbers["weight"] if number not in used]
    net.sizes = Sizes(
        params=_bytes(raw, params),
        inputs=_bytes(raw, set(numbers["input"]) - loose),
        optimizer=_bytes(raw, loose - state - params),
        forward=sum(output_bytes(net, draft) for draft in net.layers if not draft.op.endswith(BACKWARD)),
        backward=sum(output_bytes(net, draft) for draft in net.layers if draft.op.endswith(BACKWARD)),
        trained=frozenset(raw.values[weight].name for weight in trained(raw, params, ends)),
        unused=sum(value.elements for value in unused if not (value.captured or value.state)),
        state=_bytes(raw, state),
    )
    net.constants = _constants(raw)
    net.uncounted = raw.uncounted.union(e.prim for e in raw.eqns if not e.view and is_uncounted(e.prim, e.params))
    _set_kept(net)


def _constants(raw: Raw) -> int:
    """The elements of the captured arrays that are read and are no parameters. Scalars do not count."""
    read = {raw.root(value) for eqn in raw.eqns for value in eqn.ins}
    captured = (value for number, value in enumerate(raw.values) if number in read and value.producer is None)
    return sum(size for value in captured if value.kind == "const" and (size := math.prod(value.shape)) > 1)


def _set_kept(net: Net) -> None:
    """Write for each layer the bytes that it computes and a gradient reads, or what remat computes again for it.

    A value that two gradients read counts once. What remat computes again is not kept.
    """
    raw = net.raw
    again = {draft.at for draft in net.layers if draft.eqns and all(raw.eqns[number].again for number in draft.eqns)}
    late = [draft for draft in net.layers if draft.op.endswith(BACKWARD) or draft.at in again]
    read = {raw.root(value) for draft in late for number in draft.eqns for value in raw.eqns[number].ins}
    for draft in net.layers:
        if not draft.op.endswith(BACKWARD) and draft.at not in again:
            made = {out: raw.eqns[number].scope for number in draft.eqns for out in raw.eqns[number].outs}
            draft.kept = sum(raw.values[out].bytes * turns(scope) for out, scope in made.items() if out in read)


def trained(raw: Raw, params: set[int], ends: dict[str, list[int]]) -> set[int]:
    """The parameters whose results depend on the backward pass. All of them where there is none.

    `ends` are the results by the ends of their names.
    """
    if not any(eqn.backward for eqn in raw.eqns):
        return params
    results = {weight: _results(raw, ends, weight) for weight in params}
    if not any(results.values()):  # the gradients stay inside
        return params
    late: dict[int, int] = {}
    while True:
        levels = _levels(raw, late)
        if trained_now := {weight for weight in params if _depends(raw, levels, results[weight])}:
            return trained_now
        # With a staleness, new values depend on pushes of earlier steps, which came as this step hands on its own.
        unused = [n for n, value in enumerate(raw.values) if value.argument and n not in params | late.keys()]
        more = [n for n in unused if _depends(raw, levels, _results(raw, ends, n))]
        if not more:
            return trained_now
        late |= dict.fromkeys(more, _DEPENDS)


def _depends(raw: Raw, levels: dict[int, int], values: list[int]) -> bool:
    return any(levels.get(raw.root(value)) == _DEPENDS for value in values)


def _results_by_end(raw: Raw) -> dict[str, list[int]]:
    """The results by each end of their names that is the path of a leaf: "['conv']['bias']" and "['bias']"."""
    ends: dict[str, list[int]] = {}
    for name, number in zip(raw.output_names, raw.outputs, strict=True):
        for start in (len(name), *(at for at, letter in enumerate(name) if letter in ".[")):
            ends.setdefault(name[start:], []).append(number)
    return ends


def _results(raw: Raw, ends: dict[str, list[int]], weight: int) -> list[int]:
    """The results that have the path and the shape of a parameter: its gradient, or its new value.

    What is cut into a padded row for each device, (devices, chunk), may come back as a whole array.
    """
    value = raw.values[weight]
    tail, size = value.name.removeprefix(value.argument), math.prod(value.shape)
    devices = value.shape[0] if len(value.shape) == 2 else 0
    named = ((n, raw.values[n].shape) for n in ends.get(tail, ()))
    return [n for n, shape in named if shape == value.shape or 0 <= size - math.prod(shape) < devices]


def _levels(raw: Raw, late: dict[int, int]) -> dict[int, int]:
    """What each value has to do with the backward pass, given that of some arguments.

    What the backward pass computes from another value depends on it. A gradient of zeros, of a param that the loss does
    not use, stays zeros in clipping and scaling.
    """
    levels = dict(late)
    for eqn in raw.eqns:
        values = [raw.of(value) for value in eqn.ins]
        own_levels = [_ZEROS if v.kind == "literal" and not np.any(v.literal) else _FREE for v in values]
        ins = [levels.get(raw.root(v), level) for v, level in zip(eqn.ins, own_levels, strict=True)]
        reads = any(v.kind not in ("literal", "const") for v in values)
        for number, out in enumerate(eqn.outs):
            operands = ins[1 + number :: len(eqn.outs)] if eqn.prim == "cond" else ins
            if eqn.prim == "select_n" and (not eqn.in_shapes[0] or max(ins[1:]) == _ZEROS):
                operands = ins[1:]  # which update is made, as after an overflow, is no matter of one param
            level = max([_FREE, *operands])
            if (eqn.prim in _LINEAR and max(operands) == _ZEROS) or (_ZEROS in operands[: _FACTORS.get(eqn.prim, 0)]):
                level = _ZEROS
            levels[raw.root(out)] = _DEPENDS if eqn.backward and reads else level
    return levels


_ZEROS, _FREE, _DEPENDS = range(3)
_LINEAR = frozenset("add add_any sub neg broadcast_in_dim reshape convert_element_type select_n pvary pcast".split())
_FACTORS = {"mul": 2, "div": 1}  # so many of the operands make the result zeros


def _read_by_optimizer(net: Net) -> set[int]:
    """The arguments from which neither a differentiated layer nor a gradient is reached, where there are gradients."""
    gradients = [draft for draft in net.layers if draft.op.endswith(BACKWARD)]
    updates = {draft.at for draft in net.layers if draft.op in OPTIMIZERS}
    sources = {at: read_ats - updates for at, read_ats in net.sources().items()}
    for source, target, _ in net.carries:  # what a pass of a loop makes reaches a gradient in a later pass
        sources.setdefault(target, set()).add(source)
    reached = reach((end.at for draft in gradients for end in (draft, draft.layer)), sources)
    read: dict[bool, set[int]] = {True: set(), False: set()}  # by what reaches a gradient, and by what does not
    for draft in net.drafts:
        read[draft.at in reached] |= {draft.value} if draft.op == "input" else set(draft.weights)
    return read[False] - read[True] if gradients else set()


def _bytes(raw: Raw, numbers: set[int]) -> int:
    return sum(raw.values[number].bytes for number in numbers)
