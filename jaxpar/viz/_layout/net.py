"""Cells as a small graph of drafts, which collapsing merges further until it becomes the `Graph`."""

from __future__ import annotations

import heapq
import math
import re
from dataclasses import dataclass, field

from .._fold.cells import Cell, Cells
from .._fold.table import COLLECTIVES
from .._graph import BACKWARD, Edge, Graph, Node, common_prefix, human
from .._read.jaxpr import Raw
from .._read.source import describe

REGIONS = ("scan ×", "while", "cond", "branch ", "pmap ", "shard_map ", "remat", "custom_")


@dataclass(slots=True, eq=False)
class Draft:
    """A node in the making. `at` is its place in the trace; `value` the array it is known by."""

    at: int
    op: str
    detail: str
    value: int
    scope: tuple[str, ...] = ()
    source: str = ""
    flops: int = 0
    bytes: int = 0
    equations: int = 0
    weights: list[int] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    repeat: int = 1
    forward: Draft | None = None
    name: str = ""
    own: int | None = None  # how many of the weights are those of the first copy, where it is repeated


@dataclass(slots=True)
class Net:
    """Drafts, and edges (from, to, value) between them."""

    raw: Raw
    drafts: list[Draft]
    edges: dict[tuple[int, int, int], None]
    state: set[int] = field(default_factory=set)  # what only an optimizer reads: no parameters
    repeats: dict[tuple[str, ...], int] = field(default_factory=dict)

    def merge(self, groups: list[tuple[list[Draft], Draft]]) -> None:
        """Each group of drafts becomes one; edges inside a group vanish."""
        into = {draft.at: new for group, new in groups for draft in group}
        kept = [draft for draft in self.drafts if draft.at not in into]
        self.drafts = sorted([*kept, *(new for _, new in groups)], key=lambda draft: draft.at)
        for draft in self.drafts:
            if draft.forward is not None:
                draft.forward = into.get(draft.forward.at, draft.forward)
        self.rename({at: new.at for at, new in into.items()})

    def rename(self, names: dict[int, int]) -> None:
        """Send the ends of edges elsewhere; loops vanish."""
        edges = {}
        for source, target, value in self.edges:
            source, target = names.get(source, source), names.get(target, target)
            if source != target:
                edges[source, target, value] = None
        self.edges = edges


def build(cells: Cells) -> Net:
    """One draft a cell and one an input; parameters are lists on the drafts that use them."""
    raw = cells.raw
    drafts, edges, by_cell = [], {}, {}
    inputs = {n: value for n, value in enumerate(raw.values) if value.kind == "input"}
    for number, value in inputs.items():
        drafts.append(Draft(number - len(raw.values), "input", "", number, name=value.name))
    for cell in _topological(cells):
        draft = _draft(cells, cell, len(by_cell))
        drafts.append(draft)
        by_cell[cell.id] = draft
    for cell in cells:
        by_cell[cell.id].forward = by_cell.get(cell.forward.id) if cell.forward is not None else None
        for root in cells.inputs(cell):
            source = cells.producer(root)
            if source is not None and source is not cell:
                edges[by_cell[source.id].at, by_cell[cell.id].at, root] = None
            elif root in inputs:
                edges[root - len(raw.values), by_cell[cell.id].at, root] = None
    for name, output in zip(raw.output_names, raw.outputs, strict=True):
        owner = cells.producer(raw.root(output))
        if owner is not None:
            by_cell[owner.id].outputs.append(name)
    _number_scopes(drafts)
    net = Net(raw, drafts, edges, _optimizer_state(cells))
    _drop_unused(net)
    return net


def _number_scopes(drafts: list[Draft]) -> None:
    """A scope that is entered again is another one: "Linear", then "Linear (2)". Gradients go to their layers."""
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
            numbered = (*numbered, name if count == 1 or _is_region(name) else f"{name} ({count})")
        last_plain, last, draft.scope = plain, numbered, numbered
    for draft in drafts:
        if draft.forward is not None and not any(_is_region(name) for name in draft.scope):
            draft.scope = draft.forward.scope


def _is_region(name: str) -> bool:
    """Whether a scope is a loop, a branch or a map over devices, which are numbered already."""
    return name.startswith(REGIONS)


def _optimizer_state(cells: Cells) -> set[int]:
    """Where there are gradients, what no differentiated layer reads is no parameter of the network."""
    backward = [cell for cell in cells if cell.op.endswith(BACKWARD)]
    layers = {cell.forward.id for cell in backward if cell.forward is not None}
    read = {w for cell in cells for w in cells.weights(cell)}
    trained = {w for cell in cells if cell.id in layers or cell in backward for w in cells.weights(cell)}
    return read - trained if backward else set()


def _topological(cells: Cells) -> list[Cell]:
    """Cells after all that they read, else in the order of the trace."""
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
    found = []
    while ready:
        _, number = heapq.heappop(ready)
        found.append(cells.cells[number])
        for reader in readers.get(number, ()):
            waiting[reader] -= 1
            if waiting[reader] == 0:
                heapq.heappush(ready, (first[reader], reader))
    return found


def _drop_unused(net: Net) -> None:
    """Arguments that nothing reads, and what stands alone and is not computed."""
    used = {end for source, target, _ in net.edges for end in (source, target)}
    net.drafts = [d for d in net.drafts if d.at in used or d.outputs or d.flops]


def _draft(cells: Cells, cell: Cell, at: int) -> Draft:
    raw, eqns = cells.raw, cells.eqns(cell)
    real = [eqn for eqn in eqns if not eqn.view] or eqns
    inside = {out for eqn in eqns for out in eqn.outs}
    output = cells.output(cell)
    reads: dict[int, int] = {}
    for eqn in real:
        for value, shape in zip(eqn.ins, eqn.in_shapes, strict=False):
            root = raw.root(value)
            if root not in inside:  # a slice or a device's share is smaller than the whole array, a broadcast larger
                whole = raw.values[root]
                share = whole.bytes * math.prod(shape) // max(1, math.prod(whole.shape))
                reads[root] = max(reads.get(root, 0), min(share, whole.bytes))
    detail = cell.detail
    if cell.op in COLLECTIVES and cell.op != "axis_index":
        detail = f"{detail}, {human(sum(reads.values()), 'B')}"
    return Draft(
        at=at,
        op=cell.op,
        detail=detail,
        value=output,
        scope=common_prefix(eqn.scope for eqn in real),
        source=describe(real[0].stack),
        flops=sum(eqn.flops for eqn in eqns),
        bytes=sum(reads.values()) + raw.values[output].bytes,
        equations=len(eqns),
        weights=cells.weights(cell),
    )


def to_graph(net: Net) -> Graph:
    """Plain data, with names: unique, and the same for the same function."""
    names = _names(net)
    counted: set[int] = set(net.state)
    nodes, weights, weight_edges, drawn = [], [], [], set()
    for draft in net.drafts:
        new = [w for w in draft.weights if w not in counted]
        counted.update(new)
        nodes.append(_node(net.raw, draft, names[draft.at], sum(_size(net.raw, w) for w in new)))
        for weight in draft.weights:
            value = net.raw.values[weight]
            if weight not in drawn:
                drawn.add(weight)
                weights.append(Node(value.name, "weight", "", value.shape, value.dtype, params=_size(net.raw, weight)))
            weight_edges.append(Edge(value.name, names[draft.at], value.shape, value.dtype))
    edges = tuple(
        Edge(names[source], names[target], net.raw.values[value].shape, net.raw.values[value].dtype)
        for (source, target), value in sorted(_one_each(net).items())
    )
    total = sum(_size(net.raw, weight) for weight in counted - net.state)
    scopes = tuple(sorted(net.repeats.items()))
    return Graph(tuple(nodes), edges, tuple(weights), tuple(weight_edges), total, net.raw.count, scopes)


def _one_each(net: Net) -> dict[tuple[int, int], int]:
    """One edge where several arrays go the same way: the one the source is known by, else the largest."""
    known = {draft.at: draft.value for draft in net.drafts}
    found: dict[tuple[int, int], int] = {}
    for source, target, value in sorted(net.edges):
        old = found.get((source, target))
        larger = old is not None and net.raw.values[value].bytes > net.raw.values[old].bytes
        if old is None or value == known.get(source) or (larger and old != known.get(source)):
            found[source, target] = value
    return found


def _size(raw: Raw, weight: int) -> int:
    size = 1
    for length in raw.values[weight].shape:
        size *= length
    return size


def _node(raw: Raw, draft: Draft, name: str, params: int) -> Node:
    value = raw.values[draft.value]
    return Node(
        name, draft.op, draft.detail, value.shape, value.dtype, params, draft.flops, draft.bytes, draft.scope,
        draft.source, tuple(raw.values[w].name for w in draft.weights), draft.repeat, draft.equations,
        tuple(draft.outputs),
    )  # fmt: skip


def _names(net: Net) -> dict[int, str]:
    """The name of the parameters' container or of the module where only this layer has it, else kind and number."""
    alone: dict[tuple[str, ...], int] = {}
    for draft in net.drafts:
        if not draft.op.endswith(BACKWARD):
            for depth in range(1, len(draft.scope) + 1):
                alone[draft.scope[:depth]] = alone.get(draft.scope[:depth], 0) + 1
    names: dict[int, str] = {draft.at: draft.name for draft in net.drafts if draft.op == "input"}
    taken = set(names.values()) | {value.name for value in net.raw.values if value.kind == "weight"}
    numbers: dict[str, int] = {}
    used: set[int] = set()
    for draft in net.drafts:
        if draft.op != "input" and draft.forward is None:
            tied = bool(draft.weights) and used.issuperset(draft.weights)
            used.update(draft.weights)
            wanted = "" if tied else _own_name(net, draft, alone)
            names[draft.at] = _unique(wanted, _base(draft), taken, numbers)
    for draft in net.drafts:
        if draft.forward is not None:
            base = names.get(draft.forward.at, _base(draft)) + BACKWARD
            names[draft.at] = _unique(base, base, taken, numbers)
    return names


def _own_name(net: Net, draft: Draft, alone: dict[tuple[str, ...], int]) -> str:
    if draft.name:
        return draft.name
    if draft.scope and alone.get(draft.scope) == 1 and "×" not in draft.scope[-1] and "=" not in draft.scope[-1]:
        return draft.scope[-1] if len(draft.scope) == 1 else "/".join(draft.scope[-2:])
    if draft.weights and not draft.op.endswith(BACKWARD):
        return _name_of_weights([net.raw.values[weight].name for weight in draft.weights[: draft.own]])
    return ""


_GENERIC = frozenset(
    [
        "w",
        "W",
        "weight",
        "weights",
        "kernel",
        "b",
        "B",
        "bias",
        "scale",
        "offset",
        "embedding",
        "embeddings",
        "table",
        "gamma",
        "beta",
        "g",
    ]
)


def _name_of_weights(names: list[str]) -> str:
    """ "conv1" for params['conv1']['weight'] and its bias; "attn/q" for params['attn']['q']."""
    keys = re.findall(r"[\w-]+", names[0])[1:]
    path = [key for key in keys if not key.isdigit()]
    if not path or keys[-1].isdigit() or path[0] in _GENERIC:
        return ""  # a number, or a mere "weight", tells one layer from another no better than its kind does
    leaves = {key for name in names for key in re.findall(r"[\w-]+", name)[-1:]}
    if len(path) > 1 and leaves <= _GENERIC:
        path = path[:-1]
    return "/".join(path[-2:])


def _base(draft: Draft) -> str:
    name = draft.detail if draft.op == "Activation" and draft.detail else draft.op
    return re.sub(r"[^\w.]+", "_", name).strip("_").lower()


def _unique(wanted: str, base: str, taken: set[str], numbers: dict[str, int]) -> str:
    if wanted and wanted not in taken:
        taken.add(wanted)
        return wanted
    base = wanted or base
    while True:
        number = numbers[base] = numbers.get(base, -1) + 1
        name = f"{base}{number}" if not wanted else f"{base} {number + 2}"
        if name not in taken:
            taken.add(name)
            return name
