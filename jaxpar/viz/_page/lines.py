"""The lines of each block, and the ports where they cross its border."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from .._draw.dot import _forward, _named
from .._draw.labels import edge_label
from .._draw.loops import carry_label
from .._draw.style import is_update
from .blocks import Flow, Key, Kind, Line, Port, Tree

_MOST_LINES = 3  # between the same two items; more become one line
CROWDED = 100  # lines in a block, above which only one line joins the same two items

_End = tuple[int, int]  # an item and -1, or -1 and a port


@dataclass(slots=True)
class _Crossing:
    """What flows where in one block.

    Attributes:
        inside: between two of its items, with what is written on it.
        enters: which items read an array from outside.
        leaves: which item an array comes from that is read outside.
    """

    inside: dict[tuple[int, int, Key], str] = field(default_factory=dict[tuple[int, int, Key], str])
    enters: dict[Key, dict[int, None]] = field(default_factory=dict[Key, dict[int, None]])
    leaves: dict[Key, int] = field(default_factory=dict[Key, int])


def draw_lines(tree: Tree) -> None:
    """Give each block its lines and ports, from the outside in."""
    crossings = _crossings(tree)
    work = [tree.root]
    while work:
        item = work.pop()
        groups = _groups(tree, item, crossings[item])
        most = 1 if sum(map(len, groups.values())) > CROWDED else _MOST_LINES
        for (tail, head, kind), keys in groups.items():
            _draw(tree, item, tail, head, kind, keys, most)
        work += [inner for inner in tree.block(item).items if tree.is_block(inner)]
    _draw_pairs(tree)


def _crossings(tree: Tree) -> dict[int, _Crossing]:
    found = {tree.root + at: _Crossing() for at in range(len(tree.blocks))}
    for flow, is_named in zip(tree.flows, _named([flow.edge for flow in tree.flows], set()), strict=True):
        key = flow.source, flow.kind
        out, into = tree.way_out(flow.source), tree.way_out(flow.target)
        while len(out) > 2 and len(into) > 2 and out[-2] == into[-2]:
            out.pop()
            into.pop()
        label = _label(tree, flow) if is_named else ""
        inside = found[out[-1]].inside
        inside[out[-2], into[-2], key] = inside.get((out[-2], into[-2], key)) or label
        for inner, block in itertools.pairwise(out[:-1]):
            found[block].leaves[key] = inner
        for inner, block in itertools.pairwise(into[:-1]):
            found[block].enters.setdefault(key, {})[inner] = None
    return found


def _groups(tree: Tree, item: int, crossing: _Crossing) -> dict[tuple[_End, _End, Kind], dict[Key, str]]:
    """The arrays between each two ends, with the label of each."""
    found: dict[tuple[_End, _End, Kind], dict[Key, str]] = {}
    for (tail, head, key), label in crossing.inside.items():
        found.setdefault(((tail, -1), (head, -1), key[1]), {})[key] = label
    for port, number in tree.block(item).ports.items():
        for key in sorted(port.keys):
            for inner in crossing.enters[key] if port.enters else (crossing.leaves[key],):
                ends = ((-1, number), (inner, -1)) if port.enters else ((inner, -1), (-1, number))
                found.setdefault((*ends, key[1]), {})[key] = ""
    return found


def _label(tree: Tree, flow: Flow) -> str:
    if flow.kind == "carry":
        return carry_label(flow.edge)
    source, target = tree.nodes[flow.source], tree.nodes[flow.target]
    if source.op == "weight" or (source.is_backward and is_update(target)):
        return ""
    return edge_label(flow.edge, source)


def _draw(tree: Tree, item: int, tail: _End, head: _End, kind: Kind, keys: dict[Key, str], most: int) -> None:
    """One line for each array, or one for all where they are more than `most` or cross the border."""
    crosses = tail[0] < 0 or head[0] < 0
    together = len(keys) > most or crosses
    bundles = [(frozenset(keys), "" if crosses else f"{len(keys)} arrays")]
    for bundle, label in bundles if together else [(frozenset({key}), text) for key, text in keys.items()]:
        line = Line(tail[0], head[0], tail[1], head[1], bundle, label, kind)
        if line.tail >= 0 and tree.is_block(line.tail):
            line.tail_port = _port(tree, line.tail, Port(bundle, False, kind == "back"))
        if line.head >= 0 and tree.is_block(line.head):
            line.head_port = _port(tree, line.head, Port(bundle, True, kind != "back"))
        tree.block(item).lines.append(line)


def _port(tree: Tree, item: int, port: Port) -> int:
    """The number of the port, which is added where it is missing."""
    ports = tree.block(item).ports
    return ports.setdefault(port, len(ports))


def _draw_pairs(tree: Tree) -> None:
    """Join each layer with its gradient, where both are in one block."""
    number = {node.name: at for at, node in enumerate(tree.nodes)}
    by_name = {node.name: node for node in tree.nodes}
    for node in tree.nodes:
        layer = _forward(by_name, node)
        if layer is None:
            continue
        pair = number[layer.name], number[node.name]
        if tree.parent[pair[0]] != tree.parent[pair[1]]:
            continue
        block = tree.block(tree.parent[pair[0]])
        block.pairs.append(pair)
        if layer.op != "Loss":
            block.lines.append(Line(*pair, kind="pair"))
