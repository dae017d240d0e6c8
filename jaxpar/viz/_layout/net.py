"""The graph while it is made: drafts, which collapsing merges, their names, and the plain data that they become."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from .._graph import BACKWARD, Edge, Graph, Node, Sizes
from .._read.raw import Raw, Value
from .._scopes import Path, Scope, common_prefix
from .._searches import order


@dataclass(slots=True, eq=False)
class Draft:
    """A node in the making.

    The others are as in a `Node`.
    """

    at: int  # its place in the trace. Inputs are below 0.
    op: str
    detail: str
    value: int  # the array it is known by
    scope: Path = ()
    source: str = ""
    flops: int = 0
    bytes: int = 0
    equations: int = 0
    weights: list[int] = field(default_factory=list)  # the parameters that it reads
    outputs: list[str] = field(default_factory=list)
    repeat: int = 1
    forward: Draft | None = None  # of a backward draft, the draft whose gradient it is
    name: str = ""
    own: int | None = None  # how many of the weights are of the first copy, where it is repeated
    layers: int = 1  # how many it stands for, where a scope is closed
    closed: Path = ()  # that scope
    leaves: list[int] = field(default_factory=list)  # of an input with several arrays, those arrays
    eqns: list[int] = field(default_factory=list)  # the ids of its equations, those of all copies
    tied: bool = False  # whether all its parameters are another layer's
    borrowed: set[int] = field(default_factory=set[int])  # those of its parameters that are another layer's
    alone: bool = False  # whether it is in no part, as what is behind the gradients of a step
    sends: list[str] = field(default_factory=list)  # the collective that it is, or those that it stands for
    kept: int = 0  # the bytes that it computes and a gradient reads
    # the modules around it and its own name, from the outside in. Empty where nothing names it.
    path: tuple[str, ...] = ()

    @property
    def layer(self) -> Draft:
        """The layer that this is, or whose gradient it is."""
        return self if self.forward is None else self.forward

    def add(self, drafts: Iterable[Draft]) -> None:
        """Add what others cost, read and return."""
        same = [self, *drafts]
        self.flops = sum(draft.flops for draft in same)
        self.bytes = sum(draft.bytes for draft in same)
        self.kept = sum(draft.kept for draft in same)
        self.weights = list(dict.fromkeys(weight for draft in same for weight in draft.weights))
        self.outputs = [output for draft in same for output in draft.outputs]
        self.eqns = [eqn for draft in same for eqn in draft.eqns]
        self.sends = list(dict.fromkeys(sent for draft in same for sent in draft.sends))


@dataclass(slots=True)
class Net:
    """Drafts, and the edges between them."""

    raw: Raw
    drafts: list[Draft]
    edges: dict[tuple[int, int, int], None]  # (from, to, value), in order
    # weights that only an optimizer reads. They are no parameters of the network.
    state: set[int] = field(default_factory=set)
    repeats: dict[Path, int] = field(default_factory=dict[Path, int])  # the number of copies of each repeated scope
    # as `edges`, from what computes a value in one pass of a loop to what reads it in the next
    carries: dict[tuple[int, int, int], None] = field(default_factory=dict)
    # Of the equations, before anything is collapsed: the bytes of their arrays, the elements of the captured ones that
    # are no parameters, the primitives without a formula, and the shapes of products that the same line transposes.
    sizes: Sizes = field(default_factory=Sizes)
    constants: int = 0
    uncounted: set[str] = field(default_factory=set[str])
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])

    @property
    def layers(self) -> list[Draft]:
        """The drafts that compute something."""
        return [draft for draft in self.drafts if draft.op != "input"]

    def copy(self) -> Net:
        """The same with drafts of its own, which closing and naming change. The equations are shared."""
        made = {id(draft): replace(draft) for draft in self.drafts}
        for draft in made.values():
            draft.forward = made.get(id(draft.forward), draft.forward)
        return replace(self, drafts=list(made.values()), edges=dict(self.edges), repeats=dict(self.repeats))

    def sources(self) -> dict[int, set[int]]:
        """The drafts that each draft reads."""
        sources: dict[int, set[int]] = {}
        for source, target, _ in self.edges:
            sources.setdefault(target, set()).add(source)
        return sources

    def ordered(self) -> list[Draft]:
        """The drafts after all that they read."""
        by_at, sources = {draft.at: draft for draft in self.drafts}, self.sources()
        rank = {at: number for number, at in enumerate(by_at)}
        return [by_at[at] for at in order({at: sources.get(at, set[int]()) for at in by_at}, rank.__getitem__)]

    def merge(self, groups: list[tuple[list[Draft], Draft]]) -> None:
        """Replace each group of drafts by one. Edges inside a group vanish."""
        self.drafts = sorted([*self.drafts, *(new for _, new in groups)], key=lambda draft: draft.at)
        self.substitute({draft.at: new for group, new in groups for draft in group})
        self.drafts = self.ordered()  # one stands where its first stood, which may be before what the others read

    def substitute(self, into: dict[int, Draft]) -> None:
        """Drop drafts for what they become, and send their edges there. Loops vanish."""
        self.drafts = [draft for draft in self.drafts if into.get(draft.at, draft) is draft]
        for draft in self.drafts:
            if draft.forward is not None:
                draft.forward = into.get(draft.forward.at, draft.forward)
        # An edge to itself vanishes, but an array that a layer hands to its own next pass stays.
        names, edges = {at: new.at for at, new in into.items()}, dict[tuple[int, int, int], None]()
        for source, target, value in self.edges:
            source, target = names.get(source, source), names.get(target, target)
            if source != target:
                edges[source, target, value] = None
        self.edges = edges
        ends = ((names.get(s, s), names.get(t, t), s == t and s not in names, value) for s, t, value in self.carries)
        self.carries = {(s, t, value): None for s, t, is_own, value in ends if s != t or is_own}


def shared_scope(*groups: list[Draft]) -> Path:
    """The scope that all drafts of all groups are in."""
    return common_prefix(draft.scope for group in groups for draft in group)


def name_drafts(net: Net) -> dict[int, str]:
    """A unique name for each draft, the same for the same function."""
    names: dict[int, str] = {draft.at: draft.name for draft in net.drafts if draft.op == "input"}
    taken = set(names.values()) | {value.name for value in net.raw.values if value.kind == "weight"}
    numbers: dict[str, int] = {}
    ends: dict[tuple[str, ...], set[tuple[str, ...]]] = {}  # the paths of layers that end alike
    for draft in net.drafts:
        for start in range(len(draft.path)):
            ends.setdefault(draft.path[start:], set()).add(draft.path)
    layers = [draft for draft in net.drafts if draft.op != "input" and draft.forward is None]
    for draft in sorted(layers, key=lambda draft: bool(draft.name)):  # a box that others are closed in comes after them
        # The end of its path, as much of it as no other layer has.
        tails = (draft.path[start:] for start in range(len(draft.path) - 1, -1, -1))
        short = next((tail for tail in tails if len(ends[tail]) == 1), draft.path)
        names[draft.at] = _unique(draft.name or "/".join(short), _base(draft), taken, numbers)
    for draft in net.drafts:
        if draft.forward is not None:
            # The name of a box that is called by what is in it says nothing of a part of its gradients.
            in_part = isinstance(draft.forward.op, Scope) and draft.forward.op.kind == "part"
            base = draft.op if in_part else names.get(draft.forward.at, _base(draft)) + BACKWARD
            is_layer = in_part and draft.layers == 1
            names[draft.at] = _unique("" if is_layer else base, _base(draft) if is_layer else base, taken, numbers)
    return names


def _base(draft: Draft) -> str:
    """The name of a draft without its own, before the number."""
    name = draft.detail if draft.op == "Activation" and draft.detail else draft.op
    return re.sub(r"[^\w.]+", "_", name).strip("_").lower()


def _unique(wanted: str, base: str, taken: set[str], numbers: dict[str, int]) -> str:
    """The wanted name, with a number where it is taken or empty. `taken` and `numbers` grow."""
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


def to_graph(net: Net) -> Graph:
    """The graph of a net. The same function always gives the same graph."""
    names = name_drafts(net)
    counted: set[int] = set(net.state)
    nodes, weights, weight_edges = list[Node](), dict[int, Node](), list[Edge]()
    read: dict[int, list[int]] = {}
    for _, target, value in sorted(net.edges):
        read.setdefault(target, []).append(value)
    for draft in net.drafts:
        # A shared parameter counts in the first layer that uses it.
        params, state = _sizes(net.raw, [w for w in draft.weights if w not in counted])
        counted.update(draft.weights)
        array, leaves = net.raw.values[draft.value], [net.raw.values[leaf] for leaf in draft.leaves]
        node = Node(
            name=names[draft.at],
            op=draft.op,
            detail=draft.detail,
            shape=() if leaves else shape_of(net, draft.value),
            dtype=array.dtype if len({leaf.dtype for leaf in leaves}) < 2 else "",
            params=params,
            flops=draft.flops,
            bytes=draft.bytes,
            scope=draft.scope,
            source=draft.source,
            weights=tuple(net.raw.values[weight].name for weight in draft.weights),
            repeat=draft.repeat,
            equations=draft.equations,
            outputs=tuple(draft.outputs),
            leaves=tuple(f"{leaf.name}: {leaf.dtype}[{','.join(map(str, leaf.shape))}]" for leaf in leaves),
            state=state,
            input_shapes=tuple(shape_of(net, value) for value in dict.fromkeys(read.get(draft.at, ()))),
            output_bytes=output_bytes(net, draft),
            kept_bytes=draft.kept,
            sends=tuple(draft.sends),
            copy_weights=len(draft.weights) if draft.own is None else draft.own,
        )
        nodes.append(node)
        for weight in draft.weights:
            value = net.raw.values[weight]
            params, state = _sizes(net.raw, [weight])
            detail = "/".join(value.path) or leaf_of(value)
            weights.setdefault(
                weight, Node(value.name, "weight", detail, value.shape, value.dtype, params=params, state=state)
            )
            weight_edges.append(Edge(value.name, names[draft.at], value.shape, value.dtype))
    params, state = _sizes(net.raw, counted - net.state)
    return Graph(
        nodes=tuple(nodes),
        edges=_edges(net, names),
        weights=tuple(weights.values()),
        weight_edges=tuple(weight_edges),
        total_params=params,
        equations=net.raw.count,
        scopes=tuple(sorted(net.repeats.items())),
        sizes=net.sizes,
        uncounted=tuple(sorted(net.uncounted)),
        total_state=state,
        total_constants=net.constants,
        copies=net.raw.copies,
    )


def shape_of(net: Net, value: int) -> tuple[int, ...]:
    """The shape of an array as the user's line leaves it."""
    return net.shapes.get(value, net.raw.values[value].shape)


def output_bytes(net: Net, draft: Draft) -> int:
    """The bytes of a layer's first output, in each copy and in each pass of the loops around it."""
    return 0 if draft.op == "input" else net.raw.values[draft.value].bytes * draft.repeat * turns(draft.scope)


def turns(scope: Path) -> int:
    """How often the loops of a scope run what is in it."""
    return math.prod(part.times or 1 for part in scope if part.is_region)


def _edges(net: Net, names: dict[int, str]) -> tuple[Edge, ...]:
    """One edge from each node to each that reads it."""
    arrays: dict[tuple[int, int], list[int]] = {}
    for source, target, value in sorted(net.edges):
        arrays.setdefault((source, target), []).append(value)
    drafts, edges = {draft.at: draft for draft in net.drafts}, list[Edge]()
    for (source, target), numbers in arrays.items():
        draft = drafts[source]  # the array that it is known by comes first, then the largest
        number = max(numbers, key=lambda number: (number == draft.value, net.raw.values[number].bytes))
        value = net.raw.values[number]
        label = leaf_of(value) if draft.leaves and len(numbers) == 1 else ""
        edges.append(Edge(names[source], names[target], shape_of(net, number), value.dtype, label, len(numbers)))
    for source, target, number in net.carries:
        value = net.raw.values[number]
        edges.append(Edge(names[source], names[target], value.shape, value.dtype, carry=True))
    return tuple(edges)


def _sizes(raw: Raw, weights: Iterable[int]) -> tuple[int, int]:
    """The elements of parameters and of state."""
    sizes = [0, 0]
    for weight in weights:
        value = raw.values[weight]
        sizes[value.state] += value.elements
    return sizes[0], sizes[1]


def leaf_of(value: Value) -> str:
    """The path of a leaf in its argument, for people.

    >>> leaf_of(Value((), "int32", 4, "input", 0, "batch['image'].data[0]", group="batch"))
    'image.data[0]'
    """
    return re.sub(r"\['([^']*)'\]", r".\1", value.name.removeprefix(value.argument)).lstrip(".")
