"""Which data sets live on the devices: one copy on each, as long as the data set itself lives."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

if TYPE_CHECKING:
    from ._dataset import Dataset

_COPIES = 2  # placements kept for one data set, say for training on four devices and evaluating on one

# Device copies by data set; they go when the data set goes.
_residents: weakref.WeakKeyDictionary[Dataset, dict[Any, tuple[jax.Array, jax.Array]]]
_residents = weakref.WeakKeyDictionary()


def copies(dataset: Dataset, mesh: Mesh | None) -> tuple[jax.Array, jax.Array]:
    """The whole data set on each device, placed once in the data set's life."""
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
    array = canonical(array)
    if mesh is None:
        return jnp.asarray(array)
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, P()), lambda index: array[index])


def canonical(array: np.ndarray) -> np.ndarray:
    """The array in the dtype that JAX keeps it in: 64 bits become 32 unless x64 is enabled."""
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def fits(dataset: Dataset, mesh: Mesh | None) -> bool:
    """Whether each device has room for the data set twice over; where a device does not say, yes."""
    if _placement(mesh) in _residents.get(dataset, {}):
        return True
    devices = jax.local_devices()[:1] if mesh is None else mesh.local_devices
    room = [free for free in map(free_bytes, devices) if free is not None]
    return 2 * (dataset.images.nbytes + dataset.labels.nbytes) <= min(room, default=float("inf"))


def free_bytes(device: Any) -> int | None:
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    if device.platform == "cpu" and hasattr(os, "sysconf"):  # the host's memory, shared by its devices
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(jax.local_devices(backend="cpu"))
    return None
