"""Match the layers of two networks: the best alignment of both in the order in which they are computed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .._draw.tree import parameter_path
from .._graph import Graph, Node
from .changes import Change
from .result import Diff

_COUNT = re.compile(r"([._]?\d+–\d+)? ?×\d+/?")
_NUMBERED = re.compile(r"\d+(/|$)")


def compare(before: Graph, after: Graph) -> Diff:
    """Compare two networks.

    Layers keep their order. Of all ways to match them, one is taken in which most is alike: the names of the weights
    count most, then the kind of layer, then what its label says, its shape and its dtype. So a layer that was inserted
    does not shift those behind it. Names that only count, such as `Dense_1`, count less than the kind.
    """
    inputs = _align(before.inputs, after.inputs)
    return Diff(before, after, (*inputs, *_align(before.layers, after.layers)))


def _align(before: Sequence[Node], after: Sequence[Node]) -> list[Change]:
    """The best alignment. What is equal at both ends is matched first."""
    start = 0
    while start < min(len(before), len(after)) and _is_equal(before[start], after[start]):
        start += 1
    end = 0
    while end < min(len(before), len(after)) - start and _is_equal(before[-1 - end], after[-1 - end]):
        end += 1
    middle = _best(before[start : len(before) - end], after[start : len(after) - end])
    first = [Change(a, b) for a, b in zip(before[:start], after[:start], strict=True)]
    last = zip(before[len(before) - end :], after[len(after) - end :], strict=True)
    return [*first, *middle, *(Change(a, b) for a, b in last)]


def _is_equal(a: Node, b: Node) -> bool:
    return Change(a, b).status == "same" and _key(a) == _key(b)


def _best(before: Sequence[Node], after: Sequence[Node]) -> list[Change]:
    """The alignment of the highest score, by dynamic programming from the end."""
    rows = [[0.0] * (len(after) + 1) for _ in range(len(before) + 1)]
    scores = [[_likeness(a, b) for b in after] for a in before]
    for i in range(len(before) - 1, -1, -1):
        row, below, score = rows[i], rows[i + 1], scores[i]
        for j in range(len(after) - 1, -1, -1):
            row[j] = max(below[j], row[j + 1], below[j + 1] + score[j] if score[j] else 0.0)
    found: list[Change] = []
    i = j = 0
    while i < len(before) and j < len(after):
        if scores[i][j] and rows[i][j] == rows[i + 1][j + 1] + scores[i][j]:
            found.append(Change(before[i], after[j]))
            i, j = i + 1, j + 1
        elif rows[i][j] == rows[i + 1][j]:
            found.append(Change(before[i], None))
            i += 1
        else:
            found.append(Change(None, after[j]))
            j += 1
    return [*found, *(Change(node, None) for node in before[i:]), *(Change(None, node) for node in after[j:])]


def _likeness(a: Node, b: Node) -> float:
    """How much two nodes are alike. 0 where they cannot be the same layer."""
    key = _key(a)
    named = 0.0
    if key and key == _key(b):
        named = 1.5 if _NUMBERED.search(key) else 6.0
    if a.is_backward != b.is_backward or (a.op != b.op and not named):
        return 0.0
    alike = 4.0 * (a.op == b.op) + (a.detail == b.detail) + (a.shape == b.shape)
    return named + alike + 0.5 * (a.dtype == b.dtype) + 0.25 * (_plain(a.scope) == _plain(b.scope))


def _key(node: Node) -> str:
    """What names a node: its first weight, or its argument. "" for the others, named by their kind and a number."""
    if node.weights:
        return parameter_path(node.weights[0])
    return node.name if node.op == "input" else ""


def _plain(scope: tuple[str, ...]) -> tuple[str, ...]:
    """A scope without the numbers of copies."""
    return tuple(_COUNT.sub("", name) for name in scope)
