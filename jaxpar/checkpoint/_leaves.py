"""A state as named arrays in the host's memory, in a layout that does not depend on devices, and back.

Every leaf has a name, its path: `store/values/3`, `step`. A node whose type is registered in `_core.portable`, as a
`KVStore` is, says itself which arrays it has and how they are taken up on other devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .._core import checks
from .._core.arrays import is_prng_key
from .._core.portable import (
    PARTS,
    Slot,
    adapted,
    describe_record,
    format_of,
    is_registered,
    path_name,
)
from .._devices.placement import put, to_host

_SCALARS = (bool, int, float, complex)


def to_leaves(tree: Any, keep: bool = True) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    """A record and an array of its own memory for each leaf, so that the state can be donated right after.

    Without `keep` there are no arrays: a process that writes nothing only gives the others its part of them.
    """
    found = _slots(tree)
    arrays = [_host(slot, keep) for slot in found]
    return [slot.record() for slot in found], [array for array in arrays if array is not None]


def from_leaves(records: Sequence[dict[str, Any]], arrays: Sequence[np.ndarray], like: Any) -> tuple[Any, list[str]]:
    """The saved arrays in the structure, and on the devices, of `like`.

    Returns:
        (the state, remarks for the user about what could not be taken up).

    Raises:
        ValueError: a leaf that only one of the two has, or another name, shape or dtype of one.
    """
    remarks: list[str] = []
    saved = {record["name"]: (record, array) for record, array in zip(records, arrays, strict=True)}
    bare = jax.tree.map(_bare, like, is_leaf=is_registered)
    wanted = _slots(bare)
    saved = adapted(like, saved, remarks)
    _compare(wanted, [record for record, _ in saved.values() if not set(PARTS) & record.keys()])
    state = jax.tree.structure(bare).unflatten([_put(slot, *saved[slot.name]) for slot in wanted])

    nodes, treedef = jax.tree_util.tree_flatten_with_path(like, is_leaf=is_registered)
    filled = treedef.flatten_up_to(state)
    for i, (path, node) in enumerate(nodes):
        if (format := format_of(node)) is not None:
            filled[i] = format.complete(filled[i], node, saved, path_name(path), remarks)
    return treedef.unflatten(filled), remarks


def _bare(node: Any) -> Any:
    format = format_of(node)
    return node if format is None else format.bare(node)


def _slots(tree: Any) -> list[Slot]:
    """In the order of the leaves of the tree."""
    found: list[Slot] = []
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_registered)[0]:
        format = format_of(node)
        found += [_slot(path_name(path), node)] if format is None else format.slots(node, path_name(path))
    seen: set[str] = set()
    for slot in found:
        if slot.name in seen:
            raise ValueError(f"checkpoint: two leaves have the path {slot.name!r}; rename one of them")
        seen.add(slot.name)
    return found


def _slot(name: str, leaf: Any) -> Slot:
    numeric = hasattr(leaf, "dtype") and (is_prng_key(leaf) or np.dtype(leaf.dtype).kind not in "OSUMm")
    if not numeric and not isinstance(leaf, _SCALARS):
        raise TypeError(f"checkpoint: leaf {name!r} must be an array of numbers, got {checks.describe(leaf)}")
    return Slot(name, f"leaf {name!r}", leaf, tuple(np.shape(leaf)))


def _host(slot: Slot, keep: bool) -> np.ndarray | None:
    leaf = to_host(jax.random.key_data(slot.leaf) if is_prng_key(slot.leaf) else slot.leaf)
    if not keep:
        return None
    array = np.array(leaf, copy=True)  # asarray would share the memory of an array on a CPU device
    return array.reshape(-1)[: math.prod(slot.shape)].reshape(slot.shape) if slot.rows else array


def _put(slot: Slot, record: dict[str, Any], array: np.ndarray) -> Any:
    """The array with the layout and on the devices of the slot's leaf."""
    leaf = slot.leaf
    if isinstance(leaf, _SCALARS):
        return type(leaf)(array.item())
    if isinstance(leaf, (np.ndarray, np.generic)):
        return array
    if slot.rows:
        flat = np.zeros(math.prod(leaf.shape), array.dtype)
        flat[: array.size] = array.reshape(-1)
        array = flat.reshape(leaf.shape)
    placed = put(array, getattr(leaf, "sharding", None))
    return jax.random.wrap_key_data(placed, impl=record["impl"]) if "impl" in record else placed


def _compare(wanted: list[Slot], records: list[dict[str, Any]]) -> None:
    """`ValueError` where what was saved is not what is wanted."""
    saved, expected = {r["name"]: r for r in records}, {s.name: s for s in wanted}
    for name, slot in expected.items():
        if name not in saved:
            raise ValueError(f"{slot.words}: expected {_describe(slot)}, found nothing: {_hint(wanted, saved)}")
        found = saved[name]
        if found["words"] != slot.words and "('" in found["words"] and "('" in slot.words:
            raise ValueError(f"{slot.words}: found {found['words']} in its place; was the model changed?")
        if (tuple(found["shape"]), found["dtype"]) != (slot.shape, slot.dtype):
            raise ValueError(f"{slot.words}: expected {_describe(slot)}, found {describe_record(found)}")
    for name, found in saved.items():
        if name not in expected:
            what = f"{found['words']}: found {describe_record(found)}"
            raise ValueError(f"{what}, expected no such leaf: {_hint(wanted, saved)}")


def _hint(wanted: Sequence[Any], saved: dict[str, Any]) -> str:
    return f"`like` has {len(wanted)} leaves, the checkpoint {len(saved)}; give a state made as the saved one was"


def _describe(slot: Slot) -> str:
    return f"{slot.dtype}[{','.join(map(str, slot.shape))}]"
