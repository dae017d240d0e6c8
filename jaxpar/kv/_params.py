"""A store out of any pytree of arrays, and that pytree again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from .._core import checks
from .._core.arrays import Device, is_traced
from .._core.keys import check_names, check_stored
from .._devices import processes
from .._devices.mesh import check_mesh, mesh_of
from .._devices.sharding_rules import fsdp
from .._devices.user_mesh import in_user_mesh
from .._store import tree_optimizer
from .._store.store import KVStore, kind_of
from ..sparse import RowSparse
from ..updaters import UpdateFn, Updater, _has_average as has_average, _TreeOptimizer as TreeOptimizer
from ._create import create, init, set_optimizer, set_updater
from ._mxnet import answers
from ._place import split_layouts
from ._pull import own_values, pull_whole

if TYPE_CHECKING:
    import optax


@answers
@in_user_mesh
def from_params(
    params: Any,
    *,
    kind: str = "device",
    optimizer: optax.GradientTransformation | Updater | None = None,
    updater: Updater | UpdateFn | None = None,
    devices: Sequence[Device] | None = None,
    staleness: int | None = None,
    mesh: Mesh | None = None,
    sharding: Any = None,
) -> KVStore:
    """Make a store that holds a pytree of arrays.

    With `mesh` or `sharding`, or where a param comes split over devices, values keep their shapes and are split over a
    mesh, which the training step's engine `jit` needs. So are those of a store of kind `sharded` whose optimizer is not
    elementwise.

    Args:
        params: any pytree whose leaves are arrays.
        kind: as in `kv.create`.
        optimizer: an optax transform, as in `kv.set_optimizer`. It sees the whole pytree, with one state for all of it
            in `store.optimizer_state`. A leaf that is not floating is None for it. An `Updater`, such as
            `jp.updaters.mxnet_sgd(...)`, keeps one state a key.
        updater: as in `kv.set_updater`. Not together with `optimizer`.
        devices, staleness: as in `kv.create`.
        mesh: the devices, in place of `devices`, with named axes.
        sharding: how params are split over the mesh, as in `jp.parallel.shardings_of`: a rule such as
            `jp.parallel.fsdp("data")`, or a pytree of `NamedSharding` or `PartitionSpec`. None keeps what the params
            come with. The others are copied to all devices, and in kind `sharded` split by `fsdp` over the first axis.

    Returns:
        A store with the keys 0 to n-1 in the order of `jax.tree.flatten`. The name of a key is the path of its leaf.
        `push`, `pull`, `pushpull` and `row_sparse_pull` take names as keys. The arrays of `params` are copied.

    Raises:
        TypeError: a leaf that is no array, a `RowSparse`, a `mesh` that is none.
        RuntimeError: a leaf that was deleted.
        ValueError: both an optimizer and an updater, an unknown kind, two leaves of one name, or the same array at two
            places. An optimizer that the kind cannot apply, see `kv.set_optimizer`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jaxpar import kv
        >>> store = kv.from_params({"w": jnp.ones(2), "b": jnp.zeros(1)}, optimizer=optax.sgd(0.1))
        >>> kv.names(store)
        {0: 'b', 1: 'w'}
    """
    if mesh is not None and devices is not None:
        raise ValueError("kv.from_params: mesh= stands in place of devices=; give one of them")
    mesh = None if mesh is None else check_mesh(mesh, "kv.from_params")
    if optimizer is not None and updater is not None:
        raise ValueError("kv.from_params: give an optimizer or an updater, not both")
    _check_params(params)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    check_names(leaves, paths, "kv.from_params")
    # Before the first use of JAX, since a kind `dist_*` joins the other processes.
    store = dataclasses.replace(create(kind, devices=devices, staleness=staleness), paths=tuple(enumerate(paths)))
    values = [_leaf(leaf, path) for path, (_, leaf) in zip(paths, leaves, strict=True)]
    _check_untied(paths, [leaf for _, leaf in leaves])
    chosen = mesh if mesh is not None else _mesh_for(store, params, sharding, optimizer)
    if chosen is not None:
        if sharding is None and kind_of(store).in_rows and not _split_shardings(params):
            sharding = fsdp(chosen.axis_names[0])
        layouts = split_layouts(store, range(len(values)), params, chosen, sharding, "kv.from_params")
        store = dataclasses.replace(store, devices=tuple(chosen.devices.flat), layouts=layouts)
    store = init(store, list(range(len(values))), values)
    store = dataclasses.replace(store, treedef=treedef)
    if optimizer is not None:
        return set_optimizer(store, optimizer)
    return store if updater is None else set_updater(store, updater)


def _check_params(params: Any) -> None:
    """`TypeError` or `ValueError` for what holds no parameters."""
    if isinstance(params, KVStore) or isinstance(getattr(params, "store", None), KVStore):
        raise TypeError(
            f"kv.from_params: expected a pytree of arrays, got a {type(params).__name__}; its params are "
            f"{'kv.to_params(store)' if isinstance(params, KVStore) else 'state.params'}"
        )
    if params is None:
        raise ValueError("kv.from_params: the params are None, which hold no array, so nothing is trained")
    # As a pytree it has two leaves, and its row numbers would become a param.
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: isinstance(x, RowSparse)):
        if isinstance(leaf, RowSparse):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise TypeError(
                f"kv.from_params: leaf {name!r} of params is a RowSparse, which is a form of gradients; give the array "
                "of all rows: sparse.to_dense(value)"
            )


def _mesh_for(store: KVStore, params: Any, sharding: Any, optimizer: Any) -> Mesh | None:
    """The mesh over which values are split in their own shapes. None: there is none."""
    given = [s for s in jax.tree.leaves(sharding) if isinstance(s, NamedSharding)]
    found = given or _split_shardings(params)
    if found:
        mesh = found[0].mesh
        assert isinstance(mesh, Mesh)
        return mesh
    if sharding is not None:
        return mesh_of(store.devices or processes.devices())
    if not kind_of(store).in_rows or optimizer is None or isinstance(optimizer, Updater):
        return None
    assert store.devices is not None
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    trained = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else None, specs)
    whole = tree_optimizer.needs_whole(optimizer, trained, len(store.devices))
    return mesh_of(store.devices) if whole else None


def _split_shardings(params: Any) -> list[NamedSharding]:
    """The shardings of params that come split over devices."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(params) if not is_traced(leaf)]
    return [s for s in shardings if isinstance(s, NamedSharding) and not s.is_fully_replicated]


def _check_untied(paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """`ValueError` if one array is at two places: the store would train them apart, and the user may mean one param."""
    seen: dict[int, str] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, (jax.Array, np.ndarray)) and (first := seen.setdefault(id(leaf), path)) is not path:
            raise ValueError(
                f"kv.from_params: leaves {first!r} and {path!r} of params are the same array; for one param that is "
                "used twice, keep it once in params and use it twice in loss_fn; for two params, copy one: "
                "jnp.copy(array)"
            )


def _leaf(leaf: Any, path: str) -> jax.Array:
    try:
        return checks.array(leaf, f"kv.from_params: leaf {path!r} of params")
    except jax.errors.UnexpectedTracerError:
        raise
    except TypeError as error:
        hint = "; separate the arrays of a model from all else first: eqx.partition(model, eqx.is_inexact_array) in"
        raise TypeError(f"{error}{hint} Equinox, nnx.split(model, nnx.Param) in Flax NNX") from None


@answers
@in_user_mesh
def to_params(store: KVStore, *, axis_name: str | None = None, copy: bool = True) -> Any:
    """The pytree that `from_params` was given, with the present values.

    Args:
        store: made by `from_params`.
        axis_name: for a store of kind `sharded` inside `pmap` or `shard_map`, as in `kv.pull`.
        copy: whether the arrays may be donated, as in `kv.pull`.

    Returns:
        A pytree of the same structure, shapes and dtypes.

    Raises:
        ValueError: the store was not made by `from_params`.
        RuntimeError: a stored value was deleted, as by donating the store.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import kv
        >>> kv.to_params(kv.from_params({"w": jnp.ones(2)}))["w"].tolist()
        [1.0, 1.0]
    """
    if store.treedef is None:
        raise ValueError("kv.to_params: this store was not made by kv.from_params; kv.pull gives its values")
    keys = [k for k, _ in store.paths]
    check_stored(keys, store.values, "kv.to_params")
    values = pull_whole(store, keys, axis_name)
    return store.treedef.unflatten(own_values(store, values) if copy else values)


@answers
@in_user_mesh
def eval_params(store: KVStore, *, copy: bool = True) -> Any:
    """The params to evaluate, as the pytree that `from_params` was given.

    Some optimizers train other params than they evaluate: `optax.contrib.schedule_free`, `optax.lookahead`,
    `optax.contrib.sam`, and `jp.updaters.average_params`. Of any other optimizer these are the params themselves.

    Args:
        store: made by `from_params`.
        copy: as in `to_params`.

    Raises:
        ValueError: the store was not made by `from_params`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jaxpar import kv
        >>> tx = optax.lookahead(optax.sgd(1.0), sync_period=5, slow_step_size=0.5)
        >>> store = kv.push(kv.from_params({"w": jnp.ones(1)}, optimizer=tx), 0, jnp.ones(1))
        >>> kv.to_params(store)["w"].tolist(), kv.eval_params(store)["w"].tolist()
        ([0.0], [1.0])
    """
    params = to_params(store, copy=copy)
    if not isinstance(store.updater, TreeOptimizer) or not has_average(store.optimizer_state):
        return params
    leaves = jax.tree.leaves(params)
    trained = tree_optimizer.tree_of(store, dict(enumerate(leaves)))
    found = tree_optimizer.by_key(store, store.updater.evaluated(tree_optimizer.whole_state(store), trained))
    assert store.treedef is not None
    return store.treedef.unflatten([found.get(k, leaf) for k, leaf in enumerate(leaves)])
