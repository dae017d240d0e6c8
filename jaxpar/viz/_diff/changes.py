"""What is different between two networks: their layers matched, as plain data and as a table.

`compare` is where it begins: both lists of layers are aligned as two texts are, by how much two layers are alike.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..._core.text import columns, printable
from .._draw.style import output_text
from .._draw.table import GAP, line, parameter_path, ruled
from .._graph import Graph, Node, human
from .._scopes import Scope

Status = Literal["same", "changed", "added", "removed"]
STATUSES: tuple[Status, ...] = ("same", "changed", "added", "removed")


@dataclass(frozen=True, slots=True)
class Change:
    """A layer or input in both networks, or in one of them.

    Attributes:
        before, after: the node in the first and in the second network, or None.
    """

    before: Node | None
    after: Node | None

    @property
    def node(self) -> Node:
        """The node of the second network, or else of the first network."""
        node = self.after or self.before
        assert node is not None
        return node

    @property
    def status(self) -> Status:
        """One of "same", "changed", "added" and "removed".

        Equal nodes may differ in name, scope and source line.
        """
        if self.before is None:
            return "added"
        if self.after is None:
            return "removed"
        return "same" if _facts(self.before) == _facts(self.after) else "changed"

    @property
    def params(self) -> int:
        """The difference in elements of parameters, second network minus first."""
        return self._more("params")

    @property
    def flops(self) -> int:
        """The difference in FLOPs, second network minus first."""
        return self._more("flops")

    @property
    def bytes(self) -> int:
        """The difference in bytes read and written, second network minus first."""
        return self._more("bytes")

    def _more(self, what: str) -> int:
        return getattr(self.after, what, 0) - getattr(self.before, what, 0)


def _facts(node: Node) -> tuple[object, ...]:
    """What two layers that are the same have in common."""
    leaves = tuple(leaf.partition(": ")[2] for leaf in node.leaves)
    sizes = node.params, node.flops, node.bytes, node.repeat
    return node.op, node.detail, node.shape, node.dtype, leaves, *sizes


_HEAD = ("", "Layer (type)", "Output Shape", "Δ Params", "Δ FLOPs", "Δ Bytes")
_MARKS = {"same": " ", "changed": "~", "added": "+", "removed": "-"}
_NUMBERS = (3, 4, 5)


def to_text(diff: Diff, width: int = 120) -> str:
    """The table as text. Layers that are the same are counted below it."""
    shown = [change for change in diff.changes if change.status != "same"]
    cells = [_HEAD, *map(_cells, shown)]
    widths = _widths(cells, width)
    return ruled([line(row, widths, _NUMBERS) for row in cells], totals(diff))


def totals(diff: Diff) -> list[str]:
    """How many layers changed, and the sums of both networks."""
    before, after = diff.before, diff.after
    counts = ", ".join(f"{number:,} {status}" for status, number in diff.counts.items())
    return [
        f"Layers: {counts}",
        f"Total params: {_step(before.total_params, after.total_params)}",
        f"Total FLOPs: {_step(before.total_flops, after.total_flops)}",
        f"Bytes read and written: {_step(*(sum(node.bytes for node in graph.nodes) for graph in (before, after)))}",
    ]


def _step(before: int, after: int) -> str:
    """ "100 → 150 (+50, +50.0 %)"."""
    if before == after:
        return f"{after:,}"
    share = f", {(after - before) / before:+.1%}" if before else ""
    return f"{before:,} → {after:,} ({after - before:+,}{share})"


def arrow(before: str, after: str) -> str:
    """ "128 → 256", or one of both where they are equal."""
    return after if before == after else f"{before or 'none'} → {after or 'none'}"


def kind(node: Node) -> str:
    """The kind of a layer, with what its label adds."""
    return f"{node.kind} {node.detail}".strip() if node.op != "input" else "input"


def _arrows(before: str, after: str) -> str:
    """An arrow for each word where both have as many words and some are equal, else one for all."""
    split_texts = before.split(" "), after.split(" ")
    if len(split_texts[0]) == len(split_texts[1]) and set(zip(*split_texts, strict=True)) & {
        (word, word) for word in split_texts[0]
    }:
        return " ".join(map(arrow, *split_texts))
    return arrow(before, after)


def change_texts(change: Change) -> tuple[str, str, str]:
    """The name, the kind and the output of a change, both where they differ."""
    before, after = change.before or change.node, change.after or change.node
    times = arrow(*(f"×{node.repeat}" if node.repeat > 1 else "" for node in (before, after)))
    name = change.node.name + (f" {times}" if times else "")
    return name, _arrows(kind(before), kind(after)), _arrows(output_text(before), output_text(after))


def _cells(change: Change) -> tuple[str, ...]:
    name, layer, shape = change_texts(change)
    deltas = [f"{delta:+,}" if delta else "0" for delta in (change.params, change.flops, change.bytes)]
    return _MARKS[change.status], printable(f"{name} ({layer})"), shape, *deltas


def _widths(cells: list[tuple[str, ...]], width: int) -> list[int]:
    mark, name, shape, *numbers = (max(map(columns, column)) for column in zip(*cells, strict=True))
    left = width - 1 - sum(numbers) - 5 * len(GAP)
    shape = min(shape, max(left // 3, left - name))
    return [max(mark, 1), min(name, left - shape), shape, *numbers]


def to_html(diff: Diff, title: str = "") -> str:
    """The table for a page, in its colours."""
    head = "".join(f"<th style='text-align:left;padding:2px 8px'>{name}</th>" for name in _HEAD)
    body = "".join(map(_html_row, (change for change in diff.changes if change.status != "same")))
    caption = f"<caption>{html.escape(printable(title))}</caption>" if title.strip() else ""
    foot = "".join(f"<p>{html.escape(text)}</p>" for text in totals(diff))
    return f"<table style='color:inherit'>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{foot}"


def _html_row(change: Change) -> str:
    cells = "".join(
        f"<td style='text-align:{'right' if number in _NUMBERS else 'left'};padding:2px 8px'>{html.escape(text)}</td>"
        for number, text in enumerate(_cells(change))
    )
    return f"<tr>{cells}</tr>"


def delta_text(number: int, unit: str) -> str:
    """ "+52 MFLOP"."""
    return ("+" if number > 0 else "−" if number < 0 else "±") + human(abs(number), unit)


@dataclass(frozen=True, slots=True, repr=False)
class Diff:
    """The differences between two networks.

    Attributes:
        before, after: the two networks.
        changes: all layers and inputs of both networks, in order.
    """

    before: Graph
    after: Graph
    changes: tuple[Change, ...]

    @property
    def params(self) -> int:
        """The difference in parameters, second network minus first."""
        return self.after.total_params - self.before.total_params

    @property
    def flops(self) -> int:
        """The difference in FLOPs, second network minus first."""
        return self.after.total_flops - self.before.total_flops

    @property
    def bytes(self) -> int:
        """The difference in bytes read and written, second network minus first."""
        return sum(change.bytes for change in self.changes)

    @property
    def counts(self) -> dict[Status, int]:
        """The number of changes of each status."""
        counts = Counter(change.status for change in self.changes)
        return {status: counts[status] for status in STATUSES}

    def __repr__(self) -> str:
        counts = ", ".join(f"{number} {status}" for status, number in self.counts.items())
        return f"Diff({counts}, {self.params:+,} parameters, {self.flops:+,} FLOPs, {self.bytes:+,} bytes)"

    def __str__(self) -> str:
        return to_text(self)


_NUMBERED = re.compile(r"\d(/|$)")


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
    # rows[i][j] is the best score of before[i:] and after[j:]. A pair that cannot be one layer scores 0, and is never
    # taken.
    rows = [[0.0] * (len(after) + 1) for _ in range(len(before) + 1)]
    scores = [[_likeness(a, b) for b in after] for a in before]
    for i in range(len(before) - 1, -1, -1):
        row, below, score = rows[i], rows[i + 1], scores[i]
        for j in range(len(after) - 1, -1, -1):
            row[j] = max(below[j], row[j + 1], below[j + 1] + score[j] if score[j] else 0.0)
    # Now from the front, along the choices that gave these scores.
    changes: list[Change] = []
    i = j = 0
    while i < len(before) and j < len(after):
        if scores[i][j] and rows[i][j] == rows[i + 1][j + 1] + scores[i][j]:
            changes.append(Change(before[i], after[j]))
            i, j = i + 1, j + 1
        elif rows[i][j] == rows[i + 1][j]:
            changes.append(Change(before[i], None))
            i += 1
        else:
            changes.append(Change(None, after[j]))
            j += 1
    return [*changes, *(Change(node, None) for node in before[i:]), *(Change(None, node) for node in after[j:])]


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
    return tuple(outer if outer.times is None else outer.stem for outer in map(Scope.of, scope))
