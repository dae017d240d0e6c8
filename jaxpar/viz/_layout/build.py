"""From cells to a `Net`: a draft for each cell and input."""

from __future__ import annotations

import heapq
import math

from .._fold.cells import Cell, Cells, plain_name
from .._fold.optimizers import OPTIMIZERS, updates
from .._fold.patterns import SENT
from .._graph import BACKWARD, human, is_region
from .._read.raw import Eqn, Raw
from .._read.source import describe
from .carries import carry_edges
from .joins import fill_modules
from .net import Draft, Net
from .scopes import number_calls, set_paths, set_scopes


def build(cells: Cells) -> Net:
    """The net of all cells and inputs. Parameters are lists on the drafts that read them."""
    raw = cells.raw
    drafts, by_cell = list[Draft](), dict[int, Draft]()
    inputs = {n: value for n, value in enumerate(raw.values) if value.kind == "input"}
    for number, value in inputs.items():
        drafts.append(Draft(number - len(raw.values), "input", "", number, name=value.name))
    ordered = _topological(cells)
    updated = updates(cells, ordered)
    for cell in ordered:
        draft = _draft(cells, cell, len(by_cell))
        if count := updated.get(cell.id):
            draft.detail = f"{count} array{'s' * (count > 1)}"
            draft.name = draft.op if count > 1 else draft.name  # not what the names of its parameters begin with
        drafts.append(draft)
        by_cell[cell.id] = draft
    for cell in cells:
        by_cell[cell.id].forward = by_cell.get(cell.forward.id) if cell.forward is not None else None
    carries, behind_loops = carry_edges(cells, by_cell)
    edges = _edges(cells, by_cell) | behind_loops
    for name, output in zip(raw.output_names, raw.outputs, strict=True):
        owner = cells.producer(raw.root(output))
        if owner is not None:
            by_cell[owner.id].outputs.append(name)
    if set_scopes(cells, by_cell):
        number_calls(drafts)
        fill_modules(drafts, edges)
    else:
        _number_scopes(drafts)
    _scopes_of_gradients(drafts)
    net = Net(raw, drafts, edges, _optimizer_state(cells), carries=carries)
    _drop_unused(net)
    set_paths(net)
    return net


def _edges(cells: Cells, by_cell: dict[int, Draft]) -> dict[tuple[int, int, int], None]:
    """The edges between the drafts, in the order of the trace."""
    raw = cells.raw
    found: dict[tuple[int, int, int], None] = {}
    for cell in cells:
        for root in cells.inputs(cell):
            source = cells.producer(root)
            if source is not None and source is not cell:
                found[by_cell[source.id].at, by_cell[cell.id].at, root] = None
            elif raw.values[root].kind == "input":
                found[root - len(raw.values), by_cell[cell.id].at, root] = None
    return found


def _topological(cells: Cells) -> list[Cell]:
    """Cells after all that they read, otherwise in the order of the trace."""
    first = {cell.id: next((e.id for e in cells.eqns(cell) if not e.view), cell.eqns[0]) for cell in cells}
    readers: dict[int, list[int]] = {}
    waiting: dict[int, int] = {}
    for cell in cells:
        sources = {p.id for root in cells.inputs(cell) if (p := cells.producer(root)) is not None}
        sources.discard(cell.id)
        waiting[cell.id] = len(sources)
        for source in sources:
            readers.setdefault(source, []).append(cell.id)
    ready = [(first[number], number) for number, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    found: list[Cell] = []
    while ready:
        _, number = heapq.heappop(ready)
        found.append(cells.cells[number])
        for reader in readers.get(number, ()):
            waiting[reader] -= 1
            if waiting[reader] == 0:
                heapq.heappush(ready, (first[reader], reader))
    return found


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
    """Bytes of the distinct arrays that these equations read from outside.

    Args:
        raw: what has the values.
        eqns: of one cell.
        converted: count an array in the dtype that it was converted to. A layer reads it before, a collective after.
    """
    inside = {out for eqn in eqns for out in eqn.outs}
    reads: dict[int, int] = {}
    for eqn in [eqn for eqn in eqns if not eqn.view] or eqns:
        for value, shape in zip(eqn.ins, eqn.in_shapes, strict=False):
            root = raw.root(value)
            if (
                root not in inside and raw.values[root].kind != "literal"
            ):  # a slice or a device's share is smaller than the whole array, a broadcast larger
                whole = raw.values[value if converted else root]
                share = whole.bytes * math.prod(shape) // max(1, math.prod(whole.shape))
                reads[root] = max(reads.get(root, 0), min(share, whole.bytes))
    return sum(reads.values())


def _number_scopes(drafts: list[Draft]) -> None:
    """Number scopes that are entered again: "Linear", "Linear (2)"."""
    seen: dict[tuple[str, ...], int] = {}
    last_plain: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    for draft in (d for d in drafts if d.op != "input" and not d.op.endswith(BACKWARD)):
        plain, numbered = draft.scope, ()
        same = True
        for depth, name in enumerate(plain):
            same = same and last_plain[: depth + 1] == plain[: depth + 1]
            path = (*numbered, name)
            if same:
                numbered = last[: depth + 1]
                continue
            count = seen[path] = seen.get(path, 0) + 1
            numbered = (*numbered, name if count == 1 or is_region(name) else f"{name} ({count})")
        last_plain, last, draft.scope = plain, numbered, numbered


def _scopes_of_gradients(drafts: list[Draft]) -> None:
    """Gradients get the scope of their layer."""
    for draft in drafts:
        if draft.forward is not None and not any(is_region(name) for name in draft.scope):
            draft.scope = draft.forward.scope


def _optimizer_state(cells: Cells) -> set[int]:
    """Weights that no gradient depends on, where there are gradients. A frozen layer's are parameters."""
    backward = [cell for cell in cells if cell.op.endswith(BACKWARD)]
    layers = [cell.forward for cell in backward if cell.forward is not None]
    read = {w for cell in cells for w in cells.weights(cell)}
    needed = {w for cell in _before(cells, [*backward, *layers]) for w in cells.weights(cell)}
    state = {w for w in read if cells.raw.values[w].state}
    return read - needed - state if backward else set()


def _before(cells: Cells, ends: list[Cell]) -> list[Cell]:
    """These cells and all that they depend on, as far as the update of an optimizer."""
    found = {cell.id: cell for cell in ends}
    work = list(found.values())
    while work:
        for value in cells.inputs(work.pop()):
            cell = cells.producer(value)
            if cell is not None and cell.id not in found and cell.op not in OPTIMIZERS:
                found[cell.id] = cell
                work.append(cell)
    return list(found.values())


def _drop_unused(net: Net) -> None:
    """Drop arguments that nothing reads, and layers without edges that cost nothing."""
    used = {end for source, target, _ in net.edges for end in (source, target)}
    net.drafts = [d for d in net.drafts if d.at in used or d.outputs or d.flops]
    drawn = {draft.at for draft in net.drafts}
    net.carries = {ends: None for ends in net.carries if drawn.issuperset(ends[:2])}
