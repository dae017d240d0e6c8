"""Sums over devices of compressed values: bucket, encode, exchange, decode and add.

A compressor makes codes of a value, and a payload of them, which decodes to the value that the sum takes. Only payloads
are sent between devices. What the codes are decides how they are summed:

- `1bit`, `2bit`, `bf16`: a code for each element. Whole buckets are encoded, and cut anywhere. See `_sum_codes`.
- `int8`, `topk`: a payload for each value. Payloads share buckets. See `_sum_payloads`.
- `int3`: the sum is coded too, on its way back. See `_two_way`.
- `powersgd`: the codes are numbers that are summed as any others. See `_linear`.

Each of N devices owns 1/N of what is summed. It gets the codes of its share from all, decodes and adds them in the
order of the devices, and its sum goes to all. Four ways give the same sums, and the bytes decide:

- `gather`: every device gets all codes and adds them itself. Best for few devices.
- `owners`: codes to the owners, their sums to all: as integers where the compressor has a `Grid`, else as numbers.
- `lanes`: one sum of integers, several in a word. For exact grids and small values, which owners would pad.
- `dense`: decoded values to the owners, their sums to all. For codes that are more than that, or cannot be cut.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from .._core.arrays import PyTree, tree_nbytes
from .._devices import collectives
from .._devices.collectives import BucketLimits
from .._devices.user_mesh import unsplit
from . import _base, _codes
from ._base import Compressor, ElementCompressor, LinearCompressor, Payload, State, decode_sum
from ._codes import PLANE, in_order
from ._compressors import Int8
from ._grid import Grid

_FLOAT32 = 4  # bytes

Sums = tuple[list[jax.Array], list[State]]
Payloads = Sequence[Payload]
Arrays = Sequence[jax.Array]
States = Sequence[State]


def allreduce(compressor: Compressor, values: Arrays, states: States, axis_name: str, limits: BucketLimits) -> Sums:
    """The sums over the axis on every device, and the new states of this device."""
    values = [unsplit(v) for v in values]
    if compressor.linear:
        return _linear(cast(LinearCompressor, compressor), values, states, axis_name, limits)
    if compressor.two_way:
        return _two_way(values, states, axis_name, limits)
    # A bucket is encoded at once where that gives the codes of its values one after another. Int8 counts blocks from
    # the start of a value, and top-k compares all its elements, so each of their values is a bucket of its own.
    shapes = [v.shape for v in values]
    groups = collectives.plan(values, limits) if compressor.elementwise else tuple((i,) for i in range(len(values)))
    buckets = collectives.pack(values, groups)
    flat = [bucket.reshape(-1) for bucket in buckets]
    # A bucket has the residuals one after another, and the rest of the state as its first value has it.
    residuals = collectives.pack([state["residual"] for state in states], groups)
    joined = [{**states[g[0]], "residual": residual.reshape(-1)} for g, residual in zip(groups, residuals, strict=True)]
    if isinstance(compressor, ElementCompressor):
        coded = [compressor.quantize(v, s) for v, s in zip(flat, joined, strict=True)]
        sums = _sum_codes(compressor, [codes for codes, _ in coded], axis_name, limits)
        sums = [s.astype(v.dtype) for s, v in zip(sums, flat, strict=True)]
    else:
        coded = [compressor.encode(v, s) for v, s in zip(flat, joined, strict=True)]
        sums = _sum_payloads(compressor, [payload for payload, _ in coded], flat, axis_name, limits)
    # A TPU would compute the update in lines of 128, unless the sum is computed before it. Elsewhere a barrier wins
    # nothing, and on CPUs it would change the last bits of the update.
    barrier = functools.partial(lax.platform_dependent, tpu=lax.optimization_barrier, default=lambda x: x)
    sums = [barrier(s.reshape(bucket.shape)) for s, bucket in zip(sums, buckets, strict=True)]
    # The state goes back to each value: its own residual, and what the bucket has in common, such as the stream.
    new = {i: state for (_, state), group in zip(coded, groups, strict=True) for i in group}
    residuals = collectives.unpack([state["residual"] for _, state in coded], shapes, groups)
    new_states = [{**new[i], "residual": residual} for i, residual in enumerate(residuals)]
    return collectives.unpack(sums, shapes, groups), new_states


def reduce_scatter(
    compressor: Compressor, values: Arrays, states: States, axis_name: str, limits: BucketLimits
) -> Sums:
    """This device's (chunk,) of each sum over the axis. Every row is encoded for the device that keeps it."""
    values = [unsplit(v) for v in values]
    if compressor.linear:
        sums, states = _linear(cast(LinearCompressor, compressor), values, states, axis_name, limits)
        return [collectives.own_chunk(s, axis_name) for s in sums], states
    if compressor.two_way:
        return _two_way_share(values, states, axis_name, limits)
    shards = lax.axis_size(axis_name)
    # Row i is coded by itself, since device i gets that row of all devices and no other.
    rows = [collectives.to_rows(v, shards) for v in values]  # each (devices, chunk)
    coder: Any = _InPlanes(compressor) if isinstance(compressor, ElementCompressor) else compressor
    coded = [jax.vmap(coder.encode)(r, s) if r.size else ({}, s) for r, s in zip(rows, states, strict=True)]
    send = functools.partial(_to_owners, axis_name=axis_name)
    exchanged = _exchange([payload for payload, _ in coded], send, 1, limits)
    sums = [
        decode_sum(coder, payloads, r.shape[1:], r.dtype) if r.size else r[0]
        for payloads, r in zip(exchanged, rows, strict=True)
    ]
    return sums, [state for _, state in coded]


def _linear(compressor: LinearCompressor, values: Arrays, states: States, axis_name: str, limits: BucketLimits) -> Sums:
    # Its codes are float32 numbers, whose sum is the code of the sum. So they are summed as plain values are.
    def psum(tree: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(tree)
        return structure.unflatten(collectives.allreduce(leaves, axis_name, limits))

    results = [compressor.allreduce(v, s, psum) for v, s in zip(values, states, strict=True)]
    return [total for total, _ in results], [state for _, state in results]


# Values that are encoded one by one, and what they send.


def _sum_payloads(
    compressor: Compressor, payloads: Payloads, values: Arrays, axis_name: str, limits: BucketLimits
) -> list[jax.Array]:
    """The sums over the axis of what each device encoded as these payloads. Of `values`, shapes and dtypes are used."""
    # 1. The way of each value: that of the fewest bytes of the whole, of which a device sends (N-1)/N. The values of
    #    one way share collectives, so they are summed way by way and put back in their order.
    count, by_way = lax.axis_size(axis_name), dict[str, list[int]]()
    for i, (payload, value) in enumerate(zip(payloads, values, strict=True)):
        chunk = collectives.chunk_size(value.size, count)
        cost = {"gather": count * tree_nbytes(payload), "dense": count * 2 * _FLOAT32 * chunk}
        if isinstance(compressor, Int8):  # whose payloads can be cut
            rows = jax.eval_shape(functools.partial(compressor.cut, shape=value.shape, count=count), payload)
            cost["owners"] = tree_nbytes(rows) + count * chunk * value.dtype.itemsize
        by_way.setdefault(min(cost, key=cost.__getitem__), []).append(i)

    sums = dict[int, jax.Array]()

    # 2. `gather`: every device gets all payloads, and decodes and adds them.
    if chosen := by_way.get("gather"):
        to_all = functools.partial(collectives.gather_stack, axis_name=axis_name)
        gathered = _exchange([payloads[i] for i in chosen], to_all, 0, limits)
        for i, of_all in zip(chosen, gathered, strict=True):
            sums[i] = decode_sum(compressor, of_all, values[i].shape, values[i].dtype)

    # 3. `owners`: row i of each payload goes to device i, which gets (devices, ...): the rows of all devices for its
    #    share, which it decodes and adds.
    if chosen := by_way.get("owners"):
        int8, owner = cast(Int8, compressor), lax.axis_index(axis_name)
        rows = [int8.cut(payloads[i], values[i].shape, count) for i in chosen]
        received = _exchange(rows, functools.partial(_to_owners, axis_name=axis_name), 1, limits)

        def sum_of_rows(of_all: Payload) -> jax.Array:
            lines = jax.tree.map(lambda x: collectives.in_lines(x.reshape(count, -1)), of_all)

            def decode(device: ArrayLike) -> jax.Array:
                row = jax.tree.map(lambda x, line: line[device].reshape(x.shape[1:]), of_all, lines)
                return int8.decode_row(row, owner)

            return collectives.sum_by_loop(decode, count)

        shares = [sum_of_rows(of_all).astype(values[i].dtype) for i, of_all in zip(chosen, received, strict=True)]
        totals = collectives.all_gather(shares, [values[i].shape for i in chosen], axis_name, limits)
        sums |= zip(chosen, totals, strict=True)

    # 4. `dense`: decoded before they are sent, and in float32, so that a sum is rounded to the dtype of the value once.
    if chosen := by_way.get("dense"):
        dense = [compressor.decode(payloads[i], values[i].shape, "float32") for i in chosen]
        totals = collectives.allreduce(dense, axis_name, limits, _sum_dense)
        sums |= {i: total.astype(values[i].dtype) for i, total in zip(chosen, totals, strict=True)}
    return [sums[i] for i in range(len(values))]


def _exchange(
    payloads: Payloads, collective: Callable[[jax.Array], jax.Array], lead: int, limits: BucketLimits
) -> list[Payload]:
    """The payloads with the devices as first axis, after one collective for each bucket of one dtype.

    `lead` 0: each array goes whole to every device. `lead` 1: row i of each array goes to device i.
    """
    leaves, structure = jax.tree.flatten(list(payloads))
    shapes = [leaf.shape[lead:] for leaf in leaves]
    groups = collectives.plan(leaves, limits)
    received = [collective(array) for array in collectives.pack(leaves, groups, axis=lead)]
    return structure.unflatten(collectives.unpack(received, shapes, groups, axis=1))


def _to_owners(rows: jax.Array, axis_name: str) -> jax.Array:
    """(devices, ...): row i of every device, on device i."""
    return collectives.send_rows(rows.reshape(rows.shape[0], -1), axis_name).reshape(rows.shape)


# Values whose codes may be joined and cut anywhere.


@dataclasses.dataclass(frozen=True)
class _InPlanes:
    """An elementwise compressor with payloads as they are sent, in an order that is no format."""

    of: ElementCompressor

    def encode(self, value: jax.Array, state: State) -> tuple[Payload, State]:
        codes, state = self.of.quantize(value.reshape(-1), state)
        return {"codes": _to_words(self.of, jnp.pad(codes, (0, -codes.size % self.of.per_word)))}, state

    def decode(self, payload: Payload, shape: collectives.Shape, dtype: DTypeLike) -> jax.Array:
        return in_order(_from_words(self.of, payload["codes"]))[: math.prod(shape)].reshape(shape).astype(dtype)


def _to_words(compressor: ElementCompressor, codes: jax.Array) -> jax.Array:
    """Codes (..., n) in words (..., n / per_word)."""
    per_word = compressor.per_word
    return codes if per_word == 1 else _codes.pack_planes(codes.astype(jnp.uint32), 32 // per_word)


def _from_words(compressor: ElementCompressor, packed: jax.Array) -> jax.Array:
    """The float32 elements of words in lines, for `in_order`."""
    per_word = compressor.per_word
    return compressor.dequantize(packed if per_word == 1 else _codes.unpack_planes(packed.reshape(-1), 32 // per_word))


def _sum_codes(compressor: ElementCompressor, codes: Arrays, axis_name: str, limits: BucketLimits) -> list[jax.Array]:
    """The flat float32 sums over the axis of what flat codes stand for."""
    per_word = compressor.per_word
    padded = [jnp.pad(c, (0, -c.size % per_word)) for c in codes]
    # Buckets are planned by the words that are sent.
    sent = [jax.ShapeDtypeStruct((c.size // per_word,), c.dtype if per_word == 1 else "uint32") for c in padded]
    groups = collectives.plan(sent, limits)
    sums = [_sum_bucket(compressor, bucket, axis_name) for bucket in collectives.pack(padded, groups)]
    sums = collectives.unpack(sums, [c.shape for c in padded], groups)
    # Without the elements of the codes that filled up the last word of each value.
    return [total[: c.size] for total, c in zip(sums, codes, strict=True)]


def _sum_bucket(compressor: ElementCompressor, codes: jax.Array, axis_name: str) -> jax.Array:
    """The flat float32 sum over the axis of what the codes of one bucket stand for, in the way that sends least."""
    # All ways give the same float32 sums. Sizes and the number of devices are known when this is traced, so only one
    # way is in the program.
    count, per_word, size = lax.axis_size(axis_name), compressor.per_word, codes.size
    grid: Any = compressor.grid(count)
    itemsize = 4 if per_word > 1 else codes.dtype.itemsize
    cost = bytes_of_words(size // per_word, itemsize, per_word, grid, count)
    way = min(cost, key=cost.__getitem__)
    if way == "lanes":  # integers of which several share a word: the code of a sum is the sum of the codes
        of_one_term: Any = compressor.grid(1)
        packed = lax.psum(_codes.pack_lanes(of_one_term.encode(compressor.dequantize(codes)), grid.bits), axis_name)
        return grid.decode(_codes.unpack_lanes(packed, grid.bits, size))
    if way == "dense":  # decoded first: for small values and many devices, whose shares words would pad
        return _sum_dense(compressor.dequantize(codes), axis_name)
    # The words of all devices, (devices, words): of the whole bucket, or of the own share of it.
    with jax.named_scope("pack the codes"):
        if way == "owners":
            chunk = chunk_of(size, per_word, grid, count)
            codes = jnp.pad(codes, (0, count * chunk - size)).reshape(count, chunk)
        words = _to_words(compressor, codes)
    received = collectives.gather_stack(words, axis_name) if way == "gather" else _to_owners(words, axis_name)
    # One device after another, so the order of the additions is that of the devices whatever the way was.
    lines = collectives.in_lines(received)
    with jax.named_scope("decode and sum"):
        total = collectives.sum_by_loop(lambda i: _from_words(compressor, lines[i]), count)
    if way == "gather":
        return in_order(total)
    # The sums of all owners one after another: as codes of their own, where these are shorter than the numbers.
    if grid is None or grid.bits >= 8 * _FLOAT32:
        return collectives.gather_stack(in_order(total), axis_name).reshape(-1)[:size]
    with jax.named_scope("encode the sum"):
        packed = _codes.pack_planes(in_order(grid.encode(total)), grid.bits)
    packed = collectives.gather_stack(packed, axis_name)
    with jax.named_scope("decode the sums"):
        return in_order(grid.decode(_codes.unpack_planes(packed, grid.bits)))[:size]


def _sum_dense(value: jax.Array, axis_name: str) -> jax.Array:
    """The sum of flat values, added in the order of the devices."""
    received = _to_owners(collectives.to_rows(value, lax.axis_size(axis_name)), axis_name)
    share = collectives.sum_by_loop(lambda i: received[i], received.shape[0])
    return collectives.gather_stack(share, axis_name).reshape(-1)[: value.size]


def bytes_of_words(num_words: int, itemsize: int, per_word: int, grid: Grid | None, count: int) -> dict[str, float]:
    """What each way sends: bytes of the whole, of which a device sends (N-1)/N."""
    size = num_words * per_word
    chunk = chunk_of(size, per_word, grid, count)
    back = min(32, grid.bits if grid is not None else 32) / 8  # bytes of an element of a sum
    cost = {
        "gather": count * num_words * itemsize,  # the words of each device, to every other
        "owners": count * (chunk // per_word * itemsize + chunk * back),  # each share as words, and its sum back
        "dense": count * 2 * _FLOAT32 * collectives.chunk_size(size, count),  # the same in float32
    }
    # An all-reduce of words with room for the sums of all devices, which sends them twice: to be added, and back.
    if grid is not None and grid.is_exact:
        cost["lanes"] = 2 * 4 * -(-size // (32 // grid.bits))
    return cost


def chunk_of(size: int, per_word: int, grid: Grid | None, count: int) -> int:
    """Elements of an owner's share: whole words, and whole groups of sums."""
    unit = per_word if grid is None else PLANE  # of which every number of codes in a word is a divisor
    return unit * collectives.chunk_size(size, unit * count)


# Values that are compressed on the way to the owner of a share, and their sums on the way back: `Int3`.
#
# Of a value g with the residual r, device d sends q = round((g + r) / s) from -3 to 3 and keeps g + r - q s. The step s
# is a third of the largest |g + r| on any device, so the owner of a share adds integers. It has t = s (q of device 0 +
# q of device 1 + ...) + o, with a residual o of its own. It sends p = round(t / u), where u is made of all shares as s
# is, and keeps t - p u. The sum is p u, the same on every device.

_OWNER = "owner_residual"  # float32 (chunk,) in the state of a value: what its owner did not send back
_SHORT = 8  # words of a row. Of a shorter one, what a bucket adds to fill its last word counts


def start_owner(shape: collectives.Shape, count: int) -> State:
    """The part of a state that belongs to the owner, one of `count` devices."""
    return {_OWNER: jnp.zeros(_codes.words(shape, count), jnp.float32)}


def _two_way(values: Arrays, states: States, axis_name: str, limits: BucketLimits) -> Sums:
    """(the twice-coded sums over the axis, equal on every device; the new states of this device)."""
    count = lax.axis_size(axis_name)
    # To the owners: each device codes its values, and the owner of a share adds the integers.
    wanted = [_base.with_residual(v, s) for v, s in zip(values, states, strict=True)]
    codes, residuals, steps = _code(wanted, axis_name)
    shares = _add_shares([collectives.to_rows(c, count) for c in codes], axis_name, limits)
    # The owner of a share adds what it did not send back at the last push.
    totals = [share * step + state[_OWNER] for share, step, state in zip(shares, steps, states, strict=True)]

    # And back: the owner codes its sum, by a scale that is equal for all shares of a value.
    codes, owner_residuals, steps = _code(totals, axis_name)
    groups = _plan([jnp.broadcast_to(c, (count, c.size)) for c in codes], limits)
    buckets: list[jax.Array] = []
    for bucket in collectives.pack(codes, groups):
        packed = collectives.gather_stack(_codes.pack_codes(bucket), axis_name)
        buckets.append(in_order(_codes.unpack_codes(packed).astype(jnp.int8), 1)[:, : bucket.size])
    gathered = collectives.unpack(buckets, [c.shape for c in codes], groups, axis=1)  # each (devices, chunk)
    sums = [
        (collectives.from_rows(rows, v.shape) * step).astype(v.dtype)
        for rows, step, v in zip(gathered, steps, values, strict=True)
    ]
    new = zip(states, residuals, owner_residuals, strict=True)
    return sums, [{**state, "residual": residual, _OWNER: of_owner} for state, residual, of_owner in new]


def _two_way_share(values: Arrays, states: States, axis_name: str, limits: BucketLimits) -> Sums:
    """This device's (chunk,) of each sum. It stays here, so it is not coded again."""
    count = lax.axis_size(axis_name)
    rows = [collectives.to_rows(v, count) for v in values]  # each (devices, chunk), and so are the residuals
    codes, residuals, steps = _code([_base.with_residual(r, s) for r, s in zip(rows, states, strict=True)], axis_name)
    shares = _add_shares(codes, axis_name, limits)
    sums = [(share * step).astype(v.dtype) for v, share, step in zip(values, shares, steps, strict=True)]
    return sums, [{**state, "residual": residual} for state, residual in zip(states, residuals, strict=True)]


def _code(values: Arrays, axis_name: str) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    """The codes of each value, its residual, and its step, which is equal on all devices."""
    steps = list(lax.pmax(jnp.stack([_codes.largest_step(v) for v in values]), axis_name))
    coded = [_codes.split_codes(v, step) for v, step in zip(values, steps, strict=True)]
    return [codes for codes, _ in coded], [residual for _, residual in coded], steps


def _add_shares(rows: Arrays, axis_name: str, limits: BucketLimits) -> list[jax.Array]:
    """The float32 (chunk,) sum over the devices of this device's rows (devices, chunk) of codes."""
    # By buckets along the second axis: each device gets its row of a bucket from all, 3 bits a code.
    groups = _plan(rows, limits)
    shares: list[jax.Array] = []
    for bucket in collectives.pack(rows, groups, axis=1):
        received = collectives.send_rows(_codes.pack_codes(bucket), axis_name)
        # Integers, so the order of the devices does not matter.
        total = _codes.unpack_codes(received).sum(0, dtype=jnp.int32).astype(jnp.float32)
        shares.append(in_order(total)[: bucket.shape[1]])
    return collectives.unpack(shares, [r.shape[1:] for r in rows], groups)


def _plan(rows: Arrays, limits: BucketLimits) -> collectives.Groups:
    """Which rows (devices, chunk) of codes travel together."""
    # Planned by the words that are sent. Each bucket ends with a whole word on every device, so short rows are joined
    # even where those of all devices are large: they are counted as those of one.
    sizes = [_codes.words(r.shape[1:], PLANE) for r in rows]
    devices = [r.shape[0] if size >= _SHORT else 1 for r, size in zip(rows, sizes, strict=True)]
    sent = [jax.ShapeDtypeStruct(shape, "uint32") for shape in zip(devices, sizes, strict=True)]
    return collectives.plan(sent, limits)
