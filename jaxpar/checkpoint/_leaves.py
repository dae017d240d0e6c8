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
from .._core.portable import PARTS, SavedArray, adapt, describe_record, format_of, is_registered, path_name
from .._devices.mesh import put, to_host
from .._devices.user_mesh import on_own_mesh

_SCALARS = (bool, int, float, complex)


@on_own_mesh
def to_leaves(tree: Any, keep: bool = True) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    """A record and an array of its own memory for each leaf, so that the state can be donated right after."""
    # Without `keep` the result has no arrays: this process writes nothing and only sends its parts to the others.
    slots = slots_of(tree)
    plain, _ = without_keys([slot.leaf for slot in slots])
    on_host = list(map(to_host, plain))
    arrays = [_copy(slot, leaf) for slot, leaf in zip(slots, on_host, strict=True)] if keep else []
    return [slot.record() for slot in slots], arrays


def from_leaves(records: Sequence[dict[str, Any]], arrays: Sequence[np.ndarray], like: Any) -> tuple[Any, list[str]]:
    """The saved arrays in the structure, and on the devices, of `like`, and remarks about what could not be taken up.

    `ValueError` for a leaf that only one of the two has, or of another name, shape or dtype.
    """
    remarks: list[str] = []
    saved = {record["name"]: (record, array) for record, array in zip(records, arrays, strict=True)}
    nodes, treedef = jax.tree_util.tree_flatten_with_path(like, is_leaf=is_registered)
    formats = [(i, path_name(path), node, f) for i, (path, node) in enumerate(nodes) if (f := format_of(node))]
    bare_nodes = [node for _, node in nodes]
    for i, _, node, format in formats:
        bare_nodes[i] = format.bare(node)
    bare = treedef.unflatten(bare_nodes)
    wanted = slots_of(bare)

    # What an older version or other devices saved gets the names and shapes of `like`.
    saved = adapt(like, saved, remarks)
    for _, name, node, format in formats:
        saved = format.adapt(node, saved, name, remarks)
    _compare(wanted, [record for record, _ in saved.values() if not set(PARTS) & record.keys()])
    leaves = [_restore(slot, *saved[slot.name]) for slot in wanted]

    filled = treedef.flatten_up_to(jax.tree.structure(bare).unflatten(leaves))
    for i, name, node, format in formats:
        filled[i] = format.complete(filled[i], node, saved, name, remarks)
    return treedef.unflatten(filled), remarks


def slots_of(tree: Any) -> list[SavedArray]:
    """What a checkpoint has of each leaf, in the order of the leaves of the tree."""
    slots: list[SavedArray] = []
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_registered)[0]:
        format, name = format_of(node), path_name(path)
        slots += [_slot(name, node)] if format is None else format.slots(node, name)
    seen: set[str] = set()
    for slot in slots:
        if slot.name in seen:
            raise ValueError(f"checkpoint: two leaves have the path {slot.name!r}; rename one of them")
        seen.add(slot.name)
    return slots


def _slot(name: str, leaf: Any) -> SavedArray:
    is_numeric = hasattr(leaf, "dtype") and (
        is_prng_key(leaf) or (np.dtype(leaf.dtype).kind not in "OSUMm" and np.dtype(leaf.dtype).type is not np.void)
    )
    if not is_numeric and not isinstance(leaf, _SCALARS):
        raise TypeError(f"checkpoint: leaf {name!r} must be an array of numbers, got {checks.describe(leaf)}")
    check_plain(leaf, f"checkpoint: leaf {name!r}")
    return SavedArray(name, f"leaf {name!r}", leaf, tuple(np.shape(leaf)))


def _copy(slot: SavedArray, leaf: Any) -> np.ndarray:
    """The whole value in memory of its own. `np.asarray` would share that of an array on a CPU device."""
    array = np.array(leaf, copy=True)
    return array.reshape(-1)[: math.prod(slot.shape)].reshape(slot.shape) if slot.rows else array


def _restore(slot: SavedArray, record: dict[str, Any], array: np.ndarray) -> Any:
    """A saved array with the type and layout, and on the devices, of the slot's leaf."""
    if isinstance(slot.leaf, _SCALARS):
        return type(slot.leaf)(array.item())
    if slot.rows:  # flat, padded, a row for each device
        flat = np.zeros(math.prod(slot.leaf.shape), array.dtype)
        flat[: array.size] = array.reshape(-1)
        array = flat.reshape(slot.leaf.shape)
    if isinstance(slot.leaf, (np.ndarray, np.generic)):
        return array
    placed = put(array, getattr(slot.leaf, "sharding", None))
    return jax.random.wrap_key_data(placed, impl=record["impl"]) if "impl" in record else placed


def _compare(wanted: list[SavedArray], records: list[dict[str, Any]]) -> None:
    """`ValueError` if the saved value differs from the wanted value."""
    saved, expected = {r["name"]: r for r in records}, {s.name: s for s in wanted}
    hint = f"`like` has {len(wanted)} leaves, the checkpoint {len(saved)}; give a state of the same model and optimizer"
    for name, slot in expected.items():
        shown = f"{slot.dtype}[{','.join(map(str, slot.shape))}]"
        if name not in saved:
            raise ValueError(f"{slot.words}: expected {shown}, found nothing: {hint}")
        found = saved[name]
        if found["words"] != slot.words and "('" in found["words"] and "('" in slot.words:
            raise ValueError(f"{slot.words}: found {found['words']} in its place; was the model changed?")
        if (tuple(found["shape"]), found["dtype"]) != (slot.shape, slot.dtype):
            raise ValueError(f"{slot.words}: expected {shown}, found {describe_record(found)}")
    for name, found in saved.items():
        if name not in expected:
            raise ValueError(f"{found['words']}: found {describe_record(found)}, expected no such leaf: {hint}")
