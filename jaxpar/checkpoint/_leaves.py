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
from .._core.arrays import check_plain, is_prng_key, without_keys
from .._core.portable import (
    PARTS,
    Saved,
    SavedArray,
    adapt,
    describe_record,
    format_of,
    is_registered,
    path_name,
)
from .._devices.placement import put, to_host
from .._devices.user_mesh import on_own_mesh

_SCALARS = (bool, int, float, complex)


@on_own_mesh
def to_leaves(tree: Any, keep: bool = True) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    """A record and an array of its own memory for each leaf, so that the state can be donated right after.

    Without `keep` there are no arrays: a process that writes nothing only gives the others its part of them.
    """
    found = slots_of(tree)
    plain, _ = without_keys([slot.leaf for slot in found])
    held = list(map(to_host, plain))
    arrays = [_copy(slot, leaf) for slot, leaf in zip(found, held, strict=True)] if keep else []
    return [slot.record() for slot in found], arrays


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
    wanted = slots_of(bare)
    saved = adapt(like, saved, remarks)
    nodes, treedef = jax.tree_util.tree_flatten_with_path(like, is_leaf=is_registered)
    for path, node in nodes:
        if (format := format_of(node)) is not None:
            saved = format.adapt(node, saved, path_name(path), remarks)
    _compare(wanted, [record for record, _ in saved.values() if not set(PARTS) & record.keys()])
    state = jax.tree.structure(bare).unflatten(_restore(wanted, saved))

    filled = treedef.flatten_up_to(state)
    for i, (path, node) in enumerate(nodes):
        if (format := format_of(node)) is not None:
            filled[i] = format.complete(filled[i], node, saved, path_name(path), remarks)
    return treedef.unflatten(filled), remarks


def _bare(node: Any) -> Any:
    format = format_of(node)
    return node if format is None else format.bare(node)


def slots_of(tree: Any) -> list[SavedArray]:
    """In the order of the leaves of the tree."""
    nodes = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_registered)[0]
    formats, names = [format_of(node) for _, node in nodes], [path_name(path) for path, _ in nodes]
    found: list[SavedArray] = []
    for (_, node), format, name in zip(nodes, formats, names, strict=True):
        found += [_slot(name, node)] if format is None else format.slots(node, name)
    seen: set[str] = set()
    for slot in found:
        if slot.name in seen:
            raise ValueError(f"checkpoint: two leaves have the path {slot.name!r}; rename one of them")
        seen.add(slot.name)
    return found


def _slot(name: str, leaf: Any) -> SavedArray:
    numeric = hasattr(leaf, "dtype") and (is_prng_key(leaf) or np.dtype(leaf.dtype).kind not in "OSUMm")
    if not numeric and not isinstance(leaf, _SCALARS):
        raise TypeError(f"checkpoint: leaf {name!r} must be an array of numbers, got {checks.describe(leaf)}")
    check_plain(leaf, f"checkpoint: leaf {name!r}")
    return SavedArray(name, f"leaf {name!r}", leaf, tuple(np.shape(leaf)))


def _copy(slot: SavedArray, leaf: Any) -> np.ndarray:
    """The whole value in memory of its own. `np.asarray` would share that of an array on a CPU device."""
    array = np.array(leaf, copy=True)
    return array.reshape(-1)[: math.prod(slot.shape)].reshape(slot.shape) if slot.rows else array


def _restore(slots: Sequence[SavedArray], saved: Saved) -> list[Any]:
    """The saved arrays with the layouts and on the devices of the slots' leaves."""
    found = [saved[slot.name] for slot in slots]
    arrays = [_lay_out(slot, array) for slot, (_, array) in zip(slots, found, strict=True)]
    on_host = [isinstance(slot.leaf, (*_SCALARS, np.ndarray, np.generic)) for slot in slots]
    placed = [
        array if host else put(array, getattr(slot.leaf, "sharding", None))
        for slot, array, host in zip(slots, arrays, on_host, strict=True)
    ]
    impls = [None if host else record.get("impl") for (record, _), host in zip(found, on_host, strict=True)]
    return [
        leaf if impl is None else jax.random.wrap_key_data(leaf, impl=impl)
        for leaf, impl in zip(placed, impls, strict=True)
    ]


def _lay_out(slot: SavedArray, array: np.ndarray) -> Any:
    """A saved array as the slot's leaf has it: a Python number, or rows for the devices."""
    if isinstance(slot.leaf, _SCALARS):
        return type(slot.leaf)(array.item())
    if not slot.rows:
        return array
    flat = np.zeros(math.prod(slot.leaf.shape), array.dtype)
    flat[: array.size] = array.reshape(-1)
    return flat.reshape(slot.leaf.shape)


def _compare(wanted: list[SavedArray], records: list[dict[str, Any]]) -> None:
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


def _describe(slot: SavedArray) -> str:
    return f"{slot.dtype}[{','.join(map(str, slot.shape))}]"
