"""How one value is kept on the devices of a store: whole, in rows, or split over a mesh.

A layout is static and hashable, since a store has those of its values as a static field. All three have

    stored(value)       a whole value as the store holds it
    whole(stored)       the inverse
    shape_of(stored)    the shape of the whole value
    sharding(devices)   where what is stored goes
    spec(axis_name)     how it is spread over a mapped axis
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec

from .._core.arrays import Device
from .._devices import collectives
from .._devices.buckets import Shape
from .._devices.mesh import copies_on, split_over


@dataclasses.dataclass(frozen=True)
class Whole:
    """A value in its own shape, whole on each device."""

    def stored(self, value: jax.Array) -> jax.Array:
        return value

    def whole(self, stored: jax.Array) -> jax.Array:
        return stored

    def shape_of(self, stored: jax.Array) -> Shape:
        return stored.shape

    def sharding(self, devices: Sequence[Device]) -> NamedSharding:
        return copies_on(devices)

    def spec(self, axis_name: str) -> PartitionSpec:
        return PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Split(Whole):
    """A value in its own shape, which the compiler spreads over a mesh by this sharding."""

    over: NamedSharding

    def sharding(self, devices: Sequence[Device]) -> NamedSharding:
        return self.over


@dataclasses.dataclass(frozen=True)
class Rows:
    """A value as (count, chunk): flat, padded, one row on each device. So any shape is shared evenly.

    Attributes:
        shape: of the whole value.
        count: of the rows.
    """

    shape: Shape
    count: int

    @property
    def chunk(self) -> int:
        """The length of a row."""
        return collectives.chunk_size(math.prod(self.shape), self.count)

    def stored(self, value: jax.Array) -> jax.Array:
        return collectives.to_rows(value, self.count)

    def whole(self, stored: jax.Array) -> jax.Array:
        return collectives.from_rows(stored, self.shape)

    def shape_of(self, stored: jax.Array) -> Shape:
        return self.shape

    def sharding(self, devices: Sequence[Device]) -> NamedSharding:
        return split_over(devices)

    def spec(self, axis_name: str) -> PartitionSpec:
        return PartitionSpec(axis_name)


Layout = Whole | Split | Rows
WHOLE = Whole()
