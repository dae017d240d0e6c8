"""From a `Net` to the `Graph`, which is plain data."""

from __future__ import annotations

import math
from collections import Counter

from .._graph import Edge, Graph, Node
from .._read.raw import Raw
from .arguments import leaf_of
from .names import name_drafts
from .net import Draft, Net


def to_graph(net: Net) -> Graph:
    """The graph of a net. The same function always gives the same graph."""
    names = name_drafts(net)
    counted: set[int] = set(net.state)
    nodes, weights, weight_edges = list[Node](), dict[int, Node](), list[Edge]()
    for draft in net.drafts:
        new = [w for w in draft.weights if w not in counted]
        counted.update(new)
        nodes.append(_node(net.raw, draft, names[draft.at], sum(_size(net.raw, w) for w in new)))
        for weight in draft.weights:
            value = net.raw.values[weight]
            weights.setdefault(
                weight, Node(value.name, "weight", "", value.shape, value.dtype, params=_size(net.raw, weight))
            )
            weight_edges.append(Edge(value.name, names[draft.at], value.shape, value.dtype))
    edges = _edges(net, names)
    total = sum(_size(net.raw, weight) for weight in counted - net.state)
    scopes = tuple(sorted(net.repeats.items()))
    return Graph(tuple(nodes), edges, tuple(weights.values()), tuple(weight_edges), total, net.raw.count, scopes)


def _edges(net: Net, names: dict[int, str]) -> tuple[Edge, ...]:
    """One edge from each node to each that reads it."""
    count = Counter((source, target) for source, target, _ in net.edges)
    joined = {draft.at for draft in net.drafts if draft.leaves}
    found: list[Edge] = []
    for (source, target), number in sorted(_one_each(net).items()):
        value, arrays = net.raw.values[number], count[source, target]
        label = leaf_of(value.name) if source in joined and arrays == 1 else ""
        found.append(Edge(names[source], names[target], value.shape, value.dtype, label, arrays))
    for source, target, number in net.carries:
        value = net.raw.values[number]
        found.append(Edge(names[source], names[target], value.shape, value.dtype, carry=True))
    return tuple(found)


def _one_each(net: Net) -> dict[tuple[int, int], int]:
    """One array for each edge. The one that the source is known by comes first, then the largest."""
    known = {draft.at: draft.value for draft in net.drafts}
    found: dict[tuple[int, int], int] = {}
    for source, target, value in sorted(net.edges):
        old = found.get((source, target))
        larger = old is not None and net.raw.values[value].bytes > net.raw.values[old].bytes
        if old is None or value == known.get(source) or (larger and old != known.get(source)):
            found[source, target] = value
    return found


def _size(raw: Raw, weight: int) -> int:
    return math.prod(raw.values[weight].shape)


def _node(raw: Raw, draft: Draft, name: str, params: int) -> Node:
    value = raw.values[draft.value]
    leaves = [raw.values[leaf] for leaf in draft.leaves]
    dtypes = {leaf.dtype for leaf in leaves}
    return Node(
        name=name,
        op=draft.op,
        detail=draft.detail,
        shape=() if leaves else value.shape,
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
    )
