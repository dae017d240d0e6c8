"""A data set, which of its examples come when, and batches: streamed from the host, or gathered on the devices."""

from __future__ import annotations

import dataclasses
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
from jax.sharding import NamedSharding, PartitionSpec as P

from .._core import checks
from .._core.arrays import Device, check_plain, is_prng_key
from .._core.calls import answers, answers_class
from .._devices import processes
from .._devices.mesh import STORE_AXIS, put
from .._devices.user_mesh import each_in_user_mesh, on_own_mesh, outside_mesh
from ._sharding import (
    Split,
    ahead,
    as_batch,
    as_jax_dtype,
    check_virtual_shards,
    convert_image,
    convert_images,
    ready,
    send,
    split_of,
)

Order = Callable[[int], Any]  # of an epoch: int32 (examples,), in host memory or on the default device
Batch = dict[str, jax.Array]

HINTS = {"shuffle": "give rng=jax.random.key(0) for a random order"}
_AHEAD = 2  # batches on their way to the devices while one is in use
_COPIES = 2  # placements kept for one data set, say for training on four devices and evaluating on one
_MOST_BATCHES = 8  # of one program,
_MOST_BYTES = 16 << 20  # and their size on all devices together, except for one batch


def order_of(rng: Any, size: int) -> Order:
    """The order of each epoch: `permutation(fold_in(rng, epoch), size)`, or the stored one if there is no key."""
    stored = np.arange(size, dtype=np.int32)
    return (lambda epoch: stored) if rng is None else draws_of(rng, size, None)


@on_own_mesh
def draws_of(rng: Any, size: int, count: int | None) -> Order:
    """In each epoch other draws: an order, or `count` numbers from 0 and below 1 for each example, (size, count)."""
    if not isinstance(rng, jax.Array | np.ndarray):
        raise TypeError(f"rng must be a random key, such as jax.random.key(0); got {type(rng).__name__}")
    checks.random_key(rng, "data.batches")
    # The key goes through host memory, since it may be on other devices than the default one.
    impl = str(jax.random.key_impl(rng)) if is_prng_key(rng) else None
    words = np.asarray(rng if impl is None else jax.random.key_data(rng))
    return lambda epoch: _drawing(size, count, impl)(words, np.uint32(epoch))


@functools.lru_cache(maxsize=32)
def _drawing(size: int, count: int | None, impl: str | None) -> Callable[..., jax.Array]:
    def draw(words: jax.Array, epoch: jax.Array) -> jax.Array:
        rng = jax.random.wrap_key_data(words, impl=impl)
        if count is None:
            return jax.random.permutation(jax.random.fold_in(rng, epoch), size).astype(np.int32)
        rng = jax.random.fold_in(rng, 0xD4A35)  # not the key of an order
        return jax.random.uniform(jax.random.fold_in(rng, epoch), (size, count), np.float32)

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
        order = np.asarray(order_of(checks.random_key(0 if rng is None else rng, where), size)(0))
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


# A data set in memory, and batches of it.


@answers_class("data.Dataset")
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Images and labels in host memory.

    `Dataset(images, labels)` takes your own arrays, of any shape and dtype. Do not change the arrays afterwards, since
    the devices may hold copies.

    Attributes:
        images: `(n, ...)`. `load` gives uint8 `(n, 28, 28, 1)` for Fashion-MNIST.
        labels: `(n, ...)`. Integers become int32.
        source: the origin: "prepared", "files", "debian", "download", or "arrays".
        name: the data set's name.
        part: the part of the data set, such as "train".

    Raises:
        ValueError: the numbers of images and labels differ, or int32 cannot hold a label.

    >>> import numpy as np
    >>> Dataset(np.zeros((6, 28, 28, 1), np.uint8), np.arange(6))
    Dataset(6 images uint8 (28, 28, 1), labels int32, source='arrays')
    """

    images: np.ndarray
    labels: np.ndarray
    source: str = "arrays"
    name: str = ""
    part: str = ""

    def __post_init__(self) -> None:
        check_plain(self.images, "Dataset: images")
        check_plain(self.labels, "Dataset: labels")
        images, labels = np.asarray(self.images), np.asarray(self.labels)
        if images.ndim == 0 or labels.ndim == 0 or len(images) != len(labels):
            raise ValueError(f"a data set needs one label per image: images {images.shape}, labels {labels.shape}")
        if np.issubdtype(labels.dtype, np.integer) and labels.dtype != np.int32:
            limits = np.iinfo(np.int32)
            if labels.size and not limits.min <= labels.min() <= labels.max() <= limits.max:
                raise ValueError(f"labels are stored as int32; these run from {labels.min()} to {labels.max()}")
            labels = labels.astype(np.int32)
        object.__setattr__(self, "images", images)
        object.__setattr__(self, "labels", labels)

    def __len__(self) -> int:
        return len(self.images)

    def batches(
        self, batch_size: int, *, dtype: Any = jnp.float32, resident: bool | None = None, **options: Any
    ) -> Iterator[Batch]:
        """`data.batches(dataset, batch_size, dtype=dtype, resident=resident, **options)`."""
        plan = plan_batches(len(self), batch_size, "data.batches", **options)
        dtype = None if dtype is None else np.dtype(dtype)
        if has_room(self, plan.split) if resident is None else resident:
            groups = from_devices(self, *plan, dtype)
            return each_in_user_mesh(batch for batches, number in groups for batch in batches[:number])
        return from_host({"image": self.images, "label": self.labels}, *plan, dtype)

    def split(
        self, fraction: float | int, rng: jax.Array | int | None = None, *, shuffle: bool = True
    ) -> tuple[Dataset, Dataset]:
        """`data.split(dataset, fraction, rng, shuffle=shuffle)`, as two data sets.

        >>> import numpy as np
        >>> dataset = Dataset(np.zeros((10, 2)), np.arange(10))
        >>> some, rest = dataset.split(0.8)
        >>> len(some), len(rest), sorted([*some.labels.tolist(), *rest.labels.tolist()]) == list(range(10))
        (8, 2, True)
        """
        first, rest = rows_of_parts(len(self), fraction, rng, shuffle, "Dataset.split")
        return self._take(first), self._take(rest)

    def _take(self, rows: np.ndarray) -> Dataset:
        return dataclasses.replace(self, images=self.images[rows], labels=self.labels[rows])

    def __repr__(self) -> str:
        name = f"{self.name} {self.part}: " if self.name else ""
        return (
            f"Dataset({name}{len(self)} images {self.images.dtype} {self.images.shape[1:]}, "
            f"labels {self.labels.dtype}, source={self.source!r})"
        )


@answers("data.num_batches")
def num_batches(size: int, batch_size: int, *, drop_remainder: bool = True) -> int:
    """The number of batches in one epoch over `size` examples.

    >>> num_batches(60000, 256), num_batches(60000, 256, drop_remainder=False)
    (234, 235)
    """
    size = checks.whole_number(size, "data.num_batches", "size", least=0)
    batch_size = checks.whole_number(batch_size, "data.num_batches", "batch_size")
    return size // batch_size if drop_remainder else -(-size // batch_size)


class Plan(NamedTuple):
    """The batches that are asked for, and where they go."""

    all_runs: Iterator[Run]
    order: Order
    split: Split


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
    parts = split.parts if virtual_shards is None else 1
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


def from_host(arrays: Any, all_runs: Iterator[Run], order: Order, split: Split, dtype: Any) -> Iterator[Any]:
    """Batches of a pytree of arrays in host memory. Transfers run while earlier batches are in use."""
    sharding = split.sharding

    def sent() -> Iterator[Any]:
        epoch, rows = None, np.empty(0, np.int32)
        for run in all_runs:
            if run.epoch != epoch:
                epoch, rows = run.epoch, np.asarray(order(run.epoch))
            for at in range(run.first, run.first + run.number * run.batch_size, run.batch_size):
                wanted = rows[at : at + run.batch_size]
                wanted = np.pad(wanted, (0, split.rows(len(wanted)) - len(wanted)), mode="edge")
                batch = jax.tree.map(lambda array, wanted=wanted: send(array, wanted, sharding), arrays)
                yield convert_images(batch, dtype)

    return each_in_user_mesh(as_batch(ready(batch, split), split) for batch in ahead(sent(), _AHEAD))


# Batches that are gathered from copies on the devices.


# Device copies by data set. They go when the data set goes.
_residents: weakref.WeakKeyDictionary[Dataset, dict[Any, tuple[jax.Array, jax.Array]]] = weakref.WeakKeyDictionary()


def _copies(dataset: Dataset, split: Split) -> tuple[jax.Array, jax.Array]:
    """Images and labels, whole on each device. They are sent once in the data set's life."""
    placed = _residents.setdefault(dataset, {})
    key = _placement(split)
    if key not in placed:
        if len(placed) == _COPIES:
            del placed[next(iter(placed))]
        images, labels = (send(as_jax_dtype(x), None, _whole(split)) for x in (dataset.images, dataset.labels))
        placed[key] = images, labels
    return placed[key]


def _placement(split: Split) -> Any:
    return split.mesh or jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]


def _whole(split: Split) -> NamedSharding | None:
    """The sharding of what each device has whole."""
    return None if split.mesh is None else NamedSharding(split.mesh, P())


def has_room(dataset: Dataset, split: Split) -> bool:
    """Whether each device has room for two copies of the data set. A device that does not say has."""
    mesh = split.mesh
    room = _placement(split) in _residents.get(dataset, {})
    if not room:
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
    dataset: Dataset,
    all_runs: Iterable[Run],
    order: Order,
    split: Split,
    dtype: Any,
    *,
    most: int | None = None,
    stacked: bool = False,
) -> Iterator[tuple[Any, int]]:
    """Batches gathered from the copies on the devices, several at a time, and how many of these count.

    At the end of a run fewer count, and the rest are copies of the last example. `most`: how many at a time, where that
    is not left to `_batches_per_program`.
    """
    whole = _whole(split)
    images, labels = _copies(dataset, split)
    epoch = rows = None
    for run in all_runs:
        if run.epoch != epoch:
            epoch, rows = run.epoch, put(order(run.epoch), whole)
        several = most or _batches_per_program(dataset, run.batch_size, dtype)
        cursor = send(np.array(run.first, np.int32), None, whole)
        for done in range(0, run.number, several):
            found, cursor = gather(run.batch_size, several, split, dtype, stacked)(images, labels, rows, cursor)
            found = ready(found, split)
            batches = as_batch(found, split) if stacked else [as_batch(batch, split) for batch in found]
            yield batches, min(several, run.number - done)


def _batches_per_program(dataset: Dataset, count: int, dtype: Any) -> int:
    """How many batches of `count` one program gathers: starting it costs as much as a small batch."""
    size = dataset.images[:1].size * (dataset.images.dtype if dtype is None else dtype).itemsize
    return max(1, min(_MOST_BATCHES, _MOST_BYTES // max(1, count * size)))


@functools.lru_cache(maxsize=32)
def gather(count: int, several: int, split: Split, dtype: Any, stacked: bool) -> Callable[..., tuple[Any, jax.Array]]:
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

    if split.mesh is None:
        return jax.jit(local)

    def local_share(*args: jax.Array) -> tuple[Any, jax.Array]:
        rank = lax.axis_index(split.axes) if split.axes else 0
        return local(*args, share=split.rows(count) // split.parts, rank=rank)

    mesh, spec = split.mesh, P(None, split.axes) if stacked else P(split.axes)
    shards = jax.shard_map(local_share, mesh=mesh, in_specs=P(), out_specs=(spec, P()))
    return jax.jit(shards, out_shardings=(NamedSharding(mesh, spec), NamedSharding(mesh, P())))
