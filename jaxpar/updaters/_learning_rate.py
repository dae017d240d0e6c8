"""The learning rate in an optimizer's state, changed from outside."""

from __future__ import annotations

import itertools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._core.calls import answers

Tree = TypeVar("Tree")


@answers("set_learning_rate")
def set_learning_rate(state: Tree, learning_rate: float | jax.Array) -> Tree:
    """The same state with another rate. Nothing recompiles.

    Only the optimizer's rate changes. A parameter or a model's own array of this name stays as it is.

    Args:
        state: of one key of an optimizer made with `rate_in_state=True`, a list or {key: state} of such states, or the
            state of `optax.inject_hyperparams`. Or a `KVStore`, a `TrainState` or a part of them with such states.
        learning_rate: a number or 0-d array.

    Returns:
        A pytree of the same structure, shapes and dtypes.

    Raises:
        ValueError: no rate is in `state`, or it follows a schedule of optax. A rate that is no single finite number
            (one in a `jax.Array` is not read).

    Example:
        >>> from jaxpar import updaters
        >>> updater = updaters.mxnet_sgd(1.0, rate_in_state=True)
        >>> state = set_learning_rate(updater.init(0, jnp.zeros(2)), 0.1)
        >>> updater.update(0, jnp.ones(2), state, jnp.zeros(2))[0].tolist() == jnp.full(2, -0.1).tolist()
        True
    """
    if np.ndim(learning_rate):
        raise ValueError(f"set_learning_rate: learning_rate must be one number, got shape {np.shape(learning_rate)}")
    if not isinstance(learning_rate, jax.Array) and not np.isfinite(learning_rate):
        raise ValueError(f"set_learning_rate: learning_rate must be finite, got {learning_rate}")
    found: list[tuple[Any, ...]] = []

    def replace(path: tuple[Any, ...], leaf: Any) -> Any:
        if _is_scheduled(path):
            raise ValueError("set_learning_rate: this rate follows a schedule; give optax.inject_hyperparams a number")
        if _is_rate(path):
            found.append(path)
            # In the array's own dtype and place, so that a compiled step takes it as it took the old one.
            return jnp.zeros_like(leaf) + jnp.asarray(learning_rate, leaf.dtype)
        return leaf

    state = jax.tree_util.tree_map_with_path(replace, state)
    if not found:
        raise ValueError(
            "set_learning_rate: no rate in this state; make the optimizer with rate_in_state=True, or by "
            "optax.inject_hyperparams"
        )
    return state


@answers("updaters.learning_rates")
def learning_rates(state: Any) -> dict[str, float]:
    """The rates that optimizers keep in a state, by their paths. Waits for the state.

    Args:
        state: as for `set_learning_rate`, also where the rate follows a schedule.

    Returns:
        One for each optimizer that has its rate in the state. Empty where none has.

    Example:
        >>> import optax
        >>> from jaxpar import kv
        >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
        >>> store = kv.from_params({"w": jnp.zeros(2)}, optimizer=tx)
        >>> list(learning_rates(store).values())
        [0.5]
    """
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    rates = {path: leaf for path, leaf in leaves if _is_rate(path) and jnp.ndim(leaf) == 0}
    return {"/".join(map(str, _steps(path))): float(leaf) for path, leaf in rates.items()}


def _is_rate(path: tuple[Any, ...]) -> bool:
    """Whether this is where an optimizer has its rate.

    That is in the hyperparameters of optax, or directly in the state of a key. All else of this name is a parameter, or
    belongs to one.
    """
    steps = _steps(path)
    if not steps or steps[-1] != "learning_rate" or "model_state" in steps:
        return False
    if steps[-2:-1] == ["hyperparams"] and isinstance(path[-2], jax.tree_util.GetAttrKey):
        return True
    inner = steps[steps.index("updater_state") + 1 : -1] if "updater_state" in steps else steps[:-1]
    return all(isinstance(step, int) for step in inner)


def _is_scheduled(path: tuple[Any, ...]) -> bool:
    return ("hyperparams_states", "learning_rate") in itertools.pairwise(_steps(path))


def _steps(path: tuple[Any, ...]) -> list[Any]:
    return [getattr(p, "name", getattr(p, "key", getattr(p, "idx", None))) for p in path]
