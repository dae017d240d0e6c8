"""A store out of any pytree of arrays, and that pytree again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from .._core import checks
from .._core.arrays import Device
from ..updaters import TreeOptimizer, UpdateFn, Updater, has_average
from . import _tree
from ._create import create, init, set_optimizer, set_updater
from ._pull import pull_whole
from ._store import KVStore

if TYPE_CHECKING:
    import optax


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
        optimizer: an optax transform, as in `kv.set_optimizer`. It sees the whole pytree, with one state for all of it
            in `store.optimizer_state`. A leaf that is not floating is None for it. An `Updater`, such as
            `jp.updaters.mxnet_sgd(...)`, keeps one state a key.
        updater: as in `kv.set_updater`. Not together with `optimizer`.
        devices, staleness: as in `kv.create`.

    Returns:
        A store with the keys 0 to n-1 in the order of `jax.tree.flatten`. The name of a key is the path of its leaf.

    Raises:
        TypeError: a leaf that is no array.
        ValueError: both an optimizer and an updater, an unknown kind, or the same array at two places. An optimizer
            that the kind cannot apply, see `kv.set_optimizer`.

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
    values = [_leaf(leaf, path) for path, (_, leaf) in zip(paths, leaves, strict=True)]
    _check_untied(paths, [leaf for _, leaf in leaves])
    store = dataclasses.replace(create(kind, devices=devices, staleness=staleness), paths=tuple(enumerate(paths)))
    store = init(store, list(range(len(values))), values)
    store = dataclasses.replace(store, treedef=treedef)
    if optimizer is not None:
        return set_optimizer(store, optimizer)
    return store if updater is None else set_updater(store, updater)


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
    except TypeError as error:
        hint = "; separate the arrays of a model from all else first: eqx.partition(model, eqx.is_inexact_array) in"
        raise TypeError(f"{error}{hint} Equinox, nnx.split(model, nnx.Param) in Flax NNX") from None


def to_params(store: KVStore, *, axis_name: str | None = None) -> Any:
    """The pytree that `from_params` was given, with the present values.

    Args:
        store: made by `from_params`.
        axis_name: for a store of kind `sharded` inside `pmap` or `shard_map`, as in `kv.pull`.

    Returns:
        A pytree of the same structure, shapes and dtypes.

    Raises:
        ValueError: the store was not made by `from_params`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import kv
        >>> kv.to_params(kv.from_params({"w": jnp.ones(2)}))["w"].tolist()
        [1.0, 1.0]
    """
    if store.treedef is None:
        raise ValueError("kv.to_params: this store was not made by kv.from_params; kv.pull gives its values")
    return store.treedef.unflatten(pull_whole(store, [k for k, _ in store.paths], axis_name))


def eval_params(store: KVStore) -> Any:
    """The params to evaluate, as the pytree that `from_params` was given.

    Some optimizers train other params than they evaluate: `optax.contrib.schedule_free`, `optax.lookahead`,
    `optax.contrib.sam`, and `jp.updaters.average_params`. Of any other optimizer these are the params themselves.

    Args:
        store: made by `from_params`.

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
    params = to_params(store)
    if not isinstance(store.updater, TreeOptimizer) or not has_average(store.optimizer_state):
        return params
    leaves = jax.tree.leaves(params)
    trained = _tree.tree_of(store, dict(enumerate(leaves)))
    found = _tree.by_key(store, store.updater.evaluated(_tree.whole_state(store), trained))
    assert store.treedef is not None
    return store.treedef.unflatten([found.get(k, leaf) for k, leaf in enumerate(leaves)])
