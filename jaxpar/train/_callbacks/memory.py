"""What a callback remembers, as JSON in a checkpoint, and back to the last bit."""

from __future__ import annotations

import base64
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core import checks
from ..._core.arrays import is_prng_key
from ..._devices.placement import to_host
from ..._devices.user_mesh import outside_mesh

_MOST_BYTES = 16 << 20  # of all arrays of one memory
_WORDS = (bool, int, float, str, type(None))


def to_json(memory: Any, who: str) -> dict[str, Any]:
    """A memory as JSON: the path and the value of each leaf.

    Args:
        who: the callback, for the message.

    Raises:
        TypeError: a leaf that is no array, number, text or None.
        ValueError: more than 16 MiB of arrays.
    """
    leaves = _leaves(memory)
    size = sum(value.nbytes for _, value in leaves if _is_array(value) and not is_prng_key(value))
    if size > _MOST_BYTES:
        raise ValueError(
            f"fit: the memory of {who} has {size:,} bytes, and {_MOST_BYTES:,} at most are saved with a checkpoint; "
            "save large arrays by checkpoint.save, or keep them in the state"
        )
    return {"names": [name for name, _ in leaves], "values": [_encode(value, name, who) for name, value in leaves]}


def from_json(saved: Any, fresh: Any) -> Any:
    """A saved memory in the structure of a fresh one.

    Raises:
        ValueError: it does not fit: another structure, or an array of another shape or dtype.
    """
    leaves = _leaves(fresh)
    names, values = saved["names"], saved["values"]
    if names != [name for name, _ in leaves]:
        raise ValueError("it has other parts")
    found = [_decode(value, like) for value, (_, like) in zip(values, leaves, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(fresh, is_leaf=_is_none), found)


def is_saved_memory(saved: Any) -> bool:
    """Whether `to_json` can have written this."""
    if not isinstance(saved, dict) or not isinstance(saved.get("name"), str):
        return False
    names, values = saved.get("names"), saved.get("values")
    if not isinstance(names, list) or not isinstance(values, list) or len(names) != len(values):
        return False
    return all(isinstance(name, str) for name in names) and all(map(_is_value, values))


def _leaves(memory: Any) -> list[tuple[str, Any]]:
    found = jax.tree_util.tree_flatten_with_path(memory, is_leaf=_is_none)[0]
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in found]


def _encode(value: Any, name: str, who: str) -> Any:
    if isinstance(value, _WORDS):
        return value
    if _is_array(value) and not is_prng_key(value) and _is_numeric(value.dtype):
        array = np.asarray(to_host(value))
        data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
        return {"dtype": str(array.dtype), "shape": list(array.shape), "data": data}
    raise TypeError(
        f"fit: the memory of {who} is saved with the checkpoints, so it is a pytree of arrays, numbers and texts; "
        f"got {checks.describe(value)} at {name or 'its root'}"
    )


def _decode(value: Any, like: Any) -> Any:
    if not isinstance(value, dict):
        if _is_array(like):
            raise ValueError("a number stands for an array")
        return value
    if not _is_array(like) or (str(like.dtype), list(like.shape)) != (value["dtype"], value["shape"]):
        raise ValueError("an array has another shape or dtype")
    array = np.frombuffer(base64.b64decode(value["data"]), like.dtype).reshape(like.shape).copy()
    if not isinstance(like, jax.Array):
        return array
    with outside_mesh():
        return jnp.asarray(array)


def _is_value(value: Any) -> bool:
    if not isinstance(value, dict):
        return isinstance(value, _WORDS)
    shape = value.get("shape")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 1 << 40 for n in shape):
        return False
    try:
        dtype = jnp.dtype(value["dtype"])
        size = len(base64.b64decode(value["data"], validate=True))
    except (KeyError, TypeError, ValueError):
        return False
    return _is_numeric(dtype) and size == math.prod(shape) * dtype.itemsize


def _is_numeric(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_)


def _is_array(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, np.generic))


def _is_none(value: Any) -> bool:
    return value is None
