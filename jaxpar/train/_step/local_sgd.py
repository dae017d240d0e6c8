"""Local steps: every device trains by itself for a while, then all agree on new parameters.

DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1): each device makes H updates of its own copy of the
parameters with an inner optimizer, whose state it keeps; then the mean over the devices of (parameters at the start
of the round - own parameters) is the gradient that an outer optimizer gets, SGD with Nesterov momentum in the
paper, and the next round starts everywhere from its result. Without an outer optimizer the parameters are averaged,
which is local SGD (Stich 2018, arXiv 1805.09767). Here the inner optimizer is the store's updater, the store holds
the parameters at the start of the round, and what sums the outer gradient is a push: in buckets, compressed where
the store says so.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from ... import kv
from ..._core import checks
from ..._core.arrays import Device
from ..._devices.mesh import STORE_AXIS, mesh_of
from ...kv import KVStore, _aggregate, _update
from .device_step import Arrays, DeviceStep
from .gradient import floating_keys
from .state import TrainState, carries, everywhere


@dataclasses.dataclass(frozen=True)
class LocalSGD(DeviceStep):
    """The step of a device that trains by itself.

    Attributes:
        steps: H, how many updates make a round.
        outer: the optax transform that gets the outer gradient; None averages.
    """

    steps: int = 1
    outer: Any = None

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        mine = own_state(state)
        params = kv.to_params(mine.store)
        found = self.gradient(params, batch, self._rng(state), state.model_state, self._scale(state))
        updates, transform = self._transformed(mine, params, found.grads)
        transform = transform if jax.tree.leaves(transform) else state.local["transform"]
        values, states = _update.update(mine.store, updates)
        metrics, model_state, bad = self._of_all(state, found, found.grads, {})
        new = dataclasses.replace(
            state,
            step=state.step + 1,
            model_state=model_state,
            local=_like(state.local, {"values": values, "updater_state": states, "transform": transform}),
            outer={**state.outer, "since": state.outer["since"] + 1},
        )
        new = self._round_ended(new, new.outer["since"] == self.steps)
        return (new, metrics) if self.guard is None else self.guard(state, new, metrics, bad)

    def flushed(self, state: TrainState) -> TrainState:
        """The state after the round that is under way was ended before its time."""
        return self._round_ended(state, state.outer["since"] > 0)

    def _round_ended(self, state: TrainState, due: jax.Array) -> TrainState:
        """The state, after the devices agreed where it is `due`, which must be the same on all of them."""

        def agreed(state: TrainState) -> tuple[Any, ...]:
            values, residuals, outer = self._agreed(state)
            local = {**state.local, "values": _like(state.local["values"], values)}
            return values, residuals, {"state": outer, "since": jnp.zeros_like(state.outer["since"])}, local

        def alone(state: TrainState) -> tuple[Any, ...]:
            store = state.store
            held = {
                k: _aggregate.held_residual(store, k, self.axis_name)
                for k in _aggregate.compressed_keys(store, trained)
            }
            return {k: store.values[k] for k in trained}, held, state.outer, state.local

        trained = list(state.local["values"])
        values, residuals, outer, local = lax.cond(due, agreed, alone, state)
        store = dataclasses.replace(
            state.store,
            values={**state.store.values, **values},
            residuals={**state.store.residuals, **residuals},
        )
        return dataclasses.replace(state, store=store, outer=outer, local=local)

    def _agreed(self, state: TrainState) -> tuple[Arrays, dict[int, Any], Any]:
        """The parameters of the next round, the residuals and the state of the outer optimizer."""
        store, count = state.store, lax.axis_size(self.axis_name)
        own = own_state(state).store.values
        gaps = {k: (store.values[k] - own[k]) / count for k in state.local["values"]}
        gradient, residuals = _aggregate.reduce(store, gaps, self.axis_name)
        if self.outer is None:
            return {k: store.values[k] - g for k, g in gradient.items()}, residuals, ()
        updates, outer = self.outer.update(_tree(store, gradient), state.outer["state"], _tree(store, store.values))
        steps = dict(zip(sorted(gradient), jax.tree.leaves(updates), strict=True))
        return {k: (store.values[k] + u).astype(store.values[k].dtype) for k, u in steps.items()}, residuals, outer

    def begun(self, state: TrainState, devices: tuple[Device, ...]) -> TrainState:
        """The state with the parts `local` and `outer` as they are before the first round; those it has stay."""
        store = state.store
        _check_store(store)
        fresh = () if self.outer is None else jax.eval_shape(self.outer.init, _tree(store, store.values))
        if carries(state.local):
            if jax.tree.structure(fresh) != jax.tree.structure(state.outer["state"]):
                raise ValueError(
                    "train step: the state is of another outer_optimizer; end its round by that step's finish(state), "
                    "then go on from train.create_state(state.store, rng)"
                )
            return state
        keys = floating_keys([store.values[k] for k, _ in store.paths])
        local = {
            "values": {k: store.values[k] for k in keys},
            "updater_state": {k: store.updater_state[k] for k in keys},
            "transform": state.transform,
        }
        outer = {
            "state": () if self.outer is None else self.outer.init(_tree(store, store.values)),
            "since": jnp.zeros((), jnp.int32),
        }
        leaves, structure = jax.tree.flatten(local)
        local = structure.unflatten(_copies(devices)(leaves))
        return dataclasses.replace(state, local=local, outer=everywhere(outer, devices))


def check_local_steps(local_steps: Any, outer_optimizer: Any) -> None:
    """The options as `make_train_step` takes them."""
    if local_steps is None:
        if outer_optimizer is not None:
            raise ValueError("make_train_step: outer_optimizer goes with local_steps, which is None")
        return
    if isinstance(local_steps, bool) or not isinstance(local_steps, (int, np.integer)) or local_steps < 1:
        raise ValueError(f"make_train_step: local_steps must be None or an int of 1 or more, got {local_steps!r}")
    parts = (getattr(outer_optimizer, name, None) for name in ("init", "update"))
    if outer_optimizer is not None and not all(map(callable, parts)):
        raise TypeError(
            "make_train_step: outer_optimizer must be an optax.GradientTransformation or None, got "
            f"{checks.describe(outer_optimizer)}"
        )


def _check_store(store: KVStore) -> None:
    if _aggregate.is_split(store):
        raise ValueError(
            f"train step: with local_steps each device keeps all parameters, and a store of kind {store.kind!r} gives "
            "it a part of them; use kind 'device' or 'dist_sync'"
        )
    if store.staleness:
        raise ValueError(
            f"train step: local_steps and a store of staleness {store.staleness} cannot go together; use kind "
            "'dist_sync', or staleness=0"
        )


def own_state(state: TrainState) -> TrainState:
    """The state with this device's own values, updater states and transform in place of the common ones."""
    store, local = state.store, state.local
    values = {k: own.reshape(store.values[k].shape) for k, own in local["values"].items()}
    states = {k: _like(store.updater_state[k], own) for k, own in local["updater_state"].items()}
    mine = dataclasses.replace(
        store, values={**store.values, **values}, updater_state={**store.updater_state, **states}
    )
    return dataclasses.replace(state, store=mine, transform=_like(state.transform, local["transform"]))


def _like(like: Any, tree: Any) -> Any:
    """The arrays in the shapes of others: with the axis of the devices, of length 1 or gone, or without it."""
    return jax.tree.map(lambda old, new: new.reshape(old.shape), like, tree)


def _tree(store: KVStore, values: Arrays) -> Any:
    """The floating parameters as the pytree that the user knows; None for the others."""
    assert store.treedef is not None
    leaves = [store.values[k] for k, _ in store.paths]
    trained = set(floating_keys(leaves))
    return store.treedef.unflatten([values[k] if k in trained else None for k in range(len(leaves))])


@functools.lru_cache(maxsize=64)
def _copies(devices: tuple[Device, ...]) -> Any:
    """The compiled function that gives each device a copy, along a first axis, of arrays that all of them have."""

    def copies(leaves: list[jax.Array]) -> list[jax.Array]:
        return [jnp.broadcast_to(x[None], (len(devices), *x.shape)) for x in leaves]

    return jax.jit(copies, out_shardings=NamedSharding(mesh_of(devices), P(STORE_AXIS)))
