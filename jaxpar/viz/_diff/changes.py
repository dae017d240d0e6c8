"""The plain data of a comparison."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from .._graph import Graph, Node

Status = Literal["same", "changed", "added", "removed"]
STATUSES: tuple[Status, ...] = ("same", "changed", "added", "removed")


@dataclass(frozen=True, slots=True)
class Change:
    """A layer or input in both networks, or in one of them.

    Attributes:
        before, after: the node in the first and in the second network. None where there is none.
    """

    before: Node | None
    after: Node | None

    @property
    def node(self) -> Node:
        """The node of the second network, or else of the first."""
        node = self.after or self.before
        assert node is not None
        return node

    @property
    def status(self) -> Status:
        """ "same", "changed", "added" or "removed". Names, scopes and source lines may differ in what is the same."""
        if self.before is None:
            return "added"
        if self.after is None:
            return "removed"
        return "same" if _facts(self.before) == _facts(self.after) else "changed"

    @property
    def params(self) -> int:
        """Elements of its parameters, the second network's less the first's."""
        return (self.after.params if self.after else 0) - (self.before.params if self.before else 0)

    @property
    def flops(self) -> int:
        """FLOPs, the second network's less the first's."""
        return (self.after.flops if self.after else 0) - (self.before.flops if self.before else 0)

    @property
    def bytes(self) -> int:
        """Bytes read and written, the second network's less the first's."""
        return (self.after.bytes if self.after else 0) - (self.before.bytes if self.before else 0)


@dataclass(frozen=True, slots=True, repr=False)
class Diff:
    """What is different in the second of two networks.

    Attributes:
        before, after: the two networks.
        changes: every layer and input of both, in the order of both networks.
    """

    before: Graph
    after: Graph
    changes: tuple[Change, ...]

    @property
    def params(self) -> int:
        """Parameters of the second network less those of the first."""
        return self.after.total_params - self.before.total_params

    @property
    def flops(self) -> int:
        """FLOPs of the second network less those of the first."""
        return self.after.total_flops - self.before.total_flops

    @property
    def bytes(self) -> int:
        """Bytes that the layers read and write, the second network's less the first's."""
        return sum(change.bytes for change in self.changes)

    @property
    def counts(self) -> dict[Status, int]:
        """How many changes there are of each status."""
        found = Counter(change.status for change in self.changes)
        return {status: found[status] for status in STATUSES}

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {status}" for status, count in self.counts.items())
        return f"Diff({counts}, {self.params:+,} parameters, {self.flops:+,} FLOPs, {self.bytes:+,} bytes)"

    def __str__(self) -> str:
        from .table import to_text  # which reads this module

        return to_text(self)


def _facts(node: Node) -> tuple[object, ...]:
    """What two layers that are the same have in common."""
    leaves = tuple(leaf.partition(": ")[2] for leaf in getattr(node, "leaves", ()))
    sizes = node.params, node.flops, node.bytes, node.repeat
    return node.op, node.detail, node.shape, node.dtype, leaves, *sizes
