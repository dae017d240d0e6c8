"""One training step of one device, from top to bottom: gradient, sum over the devices, update, new state.

`DeviceStep.__call__` is the step, and `Gradient` the gradient of one share of the batch in it. The step runs on every
device alike, inside an axis that an engine of `programs` maps over them.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from ... import kv
from ..._core import checks
from ..._cpu import fast_loops
from ..._devices import collectives
from ..._devices.buckets import BucketLimits
from ..._devices.mesh import STORE_AXIS, mesh_of
from ..._store import aggregate, queue
from ..._store.aggregate import update
from ..._store.store import by_key, is_split, shapes_of, trained_keys, tree_of, with_changes
from .loss import Mean, call_loss, finish, model_state_mean, model_state_terms, over_microbatches, wide, widen
from .nonfinite import DynamicLossScale, Guard, nonfinite_flags
from .state import TrainState, carries, everywhere, trained_params

Arrays = dict[int, jax.Array]

END_OF_ROUND = "end the round with that step's finish(state), then continue with train.create_state(state.store, rng)"
_LIMITS = BucketLimits()  # of what is summed beside the gradients: metrics, model state, flags


class ShareResult(NamedTuple):
    """What one device computed for its share of the batch."""

    # The gradient of the share's loss for the key of each trained parameter, in its dtype. Of a loss `(sum, weight)` it
    # is the gradient of the sum.
    grads: Arrays
    metrics: dict[str, Any]  # `loss`, and `aux` of `loss_fn`. What came as `(sum, weight)` is a `Mean` of two scalars.
    model_state: Any  # the new one, or ()
    # The keys of parameters that the loss does not depend on. Their gradients are zeros.
    unread: frozenset[int] = frozenset()

    @property
    def weight(self) -> Any:
        """Of the loss. None: the loss is a mean, and all shares count alike."""
        loss = self.metrics["loss"]
        return loss.weight if isinstance(loss, Mean) else None


@dataclasses.dataclass(frozen=True)
class DeviceStep:
    """The step inside the mapped axis: `step(state, batch) -> (state, metrics)`."""

    gradient: Gradient  # computes the gradient of this device's share
    axis_name: str
    grad_transform: Any = None  # an optax transform of the summed gradients, or None
    scaling: float | DynamicLossScale | None = None  # the loss scale: None, a number, or a `DynamicLossScale`
    guard: Guard | None = None  # decides whether the update is made. None: always.
    unused: str = "warn"  # what happens to parameters that the loss does not depend on: "warn" or "skip"
    # Those that a warning has named, so that each is named once for all programs of a step.
    named: set[str] = dataclasses.field(default_factory=set, compare=False, repr=False)

    has_local_part: ClassVar[bool] = False  # whether it keeps the part `local` of a state

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        # The gradient of this device's share. It is divided before it is summed, so finite shares have a finite sum.
        params = kv.to_params(state.store, axis_name=self.axis_name)
        trained, scale = trained_keys(state.store), self._scale(state)
        share = self.gradient(params, trained, batch, self._rng(state), state.model_state, state.step, scale)
        shares = lax.axis_size(self.axis_name)
        whole = shares if share.weight is None else self._add(state, [share.weight])[0]
        grads = {k: divide(g, whole) for k, g in share.grads.items()}

        # The sum over the devices. With a staleness it is that of gradients from earlier steps.
        due, pending, ready = self._without_unused(state, share, grads), {}, None
        if state.store.staleness:
            due, pending, ready = queue.rotate_queue(state.store, due, one=True)
        summed, residuals = self._sum(state.store, due)
        metrics, model_state, found = self._mean_over_devices(state, share, grads, summed)

        # The update, and the new state.
        store, transform = self._apply(state, params, summed, residuals, ready, metrics["loss"])
        new = dataclasses.replace(
            state,
            store=dataclasses.replace(store, pending={**store.pending, **pending}),
            step=state.step + 1,
            transform=transform,
            model_state=model_state,
        )
        return (new, metrics) if self.guard is None else self.guard(state, new, metrics, found)

    def _rng(self, state: TrainState) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(state.rng, state.step), lax.axis_index(self.axis_name))

    def _scale(self, state: TrainState) -> Any:
        return state.loss_scale["scale"] if isinstance(self.scaling, DynamicLossScale) else self.scaling

    def _without_unused(self, state: TrainState, share: ShareResult, values: Arrays) -> Arrays:
        """The values of the parameters that are updated. A warning names those that the loss does not depend on."""
        if self.unused == "skip":
            return {k: v for k, v in values.items() if k not in share.unread}
        names = kv.names(state.store)
        unread = [names[k] for k in sorted(share.unread) if names[k] not in self.named]
        if unread:
            self.named.update(unread)
            warnings.warn(
                f"train step: the loss does not depend on {', '.join(map(repr, unread[:8]))}; "
                "the gradients are zeros, but the optimizer may still change the parameters, as weight decay does; "
                'make_train_step(unused="skip") keeps them unchanged',
                stacklevel=2,
            )
        return values

    def _sum(self, store: kv.KVStore, due: Arrays) -> tuple[Arrays, dict[int, Any]]:
        """The sums and the residuals. One device needs no collective, and XLA would keep it with its copies."""
        alone = lax.axis_size(self.axis_name) == 1 and not is_split(store)
        if alone and not aggregate.compressed_keys(store, due):
            return due, {}
        return aggregate.reduce(store, due, self.axis_name)

    def _mean_over_devices(
        self, state: TrainState, share: ShareResult, grads: Arrays, summed: Arrays
    ) -> tuple[dict[str, Any], Any, Any]:
        """The metrics and the model state as means over the devices, and the flags of what is not finite."""
        # All of them share one collective. To check what is pushed is enough unless there is a compressor.
        found = None
        if self.guard is not None:
            found = nonfinite_flags(share.metrics["loss"], grads, summed if state.store.compressor else {})
        shares = lax.axis_size(self.axis_name)
        of_state = model_state_terms(share.model_state, shares)
        terms, structure = jax.tree.flatten((widen(share.metrics), of_state, found))
        metrics, of_state, found = structure.unflatten(self._add(state, terms))
        return finish(metrics, shares), model_state_mean(share.model_state, of_state, shares), found

    def _add(self, state: TrainState, leaves: list[jax.Array]) -> list[jax.Array]:
        """The sums over the devices, by one collective for each dtype."""
        if lax.axis_size(self.axis_name) == 1:
            return leaves
        add = collectives.sum_apart if state.store.staleness else lax.psum
        return collectives.map_buckets(lambda x: add(x, self.axis_name), leaves, _LIMITS)

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

    def _transform(self, state: TrainState, params: Any, summed: Arrays) -> tuple[Arrays, Any]:
        """The summed gradients through `grad_transform`. Those of a sharded store are gathered for it."""
        tx, store = self.grad_transform, state.store
        if tx is None:
            return summed, state.transform
        params = tree_of(store, dict(enumerate(jax.tree.leaves(params))))
        whole = aggregate.gather(store, summed, self.axis_name)
        grads = {k: whole[k] if k in whole else jnp.zeros_like(x) for k, x in by_key(store, params).items()}
        before, fresh = state.transform, jax.eval_shape(tx.init, params)
        if jax.tree.structure(before) != jax.tree.structure(fresh):
            if jax.tree.leaves(fresh):
                hint = "give the same one to train.create_state(store, rng, grad_transform=...)"
                raise ValueError(f"train step: the state was made for another grad_transform; {hint}")
            before = tx.init(params)  # without arrays, which a state has as ()
        updates, transform = tx.update(tree_of(store, grads), before, params)
        new = by_key(store, updates)
        parts = aggregate.own_parts(store, {k: new[k] for k in summed}, self.axis_name)
        return parts, transform if jax.tree.leaves(transform) else ()

    def apply_pending(self, state: TrainState) -> TrainState:
        """The state after all pending pushes of its store were applied, the oldest first."""
        for i in range(state.store.staleness):
            params = kv.to_params(state.store)
            pending, ready = queue.pending_at(state.store, i)
            due = {k: value.reshape(shapes_of(state.store)[k]) for k, value in pending.items()}
            store, transform = self._apply(state, params, *self._sum(state.store, due), ready, None)
            state = dataclasses.replace(state, store=store, transform=transform)
        empty = jax.tree.map(jnp.zeros_like, state.store.pending)
        return dataclasses.replace(state, store=dataclasses.replace(state.store, pending=empty))

    # What a program asks of a step before it runs.

    def on_platform(self, platform: str) -> Self:
        """The same step for a program of this platform's devices."""
        return dataclasses.replace(self, gradient=dataclasses.replace(self.gradient, platform=platform))

    def with_initial_parts(self, state: TrainState) -> TrainState:
        """The state, which is on its devices, with the parts that this step keeps in it. Parts that it has stay."""
        if carries(state.local) and not self.has_local_part:
            own = "the state has separate parameters for each device, from a step with local_steps"
            raise ValueError(f"train step: {own}; {END_OF_ROUND}")
        missing: dict[str, Any] = {}
        if self.grad_transform is not None and not carries(state.transform):
            params = trained_params(state.store)
            if jax.tree.leaves(jax.eval_shape(self.grad_transform.init, params)):
                missing["transform"] = self.grad_transform.init(params)
        if self.guard is not None and not carries(state.nonfinite):
            missing["nonfinite"] = self.guard.start(state.store)
        if isinstance(self.scaling, DynamicLossScale) and not carries(state.loss_scale):
            missing["loss_scale"] = self.scaling.start()
        return dataclasses.replace(state, **everywhere(missing, state.store)) if missing else state

    def spread(self, store: kv.KVStore) -> tuple[Mesh, tuple[str, ...]]:
        """The mesh of a store, and over which of its axes a batch is split."""
        return mesh_of(store.devices or ()), (STORE_AXIS,)

    def lay_out(self, batch: Any, devices: int, along: NamedSharding, axis: int = 0) -> Any:
        """The arrays of a batch in the rows that the devices take of it. `along` is their sharding."""
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
        problem = f"cannot be divided by {devices} devices"
        if n % devices == 0:
            problem = f"gives each of {devices} devices {n // devices} examples, which cannot be cut in "
            problem += f"accumulate={parts} microbatches"
        raise ValueError(f"train step: a batch of {n} {problem}; use a batch of {size}, or pad it")


@dataclasses.dataclass(frozen=True)
class Gradient:
    """How the gradient of a share is computed.

    The attributes are options of `make_train_step`, and the platform of the devices, which a program knows.
    """

    loss_fn: Callable[..., Any]
    accumulate: int = 1
    compute_dtype: Any = None
    remat: Any = False
    platform: str = ""

    def __call__(
        self, params: Any, trained: list[int], batch: Any, rng: Any, model_state: Any, step: Any, scale: Any
    ) -> ShareResult:
        """The gradient over the whole share, for the keys in `trained`.

        The loss is multiplied by `scale`, and the gradient divided by it.
        """
        read = dict.fromkeys(trained, False)  # whether the loss depends on a param, known when it is traced
        of = self._of_one if self.accumulate == 1 else self._of_many
        found = of(params, batch, rng, model_state, step, scale, read)
        grads = found.grads if scale is None else {k: divide(g, scale) for k, g in found.grads.items()}
        return found._replace(grads=grads, unread=frozenset(k for k in read if not read[k]))

    def _of_one(
        self, params: Any, batch: Any, rng: jax.Array, model_state: Any, step: Any, scale: Any, read: dict[int, bool]
    ) -> ShareResult:
        leaves, structure = jax.tree.flatten(params)
        batch = self._cast(batch)

        def loss(trained: list[jax.Array]) -> tuple[jax.Array, Any]:
            marked = {k: record_gradient_use(x, k, read) for k, x in zip(read, trained, strict=True)}
            merged = {**dict(enumerate(leaves)), **marked}
            whole = self._cast(structure.unflatten(list(merged.values())))
            metrics, new = self._call(whole, batch, rng, model_state, step)
            value = metrics["loss"]
            value = value.total if isinstance(value, Mean) else value.astype(wide(value))
            return value if scale is None else value * scale, (metrics, new)

        if self.remat is not False:
            loss = jax.checkpoint(loss, policy=None if self.remat is True else self.remat)
        (_, (metrics, new)), grads = jax.value_and_grad(loss, has_aux=True)([leaves[k] for k in read])
        return ShareResult(dict(zip(read, grads, strict=True)), metrics, new)

    def _of_many(
        self, params: Any, batch: Any, rng: jax.Array, model_state: Any, step: Any, scale: Any, read: dict[int, bool]
    ) -> ShareResult:
        """The mean over microbatches, or the sum of sums. They run one after the other, so memory holds the
        activations of one."""
        count, parts = self.accumulate, self._microbatches(batch)
        leaves = jax.tree.leaves(params)

        def add(carry: tuple[Arrays, Any], part: tuple[jax.Array, Any]) -> tuple[tuple[Arrays, Any], Any]:
            sums, model_state = carry
            i, batch = part
            found = self._of_one(params, batch, self._fold_in(rng, i), model_state, step, scale, read)
            sums = {k: total + found.grads[k].astype(total.dtype) for k, total in sums.items()}
            return (sums, found.model_state), found.metrics

        start = {k: jnp.zeros(leaves[k].shape, wide(leaves[k])) for k in read}
        (sums, model_state), metrics = lax.scan(add, (start, model_state), (jnp.arange(count), parts))
        divisor = 1 if isinstance(metrics["loss"], Mean) else count
        grads = {k: (total / divisor).astype(leaves[k].dtype) for k, total in sums.items()}
        return ShareResult(grads, over_microbatches(metrics, count), model_state)

    def _cast(self, tree: Any) -> Any:
        """The floating arrays in the dtype to compute in."""
        if self.compute_dtype is None:
            return tree
        return jax.tree.map(
            lambda x: x.astype(self.compute_dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
        )

    # What is otherwise for all shares at once, see `global_step`.

    def _call(self, params: Any, batch: Any, rng: Any, model_state: Any, step: Any) -> tuple[dict[str, Any], Any]:
        """(metrics, new model state). The loss among the metrics is what is differentiated."""
        loss = fast_loops(functools.partial(call_loss, self.loss_fn), self.platform)
        return loss(params, batch, rng, model_state, step)

    def _microbatches(self, batch: Any) -> Any:
        """The batch with a new first axis, that of the microbatches."""
        count = self.accumulate
        return jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), batch)

    def _fold_in(self, rng: jax.Array, i: Any) -> jax.Array:
        return jax.random.fold_in(rng, i)


def record_gradient_use(leaf: jax.Array, key: int, read: dict[int, bool]) -> jax.Array:
    """The leaf itself. `read` of its key becomes True when a gradient for it is traced."""

    @jax.custom_vjp
    def same(x: jax.Array) -> jax.Array:
        return x

    def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
        read[key] = True
        return (cotangent,)

    same.defvjp(lambda x: (x, None), backward)
    return same(leaf)


def divide(grad: jax.Array, divisor: Any) -> jax.Array:
    """The gradient divided in float32 or wider, in its own dtype."""
    return (grad.astype(wide(grad)) / divisor).astype(grad.dtype)
