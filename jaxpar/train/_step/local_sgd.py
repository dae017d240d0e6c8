"""Local steps: every device makes updates of its own, then all agree on new parameters.

DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1). In a round, each device makes H updates of its own copy
of the parameters with an inner optimizer, the store's updater, whose state it keeps. The store holds the parameters at
the start of the round. The mean over the devices of their difference is the gradient of an outer optimizer, and is
pushed as any other. The next round starts from its result. Without an outer optimizer the parameters are averaged,
which is local SGD (Stich 2018, arXiv 1805.09767).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from ..._core.arrays import PyTree, Tree
from ..._core.text import plural
from ..._devices.mesh import put_copy, split_over
from ..._store import aggregate
from ..._store.store import by_key, is_in_rows, sharding_of, trained_keys, tree_of, with_changes
from ...kv import KVStore
from .loss import Batch, Mean, Metrics, with_own_streams
from .state import TrainState, carries, whole_params
from .step import END_OF_ROUND, Arrays, DeviceStep, divide, shard_rng

if TYPE_CHECKING:
    import optax


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalSGD(DeviceStep):
    """The step of one device in a round of local steps."""

    steps: int  # H, the updates of a round
    outer: optax.GradientTransformation | None = None  # of the outer gradient. None averages.

    has_local_part = True

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        # The gradient of this device's shard, at its own parameters. No other device's gradient is added to it. A loss
        # that is a mean over what counts is divided by the mean weight, so that the mean over the devices is over what
        # counts.
        axis, local_state = self.axis_name, own_state(state)
        params = whole_params(local_state.store, axis)
        number = lax.axis_index(axis)
        model_state = with_own_streams(state.model_state, number)
        shard = self.gradient(state, params, batch, shard_rng(state, number), model_state)
        grads, loss = shard.grads, shard.metrics["loss"]
        if isinstance(loss, Mean):
            weight = self.add_up(state, [loss.weight])[0] / lax.axis_size(axis)
            grads, loss = {k: divide(g, weight) for k, g in grads.items()}, loss.total / weight

        # The update of its own parameters.
        updates, transform = grads, local_state.transform
        if self.grad_transform is not None:
            updates, transform = self.transform_gradients(self.grad_transform, local_state, params, grads)
        num_updates = aggregate.num_updates(local_state.store, updates)
        store = with_changes(local_state.store, aggregate.update(local_state.store, updates, num_updates, loss))

        # Metrics and model state are those of all devices, at every step: a guard decides by the metrics for all of
        # them, and running statistics that part could not be put together again.
        metrics, model_state, flags = self.mean_over_devices(state, shard, grads, {})
        recorded = self.recorded(local_state.store, store, grads)
        recorded = lax.pmean(recorded, axis) if recorded else {}

        # The end of a round.
        local = _reshape_as(state.local, _local_part(store, list(state.local["values"]), transform))
        since = state.outer["since"] + 1
        new = dataclasses.replace(state, local=local, outer={**state.outer, "since": since})
        new = self._end_round(new, since == self.steps)
        new = dataclasses.replace(new, step=state.step + 1, model_state=model_state)

        return self.finish_step(state, new, metrics, flags, recorded)

    def apply_pending(self, state: TrainState) -> TrainState:
        """The state after the unfinished round was ended early."""
        return self._end_round(state, state.outer["since"] > 0)

    def _end_round(self, state: TrainState, is_over: jax.Array) -> TrainState:
        """The state after the devices agreed, if the round `is_over`, which must be the same on all of them."""
        keys = list(state.local["values"])

        # The mean over the devices of (start of the round - own parameters) is pushed as the gradient of the outer
        # optimizer. Without one it is subtracted, which averages the parameters. The round that comes starts from the
        # result on all devices.
        # It is divided before it is summed, as a gradient is.
        def agree(state: TrainState) -> tuple[Arrays, dict[int, PyTree], PyTree, PyTree]:
            store, count = state.store, lax.axis_size(self.axis_name)
            values = own_state(state).store.values  # of this device
            changes = {k: (store.values[k] - values[k]) / count for k in keys}
            gradient, residuals = aggregate.reduce(store, changes, self.axis_name)
            # A change is (start - end), the direction of a gradient, so an outer optimizer subtracts it.
            if self.outer is None:
                new, outer = {k: store.values[k] - g for k, g in gradient.items()}, ()
            else:
                params = tree_of(store, store.values)
                updates, outer = self.outer.update(tree_of(store, gradient), state.outer["state"], params)
                by_keys = by_key(store, updates)
                new = {k: (store.values[k] + u).astype(store.values[k].dtype) for k, u in by_keys.items()}
            local = {**state.local, "values": _reshape_as(state.local["values"], new)}
            return new, residuals, {"state": outer, "since": jnp.zeros_like(state.outer["since"])}, local

        def go_on(state: TrainState) -> tuple[Arrays, dict[int, PyTree], PyTree, PyTree]:
            store = state.store
            compressed = sorted(aggregate.compressed_keys(store, keys))
            residuals = aggregate.held_residuals(store, compressed, self.axis_name)
            return {k: store.values[k] for k in keys}, residuals, state.outer, state.local

        # A branch, so that the devices send nothing within a round. All take the same one, or they would wait forever.
        # The name is what pictures call it.
        what = "mean of params" if self.outer is None else "outer update"
        with jax.named_scope(f"{what} every {plural(self.steps, 'step')}"):
            values, residuals, outer, local = lax.cond(is_over, agree, go_on, state)
        store = dataclasses.replace(
            state.store, values={**state.store.values, **values}, residuals={**state.store.residuals, **residuals}
        )
        return dataclasses.replace(state, store=store, outer=outer, local=local)

    def with_initial_parts(self, state: TrainState) -> TrainState:
        """The state with the parts `local` and `outer`, as before the first round. Parts that it has stay."""
        state = super().with_initial_parts(state)
        store = state.store
        if is_in_rows(store) or store.staleness:
            raise ValueError(
                f"train step: local_steps needs all params on each device and no delay; this store has kind "
                f"{store.kind!r} and staleness {store.staleness}; use kind 'device' or 'dist_sync', and staleness=0"
            )
        params = tree_of(store, store.values)
        init = self.outer.init if self.outer is not None else lambda params: ()
        if carries(state.local):
            if jax.tree.structure(jax.eval_shape(init, params)) != jax.tree.structure(state.outer["state"]):
                raise ValueError(f"train step: the state belongs to another outer_optimizer; {END_OF_ROUND}")
            return state
        outer = {"state": init(params), "since": jnp.zeros((), jnp.int32)}
        devices = store.devices or ()

        def copies(local: PyTree) -> PyTree:
            """One copy for each device, along a new first axis."""
            return jax.tree.map(lambda x: jnp.broadcast_to(x[None], (len(devices), *x.shape)), local)

        # As a program, so that no device holds the copies of the others.
        local = _local_part(store, trained_keys(store), state.transform)
        local = jax.jit(copies, out_shardings=split_over(devices))(local)
        return dataclasses.replace(state, local=local, outer=put_copy(outer, sharding_of(store)))


def _local_part(store: KVStore, keys: list[int], transform: PyTree) -> dict[str, PyTree]:
    """The part `local` of a state, out of a store with the values of a device."""
    return {
        "values": {k: store.values[k] for k in keys},
        "updater_state": {k: store.updater_state[k] for k in keys},
        "optimizer_state": store.optimizer_state,
        "transform": transform,
    }


def own_state(state: TrainState) -> TrainState:
    """The state with this device's values, updater states and transform in place of the common ones."""
    store = state.store
    local = _reshape_as(_local_part(store, list(state.local["values"]), state.transform), state.local)
    store = dataclasses.replace(
        store,
        values={**store.values, **local["values"]},
        updater_state={**store.updater_state, **local["updater_state"]},
        optimizer_state=local["optimizer_state"],
    )
    return dataclasses.replace(state, store=store, transform=local["transform"])


def _reshape_as(template: Tree, tree: Tree) -> Tree:
    """The arrays in the shapes of others, which have an axis of length 1 for the device, or have none."""
    return jax.tree.map(lambda old, new: new.reshape(old.shape), template, tree)
