"""Checks of what belongs to a model: functions, labels, random keys, optax transforms. `checks` has them too."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .arguments import describe
from .arrays import check_plain


def labels(given: Any, where: str) -> None:
    """`TypeError` unless the array holds one integer per example. Only shape and dtype are checked."""
    if given.ndim == 1 and jnp.issubdtype(given.dtype, jnp.integer):
        return
    hint = "make floating class numbers integers by labels.astype(int)"
    if given.ndim > 1:
        hint = "drop an axis of length 1 by labels[:, 0], turn one-hot labels into integers by labels.argmax(-1)"
    raise TypeError(
        f"{where}: labels must be integers of shape (n,), one for each example, got {describe(given)}; {hint}"
    )


def hashable(value: Any, where: str) -> Any:
    """`value`, for which a compiled program is kept; `TypeError` where it can change and so has no hash."""
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"{where}: expected a function, which is compiled once, got {describe(value)}, which has no hash and may "
            "change; give a function that calls it"
        ) from None
    return value


def function(value: Any, where: str) -> Any:
    """`value`, a function for which a compiled program is kept. Errors as of `hashable`."""
    if not callable(value):
        raise TypeError(f"{where}: expected a function, got {describe(value)}; look at the order of the arguments")
    return hashable(value, where)


def random_key(rng: Any, where: str) -> jax.Array:
    """`rng` as a random key. An int makes one. `TypeError` for anything else."""
    if isinstance(rng, (int, np.integer)) and not isinstance(rng, bool):
        return jax.random.key(rng)
    key: Any = rng
    is_key = isinstance(rng, (jax.Array, np.ndarray)) and (
        jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) or rng.dtype == np.uint32
    )
    if not is_key:
        raise TypeError(f"{where}: rng must be a random key, such as jax.random.key(0), got {describe(rng)}")
    return key


def transform(tx: Any, where: str) -> Any:
    """`tx`, an optax transform. `TypeError` for anything else, such as the function that makes one."""
    if callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None)):
        return tx
    name = getattr(tx, "__name__", None) if callable(tx) else None
    hint = f"; call it first, {name}(0.1)" if name else ", say optax.sgd(0.1)"
    raise TypeError(f"{where}: expected an optax.GradientTransformation{hint}; got {describe(tx)}")


def arrays_of_numbers(tree: Any, where: str) -> None:
    """`TypeError` for a leaf of a pytree that is no array of numbers, such as a list's number or an array of words."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype = getattr(leaf, "dtype", None)
        check_plain(leaf, f"{where}{jax.tree_util.keystr(path)}")
        if isinstance(leaf, jax.Array) or (dtype is not None and _is_numeric(dtype)):
            continue
        name = jax.tree_util.keystr(path)
        raise TypeError(f"{where}{name} must be an array of numbers, got {describe(leaf)}")


def _is_numeric(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_))
