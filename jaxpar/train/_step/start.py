"""A state and its step in one call, for beginners."""

from __future__ import annotations

import inspect
from typing import Any, cast

from ... import kv
from ..._core.arguments import did_you_mean
from ..._core.calls import answers
from .make import make_train_step
from .state import TrainState, create_state
from .train_step import TrainStep

_TAKERS = (kv.from_params, create_state, make_train_step)
_NAMES = [
    {name for name, p in inspect.signature(taker).parameters.items() if p.kind is p.KEYWORD_ONLY}
    - {"optimizer", "updater"}
    for taker in _TAKERS
]


@answers("train.start")
def start(
    params: Any,
    optimizer: Any,
    loss_fn: Any,
    *,
    rng: Any = 0,
    compression: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[TrainState, TrainStep]:
    """The state before the first step, and the step: all that `fit` takes.

    It is `kv.from_params`, `train.create_state` and `train.make_train_step`, one after the other.

    Args:
        params: any pytree of arrays. It is copied.
        optimizer: an optax transform, or an optimizer of `jp.updaters`.
        loss_fn: as in `make_train_step`.
        rng: a random key, or an int to make one of.
        compression: as in `kv.set_gradient_compression`.
        options: those of the three functions, such as `devices=jax.devices()[:2]`, `kind="sharded"`,
            `sharding=jp.parallel.fsdp("data")`, `model_state=...`, `accumulate=4`, `compute_dtype=jnp.bfloat16`. An
            option that several of them have goes to each.

    Returns:
        (state, step), for `train.fit(state, step, data, ...)` or `state, metrics = step(state, batch)`.

    Raises:
        TypeError: an option that none of them has. The message names the nearest one. What they raise themselves.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jaxpar import train
        >>> def loss_fn(params, batch, rng):
        ...     return ((batch["x"] * params["w"] - batch["y"]) ** 2).mean(), {}
        >>> state, step = train.start({"w": jnp.zeros(())}, optax.sgd(0.25), loss_fn)
        >>> state, metrics = step(state, {"x": jnp.ones(8), "y": jnp.ones(8)})
        >>> float(metrics["loss"]), float(state.params["w"])
        (1.0, 0.5)
    """
    _check_options(options)
    of_store, of_state, of_step = ({k: v for k, v in options.items() if k in names} for names in _NAMES)
    if not callable(loss_fn) and callable(params):
        raise TypeError(
            "train.start: the order is train.start(params, optimizer, loss_fn); this loss_fn is no function"
        )
    step = make_train_step(cast(Any, loss_fn), **_without_mesh(of_step))
    store = kv.from_params(params, optimizer=optimizer, **of_store)
    if compression is not None:
        store = kv.set_gradient_compression(store, compression)
    return create_state(store, rng, **of_state), step


def _without_mesh(options: dict[str, Any]) -> dict[str, Any]:
    """The options of the step. A mesh of the store is that of engine `jit`, which needs no other word."""
    return {k: v for k, v in options.items() if k != "mesh" or options.get("engine", "auto") in ("auto", "jit")}


def _check_options(options: dict[str, Any]) -> None:
    known = sorted(set().union(*_NAMES) | {"compression", "rng"})
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known) or f"; known are {', '.join(known)}"
            raise TypeError(f"train.start: unknown option {name}={hint}")
