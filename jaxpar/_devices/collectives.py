"""Sums over the devices of a mapped axis, one for each kind of store, and the buckets in which values are sent.

In a bucket small values are sent as one flat array, while large ones go one by one without a copy. Each collective
costs a rendezvous of all devices, so 256 values of 1 KB are best sent by one collective. Copying 8 values of 4 MB into
one buffer costs more than seven rendezvous. With four CPU devices the two costs are equal at about 16 KB for each
value, which is the default of `BucketLimits`.

The sums run inside `pmap`, `shard_map` or `vmap` with an axis name. Those with `limits` take a list of this device's
values.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding

from .._core import checks
from .._core.arrays import PyTree, Shaped, Tree, nbytes
from .mesh import spans_processes
from .user_mesh import is_split, unsplit

# Bytes. A device that gathers whole values of this size from all others spends more on memory than on messages.
_SHARED_BYTES = 64 << 10
# Terms. Longer sums are loops.
_UNROLLED_TERMS = 16
# Elements. A TPU keeps an array in tiles of 8 lines of 128.
_LINE = 128
# The reduce-scatter of Gloo, by which the CPUs of several processes send, overwrote what it was still sending: wrong
# numbers in chunks of 4 MiB and more, by chance and without an error (jax issue 40830). jax 0.12 has another.
_GLOO_IS_WRONG = tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12)
Shape = tuple[int, ...]
Groups = tuple[tuple[int, ...], ...]  # the positions of the values in each bucket
Array = TypeVar("Array", jax.Array, np.ndarray)


@dataclasses.dataclass(frozen=True)
class BucketLimits:
    """The sizes that decide which values share a bucket."""

    bucket_bytes: int = 4 << 20  # no bucket of several values is larger than this
    alone_bytes: int = 16 << 10  # a value of this many bytes or more never shares a bucket

    def __post_init__(self) -> None:
        for name in ("bucket_bytes", "alone_bytes"):
            checks.number(getattr(self, name), "BucketLimits", name, "a number of bytes of 0 or more", lambda n: n >= 0)


def plan(values: Sequence[Shaped], limits: BucketLimits = BucketLimits()) -> Groups:
    """Which values travel together: groups of positions. Each has a shape and a dtype, one dtype for each group."""
    groups: list[list[int]] = []
    open_buckets: dict[np.dtype[Any], tuple[list[int], int]] = {}  # by dtype: the group that is filled, and its bytes
    for position, value in enumerate(values):
        # The bytes of a random key are jax's own. What is split over another axis of the user's mesh stays split.
        goes_alone = not isinstance(value.dtype, np.dtype) or is_split(value)
        size = 0 if goes_alone else math.prod(value.shape) * value.dtype.itemsize
        if goes_alone or size >= limits.alone_bytes:
            groups.append([position])
            continue
        # It joins the open bucket of its dtype. One that has no room for it is closed, and another one begins.
        group, filled = open_buckets.get(value.dtype, (None, 0))
        if group is None or filled + size > limits.bucket_bytes:
            group, filled = [], 0
            groups.append(group)
        group.append(position)
        open_buckets[value.dtype] = (group, filled + size)
    return tuple(map(tuple, groups))


def pack(values: Sequence[Array], groups: Sequence[Sequence[int]], axis: int = 0, xp: ModuleType = jnp) -> list[Array]:
    """One array for each group: its values one after another along an axis. That of a group of one stays as it is."""
    # The axes before it are kept, and must be equal in a group. The axes from it on are flattened. `xp` is jax.numpy or
    # numpy, whichever the values are of.
    buckets: list[Array] = []
    for group in groups:
        members = [values[i] for i in group]
        if len(members) > 1:
            flat = [v.reshape((*v.shape[:axis], math.prod(v.shape[axis:]))) for v in members]
            members = [xp.concatenate(flat, axis=axis)]
        buckets += members
    return buckets


def unpack(
    packed: Sequence[jax.Array], shapes: Sequence[Shape], groups: Sequence[Sequence[int]], axis: int = 0
) -> list[jax.Array]:
    """Split buckets into values of (*first axes, *shape): the inverse of `pack`."""
    # The first axes are those of the packed array, which may have got them in between: a gather over devices adds one.
    values: dict[int, jax.Array] = {}
    for bucket, group in zip(packed, groups, strict=True):
        start = 0
        for i in group:
            stop = start + math.prod(shapes[i])
            flat = bucket if len(group) == 1 else jax.lax.slice_in_dim(bucket, start, stop, axis=axis)
            values[i] = flat.reshape(bucket.shape[:axis] + tuple(shapes[i]))
            start = stop
    return [values[i] for i in range(len(shapes))]


# Sums over the devices.


def allreduce(
    values: Sequence[jax.Array], axis_name: str, limits: BucketLimits, total: Callable[..., jax.Array] = lax.psum
) -> list[jax.Array]:
    """The sum over the axis of each value, on every device (kind `device`). `total` sums a bucket of them."""
    groups = plan(values, limits)
    sums = [total(bucket, axis_name) for bucket in pack(values, groups)]
    return unpack(sums, [v.shape for v in values], groups)


def gather_sum(values: Sequence[jax.Array], axis_name: str, limits: BucketLimits) -> list[jax.Array]:
    """The sum over the axis of each value, added in the order of the devices (kind `local`)."""
    # Every device gathers the values and adds them itself, so the order does not depend on the backend.
    return allreduce(values, axis_name, limits, _gather_and_sum)


def reduce_scatter(values: Sequence[jax.Array], axis_name: str, limits: BucketLimits) -> list[jax.Array]:
    """This device's (chunk,) of the sum over the axis of each value (kind `sharded`)."""
    shards = lax.axis_size(axis_name)
    rows = [to_rows(v, shards) for v in values]
    groups = plan(rows, limits)
    chunks = [scatter_sum(bucket, axis_name) for bucket in pack(rows, groups, axis=1)]
    return unpack(chunks, [r.shape[1:] for r in rows], groups)


def all_gather(
    chunks: Sequence[jax.Array], shapes: Sequence[Shape], axis_name: str, limits: BucketLimits
) -> list[jax.Array]:
    """Gather the values of these shapes from every device's (chunk,): the inverse of a scatter."""
    # Values in a bucket are copied out of it after the gather, so large values use no bucket, even if their chunks are
    # small.
    shards = lax.axis_size(axis_name)
    groups = plan([jax.ShapeDtypeStruct((shards, *c.shape), c.dtype) for c in chunks], limits)
    gathered = [gather_stack(bucket, axis_name) for bucket in pack(chunks, groups)]  # each (devices, n)
    rows = unpack(gathered, [c.shape for c in chunks], groups, axis=1)
    return [from_rows(r, shape) for r, shape in zip(rows, shapes, strict=True)]


def sum_apart(x: jax.Array, axis_name: str) -> jax.Array:
    """The sum over the axis, by a collective that XLA joins with no other."""
    # XLA joins all-reduces, and also all-gathers. A joined sum of delayed pushes would wait for this step's gradients.
    # XLA does not join all-to-alls.
    count = lax.axis_size(axis_name)

    def of_all(x: jax.Array) -> jax.Array:
        """(devices, *shape), on every device."""
        return lax.all_to_all(jnp.broadcast_to(x[None], (count, *x.shape)), axis_name, split_axis=0, concat_axis=0)

    if nbytes(x) < _SHARED_BYTES:
        return of_all(x).sum(0)
    # (chunk,) of the sum on each device, from (devices, chunk) of the terms.
    chunk = send_rows(to_rows(x, count), axis_name).sum(0)
    return from_rows(of_all(chunk), x.shape)


def gather_stack(value: jax.Array, axis_name: str) -> jax.Array:
    """The value of every device, along a new first axis, on every device."""
    # Under `shard_map(check_vma=True)` the result has the type of a value that is equal on all devices.
    device = jax.typeof(lax.axis_index(axis_name)).manual_axis_type
    to = "invarying" if axis_name in device.varying else "varying"
    lines = lax.all_gather(in_lines(value.reshape(1, -1))[0], axis_name, tiled=True, to=to)
    return lines.reshape(lax.axis_size(axis_name), *value.shape)


def send_rows(rows: jax.Array, axis_name: str) -> jax.Array:
    """(devices, chunk) of every device: row i goes to device i, which gets them in the order of the devices."""
    lines = lax.collapse(in_lines(rows), 0, 2)
    return lax.all_to_all(lines, axis_name, split_axis=0, concat_axis=0, tiled=True).reshape(rows.shape)


def sum_in_order(stacked: jax.Array) -> jax.Array:
    """stacked[0] + stacked[1] + ..., added from left to right."""
    # Few terms are unrolled, so that XLA fuses them. Many terms are a loop, so that the program does not grow.
    count = stacked.shape[0]
    if count <= _UNROLLED_TERMS:
        return functools.reduce(operator.add, [stacked[i] for i in range(count)])
    return sum_by_loop(lambda i: stacked[i], count)


def sum_by_loop(term: Callable[[jax.typing.ArrayLike], jax.Array], count: int) -> jax.Array:
    """term(0) + ... + term(count - 1), from left to right, as a loop: the program has the same size for any count."""
    return lax.fori_loop(1, count, lambda i, total: total + term(i), term(0))


def chunk_size(size: int, shards: int) -> int:
    """How many elements of a value of `size` elements one of `shards` devices holds."""
    return -(-size // shards)


def to_rows(value: jax.Array, shards: int) -> jax.Array:
    """A value as (shards, chunk): flat, padded with zeros, row i for device i."""
    chunk = chunk_size(value.size, shards)
    flat = unsplit(value).reshape(-1)
    return jnp.pad(flat, (0, shards * chunk - value.size)).reshape(shards, chunk)


def from_rows(rows: jax.Array, shape: Shape) -> jax.Array:
    """Join rows to the value: the inverse of `to_rows`."""
    return unsplit(rows).reshape(-1)[: math.prod(shape)].reshape(shape)


def own_chunk(value: jax.Array, axis_name: str) -> jax.Array:
    """This device's (chunk,) of a replicated value."""
    rows = to_rows(value, lax.axis_size(axis_name))
    return lax.dynamic_index_in_dim(rows, lax.axis_index(axis_name), keepdims=False)


def in_lines(rows: jax.Array) -> jax.Array:
    """Rows (count, chunk) as lines (count, m, width) in the same order. A row of no such width is one line."""
    # Of an array (devices, chunk) a TPU has the rows of eight devices in each tile. Then a reduce-scatter becomes an
    # all-reduce, and what a gather gives has to be copied. Lines of one device fill tiles by themselves.
    count, chunk = rows.shape
    width = max([n for n in range(_LINE // 2 + 1, min(_LINE, chunk) + 1) if chunk % n == 0], default=chunk)
    return rows.reshape(count, chunk // width if width else 1, width)


def scatter_sum(rows: jax.Array, axis_name: str) -> jax.Array:
    """This device's row of the sum over the axis."""
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        # JAX 0.12 compiles no reduce-scatter over one axis of a mesh where another is Explicit.
        return lax.dynamic_index_in_dim(lax.psum(rows, axis_name), lax.axis_index(axis_name), keepdims=False)

    def by_xla(rows: jax.Array) -> jax.Array:
        return lax.psum_scatter(lax.collapse(in_lines(rows), 0, 2), axis_name, tiled=True).reshape(-1)

    if not (_GLOO_IS_WRONG and jax.distributed.is_initialized()):
        return by_xla(rows)
    return lax.platform_dependent(rows, cpu=lambda rows: sum_in_order(send_rows(rows, axis_name)), default=by_xla)


def _gather_and_sum(x: jax.Array, axis_name: str) -> jax.Array:
    """Small: every device gathers and adds all. Large: each gathers and adds one chunk, then all gather the chunks."""
    x = unsplit(x)
    if nbytes(x) < _SHARED_BYTES:
        return sum_in_order(gather_stack(x, axis_name))
    rows = to_rows(x, lax.axis_size(axis_name))
    chunk = sum_in_order(send_rows(rows, axis_name))
    return from_rows(gather_stack(chunk, axis_name), x.shape)


# Sums of virtual shards, in the order of one binary tree over numbered terms.
#
# The tree is over the numbers 0 to n-1. Its inner nodes are the aligned blocks whose lengths are powers of two, and a
# block without a right half is its left half. A device holds consecutive terms. It adds them up to the largest blocks
# that it has all terms of, its nodes. Then the devices exchange nodes, and each adds up what is left of the tree. So
# the bits of a sum do not depend on who holds the terms.
#
# Of 6 terms the sum is ((t0 + t1) + (t2 + t3)) + (t4 + t5), on any number of devices. With two of them:
#
#     device 0 has t0, t1, t2     nodes t0 + t1, of level 1, and t2: (0, 1), (2, 0)
#     device 1 has t3, t4, t5     nodes t3, and t4 + t5, of level 1: (3, 0), (4, 1)
#     all devices                 t2 + t3, then (t0 + t1) + (t2 + t3), then the root

Node = tuple[int, int]  # (first term, level): the block of 2**level terms


@dataclasses.dataclass(frozen=True)
class Deal:
    """The distribution of numbered terms over devices: in order, at most `slots` for each."""

    terms: int
    devices: int  # how many

    @property
    def slots(self) -> int:
        """How many terms a device has room for."""
        return chunk_size(self.terms, self.devices)

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
        # As a carry in binary addition: two blocks of one length beside each other are one of the tree, if the first
        # of them begins at a multiple of twice that length.
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
    # Small nodes: every device gets all of them and adds for itself, by one collective. Chunks of one node on each of
    # two devices would be as many bytes, by two collectives.
    if nbytes(nodes[0]) < _SHARED_BYTES or (deal.devices == 2 and deal.kept == 1):
        return _root(deal, lax.all_gather(nodes, axis_name))
    # Large nodes: each device adds up one chunk of the vectors for all, and the chunks of the sum are gathered.
    kept, size = nodes.shape
    chunk = chunk_size(size, deal.devices)  # each node is padded, and cut in a row for each device
    rows = jnp.pad(nodes, ((0, 0), (0, deal.devices * chunk - size))).reshape(kept, deal.devices, chunk)
    total = _root(deal, lax.all_to_all(rows, axis_name, split_axis=1, concat_axis=0))  # (chunk,)
    return lax.all_gather(total, axis_name).reshape(-1)[:size]


def _root(deal: Deal, nodes: jax.Array) -> jax.Array:
    """The sum of all terms, from the nodes (devices, kept, ...) of all devices."""
    # Where each device that has terms has one node, it has a power of two of them, and the nodes are a level of the
    # tree: whole levels at a time, in few operations. The same additions as below.
    if deal.kept == 1:
        level = nodes[: sum(map(len, deal.nodes)), 0]
        while level.shape[0] > 1:
            pairs = level.shape[0] // 2
            level = jnp.concatenate([level[0 : 2 * pairs : 2] + level[1 : 2 * pairs : 2], level[2 * pairs :]])
        return level[0]
    sums = {node: nodes[d, i] for d, of_device in enumerate(deal.nodes) for i, node in enumerate(of_device)}
    return _block(sums, (0, (deal.terms - 1).bit_length()), deal.terms)


def _block(sums: dict[Node, jax.Array], node: Node, terms: int) -> jax.Array:
    """The sum of a block of the tree, from the blocks that the devices have added up."""
    if node in sums:
        return sums[node]
    first, level = node
    left, middle = _block(sums, (first, level - 1), terms), first + (1 << level - 1)
    return left if middle >= terms else left + _block(sums, (middle, level - 1), terms)


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

    arrays: PyTree
    virtual_shards: int = dataclasses.field(metadata={"static": True})

    def __getitem__(self, name: str | int) -> Any:
        """One of the arrays, with the rows of the padding."""
        return self.arrays[name]


def padded_rows(count: int, virtual_shards: int, devices: int) -> int:
    """The rows of a batch of `count` examples with room for as many shards on each device: of 64 in 8 for 3, 72."""
    return Deal(virtual_shards, devices).slots * devices * (count // virtual_shards)


def pad_rows(batch: Tree, rows: int, axis: int = 0, along: NamedSharding | None = None) -> Tree:
    """The batch, or its shapes, with so many rows at its end that belong to no example. Arrays that span processes are
    laid out by `along`.
    """

    def pad(x: Shaped) -> Shaped:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((*x.shape[:axis], x.shape[axis] + rows, *x.shape[axis + 1 :]), x.dtype)
        widths = [(0, rows if i == axis else 0) for i in range(np.ndim(x))]
        if isinstance(x, jax.Array):
            return _padding_program(tuple(widths), along if spans_processes(x) else None)(x)
        return np.pad(np.asarray(x), np.array(widths))

    return jax.tree.map(pad, batch) if rows else batch


@functools.lru_cache(maxsize=64)
def _padding_program(
    widths: tuple[tuple[int, int], ...], sharding: NamedSharding | None
) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: jnp.pad(x, widths), out_shardings=sharding)
