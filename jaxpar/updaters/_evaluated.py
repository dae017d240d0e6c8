"""Optimizers that train other params than those to evaluate: averages of params, kept in an optimizer's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from .._core.calls import answers

if TYPE_CHECKING:
    import optax

Tree = Any


class Lookahead(NamedTuple):
    """The state of `optax.lookahead`. The fast params are those of the store.

    Attributes:
        state: that of the transform.
        slow: the slow params.
    """

    state: Any
    slow: Tree


class AverageState(NamedTuple):
    """The state of `average_params`.

    Attributes:
        count: int32, the updates so far.
        average: of the params.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    average: Tree


@answers("updaters.average_params", {"tx": "write optax.chain(tx, updaters.average_params(decay))"})
def average_params(decay: float) -> optax.GradientTransformation:
    """An exponential moving average of the params, for evaluation. The last part of an `optax.chain`.

    The updates pass unchanged. After each update, average = decay · average + (1 - decay) · params. The average starts
    from the first params. `kv.eval_params`, `state.eval_params`, `train.evaluate` and `train.predict` take it.

    Args:
        decay: between 0 and 1, such as 0.999.

    Returns:
        An optax transform.

    Raises:
        ValueError: a decay out of its range.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jaxpar import kv, updaters
        >>> tx = optax.chain(optax.sgd(1.0), updaters.average_params(0.5))
        >>> store = kv.from_params({"w": jnp.zeros(1)}, optimizer=tx)
        >>> store = kv.push(store, 0, -jnp.ones(1))
        >>> kv.to_params(store)["w"].tolist(), kv.eval_params(store)["w"].tolist()
        ([1.0], [0.5])
    """
    import optax

    if not 0 <= decay < 1:
        raise ValueError(f"average_params: decay must be at least 0 and below 1, got {decay!r}")

    def init(params: Any) -> AverageState:
        return AverageState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.asarray, params))

    def update(updates: Any, state: AverageState, params: Any = None) -> tuple[Any, AverageState]:
        if params is None:
            raise ValueError("average_params: the update needs params")
        new = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, p: (decay * a + (1 - decay) * p).astype(a.dtype), state.average, new)
        return updates, AverageState(state.count + 1, average)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def evaluated(state: Any, params: Tree) -> Tree:
    """The params to evaluate: averages that an optimizer's state holds, or the params themselves.

    Leaves that the averaging part of the optimizer does not have, as under `optax.masked`, stay as in `params`.

    Args:
        state: of an optimizer.
        params: that are trained.
    """
    for average, node in _averages(state):
        params = average(node, params)
    return params


def has_average(state: Any) -> bool:
    """Whether `evaluated` gives other params than those that are trained."""
    return bool(_averages(state))


def _averages(state: Any) -> list[tuple[Callable[[Any, Tree], Tree], Any]]:
    """The parts of an optimizer's state that hold averages, each with the function that reads it."""
    import optax.contrib as contrib

    known: dict[type, Callable[[Any, Tree], Tree]] = {
        Lookahead: lambda node, params: node.slow,
        AverageState: lambda node, params: _where_held(lambda held, _: held, node.average, params),
        contrib.ScheduleFreeState: _schedule_free,
        contrib.SAMState: _outside_perturbation,
    }
    nodes = jax.tree.leaves(state, is_leaf=lambda x: type(x) in known)
    return [(known[type(node)], node) for node in nodes if type(node) in known]


def _schedule_free(state: Any, params: Tree) -> Tree:
    from optax.contrib import schedule_free_eval_params

    return _where_held(lambda z, param: schedule_free_eval_params(state._replace(z=z), param), state.z, params)


def _where_held(average: Callable[[Any, Any], Any], held: Tree, params: Tree) -> Tree:
    """`average(leaf of held, leaf of params)`, where the first has arrays."""
    import optax

    def leaf(held: Any, param: Any) -> Any:
        return param if held is None or isinstance(held, optax.MaskedNode) else average(held, param)

    return jax.tree.map(leaf, held, params, is_leaf=lambda x: x is None or isinstance(x, optax.MaskedNode))


def _outside_perturbation(state: Any, params: Tree) -> Tree:
    """Of `optax.contrib.sam`: the params before its present round of adversarial steps."""
    if state.cache is None:
        return params
    inside = state.steps_since_sync > 0
    return _where_held(lambda cached, param: jnp.where(inside, cached, param), state.cache, params)
