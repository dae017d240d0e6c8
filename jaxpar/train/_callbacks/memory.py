"""What a callback remembers, as JSON in a checkpoint, and back to the last bit."""

from __future__ import annotations

import base64
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core import checks
from ..._core.arrays import PyTree, is_of_numbers
from ..._devices import mesh, user_mesh

_MOST_BYTES = 16 << 20  # of all arrays of one memory
_PLAIN = (bool, int, float, str, type(None))
_ARRAYS = (jax.Array, np.ndarray, np.generic)


def memory_to_json(memory: PyTree, who: str) -> dict[str, Any]:
    """A memory as JSON: the path and the value of each leaf. `who` is the callback, for messages."""
    names, values, _ = _flatten(memory)
    for name, value in zip(names, values, strict=True):
        if not (isinstance(value, _PLAIN) or (isinstance(value, _ARRAYS) and is_of_numbers(value))):
            raise TypeError(
                f"fit: checkpoints save the memory of {who}, so it must be a pytree of arrays, numbers and texts; got "
                f"{checks.describe(value)} at {name or 'its root'}"
            )
    # It is text in the manifest of each checkpoint, which is read whole before any array is.
    size = sum(value.nbytes for value in values if isinstance(value, _ARRAYS))
    if size > _MOST_BYTES:
        raise ValueError(
            f"fit: the memory of {who} has {size:,} bytes, more than the {_MOST_BYTES:,} saved; put them in the state"
        )
    for i, array in enumerate(values):
        if not isinstance(array, _PLAIN):
            array = np.asarray(mesh.to_host(array))
            data = base64.b64encode(array.tobytes()).decode()
            values[i] = {"dtype": str(array.dtype), "shape": list(array.shape), "data": data}
    return {"names": names, "values": values}


def memory_from_json(saved: dict[str, Any], first: PyTree) -> PyTree:
    """A saved memory in the structure of the one that a callback begins with. `ValueError` where it does not fit."""
    names, first_leaves, structure = _flatten(first)
    leaves = list(map(_decode, saved["values"]))
    if saved["names"] != names or list(map(_kind, leaves)) != list(map(_kind, first_leaves)):
        raise ValueError("the structure, or the shape or dtype of an array, differs")
    for i, (leaf, first_leaf) in enumerate(zip(leaves, first_leaves, strict=True)):
        if isinstance(leaf, np.ndarray):  # what was decoded cannot be written to
            with user_mesh.outside_mesh():
                leaves[i] = jnp.asarray(leaf.copy()) if isinstance(first_leaf, jax.Array) else leaf.copy()
    return structure.unflatten(leaves)


def is_saved_memory(saved: Any) -> bool:
    """Whether `memory_to_json` can have written this."""
    try:
        names, values = saved["names"], saved["values"]
        for value in values:
            _decode(value)
        are_texts = all(isinstance(text, str) for text in (saved["name"], *names))
        return are_texts and isinstance(names, list) and len(names) == len(values)
    except (KeyError, TypeError, ValueError, OverflowError):
        return False


def _decode(value: Any) -> Any:
    """The plain value or the array that was saved. Errors of several types for any other value."""
    if isinstance(value, _PLAIN):
        return value
    content = base64.b64decode(value["data"], validate=True)
    array = np.frombuffer(content, jnp.dtype(value["dtype"])).reshape(value["shape"])
    if list(array.shape) != value["shape"] or not is_of_numbers(array):  # -1 in a shape stands for any number
        raise ValueError("expected a saved array of numbers")
    return array


def _kind(leaf: Any) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
    """Dtype and shape of an array. None for a plain value, whose type may change, as that of `best` from None."""
    return (leaf.dtype, leaf.shape) if isinstance(leaf, _ARRAYS) else None


def _flatten(memory: PyTree) -> tuple[list[str], list[Any], Any]:
    """The path of each leaf, the leaves, and the structure. None is a leaf, since an array may take its place."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(memory, is_leaf=lambda value: value is None)
    return [jax.tree_util.keystr(path) for path, _ in leaves], [value for _, value in leaves], structure
