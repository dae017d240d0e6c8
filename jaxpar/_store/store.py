"""The store: a frozen pytree of values, updater states, residuals and pending pushes, its kind, how arrays are kept.

Read `Kind`, `Layout` and `KVStore` first: all else asks them. A push makes `Changes`, and `with_changes` applies them,
so no function here writes into a store.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from .. import compression, updaters
from .._core.arrays import Device, PyTree, Shaped, is_traced, nbytes, tree_nbytes, without_keys
from .._core.text import Table, describe, plural
from .._devices import collectives
from .._devices.mesh import STORE_AXIS, copies_on, own_copies, put, split_over, to_host
from .._devices.user_mesh import without_types
from ..updaters import Updater, accumulate, assign
from .mxnet_names import KIND_ALIASES, line_for

# The kinds of store. The rest of the package asks a kind and compares no names.


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a store sums what is pushed, and where its values are."""

    name: str  # as given to `create`
    # `reduce(values, axis_name, limits) -> sums`, inside a mapped axis.
    reduce: Callable[[Sequence[jax.Array], str, collectives.BucketLimits], list[jax.Array]]
    # The same of compressed values, see `compression._sums`.
    reduce_compressed: Callable[..., tuple[list[jax.Array], list[Any]]] = compression._allreduce
    in_rows: bool = False  # whether a value is cut into one row for each device
    # Whether a value is on the first device only, and pushes at the prompt are gathered there.
    on_one_device: bool = False
    over_processes: bool = False  # whether a push at the prompt is summed over all processes
    within_process: str = ""  # the kind by which a process then sums its own values first
    delayed: bool = False  # whether pushes may be applied later


KINDS = {
    kind.name: kind
    for kind in (
        Kind("local", collectives.gather_sum, on_one_device=True),
        Kind("device", collectives.allreduce),
        Kind("sharded", collectives.reduce_scatter, compression._reduce_scatter, in_rows=True),
        Kind("dist_sync", collectives.allreduce, over_processes=True, within_process="local"),
        Kind("dist_device_sync", collectives.allreduce, over_processes=True, within_process="device"),
        Kind("dist_async", collectives.allreduce, over_processes=True, within_process="local", delayed=True),
    )
}
_KIND_NAMES = (*KINDS, *KIND_ALIASES)  # for the command line


# How one array lies on the devices of a store.


class Form(enum.Enum):
    """How an array lies on the devices."""

    REPLICATED = "replicated"  # in its own shape, a full copy on each device
    ROWS = "rows"  # (count, chunk): flat and padded, one row on each device, so that any shape is shared evenly
    SPLIT = "split"  # in its own shape, which the compiler spreads over a mesh by a sharding
    PER_DEVICE = "per device"  # each device has one of its own along the first axis: residuals and pending pushes


@dataclasses.dataclass(frozen=True)
class Layout:
    """The form of an array, and what it needs. It is hashable, since a store has those of its values as static field.

    Attributes:
        form: see `Form`.
        shape: of rows: the shape of the full value.
        count: of rows: how many there are.
        sharding: of what is split: how.
    """

    form: Form = Form.REPLICATED
    shape: collectives.Shape = ()
    count: int = 1
    sharding: NamedSharding | None = None

    @property
    def chunk(self) -> int:
        """The elements of a row, padding included."""
        return collectives.chunk_size(math.prod(self.shape), self.count)

    @property
    def spec(self) -> PartitionSpec:
        """How a program that is mapped over the devices of a store takes such an array. None is split over a mesh."""
        return PartitionSpec(STORE_AXIS) if self.form in (Form.ROWS, Form.PER_DEVICE) else PartitionSpec()

    def stored(self, value: jax.Array) -> jax.Array:
        """A full value as the store holds it."""
        return collectives.to_rows(value, self.count) if self.form is Form.ROWS else value

    def full(self, stored: jax.Array) -> jax.Array:
        """The inverse."""
        return collectives.from_rows(stored, self.shape) if self.form is Form.ROWS else stored


REPLICATED, PER_DEVICE = Layout(), Layout(Form.PER_DEVICE)

Layouts = tuple[tuple[int, Layout], ...]
Arrays = dict[int, jax.Array]
Lists = dict[int, list[jax.Array]]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class KVStore:
    """An immutable key-value store, as a pytree. Every function of `jp.kv` returns a new one.

    Attributes:
        values: the stored value of each key. In a store of kind `sharded` a value is flat, padded and cut into one
            row for each device: (devices, chunk).
        updater_state: the state of the updater for each key.
        optimizer_state: the state of `tx` for the whole pytree, if `kv.from_params(params, optimizer=tx)` made the
            store, else (). In a store of kind `sharded`, leaves with the shape of a value are laid out as the value.
        residuals: the state of the compressor for each compressed key. The first axis runs over the devices, or over
            the positions in the pushed list.
        pending: in a store with staleness, the pushes of each key that are not applied yet. `values` holds one array
            (devices, *shape) for each step of staleness, oldest first. `count`, int32, is the number of pushes.
        kind: as given to `create`. Static, as are all fields below.
        updater: how a push changes the value.
        compressor: the gradient compressor, or None.
        devices: the devices of the store. None: values follow the devices of the pushes.
        limits: the sizes that decide which values share a bucket.
        staleness: a push is applied this many pushes of its key later. Above 0 only for kind `dist_async`.
        paths: (key, path in the pytree given to `kv.from_params`).
        treedef: the structure of that pytree, or None.
        layouts: (key, layout) of values that are cut into rows or split over a mesh. Other values are whole.
        frozen: the keys of frozen parameters. They take no gradient and have no optimizer state.
    """

    values: dict[int, jax.Array]
    updater_state: dict[int, PyTree]
    residuals: dict[int, PyTree]
    kind: str = "local"
    updater: Any = assign
    compressor: compression.Compressor | None = None
    devices: tuple[Device, ...] | None = None
    limits: collectives.BucketLimits = dataclasses.field(default_factory=collectives.BucketLimits)
    paths: tuple[tuple[int, str], ...] = ()
    treedef: Any = None  # a `jax.tree_util.PyTreeDef`
    pending: dict[int, Any] = dataclasses.field(default_factory=dict)
    staleness: int = 0
    optimizer_state: PyTree = ()
    layouts: Layouts = ()
    frozen: tuple[int, ...] = ()

    @property
    def shardings(self) -> tuple[tuple[int, NamedSharding], ...]:
        """(key, sharding) of values that are split over a mesh in their own shapes, or ().

        All are on one mesh over the devices of the store.
        """
        return tuple((k, layout.sharding) for k, layout in self.layouts if layout.sharding is not None)

    def __deepcopy__(self, memo: dict[int, Any]) -> KVStore:
        return jax.tree.map(lambda leaf: copy.deepcopy(leaf, memo), self)  # devices cannot be copied

    def __eq__(self, other: object) -> bool:
        """Whether both have the same options, keys, values and states, to the last bit."""
        if not isinstance(other, KVStore):
            return NotImplemented
        leaves, structure = jax.tree.flatten(self)
        other_leaves, other_structure = jax.tree.flatten(other)
        return structure == other_structure and all(map(_is_same, leaves, other_leaves))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Called for unknown names only: the methods of MXNet's store are functions here."""
            line = line_for(name)
            hint = f"; a store is a value, and the verbs are functions: write {line}" if line else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

        def __getitem__(self, key: object) -> object:
            raise TypeError(f"a store has no items; write value = kv.pull(store, {key!r})")

        def __setitem__(self, key: object, value: object) -> None:
            raise TypeError(f"a store is a value and never changes; write store = kv.push(store, {key!r}, value)")

        __iter__ = None  # `for` would ask for items

    def __dir__(self) -> list[str]:
        """What Tab lists: all but how the store is laid out, which can be read all the same."""
        inner = {"limits", "paths", "treedef", "pending", "residuals", "optimizer_state", "layouts"}
        return sorted({*super().__dir__()} - inner)

    def __repr__(self) -> str:
        return str(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()

    def _table(self) -> Table:
        return Table(f"KVStore({_summary(self)})", ("key", "name", "value", "bytes", "devices"), list(_rows(self)))


# The leaves of the pytree. All else is static, so a store with another updater or layout compiles another program.
_DATA = ("values", "updater_state", "residuals", "pending", "optimizer_state")
_STATIC = tuple(f.name for f in dataclasses.fields(KVStore) if f.name not in _DATA)
jax.tree_util.register_dataclass(KVStore, _DATA, _STATIC)

_NONE: dict[int, Any] = {}  # a pytree, as the fields of a store are


class Changes(NamedTuple):
    """What a push replaces, by the fields of `KVStore`. What is missing, or None, stays as it is."""

    values: Arrays = _NONE
    updater_state: dict[int, PyTree] = _NONE
    residuals: dict[int, PyTree] = _NONE
    pending: dict[int, Any] = _NONE
    optimizer_state: PyTree = None

    def __or__(self, later: Changes) -> Changes:
        """These changes, then the later ones."""
        by_key = [before | after for before, after in zip(self[:-1], later[:-1], strict=True)]
        state = self.optimizer_state if later.optimizer_state is None else later.optimizer_state
        return Changes(*by_key)._replace(optimizer_state=state)


def with_changes(store: KVStore, changes: Changes) -> KVStore:
    """The store after a push."""
    by_key = changes._asdict()
    state = by_key.pop("optimizer_state")
    new = {name: getattr(store, name) | of_keys for name, of_keys in by_key.items()}
    return dataclasses.replace(store, **new, optimizer_state=store.optimizer_state if state is None else state)


def check_is_store(store: object, caller: str) -> None:
    """`TypeError` for anything else than a store, such as the params or the state."""
    if not isinstance(store, KVStore):
        within = "; give its .store" if isinstance(getattr(store, "store", None), KVStore) else ""
        raise TypeError(f"{caller}: store must be a KVStore, as kv.create makes, got {describe(store)}{within}")


def names(store: KVStore) -> dict[int, str]:
    """The name of each key: its path in the pytree of params.

    Args:
        store: any store.

    Returns:
        {key: name}, in the order of the keys. A key that did not come from `kv.from_params` is named by `str(key)`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import kv
        >>> kv.names(kv.from_params({"dense": {"bias": jnp.zeros(2), "weight": jnp.ones((3, 2))}}))
        {0: 'dense/bias', 1: 'dense/weight'}
    """
    paths = dict(store.paths)
    return {k: paths.get(k, str(k)) for k in sorted(store.values)}


# What is asked of a store.


def is_split(store: KVStore) -> bool:
    """Whether values are split over a mesh, in their own shapes. All are, or none."""
    return bool(store.layouts) and store.layouts[0][1].form is Form.SPLIT


def is_in_rows(store: KVStore) -> bool:
    """Whether values are cut into rows, but for frozen ones. A program on one device of several has one row of each."""
    return KINDS[store.kind].in_rows and not is_split(store)


def rows_of(store: KVStore) -> dict[int, Layout]:
    """The layouts of the values that are cut into rows."""
    return {k: layout for k, layout in store.layouts if layout.form is Form.ROWS}


def home(store: KVStore, layout: Layout) -> jax.sharding.Sharding | None:
    """Where a new array of this layout goes. None: it stays where it is."""
    if store.devices is None:
        return None
    return SingleDeviceSharding(store.devices[0]) if KINDS[store.kind].on_one_device else sharding_of(store, layout)


def sharding_of(store: KVStore, layout: Layout = REPLICATED) -> NamedSharding:
    """The sharding over the store's devices of an array of this layout, or of one that is replicated over them."""
    assert store.devices is not None
    if layout.sharding is not None:
        return layout.sharding
    if is_split(store):  # what is replicated is on the same mesh as the values, which are all split
        return NamedSharding(mesh_of_values(store), PartitionSpec())
    return split_over(store.devices) if layout.spec else copies_on(store.devices)


def mesh_of_values(store: KVStore) -> Mesh:
    """The mesh over which values are split in their own shapes."""
    sharding = store.layouts[0][1].sharding
    assert sharding is not None
    return cast(Mesh, sharding.mesh)


def shards(store: KVStore) -> int:
    """How many rows the values of a `sharded` store have."""
    assert store.devices is not None
    return len(store.devices)


def shapes_of(store: KVStore) -> dict[int, collectives.Shape]:
    """The shape of each value as the user sees it."""
    shapes = {k: v.shape for k, v in store.values.items()}
    return shapes | {k: layout.shape for k, layout in rows_of(store).items()}


def specs_of(store: KVStore) -> dict[int, jax.ShapeDtypeStruct]:
    """Shape and dtype of each value as the user sees it."""
    return {k: jax.ShapeDtypeStruct(shape, store.values[k].dtype) for k, shape in shapes_of(store).items()}


# Where its arrays are.


def lay_out(store: KVStore, key: int, value: jax.Array) -> jax.Array:
    """A full value as the store holds it, on the store's devices."""
    layout = dict(store.layouts).get(key, REPLICATED)
    sharding = home(store, layout)
    # Inside of a user's `jit` the compiler places it. A store without devices leaves a value where the user had it.
    value = layout.stored(value if sharding is None else without_types(value))
    return value if sharding is None or is_traced(value) else put(value, sharding)


def start_state(store: KVStore, key: int, value: jax.Array) -> PyTree:
    """The updater's state of a key, on the devices of the value. A plain function has none, nor has a frozen key."""
    if not isinstance(store.updater, Updater) or key in store.frozen:
        return ()
    # A state that begins as the value, as an average of params does, must not share its buffer: a step donates both.
    state = jax.tree.map(lambda x: own_copies(x) if x is value else x, store.updater.init(key, value))
    if store.devices is None or is_traced(value):
        return state
    layout = dict(store.layouts).get(key, REPLICATED)
    return jax.tree.map(lambda leaf: put(leaf, home(store, layout if leaf.shape == value.shape else REPLICATED)), state)


def layout_of_each(store: KVStore) -> KVStore:
    """The store with the layout of each array in place of it."""
    # A leaf of a key's state lies as the value does if it has that shape. Others, such as counts, are on each device.
    layouts = {**dict.fromkeys(store.values, REPLICATED), **dict(store.layouts)}

    def state(k: int, leaf: Shaped) -> Layout:
        return layouts[k] if leaf.shape == store.values[k].shape else REPLICATED

    return dataclasses.replace(
        store,
        values=layouts,
        updater_state={k: jax.tree.map(functools.partial(state, k), v) for k, v in store.updater_state.items()},
        optimizer_state=state_layouts(store),
        residuals=jax.tree.broadcast(PER_DEVICE, store.residuals),
        pending={
            k: p._replace(values=(PER_DEVICE,) * len(p.values), count=REPLICATED) for k, p in store.pending.items()
        },
    )


# The state of an optimizer that sees the whole pytree of params.


def trained_keys(store: KVStore) -> list[int]:
    """The keys of the params that have gradients: floating ones that are not frozen."""
    floating = [k for k, _ in store.paths if jnp.issubdtype(store.values[k].dtype, jnp.inexact)]
    return [k for k in floating if k not in store.frozen]


def tree_of(store: KVStore, by_key: Mapping[int, Any]) -> PyTree:
    """The user's pytree with these in place of the params that are trained, and None in place of the others."""
    assert store.treedef is not None
    trained = set(trained_keys(store))
    return store.treedef.unflatten([by_key[k] if k in trained else None for k, _ in store.paths])


def by_key(store: KVStore, tree: PyTree) -> Arrays:
    """The inverse of `tree_of`."""
    return dict(zip(trained_keys(store), jax.tree.leaves(tree), strict=True))


def state_layouts(store: KVStore) -> PyTree:
    """The optimizer's state with the layout of each leaf in place of it."""
    # What belongs to a param and has its shape is kept as the param. Each device has a copy of the rest.
    state = store.optimizer_state
    if not jax.tree.leaves(state) or not store.layouts:
        return jax.tree.broadcast(REPLICATED, state)
    layouts, specs = dict(store.layouts), specs_of(store)
    if is_in_rows(store):
        # The optimizer is elementwise: the state of a row has an axis where it has a number for each element.
        rows = {k: jax.ShapeDtypeStruct((layout.chunk,), specs[k].dtype) for k, layout in rows_of(store).items()}
        full_state, row_state = (jax.eval_shape(store.updater.init, tree_of(store, params)) for params in (specs, rows))

        def row_layout(full: jax.ShapeDtypeStruct, row: jax.ShapeDtypeStruct) -> Layout:
            return Layout(Form.ROWS, full.shape, shards(store)) if row.ndim else REPLICATED

        return jax.tree.map(row_layout, full_state, row_state)
    try:
        owner_of_leaf = iter(owners(store))
    except updaters._UnknownOwners:
        return jax.tree.broadcast(REPLICATED, state)

    def layout(leaf: Shaped) -> Layout:
        k = next(owner_of_leaf)
        return REPLICATED if k is None or specs[k].shape != leaf.shape else layouts[k]

    return jax.tree.map(layout, state)


def owners(store: KVStore) -> list[int | None]:
    """The key to which each leaf of the optimizer's state belongs. None: to no single one."""
    keys = trained_keys(store)
    return [None if i is None else keys[i] for i in store.updater.owners(tree_of(store, specs_of(store)))]


def whole_state(store: KVStore) -> PyTree:
    """The optimizer's state with whole values, for `eval_params` and for checkpoints."""
    return jax.tree.map(lambda layout, x: layout.full(x), state_layouts(store), store.optimizer_state)


# What a store looks like at the prompt and in a notebook, and whether two are equal.


def _is_same(a: object, b: object) -> bool:
    """Whether two leaves are equal. A tree of the store's structure may hold other things than arrays."""
    arrays = (jax.Array, np.ndarray, np.generic)
    if not (isinstance(a, arrays) and isinstance(b, arrays)):
        return type(a) is type(b) and bool(a == b)
    # By their bytes: a NaN is equal to itself, and -0.0 is not 0.0.
    is_alike = a.shape == b.shape and a.dtype == b.dtype
    return is_alike and len({np.asarray(to_host(without_keys(x)[0])).tobytes() for x in (a, b)}) == 1


def _summary(store: KVStore) -> str:
    """One line about a store, or about a pytree of its structure."""
    facts = [f"kind={store.kind!r}", f"updater={_updater_name(store.updater)}"]
    facts += [f"compression={store.compressor}"] if store.compressor is not None else []
    facts += [f"staleness={store.staleness}"] if store.staleness else []
    if not store.values:
        return ", ".join([*facts, "empty"])
    facts.append(f"{plural(len(store.values), 'key')}, {tree_nbytes(store.values):,} bytes")
    state = tree_nbytes((store.updater_state, store.optimizer_state))
    pending = tree_nbytes([pushes.values for pushes in store.pending.values()])  # without the counts
    facts += [f"updater state {state:,} bytes"] if state else []
    facts += [f"pending {pending:,} bytes"] if pending else []
    return ", ".join(facts)


def _updater_name(updater: Callable[..., object] | Updater) -> str:
    for name, standard in (("assign", assign), ("accumulate", accumulate)):
        if updater == standard:
            return name
    inner: Any = getattr(updater, "update", updater)
    if hasattr(updater, "tx"):
        return "optax transform of all params"
    if hasattr(inner, "tx"):
        return "optax transform"
    if hasattr(inner, "rule"):
        return f"mxnet_{inner.rule.__name__}"
    inner = getattr(inner, "fn", inner)
    return getattr(inner, "__name__", type(inner).__name__)


def _rows(store: KVStore) -> Iterator[tuple[str, ...]]:
    """A row of the table for each key."""
    layouts = rows_of(store)
    for key, name in names(store).items():
        value: Any = store.values[key]
        if not hasattr(value, "dtype"):
            yield str(key), name, repr(value), "", ""
            continue
        shape = ",".join(map(str, layouts[key].shape if key in layouts else value.shape))
        name += " (frozen)" if key in store.frozen else ""
        yield str(key), name, f"{value.dtype}[{shape}]", f"{nbytes(value):,}", _devices_of(value)


def _devices_of(value: object) -> str:
    """The devices of a value in a few words, and whether each has a copy or a shard."""
    if is_traced(value) or not isinstance(value, jax.Array):
        return "traced"
    devices = sorted(value.sharding.device_set, key=lambda d: d.id)
    names = ", ".join(f"{d.platform}:{d.id}" for d in devices[:8]) + (", ..." if len(devices) > 8 else "")
    if len(devices) == 1:
        return names
    return f"a copy on {names}" if value.sharding.is_fully_replicated else f"spread over {names}"
