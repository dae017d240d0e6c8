"""The step of one device: gradient, push, updater, and whether the update is made."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from ... import kv
from ..._core import checks
from ..._core.arrays import Device
from ..._devices import buckets, collectives
from ..._devices.mesh import STORE_AXIS, mesh_of
from ..._store import aggregate, queue
from ..._store.store import is_split, with_changes
from ..._store.update import update
from . import means, nonfinite
from .gradient import Gradient, StepResult, divide, floating_keys
from .state import TrainState, carries, with_gradients

Arrays = dict[int, jax.Array]


@dataclasses.dataclass(frozen=True)
class DeviceStep:
    """The step inside the mapped axis: `step(state, batch) -> (state, metrics)`.

    Attributes:
        gradient: computes the gradient of this device's share.
        axis_name: the axis.
        grad_transform: an optax transform of the summed gradients, or None.
        scaling: the loss scale: None, a number, or a `DynamicLossScale`.
        guard: decides whether the update is made. None: always.
        unused: what happens to parameters that the loss does not depend on: "warn" or "skip".
        named: those that a warning has named, so that each is named once for all programs of a step.
    """

    gradient: Gradient
    axis_name: str
    grad_transform: Any = None
    scaling: float | nonfinite.DynamicLossScale | None = None
    guard: nonfinite.Guard | None = None
    unused: str = "warn"
    named: set[str] = dataclasses.field(default_factory=set, compare=False, repr=False)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        params = kv.to_params(state.store, axis_name=self.axis_name)
        own = self.gradient(params, batch, self._rng(state), state.model_state, state.step, self._scale(state))
        divisor = self._divisor(state, own)
        pushed = {k: divide(g, divisor) for k, g in own.grads.items()}
        due, pending, ready = self._without_unused(state, own, pushed), {}, None
        if state.store.staleness:
            due, pending, ready = queue.rotate_queue(state.store, due, one=True)
        summed, residuals = self._sum(state.store, due)
        metrics, model_state, found = self._mean_over_devices(state, own, pushed, summed)
        store, transform = self._apply(state, params, summed, residuals, ready, metrics["loss"])
        new = dataclasses.replace(
            state,
            store=dataclasses.replace(store, pending={**store.pending, **pending}),
            step=state.step + 1,
            transform=transform,
            model_state=model_state,
        )
        return (new, metrics) if self.guard is None else self.guard(state, new, metrics, found)

    def spread(self, store: kv.KVStore) -> tuple[Mesh, tuple[str, ...]]:
        """The mesh of a store, and over which of its axes a batch is split."""
        return mesh_of(store.devices or ()), (STORE_AXIS,)

    def lay_out(self, batch: Any, devices: int, along: NamedSharding, axis: int = 0) -> Any:
        """The arrays of a batch in the rows that the devices take of it. `along` is their sharding."""
        del devices, along, axis
        return batch

    def check_batch(self, batch: Any, devices: int, axis: int = 0) -> None:
        """`ValueError` where a batch cannot be divided by the devices, or a share by the microbatches.

        `TypeError` for a leaf that is no array of numbers.
        """
        checks.arrays_of_numbers(batch, "train step: batch")
        n, parts = checks.batch_length(batch, "train step", axis), self.gradient.accumulate
        if parts == 1:
            checks.even_share(n, devices, "train step", ", or pad it")
        if n % (devices * parts) == 0:
            return
        size = n // (devices * parts) * devices * parts or devices * parts
        if n % devices:
            raise ValueError(
                f"train step: a batch of {n} cannot be divided by {devices} devices; use a batch of {size}, or pad it"
            )
        raise ValueError(
            f"train step: a batch of {n} gives each of {devices} devices {n // devices} examples, which cannot be cut "
            f"in accumulate={parts} microbatches; use a batch of {size}"
        )

    def with_initial_parts(self, state: TrainState, devices: tuple[Device, ...]) -> TrainState:
        """The state, which is on the devices, with the parts that only this kind of step has."""
        del devices
        if carries(state.local):
            raise ValueError(
                "train step: the state holds the own parameters of each device, as a step with local_steps leaves it; "
                "end the round by that step's finish(state), then go on from train.create_state(state.store, rng)"
            )
        return state

    def missing_parts(self, state: TrainState) -> dict[str, Any]:
        """The parts that this step keeps and the state has not, as before the first step."""
        missing: dict[str, Any] = {}
        if self.grad_transform is not None and not carries(state.transform):
            params = with_gradients(kv.to_params(state.store))
            if jax.tree.leaves(jax.eval_shape(self.grad_transform.init, params)):
                missing["transform"] = self.grad_transform.init(params)
        if self.guard is not None and not carries(state.nonfinite):
            missing["nonfinite"] = self.guard.start(state.store)
        if isinstance(self.scaling, nonfinite.DynamicLossScale) and not carries(state.loss_scale):
            missing["loss_scale"] = self.scaling.start()
        return missing

    def apply_pending(self, state: TrainState) -> TrainState:
        """The state after all pending pushes of its store were applied, the oldest first."""
        for i in range(state.store.staleness):
            params = kv.to_params(state.store)
            lists, ready = queue.pending_at(state.store, i, self.axis_name)
            due = {k: value for k, (value,) in lists.items()}
            store, transform = self._apply(state, params, *self._sum(state.store, due), ready, None)
            state = dataclasses.replace(state, store=store, transform=transform)
        empty = jax.tree.map(jnp.zeros_like, state.store.pending)
        return dataclasses.replace(state, store=dataclasses.replace(state.store, pending=empty))

    def _apply(
        self, state: TrainState, params: Any, summed: Arrays, residuals: Any, ready: Arrays | None, loss: Any
    ) -> tuple[kv.KVStore, Any]:
        """The store and the transform's state after the update by these sums, unchanged where not `ready`."""
        updates, transform = self._transform(state, params, summed)
        changes = update(state.store, updates, loss)._replace(residuals=residuals)
        if ready is not None:
            changes = queue.where_ready(state.store, changes, ready, {}, self.axis_name)
            if jax.tree.leaves(transform):
                transform = queue.select(jnp.stack(list(ready.values())).any(), transform, state.transform)
        return with_changes(state.store, changes), transform

    def _sum(self, store: kv.KVStore, due: Arrays) -> tuple[Arrays, dict[int, Any]]:
        """The sums and the residuals. One device needs no collective, and XLA would keep it with its copies."""
        alone = lax.axis_size(self.axis_name) == 1 and not is_split(store)
        if alone and not aggregate.compressed_keys(store, due):
            return due, {}
        return aggregate.reduce(store, due, self.axis_name)

    def _without_unused(self, state: TrainState, own: StepResult, values: Arrays) -> Arrays:
        """The values of the parameters that are updated. A warning names those that the loss does not depend on."""
        if self.unused == "skip":
            return {k: v for k, v in values.items() if k not in own.unread}
        names = kv.names(state.store)
        unread = [names[k] for k in sorted(own.unread) if names[k] not in self.named]
        if unread:
            self.named.update(unread)
            warnings.warn(
                f"train step: the loss does not depend on {', '.join(map(repr, unread[:8]))}; "
                "the gradients are zeros, and the optimizer may change the parameters all the same, as weight decay "
                'does; make_train_step(unused="skip") leaves them as they are',
                stacklevel=2,
            )
        return values

    def _rng(self, state: TrainState) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(state.rng, state.step), lax.axis_index(self.axis_name))

    def _scale(self, state: TrainState) -> Any:
        return state.loss_scale["scale"] if isinstance(self.scaling, nonfinite.DynamicLossScale) else self.scaling

    def _divisor(self, state: TrainState, own: StepResult) -> Any:
        """What the sum of the gradients over the devices is divided by: their number, or the weight of all shares."""
        if own.weight is None:
            return lax.axis_size(self.axis_name)
        return self._add(state, [own.weight])[0]

    def _add(self, state: TrainState, leaves: list[jax.Array]) -> list[jax.Array]:
        """The sums over the devices, by one collective for each dtype."""
        if lax.axis_size(self.axis_name) == 1:
            return leaves
        add = collectives.sum_apart if state.store.staleness else lax.psum
        return collectives.map_buckets(lambda x: add(x, self.axis_name), leaves, buckets.BucketLimits())

    def _mean_over_devices(
        self, state: TrainState, own: StepResult, pushed: Arrays, summed: Arrays
    ) -> tuple[dict[str, Any], Any, Any]:
        """The metrics and the model state as means over the devices, and the flags of what is not finite.

        All of them share one collective. Each share is divided by the number of devices, so a sum of finite shares is
        finite, and to check what is pushed is enough unless there is a compressor.
        """
        found = None
        if self.guard is not None:
            found = nonfinite.nonfinite_flags(own.metrics["loss"], pushed, summed if state.store.compressor else {})
        leaves, structure = jax.tree.flatten(own.model_state)
        count = lax.axis_size(self.axis_name)
        floating = [means.state_terms(x, count) for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]
        terms, whole = jax.tree.flatten((means.widen(own.metrics), floating, found))
        metrics, sums, found = whole.unflatten(self._add(state, terms))
        rest = iter(sums)
        leaves = [
            means.state_mean(next(rest), count, x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in leaves
        ]
        return means.finish(metrics, count), structure.unflatten(leaves), found

    def _transform(self, state: TrainState, params: Any, summed: Arrays) -> tuple[Arrays, Any]:
        """The summed gradients through `grad_transform`. Those of a sharded store are gathered for it."""
        if self.grad_transform is None:
            return summed, state.transform
        keys, store = list(summed), state.store
        whole = aggregate.gather(store, summed, self.axis_name)
        trained, params = floating_keys(jax.tree.leaves(params)), with_gradients(params)
        leaves, structure = jax.tree.flatten(params)
        grads = [whole[k] if k in whole else jnp.zeros_like(leaf) for k, leaf in zip(trained, leaves, strict=True)]
        updates, transform = self.grad_transform.update(
            structure.unflatten(grads), self._transform_state(state, params), params
        )
        new = dict(zip(trained, jax.tree.leaves(updates), strict=True))
        own = aggregate.own_parts(store, {k: new[k] for k in keys}, self.axis_name)
        return own, transform if jax.tree.leaves(transform) else ()

    def _transform_state(self, state: TrainState, params: Any) -> Any:
        fresh = jax.eval_shape(self.grad_transform.init, params)
        if jax.tree.structure(state.transform) == jax.tree.structure(fresh):
            return state.transform
        if jax.tree.leaves(fresh):
            raise ValueError(
                "train step: the state holds that of another grad_transform; make it again by "
                "train.create_state(store, rng, grad_transform=...)"
            )
        return self.grad_transform.init(params)
