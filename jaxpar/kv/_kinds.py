"""The kinds of store: how each sums what is pushed, and how it keeps a value on its devices.

A kind is one entry of `KINDS`. The rest of the package asks it and compares no names.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from .._core import checks
from .._core.arrays import Device
from .._devices import collectives
from .._devices.buckets import BucketLimits, Shape
from .._devices.mesh import copies_on, split_over
from . import _compressed
from ._mxnet import ALIASES, OTHER_KINDS

Arrays = Sequence[jax.Array]
Devices = Sequence[Device]


class Layout(Protocol):
    """How a value is kept on the devices of a store.

    Attributes:
        is_split: whether a program on one device sees a part of a value, and the store holds all parts as rows. A
            layout whose values keep the shape that the user sees has False, on whatever devices they are.
    """

    is_split: ClassVar[bool]

    def stored(self, value: jax.Array, devices: Devices | None) -> jax.Array:
        """A whole value as the store holds it."""
        ...

    def whole(self, stored: jax.Array, shape: Shape) -> jax.Array:
        """The inverse of `stored`: the value of this shape."""
        ...

    def sharding(self, devices: Devices) -> NamedSharding:
        """Where a stored value is."""
        ...

    def spec(self, axis_name: str) -> PartitionSpec:
        """How a stored value is spread over a mapped axis."""
        ...

    def own(self, value: jax.Array, axis_name: str) -> jax.Array:
        """This device's part of a value that every device has."""
        ...

    def gather(self, parts: Arrays, shapes: Sequence[Shape], axis_name: str, limits: BucketLimits) -> list[jax.Array]:
        """The whole values of these shapes, out of every device's part."""
        ...

    def code_shape(self, shape: Shape, devices: Devices | None) -> tuple[int | None, Shape]:
        """In how many rows of which shape a value is compressed. None: it is compressed whole."""
        ...


@dataclasses.dataclass(frozen=True)
class Whole:
    """A value in its own shape, whole on each device."""

    is_split: ClassVar[bool] = False

    def stored(self, value: jax.Array, devices: Devices | None) -> jax.Array:
        return value

    def whole(self, stored: jax.Array, shape: Shape) -> jax.Array:
        return stored

    def sharding(self, devices: Devices) -> NamedSharding:
        return copies_on(devices)

    def spec(self, axis_name: str) -> PartitionSpec:
        return PartitionSpec()

    def own(self, value: jax.Array, axis_name: str) -> jax.Array:
        return value

    def gather(self, parts: Arrays, shapes: Sequence[Shape], axis_name: str, limits: BucketLimits) -> list[jax.Array]:
        return list(parts)

    def code_shape(self, shape: Shape, devices: Devices | None) -> tuple[int | None, Shape]:
        return None, shape


WHOLE = Whole()


@dataclasses.dataclass(frozen=True)
class Rows:
    """A value as (devices, chunk): flat, padded, one row on each device."""

    is_split: ClassVar[bool] = True

    def stored(self, value: jax.Array, devices: Devices | None) -> jax.Array:
        return collectives.to_rows(value, _count(devices))

    def whole(self, stored: jax.Array, shape: Shape) -> jax.Array:
        return collectives.from_rows(stored, shape)

    def sharding(self, devices: Devices) -> NamedSharding:
        return split_over(devices)

    def spec(self, axis_name: str) -> PartitionSpec:
        return PartitionSpec(axis_name)

    def own(self, value: jax.Array, axis_name: str) -> jax.Array:
        return collectives.own_chunk(value, axis_name)

    def gather(self, parts: Arrays, shapes: Sequence[Shape], axis_name: str, limits: BucketLimits) -> list[jax.Array]:
        return collectives.all_gather(parts, shapes, axis_name, limits)

    def code_shape(self, shape: Shape, devices: Devices | None) -> tuple[int | None, Shape]:
        rows = _count(devices)
        return rows, (collectives.chunk_size(math.prod(shape), rows),)


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a store sums what is pushed, and where its values are.

    Attributes:
        name: as given to `create`.
        sums, place: the words of the table in the docstring of `create`.
        reduce: `reduce(values, axis_name, limits) -> sums`, inside a mapped axis.
        reduce_compressed: the same of compressed values, see `_compressed.allreduce`.
        layout: how a value is kept.
        on_one_device: whether a value is on the first device only, and pushes at the prompt are gathered there.
        over_processes: whether a push at the prompt is summed over all processes.
        within_process: the kind by which a process then sums its own values first.
        delayed: whether pushes may be applied later.
    """

    name: str
    sums: str
    place: str
    reduce: Callable[[Arrays, str, BucketLimits], list[jax.Array]]
    reduce_compressed: Callable[..., tuple[list[jax.Array], list[Any]]] = _compressed.allreduce
    layout: Layout = WHOLE
    on_one_device: bool = False
    over_processes: bool = False
    within_process: str = ""
    delayed: bool = False

    @property
    def adds_up(self) -> bool:
        """Whether a push is the plain sum, whatever adds it up."""
        return self.reduce in (collectives.gather_sum, collectives.allreduce, collectives.reduce_scatter)

    def home(self, devices: Devices) -> Sharding:
        """Where a new value goes."""
        return SingleDeviceSharding(devices[0]) if self.on_one_device else self.layout.sharding(devices)


KINDS = {
    kind.name: kind
    for kind in (
        Kind("local", "gathered on one device", "on that device", collectives.gather_sum, on_one_device=True),
        Kind("device", "by an all-reduce", "a copy on every device", collectives.allreduce),
        Kind(
            "sharded",
            "by a reduce-scatter",
            "1/N of it on each of N devices, the updater's state too",
            collectives.reduce_scatter,
            _compressed.reduce_scatter,
            Rows(),
        ),
        Kind(
            "dist_sync",
            "as `device`, over the devices of every process",
            "as `device`, in each process",
            collectives.allreduce,
            over_processes=True,
            within_process="local",
        ),
        Kind(
            "dist_device_sync",
            "as `dist_sync`",
            "as `dist_sync`",
            collectives.allreduce,
            over_processes=True,
            within_process="device",
        ),
        Kind(
            "dist_async",
            "as `dist_sync`, `staleness` pushes later",
            "as `dist_sync`",
            collectives.allreduce,
            over_processes=True,
            within_process="local",
            delayed=True,
        ),
    )
}
_KIND_NAMES = (*KINDS, *ALIASES)  # for the command line


def kind_named(name: str, where: str) -> Kind:
    """The kind of this name, or of MXNet's name for it.

    Raises:
        ValueError: there is none. Of MXNet's other kinds the message says which one to use.
    """
    name = str(name)
    if name in OTHER_KINDS:
        raise ValueError(f"{where}: unknown kind {name!r}; known are {', '.join(KINDS)}; {OTHER_KINDS[name]}")
    return KINDS[checks.choice(ALIASES.get(name, name), where, "kind", KINDS)]


def table() -> str:
    """The kinds as a table in Markdown."""
    lines = ["| kind | where a push is summed | where a value is |", "|---|---|---|"]
    for kind in KINDS.values():
        others = ", ".join(f"`{other}`" for other, name in ALIASES.items() if name == kind.name)
        lines.append(f"| `{kind.name}`{f' (also {others})' if others else ''} | {kind.sums} | {kind.place} |")
    return "\n".join(lines)


def _count(devices: Devices | None) -> int:
    assert devices is not None
    return len(devices)
