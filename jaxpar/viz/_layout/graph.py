"""From a `Net` to the `Graph`, which is plain data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from .._graph import Edge, Graph, Node
from .._read.costs import is_uncounted
from .._read.raw import Raw
from .build import leaf_of
from .net import Draft, Net, name_drafts

_Shapes = dict[int, tuple[int, ...]]  # of values


def to_graph(net: Net) -> Graph:
    """The graph of a net. The same function always gives the same graph."""
    names, shapes = name_drafts(net), _written_shapes(net.raw)
    counted: set[int] = set(net.state)
    nodes, weights, weight_edges = list[Node](), dict[int, Node](), list[Edge]()
    for draft in net.drafts:
        new = [w for w in draft.weights if w not in counted]
        counted.update(new)
        nodes.append(_node(net.raw, draft, names[draft.at], shapes, *_sizes(net.raw, new)))
        for weight in draft.weights:
            value = net.raw.values[weight]
            params, state = _sizes(net.raw, [weight])
            detail = "/".join(value.path) or leaf_of(value)
            node = Node(value.name, "weight", detail, value.shape, value.dtype, params=params, state=state)
            weights.setdefault(weight, node)
            weight_edges.append(Edge(value.name, names[draft.at], value.shape, value.dtype))
    params, state = _sizes(net.raw, counted - net.state)
    uncounted = {eqn.prim for eqn in net.raw.eqns if not eqn.view and is_uncounted(eqn.prim, eqn.params)}
    return Graph(
        nodes=tuple(nodes),
        edges=_edges(net, names, shapes),
        weights=tuple(weights.values()),
        weight_edges=tuple(weight_edges),
        total_params=params,
        equations=net.raw.count,
        scopes=tuple(sorted(net.repeats.items())),
        sizes=net.sizes,
        uncounted=tuple(sorted(uncounted | net.raw.uncounted)),
        total_state=state,
        total_constants=_constants(net.raw),
    )


def _written_shapes(raw: Raw) -> _Shapes:
    """The shapes of products that the same line transposes, as an einsum does, where nothing else reads them."""
    reads = Counter(value for eqn in raw.eqns for value in eqn.ins)
    found: _Shapes = {}
    for eqn in (eqn for eqn in raw.eqns if eqn.view and eqn.prim == "transpose"):
        root = raw.root(eqn.ins[0])
        maker = raw.values[root].producer
        if maker is None or raw.eqns[maker].prim != "dot_general" or reads[root] > 1:
            continue
        if raw.own_stack(raw.eqns[maker]) == raw.own_stack(eqn):
            found[root] = eqn.out_shape
    return found


def _edges(net: Net, names: dict[int, str], shapes: _Shapes) -> tuple[Edge, ...]:
    """One edge from each node to each that reads it."""
    arrays: dict[tuple[int, int], list[int]] = {}
    for source, target, value in sorted(net.edges):
        arrays.setdefault((source, target), []).append(value)
    drafts, found = {draft.at: draft for draft in net.drafts}, list[Edge]()
    for (source, target), numbers in arrays.items():
        draft = drafts[source]  # the array that it is known by comes first, then the largest
        number = max(numbers, key=lambda number: (number == draft.value, net.raw.values[number].bytes))
        value = net.raw.values[number]
        label = leaf_of(value) if draft.leaves and len(numbers) == 1 else ""
        shape = shapes.get(number, value.shape)
        found.append(Edge(names[source], names[target], shape, value.dtype, label, len(numbers)))
    for source, target, number in net.carries:
        value = net.raw.values[number]
        found.append(Edge(names[source], names[target], value.shape, value.dtype, carry=True))
    return tuple(found)


def _sizes(raw: Raw, weights: Iterable[int]) -> tuple[int, int]:
    """The elements of parameters and of state."""
    found = [0, 0]
    for weight in weights:
        value = raw.values[weight]
        found[value.state] += math.prod(value.shape)
    return found[0], found[1]


def _constants(raw: Raw) -> int:
    """The elements of the captured arrays that are read and are no parameters. Scalars do not count."""
    read = {raw.root(value) for eqn in raw.eqns for value in eqn.ins}
    captured = (value for number, value in enumerate(raw.values) if number in read and value.producer is None)
    return sum(size for value in captured if value.kind == "const" and (size := math.prod(value.shape)) > 1)


def _node(raw: Raw, draft: Draft, name: str, shapes: _Shapes, params: int, state: int) -> Node:
    value = raw.values[draft.value]
    leaves = [raw.values[leaf] for leaf in draft.leaves]
    dtypes = {leaf.dtype for leaf in leaves}
    return Node(
        name=name,
        op=draft.op,
        detail=draft.detail,
        shape=() if leaves else shapes.get(draft.value, value.shape),
        dtype=value.dtype if len(dtypes) < 2 else "",
        params=params,
        flops=draft.flops,
        bytes=draft.bytes,
        scope=draft.scope,
        source=draft.source,
        weights=tuple(raw.values[weight].name for weight in draft.weights),
        repeat=draft.repeat,
        equations=draft.equations,
        outputs=tuple(draft.outputs),
        leaves=tuple(f"{leaf.name}: {leaf.dtype}[{','.join(map(str, leaf.shape))}]" for leaf in leaves),
        state=state,
    )
