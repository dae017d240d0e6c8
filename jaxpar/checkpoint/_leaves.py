"""A state as named arrays in the host's memory, in a layout that does not depend on devices, and back. Their hash.

Every leaf has a name, its path: `store/values/3`, `step`. A node whose type is registered in `_core.portable`, as a
`KVStore` is, says itself which arrays it has and how they are taken up on other devices.
"""

from __future__ import annotations

import collections
import functools
import gc
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.typing import ArrayLike

from .._core import checks
from .._core.arrays import PyTree, check_plain, is_of_numbers, is_prng_key, without_keys
from .._core.portable import ADAPTERS, FORMATS, PARTS, Saved, SavedArray, describe_record, is_registered, path_name
from .._devices import mesh, user_mesh
from . import _arrays
from ._arrays import LeafRecord, Stored

_SCALARS = (bool, int, float, complex)
_SHARDINGS = (NamedSharding, SingleDeviceSharding)  # which orbax knows. That of `jax.pmap` it does not
_BITS = 128  # of the hash
_HASHED = ("name", "shape", "dtype", "impl")  # what the hash takes of the record of an array


@user_mesh.on_own_mesh
def to_leaves(tree: PyTree, keep: bool, *, may_change: bool) -> tuple[int | None, list[LeafRecord], list[Any], bool]:
    """The step of a state that has one, for each leaf a record and an array, and whether all processes write these.

    Where no array is split over processes, there are no arrays without `keep`. Those on devices are not copied here:
    orbax is given them before the state may be donated, see `_files.Arrays`. Those of NumPy are copied if the caller
    `may_change` them while they are written.
    """
    slots, arrays = slots_of(tree), list[Any]()
    plain, _ = without_keys([slot.leaf for slot in slots])
    together = any(_is_split_over_processes(leaf) for leaf in plain)
    names = _arrays.unique_names([slot.array or slot.name or "value" for slot in slots])
    records: list[LeafRecord] = [slot.record() | {"array": name} for slot, name in zip(slots, names, strict=True)]
    for slot, leaf, record in zip(slots, plain, records, strict=True):
        dtype = np.asarray(leaf).dtype if isinstance(leaf, _SCALARS) else leaf.dtype
        try:
            stored = _arrays.stored_dtype(np.dtype(dtype))
        except Exception:  # of tensorstore
            hint = "cannot be stored; give it another dtype"
            raise TypeError(f"checkpoint: {slot.words}: an array of {np.dtype(dtype)} {hint}") from None
        if not keep and not together:
            continue
        if _is_split_over_processes(leaf):
            arrays.append(leaf.astype(stored))
            record |= {"rows": list(leaf.shape)} if slot.rows else {}
            continue

        # In a run of one process orbax takes an array from its devices, without a copy, if it is stored as it is there.
        # In several processes it refuses what is not split over them. Frozen params are written only if they are new,
        # which their hash must say first.
        is_as_stored = dtype == stored and not slot.rows and not record.get("frozen") and jax.process_count() == 1
        if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, _SHARDINGS) and is_as_stored:
            arrays.append(leaf.addressable_data(0) if leaf.is_fully_replicated else leaf)
            continue

        # Split over devices of this process: frozen params, and the rows of a store of kind `sharded`. It is written
        # whole, from its shards. To put it together here would copy what no step changes, at each save.
        if (
            isinstance(leaf, jax.Array)
            and isinstance(leaf.sharding, _SHARDINGS)
            and not leaf.is_fully_replicated
            and not mesh.spans_processes(leaf)
        ):
            arrays.append(_arrays.HostShards(leaf, slot.shape if slot.rows else leaf.shape, stored))
            continue

        # In host memory. Here a NumPy array that may change is copied: half of it would be of one step, and half of
        # another, with the hash of neither.
        if isinstance(leaf, jax.Array):
            array = _arrays.to_numpy(mesh.to_host(leaf))
        else:
            array = np.array(leaf) if may_change else np.asarray(leaf)
        array = array.reshape(-1)[: math.prod(slot.shape)].reshape(slot.shape) if slot.rows else array
        of_key = array.shape if "impl" in record else slot.shape
        is_other = array.dtype.newbyteorder("=") != stored
        array = array.view(stored) if is_other else array.astype(stored, copy=False)
        arrays.append(np.ascontiguousarray(array).reshape(of_key))
    step = getattr(tree, "step", None)
    step = None if step is None or np.ndim(step) else int(jax.device_get(step))
    return step, records, arrays, together


def _is_split_over_processes(leaf: object) -> TypeGuard[jax.Array]:
    return mesh.spans_processes(leaf) and not leaf.is_fully_replicated


def from_leaves(
    records: Sequence[LeafRecord], arrays: Sequence[Stored | np.ndarray], like: PyTree
) -> tuple[PyTree, list[str]]:
    """The saved arrays in the structure, and on the devices, of `like`, and remarks about what could not be taken up.

    `ValueError` for a leaf that only one of the two has, or of another name, shape or dtype.
    """
    remarks: list[str] = []
    # The rooms that adapt what was saved take arrays of NumPy, and read a `Stored` by `np.asarray`.
    saved: Saved = {record["name"]: (dict(record), array) for record, array in zip(records, arrays, strict=True)}  # pyright: ignore
    nodes, treedef = jax.tree_util.tree_flatten_with_path(like, is_leaf=is_registered)
    formats = [(i, path_name(path), node, f) for i, (path, node) in enumerate(nodes) if (f := FORMATS.get(type(node)))]
    # What depends on the devices is left out here, and completed at the end.
    bare_nodes = [node for _, node in nodes]
    for i, _, node, format in formats:
        bare_nodes[i] = format.bare(node)
    bare = treedef.unflatten(bare_nodes)
    slots = slots_of(bare)

    # What an older version or other devices saved gets the names and shapes of `like`.
    if adapt := ADAPTERS.get(type(like)):
        saved = adapt(like, saved, remarks)
    for _, name, node, format in formats:
        saved = format.adapt(node, saved, name, remarks)
    _compare(slots, [record for record, _ in saved.values() if not set(PARTS) & record.keys()])
    leaves = [_placed(slot, *saved[slot.name]) for slot in slots]

    filled = treedef.flatten_up_to(jax.tree.structure(bare).unflatten(leaves))
    for i, name, node, format in formats:
        filled[i] = format.complete(filled[i], node, saved, name, remarks)
    return treedef.unflatten(filled), remarks


def slots_of(tree: PyTree) -> list[SavedArray]:
    """What a checkpoint has of each leaf, in the order of the leaves of the tree."""
    slots: list[SavedArray] = []
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_registered)[0]:
        format, name = FORMATS.get(type(node)), path_name(path)
        if format is not None:
            slots += format.slots(node, name)
            continue
        if not (is_of_numbers(node) or is_prng_key(node) or isinstance(node, _SCALARS)):
            raise TypeError(f"checkpoint: leaf {name!r} must be an array of numbers, got {checks.describe(node)}")
        check_plain(node, f"checkpoint: leaf {name!r}")
        slots.append(SavedArray(name, f"leaf {name!r}", node, tuple(np.shape(node))))
    if twice := [name for name, count in collections.Counter([slot.name for slot in slots]).items() if count > 1]:
        raise ValueError(f"checkpoint: two leaves have the path {twice[0]!r}; rename one of them")
    return slots


def _placed(slot: SavedArray, record: LeafRecord, array: Stored | np.ndarray) -> Any:
    """A saved array with the type and layout, and on the devices, of the slot's leaf."""
    # On the host, or whole on each device.
    leaf = slot.leaf
    sharding: jax.sharding.Sharding | None = getattr(leaf, "sharding", None)
    if isinstance(leaf, _SCALARS):
        return type(leaf)(np.asarray(array).item())
    if isinstance(leaf, (np.ndarray, np.generic)):
        return np.asarray(array)
    if not isinstance(array, Stored) or "impl" in record or sharding is None or sharding.is_fully_replicated:
        whole = np.asarray(array)
        if slot.rows:  # flat, padded, a row for each device
            flat = np.zeros(math.prod(leaf.shape), whole.dtype)
            flat[: whole.size] = whole.reshape(-1)
            whole = flat.reshape(leaf.shape)
        on_devices = mesh.put(whole, sharding)
        return jax.random.wrap_key_data(on_devices, impl=record["impl"]) if "impl" in record else on_devices

    # Split over devices: each process reads what its own devices need. What is read goes to its device at once, so
    # that the host never has a whole leaf. Each shard is an array of its own, since jax shares memory between CPU
    # devices and NumPy where it can.
    shape = tuple(leaf.shape)
    indices = sharding.addressable_devices_indices_map(shape)
    devices = list(indices)
    boxes = [[s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True)] for index in indices.values()]
    shards: dict[int, jax.Array] = {}
    if slot.rows:
        width, size = shape[1], math.prod(slot.shape)
        ranges = [(min(box[0][0] * width, size), min(box[0][1] * width, size)) for box in boxes]
        for i, flat in array.read_flat(ranges):
            rows = np.zeros((boxes[i][0][1] - boxes[i][0][0], width), flat.dtype)
            rows.reshape(-1)[: flat.size] = flat
            shards[i] = jax.device_put(rows[:, slice(*boxes[i][1])], devices[i])
    else:
        for i, shard in array.read(boxes):
            shards[i] = jax.block_until_ready(jax.device_put(shard, devices[i]))
            # jax lets go of what it has copied in a hook of the garbage collector. Until then the next shard is read,
            # and the host has one more than it needs.
            del shard
            gc.collect(0)
    return jax.make_array_from_single_device_arrays(shape, sharding, [shards[i] for i in range(len(devices))])


def _compare(slots: list[SavedArray], records: list[LeafRecord]) -> None:
    """`ValueError` if the saved leaves are not those of the slots."""
    saved, expected = {r["name"]: r for r in records}, {s.name: s for s in slots}
    hint = f"`like` has {len(slots)} leaves, the checkpoint {len(saved)}; give a state of the same model and optimizer"
    for name, slot in expected.items():
        shown = f"{slot.dtype}[{','.join(map(str, slot.shape))}]"
        if name not in saved:
            raise ValueError(f"{slot.words}: expected {shown}, found nothing: {hint}")
        record = saved[name]
        # Earlier releases called a param of Flax NNX by the attribute of its variable, 'hidden/kernel/value'.
        saved_words = record["words"].replace("/value')", "')")
        if saved_words != slot.words and "('" in saved_words and "('" in slot.words:
            raise ValueError(f"{slot.words}: found {record['words']} in its place; was the model changed?")
        if (tuple(record["shape"]), record["dtype"]) != (slot.shape, slot.dtype):
            raise ValueError(f"{slot.words}: expected {shown}, found {describe_record(record)}")
    for name, record in saved.items():
        if name not in expected:
            raise ValueError(f"{record['words']}: found {describe_record(record)}, expected no such leaf: {hint}")


# A hash of a state, computed where the arrays are. Each array is taken as 32-bit words, in the order of its elements.
# A word is mixed with its place, and the mixed words are added modulo 2**32, which no order changes. So devices,
# layouts and engines do not change the hash. Two such sums of each array come to the host, and are hashed together
# with the names, shapes and dtypes.


class StateHash:
    """The hash of a state, which the devices may still compute. `str` waits for it. In several processes all make it.

    The state can be donated meanwhile.
    """

    @user_mesh.on_own_mesh
    def __init__(self, state: PyTree):
        slots = slots_of(state)
        self.records = [slot.record() for slot in slots]  # what a checkpoint says of each array
        self.groups: list[tuple[list[int], jax.Array]] = []  # the numbers of arrays, and two sums of each of them
        leaves = [_one_replica(slot.leaf) for slot in slots]
        split = [isinstance(leaf, jax.Array) and not leaf.is_fully_replicated for leaf in leaves]
        for is_split in (False, True):
            numbers = [i for i, s in enumerate(split) if s is is_split]
            if not numbers:
                continue
            chosen = [leaves[i] for i in numbers]
            if is_split:
                mesh.wait_before_collectives(chosen, tuple(chosen[0].sharding.device_set))
            # Of a flat leaf the padding does not count.
            sizes = tuple([math.prod(slots[i].shape) if slots[i].rows else None for i in numbers])
            self.groups.append((numbers, hash_sums(chosen, sizes)))

    @functools.cached_property
    def sums(self) -> np.ndarray:
        """(arrays, 2): two sums of the mixed words of each array. Waits for the devices."""
        sums = np.zeros((len(self.records), 2), np.uint32)
        for numbers, sums_of_group in self.groups:
            sums[numbers] = np.asarray(mesh.to_host(sums_of_group))
        return sums

    def __str__(self) -> str:
        records = [{name: r[name] for name in _HASHED if name in r} for r in self.records]
        digest = hashlib.sha256(json.dumps([records, self.sums.tolist()], sort_keys=True).encode())
        return digest.hexdigest()[: _BITS // 4]


def _one_replica(leaf: ArrayLike) -> Any:
    """What one device has of an array, where that is all of it. 64 bits of the host as jax may take them."""
    if isinstance(leaf, jax.Array):
        return leaf.addressable_data(0) if leaf.is_fully_replicated else leaf
    array = np.asarray(leaf)
    return array if array.itemsize < 8 else np.ascontiguousarray(array).reshape(-1).view(np.uint32)


@functools.partial(jax.jit, static_argnums=1)
def hash_sums(leaves: Sequence[jax.Array], sizes: tuple[int | None, ...]) -> jax.Array:
    """(leaves, 2): two sums of the mixed words of each array."""
    return jnp.stack([_sums_of(leaf, size) for leaf, size in zip(leaves, sizes, strict=True)])


def _sums_of(leaf: jax.Array, size: int | None) -> jax.Array:
    bits = _as_uint32(jax.random.key_data(leaf) if is_prng_key(leaf) else leaf)
    place, stride = jnp.zeros(bits.shape, np.uint32), 1  # the number of each word, modulo 2**32
    for axis in reversed(range(bits.ndim)):
        place += jax.lax.broadcasted_iota(np.uint32, bits.shape, axis) * np.uint32(stride % (1 << 32))
        stride *= bits.shape[axis]
    mixed = _mix(bits ^ _mix(place + np.uint32(0x9E3779B9))), _mix(bits + _mix(place ^ np.uint32(0x7FEB352D)))
    if size is not None:  # the elements after the first so many are a padding
        row, column = (jax.lax.broadcasted_iota(np.uint32, leaf.shape, axis) for axis in (0, 1))
        full_rows, remainder = divmod(size, leaf.shape[1])
        counts = (row < full_rows) | ((row == full_rows) & (column < remainder))
        counts = counts.reshape(leaf.shape + (1,) * (bits.ndim - leaf.ndim))
        mixed = tuple(jnp.where(counts, x, np.uint32(0)) for x in mixed)
    # Two sums in one pass: XLA's loops for one each take ten times as long on CPUs.
    zeros = np.uint32(0), np.uint32(0)
    return jnp.stack(jax.lax.reduce(mixed, zeros, lambda a, b: (a[0] + b[0], a[1] + b[1]), range(bits.ndim)))


def _as_uint32(leaf: jax.Array) -> jax.Array:
    """The bits of each element as 32-bit words, with a last axis where it has several."""
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        real_and_imag = jnp.stack([_as_uint32(leaf.real), _as_uint32(leaf.imag)], leaf.ndim)
        return real_and_imag.reshape(*leaf.shape, -1)
    if leaf.dtype == bool:
        return leaf.astype(np.uint32)
    info = jnp.finfo if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.iinfo
    width = info(leaf.dtype).bits
    bits = jax.lax.bitcast_convert_type(leaf, jnp.uint32 if width > 16 else f"uint{width}")
    return bits.astype(np.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """A permutation of 32 bits in which each bit of the argument changes half of the bits: MurmurHash3's last lines."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
