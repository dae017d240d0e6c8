"""From cells to a `Net`: a draft for each cell and argument, and the edges between them."""

from __future__ import annotations

import math
from collections import Counter

from ..._core.text import plural
from .._fold.calls import OPTIMIZERS, updates
from .._fold.cells import SENT, Cell, Cells, after_gradients, carries_of, plain_name, sources_of
from .._graph import BACKWARD, human
from .._read.raw import Eqn, Raw
from .._read.source import Frame, describe
from .._searches import order
from .modules import set_paths, set_scopes
from .net import Draft, Net, leaf_of


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
    sources = sources_of(cells)
    ordered = [cells.cells[number] for number in order(sources, first.__getitem__)]
    late = after_gradients(cells, sources)
    updated, returned = updates(cells, late), _returned(raw)
    for cell in ordered:
        draft = _draft(cells, cell, len(by_cell))
        draft.value = returned.get(draft.value, draft.value)
        if count := updated.get(cell.id):
            draft.detail = plural(count, "array")
            draft.name = draft.op if count > 1 else draft.name  # not what the names of its parameters begin with
        drafts.append(draft)
        by_cell[cell.id] = draft
    for cell in cells:
        by_cell[cell.id].forward = by_cell.get(cell.forward.id) if cell.forward is not None else None

    carries, behind_loops = carry_edges(cells, by_cell)
    edges = _edges(cells, by_cell, returned) | behind_loops
    for name, output in zip(raw.output_names, raw.outputs, strict=True):
        owner = cells.producer(raw.root(output))
        if owner is not None:
            by_cell[owner.id].outputs.append(name)

    net = Net(raw, drafts, edges, carries=carries, shapes=_written_shapes(raw))
    set_scopes(cells, net, by_cell, late)
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


def _edges(cells: Cells, by_cell: dict[int, Draft], returned: dict[int, int]) -> dict[tuple[int, int, int], None]:
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
                    given = returned.get(root, root) if outside == root else outside
                    edges[by_cell[source.id].at, by_cell[cell.id].at, given] = None
            elif raw.values[root].kind == "input":
                edges[root - len(raw.values), by_cell[cell.id].at, root] = None
    return edges


def _returned(raw: Raw) -> dict[int, int]:
    """The values that a function casts or reshapes before it returns them, and what all others read of them.

    `one_hot` returns no bools, and a quantization returns int8.
    """
    forms: dict[int, set[int]] = {}
    for eqn in raw.eqns:
        for value in () if eqn.view else eqn.ins:
            forms.setdefault(raw.root(value), set()).add(_form(raw, value, eqn))
    return {root: read.pop() for root, read in forms.items() if len(read) == 1}


def _form(raw: Raw, value: int, reader: Eqn) -> int:
    """What a reader is given of a value: the last view of it that is nearer to its maker than to the reader."""
    root = raw.root(value)
    maker = raw.values[root].producer
    if value == root or maker is None or raw.outside(value) != root:
        return root
    made, elements = raw.eqns[maker].stack, math.prod(raw.values[root].shape)
    for shown in raw.shown(value)[:-1]:
        view = raw.values[shown].producer
        if view is None or math.prod(raw.values[shown].shape) != elements:  # XLA writes no array that is broadcast
            continue
        if _functions_around(made, raw.eqns[view].stack) > _functions_around(made, reader.stack):
            return shown
    return root


def _functions_around(first: tuple[Frame, ...], second: tuple[Frame, ...]) -> int:
    """How many calls of functions are around both of two equations."""
    for depth, (one, other) in enumerate(zip(first, second, strict=False)):
        if one.call != other.call:
            return depth + (one.function == other.function)
    return min(len(first), len(second)) + (len(first) == len(second))


def _written_shapes(raw: Raw) -> dict[int, tuple[int, ...]]:
    """The shapes of products that the same line transposes, as an einsum does, where nothing else reads them."""
    reads = Counter(value for eqn in raw.eqns for value in eqn.ins)
    shapes: dict[int, tuple[int, ...]] = {}
    for eqn in (eqn for eqn in raw.eqns if eqn.view and eqn.prim == "transpose"):
        root = raw.root(eqn.ins[0])
        maker = raw.values[root].producer
        if maker is None or raw.eqns[maker].prim != "dot_general" or reads[root] > 1:
            continue
        if raw.own_stack(raw.eqns[maker]) == raw.own_stack(eqn):
            shapes[root] = eqn.out_shape
    return shapes


def _draft(cells: Cells, cell: Cell, at: int) -> Draft:
    eqns = cells.eqns(cell)
    real = [eqn for eqn in eqns if not eqn.view] or eqns
    sent = [eqn for eqn in real if plain_name(eqn.prim) in SENT]
    kind, sends = cell.op.removesuffix(BACKWARD), list[str]()
    if sent and kind in SENT:  # the gradient of an all_gather sends by another one
        sends = [kind] if kind == cell.op else list(dict.fromkeys(plain_name(eqn.prim) for eqn in sent))
    output, read = cells.output(cell), _bytes_read(cells.raw, sent if sends else eqns, converted=bool(sends))
    detail = cell.detail
    if index := _index(cells, cell):
        detail = f"{detail}, by {index}" if detail else f"by {index}"
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
        sends=sends,
        name=cell.op if cell.op in OPTIMIZERS else "",  # not that of a parameter
    )


_BY_INDEX = ("gather", "take", "scatter", "Segment")  # how the names of layers begin that read or write by an index


def _index(cells: Cells, cell: Cell) -> str:
    """What the rows of a gather or a sum of segments are chosen by: the name of an argument, or nothing."""
    steps = [e for e in cells.eqns(cell) if e.prim == "gather" or e.prim.startswith("scatter")]
    if len(steps) != 1 or not cell.op.startswith(_BY_INDEX) or cell.op.endswith(BACKWARD):
        return ""
    index = cells.raw.of(steps[0].ins[1])
    return (leaf_of(index) or index.name) if index.kind == "input" else ""


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
                for read in carries_of(cells.raw, value, loops):
                    if eqn.scope[: len(loops[read])] == loops[read]:
                        inside[read].append(cell)
        for value in cells.behind_loops(cell):
            if (maker := cells.producer(cells.raw.root(value))) is not None:
                on[by_cell[maker.id].at, by_cell[cell.id].at, cells.raw.root(value)] = None
    for read, result, _ in cells.raw.carries:
        maker = None if carries_of(cells.raw, result, loops) else cells.producer(cells.raw.root(result))
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
