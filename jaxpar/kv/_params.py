"""A store out of any pytree of arrays, and that pytree again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from .._core import checks
from .._core.arrays import Device
from .._core.keys import check_names, check_stored
from ..updaters import UpdateFn, Updater
from ._create import create, init, set_optimizer, set_updater
from ._mxnet import answers
from ._pull import own_values, pull_whole
from ._store import KVStore

if TYPE_CHECKING:
    import optax


@answers
def from_params(
    params: Any,
    *,
    kind: str = "device",
    optimizer: optax.GradientTransformation | Updater | None = None,
    updater: Updater | UpdateFn | None = None,
    devices: Sequence[Device] | None = None,
    staleness: int | None = None,
) -> KVStore:
    """Make a store that holds a pytree of arrays.

    Args:
        params: any pytree whose leaves are arrays.
        kind: as in `kv.create`.
        optimizer: an optax transform, as in `kv.set_optimizer`.
        updater: as in `kv.set_updater`. Not together with `optimizer`.
        devices, staleness: as in `kv.create`.

    Returns:
        A store with the keys 0 to n-1 in the order of `jax.tree.flatten`. The name of a key is the path of its leaf.
        `push`, `pull`, `pushpull` and `row_sparse_pull` take names as keys. The arrays of `params` are copied.

    Raises:
        TypeError: a leaf that is no array.
        RuntimeError: a leaf that was deleted.
        ValueError: both an optimizer and an updater, an unknown kind, or two leaves of one name. For kind `sharded`, an
            optimizer that is not elementwise, see `kv.set_optimizer`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jaxpar import kv
        >>> store = kv.from_params({"w": jnp.ones(2), "b": jnp.zeros(1)}, optimizer=optax.sgd(0.1))
        >>> kv.names(store)
        {0: 'b', 1: 'w'}
    """
    if optimizer is not None and updater is not None:
        raise ValueError("kv.from_params: give an optimizer or an updater, not both")
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    check_names(leaves, paths, "kv.from_params")
    store = dataclasses.replace(create(kind, devices=devices, staleness=staleness), paths=tuple(enumerate(paths)))
    if optimizer is not None:
        store = set_optimizer(store, optimizer)
    elif updater is not None:
        store = set_updater(store, updater)
    values = [_leaf(leaf, path) for path, (_, leaf) in zip(paths, leaves, strict=True)]
    store = init(store, list(range(len(values))), values)
    return dataclasses.replace(store, treedef=treedef)


def _leaf(leaf: Any, path: str) -> jax.Array:
    try:
        return checks.array(leaf, f"kv.from_params: leaf {path!r} of params")
    except jax.errors.UnexpectedTracerError:
        raise
    except TypeError as error:
        hint = "; separate the arrays of a model from all else first: eqx.partition(model, eqx.is_inexact_array) in"
        raise TypeError(f"{error}{hint} Equinox, nnx.split(model, nnx.Param) in Flax NNX") from None


@answers
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
