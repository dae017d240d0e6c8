"""A state as named arrays in the host's memory, in a layout that does not depend on devices, and back.

Every leaf has a name, its path: `store/values/3`, `step`. Of a `KVStore` the values are taken whole, also where its
kind is `sharded` and they live as one row for each device, so a store of any kind on any number of devices can
take them up again. Residuals belong to the devices that pushed: another number of devices starts them anew. What
waits in a store with a staleness is handed to the new devices, its sum unchanged; what each device has for itself
between two rounds of local steps is averaged.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from .._core import checks
from .._devices.buckets import Shape
from .._devices.mesh import STORE_AXIS, mesh_of
from .._devices.placement import put, to_host
from ..kv import KVStore, _aggregate, _staleness, names
from ..kv._store import shapes_of
from . import _saved_parts

_RESIDUALS, _PENDING = "residuals", "pending"
_SCALARS = (bool, int, float, complex)


@dataclasses.dataclass(frozen=True)
class Slot:
    """A place in a state for one array.

    Attributes:
        name: its path in the state.
        words: what to call it in a message.
        leaf: what stands there: an array, a `jax.ShapeDtypeStruct` or a Python number.
        shape: of the array as it is saved.
        rows: whether the leaf has this array flat, padded and cut into a row for each device.
        part: "residual" or "pending" for what belongs to the devices that pushed, else None.
    """

    name: str
    words: str
    leaf: Any
    shape: Shape
    rows: bool = False
    part: str | None = None

    @property
    def dtype(self) -> str:
        return str(self.leaf.dtype if hasattr(self.leaf, "dtype") else np.asarray(self.leaf).dtype)

    def record(self) -> dict[str, Any]:
        """What a checkpoint says about the array, as JSON."""
        about = {"name": self.name, "words": self.words, "shape": list(self.shape), "dtype": self.dtype}
        about |= {self.part: True} if self.part else {}
        return about | ({"impl": str(jax.random.key_impl(self.leaf))} if _typed(self.leaf) else {})


def to_leaves(tree: Any, keep: bool = True) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    """A record and an array of its own memory for each leaf, so that the state can be donated right after.

    Without `keep` there are no arrays: a process that writes nothing only gives the others its part of them.
    """
    found = _slots(tree)
    arrays = [_host(s, keep) for s in found]
    return [s.record() for s in found], [a for a in arrays if a is not None]


def from_leaves(records: Sequence[dict[str, Any]], arrays: Sequence[np.ndarray], like: Any) -> tuple[Any, list[str]]:
    """The saved arrays in the structure, and on the devices, of `like`.

    Returns:
        (the state, remarks for the user about what could not be taken up).

    Raises:
        ValueError: a leaf that only one of the two has, or another name, shape or dtype of one.
    """
    saved = {r["name"]: (r, a) for r, a in zip(records, arrays, strict=True)}
    bare = jax.tree.map(
        lambda node: dataclasses.replace(node, residuals={}, pending={}) if _is_store(node) else node,
        like,
        is_leaf=_is_store,
    )
    remarks: list[str] = []
    wanted = _slots(bare)
    saved = _averaged(saved, like, remarks)
    _compare(wanted, [r for r, _ in saved.values() if not {"residual", "pending"} & r.keys()])
    leaves = [_put(s, *saved[s.name]) for s in wanted]
    state = jax.tree.structure(bare).unflatten(leaves)

    nodes, treedef = jax.tree_util.tree_flatten_with_path(like, is_leaf=_is_store)
    filled = treedef.flatten_up_to(state)
    for i, (path, node) in enumerate(nodes):
        if _is_store(node):
            prefix = _join(_name(path), _RESIDUALS)
            residuals = _residuals(filled[i], node, _saved_parts.by_key(saved, prefix, node), prefix, remarks)
            pending = _pending(filled[i], node, _saved_parts.by_key(saved, _join(_name(path), _PENDING), node))
            filled[i] = dataclasses.replace(filled[i], residuals=residuals, pending=pending)
    return treedef.unflatten(filled), remarks


def _is_store(node: Any) -> bool:
    return isinstance(node, KVStore)


def _typed(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _join(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix and name else prefix or name


def _slots(tree: Any) -> list[Slot]:
    """In the order of the leaves of the tree."""
    found: list[Slot] = []
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_store)[0]:
        found += _store_slots(node, _name(path)) if _is_store(node) else [_slot(_name(path), node)]
    seen: set[str] = set()
    for slot in found:
        if slot.name in seen:
            raise ValueError(f"checkpoint: two leaves have the path {slot.name!r}; rename one of them")
        seen.add(slot.name)
    return found


def _slot(name: str, leaf: Any) -> Slot:
    numeric = hasattr(leaf, "dtype") and (_typed(leaf) or np.dtype(leaf.dtype).kind not in "OSUMm")
    if not numeric and not isinstance(leaf, _SCALARS):
        raise TypeError(f"checkpoint: leaf {name!r} must be an array of numbers, got {checks.describe(leaf)}")
    return Slot(name, f"leaf {name!r}", leaf, tuple(np.shape(leaf)))


def _store_slots(store: KVStore, prefix: str) -> Iterable[Slot]:
    shapes, called = shapes_of(store), names(store)
    for path, leaf in jax.tree_util.tree_flatten_with_path(store)[0]:
        part, k = path[0].name, path[1].key
        of_devices = {_RESIDUALS: "residual", _PENDING: "pending"}.get(part)
        rows = store.kind == "sharded" and not of_devices and leaf.shape == store.values[k].shape
        name = _name(path)
        key = f"key {k} ({called[k]!r})" if called.get(k, str(k)) != str(k) else f"key {k}"
        words = f"{key}: {'value' if part == 'values' else name}"
        yield Slot(_join(prefix, name), words, leaf, tuple(shapes[k] if rows else leaf.shape), rows, of_devices)


def _host(slot: Slot, keep: bool) -> np.ndarray | None:
    leaf = to_host(jax.random.key_data(slot.leaf) if _typed(slot.leaf) else slot.leaf)
    if not keep:
        return None
    array = np.array(leaf, copy=True)  # asarray would share the memory of an array on a CPU device
    return array.reshape(-1)[: math.prod(slot.shape)].reshape(slot.shape) if slot.rows else array


def _put(slot: Slot, record: dict[str, Any], array: np.ndarray) -> Any:
    """The array where, and laid out as, the slot's leaf is."""
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
    saved, expected = {r["name"]: r for r in records}, {s.name: s for s in wanted}
    for name, slot in expected.items():
        if name not in saved:
            raise ValueError(f"{slot.words}: expected {_text(slot)}, found nothing: {_hint(len(wanted), len(saved))}")
        found = saved[name]
        if found["words"] != slot.words and "('" in found["words"] and "('" in slot.words:
            raise ValueError(f"{slot.words}: found {found['words']} in its place; was the model changed?")
        if (tuple(found["shape"]), found["dtype"]) != (slot.shape, slot.dtype):
            raise ValueError(f"{slot.words}: expected {_text(slot)}, found {_text_of(found)}")
    for name, found in saved.items():
        if name not in expected:
            hint = _hint(len(wanted), len(saved))
            raise ValueError(f"{found['words']}: found {_text_of(found)}, expected no such leaf: {hint}")


def _hint(wanted: int, saved: int) -> str:
    return f"`like` has {wanted} leaves, the checkpoint {saved}; give a state made as the saved one was"


def _text(slot: Slot) -> str:
    return f"{slot.dtype}[{','.join(map(str, slot.shape))}]"


def _text_of(record: dict[str, Any]) -> str:
    return f"{record['dtype']}[{','.join(map(str, record['shape']))}]"


def _residuals(store: KVStore, like: KVStore, saved: dict[int, Any], prefix: str, remarks: list[str]) -> Any:
    """The residuals of each key: as saved where they fit the devices of `like`, else from the start."""
    if saved and store.compressor is None:
        record = next(iter(next(iter(saved.values())).values()))[0]
        raise ValueError(
            f"{record['words']}: found {_text_of(record)}, but the store of `like` compresses nothing; use "
            "kv.set_gradient_compression on it as before (and again after restoring, to change it)"
        )
    residuals, anew = {}, []
    for k in sorted({*like.residuals, *saved}):
        residuals[k], kept = _residual(store, like, k, saved.get(k, {}), f"{prefix}/{k}")
        anew += [] if kept else [k]
    if anew:
        remarks.append(
            f"the compressor's residuals of keys {checks.shorten(anew)} start anew; they belong to the devices that "
            "pushed and to their compressor, and the saved ones fit no others"
        )
    return residuals


def _residual(store: KVStore, like: KVStore, k: int, own: dict[str, Any], prefix: str) -> tuple[Any, bool]:
    _saved_parts.check_rows(own)
    held = jax.tree.leaves(like.residuals.get(k))
    first = held[0].shape[0] if held else None
    count = first or (len(store.devices) if store.devices else next(iter(own.values()))[0]["shape"][0])
    fresh = _aggregate.start_residuals(store, k, count)
    slots = [
        Slot(_name(path), prefix, leaf, leaf.shape) for path, leaf in jax.tree_util.tree_flatten_with_path(fresh)[0]
    ]
    found = {name: (tuple(r["shape"]), r["dtype"]) for name, (r, _) in own.items()}
    kept = found == {s.name: (s.shape, s.dtype) for s in slots}
    where = NamedSharding(mesh_of(store.devices), P(STORE_AXIS)) if store.devices else None
    shardings = [getattr(leaf, "sharding", where) for leaf in held] or [where] * len(slots)
    leaves = [own[s.name][1] if kept else np.asarray(s.leaf) for s in slots]
    placed = [put(x, s) for x, s in zip(leaves, shardings, strict=True)]
    return jax.tree.structure(fresh).unflatten(placed), kept


def _pending(store: KVStore, like: KVStore, saved: dict[int, Any]) -> dict[int, _staleness.PendingPushes]:
    """What waits for each key, handed to the devices of `like`; nothing, where nothing was saved."""
    pending = {}
    for k in sorted({*like.pending, *saved}):
        held = like.pending.get(k)
        count = held.values[0].shape[0] if held else len(store.devices) if store.devices else None
        waiting = (
            _saved_parts.waiting(store, k, saved[k], count) if k in saved else _staleness.start(store, k, count or 1)
        )
        along, everywhere = None, None
        if store.devices:
            mesh = mesh_of(store.devices)
            along, everywhere = NamedSharding(mesh, P(STORE_AXIS)), NamedSharding(mesh, P())
        if held:
            along, everywhere = held.values[0].sharding, held.count.sharding
        pending[k] = _staleness.PendingPushes(put(waiting.values, along), put(waiting.count, everywhere))
    return pending


def _averaged(saved: dict[str, Any], like: Any, remarks: list[str]) -> dict[str, Any]:
    """What was saved, with what devices had for themselves brought to the number of devices of `like`."""
    from ..train._step.state import TrainState, regrouped

    wanted = jax.tree.leaves(like.local) if isinstance(like, TrainState) else []
    own = {n: v for n, v in saved.items() if n.startswith("local/") and v[1].ndim}
    if not wanted or not own:
        return saved
    count, before = wanted[0].shape[0], next(iter(own.values()))[1].shape[0]
    if count == before:
        return saved
    remarks.append(
        f"the local parameters and updater states of {before} devices were averaged for {count}: they are in a round "
        "of local steps, and each belongs to its device"
    )
    new = {}
    for name, (record, array) in own.items():
        array = np.asarray(regrouped(jnp.asarray(array), count))
        new[name] = {**record, "shape": list(array.shape)}, array
    return {**saved, **new}
