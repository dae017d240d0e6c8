"""Batches of a data set: their order, drawn from an rng alone, and the gather on the devices."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from .._devices.emulated import wait_before_collectives
from .._devices.processes import all_true
from . import _shuffle
from ._device_copies import canonical, copies, fits, place

if TYPE_CHECKING:
    from ._dataset import Dataset

Batch = dict[str, jax.Array]
_Slices = Iterable[tuple[int, int, int]]  # as `_slices` gives them
_Order = Callable[[int], jax.Array]  # as `_order.on_devices` gives it

_PREFETCH = 2  # batches on their way to the devices while one is in use
_TOGETHER = 8  # batches that one program gathers at most,
_TOGETHER_BYTES = 16 << 20  # and their size on all devices together, but for one batch


def num_batches(size: int, batch_size: int, *, drop_remainder: bool = True) -> int:
    """The number of batches in one epoch over `size` examples.

    >>> num_batches(60000, 256), num_batches(60000, 256, drop_remainder=False)
    (234, 235)
    """
    return size // batch_size if drop_remainder else -(-size // batch_size)


def batches(
    dataset: Dataset,
    batch_size: int,
    *,
    rng: jax.Array | None = None,
    epochs: int | None = 1,
    drop_remainder: bool = True,
    devices: Sequence[Any] | None = None,
    axis_name: str = "data",
    start: int = 0,
    dtype: Any = jnp.float32,
    resident: bool | None = None,
) -> Iterator[Batch]:
    """Iterates over `{"image", "label"}` batches that lie on the devices.

    The data set is copied to each device once, as it is stored, and kept there as long as the data set lives;
    batches are then gathered there, up to eight small ones by one compiled program, without a transfer from the
    host. A data set too large for that streams from the host, two batches ahead.

    Args:
      dataset: a `Dataset` of n examples.
      batch_size: examples a batch, over all devices together; a multiple of their number.
      rng: a random key. Epoch e is in the order of a permutation drawn from `fold_in(rng, e)`, the same on
        any number of devices. None: the stored order in each epoch.
      epochs: how often to go through the data set; None for no end.
      drop_remainder: leave out a last batch of fewer than `batch_size` examples.
      devices: batches are sharded over these along axis 0, `NamedSharding(Mesh(devices, (axis_name,)),
        P(axis_name))`. None: plain arrays on the default device.
      axis_name: the name of the mesh's axis.
      start: skip this many batches, counted from the first of epoch 0, to resume a run.
      dtype: of the images in a batch. uint8 is divided by 255 on the way, into [0, 1]; other dtypes are only
        cast. None leaves images as they are stored.
      resident: whether the data set lives on the devices; None: where at least twice its size is free.

    Returns:
      An iterator of dicts: "image" `(batch_size, ...)` of `dtype`, "label" `(batch_size, ...)`.

    Raises:
      ValueError: a batch that the devices cannot share evenly, or that no batch can be made of the data set.

    >>> import numpy as np
    >>> from jaxpar.data import Dataset
    >>> dataset = Dataset(np.zeros((6, 2, 2, 1), np.uint8), np.arange(6))
    >>> [batch["label"].tolist() for batch in batches(dataset, 4, drop_remainder=False)]
    [[0, 1, 2, 3], [4, 5]]
    """
    size = len(dataset)
    _check(size, batch_size, drop_remainder, 1 if devices is None else len(devices))
    if start < 0 or (epochs is not None and epochs < 0):
        raise ValueError(f"start and epochs cannot be negative; got start={start}, epochs={epochs}")
    mesh = None if devices is None else Mesh(np.array(devices), (axis_name,))
    dtype = None if dtype is None else np.dtype(dtype)
    order = _shuffle.device_order(rng, size, mesh)
    slices = _slices(size, batch_size, epochs, start, drop_remainder)
    if resident is None:
        resident = fits(dataset, mesh)
        if mesh is not None and mesh.is_multi_process:
            resident = all_true(resident)
    return (_resident if resident else _streamed)(dataset, slices, order, mesh, dtype)


def _check(size: int, batch_size: int, drop_remainder: bool, devices: int) -> None:
    if batch_size < 1 or devices < 1:
        raise ValueError(f"batch_size and the number of devices must be positive; got {batch_size}, {devices}")
    if batch_size % devices:
        down, up = batch_size // devices * devices, -(-batch_size // devices) * devices
        choice = f"{down} or {up}" if down else f"{up}"
        raise ValueError(
            f"batch_size {batch_size} cannot be shared evenly by {devices} devices; use {choice}, for example"
        )
    if size < (batch_size if drop_remainder else 1):
        raise ValueError(
            f"a data set of {size} examples has no batch of {batch_size}; "
            "use a smaller batch_size, or drop_remainder=False"
        )
    rest = size % batch_size
    if not drop_remainder and rest % devices:
        raise ValueError(
            f"the last batch would have {rest} examples, which {devices} devices cannot share evenly; "
            "use drop_remainder=True, or a batch_size that leaves a remainder divisible by the devices"
        )


def _slices(
    size: int, batch_size: int, epochs: int | None, start: int, drop_remainder: bool
) -> Iterator[tuple[int, int, int]]:
    """Yields (epoch, first position in its order, number of examples) of each batch from `start` on."""
    first, skipped = divmod(start, num_batches(size, batch_size, drop_remainder=drop_remainder))
    stop = size - size % batch_size if drop_remainder else size
    for epoch in itertools.count(first) if epochs is None else range(first, epochs):
        for at in range(skipped * batch_size if epoch == first else 0, stop, batch_size):
            yield epoch, at, min(batch_size, stop - at)


def _resident(dataset: Dataset, slices: _Slices, order: _Order, mesh: Mesh | None, dtype: Any) -> Iterator[Batch]:
    images, labels = copies(dataset, mesh)
    epoch = count = rows = cursor = None
    ready: collections.deque[Batch] = collections.deque()
    for here, at, wanted in slices:
        if (here, wanted) != (epoch, count):  # a new epoch, or its last batch, a smaller one
            rows = rows if here == epoch else order(here)
            epoch, count, cursor = here, wanted, place(np.array(at, np.int32), mesh)
            ready.clear()  # of what was gathered past the end
        if not ready:
            several = _several(dataset, wanted, dtype)
            found, cursor = _gather(wanted, several, mesh, dtype)(images, labels, rows, cursor)
            ready.extend(_settled(found, mesh))
        yield ready.popleft()


def groups(
    dataset: Dataset, batch_size: int, most: int | None, *, rng: jax.Array, start: int, devices: Sequence[Any]
) -> Iterator[tuple[Batch, int]] | None:
    """The batches of `batches(..., epochs=None)`, several at a time; None where the data set is not on the devices.

    Args:
      most: how many; None: as many as one program gathers.

    Returns:
      (batches with one more axis in front, how many of them there are). At the end of an epoch they are fewer; what
      lies behind them is the epoch's last example, again and again.
    """
    size, mesh = len(dataset), Mesh(np.array(devices), ("data",))
    _check(size, batch_size, True, len(devices))
    if not fits(dataset, mesh):
        return None
    return _groups(dataset, batch_size, most, start, _shuffle.device_order(rng, size, mesh), mesh)


def _groups(
    dataset: Dataset, batch_size: int, most: int | None, start: int, order: _Order, mesh: Mesh
) -> Iterator[tuple[Batch, int]]:
    images, labels = copies(dataset, mesh)
    dtype, steps = np.dtype(jnp.float32), num_batches(len(dataset), batch_size)
    most = _several(dataset, batch_size, dtype) if most is None else most
    gather = _gather(batch_size, most, mesh, dtype, stacked=True)
    first, skipped = divmod(start, steps)
    for epoch in itertools.count(first):
        done = skipped if epoch == first else 0
        rows, cursor = order(epoch), place(np.array(done * batch_size, np.int32), mesh)
        for at in range(done, steps, most):
            found, cursor = gather(images, labels, rows, cursor)
            yield _settled(found, mesh), min(most, steps - at)


def _several(dataset: Dataset, count: int, dtype: Any) -> int:
    """How many batches one program gathers: starting a program costs as much as gathering a small batch."""
    size = dataset.images[:1].size * (dataset.images.dtype if dtype is None else dtype).itemsize
    return max(1, min(_TOGETHER, _TOGETHER_BYTES // max(1, count * size)))


@functools.lru_cache(maxsize=32)
def _gather(
    count: int, several: int, mesh: Mesh | None, dtype: Any, stacked: bool = False
) -> Callable[..., tuple[Any, jax.Array]]:
    """The program for the next `several` batches of `count`, each device gathering its share, and the new cursor.

    The cursor stays on the devices, so that a batch needs nothing from the host. What lies past the end of the order
    is its last example, again and again. The batches are a list, or `stacked`.
    """

    def gather(
        images: jax.Array,
        labels: jax.Array,
        rows: jax.Array,
        cursor: jax.Array,
        *,
        share: int = count,
        rank: jax.Array | int = 0,
    ) -> tuple[Any, jax.Array]:
        def batch(at: Any) -> Batch:
            mine = rows.at[cursor + rank * share + (at + np.arange(share, dtype=np.int32))].get(mode="clip")
            image, label = (x.at[mine].get(mode="promise_in_bounds") for x in (images, labels))
            image = lax.optimization_barrier(image)  # XLA on a CPU takes three times as long for both in one loop
            return {"image": _convert(image, dtype), "label": label}

        firsts = np.arange(several, dtype=np.int32) * count
        found = batch(firsts[:, None]) if stacked else [batch(first) for first in firsts]
        return found, cursor + several * count

    if mesh is None:
        return jax.jit(gather)
    (axis,) = mesh.axis_names

    def local(*args: jax.Array) -> tuple[Any, jax.Array]:
        return gather(*args, share=count // mesh.size, rank=lax.axis_index(axis))

    split = P(None, axis) if stacked else P(axis)
    shards = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=(split, P()))
    return jax.jit(shards, out_shardings=(NamedSharding(mesh, split), NamedSharding(mesh, P())))


def _convert(image: jax.Array, dtype: Any) -> jax.Array:
    """The image in the batch's dtype; uint8 becomes a fraction of 255 in floating point."""
    if dtype is None or image.dtype == dtype:
        return image
    scaled = image.dtype == jnp.uint8 and jnp.issubdtype(dtype, jnp.floating)
    return (image.astype(jnp.float32) / 255).astype(dtype) if scaled else image.astype(dtype)


_convert_streamed = jax.jit(_convert, static_argnums=1)


def _streamed(dataset: Dataset, slices: _Slices, order: _Order, mesh: Mesh | None, dtype: Any) -> Iterator[Batch]:
    """As `_resident`, from host memory; transfers run while earlier batches are in use."""
    ahead: collections.deque[Batch] = collections.deque()
    epoch, rows = None, np.empty(0, np.int32)
    for here, at, count in slices:
        if here != epoch:
            epoch, rows = here, np.asarray(order(here))
        image, label = (_transfer(x, rows[at : at + count], mesh) for x in (dataset.images, dataset.labels))
        ahead.append({"image": _convert_streamed(image, dtype), "label": label})
        if len(ahead) > _PREFETCH:
            yield _settled(ahead.popleft(), mesh)
    for batch in ahead:
        yield _settled(batch, mesh)


def _settled(batches: Any, mesh: Mesh | None) -> Any:
    """The batches, safe to start a program with collectives on."""
    if mesh is not None:
        wait_before_collectives(batches, tuple(np.ravel(mesh.devices)))
    return batches


def _transfer(array: np.ndarray, rows: np.ndarray, mesh: Mesh | None) -> jax.Array:
    """Sends `array[rows]` to the devices, to each its own share."""
    if mesh is None:
        return jnp.asarray(canonical(array[rows]))
    sharding = NamedSharding(mesh, P(mesh.axis_names[0]))
    shape = (len(rows), *array.shape[1:])

    def share(index: Any) -> np.ndarray:
        return canonical(array[rows[index[0]]])

    return jax.make_array_from_callback(shape, sharding, share)
