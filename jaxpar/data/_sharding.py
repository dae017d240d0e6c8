"""Splits a batch over devices along its first axis, and sends it, ahead of its use too."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, Sharding

from .._core import checks
from .._core.arrays import Device
from .._core.calls import answers
from .._devices import processes
from .._devices.emulated import wait_before_collectives
from .._devices.mesh import put, spans_processes, split_over
from .._devices.user_mesh import has_types, in_user_mesh, outside_mesh, with_sharding
from .._devices.virtual_shards import PaddedBatch, padded_rows

_PREFETCH = "data.prefetch"


@dataclasses.dataclass(frozen=True)
class Split:
    """The devices of a batch, and which of them share it. Without a mesh: the default device."""

    mesh: Mesh | None = None  # a mesh without types, on which batches are made
    # The axes of the mesh that split the first axis of a batch. Empty: each device has the whole batch.
    axes: tuple[str, ...] = ()
    given: NamedSharding | None = None  # the sharding that the user asked for, if it is another than that of this mesh
    # V, where a batch is for a step with virtual shards and the parts cannot share these evenly.
    virtual_shards: int | None = None

    @property
    def parts(self) -> int:
        return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def devices(self) -> tuple[Device, ...]:
        return () if self.mesh is None else tuple(np.ravel(self.mesh.devices))

    @property
    def sharding(self) -> NamedSharding | None:
        axes = self.axes[0] if len(self.axes) == 1 else self.axes or None
        return None if self.mesh is None else NamedSharding(self.mesh, P(axes))

    def rows(self, count: int) -> int:
        """How many rows the arrays of a batch of `count` examples have."""
        return count if self.virtual_shards is None else padded_rows(count, self.virtual_shards, self.parts)


def split_of(
    devices: Sequence[Device] | None, axis_name: str, sharding: Any, virtual_shards: int | None, where: str
) -> Split:
    """The split for the options of `data.batches`."""
    if sharding is None:
        chosen = None if devices is None else checks.devices(devices, where)
        checks.text(axis_name, where, "axis_name")
        split = Split() if chosen is None else Split(Mesh(np.array(chosen), (axis_name,)), (axis_name,))
    elif devices is not None:
        raise ValueError(f"{where}: give devices or a sharding, not both; a sharding has the devices of its mesh")
    else:
        split = _split_of_sharding(check_sharding(sharding, where), where)
    if virtual_shards is None:
        return split
    virtual_shards = checks.whole_number(virtual_shards, where, "virtual_shards")
    if virtual_shards % split.parts == 0:  # whole shards fit each part, so nothing is padded
        return split
    return dataclasses.replace(split, virtual_shards=virtual_shards)


def _split_of_sharding(sharding: NamedSharding, where: str) -> Split:
    spec, mesh = sharding.spec, sharding.mesh
    if any(spec[1:]):
        raise ValueError(
            f"{where}: the sharding of a batch splits its first axis only, got {spec}; images and labels have no "
            "other axis in common, so reshard a batch by jax.device_put, or give data.prefetch one for each array"
        )
    first = spec[0] if len(spec) else None
    axes = first if isinstance(first, tuple) else (first,) if first else ()
    assert isinstance(mesh, Mesh)
    split = Split(Mesh(mesh.devices, mesh.axis_names) if has_types(mesh) else mesh, axes)
    return split if split.sharding == sharding else dataclasses.replace(split, given=sharding)


def check_sharding(sharding: Any, where: str) -> NamedSharding:
    """`sharding`, or that of a `PartitionSpec` over the mesh that the user has set. `TypeError` for anything else."""
    if isinstance(sharding, P) and not jax.sharding.get_mesh().empty:
        sharding = NamedSharding(jax.sharding.get_mesh(), sharding)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return sharding
    hint = "; a PartitionSpec needs a mesh, set by jax.set_mesh" if isinstance(sharding, P) else ""
    raise TypeError(
        f"{where}: sharding must be a NamedSharding, such as jax.sharding.NamedSharding(mesh, "
        f"jax.sharding.PartitionSpec('data')); got {checks.describe(sharding)}{hint}"
    )


def check_virtual_shards(examples: int, virtual_shards: int | None, where: str) -> None:
    """`ValueError` where a batch of so many examples cannot be cut in the shards."""
    if virtual_shards is not None and examples % virtual_shards:
        raise ValueError(
            f"{where}: {examples} examples cannot be cut in {virtual_shards} virtual shards evenly; "
            f"use a multiple of {virtual_shards}"
        )


# Arrays in host memory, and batches of them on the devices.


def path_name(path: Any) -> str:
    return repr(jax.tree_util.keystr(path, simple=True, separator="/")) if path else "an element"


def as_jax_dtype(array: np.ndarray) -> np.ndarray:
    """The array in the dtype that JAX keeps it in. 64 bits become 32 unless x64 is enabled."""
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


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

    def struct(path: Any, array: Any) -> jax.ShapeDtypeStruct:
        is_image = isinstance(arrays, dict) and path[0].key == "image"
        kept = dtype if is_image and dtype is not None else jax.dtypes.canonicalize_dtype(array.dtype)
        return jax.ShapeDtypeStruct((batch_size, *array.shape[1:]), np.dtype(kept))

    return jax.tree_util.tree_map_with_path(struct, arrays)


def share_sharding(rows: int, split: Split, where: str) -> NamedSharding | None:
    """The sharding of a batch whose rows are shared equally by the processes. None: the default device."""
    # Where a sharding gives one row to several processes, the batch is split over all devices, and a step sends the
    # rows on.
    if split.sharding is None:
        return None
    here = split.sharding.addressable_devices_indices_map((rows,)).values() if rows % split.parts == 0 else ()
    own = {index[0].indices(rows)[:2] for index in here if index}
    if rows % split.parts or sum(last - first for first, last in own) * processes.count() == rows:
        checks.even_share(rows, split.parts, where)
        return split.sharding
    checks.even_share(rows, len(split.devices), where)
    return split_over(split.devices)


def send(array: Any, rows: np.ndarray | None, sharding: NamedSharding | None) -> jax.Array:
    """The array, or these rows of it, on the devices. Each process has it whole, and reads what its devices get."""

    def part(index: Any) -> np.ndarray:
        return as_jax_dtype(array[index if rows is None else rows[index[0]]])

    if sharding is None:
        return jnp.asarray(part((...,)))
    shape = array.shape if rows is None else (len(rows), *array.shape[1:])
    return jax.make_array_from_callback(shape, sharding, part)


@in_user_mesh
def placed_batch(batch: Any, sharding: NamedSharding | None, dtype: Any, *, whole: bool) -> Any:
    """The batch on the devices, split along its first axis, with "image" in `dtype`.

    `whole`: each process has the whole batch and takes its rows. Otherwise each has its own share.
    """

    def placed(array: Any) -> jax.Array:
        if sharding is None:
            return jnp.asarray(array)
        if isinstance(array, jax.Array) and processes.count() == 1:
            return jax.device_put(array, sharding)
        array = as_jax_dtype(np.asarray(array))
        return send(array, None, sharding) if whole else jax.make_array_from_process_local_data(sharding, array)

    batch = convert_images(jax.tree.map(placed, batch), dtype)
    if sharding is not None:
        wait_before_collectives(batch, tuple(sharding.device_set))
    return batch


def ready(arrays: Any, split: Split) -> Any:
    """The arrays of a batch as the user asked for them, safe to start a program with collectives on. None is copied."""
    wait_before_collectives(arrays, split.devices)
    given = split.given
    return arrays if given is None else jax.tree.map(lambda array: with_sharding(array, given), arrays)


def as_batch(arrays: Any, split: Split) -> Any:
    """The arrays of a batch, marked if they are padded."""
    return arrays if split.virtual_shards is None else PaddedBatch(arrays, split.virtual_shards)


# Batches that are sent ahead of their use.


def ahead(batches: Iterable[Any], size: int) -> Iterator[Any]:
    """The batches, of which `size` are made ahead of the one in use."""
    waiting: collections.deque[Any] = collections.deque()
    for batch in batches:
        waiting.append(batch)
        if len(waiting) > size:
            yield waiting.popleft()
    yield from waiting


@answers("data.prefetch")
def prefetch(iterator: Iterable[Any], sharding: Any = None, size: int = 2) -> Iterator[Any]:
    """Send batches to the devices ahead of their use.

    Transfers run while earlier batches are in use, without a thread. The first batch is read at the first `next`. At
    most `size` batches are read ahead of the batch in use.

    Args:
        iterator: an iterable of pytrees of NumPy or JAX arrays, such as batches of a loader. With several processes,
            each process gives the rows of its own devices.
        sharding: the sharding of each array: a `NamedSharding` over any mesh, or a `PartitionSpec` inside
            `jax.set_mesh(mesh)`; or a pytree of these, a prefix of the batches. None: the default device.
        size: the number of batches that are sent ahead. 0: a batch is sent at its `next`.

    Returns:
        An iterator of the same pytrees on the devices. An exception of `iterator` is raised after the batches before
        it.

    Raises:
        TypeError: `iterator` is not iterable, `size` is not an int, or `sharding` is not a sharding.
        ValueError: `size` is below 0. At reading: the sharding cannot divide an array.

    >>> import jax, numpy as np
    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> sharding = NamedSharding(jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]), PartitionSpec("data"))
    >>> loader = ({"x": np.full((4, 3), i)} for i in range(3))
    >>> [batch["x"].sharding == sharding for batch in prefetch(loader, sharding)]
    [True, True, True]
    """
    elements = iter(iterator)
    size = checks.whole_number(size, _PREFETCH, "size", least=0)
    if sharding is not None:
        kinds = Sharding, P
        sharding = jax.tree.map(
            lambda one: check_sharding(one, _PREFETCH), sharding, is_leaf=lambda x: isinstance(x, kinds)
        )
    return _prefetch(elements, sharding, size)


def _prefetch(elements: Iterator[Any], sharding: Any, size: int) -> Iterator[Any]:
    errors: list[Exception] = []

    def sent() -> Iterator[Any]:
        try:
            for element in elements:
                yield _to_devices(element, sharding)
        except Exception as error:  # it comes after the batches before it
            errors.append(error)

    for batch in ahead(sent(), size):
        leaves = jax.tree.leaves(batch)
        wait_before_collectives(batch, tuple(leaves[0].sharding.device_set) if leaves else ())
        yield batch
    if errors:
        raise errors[0]


def _to_devices(batch: Any, sharding: Any) -> Any:
    """The batch on the devices. The transfer is only started."""
    batch = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else as_jax_dtype(np.asarray(x)), batch)
    checks.arrays_of_numbers(batch, f"{_PREFETCH}: batch")
    with outside_mesh():
        if sharding is None:
            return jax.device_put(batch)
        try:
            shardings = jax.tree.broadcast(sharding, batch)
        except ValueError as error:
            raise ValueError(f"{_PREFETCH}: sharding must have one for each array of a batch: {error}") from error
        return jax.tree_util.tree_map_with_path(_put, batch, shardings)


def _put(path: Any, leaf: Any, sharding: Any) -> jax.Array:
    try:
        if processes.count() == 1 or spans_processes(leaf):
            return put(leaf, sharding)
        return jax.make_array_from_process_local_data(sharding, np.asarray(leaf))
    except ValueError as error:
        spec, mesh = sharding.spec, dict(sharding.mesh.shape)
        own = ", of which each process gives the part of its own devices" if processes.count() > 1 else ""
        raise ValueError(
            f"{_PREFETCH}: {path_name(path)} {checks.describe(leaf)} cannot be laid out as {spec} over a mesh of {mesh}"
            f"{own}; use batches that its axes divide, or give a pytree of shardings, one for each array"
        ) from error
