"""Copies of data sets on devices: one on each, as long as the data set itself."""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ._convert import as_jax_dtype

_COPIES = 2  # placements kept for one data set, say for training on four devices and evaluating on one


class Examples(Protocol):
    """What batches are made of, in host memory. A `Dataset` has it."""

    @property
    def images(self) -> np.ndarray:
        """`(n, ...)`."""
        ...

    @property
    def labels(self) -> np.ndarray:
        """`(n, ...)`."""
        ...

    def __len__(self) -> int: ...


# Device copies by data set. They go when the data set goes.
_residents: weakref.WeakKeyDictionary[Examples, dict[Any, tuple[jax.Array, jax.Array]]]
_residents = weakref.WeakKeyDictionary()


def copies(dataset: Examples, mesh: Mesh | None) -> tuple[jax.Array, jax.Array]:
    """Images and labels, whole on each device. They are sent once in the data set's life."""
    placed = _residents.setdefault(dataset, {})
    key = _placement(mesh)
    if key not in placed:
        if len(placed) == _COPIES:
            del placed[next(iter(placed))]
        placed[key] = (place(dataset.images, mesh), place(dataset.labels, mesh))
    return placed[key]


def _placement(mesh: Mesh | None) -> Any:
    return jax.config.jax_default_device if mesh is None else mesh  # pyright: ignore[reportAttributeAccessIssue]


def place(array: np.ndarray, mesh: Mesh | None) -> jax.Array:
    """A copy of the array on each device of the mesh, or an uncommitted one on the default device."""
    array = as_jax_dtype(array)
    if mesh is None:
        return jnp.asarray(array)
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, P()), lambda index: array[index])


def has_room(dataset: Examples, mesh: Mesh | None) -> bool:
    """Whether each device has room for two copies of the data set. A device that does not say has."""
    if _placement(mesh) in _residents.get(dataset, {}):
        return True
    devices = jax.local_devices()[:1] if mesh is None else mesh.local_devices
    room = [free for free in map(free_bytes, devices) if free is not None]
    return 2 * (dataset.images.nbytes + dataset.labels.nbytes) <= min(room, default=float("inf"))


def free_bytes(device: Any) -> int | None:
    """The free memory of a device. None where it does not say."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    if device.platform == "cpu" and hasattr(os, "sysconf"):  # the host's memory, shared by its devices
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(jax.local_devices(backend="cpu"))
    return None
