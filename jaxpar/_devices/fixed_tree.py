"""Sums in the order of one binary tree over numbered terms, whoever holds the terms.

The tree is over the numbers 0 to n-1. Its inner nodes are the aligned blocks whose lengths are powers of two, and a
block without a right half is its left half. A device holds consecutive terms. It adds them up to the largest blocks
that it has all terms of, its nodes. Then the devices exchange nodes, and each adds up what is left of the tree.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core.arrays import nbytes
from . import buckets
from .buckets import BucketLimits

# Bytes. Up to here every device gathers all nodes. From here on each adds up one share of them.
_SHARED_BYTES = 64 << 10
Node = tuple[int, int]  # (first term, level): the block of 2**level terms


@dataclasses.dataclass(frozen=True)
class Deal:
    """How numbered terms are dealt to devices: in order, `slots` to each, until there are none left.

    Attributes:
        terms: n.
        devices: how many.
    """

    terms: int
    devices: int

    @property
    def slots(self) -> int:
        """How many terms a device has room for."""
        return -(-self.terms // self.devices)

    @property
    def is_even(self) -> bool:
        """Whether no slot is free."""
        return self.slots * self.devices == self.terms

    @functools.cached_property
    def nodes(self) -> tuple[tuple[Node, ...], ...]:
        """The nodes of each device, in order."""
        return tuple(_add_up(*self._range(d))[0] for d in range(self.devices))

    @functools.cached_property
    def merges(self) -> np.ndarray:
        """int32 (devices * slots,): how many nodes, the last ones, are added to each new term. 0 in free slots."""
        found = [_add_up(*self._range(d))[1] for d in range(self.devices)]
        return np.array([(*counts, *[0] * (self.slots - len(counts))) for counts in found], np.int32).reshape(-1)

    @functools.cached_property
    def depth(self) -> int:
        """The most nodes that a device has at once."""
        return max(_add_up(*self._range(d))[2] for d in range(self.devices))

    @property
    def kept(self) -> int:
        """The most nodes that a device has at the end."""
        return max(map(len, self.nodes))

    @property
    def is_aligned(self) -> bool:
        """Whether each device that has terms has one node, and these are a level of the tree."""
        return self.slots & (self.slots - 1) == 0 and self.kept == 1

    def _range(self, device: int) -> tuple[int, int]:
        return min(device * self.slots, self.terms), min((device + 1) * self.slots, self.terms)


def _add_up(first: int, end: int) -> tuple[tuple[Node, ...], tuple[int, ...], int]:
    """The nodes of the terms from `first` to `end`, how many nodes are added to each term, and the most at once."""
    nodes: list[Node] = []
    counts: list[int] = []
    most = 1
    for i in range(first, end):
        node, count = (i, 0), 0
        while nodes and nodes[-1] == (node[0] - (1 << node[1]), node[1]) and nodes[-1][0] % (2 << node[1]) == 0:
            node, count = (nodes.pop()[0], node[1] + 1), count + 1
        nodes.append(node)
        counts.append(count)
        most = max(most, len(nodes))
    return tuple(nodes), tuple(counts), most


def start(deal: Deal, like: Any) -> Any:
    """No nodes yet: zeros, room for `deal.depth` of each leaf."""
    return jax.tree.map(lambda x: jnp.zeros((deal.depth, *x.shape), x.dtype), like)


def add_term(nodes: Any, count: jax.Array, term: Any, merges: jax.Array) -> tuple[Any, jax.Array]:
    """The nodes of a device, and how many, after one more term. `merges` of them are added to it first."""

    def merge(carry: tuple[jax.Array, jax.Array, Any]) -> tuple[jax.Array, jax.Array, Any]:
        left, count, node = carry
        before = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, count - 1, keepdims=False), nodes)
        return left - 1, count - 1, jax.tree.map(jnp.add, before, node)

    _, count, node = lax.while_loop(lambda carry: carry[0] > 0, merge, (merges, count, term))
    return jax.tree.map(lambda x, new: lax.dynamic_update_index_in_dim(x, new, count, 0), nodes, node), count + 1


def sum_everywhere(deal: Deal, nodes: Sequence[jax.Array], axis_name: str, limits: BucketLimits) -> list[jax.Array]:
    """The sum of all terms on every device, out of each device's nodes (kept, *shape) of several values."""
    groups = buckets.plan_of(nodes, limits)
    sums = [_sum_of(deal, array, axis_name) for array in buckets.pack(nodes, groups, axis=1)]
    return buckets.unpack(sums, [x.shape[1:] for x in nodes], groups)


def _sum_of(deal: Deal, nodes: jax.Array, axis_name: str) -> jax.Array:
    if deal.devices == 1:
        return _root(deal, nodes[None])
    if nbytes(nodes[0]) < _SHARED_BYTES or (deal.devices == 2 and deal.kept == 1):
        return _root(deal, lax.all_gather(nodes, axis_name))
    rows = _to_rows(nodes, deal.devices)
    share = _root(deal, lax.all_to_all(rows, axis_name, split_axis=1, concat_axis=0))
    flat = lax.all_gather(share, axis_name).reshape(-1)
    return flat[: nodes[0].size].reshape(nodes.shape[1:])


def _to_rows(nodes: jax.Array, devices: int) -> jax.Array:
    """(kept, devices, chunk): each node flat, padded, cut in a row for each device."""
    flat = nodes.reshape(nodes.shape[0], -1)
    chunk = -(-flat.shape[1] // devices)
    flat = jnp.pad(flat, ((0, 0), (0, devices * chunk - flat.shape[1])))
    return flat.reshape(nodes.shape[0], devices, chunk)


def _root(deal: Deal, nodes: jax.Array) -> jax.Array:
    """The sum of all terms out of the nodes (devices, kept, ...) of all devices."""
    if deal.is_aligned:
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
