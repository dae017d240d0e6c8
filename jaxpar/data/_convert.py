"""Arrays as a batch needs them: elements of other libraries, dtypes of JAX, shares of the devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from .._core import checks
from .._core.arrays import Device, check_plain
from .._devices import processes
from .._devices.emulated import wait_before_collectives
from .._devices.mesh import split_over
from .._devices.user_mesh import in_user_mesh
from ._split import split_of


def as_dict(element: Any, names: tuple[str, ...]) -> Any:
    """An element as a pytree of arrays. A tuple or a list becomes a dict with these names."""
    if isinstance(element, (tuple, list)) and not hasattr(element, "_fields"):
        if len(element) != len(names):
            raise ValueError(
                f"data.from_iterable: an element is a {type(element).__name__} of {len(element)}, but there are "
                f"{len(names)} names {names}; give names= one for each, or elements that are dicts"
            )
        element = dict(zip(names, element, strict=True))
    return jax.tree_util.tree_map_with_path(_as_array, element, is_leaf=lambda x: isinstance(x, (list, str)))


def _as_array(path: Any, leaf: Any) -> Any:
    check_plain(leaf, f"data.from_iterable: {path_name(path)}")
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
    return _join(np.stack, examples, first=0)


def concatenate(batches: Sequence[Any]) -> Any:
    """Batches of any lengths as one."""
    return _join(np.concatenate, batches, first=1)


def _join(join: Callable[[list[np.ndarray]], np.ndarray], trees: Sequence[Any], first: int) -> Any:
    """The trees leaf by leaf as one. Shapes must agree from axis `first` on."""

    def join_leaves(path: Any, *leaves: Any) -> np.ndarray:
        shapes = {np.shape(leaf)[first:] for leaf in leaves}
        if len(shapes) > 1:
            raise ValueError(
                f"data.from_iterable: {path_name(path)} has examples of different shapes, {sorted(shapes)}, which make "
                "no batch; pad, crop or resize them first"
            )
        return join([np.asarray(leaf) for leaf in leaves])

    return jax.tree_util.tree_map_with_path(join_leaves, *trees)


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


convert_on_device = jax.jit(convert_image, static_argnums=1)


def share_sharding(
    batch_size: int,
    devices: Sequence[Device] | None,
    where: str,
    sharding: NamedSharding | None = None,
    *,
    whole: bool = True,
) -> NamedSharding | None:
    """The sharding of a batch over the devices. None is the default device.

    Args:
        sharding: in place of `devices`.
        whole: as in `to_devices`. Where each process has rows of its own and the sharding gives one row to several
            processes, the batch is split over all devices, and a step sends the rows on.

    Raises:
        ValueError: the devices cannot share a batch evenly.
    """
    if sharding is not None:
        split = split_of(None, "", sharding, where)
        assert split is not None
        if whole or batch_size % split.parts or _rows_here(sharding, batch_size) * processes.count() == batch_size:
            checks.even_share(batch_size, split.parts, where)
            return split.sharding
        devices = split.devices
    if devices is None:
        return None
    devices = checks.devices(devices, where)
    checks.even_share(batch_size, len(devices), where)
    return split_over(devices)


def _rows_here(sharding: NamedSharding, n: int) -> int:
    """How many of `n` rows the devices of this process have."""
    rows = {index[0].indices(n)[:2] for index in sharding.addressable_devices_indices_map((n,)).values() if index}
    return sum(last - first for first, last in rows)


@in_user_mesh
def placed_batch(batch: Any, sharding: NamedSharding | None, dtype: Any, *, whole: bool) -> Any:
    """The batch on the devices, as `to_devices`, then as `ready_batch`."""
    return ready_batch(to_devices(batch, sharding, whole=whole), sharding, dtype)


def to_devices(batch: Any, sharding: NamedSharding | None, *, whole: bool) -> Any:
    """The batch on the devices, split along its first axis.

    Args:
        whole: each process has the whole batch and takes its rows. Otherwise each has its own share.
    """
    if sharding is None:
        return jax.tree.map(jnp.asarray, batch)

    def put(array: Any) -> jax.Array:
        if isinstance(array, jax.Array) and processes.count() == 1:
            return jax.device_put(array, sharding)
        array = as_jax_dtype(np.asarray(array))
        if whole:
            return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
        return jax.make_array_from_process_local_data(sharding, array)

    return jax.tree.map(put, batch)


def batch_struct(arrays: Any, batch_size: int, dtype: Any) -> Any:
    """The shapes and dtypes of a batch of these arrays on the devices."""

    def struct(array: Any, dtype: Any = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            (batch_size, *array.shape[1:]), np.dtype(dtype or jax.dtypes.canonicalize_dtype(array.dtype))
        )

    found = jax.tree.map(struct, arrays)
    if dtype is not None and isinstance(arrays, dict) and "image" in arrays:
        found["image"] = jax.tree.map(lambda image: struct(image, dtype), arrays["image"])
    return found


def ready_batch(batch: Any, sharding: NamedSharding | None, dtype: Any) -> Any:
    """The batch with "image" in `dtype`, safe to start a program with collectives on."""
    if dtype is not None and isinstance(batch, dict) and "image" in batch:
        batch = {**batch, "image": convert_on_device(batch["image"], np.dtype(dtype))}
    if sharding is not None:
        wait_before_collectives(batch, tuple(sharding.device_set))
    return batch
