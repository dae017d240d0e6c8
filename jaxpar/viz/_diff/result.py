"""The plain data of a comparison."""

from __future__ import annotations

from dataclasses import dataclass

from .._graph import Graph
from .changes import Change, Status, count
from .table import to_text


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
        return count(self.changes)

    def __repr__(self) -> str:
        counts = ", ".join(f"{number} {status}" for status, number in self.counts.items())
        return f"Diff({counts}, {self.params:+,} parameters, {self.flops:+,} FLOPs, {self.bytes:+,} bytes)"

    def __str__(self) -> str:
        return to_text(self.before, self.after, self.changes)
