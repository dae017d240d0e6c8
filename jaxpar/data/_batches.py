"""Batches of a data set: which examples each one has, from the devices or streamed from the host."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from .._core import checks
from .._core.arrays import Device
from .._devices.emulated import wait_before_collectives
from .._devices.mesh import mesh_of
from .._devices.processes import all_true
from . import _gather
from ._convert import as_jax_dtype, convert_on_device
from ._device_copies import Examples, copies, has_room, place
from ._shuffle import Order, device_order

Batch = dict[str, jax.Array]
_Slices = Iterable[tuple[int, int, int]]  # as `_slices` gives them

_PREFETCH = 2  # batches on their way to the devices while one is in use


def num_batches(size: int, batch_size: int, *, drop_remainder: bool = True) -> int:
    """The number of batches in one epoch over `size` examples.

    >>> num_batches(60000, 256), num_batches(60000, 256, drop_remainder=False)
    (234, 235)
    """
    return size // batch_size if drop_remainder else -(-size // batch_size)


def batches(
    dataset: Examples,
    batch_size: int,
    *,
    rng: jax.Array | None = None,
    epochs: int | None = 1,
    drop_remainder: bool = True,
    devices: Sequence[Device] | None = None,
    axis_name: str = "data",
    start: int = 0,
    dtype: Any = jnp.float32,
    resident: bool | None = None,
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
        axis_name: the name of the mesh's axis.
        start: skip this many batches, counted from the first of epoch 0, to resume a run.
        dtype: of the images in a batch. uint8 is divided by 255 on the devices, into [0, 1]. Other dtypes are only
            cast. None leaves images as they are stored.
        resident: whether to copy the data set to the devices. None: where at least twice its size is free.

    Returns:
        An iterator of dicts: "image" `(batch_size, ...)` of `dtype`, "label" `(batch_size, ...)`.

    Raises:
        TypeError: a size that is no int, or an `rng` that is no random key.
        ValueError: a batch that the devices cannot share evenly, or a data set without one batch.

    >>> import numpy as np
    >>> from jaxpar.data import Dataset
    >>> dataset = Dataset(np.zeros((6, 2, 2, 1), np.uint8), np.arange(6))
    >>> [batch["label"].tolist() for batch in batches(dataset, 4, drop_remainder=False)]
    [[0, 1, 2, 3], [4, 5]]
    """
    size, where = len(dataset), "data.batches"
    devices = None if devices is None else checks.devices(devices, where)
    _check(size, batch_size, drop_remainder, len(devices or (None,)))
    checks.whole_number(start, where, "start", least=0)
    if epochs is not None:
        checks.whole_number(epochs, where, "epochs", least=0)
    mesh = None if devices is None else Mesh(np.array(devices), (axis_name,))
    dtype = None if dtype is None else np.dtype(dtype)
    order = device_order(rng, size, mesh)
    slices = _slices(size, batch_size, epochs, start, drop_remainder)
    if resident is None:
        resident = has_room(dataset, mesh)
        if mesh is not None and mesh.is_multi_process:
            resident = all_true(resident)
    return (_from_devices if resident else _from_host)(dataset, slices, order, mesh, dtype)


def _check(size: int, batch_size: int, drop_remainder: bool, parts: int) -> None:
    """`ValueError` unless `parts` devices can share every batch of `size` examples evenly."""
    where = "data.batches"
    checks.whole_number(batch_size, where, "batch_size")
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


def whole_batches(examples: int, batch_size: int, where: str) -> int:
    """How many whole batches there are, each shared evenly by the processes.

    Raises:
        ValueError: none, or the processes cannot share a batch.
    """
    checks.whole_number(batch_size, where, "batch_size")
    processes = jax.process_count()
    if batch_size % processes:
        raise ValueError(f"{where}: batch_size must be a multiple of the {processes} processes, got {batch_size}")
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


def _from_devices(dataset: Examples, slices: _Slices, order: Order, mesh: Mesh | None, dtype: Any) -> Iterator[Batch]:
    """Batches gathered from the copies on the devices."""
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
            found, cursor = _gather.gather(wanted, several, mesh, dtype)(images, labels, rows, cursor)
            ready.extend(_ready(found, mesh))
        yield ready.popleft()


def _from_host(dataset: Examples, slices: _Slices, order: Order, mesh: Mesh | None, dtype: Any) -> Iterator[Batch]:
    """The same batches from host memory. Transfers run while earlier batches are in use."""
    ahead: collections.deque[Batch] = collections.deque()
    epoch, rows = None, np.empty(0, np.int32)
    for here, at, count in slices:
        if here != epoch:
            epoch, rows = here, np.asarray(order(here))
        image, label = (_transfer(x, rows[at : at + count], mesh) for x in (dataset.images, dataset.labels))
        ahead.append({"image": convert_on_device(image, dtype), "label": label})
        if len(ahead) > _PREFETCH:
            yield _ready(ahead.popleft(), mesh)
    for batch in ahead:
        yield _ready(batch, mesh)


def _transfer(array: np.ndarray, rows: np.ndarray, mesh: Mesh | None) -> jax.Array:
    """Send `array[rows]` to the devices, to each its own share."""
    if mesh is None:
        return jnp.asarray(as_jax_dtype(array[rows]))
    sharding = NamedSharding(mesh, P(mesh.axis_names[0]))
    shape = (len(rows), *array.shape[1:])

    def share(index: Any) -> np.ndarray:
        return as_jax_dtype(array[rows[index[0]]])

    return jax.make_array_from_callback(shape, sharding, share)


def _ready(batches: Any, mesh: Mesh | None) -> Any:
    """The batches, safe to start a program with collectives on."""
    if mesh is not None:
        wait_before_collectives(batches, tuple(np.ravel(mesh.devices)))
    return batches


def groups(
    dataset: Examples, batch_size: int, most: int | None, *, rng: jax.Array, start: int, devices: Sequence[Device]
) -> Iterator[tuple[Batch, int]] | None:
    """The batches of `batches(..., epochs=None)`, several at a time.

    Args:
        most: how many at a time. None: as many as one program gathers.

    Returns:
        (batches with one more axis in front, how many of them count). At the end of an epoch fewer count, and the rest
        are copies of the epoch's last example. None where the devices have no room for the data set.
    """
    _check(len(dataset), batch_size, True, len(devices))
    mesh = mesh_of(devices)
    if not has_room(dataset, mesh):
        return None
    return _groups(dataset, batch_size, most, start, device_order(rng, len(dataset), mesh), mesh)


def _groups(
    dataset: Examples, batch_size: int, most: int | None, start: int, order: Order, mesh: Mesh
) -> Iterator[tuple[Batch, int]]:
    images, labels = copies(dataset, mesh)
    dtype, steps = np.dtype(jnp.float32), num_batches(len(dataset), batch_size)
    most = _gather.batches_per_program(dataset, batch_size, dtype) if most is None else most
    gather = _gather.gather(batch_size, most, mesh, dtype, stacked=True)
    for epoch, done in epochs_from(start, steps, None):
        rows, cursor = order(epoch), place(np.array(done * batch_size, np.int32), mesh)
        for at in range(done, steps, most):
            found, cursor = gather(images, labels, rows, cursor)
            yield _ready(found, mesh), min(most, steps - at)
