"""What other libraries' loaders yield, as NumPy arrays, and these as arrays over the devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from .._devices.emulated import wait_before_collectives
from ._batches import _convert_streamed
from ._device_copies import canonical

AXIS = "data"


def as_dict(element: Any, names: tuple[str, ...]) -> Any:
    """An element as a pytree of arrays: a tuple or a list as a dict with those names."""
    if isinstance(element, (tuple, list)) and not hasattr(element, "_fields"):
        if len(element) != len(names):
            raise ValueError(
                f"data.from_iterable: an element is a {type(element).__name__} of {len(element)}, but there are "
                f"{len(names)} names {names}; give names= one for each, or elements that are dicts"
            )
        element = dict(zip(names, element, strict=True))
    return jax.tree_util.tree_map_with_path(_array, element, is_leaf=lambda x: isinstance(x, (list, str)))


def _array(path: Any, leaf: Any) -> Any:
    if isinstance(leaf, (np.ndarray, jax.Array)):
        array = leaf
    else:
        try:
            array = np.asarray(leaf)
        except (TypeError, ValueError, RuntimeError):  # memory of an accelerator, a dtype that NumPy has not
            array = jnp.from_dlpack(leaf) if hasattr(leaf, "__dlpack__") else np.empty(0, object)
    if array.dtype.kind in "OUSMm":
        raise TypeError(
            f"data.from_iterable: {path_name(path)} is a {type(leaf).__name__} of dtype {array.dtype}, which is no "
            "array of numbers; leave it out of the elements, or turn it into numbers there"
        )
    return array


def stack(examples: Sequence[Any]) -> Any:
    """Examples of one structure and shape as one batch."""
    return _joined(np.stack, examples, first=0)


def concatenate(batches: Sequence[Any]) -> Any:
    """Batches of any lengths as one."""
    return _joined(np.concatenate, batches, first=1)


def _joined(join: Callable[[list[np.ndarray]], np.ndarray], some: Sequence[Any], first: int) -> Any:
    def joined(path: Any, *leaves: Any) -> np.ndarray:
        shapes = {np.shape(leaf)[first:] for leaf in leaves}
        if len(shapes) > 1:
            raise ValueError(
                f"data.from_iterable: {path_name(path)} has examples of different shapes, {sorted(shapes)}, which make "
                "no batch; pad, crop or resize them first"
            )
        return join([np.asarray(leaf) for leaf in leaves])

    return jax.tree_util.tree_map_with_path(joined, *some)


def path_name(path: Any) -> str:
    return repr(jax.tree_util.keystr(path, simple=True, separator="/")) if path else "an element"


def mesh_for(batch_size: int, devices: Sequence[Any] | None) -> Mesh | None:
    """The devices as a mesh, checked to share a batch evenly."""
    if devices is None:
        return None
    if batch_size % len(devices):
        down, up = batch_size // len(devices) * len(devices), -(-batch_size // len(devices)) * len(devices)
        choice = f"{down} or {up}" if down else f"{up}"
        raise ValueError(
            f"batch_size {batch_size} cannot be shared evenly by {len(devices)} devices; use {choice}, for example"
        )
    return Mesh(np.array(devices), (AXIS,))


def to_devices(batch: Any, mesh: Mesh | None, *, whole: bool) -> Any:
    """The batch on the devices, split along its first axis.

    whole: each process has the whole batch, and takes its rows; else each has its own share of it.
    """
    if mesh is None:
        return jax.tree.map(jnp.asarray, batch)
    sharding = NamedSharding(mesh, P(AXIS))

    def put(array: Any) -> jax.Array:
        if isinstance(array, jax.Array) and jax.process_count() == 1:
            return jax.device_put(array, sharding)
        array = canonical(np.asarray(array))
        if whole:
            return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
        return jax.make_array_from_process_local_data(sharding, array)

    return jax.tree.map(put, batch)


def ready_batch(batch: Any, mesh: Mesh | None, dtype: Any) -> Any:
    """The batch with "image" in `dtype`, safe to start a program with collectives on."""
    if dtype is not None and isinstance(batch, dict) and "image" in batch:
        batch = {**batch, "image": _convert_streamed(batch["image"], np.dtype(dtype))}
    if mesh is not None:
        wait_before_collectives(batch, tuple(np.ravel(mesh.devices)))
    return batch
