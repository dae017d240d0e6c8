"""Local steps: every device makes updates of its own, then all agree on new parameters.

DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1). In a round, each device makes H updates of its own copy
of the parameters with an inner optimizer, whose state it keeps. The mean over the devices of (parameters at the start
of the round - own parameters) is the gradient of an outer optimizer, in the paper SGD with Nesterov momentum. The next
round starts on all devices from its result. Without an outer optimizer the parameters are averaged, which is local SGD
(Stich 2018, arXiv 1805.09767).

The inner optimizer is the store's updater. The store holds the parameters at the start of the round. The outer gradient
is pushed as any other, in buckets and compressed if the store has a compressor.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ... import kv
from ..._core import checks
from ..._core.arrays import Device
from ..._devices.mesh import split_over
from ..._store import aggregate
from ..._store.store import is_split
from ..._store.update import update
from ...kv import KVStore
from .device_step import Arrays, DeviceStep
from .gradient import divide, floating_keys
from .state import TrainState, carries, everywhere


@dataclasses.dataclass(frozen=True)
class LocalSGD(DeviceStep):
    """The step of one device in a round of local steps.

    Attributes:
        steps: H, the updates of a round.
        outer: the optax transform of the outer gradient. None averages.
    """

    steps: int = 1
    outer: Any = None

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        mine = own_state(state)
        params = kv.to_params(mine.store)
        found = self.gradient(params, batch, self._rng(state), state.model_state, state.step, self._scale(state))
        grads, loss = found.grads, found.metrics["loss"]
        if found.weight is not None:  # by the mean weight, so that the mean over the devices is over what counts
            share = self._divisor(state, found) / lax.axis_size(self.axis_name)
            grads, loss = {k: divide(g, share) for k, g in grads.items()}, loss.total / share
        updates, transform = self._transform(mine, params, grads)
        transform = transform if jax.tree.leaves(transform) else state.local["transform"]
        updates = self._without_unused(state, found, updates)
        changes = update(mine.store, updates, loss)
        optimizer_state = changes.optimizer_state
        metrics, model_state, bad = self._mean_over_devices(state, found, grads, {})
        new = dataclasses.replace(
            state,
            step=state.step + 1,
            model_state=model_state,
            local=_like(
                state.local,
                {
                    "values": {k: changes.values.get(k, mine.store.values[k]) for k in state.local["values"]},
                    "updater_state": {
                        k: changes.updater_state.get(k, mine.store.updater_state[k])
                        for k in state.local["updater_state"]
                    },
                    "optimizer_state": mine.store.optimizer_state if optimizer_state is None else optimizer_state,
                    "transform": transform,
                },
            ),
            outer={**state.outer, "since": state.outer["since"] + 1},
        )
        new = self._end_round(new, new.outer["since"] == self.steps)
        return (new, metrics) if self.guard is None else self.guard(state, new, metrics, bad)

    def apply_pending(self, state: TrainState) -> TrainState:
        """The state after the unfinished round was ended early."""
        return self._end_round(state, state.outer["since"] > 0)

    def _end_round(self, state: TrainState, due: jax.Array) -> TrainState:
        """The state, after the devices agreed if `due`, which must be the same on all of them."""

        def agree(state: TrainState) -> tuple[Any, ...]:
            values, residuals, outer = self._next_round(state)
            local = {**state.local, "values": _like(state.local["values"], values)}
            return values, residuals, {"state": outer, "since": jnp.zeros_like(state.outer["since"])}, local

        def keep(state: TrainState) -> tuple[Any, ...]:
            store = state.store
            held = {
                k: aggregate.held_residual(store, k, self.axis_name) for k in aggregate.compressed_keys(store, trained)
            }
            return {k: store.values[k] for k in trained}, held, state.outer, state.local

        trained = list(state.local["values"])
        values, residuals, outer, local = lax.cond(due, agree, keep, state)
        store = dataclasses.replace(
            state.store,
            values={**state.store.values, **values},
            residuals={**state.store.residuals, **residuals},
        )
        return dataclasses.replace(state, store=store, outer=outer, local=local)

    def _next_round(self, state: TrainState) -> tuple[Arrays, dict[int, Any], Any]:
        """The parameters of the next round, the residuals and the state of the outer optimizer."""
        store, count = state.store, lax.axis_size(self.axis_name)
        own = own_state(state).store.values
        gaps = {k: (store.values[k] - own[k]) / count for k in state.local["values"]}
        gradient, residuals = aggregate.reduce(store, gaps, self.axis_name)
        if self.outer is None:
            return {k: store.values[k] - g for k, g in gradient.items()}, residuals, ()
        updates, outer = self.outer.update(_tree(store, gradient), state.outer["state"], _tree(store, store.values))
        steps = dict(zip(sorted(gradient), jax.tree.leaves(updates), strict=True))
        return {k: (store.values[k] + u).astype(store.values[k].dtype) for k, u in steps.items()}, residuals, outer

    def with_initial_parts(self, state: TrainState, devices: tuple[Device, ...]) -> TrainState:
        """The state with the parts `local` and `outer`, as before the first round. Parts that it has stay."""
        store = state.store
        _check_store(store)
        fresh = () if self.outer is None else jax.eval_shape(self.outer.init, _tree(store, store.values))
        if carries(state.local):
            if jax.tree.structure(fresh) != jax.tree.structure(state.outer["state"]):
                raise ValueError(
                    "train step: the state belongs to another outer_optimizer; end its round by that step's "
                    "finish(state), then go on from train.create_state(state.store, rng)"
                )
            return state
        keys = floating_keys([store.values[k] for k, _ in store.paths])
        local = {
            "values": {k: store.values[k] for k in keys},
            "updater_state": {k: store.updater_state[k] for k in keys},
            "optimizer_state": store.optimizer_state,
            "transform": state.transform,
        }
        outer = {
            "state": () if self.outer is None else self.outer.init(_tree(store, store.values)),
            "since": jnp.zeros((), jnp.int32),
        }
        leaves, structure = jax.tree.flatten(local)
        local = structure.unflatten(_copies(devices)(leaves))
        return dataclasses.replace(state, local=local, outer=everywhere(outer, store))


def check_local_steps(local_steps: Any, outer_optimizer: Any) -> None:
    """Check the two options of `make_train_step`."""
    if local_steps is None:
        if outer_optimizer is not None:
            raise ValueError("make_train_step: outer_optimizer goes with local_steps, which is None")
        return
    checks.whole_number(local_steps, "make_train_step", "local_steps")
    parts = (getattr(outer_optimizer, name, None) for name in ("init", "update"))
    if outer_optimizer is not None and not all(map(callable, parts)):
        raise TypeError(
            "make_train_step: outer_optimizer must be an optax.GradientTransformation or None, got "
            f"{checks.describe(outer_optimizer)}"
        )


def _check_store(store: KVStore) -> None:
    if is_split(store):
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
    """The state with this device's values, updater states and transform in place of the common ones."""
    store, local = state.store, state.local
    values = {k: own.reshape(store.values[k].shape) for k, own in local["values"].items()}
    states = {k: _like(store.updater_state[k], own) for k, own in local["updater_state"].items()}
    mine = dataclasses.replace(
        store,
        values={**store.values, **values},
        updater_state={**store.updater_state, **states},
        optimizer_state=_like(store.optimizer_state, local["optimizer_state"]),
    )
    return dataclasses.replace(state, store=mine, transform=_like(state.transform, local["transform"]))


def _like(like: Any, tree: Any) -> Any:
    """The arrays in the shapes of others, which have an axis of length 1 for the device, or have none."""
    return jax.tree.map(lambda old, new: new.reshape(old.shape), like, tree)


def _tree(store: KVStore, values: Arrays) -> Any:
    """The floating parameters as the user's pytree, with None for the others."""
    assert store.treedef is not None
    leaves = [store.values[k] for k, _ in store.paths]
    trained = set(floating_keys(leaves))
    return store.treedef.unflatten([values[k] if k in trained else None for k in range(len(leaves))])


@functools.lru_cache(maxsize=64)
def _copies(devices: tuple[Device, ...]) -> Any:
    """A compiled function that copies arrays along a new first axis, one copy for each device."""

    def copies(leaves: list[jax.Array]) -> list[jax.Array]:
        return [jnp.broadcast_to(x[None], (len(devices), *x.shape)) for x in leaves]

    return jax.jit(copies, out_shardings=split_over(devices))
