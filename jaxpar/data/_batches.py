"""Which examples come when, and batches of them: streamed from the host, or gathered from copies on the devices."""

from __future__ import annotations

import collections
import functools
import itertools
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from .._core import checks
from .._core.arrays import Device, is_prng_key
from .._core.calls import answers
from .._devices import processes
from .._devices.mesh import STORE_AXIS, put
from .._devices.user_mesh import each_in_user_mesh, on_own_mesh, outside_mesh
from ._sharding import (
    Split,
    as_batch,
    as_jax_dtype,
    check_virtual_shards,
    convert_image,
    convert_images,
    ready,
    split_of,
)

Order = Callable[[int], Any]  # of an epoch: int32 (examples,), in host memory or on the default device
Batch = dict[str, jax.Array]
Examples = Any  # with the arrays `images` and `labels` in host memory and a length, as a `Dataset` has them

HINTS = {"shuffle": "give rng=jax.random.key(0) for a random order"}
_AHEAD = 2  # batches on their way to the devices while one is in use
_COPIES = 2  # placements kept for one data set, say for training on four devices and evaluating on one
_MOST_BATCHES = 8  # of one program,
_MOST_BYTES = 16 << 20  # and their size on all devices together, except for one batch


@on_own_mesh
def order_of(rng: Any, size: int) -> Order:
    """The order of each epoch: `permutation(fold_in(rng, epoch), size)`, or the stored one if there is no key."""
    if rng is None:
        stored = np.arange(size, dtype=np.int32)
        return lambda epoch: stored
    return _each_epoch(rng, _permutation, size)


@on_own_mesh
def draws_of(rng: Any, size: int, count: int) -> Order:
    """`count` numbers for each example, in each epoch others: float32 (size, count) from 0 and below 1."""
    return _each_epoch(rng, _uniform, (size, count))


def _each_epoch(rng: Any, program: Callable[[Any, str | None], Callable[..., jax.Array]], size: Any) -> Order:
    if not isinstance(rng, jax.Array | np.ndarray):
        raise TypeError(f"rng must be a random key, such as jax.random.key(0); got {type(rng).__name__}")
    checks.random_key(rng, "data.batches")
    # The key goes through host memory, since it may be on other devices than the default one.
    impl = str(jax.random.key_impl(rng)) if is_prng_key(rng) else None
    words = np.asarray(rng if impl is None else jax.random.key_data(rng))
    return lambda epoch: program(size, impl)(words, np.uint32(epoch))


@functools.lru_cache(maxsize=32)
def _permutation(size: int, impl: str | None) -> Callable[..., jax.Array]:
    def draw(words: jax.Array, epoch: jax.Array) -> jax.Array:
        rng = jax.random.fold_in(jax.random.wrap_key_data(words, impl=impl), epoch)
        return jax.random.permutation(rng, size).astype(np.int32)

    return jax.jit(draw)


@functools.lru_cache(maxsize=32)
def _uniform(shape: tuple[int, int], impl: str | None) -> Callable[..., jax.Array]:
    def draw(words: jax.Array, epoch: jax.Array) -> jax.Array:
        rng = jax.random.fold_in(jax.random.wrap_key_data(words, impl=impl), 0xD4A35)  # not the key of an order
        return jax.random.uniform(jax.random.fold_in(rng, epoch), shape, np.float32)

    return jax.jit(draw)


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
    for epoch, skipped in epochs_from(start, steps, epochs):
        if skipped < whole:
            yield Run(epoch, skipped * batch_size, batch_size, whole - skipped)
        if whole < steps:
            yield Run(epoch, whole * batch_size, rest, 1)


def epochs_from(start: int, steps: int, epochs: int | None) -> Iterator[tuple[int, int]]:
    """Each epoch from the one of batch `start` on, with how many of its `steps` batches to skip."""
    first, skipped = divmod(start, steps)
    for epoch in itertools.count(first) if epochs is None else range(first, epochs):
        yield epoch, skipped if epoch == first else 0


def rows_of_parts(size: int, fraction: Any, rng: Any, shuffle: bool, where: str) -> tuple[np.ndarray, np.ndarray]:
    """The rows of the two parts, in ascending order. Options and errors are as in `data.split`."""
    if checks.is_int(fraction):
        count = int(fraction)
    else:
        count = round(size * checks.number(fraction, where, "fraction", "a number", lambda x: math.isfinite(size * x)))
    if not 0 < count < size:
        raise ValueError(
            f"{where}: {fraction} of {size} examples leaves one of the two parts empty; give a fraction between 0 and "
            f"1, or a number of examples from 1 to {size - 1}"
        )
    if not shuffle:
        if rng is not None:
            raise ValueError(f"{where}: shuffle=False uses no rng; leave out one of them")
        return np.arange(count), np.arange(count, size)
    with outside_mesh():
        if rng is None or checks.is_int(rng):
            rng = jax.random.key(int(rng or 0))
        if not isinstance(rng, jax.Array):
            raise TypeError(f"{where}: rng must be a random key or an int, got {checks.describe(rng)}")
        order = np.asarray(order_of(rng, size)(0))
    return np.sort(order[:count]), np.sort(order[count:])


class Subset:
    """The elements of a sequence at some places, in the order of these."""

    def __init__(self, elements: Any, places: np.ndarray):
        self._elements, self._places = elements, places.tolist()

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, i: int) -> Any:
        return self._elements[self._places[i]]

    def __iter__(self) -> Iterator[Any]:
        return map(self._elements.__getitem__, self._places)


# Batches of arrays.


@answers("data.num_batches")
def num_batches(size: int, batch_size: int, *, drop_remainder: bool = True) -> int:
    """The number of batches in one epoch over `size` examples.

    >>> num_batches(60000, 256), num_batches(60000, 256, drop_remainder=False)
    (234, 235)
    """
    size = checks.whole_number(size, "data.num_batches", "size", least=0)
    batch_size = checks.whole_number(batch_size, "data.num_batches", "batch_size")
    return size // batch_size if drop_remainder else -(-size // batch_size)


def dataset_batches(
    dataset: Examples, batch_size: int, *, dtype: Any = jnp.float32, resident: bool | None = None, **options: Any
) -> Iterator[Batch]:
    """`data.batches` of a data set."""
    plan = plan_batches(len(dataset), batch_size, "data.batches", **options)
    dtype = None if dtype is None else np.dtype(dtype)
    if has_room(dataset, plan.split) if resident is None else resident:
        return each_in_user_mesh(_one_by_one(from_devices(dataset, *plan, dtype), plan.split))
    return each_in_user_mesh(from_host({"image": dataset.images, "label": dataset.labels}, *plan, dtype))


class Plan(NamedTuple):
    """The batches that are asked for, and where they go."""

    all_runs: Iterator[Run]
    order: Order
    split: Split | None


@answers("data.batches", HINTS)
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
    split = split_of(devices, axis_name, sharding, virtual_shards, where)
    batch_size = checks.whole_number(batch_size, where, "batch_size")
    rest = 0 if drop_remainder else size % batch_size
    check_virtual_shards(batch_size, virtual_shards, where)
    check_virtual_shards(rest, virtual_shards, where)
    parts = split.parts if split is not None and virtual_shards is None else 1
    checks.even_share(batch_size, parts, where)
    if size < (batch_size if drop_remainder else 1):
        raise ValueError(
            f"{where}: a data set of {size} examples has no batch of {batch_size}; "
            "use a smaller batch_size, or drop_remainder=False"
        )
    if rest % parts:
        raise ValueError(
            f"{where}: the last batch would have {rest} examples, which {parts} devices cannot share evenly; "
            "use drop_remainder=True, or a batch_size that leaves a remainder divisible by the devices"
        )
    checks.whole_number(start, where, "start", least=0)
    if epochs is not None:
        checks.whole_number(epochs, where, "epochs", least=0)
    return Plan(runs(size, batch_size, epochs, start, drop_remainder), order_of(rng, size), split)


def _one_by_one(groups: Iterator[tuple[Any, int]], split: Split | None) -> Iterator[Any]:
    for batches, number in groups:
        yield from (as_batch(batch, split) for batch in batches[:number])


def from_host(arrays: Any, all_runs: Iterator[Run], order: Order, split: Split | None, dtype: Any) -> Iterator[Any]:
    """Batches of a pytree of arrays in host memory. Transfers run while earlier batches are in use."""
    ahead: collections.deque[Any] = collections.deque()
    epoch, rows = None, np.empty(0, np.int32)
    for run in all_runs:
        if run.epoch != epoch:
            epoch, rows = run.epoch, np.asarray(order(run.epoch))
        for i in range(run.number):
            at = run.first + i * run.batch_size
            wanted = rows[at : at + run.batch_size]
            batch = jax.tree.map(lambda array, wanted=wanted: _transfer(array, wanted, split), arrays)
            ahead.append(convert_images(batch, dtype))
            if len(ahead) > _AHEAD:
                yield as_batch(ready(ahead.popleft(), split), split)
    for batch in ahead:
        yield as_batch(ready(batch, split), split)


def _transfer(array: np.ndarray, rows: np.ndarray, split: Split | None) -> jax.Array:
    """Send `array[rows]` to the devices, to each its own share."""
    if split is None:
        return jnp.asarray(as_jax_dtype(array[rows]))
    rows = np.pad(rows, (0, split.rows(len(rows)) - len(rows)), mode="edge")
    shape = (len(rows), *array.shape[1:])

    def share(index: Any) -> np.ndarray:
        return as_jax_dtype(array[rows[index[0]]])

    return jax.make_array_from_callback(shape, split.sharding, share)


# Batches that are gathered from copies on the devices.


# Device copies by data set. They go when the data set goes.
_residents: weakref.WeakKeyDictionary[Examples, dict[Any, tuple[jax.Array, jax.Array]]]
_residents = weakref.WeakKeyDictionary()


def _copies(dataset: Examples, mesh: Mesh | None) -> tuple[jax.Array, jax.Array]:
    """Images and labels, whole on each device. They are sent once in the data set's life."""
    placed = _residents.setdefault(dataset, {})
    key = _placement(mesh)
    if key not in placed:
        if len(placed) == _COPIES:
            del placed[next(iter(placed))]
        placed[key] = (_place(dataset.images, mesh), _place(dataset.labels, mesh))
    return placed[key]


def _placement(mesh: Mesh | None) -> Any:
    return jax.config.jax_default_device if mesh is None else mesh  # pyright: ignore[reportAttributeAccessIssue]


def _place(array: np.ndarray, mesh: Mesh | None) -> jax.Array:
    """A copy of the array on each device of the mesh, or an uncommitted one on the default device."""
    array = as_jax_dtype(array)
    if mesh is None:
        return jnp.asarray(array)
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, P()), lambda index: array[index])


def has_room(dataset: Examples, split: Split | None) -> bool:
    """Whether each device has room for two copies of the data set. A device that does not say has."""
    mesh = split and split.mesh
    if _placement(mesh) in _residents.get(dataset, {}):
        room = True
    else:
        devices = jax.local_devices()[:1] if mesh is None else mesh.local_devices
        free = [size for size in map(free_bytes, devices) if size is not None]
        room = 2 * (dataset.images.nbytes + dataset.labels.nbytes) <= min(free, default=float("inf"))
    return processes.all_true(room) if mesh is not None and mesh.is_multi_process else room


def free_bytes(device: Any) -> int | None:
    """The free memory of a device, in bytes. None if unknown."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    if device.platform == "cpu" and hasattr(os, "sysconf"):  # the host's memory, shared by its devices
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(jax.local_devices(backend="cpu"))
    return None


def from_devices(
    dataset: Examples,
    all_runs: Iterable[Run],
    order: Order,
    split: Split | None,
    dtype: Any,
    *,
    most: int | None = None,
    stacked: bool = False,
) -> Iterator[tuple[Any, int]]:
    """Batches gathered from the copies on the devices, several at a time, and how many of these count.

    At the end of a run fewer count, and the rest are copies of the last example. `most`: how many at a time, where that
    is not left to `_batches_per_program`.
    """
    mesh = split and split.mesh
    images, labels = _copies(dataset, mesh)
    epoch = rows = None
    for run in all_runs:
        if run.epoch != epoch:
            epoch, rows = run.epoch, order(run.epoch)
            rows = jnp.asarray(rows) if mesh is None else put(rows, NamedSharding(mesh, P()))
        several = most or _batches_per_program(dataset, run.batch_size, dtype)
        cursor = _place(np.array(run.first, np.int32), mesh)
        for done in range(0, run.number, several):
            found, cursor = gather(run.batch_size, several, split, dtype, stacked)(images, labels, rows, cursor)
            yield ready(found, split), min(several, run.number - done)


def _batches_per_program(dataset: Examples, count: int, dtype: Any) -> int:
    """How many batches of `count` one program gathers: starting it costs as much as a small batch."""
    size = dataset.images[:1].size * (dataset.images.dtype if dtype is None else dtype).itemsize
    return max(1, min(_MOST_BATCHES, _MOST_BYTES // max(1, count * size)))


@functools.lru_cache(maxsize=32)
def gather(
    count: int, several: int, split: Split | None, dtype: Any, stacked: bool
) -> Callable[..., tuple[Any, jax.Array]]:
    """The program `(images, labels, rows, cursor) -> (several batches of count examples, the new cursor)`.

    Each device gathers its share. The cursor stays on the devices, so that a batch needs nothing from the host. Past
    the end of the order comes its last example, again and again. The rows of a padding are any examples. `stacked`: the
    batches are one pytree with one more axis in front, otherwise a list.
    """

    def local(
        images: jax.Array,
        labels: jax.Array,
        rows: jax.Array,
        cursor: jax.Array,
        *,
        share: int = count,
        rank: jax.Array | int = 0,
    ) -> tuple[Any, jax.Array]:
        def batch(at: Any) -> dict[str, jax.Array]:
            mine = rows.at[cursor + rank * share + (at + np.arange(share, dtype=np.int32))].get(mode="clip")
            image, label = (x.at[mine].get(mode="promise_in_bounds") for x in (images, labels))
            image = lax.optimization_barrier(image)  # XLA on a CPU takes three times as long for both in one loop
            return {"image": convert_image(image, dtype), "label": label}

        firsts = np.arange(several, dtype=np.int32) * count
        found = batch(firsts[:, None]) if stacked else [batch(first) for first in firsts]
        return found, cursor + several * count

    if split is None:
        return jax.jit(local)

    def local_share(*args: jax.Array) -> tuple[Any, jax.Array]:
        rank = lax.axis_index(split.axes) if split.axes else 0
        return local(*args, share=split.rows(count) // split.parts, rank=rank)

    mesh, spec = split.mesh, P(None, split.axes) if stacked else P(split.axes)
    shards = jax.shard_map(local_share, mesh=mesh, in_specs=P(), out_specs=(spec, P()))
    return jax.jit(shards, out_shardings=(NamedSharding(mesh, spec), NamedSharding(mesh, P())))
