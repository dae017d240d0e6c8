"""Batches of a data set: which examples each one has, from the devices or streamed from the host."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .._core import checks
from .._core.arrays import Device
from .._core.calls import answers
from .._devices import processes
from .._devices.emulated import wait_before_collectives
from .._devices.mesh import STORE_AXIS
from .._devices.user_mesh import each_in_user_mesh, on_own_mesh
from . import _gather
from ._convert import as_jax_dtype, convert_on_device
from ._device_copies import Examples, copies, has_room, place
from ._shuffle import Order, device_order
from ._split import Split, check_virtual_shards, split_of, with_virtual_shards

Batch = dict[str, jax.Array]
_Slices = Iterable[tuple[int, int, int]]  # as `_slices` gives them

_PREFETCH = 2  # batches on their way to the devices while one is in use


@answers("data.num_batches")
def num_batches(size: int, batch_size: int, *, drop_remainder: bool = True) -> int:
    """The number of batches in one epoch over `size` examples.

    >>> num_batches(60000, 256), num_batches(60000, 256, drop_remainder=False)
    (234, 235)
    """
    size = checks.whole_number(size, "data.num_batches", "size", least=0)
    batch_size = checks.whole_number(batch_size, "data.num_batches", "batch_size")
    return size // batch_size if drop_remainder else -(-size // batch_size)


@answers("data.batches", {"shuffle": "give rng=jax.random.key(0) for an order that is drawn"})
def batches(
    dataset: Examples,
    batch_size: int,
    *,
    rng: jax.Array | None = None,
    epochs: int | None = 1,
    drop_remainder: bool = True,
    devices: Sequence[Device] | None = None,
    sharding: NamedSharding | PartitionSpec | None = None,
    axis_name: str = "data",
    start: int = 0,
    dtype: Any = jnp.float32,
    resident: bool | None = None,
    virtual_shards: int | None = None,
) -> Iterator[Batch]:
    """Iterate over `{"image", "label"}` batches on the devices.

    The data set is copied to each device once, as it is stored, and kept there as long as it exists. Batches are then
    gathered there, up to eight small ones by one compiled program, without a transfer from the host. A data set that
    is too large for that streams from the host, two batches ahead.

    Args:
        dataset: a `Dataset` of n examples.
        batch_size: examples per batch, over all devices together. A multiple of their number.
        rng: a random key. Epoch e is in the order of a permutation drawn from `fold_in(rng, e)`, the same on any
            number of devices. None: the stored order in each epoch.
        epochs: how often to go through the data set. None: forever.
        drop_remainder: leave out a last batch of fewer than `batch_size` examples.
        devices: batches are sharded over these along axis 0, `NamedSharding(Mesh(devices, (axis_name,)),
            P(axis_name))`. None: plain arrays on the default device.
        sharding: of batches, in place of `devices`: a `NamedSharding` over any mesh that splits the first axis or
            none, such as `NamedSharding(mesh, P("data"))`, or its `PartitionSpec` inside of `jax.set_mesh(mesh)`. The
            mesh may have further axes, and be of several processes.
        axis_name: the name of the mesh's axis, with `devices`.
        start: skip this many batches, counted from the first of epoch 0, to resume a run.
        dtype: of the images in a batch. uint8 is divided by 255 on the devices, into [0, 1]. Other dtypes are only
            cast. None leaves images as they are stored.
        resident: whether to copy the data set to the devices. None: where at least twice its size is free.
        virtual_shards: V, for a step of `train.make_train_step(loss_fn, virtual_shards=V)`. It must divide every batch.
            Where the devices cannot share V shards evenly, a batch is a `PaddedBatch`, with rows that no step counts.

    Returns:
        An iterator of dicts: "image" `(batch_size, ...)` of `dtype`, "label" `(batch_size, ...)`. Or of
        `PaddedBatch`es of them, where V is no multiple of the number of devices.

    Raises:
        TypeError: a size that is no int; an `rng` that is no random key; a `sharding` that is none.
        ValueError: a batch that the devices cannot share evenly, a data set without one batch, both `devices` and
            `sharding`, or a sharding that splits further axes.

    >>> import numpy as np
    >>> from jaxpar.data import Dataset
    >>> dataset = Dataset(np.zeros((6, 2, 2, 1), np.uint8), np.arange(6))
    >>> [batch["label"].tolist() for batch in batches(dataset, 4, drop_remainder=False)]
    [[0, 1, 2, 3], [4, 5]]
    """
    where = "data.batches"
    if not (hasattr(dataset, "images") and hasattr(dataset, "labels")):
        hint = "data.Dataset(images, labels), or data.from_arrays(...).batches(...) for arrays of other names"
        raise TypeError(f"{where}: expected a {hint}; got {checks.describe(dataset)}")
    size = len(dataset)
    split = with_virtual_shards(split_of(devices, axis_name, sharding, where), virtual_shards, where)
    _check(size, batch_size, drop_remainder, split.parts if split else 1, virtual_shards)
    checks.whole_number(start, where, "start", least=0)
    if epochs is not None:
        checks.whole_number(epochs, where, "epochs", least=0)
    dtype = None if dtype is None else np.dtype(dtype)
    slices = _slices(size, batch_size, epochs, start, drop_remainder)
    make = _from_devices if _is_resident(resident, dataset, split) else _from_host
    return each_in_user_mesh(make(dataset, slices, _order(rng, size, split), split, dtype))


def _is_resident(asked: bool | None, dataset: Examples, split: Split | None) -> bool:
    """Whether batches are gathered from copies on the devices."""
    if asked is not None:
        return asked
    mesh = split and split.mesh
    room = has_room(dataset, mesh)
    return processes.all_true(room) if mesh is not None and mesh.is_multi_process else room


@on_own_mesh
def _order(rng: jax.Array | None, size: int, split: Split | None) -> Order:
    return device_order(rng, size, split and split.mesh)


def _check(size: int, batch_size: int, drop_remainder: bool, parts: int, virtual_shards: int | None) -> None:
    """`ValueError` unless `parts` devices, or the shards, can share every batch of `size` examples evenly."""
    where = "data.batches"
    checks.whole_number(batch_size, where, "batch_size")
    if virtual_shards is not None:
        for count in (batch_size, 0 if drop_remainder else size % batch_size):
            check_virtual_shards(count, virtual_shards, where)
        parts = 1
    checks.even_share(batch_size, parts, where)
    if size < (batch_size if drop_remainder else 1):
        raise ValueError(
            f"{where}: a data set of {size} examples has no batch of {batch_size}; "
            "use a smaller batch_size, or drop_remainder=False"
        )
    rest = size % batch_size
    if not drop_remainder and rest % parts:
        raise ValueError(
            f"{where}: the last batch would have {rest} examples, which {parts} devices cannot share evenly; "
            "use drop_remainder=True, or a batch_size that leaves a remainder divisible by the devices"
        )


def whole_batches(examples: int, batch_size: int, where: str, virtual_shards: int | None = None) -> int:
    """How many whole batches there are, each shared evenly by the processes, or by the virtual shards.

    Raises:
        ValueError: none, or the processes cannot share a batch.
    """
    checks.whole_number(batch_size, where, "batch_size")
    number = processes.count()
    check_virtual_shards(batch_size, virtual_shards, where)
    if batch_size % number and virtual_shards is None:
        raise ValueError(f"{where}: batch_size must be a multiple of the {number} processes, got {batch_size}")
    if examples < batch_size:
        raise ValueError(f"{where}: {examples} examples make no whole batch of {batch_size}; use a smaller batch_size")
    return num_batches(examples, batch_size)


def epochs_from(start: int, steps: int, epochs: int | None) -> Iterator[tuple[int, int]]:
    """Each epoch from the one of batch `start` on, with how many of its `steps` batches to skip."""
    first, skipped = divmod(start, steps)
    for epoch in itertools.count(first) if epochs is None else range(first, epochs):
        yield epoch, skipped if epoch == first else 0


def _slices(
    size: int, batch_size: int, epochs: int | None, start: int, drop_remainder: bool
) -> Iterator[tuple[int, int, int]]:
    """(epoch, first position in its order, number of examples) of each batch from `start` on."""
    stop = size - size % batch_size if drop_remainder else size
    for epoch, skipped in epochs_from(start, num_batches(size, batch_size, drop_remainder=drop_remainder), epochs):
        for at in range(skipped * batch_size, stop, batch_size):
            yield epoch, at, min(batch_size, stop - at)


def _from_devices(dataset: Examples, slices: _Slices, order: Order, split: Split | None, dtype: Any) -> Iterator[Batch]:
    """Batches gathered from the copies on the devices."""
    mesh = split and split.mesh
    images, labels = copies(dataset, mesh)
    epoch = count = rows = cursor = None
    ready: collections.deque[Batch] = collections.deque()
    for here, at, wanted in slices:
        if (here, wanted) != (epoch, count):  # a new epoch, or its last batch, a smaller one
            rows = rows if here == epoch else order(here)
            epoch, count, cursor = here, wanted, place(np.array(at, np.int32), mesh)
            ready.clear()  # of what was gathered past the end
        if not ready:
            several = _gather.batches_per_program(dataset, wanted, dtype)
            found, cursor = _gather.gather(wanted, several, split, dtype)(images, labels, rows, cursor)
            ready.extend(_ready(found, split))
        yield ready.popleft() if split is None else split.as_batch(ready.popleft())


def _from_host(dataset: Examples, slices: _Slices, order: Order, split: Split | None, dtype: Any) -> Iterator[Batch]:
    """The same batches from host memory. Transfers run while earlier batches are in use."""
    ahead: collections.deque[Batch] = collections.deque()
    epoch, rows = None, np.empty(0, np.int32)
    for here, at, count in slices:
        if here != epoch:
            epoch, rows = here, np.asarray(order(here))
        image, label = (_transfer(x, rows[at : at + count], split) for x in (dataset.images, dataset.labels))
        ahead.append({"image": convert_on_device(image, dtype), "label": label})
        if len(ahead) > _PREFETCH:
            yield _ready_batch(ahead.popleft(), split)
    for batch in ahead:
        yield _ready_batch(batch, split)


def _transfer(array: np.ndarray, rows: np.ndarray, split: Split | None) -> jax.Array:
    """Send `array[rows]` to the devices, to each its own share."""
    if split is None:
        return jnp.asarray(as_jax_dtype(array[rows]))
    rows = np.pad(rows, (0, split.rows(len(rows)) - len(rows)), mode="edge")
    shape = (len(rows), *array.shape[1:])

    def share(index: Any) -> np.ndarray:
        return as_jax_dtype(array[rows[index[0]]])

    return jax.make_array_from_callback(shape, split.sharding, share)


def _ready(batches: Any, split: Split | None) -> Any:
    """The batches, safe to start a program with collectives on."""
    if split is None:
        return batches
    wait_before_collectives(batches, split.devices)
    return split.as_given(batches)


def _ready_batch(arrays: Any, split: Split | None) -> Any:
    return arrays if split is None else split.as_batch(_ready(arrays, split))


def groups(
    dataset: Examples,
    batch_size: int,
    most: int | None,
    *,
    rng: jax.Array,
    start: int,
    devices: Sequence[Device] | None,
    sharding: NamedSharding | None = None,
    virtual_shards: int | None = None,
) -> Iterator[tuple[Any, int]] | None:
    """The batches of `batches(..., epochs=None)`, several at a time.

    Args:
        most: how many at a time. None: as many as one program gathers.

    Returns:
        (batches with one more axis in front, how many of them count). At the end of an epoch fewer count, and the rest
        are copies of the epoch's last example. None where the devices have no room for the data set.
    """
    where = "data.batch_groups"
    split = with_virtual_shards(split_of(devices, STORE_AXIS, sharding, where), virtual_shards, where)
    assert split is not None
    checks.whole_number(start, where, "start", least=0)
    if most is not None:
        checks.whole_number(most, where, "most")
    _check(len(dataset), batch_size, True, split.parts, virtual_shards)
    if not has_room(dataset, split.mesh):
        return None
    found = _groups(dataset, batch_size, most, start, _order(rng, len(dataset), split), split)
    return each_in_user_mesh(found)


def _groups(
    dataset: Examples, batch_size: int, most: int | None, start: int, order: Order, split: Split
) -> Iterator[tuple[Any, int]]:
    mesh = split.mesh
    images, labels = copies(dataset, mesh)
    dtype, steps = np.dtype(jnp.float32), num_batches(len(dataset), batch_size)
    most = _gather.batches_per_program(dataset, batch_size, dtype) if most is None else most
    gather = _gather.gather(batch_size, most, split, dtype, stacked=True)
    for epoch, done in epochs_from(start, steps, None):
        rows, cursor = order(epoch), place(np.array(done * batch_size, np.int32), mesh)
        for at in range(done, steps, most):
            found, cursor = gather(images, labels, rows, cursor)
            yield _ready_batch(found, split), min(most, steps - at)
