"""Virtual shards: sums in the order of one binary tree over numbered terms, and batches with room for all shards.

The tree is over the numbers 0 to n-1. Its inner nodes are the aligned blocks whose lengths are powers of two, and a
block without a right half is its left half. A device holds consecutive terms. It adds them up to the largest blocks
that it has all terms of, its nodes. Then the devices exchange nodes, and each adds up what is left of the tree. So the
bits of a sum do not depend on who holds the terms.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from .._core.arrays import nbytes
from .mesh import spans_processes

# Bytes. Up to here every device gathers all nodes. From here on each adds up one share of them.
_SHARED_BYTES = 64 << 10
Node = tuple[int, int]  # (first term, level): the block of 2**level terms


@dataclasses.dataclass(frozen=True)
class Deal:
    """The distribution of numbered terms over devices: in order, at most `slots` for each."""

    terms: int
    devices: int  # how many

    @property
    def slots(self) -> int:
        """How many terms a device has room for."""
        return -(-self.terms // self.devices)

    @functools.cached_property
    def nodes(self) -> tuple[tuple[Node, ...], ...]:
        """The nodes of each device, in order."""
        return tuple(_add_up(*self.range_of(d))[0] for d in range(self.devices))

    @functools.cached_property
    def merges(self) -> tuple[tuple[int, ...], ...]:
        """For each device, how many nodes, the last ones, are added to each of its terms when that comes."""
        return tuple(_add_up(*self.range_of(d))[1] for d in range(self.devices))

    @property
    def kept(self) -> int:
        """The most nodes that a device has at the end."""
        return max(map(len, self.nodes))

    def range_of(self, device: int) -> tuple[int, int]:
        """The first of its terms, and one more than the last."""
        return min(device * self.slots, self.terms), min((device + 1) * self.slots, self.terms)


def _add_up(first: int, end: int) -> tuple[tuple[Node, ...], tuple[int, ...]]:
    """The nodes of the terms from `first` to `end`, and how many nodes are added to each term."""
    nodes: list[Node] = []
    counts: list[int] = []
    for i in range(first, end):
        node, count = (i, 0), 0
        while nodes and nodes[-1] == (node[0] - (1 << node[1]), node[1]) and nodes[-1][0] % (2 << node[1]) == 0:
            node, count = (nodes.pop()[0], node[1] + 1), count + 1
        nodes.append(node)
        counts.append(count)
    return tuple(nodes), tuple(counts)


def sum_everywhere(deal: Deal, nodes: jax.Array, axis_name: str) -> jax.Array:
    """The sum of all terms on every device, from each device's nodes (kept, n), inside a mapped axis."""
    if deal.devices == 1:
        return _root(deal, nodes[None])
    if nbytes(nodes[0]) < _SHARED_BYTES or (deal.devices == 2 and deal.kept == 1):
        return _root(deal, lax.all_gather(nodes, axis_name))
    kept, size = nodes.shape
    chunk = -(-size // deal.devices)  # each node is padded, and cut in a row for each device
    rows = jnp.pad(nodes, ((0, 0), (0, deal.devices * chunk - size))).reshape(kept, deal.devices, chunk)
    share = _root(deal, lax.all_to_all(rows, axis_name, split_axis=1, concat_axis=0))
    return lax.all_gather(share, axis_name).reshape(-1)[:size]


def _root(deal: Deal, nodes: jax.Array) -> jax.Array:
    """The sum of all terms, from the nodes (devices, kept, ...) of all devices."""
    # Where each device that has terms has one node, and these are a level of the tree.
    if deal.slots & (deal.slots - 1) == 0 and deal.kept == 1:
        level = nodes[: sum(map(len, deal.nodes)), 0]
        while level.shape[0] > 1:
            pairs = level.shape[0] // 2
            level = jnp.concatenate([level[0 : 2 * pairs : 2] + level[1 : 2 * pairs : 2], level[2 * pairs :]])
        return level[0]
    found = {node: nodes[d, i] for d, own in enumerate(deal.nodes) for i, node in enumerate(own)}
    return _block(found, (0, (deal.terms - 1).bit_length()), deal.terms)


def _block(found: dict[Node, jax.Array], node: Node, terms: int) -> jax.Array:
    if node in found:
        return found[node]
    first, level = node
    left, middle = _block(found, (first, level - 1), terms), first + (1 << level - 1)
    return left if middle >= terms else left + _block(found, (middle, level - 1), terms)


# Batches that the devices cannot share evenly.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PaddedBatch:
    """A batch padded to the same number of shards on each device.

    `data.batches(..., virtual_shards=V)` yields such batches if the number of devices D does not divide V. Each shard
    has B / V rows. The devices take the shards in order, ceil(V / D) each. A step with `virtual_shards=V` ignores the
    rows of padding at the end.

    Attributes:
        arrays: a pytree of arrays (D * ceil(V / D) * B / V, ...).
        virtual_shards: V.
    """

    arrays: Any
    virtual_shards: int = dataclasses.field(metadata={"static": True})

    def __getitem__(self, name: Any) -> Any:
        """One of the arrays, with the rows of the padding."""
        return self.arrays[name]


def padded_rows(count: int, virtual_shards: int, parts: int) -> int:
    """The rows of a batch of `count` examples in which each part has room for as many shards: of 64 in 8 for 3, 72."""
    return Deal(virtual_shards, parts).slots * parts * (count // virtual_shards)


def pad_rows(batch: Any, rows: int, axis: int = 0, along: NamedSharding | None = None) -> Any:
    """The batch, or its shapes, with so many rows at its end that belong to no example. Arrays that span processes are
    laid out by `along`.
    """

    def pad(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((*x.shape[:axis], x.shape[axis] + rows, *x.shape[axis + 1 :]), x.dtype)
        widths = [(0, rows if i == axis else 0) for i in range(np.ndim(x))]
        if isinstance(x, jax.Array):
            return _padding(tuple(widths), along if spans_processes(x) else None)(x)
        return np.pad(np.asarray(x), np.array(widths))

    return jax.tree.map(pad, batch) if rows else batch


@functools.lru_cache(maxsize=64)
def _padding(widths: tuple[tuple[int, int], ...], sharding: NamedSharding | None) -> Any:
    return jax.jit(lambda x: jnp.pad(x, widths), out_shardings=sharding)
