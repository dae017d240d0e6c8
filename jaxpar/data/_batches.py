"""Which examples come when, and batches of them: streamed from the host, or gathered from copies on the devices.

`plan_batches` decides all that is decided once: which examples, on which devices, padded or not. `from_host` and
`from_devices` then carry out the plan. The examples of step n depend on the key and on n alone, so a run that resumes
at `start=n` sees the batches that the run before would have seen.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import os
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypedDict, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike

from .._core import checks, host
from .._core.arrays import Device, KeyPath, PyTree, is_prng_key
from .._devices import collectives, processes
from .._devices.mesh import STORE_AXIS, auto_mesh, put, wait_before_collectives
from .._devices.shardings import axes_of
from .._devices.user_mesh import each_in_user_mesh, has_types, in_user_mesh, on_own_mesh, outside_mesh, with_sharding
from ._elements import path_name

Item = TypeVar("Item")


class ImagesAndLabels(Protocol):
    """A `data.Dataset`."""

    @property
    def images(self) -> np.ndarray: ...
    @property
    def labels(self) -> np.ndarray: ...


class HostArray(Protocol):
    """An array of NumPy, or what reads its rows when they are asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __getitem__(self, index: Any, /) -> Any: ...


Order = Callable[[int], jax.Array | np.ndarray]  # of an epoch: int32 (examples,), in host memory or on a device

HINTS = {"shuffle": "give rng=jax.random.key(0) for a random order"}
_AHEAD = 2  # batches on their way to the devices while one is in use
_COPIES = 2  # placements kept for one data set, say for training on four devices and evaluating on one
_COMPARED = 64  # rows at most, of each array, by which processes compare their data
# To start a program takes 0.15 ms on two CPU devices, as long as the gather of a small batch. So one program gathers
# several of them.
_MOST_BATCHES = 8
_MOST_BYTES = 16 << 20  # of these batches on all devices together, except for one batch


@on_own_mesh
def order_of(rng: jax.Array | int | None, size: int, count: int | None = None) -> Order:
    """The order of each epoch: `permutation(fold_in(rng, epoch), size)`, or the stored one if there is no key.

    With `count`, in place of an order: so many numbers from 0 and below 1 for each example, float32 (size, count), by
    which images of records are cut and mirrored.
    """
    if rng is None:
        return lambda epoch: np.arange(size, dtype=np.int32)
    rng = checks.random_key(rng, "data.batches")
    # The key goes through host memory, since it may be on other devices than the default one.
    impl = str(jax.random.key_impl(rng)) if is_prng_key(rng) else None
    key_data = np.asarray(rng if impl is None else jax.random.key_data(rng))
    return functools.partial(draw, key_data, size=size, count=count, impl=impl)


@functools.partial(jax.jit, static_argnames=("size", "count", "impl"))
def draw(key_data: jax.Array, epoch: jax.Array, size: int, count: int | None, impl: str | None) -> jax.Array:
    rng = jax.random.wrap_key_data(key_data, impl=impl)
    if count is None:
        return jax.random.permutation(jax.random.fold_in(rng, epoch), size).astype(np.int32)
    rng = jax.random.fold_in(rng, 0xD4A35)  # not the key of an order
    return jax.random.uniform(jax.random.fold_in(rng, epoch), (size, count), np.float32)


class Segment(NamedTuple):
    """Batches of one epoch and one size, one after another."""

    epoch: int
    first: int  # position of the first example in the order of the epoch
    batch_size: int
    number: int  # of batches


def segments(
    size: int, batch_size: int, epochs: int | None, start: int, drop_remainder: bool = True
) -> Iterator[Segment]:
    """All batches from batch `start` on. None epochs: without an end."""
    full_batches, remainder = divmod(size, batch_size)
    steps = full_batches if drop_remainder or not remainder else full_batches + 1
    # A run that resumes asks for batch `start`: epochs before it are counted, and no order is drawn for them.
    first, skipped = divmod(start, steps)
    for epoch in itertools.count(first) if epochs is None else range(first, epochs):
        if skipped < full_batches:
            yield Segment(epoch, skipped * batch_size, batch_size, full_batches - skipped)
        if full_batches < steps:
            yield Segment(epoch, full_batches * batch_size, remainder, 1)
        skipped = 0


def split_rows(
    size: int, fraction: float | int, rng: jax.Array | int | None, shuffle: bool, caller: str
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of the two parts, in ascending order. Options and errors are as in `data.split`."""
    if checks.is_int(fraction):
        count = int(fraction)
    else:
        count = round(size * checks.number(fraction, caller, "fraction", "a number", lambda x: math.isfinite(size * x)))
    if not 0 < count < size:
        raise ValueError(
            f"{caller}: {fraction} of {size} examples leaves one of the two parts empty; give a fraction between 0 and "
            f"1, or a number of examples from 1 to {size - 1}"
        )
    if not shuffle:
        if rng is not None:
            raise ValueError(f"{caller}: shuffle=False uses no rng; leave out one of them")
        return np.arange(count), np.arange(count, size)
    # Drawn as the order of an epoch is, so it is the same on any devices; sorted, so a part keeps the stored order.
    with outside_mesh():
        order = np.asarray(order_of(checks.random_key(0 if rng is None else rng, caller), size)(0))
    return np.sort(order[:count]), np.sort(order[count:])


# Where a batch goes: the devices that share it.


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which devices share a batch. Without a sharding it goes to the default device."""

    sharding: NamedSharding | None = None  # of the first axis, over a mesh without types, on which batches are made
    num_shards: int = 1  # that the first axis is split into
    user_sharding: NamedSharding | None = None  # the sharding that the user asked for, if it is another one
    # V, where a batch is for a step with virtual shards and the devices cannot share these evenly.
    virtual_shards: int | None = None

    def rows(self, count: int) -> int:
        """How many rows the arrays of a batch of `count` examples have: more than `count` where it is padded."""
        if self.virtual_shards is None:
            return count
        return collectives.padded_rows(count, self.virtual_shards, self.num_shards)


def check_sharding(sharding: object, caller: str) -> NamedSharding:
    """`sharding`, or that of a `PartitionSpec` over the mesh that the user has set. `TypeError` for anything else."""
    if isinstance(sharding, P) and not jax.sharding.get_mesh().empty:
        sharding = NamedSharding(jax.sharding.get_mesh(), sharding)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return sharding
    hint = "; a PartitionSpec needs a mesh, set by jax.set_mesh" if isinstance(sharding, P) else ""
    example = "such as jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))"
    raise TypeError(f"{caller}: sharding must be a NamedSharding, {example}; got {checks.describe(sharding)}{hint}")


# Arrays in host memory, and batches of them on the devices.


def convert_image(image: jax.Array, dtype: DTypeLike | None) -> jax.Array:
    """The image in the batch's dtype. uint8 becomes a fraction of 255 in floating point."""
    if dtype is None or image.dtype == dtype:
        return image
    scaled = image.dtype == jnp.uint8 and jnp.issubdtype(dtype, jnp.floating)
    return (image.astype(jnp.float32) / 255).astype(dtype) if scaled else image.astype(dtype)


_convert = jax.jit(convert_image, static_argnums=1)


def convert_images(batch: PyTree, dtype: DTypeLike | None) -> PyTree:
    """The batch with "image" in `dtype`. None leaves it."""
    if dtype is None or not isinstance(batch, dict) or "image" not in batch:
        return batch
    return {**batch, "image": jax.tree.map(lambda image: _convert(image, np.dtype(dtype)), batch["image"])}


def batch_struct(arrays: PyTree, batch_size: int, dtype: DTypeLike | None) -> PyTree:
    """The shapes and dtypes of a batch of these arrays on the devices. "image" is of `dtype`."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(arrays)
    shapes: list[jax.ShapeDtypeStruct] = []
    for path, array in leaves:
        is_image = isinstance(arrays, dict) and path[0].key == "image"
        on_device = np.dtype(dtype) if is_image and dtype is not None else host.kept_dtype(array.dtype)
        shapes.append(jax.ShapeDtypeStruct((batch_size, *array.shape[1:]), on_device))
    return structure.unflatten(shapes)


def send(array: HostArray, rows: np.ndarray | None, sharding: NamedSharding | None) -> jax.Array:
    """The array, or these rows of it, on the devices. Each process has it whole, and reads what its devices get.

    Without `rows`, nobody may write to the array afterwards.
    """

    def shard(index: Any) -> np.ndarray:  # slices, one for each axis
        return host.in_kept_dtype(array[index if rows is None else rows[index[0]]], "data.batches: an array")

    if sharding is None:
        return jax.device_put(shard((...,)))
    shape = array.shape if rows is None else (len(rows), *array.shape[1:])
    return jax.make_array_from_callback(shape, sharding, shard)


@in_user_mesh
def placed_batch(batch: PyTree, sharding: NamedSharding | None, dtype: DTypeLike | None, *, is_global: bool) -> PyTree:
    """The batch on the devices, split along its first axis, with "image" in `dtype`.

    Nobody may write to its arrays of NumPy afterwards. `is_global`: each process has all rows of the batch, and sends
    those of its devices. Otherwise each has its own share.
    """

    def placed(path: KeyPath, array: ArrayLike) -> jax.Array:
        # An array on the devices of one process goes to those of several through its host memory only.
        if isinstance(array, jax.Array) and (sharding is None or processes.count() == 1):
            return array if sharding is None else jax.device_put(array, sharding)
        name = f"data.batches: {path_name(path)}"
        array = host.in_kept_dtype(np.asarray(array), name)
        if sharding is None or is_global:
            return send(array, None, sharding)
        return jax.make_array_from_process_local_data(sharding, array)

    batch = convert_images(jax.tree_util.tree_map_with_path(placed, batch), dtype)
    if sharding is not None:
        wait_before_collectives(batch, tuple(sharding.device_set))
    return batch


def as_batch(arrays: PyTree, placement: Placement) -> PyTree:
    """The arrays as the user asked for them, marked if they are padded. A program with collectives may take them."""
    # Nothing is copied.
    if placement.sharding is not None:
        wait_before_collectives(arrays, tuple(placement.sharding.device_set))
    if (user_sharding := placement.user_sharding) is not None:
        arrays = jax.tree.map(lambda array: with_sharding(array, user_sharding), arrays)
    if placement.virtual_shards is None:
        return arrays
    return collectives.PaddedBatch(arrays, placement.virtual_shards)


def ahead(batches: Iterable[Item], size: int) -> Iterator[Item]:
    """The batches, of which `size` are made ahead of the one in use. An exception comes after those before it."""
    waiting: collections.deque[Item] = collections.deque()
    try:
        for batch in batches:
            waiting.append(batch)
            if len(waiting) > size:
                yield waiting.popleft()
    except Exception:
        yield from waiting
        raise
    yield from waiting


def agree_on_arrays(arrays: PyTree, caller: str) -> None:
    """`ValueError` in every process unless all give the same arrays, by their shapes and some of their rows."""
    # Each process reads its own rows of arrays that all have. If each had other arrays, rows of all of them would be
    # missing from the run, and no shape would tell. Some rows of each array do, without reading all of a memmap.
    if processes.count() == 1:
        return
    shapes, checksum = list[str](), 0
    for leaf in jax.tree.leaves(arrays):
        shapes.append(f"{leaf.dtype} {leaf.shape}")
        checksum = zlib.crc32(np.ascontiguousarray(leaf[:: len(leaf) // _COMPARED + 1]).tobytes(), checksum)
    hint = "give each process all of them, or its own batches by data.from_iterable"
    shown = f"{', '.join(shapes)}, checksum {checksum:08x}"
    processes.agree(f"{caller}: every process must give the same arrays; {hint}", shown)


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """The batches that are asked for, and where they go."""

    segments: Iterator[Segment]
    order: Order
    placement: Placement


class BatchOptions(TypedDict, total=False):
    """The options of `data.batches` that data sets and arrays have. Its docstring explains them."""

    rng: jax.Array | int | None
    epochs: int | None
    start: int
    drop_remainder: bool
    devices: Sequence[Device] | None
    sharding: NamedSharding | P | None
    axis_name: str
    virtual_shards: int | None


class DatasetBatchOptions(BatchOptions, total=False):
    """Those that a `Dataset` has beside them."""

    dtype: DTypeLike | None
    resident: bool | None


def plan_batches(
    size: int,
    batch_size: int,
    caller: str,
    *,
    rng: jax.Array | int | None = None,
    epochs: int | None = 1,
    start: int = 0,
    drop_remainder: bool = True,
    devices: Sequence[Device] | None = None,
    sharding: NamedSharding | P | None = None,
    axis_name: str = STORE_AXIS,
    virtual_shards: int | None = None,
) -> BatchPlan:
    """Batches of `size` examples. Options and errors are as in `data.batches`; `caller` begins the messages."""
    # Which devices share a batch.
    placement, axis_name = Placement(), checks.text(axis_name, caller, "axis_name")
    checks.at_most_one(caller, sharding=sharding, devices=devices)  # a sharding has the devices of its mesh
    if sharding is not None:
        user_sharding = check_sharding(sharding, caller)
        spec, mesh = user_sharding.spec, user_sharding.mesh
        assert isinstance(mesh, Mesh)
        if any(spec[1:]):  # images and labels have no other axis in common
            raise ValueError(
                f"{caller}: the sharding of a batch splits its first axis only, got {spec}; reshard a batch by "
                "jax.device_put, or give data.prefetch one for each array"
            )
        # Batches are made over a mesh without axis types, and then get the sharding that was asked for.
        own_sharding = NamedSharding(auto_mesh(mesh) if has_types(mesh) else mesh, P(*spec[:1] or (None,)))
        placement = Placement(
            own_sharding,
            num_shards=math.prod([mesh.shape[axis] for axis in axes_of(own_sharding.spec)]),
            user_sharding=None if own_sharding == user_sharding else user_sharding,
        )
    elif devices is not None:
        checked = checks.devices(devices, caller)
        placement = Placement(NamedSharding(Mesh(np.array(checked), (axis_name,)), P(axis_name)), len(checked))

    # They must share each batch evenly, the last one too. Virtual shards are what they share then. Where the devices
    # cannot share these evenly, a batch is padded, and any number of devices may have it.
    batch_size = checks.whole_number(batch_size, caller, "batch_size")
    remainder, num_shards = 0 if drop_remainder else size % batch_size, placement.num_shards
    if virtual_shards is not None:
        virtual_shards = checks.whole_number(virtual_shards, caller, "virtual_shards")
        checks.even_share(batch_size, virtual_shards, caller, of="virtual shards")
        checks.even_share(remainder, virtual_shards, caller, of="virtual shards")
        if virtual_shards % num_shards:
            placement, num_shards = dataclasses.replace(placement, virtual_shards=virtual_shards), 1
    checks.even_share(batch_size, num_shards, caller)
    checks.whole_batch(size, batch_size if drop_remainder else 1, caller, ", or drop_remainder=False")
    if remainder % num_shards:
        raise ValueError(
            f"{caller}: the last batch would have {remainder} examples, which {num_shards} devices cannot share "
            "evenly; use drop_remainder=True, or another batch_size"
        )

    checks.whole_number(start, caller, "start", least=0)
    if epochs is not None:
        checks.whole_number(epochs, caller, "epochs", least=0)
    return BatchPlan(segments(size, batch_size, epochs, start, drop_remainder), order_of(rng, size), placement)


def from_host(arrays: PyTree, plan: BatchPlan, dtype: DTypeLike | None) -> Iterator[PyTree]:
    """Batches of a pytree of arrays in host memory. Transfers run while earlier batches are in use."""
    placement = plan.placement

    def sent() -> Iterator[PyTree]:
        epoch, order = None, np.empty(0, np.int32)
        for segment in plan.segments:
            if segment.epoch != epoch:
                epoch, order = segment.epoch, np.asarray(plan.order(segment.epoch))
            size = segment.batch_size
            for at in range(segment.first, segment.first + segment.number * size, size):
                # What pads a batch repeats its last example, and the step leaves it out.
                rows = np.pad(order[at : at + size], (0, placement.rows(size) - size), mode="edge")
                batch = jax.tree.map(lambda array, rows=rows: send(array, rows, placement.sharding), arrays)
                yield convert_images(batch, dtype)

    return each_in_user_mesh(as_batch(batch, placement) for batch in ahead(sent(), _AHEAD))


# Batches that are gathered from copies on the devices.


# By `data.Dataset`, with which they go, and by where they are: images and labels, whole on each device.
Copies = dict[Any, tuple[jax.Array, jax.Array]]
_residents: weakref.WeakKeyDictionary[ImagesAndLabels, Copies] = weakref.WeakKeyDictionary()


def resident(
    dataset: ImagesAndLabels, placement: Placement, wanted: bool | None = None
) -> tuple[jax.Array, jax.Array] | None:
    """Images and labels, whole on each device. None if they are not `wanted`, by default for lack of memory."""
    # They are sent once in the data set's life, unless it is used on ever other devices.
    mesh: Any = None if placement.sharding is None else placement.sharding.mesh
    key = mesh or jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    placed = _residents.setdefault(dataset, {})
    if wanted is None:
        # There must be room for two copies on each device. A device that does not say has room.
        devices = jax.local_devices()[:1] if mesh is None else mesh.local_devices
        free = (size for size in map(free_bytes, devices) if size is not None)
        size = dataset.images.nbytes + dataset.labels.nbytes
        has_room = key in placed or 2 * size <= min(free, default=math.inf)
        wanted = processes.all_true(has_room) if mesh is not None and mesh.is_multi_process else has_room
    if not wanted:
        return None
    if key not in placed:
        if len(placed) == _COPIES:
            del placed[next(iter(placed))]
        replicated = None if mesh is None else NamedSharding(mesh, P())
        with outside_mesh():
            images, labels = (
                send(host.in_kept_dtype(array, f"data.Dataset: {name}"), None, replicated)
                for name, array in (("images", dataset.images), ("labels", dataset.labels))
            )
        placed[key] = images, labels
    return placed[key]


def free_bytes(device: Device) -> int | None:
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    if device.platform == "cpu" and hasattr(os, "sysconf"):  # the host's memory, shared by its devices
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(jax.local_devices(backend="cpu"))
    return None


def from_devices(
    images: jax.Array,
    labels: jax.Array,
    plan: BatchPlan,
    dtype: np.dtype[Any] | None,
    *,
    most: int | None = None,
    stacked: bool = False,
) -> Iterator[tuple[Any, int]]:
    """Batches gathered from the copies on the devices, several at a time, and how many of these count.

    At the end of a segment fewer count, and the others are copies of the last example. `most`: how many at a time.
    """
    placement = plan.placement
    sharding = None if placement.sharding is None else images.sharding
    image_bytes = math.prod(images.shape[1:]) * (images.dtype if dtype is None else dtype).itemsize
    # The order of an epoch goes to the devices once, (examples,) int32 on each. A group of batches then needs no data
    # from the host, not even its position: `cursor` is what the group before returned.
    epoch = rows = None
    for segment in plan.segments:
        if segment.epoch != epoch:
            epoch, rows = segment.epoch, put(plan.order(segment.epoch), sharding)
        # Starting a program costs as much as a small batch.
        several = most or max(1, min(_MOST_BATCHES, _MOST_BYTES // max(1, segment.batch_size * image_bytes)))
        cursor = put(np.array(segment.first, np.int32), sharding)
        for done in range(0, segment.number, several):
            program = gather(segment.batch_size, several, placement, dtype, stacked)
            arrays, cursor = program(images, labels, rows, cursor)
            batches = as_batch(arrays, placement) if stacked else [as_batch(batch, placement) for batch in arrays]
            yield batches, min(several, segment.number - done)


@functools.lru_cache(maxsize=32)
def gather(
    count: int, several: int, placement: Placement, dtype: np.dtype[Any] | None, stacked: bool
) -> Callable[..., tuple[PyTree, jax.Array]]:
    """The program `(images, labels, rows, cursor) -> (several batches of count examples, the new cursor)`.

    `stacked`: the batches are one pytree with one more axis in front, otherwise a list.
    """
    # Each device gathers its share. The cursor stays on the devices, so that a batch needs nothing from the host. Past
    # the end of the order comes its last example, again and again. The rows of a padding are any examples.
    spec = P(None) if placement.sharding is None else placement.sharding.spec

    def local(images: jax.Array, labels: jax.Array, rows: jax.Array, cursor: jax.Array) -> tuple[Any, jax.Array]:
        share = placement.rows(count) // placement.num_shards
        start = cursor + lax.axis_index(spec[0]) * share if spec[0] else cursor
        firsts, batches = np.arange(several, dtype=np.int32) * count, list[dict[str, jax.Array]]()
        for first in [firsts[:, None]] if stacked else firsts:
            local_rows = rows.at[start + (first + np.arange(share, dtype=np.int32))].get(mode="clip")
            image = images.at[local_rows].get(mode="promise_in_bounds")  # an order has no other rows
            image = lax.optimization_barrier(image)  # XLA on a CPU takes three times as long for both in one loop
            label = labels.at[local_rows].get(mode="promise_in_bounds")
            batches.append({"image": convert_image(image, dtype), "label": label})
        return batches[0] if stacked else batches, cursor + several * count

    if placement.sharding is None:
        return jax.jit(local)
    mesh, spec_of_batch = placement.sharding.mesh, P(None, *spec) if stacked else spec
    shards = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=(spec_of_batch, P()))
    return jax.jit(shards, out_shardings=(NamedSharding(mesh, spec_of_batch), NamedSharding(mesh, P())))
