"""Splits a batch over devices along its first axis, and sends it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from .._core import checks
from .._core.arrays import Device
from .._devices import processes
from .._devices.emulated import wait_before_collectives
from .._devices.mesh import split_over
from .._devices.user_mesh import has_types, in_user_mesh, with_sharding
from .._devices.virtual_shards import PaddedBatch, padded_rows


@dataclasses.dataclass(frozen=True)
class Split:
    """The devices of a batch, and which of them share it."""

    mesh: Mesh  # a mesh without types, on which batches are made
    # The axes of the mesh that split the first axis of a batch. Empty: each device has the whole batch.
    axes: tuple[str, ...]
    given: NamedSharding | None = None  # the sharding that the user asked for, if it is another than that of this mesh
    # V, where a batch is for a step with virtual shards and the parts cannot share these evenly.
    virtual_shards: int | None = None

    @property
    def parts(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(np.ravel(self.mesh.devices))

    @property
    def sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, P(self.axes[0] if len(self.axes) == 1 else self.axes or None))

    def rows(self, count: int) -> int:
        """How many rows the arrays of a batch of `count` examples have."""
        return count if self.virtual_shards is None else padded_rows(count, self.virtual_shards, self.parts)


def split_of(
    devices: Sequence[Device] | None, axis_name: str, sharding: Any, virtual_shards: int | None, where: str
) -> Split | None:
    """The split for the options of `data.batches`. None: the default device."""
    if sharding is None:
        chosen = None if devices is None else checks.devices(devices, where)
        checks.text(axis_name, where, "axis_name")
        split = None if chosen is None else Split(Mesh(np.array(chosen), (axis_name,)), (axis_name,))
    elif devices is not None:
        raise ValueError(f"{where}: give devices or a sharding, not both; a sharding has the devices of its mesh")
    else:
        split = _split_of_sharding(check_sharding(sharding, where), where)
    if virtual_shards is None:
        return split
    virtual_shards = checks.whole_number(virtual_shards, where, "virtual_shards")
    if split is None or virtual_shards % split.parts == 0:  # whole shards fit each part, so nothing is padded
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


def share_sharding(rows: int, split: Split | None, where: str) -> NamedSharding | None:
    """The sharding of a batch whose rows are shared equally by the processes. None: the default device."""
    # Where a sharding gives one row to several processes, the batch is split over all devices, and a step sends the
    # rows on.
    if split is None:
        return None
    here = split.sharding.addressable_devices_indices_map((rows,)).values() if rows % split.parts == 0 else ()
    own = {index[0].indices(rows)[:2] for index in here if index}
    if rows % split.parts or sum(last - first for first, last in own) * processes.count() == rows:
        checks.even_share(rows, split.parts, where)
        return split.sharding
    checks.even_share(rows, len(split.devices), where)
    return split_over(split.devices)


@in_user_mesh
def placed_batch(batch: Any, sharding: NamedSharding | None, dtype: Any, *, whole: bool) -> Any:
    """The batch on the devices, split along its first axis, with "image" in `dtype`.

    `whole`: each process has the whole batch and takes its rows. Otherwise each has its own share.
    """

    def put(array: Any) -> jax.Array:
        if sharding is None:
            return jnp.asarray(array)
        if isinstance(array, jax.Array) and processes.count() == 1:
            return jax.device_put(array, sharding)
        array = as_jax_dtype(np.asarray(array))
        if whole:
            return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
        return jax.make_array_from_process_local_data(sharding, array)

    batch = convert_images(jax.tree.map(put, batch), dtype)
    if sharding is not None:
        wait_before_collectives(batch, tuple(sharding.device_set))
    return batch


def ready(arrays: Any, split: Split | None) -> Any:
    """The arrays of a batch as the user asked for them, safe to start a program with collectives on. None is copied."""
    if split is None:
        return arrays
    wait_before_collectives(arrays, split.devices)
    given = split.given
    return arrays if given is None else jax.tree.map(lambda array: with_sharding(array, given), arrays)


def as_batch(arrays: Any, split: Split | None) -> Any:
    """The arrays of a batch, marked if they are padded."""
    return arrays if split is None or split.virtual_shards is None else PaddedBatch(arrays, split.virtual_shards)
