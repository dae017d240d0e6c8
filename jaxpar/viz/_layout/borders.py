"""Where a repeated block begins: where a person would cut it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .._graph import common_prefix
from .items import path_of
from .net import Draft, Net, shared_scope

_FOLLOWERS = frozenset("Activation LayerNorm BatchNorm GroupNorm InstanceNorm RMSNorm Normalization Dropout".split())


@dataclass(frozen=True, slots=True)
class Block:
    """Copies of a block among the layers, wherever they begin."""

    net: Net
    layers: list[Draft]
    sources: dict[int, set[int]]
    period: int
    count: int

    def copies(self, start: int) -> list[list[Draft]]:
        """The layers of each copy."""
        starts = (start + copy * self.period for copy in range(self.count))
        return [self.layers[at : at + self.period] for at in starts]


def best_start(block: Block, starts: Iterable[int]) -> int:
    """The best place to begin: the border of a module, else of a region, else of a name. Else the first."""
    starts = list(starts)
    if len(starts) == 1:
        return starts[0]
    end = starts[-1] + block.period * block.count
    paths = {draft.at: path_of(block.net, draft) for draft in block.layers[starts[0] : end]}
    return max(
        starts, key=lambda at: (_modules(block, at), _is_region(block, at), _names(block, at, paths), _leads(block, at))
    )


def _modules(block: Block, start: int) -> int:
    """How many scopes each copy has for itself."""
    copies = block.copies(start)
    return min(len(shared_scope(copy)) for copy in copies) - len(shared_scope(*copies))


def _is_region(block: Block, start: int) -> bool:
    """Whether one layer alone hands on from a copy to what follows."""
    end = start + block.period
    before = {draft.at: draft for draft in block.layers[start:end]}
    read: set[int] = set()
    for draft in block.layers[end : end + 2 * block.period]:
        read.update(s for s in block.sources.get(draft.at, ()) if s in before and _is_same_way(before[s], draft))
    return len(read) == 1


def _is_same_way(source: Draft, draft: Draft) -> bool:
    """Whether both are forward or both are gradients. What a gradient reads of its layer is no way out of a block."""
    return (source.forward is None) == (draft.forward is None)


def _names(block: Block, start: int, paths: dict[int, tuple[str, ...]]) -> int:
    """How many keys the parameters of each copy share, which the copies do not share."""
    copies = [[path for draft in copy if (path := paths[draft.at])] for copy in block.copies(start)]
    if not all(copies):
        return 0
    shared = [common_prefix(copy) for copy in copies]
    return min(map(len, shared)) - len(common_prefix(shared))


def _leads(block: Block, start: int) -> bool:
    """Whether the first layer is none that belongs to what is before it. Decides between places that are as good."""
    return block.layers[start].op not in _FOLLOWERS
