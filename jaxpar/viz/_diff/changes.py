"""A layer that is in both of two networks, or in one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .._graph import Node

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


def count(changes: Sequence[Change]) -> dict[Status, int]:
    """How many changes there are of each status."""
    found = Counter(change.status for change in changes)
    return {status: found[status] for status in STATUSES}


def _facts(node: Node) -> tuple[object, ...]:
    """What two layers that are the same have in common."""
    leaves = tuple(leaf.partition(": ")[2] for leaf in node.leaves)
    sizes = node.params, node.flops, node.bytes, node.repeat
    return node.op, node.detail, node.shape, node.dtype, leaves, *sizes
