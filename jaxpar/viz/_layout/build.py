"""From cells to a `Net`: a draft for each cell and argument, and the edges between them.

Begin with `build`. The rest of the file says which arrays are parameters, which are state that no optimizer trains, and
which belong to an optimizer: nobody says so in a function, so what reads them tells.
"""

from __future__ import annotations

import math

import numpy as np

from ..._core.text import plural
from .._fold.calls import OPTIMIZERS, updates
from .._fold.cells import SENT, Cell, Cells, carry_of, plain_name, sources_of
from .._graph import BACKWARD, Sizes, human
from .._read.raw import Eqn, Raw
from .._read.source import describe
from .._searches import order, reach
from .modules import fill_modules, number_calls, set_paths, set_scopes
from .net import Draft, Net, output_bytes


def build(cells: Cells) -> Net:
    """The net of all cells and inputs that something reads. Parameters are lists on the drafts that read them."""
    raw = cells.raw
    drafts, by_cell = list[Draft](), dict[int, Draft]()
    # Inputs are numbered below 0, so that they come before all layers.
    inputs = {n: value for n, value in enumerate(raw.values) if value.kind == "input"}
    for number, value in inputs.items():
        drafts.append(Draft(number - len(raw.values), "input", "", number, name=value.name))
    # Layers come after all that they read, and as near to the order of the trace as that allows.
    first = {cell.id: next((e.id for e in cells.eqns(cell) if not e.view), cell.eqns[0]) for cell in cells}
    ordered = [cells.cells[number] for number in order(sources_of(cells), first.__getitem__)]
    updated, casts = updates(cells), _casts(raw)
    for cell in ordered:
        draft = _draft(cells, cell, len(by_cell))
        draft.value = casts.get(draft.value, draft.value)
        if count := updated.get(cell.id):
            draft.detail = plural(count, "array")
            draft.name = draft.op if count > 1 else draft.name  # not what the names of its parameters begin with
        drafts.append(draft)
        by_cell[cell.id] = draft
    for cell in cells:
        by_cell[cell.id].forward = by_cell.get(cell.forward.id) if cell.forward is not None else None

    carries, behind_loops = carry_edges(cells, by_cell)
    edges = _edges(cells, by_cell, casts) | behind_loops
    for name, output in zip(raw.output_names, raw.outputs, strict=True):
        owner = cells.producer(raw.root(output))
        if owner is not None:
            by_cell[owner.id].outputs.append(name)

    # The scopes, of which a second call of a module gets a number. Then what has no scope joins a call around it.
    net = Net(raw, drafts, edges, carries=carries)
    forward = [draft for draft in net.layers if not draft.op.endswith(BACKWARD)]
    are_modules = set_scopes(cells, by_cell)
    number_calls(forward, are_modules)
    if are_modules:
        fill_modules(net, forward)
    # A gradient is drawn beside its layer, unless it runs in a loop or a branch of its own.
    for draft in drafts:
        if draft.forward is not None and not any(scope.is_region for scope in draft.scope):
            draft.scope = draft.forward.scope
    # What nothing reads and costs nothing is not drawn.
    used = {end for source, target, _ in net.edges for end in (source, target)}
    net.drafts = [draft for draft in drafts if draft.at in used or draft.outputs or draft.flops]
    drawn = {draft.at for draft in net.drafts}
    net.carries = {ends: None for ends in net.carries if drawn.issuperset(ends[:2])}
    set_paths(net)
    return net


def _edges(cells: Cells, by_cell: dict[int, Draft], casts: dict[int, int]) -> dict[tuple[int, int, int], None]:
    """The edges between the drafts, in the order of the trace."""
    raw = cells.raw
    edges: dict[tuple[int, int, int], None] = {}
    for cell in cells:
        read = {value: raw.root(value) for eqn in cells.eqns(cell) if not eqn.view for value in eqn.ins}
        for root in cells.inputs(cell):
            source = cells.producer(root)
            if source is not None and source is not cell:
                for value in (value for value, shown in read.items() if shown == root):
                    outside = raw.outside(value)
                    given = casts.get(root, root) if outside == root else outside
                    edges[by_cell[source.id].at, by_cell[cell.id].at, given] = None
            elif raw.values[root].kind == "input":
                edges[root - len(raw.values), by_cell[cell.id].at, root] = None
    return edges


def _casts(raw: Raw) -> dict[int, int]:
    """The values that a function of JAX casts before it returns them, and what it returns: of `one_hot`, no bools."""
    casts: dict[int, int] = {}
    for eqn in raw.eqns:
        root = raw.root(eqn.ins[0]) if eqn.view and eqn.prim == "convert_element_type" else None
        maker = raw.values[root].producer if root is not None else None
        if root is not None and maker is not None and raw.values[root].shape == eqn.out_shape:
            calls = [next((f.call for f in reversed(each.stack) if f.call < 0), 0) for each in (eqn, raw.eqns[maker])]
            if calls[0] == calls[1] < 0:
                casts[root] = eqn.outs[0]
    return casts


def _draft(cells: Cells, cell: Cell, at: int) -> Draft:
    eqns = cells.eqns(cell)
    real = [eqn for eqn in eqns if not eqn.view] or eqns
    sent = [eqn for eqn in real if plain_name(eqn.prim) in SENT]
    sends = bool(sent) and cell.op.removesuffix(BACKWARD) in SENT
    output, read = cells.output(cell), _bytes_read(cells.raw, sent if sends else eqns, converted=sends)
    detail = cell.detail
    if sends:
        detail = f"{detail}, {human(read, 'B')}"
    return Draft(
        at=at,
        op=cell.op,
        detail=detail,
        value=output,
        scope=cells.scope(cell),
        source=describe(real[0].stack),
        flops=sum(eqn.flops for eqn in eqns),
        bytes=read + cells.raw.values[output].bytes,
        equations=len(eqns),
        eqns=[eqn.id for eqn in eqns],
        weights=cells.weights(cell),
        name=cell.op if cell.op in OPTIMIZERS else "",  # not that of a parameter
    )


def _bytes_read(raw: Raw, eqns: list[Eqn], *, converted: bool) -> int:
    """Bytes of the arrays that these equations read, by a layer before a conversion, by a collective `converted`."""
    inside = {out for eqn in eqns for out in eqn.outs}
    reads: dict[int, int] = {}
    for eqn in [eqn for eqn in eqns if not eqn.view] or eqns:
        for value, shape in zip(eqn.ins, eqn.in_shapes, strict=False):
            root = raw.root(value)
            if root not in inside and raw.values[root].kind != "literal":
                # A slice or a device's share is smaller than the whole array, a broadcast larger.
                array = raw.values[value if converted else root]
                share = array.bytes * math.prod(shape) // max(1, math.prod(array.shape))
                reads[root] = max(reads.get(root, 0), min(share, array.bytes))
    return sum(reads.values())


_Edges = dict[tuple[int, int, int], None]


def carry_edges(cells: Cells, by_cell: dict[int, Draft]) -> tuple[_Edges, _Edges]:
    """From what computes each carried value to what reads it: in the next pass, and behind the loop.

    What a pass hands on as it got it has no edge. A layer hands on to itself where no other layer reads the value.
    """
    back, on = _Edges(), _Edges()
    loops = {read: scope for read, _, scope in cells.raw.carries}
    inside: dict[int, list[Cell]] = {read: [] for read in loops}
    for cell in sorted(cells, key=lambda cell: by_cell[cell.id].at) if loops else ():
        for eqn in cells.eqns(cell):
            for value in () if eqn.view else eqn.ins:
                read = carry_of(cells.raw, value, loops)
                if read is not None and eqn.scope[: len(loops[read])] == loops[read]:
                    inside[read].append(cell)
        for value in cells.behind_loops(cell):
            if (maker := cells.producer(cells.raw.root(value))) is not None:
                on[by_cell[maker.id].at, by_cell[cell.id].at, cells.raw.root(value)] = None
    for read, result, _ in cells.raw.carries:
        maker = None if carry_of(cells.raw, result, loops) is not None else cells.producer(cells.raw.root(result))
        if maker is not None:
            at, value = by_cell[maker.id].at, cells.raw.root(result)
            other_readers = [reader for reader in inside[read] if reader is not maker]
            back |= dict.fromkeys((at, by_cell[reader.id].at, value) for reader in other_readers or inside[read])
    return back, on


def join_arguments(net: Net) -> None:
    """Merge the inputs that are leaves of one argument. One that is a single array keeps its name."""
    groups: dict[str, list[Draft]] = {}
    for draft in net.drafts:
        if draft.op == "input":
            groups.setdefault(net.raw.values[draft.value].argument, []).append(draft)
    net.merge([(group, _join(name, group)) for name, group in groups.items() if len(group) > 1])


def _join(name: str, group: list[Draft]) -> Draft:
    first = group[0]
    outputs = [output for draft in group for output in draft.outputs]
    values = [draft.value for draft in group]
    return Draft(first.at, "input", f"{len(group)} arrays", first.value, name=name, outputs=outputs, leaves=values)


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
    names = dict(zip(raw.output_names, raw.outputs, strict=True))
    net.state = {weight for weight in loose & used - state if _results(raw, names, weight)}
    params = used - net.state - state
    unused = [raw.values[number] for number in numbers["weight"] if number not in used]
    net.sizes = Sizes(
        params=_bytes(raw, params),
        inputs=_bytes(raw, set(numbers["input"]) - loose),
        optimizer=_bytes(raw, loose - state - params),
        forward=sum(output_bytes(net, draft) for draft in net.layers if not draft.op.endswith(BACKWARD)),
        backward=sum(output_bytes(net, draft) for draft in net.layers if draft.op.endswith(BACKWARD)),
        trained=frozenset(raw.values[weight].name for weight in trained(raw, params)),
        unused=sum(math.prod(value.shape) for value in unused if not (value.captured or value.state)),
        state=_bytes(raw, state),
    )


def trained(raw: Raw, params: set[int]) -> set[int]:
    """The parameters whose results depend on the backward pass. All of them where there is none."""
    if not any(eqn.backward for eqn in raw.eqns):
        return params
    names = dict(zip(raw.output_names, raw.outputs, strict=True))
    results = {weight: _results(raw, names, weight) for weight in params}
    if not any(results.values()):  # the gradients stay inside
        return params
    late: dict[int, int] = {}
    while True:
        levels = _levels(raw, late)
        if trained_now := {weight for weight in params if _depends(raw, levels, results[weight])}:
            return trained_now
        # With a staleness, new values depend on pushes of earlier steps, which came as this step hands on its own.
        unused = [n for n, value in enumerate(raw.values) if value.argument and n not in params | late.keys()]
        more = [n for n in unused if _depends(raw, levels, _results(raw, names, n))]
        if not more:
            return trained_now
        late |= dict.fromkeys(more, _DEPENDS)


def _depends(raw: Raw, levels: dict[int, int], values: list[int]) -> bool:
    return any(levels.get(raw.root(value)) == _DEPENDS for value in values)


def _results(raw: Raw, names: dict[str, int], weight: int) -> list[int]:
    """The results that have the path and the shape of a parameter: its gradient, or its new value.

    What is cut into a padded row for each device, (devices, chunk), may come back as a whole array.
    """
    value = raw.values[weight]
    tail, size = value.name.removeprefix(value.argument), math.prod(value.shape)
    devices = value.shape[0] if len(value.shape) == 2 else 0
    named = ((n, raw.values[n].shape) for name, n in names.items() if name.endswith(tail))
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
    reached = reach((end.at for draft in gradients for end in (draft, draft.layer)), sources)
    read: dict[bool, set[int]] = {True: set(), False: set()}  # by what reaches a gradient, and by what does not
    for draft in net.drafts:
        read[draft.at in reached] |= {draft.value} if draft.op == "input" else set(draft.weights)
    return read[False] - read[True] if gradients else set()


def _bytes(raw: Raw, numbers: set[int]) -> int:
    return sum(raw.values[number].bytes for number in numbers)
