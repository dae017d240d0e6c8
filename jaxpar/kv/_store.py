"""The store itself: a frozen pytree of values, updater states, residuals and what waits, keyed by ints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .. import updaters
from .._core.arrays import Device
from .._devices.buckets import BucketLimits, Shape
from .._devices.mesh import STORE_AXIS, mesh_of
from .._devices.placement import to_host
from ..compression import Compressor, LinearCompressor
from ..updaters import Updater, assign

Arrays = dict[int, jax.Array]


_VERBS = (
    "init",
    "push",
    "pull",
    "pushpull",
    "broadcast",
    "row_sparse_pull",
    "set_updater",
    "set_optimizer",
    "set_gradient_compression",
)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class KVStore:
    """An immutable key-value store; a pytree. Made by `kv.create`; every function of `jp.kv` returns a new one.

    Attributes:
        values: the stored value of each key. In a store of kind `sharded` a value is kept flat, padded and cut
            into one row for each device: (devices, chunk).
        updater_state: what the updater remembers for each key.
        residuals: for each key that is compressed, the state of the compressor, with the devices (or the
            positions in the pushed list) as a first axis.
        pending: for each key that was pushed to a store with a staleness, what waits: `values`, the staleness many
            arrays (devices, *shape), the oldest first, and `count`, int32, how many of them were pushed.
        kind: as given to `create`; static.
        updater: what a push does; static.
        compressor: of gradients, or None; static.
        devices: those of the store, or None where they follow the pushes; static.
        limits: which values share a bucket; static.
        staleness: how many pushes of a key later a push is applied; 0 but for kind `dist_async`; static.
        shapes: kind `sharded` only: (key, shape) of the values as the user sees them; static.
        paths: (key, path in the pytree given to `kv.from_params`); static.
        treedef: the structure of that pytree, or None; static.
    """

    values: dict[int, jax.Array]
    updater_state: dict[int, Any]
    residuals: dict[int, Any]
    kind: str = "local"
    updater: Any = assign
    compressor: Compressor | LinearCompressor | None = None
    devices: tuple[Device, ...] | None = None
    limits: BucketLimits = dataclasses.field(default_factory=BucketLimits)
    shapes: tuple[tuple[int, Shape], ...] = ()
    paths: tuple[tuple[int, str], ...] = ()
    treedef: Any = None
    pending: dict[int, Any] = dataclasses.field(default_factory=dict)
    staleness: int = 0

    def __eq__(self, other: object) -> bool:
        """Whether both hold the same keys, values and states, to the last bit, and work in the same way."""
        if not isinstance(other, KVStore):
            return NotImplemented
        mine, my_tree = jax.tree.flatten(self)
        theirs, their_tree = jax.tree.flatten(other)
        return my_tree == their_tree and all(map(_same, mine, theirs))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Only for names that there are not: MXNet's methods are functions here."""
            hint = f"; a store is a value: store = kv.{name}(store, ...) makes the next one" if name in _VERBS else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def __repr__(self) -> str:
        from ._display import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from ._display import as_html

        return as_html(self)


_DATA = ("values", "updater_state", "residuals", "pending")


jax.tree_util.register_dataclass(
    KVStore, _DATA, tuple(f.name for f in dataclasses.fields(KVStore) if f.name not in _DATA)
)


_NONE: dict[int, Any] = {}  # a pytree, as the fields of a store are


class Changes(NamedTuple):
    """What a push replaces, by key.

    Attributes:
        values, updater_state, residuals, pending: as the fields of `KVStore`. Keys that are missing stay as they are.
    """

    values: Arrays = _NONE
    updater_state: dict[int, Any] = _NONE
    residuals: dict[int, Any] = _NONE
    pending: dict[int, Any] = _NONE


def with_changes(store: KVStore, changes: Changes) -> KVStore:
    """The store after a push."""
    return dataclasses.replace(store, **{name: getattr(store, name) | new for name, new in changes._asdict().items()})


def _same(a: Any, b: Any) -> bool:
    """Whether two leaves are equal; a tree of the store's structure may hold others than arrays."""
    if not all(isinstance(x, (jax.Array, np.ndarray, np.generic)) for x in (a, b)):
        return type(a) is type(b) and bool(a == b)
    return a.shape == b.shape and a.dtype == b.dtype and _numbers(a).tobytes() == _numbers(b).tobytes()


def _numbers(leaf: jax.Array) -> np.ndarray:
    return np.asarray(to_host(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf))


def check_shares(store: KVStore, values: Mapping[int, Any], where: str) -> None:
    """`ValueError` where the kind is `sharded` and the updater is not elementwise for one of these whole values.

    A plain function is looked at when it is traced: to trace it here would run its Python once more.
    """
    if store.kind == "sharded" and isinstance(store.updater, Updater):
        specs = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in values.items()}
        updaters.check_elementwise(store.updater, specs, shards(store), dict(store.paths), where)


def names(store: KVStore) -> dict[int, str]:
    """`{key: path}`: where a key stood in the pytree given to `kv.from_params`; else the key as text.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import kv
        >>> kv.names(kv.from_params({"dense": {"bias": jnp.zeros(2), "weight": jnp.ones((3, 2))}}))
        {0: 'dense/bias', 1: 'dense/weight'}
    """
    paths = dict(store.paths)
    return {k: paths.get(k, str(k)) for k in sorted(store.values)}


def home(store: KVStore) -> jax.sharding.Sharding | None:
    """The sharding of a newly initialised value; None where it stays where it is."""
    if store.devices is None:
        return None
    if store.kind == "local":
        return jax.sharding.SingleDeviceSharding(store.devices[0])
    spec = PartitionSpec(STORE_AXIS) if store.kind == "sharded" else PartitionSpec()
    return NamedSharding(mesh_of(store.devices), spec)


def shards(store: KVStore) -> int:
    """How many rows the values of a `sharded` store have."""
    assert store.devices is not None
    return len(store.devices)


def shape_of(store: KVStore, key: int) -> Shape:
    """The shape of a value as the user sees it."""
    return dict(store.shapes)[key] if store.kind == "sharded" else store.values[key].shape


def shapes_of(store: KVStore) -> dict[int, Shape]:
    return dict(store.shapes) if store.kind == "sharded" else {k: v.shape for k, v in store.values.items()}


def wholes_of(store: KVStore) -> dict[int, jax.ShapeDtypeStruct]:
    """Shape and dtype of each value as the user sees it."""
    return {k: jax.ShapeDtypeStruct(shape, store.values[k].dtype) for k, shape in shapes_of(store).items()}


Key = int | Sequence[int]
