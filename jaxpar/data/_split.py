"""How a batch is split over devices along its first axis, and the shardings that users give for that."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from .._core import checks
from .._core.arrays import Device
from .._devices.padded import PaddedBatch, padded_rows
from .._devices.user_mesh import has_types, with_sharding


@dataclasses.dataclass(frozen=True)
class Split:
    """The devices of a batch, and which of them share it.

    Attributes:
        mesh: a mesh without types, on which batches are made.
        axes: the axes of the mesh that split the first axis of a batch. Empty: each device has the whole batch.
        given: the sharding that the user asked for, if it is another than that of this mesh.
        virtual_shards: V, where a batch is for a step with virtual shards and the parts cannot share these evenly.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    given: NamedSharding | None = None
    virtual_shards: int | None = None

    @property
    def parts(self) -> int:
        """In how many parts a batch is split."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(np.ravel(self.mesh.devices))

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of a batch on `mesh`."""
        return NamedSharding(self.mesh, P(self.axes[0] if len(self.axes) == 1 else self.axes or None))

    def rows(self, count: int) -> int:
        """How many rows the arrays of a batch of `count` examples have."""
        return count if self.virtual_shards is None else padded_rows(count, self.virtual_shards, self.parts)

    def as_given(self, batch: Any) -> Any:
        """The batch under the sharding that the user asked for. Nothing is copied."""
        given = self.given
        return batch if given is None else jax.tree.map(lambda array: with_sharding(array, given), batch)

    def as_batch(self, arrays: Any) -> Any:
        """The arrays of a batch, marked where they are padded."""
        return arrays if self.virtual_shards is None else PaddedBatch(arrays, self.virtual_shards)


def with_virtual_shards(split: Split | None, virtual_shards: Any, where: str) -> Split | None:
    """The split, which pads batches where its parts cannot share the virtual shards evenly.

    Raises:
        TypeError, ValueError: `virtual_shards` is no whole number above 0.
    """
    if virtual_shards is None:
        return split
    checks.whole_number(virtual_shards, where, "virtual_shards")
    if split is None or virtual_shards % split.parts == 0:
        return split
    return dataclasses.replace(split, virtual_shards=int(virtual_shards))


def check_virtual_shards(examples: int, virtual_shards: int | None, where: str) -> None:
    """`ValueError` where a batch of so many examples cannot be cut in the shards."""
    if virtual_shards is not None and examples % virtual_shards:
        raise ValueError(
            f"{where}: {examples} examples cannot be cut in {virtual_shards} virtual shards evenly; "
            f"use a multiple of {virtual_shards}"
        )


def split_of(devices: Sequence[Device] | None, axis_name: str, sharding: Any, where: str) -> Split | None:
    """The split that the options of `data.batches` ask for. None: the default device.

    Raises:
        TypeError: `devices` is no list of devices, `sharding` is no sharding.
        ValueError: both are given, or the sharding splits more than the first axis.
    """
    if sharding is None:
        chosen = None if devices is None else checks.devices(devices, where)
        checks.text(axis_name, where, "axis_name")
        return None if chosen is None else Split(Mesh(np.array(chosen), (axis_name,)), (axis_name,))
    if devices is not None:
        raise ValueError(f"{where}: give devices or a sharding, not both; a sharding has the devices of its mesh")
    sharding = check_sharding(sharding, where)
    spec = sharding.spec
    if any(spec[1:]):
        raise ValueError(
            f"{where}: the sharding of a batch splits its first axis only, got {spec}; images and labels have no "
            "other axis in common, so reshard a batch by jax.device_put, or give data.prefetch one for each array"
        )
    first = spec[0] if len(spec) else None
    axes = first if isinstance(first, tuple) else (first,) if first else ()
    mesh = sharding.mesh
    own = Mesh(mesh.devices, mesh.axis_names) if has_types(mesh) else mesh
    split = Split(own, axes)
    return split if split.sharding == sharding else dataclasses.replace(split, given=sharding)


def check_sharding(sharding: Any, where: str) -> NamedSharding:
    """`sharding`, or that of a `PartitionSpec` over the mesh that the user has set.

    Raises:
        TypeError: it is something else, or no mesh is set.
    """
    if isinstance(sharding, P) and not jax.sharding.get_mesh().empty:
        sharding = NamedSharding(jax.sharding.get_mesh(), sharding)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return sharding
    hint = "; a PartitionSpec needs a mesh, set by jax.set_mesh" if isinstance(sharding, P) else ""
    raise TypeError(
        f"{where}: sharding must be a NamedSharding, such as jax.sharding.NamedSharding(mesh, "
        f"jax.sharding.PartitionSpec('data')); got {checks.describe(sharding)}{hint}"
    )


def rows_to_add(split: Split | None, batch_size: int, where: str) -> int:
    """How many rows of padding a batch has, where each process reads its own share of it.

    Raises:
        ValueError: a process would need rows that another one reads.
    """
    rows = 0 if split is None else split.rows(batch_size) - batch_size
    if rows and split and jax.process_count() > 1:
        raise ValueError(
            f"{where}: each of {jax.process_count()} processes reads an equal share of a batch, and the "
            f"{split.virtual_shards} virtual shards of the step are no equal shares of {split.parts} devices; use a "
            f"data.Dataset or data.from_arrays, or a number of devices that divides {split.virtual_shards}"
        )
    return rows
