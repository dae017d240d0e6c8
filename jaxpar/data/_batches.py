"""Which examples come when, and batches of them: streamed from the host, or gathered from copies on the devices."""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import itertools
import math
import os
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from .._core import calls, checks, host
from .._core.arrays import Device, is_prng_key
from .._devices import collectives, processes
from .._devices.mesh import STORE_AXIS, auto_mesh, put, wait_before_collectives
from .._devices.shardings import axes_of
from .._devices.user_mesh import each_in_user_mesh, has_types, in_user_mesh, on_own_mesh, outside_mesh, with_sharding

Order = Callable[[int], Any]  # of an epoch: int32 (examples,), in host memory or on the default device

HINTS = {"shuffle": "give rng=jax.random.key(0) for a random order"}
_AHEAD = 2  # batches on their way to the devices while one is in use
_COPIES = 2  # placements kept for one data set, say for training on four devices and evaluating on one
_COMPARED = 64  # rows at most, of each array, by which processes compare their data
_MOST_BATCHES = 8  # of one program,
_MOST_BYTES = 16 << 20  # and their size on all devices together, except for one batch


@on_own_mesh
def order_of(rng: Any, size: int, count: int | None = None) -> Order:
    """The order of each epoch: `permutation(fold_in(rng, epoch), size)`, or the stored one if there is no key.

    With `count`, in place of an order: so many numbers from 0 and below 1 for each example, (size, count).
    """
    if rng is None:
        return lambda epoch: np.arange(size, dtype=np.int32)
    if not isinstance(rng, jax.Array | np.ndarray):
        raise TypeError(f"rng must be a random key, such as jax.random.key(0); got {type(rng).__name__}")
    checks.random_key(rng, "data.batches")
    # The key goes through host memory, since it may be on other devices than the default one.
    impl = str(jax.random.key_impl(rng)) if is_prng_key(rng) else None
    words = np.asarray(rng if impl is None else jax.random.key_data(rng))
    return functools.partial(draw, words, size=size, count=count, impl=impl)


@functools.partial(jax.jit, static_argnames=("size", "count", "impl"))
def draw(words: jax.Array, epoch: jax.Array, size: int, count: int | None, impl: str | None) -> jax.Array:
    rng = jax.random.wrap_key_data(words, impl=impl)
    if count is None:
        return jax.random.permutation(jax.random.fold_in(rng, epoch), size).astype(np.int32)
    rng = jax.random.fold_in(rng, 0xD4A35)  # not the key of an order
    return jax.random.uniform(jax.random.fold_in(rng, epoch), (size, count), np.float32)


class Run(NamedTuple):
    """Batches of one epoch and one size, one after another."""

    epoch: int
    first: int  # position of the first example in the order of the epoch
    batch_size: int
    number: int  # of batches


def runs(size: int, batch_size: int, epochs: int | None, start: int, drop_remainder: bool = True) -> Iterator[Run]:
    """All batches from batch `start` on. None epochs: without an end."""
    whole, rest = divmod(size, batch_size)
    steps = whole if drop_remainder or not rest else whole + 1
    first, skipped = divmod(start, steps)
    for epoch in itertools.count(first) if epochs is None else range(first, epochs):
        if skipped < whole:
            yield Run(epoch, skipped * batch_size, batch_size, whole - skipped)
        if whole < steps:
            yield Run(epoch, whole * batch_size, rest, 1)
        skipped = 0


def rows_of_parts(size: int, fraction: Any, rng: Any, shuffle: bool, where: str) -> tuple[np.ndarray, np.ndarray]:
    """The rows of the two parts, in ascending order. Options and errors are as in `data.split`."""
    if checks.is_int(fraction):
        count = int(fraction)
    else:
        count = round(size * checks.number(fraction, where, "fraction", "a number", lambda x: math.isfinite(size * x)))
    if not 0 < count < size:
        words = f"give a fraction between 0 and 1, or a number of examples from 1 to {size - 1}"
        raise ValueError(f"{where}: {fraction} of {size} examples leaves one of the two parts empty; {words}")
    if not shuffle:
        if rng is not None:
            raise ValueError(f"{where}: shuffle=False uses no rng; leave out one of them")
        return np.arange(count), np.arange(count, size)
    with outside_mesh():
        order = np.asarray(order_of(checks.random_key(0 if rng is None else rng, where), size)(0))
    return np.sort(order[:count]), np.sort(order[count:])


# Where a batch goes: the devices that share it.


@dataclasses.dataclass(frozen=True)
class Split:
    """Which devices share a batch. Without a sharding it goes to the default device."""

    sharding: NamedSharding | None = None  # of the first axis, over a mesh without types, on which batches are made
    parts: int = 1  # that the first axis is split into
    given: NamedSharding | None = None  # the sharding that the user asked for, if it is another one
    # V, where a batch is for a step with virtual shards and the parts cannot share these evenly.
    virtual_shards: int | None = None

    def rows(self, count: int) -> int:
        """How many rows the arrays of a batch of `count` examples have."""
        return count if self.virtual_shards is None else collectives.padded_rows(count, self.virtual_shards, self.parts)


def _split_of_sharding(given: NamedSharding, where: str) -> Split:
    spec, mesh = given.spec, given.mesh
    if any(spec[1:]):  # images and labels have no other axis in common
        words = "reshard a batch by jax.device_put, or give data.prefetch one for each array"
        raise ValueError(f"{where}: the sharding of a batch splits its first axis only, got {spec}; {words}")
    assert isinstance(mesh, Mesh)
    own = NamedSharding(auto_mesh(mesh) if has_types(mesh) else mesh, P(*spec[:1] or (None,)))
    return Split(own, math.prod([mesh.shape[axis] for axis in axes_of(own.spec)]), None if own == given else given)


def check_sharding(sharding: Any, where: str) -> NamedSharding:
    """`sharding`, or that of a `PartitionSpec` over the mesh that the user has set. `TypeError` for anything else."""
    if isinstance(sharding, P) and not jax.sharding.get_mesh().empty:
        sharding = NamedSharding(jax.sharding.get_mesh(), sharding)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return sharding
    hint = "; a PartitionSpec needs a mesh, set by jax.set_mesh" if isinstance(sharding, P) else ""
    example = "such as jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))"
    raise TypeError(f"{where}: sharding must be a NamedSharding, {example}; got {checks.describe(sharding)}{hint}")


def batch_options(
    source: Any, devices: Sequence[Any] | None, sharding: NamedSharding | None, virtual_shards: int | None
) -> dict[str, Any]:
    """The options of `source.batches` for a step: where its batches go, and for how many virtual shards."""
    # A source of the user's own need not have `sharding=` and `virtual_shards=`.
    if sharding is not None and _takes(source, "sharding"):
        return {"sharding": sharding}
    if virtual_shards is None:
        return {"devices": devices}
    if _takes(source, "virtual_shards"):
        return {"devices": devices, "virtual_shards": virtual_shards}
    if virtual_shards % (count := len(devices or (None,))):
        words = f"which {count} devices cannot share evenly; add it, or use a number of devices that divides it"
        raise TypeError(f"{type(source).__name__}.batches takes no virtual_shards={virtual_shards}, {words}")
    return {"devices": devices}


def _takes(source: Any, option: str) -> bool:
    found = inspect.signature(source.batches).parameters.values()
    return any(each.name == option or each.kind is each.VAR_KEYWORD for each in found)


# Arrays in host memory, and batches of them on the devices.


def path_name(path: Any) -> str:
    return repr(jax.tree_util.keystr(path, simple=True, separator="/")) if path else "an element"


def convert_image(image: jax.Array, dtype: Any) -> jax.Array:
    """The image in the batch's dtype. uint8 becomes a fraction of 255 in floating point."""
    if dtype is None or image.dtype == dtype:
        return image
    scaled = image.dtype == jnp.uint8 and jnp.issubdtype(dtype, jnp.floating)
    return (image.astype(jnp.float32) / 255).astype(dtype) if scaled else image.astype(dtype)


_convert = jax.jit(convert_image, static_argnums=1)


def convert_images(batch: Any, dtype: Any) -> Any:
    """The batch with "image" in `dtype`. None leaves it."""
    if dtype is None or not isinstance(batch, dict) or "image" not in batch:
        return batch
    return {**batch, "image": jax.tree.map(lambda image: _convert(image, np.dtype(dtype)), batch["image"])}


def batch_struct(arrays: Any, batch_size: int, dtype: Any) -> Any:
    """The shapes and dtypes of a batch of these arrays on the devices. "image" is of `dtype`."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(arrays)
    shapes: list[jax.ShapeDtypeStruct] = []
    for path, array in leaves:
        is_image = isinstance(arrays, dict) and path[0].key == "image"
        kept = np.dtype(dtype) if is_image and dtype is not None else host.kept_dtype(array.dtype)
        shapes.append(jax.ShapeDtypeStruct((batch_size, *array.shape[1:]), kept))
    return structure.unflatten(shapes)


def send(array: Any, rows: np.ndarray | None, sharding: NamedSharding | None) -> jax.Array:
    """The array, or these rows of it, on the devices. Each process has it whole, and reads what its devices get.

    Without `rows`, nobody may write to the array afterwards.
    """

    def part(index: Any) -> np.ndarray:
        return host.in_kept_dtype(array[index if rows is None else rows[index[0]]], "data.batches: an array")

    if sharding is None:
        return jax.device_put(part((...,)))
    shape = array.shape if rows is None else (len(rows), *array.shape[1:])
    return jax.make_array_from_callback(shape, sharding, part)


@in_user_mesh
def placed_batch(batch: Any, sharding: NamedSharding | None, dtype: Any, *, whole: bool) -> Any:
    """The batch on the devices, split along its first axis, with "image" in `dtype`.

    Nobody may write to its arrays of NumPy afterwards. `whole`: each process has the whole batch and takes its rows.
    Otherwise each has its own share.
    """

    def placed(path: Any, array: Any) -> jax.Array:
        if isinstance(array, jax.Array) and (sharding is None or processes.count() == 1):
            return array if sharding is None else jax.device_put(array, sharding)
        name = f"data.batches: {path_name(path)}"
        array = host.in_kept_dtype(np.asarray(array), name)
        if sharding is None or whole:
            return send(array, None, sharding)
        return jax.make_array_from_process_local_data(sharding, array)

    batch = convert_images(jax.tree_util.tree_map_with_path(placed, batch), dtype)
    if sharding is not None:
        wait_before_collectives(batch, tuple(sharding.device_set))
    return batch


def as_batch(arrays: Any, split: Split) -> Any:
    """The arrays as the user asked for them, marked if they are padded. A program with collectives may take them."""
    # Nothing is copied.
    if split.sharding is not None:
        wait_before_collectives(arrays, tuple(split.sharding.device_set))
    if (given := split.given) is not None:
        arrays = jax.tree.map(lambda array: with_sharding(array, given), arrays)
    return arrays if split.virtual_shards is None else collectives.PaddedBatch(arrays, split.virtual_shards)


def ahead(batches: Iterable[Any], size: int) -> Iterator[Any]:
    """The batches, of which `size` are made ahead of the one in use. An exception comes after those before it."""
    waiting: collections.deque[Any] = collections.deque()
    try:
        for batch in batches:
            waiting.append(batch)
            if len(waiting) > size:
                yield waiting.popleft()
    except Exception:
        yield from waiting
        raise
    yield from waiting


def agree_on_arrays(arrays: Any, where: str) -> None:
    """`ValueError` in every process unless all give the same arrays, by their shapes and some of their rows."""
    # Each process reads its own rows of arrays that all have. If each had a part, rows of all parts would be missing.
    if processes.count() == 1:
        return
    shapes, check = list[str](), 0
    for leaf in jax.tree.leaves(arrays):
        shapes.append(f"{leaf.dtype} {leaf.shape}")
        check = zlib.crc32(np.ascontiguousarray(leaf[:: len(leaf) // _COMPARED + 1]).tobytes(), check)
    hint = "give each process all of them, or its own batches by data.from_iterable"
    shown = f"{', '.join(shapes)}, checksum {check:08x}"
    processes.agree(f"{where}: every process must give the same arrays; {hint}", shown)


class Plan(NamedTuple):
    """The batches that are asked for, and where they go."""

    all_runs: Iterator[Run]
    order: Order
    split: Split


@calls.answers("data.batches", HINTS)
def plan_batches(
    size: int,
    batch_size: int,
    where: str,
    *,
    rng: jax.Array | None = None,
    epochs: int | None = 1,
    start: int = 0,
    drop_remainder: bool = True,
    devices: Sequence[Device] | None = None,
    sharding: Any = None,
    axis_name: str = STORE_AXIS,
    virtual_shards: int | None = None,
) -> Plan:
    """Batches of `size` examples. Options and errors are as in `data.batches`; `where` begins the messages."""
    split, axis_name = Split(), checks.text(axis_name, where, "axis_name")
    if sharding is not None and devices is not None:
        raise ValueError(f"{where}: give devices or a sharding, not both; a sharding has the devices of its mesh")
    if sharding is not None:
        split = _split_of_sharding(check_sharding(sharding, where), where)
    elif devices is not None:
        chosen = checks.devices(devices, where)
        split = Split(NamedSharding(Mesh(np.array(chosen), (axis_name,)), P(axis_name)), len(chosen))
    batch_size = checks.whole_number(batch_size, where, "batch_size")
    rest, parts = 0 if drop_remainder else size % batch_size, split.parts
    if virtual_shards is not None:
        virtual_shards = checks.whole_number(virtual_shards, where, "virtual_shards")
        checks.even_share(batch_size, virtual_shards, where, of="virtual shards")
        checks.even_share(rest, virtual_shards, where, of="virtual shards")
        if virtual_shards % parts:  # the parts cannot share the shards evenly, so a batch is padded
            split, parts = dataclasses.replace(split, virtual_shards=virtual_shards), 1
    checks.even_share(batch_size, parts, where)
    checks.whole_batch(size, batch_size if drop_remainder else 1, where, ", or drop_remainder=False")
    if rest % parts:
        words = f"{rest} examples, which {parts} devices cannot share evenly; use drop_remainder=True"
        raise ValueError(f"{where}: the last batch would have {words}, or another batch_size")
    checks.whole_number(start, where, "start", least=0)
    if epochs is not None:
        checks.whole_number(epochs, where, "epochs", least=0)
    return Plan(runs(size, batch_size, epochs, start, drop_remainder), order_of(rng, size), split)


def from_host(arrays: Any, plan: Plan, dtype: Any) -> Iterator[Any]:
    """Batches of a pytree of arrays in host memory. Transfers run while earlier batches are in use."""
    split = plan.split

    def sent() -> Iterator[Any]:
        epoch, rows = None, np.empty(0, np.int32)
        for run in plan.all_runs:
            if run.epoch != epoch:
                epoch, rows = run.epoch, np.asarray(plan.order(run.epoch))
            for at in range(run.first, run.first + run.number * run.batch_size, run.batch_size):
                wanted = rows[at : at + run.batch_size]
                wanted = np.pad(wanted, (0, split.rows(len(wanted)) - len(wanted)), mode="edge")
                batch = jax.tree.map(lambda array, wanted=wanted: send(array, wanted, split.sharding), arrays)
                yield convert_images(batch, dtype)

    return each_in_user_mesh(as_batch(batch, split) for batch in ahead(sent(), _AHEAD))


# Batches that are gathered from copies on the devices.


# By `data.Dataset`, with which they go, and by where they are: images and labels, whole on each device.
_residents: weakref.WeakKeyDictionary[Any, dict[Any, tuple[jax.Array, jax.Array]]] = weakref.WeakKeyDictionary()


@calls.answers("data.batches")
def resident(dataset: Any, split: Split, wanted: bool | None = None) -> tuple[jax.Array, jax.Array] | None:
    """Images and labels, whole on each device. None if they are not `wanted`, by default for lack of memory."""
    # They are sent once in the data set's life, unless it is used on ever other devices.
    mesh: Any = None if split.sharding is None else split.sharding.mesh
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
        whole = None if mesh is None else NamedSharding(mesh, P())
        with outside_mesh():
            images, labels = (
                send(host.in_kept_dtype(array, f"data.Dataset: {name}"), None, whole)
                for name, array in (("images", dataset.images), ("labels", dataset.labels))
            )
        placed[key] = images, labels
    return placed[key]


def free_bytes(device: Any) -> int | None:
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    if device.platform == "cpu" and hasattr(os, "sysconf"):  # the host's memory, shared by its devices
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(jax.local_devices(backend="cpu"))
    return None


def from_devices(
    images: jax.Array, labels: jax.Array, plan: Plan, dtype: Any, *, most: int | None = None, stacked: bool = False
) -> Iterator[tuple[Any, int]]:
    """Batches gathered from the copies on the devices, several at a time, and how many of these count.

    At the end of a run fewer count, and the rest are copies of the last example. `most`: how many at a time.
    """
    split = plan.split
    where = None if split.sharding is None else images.sharding
    size = math.prod(images.shape[1:]) * (images.dtype if dtype is None else dtype).itemsize
    epoch = rows = None
    for run in plan.all_runs:
        if run.epoch != epoch:
            epoch, rows = run.epoch, put(plan.order(run.epoch), where)
        # Starting a program costs as much as a small batch.
        several = most or max(1, min(_MOST_BATCHES, _MOST_BYTES // max(1, run.batch_size * size)))
        cursor = put(np.array(run.first, np.int32), where)
        for done in range(0, run.number, several):
            found, cursor = gather(run.batch_size, several, split, dtype, stacked)(images, labels, rows, cursor)
            batches = as_batch(found, split) if stacked else [as_batch(batch, split) for batch in found]
            yield batches, min(several, run.number - done)


@functools.lru_cache(maxsize=32)
def gather(count: int, several: int, split: Split, dtype: Any, stacked: bool) -> Callable[..., tuple[Any, jax.Array]]:
    """The program `(images, labels, rows, cursor) -> (several batches of count examples, the new cursor)`.

    `stacked`: the batches are one pytree with one more axis in front, otherwise a list.
    """
    # Each device gathers its share. The cursor stays on the devices, so that a batch needs nothing from the host. Past
    # the end of the order comes its last example, again and again. The rows of a padding are any examples.
    spec = P(None) if split.sharding is None else split.sharding.spec

    def local(images: jax.Array, labels: jax.Array, rows: jax.Array, cursor: jax.Array) -> tuple[Any, jax.Array]:
        share = split.rows(count) // split.parts
        start = cursor + lax.axis_index(spec[0]) * share if spec[0] else cursor
        firsts, found = np.arange(several, dtype=np.int32) * count, list[dict[str, jax.Array]]()
        for first in [firsts[:, None]] if stacked else firsts:
            mine = rows.at[start + (first + np.arange(share, dtype=np.int32))].get(mode="clip")
            image = images.at[mine].get(mode="promise_in_bounds")
            image = lax.optimization_barrier(image)  # XLA on a CPU takes three times as long for both in one loop
            label = labels.at[mine].get(mode="promise_in_bounds")
            found.append({"image": convert_image(image, dtype), "label": label})
        return found[0] if stacked else found, cursor + several * count

    if split.sharding is None:
        return jax.jit(local)
    mesh, spec_of_batch = split.sharding.mesh, P(None, *spec) if stacked else spec
    shards = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=(spec_of_batch, P()))
    return jax.jit(shards, out_shardings=(NamedSharding(mesh, spec_of_batch), NamedSharding(mesh, P())))
