"""One training step, from top to bottom: gradient, sum over the devices, update, new state.

`DeviceStep` runs on every device alike, inside an axis that an engine of `programs` maps over them. `GlobalStep` is of
whole arrays, for a compiler that spreads it over a mesh by their shardings. There `loss_fn` sees what it sees under the
other engines: one share of the batch, with an `rng` and a model state of its own. The shares are mapped by `vmap`, each
on its part of the mesh. So batch norm, dropout and collectives over the axis mean the same everywhere.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ... import kv
from ..._core.arrays import is_prng_key, without_keys
from ..._cpu import fast_loops
from ..._devices import collectives
from ..._devices.mesh import put_copy
from ..._store import aggregate, queue, store as stores
from .loss import (
    Mean,
    call_loss,
    finish,
    model_state_mean,
    model_state_terms,
    over_microbatches,
    widen,
    with_own_streams,
)
from .nonfinite import DynamicLossScale, Guard, nonfinite_flags
from .state import TrainState, carries, trained_params, whole_params

Arrays = dict[int, jax.Array]

END_OF_ROUND = "end the round with that step's finish(state), then continue with train.create_state(state.store, rng)"
_LIMITS = collectives.BucketLimits()  # of what is summed beside the gradients: metrics, model state, flags


class ShareResult(NamedTuple):
    """What one device computed for its share of the batch."""

    # The gradient of the share's loss for the key of each trained parameter, in its dtype. Of a loss `(sum, weight)` it
    # is the gradient of the sum.
    grads: Arrays
    # `loss`, and `aux` of `loss_fn`. What came as `(sum, weight)` is a `Mean` of two scalars. If the loss is none, all
    # shares count alike.
    metrics: dict[str, Any]
    model_state: Any  # the new one, or ()
    unread: frozenset[int] = frozenset()  # the keys of gradients that are zeros, since the loss does not depend on them


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceStep:
    """The step inside the mapped axis. Attributes without a comment are as in `make_train_step`."""

    loss_fn: Callable[..., Any]
    axis_name: str
    accumulate: int = 1
    compute_dtype: Any = None
    remat: Any = False
    grad_transform: Any = None
    scaling: float | DynamicLossScale | None = None  # the loss scale
    guard: Guard | None = None  # decides whether the update is made. None: always.
    unused: str = "warn"
    platform: str = ""  # of the devices, which a program knows
    axes: tuple[str, ...] = ()  # of a mesh, which arrays of a batch have as first axes. For `GlobalStep` only.

    has_local_part: ClassVar[bool] = False  # whether it keeps the part `local` of a state

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        # The gradient of this device's share. It is divided before it is summed, so finite shares have a finite sum.
        params = whole_params(state.store, self.axis_name)
        number = lax.axis_index(self.axis_name)
        model_state = with_own_streams(state.model_state, number)
        share = self._gradient(state, params, batch, share_rng(state, number), model_state)
        loss = share.metrics["loss"]
        whole = self._add(state, [loss.weight])[0] if isinstance(loss, Mean) else lax.axis_size(self.axis_name)
        grads = {k: divide(g, whole) for k, g in share.grads.items()}

        # The sum over the devices. With a staleness it is that of gradients from earlier steps.
        due, pending, ready = grads, {}, None
        if state.store.staleness:
            due, pending, ready = queue.rotate_queue(state.store, grads, one=True)
        zeros = frozenset() if state.store.staleness else share.unread  # of a late push it is not known
        summed, residuals = self._sum(state.store, due, zeros)
        metrics, model_state, found = self._mean_over_devices(state, share, grads, summed)

        # The update, and the new state.
        store, transform = self._apply(state, params, summed, residuals, ready, metrics["loss"])
        store = dataclasses.replace(store, pending={**store.pending, **pending})
        return self._next(state, metrics, found, store=store, transform=transform, model_state=model_state)

    def _next(
        self, state: TrainState, metrics: dict[str, Any], found: Any, **changes: Any
    ) -> tuple[TrainState, dict[str, Any]]:
        """The state after a step that changes these parts, or what the guard makes of it."""
        new = dataclasses.replace(state, step=state.step + 1, **changes)
        return (new, metrics) if self.guard is None else self.guard(state, new, metrics, found)

    # The gradient of one share of the batch.

    def _gradient(self, state: TrainState, params: Any, batch: Any, rng: Any, model_state: Any) -> ShareResult:
        """The gradient over a whole share, for the keys of the params to update."""
        leaves, structure = jax.tree.flatten(params)
        scale = state.loss_scale["scale"] if isinstance(self.scaling, DynamicLossScale) else self.scaling
        keys = stores.trained_keys(state.store)
        read: set[int] = set()  # the keys of the params that the loss depends on, known when it is traced

        def of_batch(batch: Any, rng: Any, model_state: Any) -> ShareResult:
            batch = self._cast(batch)

            def loss(trained: list[jax.Array]) -> tuple[jax.Array, Any]:
                merged = list(leaves)
                for k, x in zip(keys, trained, strict=True):
                    merged[k] = marked_as_read(functools.partial(read.add, k), x)
                whole = self._cast(structure.unflatten(merged))
                metrics, new = self._call(whole, batch, rng, model_state, state.step)
                value = metrics["loss"]
                value = value.total if isinstance(value, Mean) else widen(value)
                return value if scale is None else value * scale, (metrics, new)

            if self.remat is not False:
                loss = jax.checkpoint(loss, policy=None if self.remat is True else self.remat)
            (_, (metrics, new)), grads = jax.value_and_grad(loss, has_aux=True)([leaves[k] for k in keys])
            return ShareResult(dict(zip(keys, grads, strict=True)), metrics, new)

        if self.accumulate == 1:
            found = of_batch(batch, rng, model_state)
        else:
            found = self._over_microbatches(of_batch, {k: leaves[k] for k in keys}, batch, rng, model_state)
        grads = found.grads if scale is None else {k: divide(g, scale) for k, g in found.grads.items()}
        unread = frozenset(grads) - read
        if self.unused == "skip":
            return found._replace(grads={k: g for k, g in grads.items() if k in read})
        if unread:
            _warn_of_unread([name for k, name in state.store.paths if k in unread])
        return found._replace(grads=grads, unread=unread)

    def _over_microbatches(
        self, of_batch: Callable[..., ShareResult], like: Arrays, batch: Any, rng: Any, model_state: Any
    ) -> ShareResult:
        """The mean of what `of_batch` gives for each microbatch, or the sum of sums. `like` are the trained params."""
        # They run one after the other, so memory holds the activations of one.
        at, count = len(self.axes), self.accumulate

        def cut(x: jax.Array) -> jax.Array:
            return jnp.moveaxis(x.reshape(*x.shape[:at], count, x.shape[at] // count, *x.shape[at + 1 :]), at, 0)

        def add(carry: tuple[Arrays, Any], part: tuple[jax.Array, Any]) -> tuple[tuple[Arrays, Any], Any]:
            sums, model_state = carry
            i, batch = part
            own = self._over_shares(lambda key: jax.random.fold_in(key, i))(rng)
            found = of_batch(batch, own, model_state)
            sums = {k: total + found.grads[k].astype(total.dtype) for k, total in sums.items()}
            return (sums, found.model_state), found.metrics

        start = {k: widen(jnp.zeros_like(x)) for k, x in like.items()}
        parts = jnp.arange(count), jax.tree.map(cut, batch)
        (sums, model_state), metrics = lax.scan(add, (start, model_state), parts)
        divisor = 1 if isinstance(metrics["loss"], Mean) else count
        grads = {k: (total / divisor).astype(like[k].dtype) for k, total in sums.items()}
        return ShareResult(grads, over_microbatches(metrics, count), model_state)

    def _cast(self, tree: Any) -> Any:
        """The floating arrays in the dtype to compute in."""
        if self.compute_dtype is None:
            return tree
        return jax.tree.map(
            lambda x: x.astype(self.compute_dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
        )

    def _over_shares(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` for every share, each on its part of the mesh. Without `axes` there is one share."""
        for name in reversed(self.axes):
            fn = jax.vmap(fn, axis_name=name, spmd_axis_name=name)
        return fn

    def _call(self, params: Any, batch: Any, rng: Any, model_state: Any, step: Any) -> tuple[dict[str, Any], Any]:
        """(metrics, new model state). The loss among the metrics is what is differentiated."""
        loss = fast_loops(functools.partial(call_loss, self.loss_fn), self.platform)
        try:
            return loss(params, batch, rng, model_state, step)
        except NameError as error:
            if "unbound axis name" not in str(error):
                raise
            own = " and ".join(map(repr, self.axes or (self.axis_name,)))
            said = str(error).partition(". ")[0]
            raise NameError(f"train step: loss_fn: {said}; this step has {own}, which axis_name= changes") from error

    # From the gradients of all devices to the update.

    def _sum(
        self, store: kv.KVStore, due: Arrays, zeros: frozenset[int] = frozenset()
    ) -> tuple[Arrays, dict[int, Any]]:
        """The sums and the residuals. The gradients of the keys in `zeros` are zeros, which are not sent."""
        # One device needs no collective, and XLA would keep it with its copies.
        alone = lax.axis_size(self.axis_name) == 1 and not stores.is_in_rows(store)
        if alone and not aggregate.compressed_keys(store, due):
            return due, {}
        sums, residuals = aggregate.reduce(store, {k: g for k, g in due.items() if k not in zeros}, self.axis_name)
        if zeros:
            sums |= aggregate.own_parts(store, {k: due[k] for k in zeros}, self.axis_name)
        return sums, residuals

    def _mean_over_devices(
        self, state: TrainState, share: ShareResult, grads: Arrays, summed: Arrays
    ) -> tuple[dict[str, Any], Any, Any]:
        """The metrics and the model state as means over the devices, and the flags of what is not finite."""
        # All of them share one collective. To check what is pushed is enough unless there is a compressor.
        found = None
        if self.guard is not None:
            loss, sums = share.metrics["loss"], summed if state.store.compressor else {}
            found = nonfinite_flags(state.store, loss, grads, sums)
        shares = lax.axis_size(self.axis_name)
        of_state = model_state_terms(share.model_state, shares)
        # Random keys are those of the first share: the sum of its own and of zeros.
        plain, with_keys = without_keys([x for x in jax.tree.leaves(share.model_state) if is_prng_key(x)])
        keys = [jnp.where(lax.axis_index(self.axis_name) == 0, x, jnp.zeros_like(x)) for x in plain]
        terms, structure = jax.tree.flatten((jax.tree.map(widen, share.metrics), of_state, found, keys))
        metrics, of_state, found, keys = structure.unflatten(self._add(state, terms))
        first = iter(with_keys(keys))
        model_state = jax.tree.map(lambda x: next(first) if is_prng_key(x) else x, share.model_state)
        return finish(metrics, shares), model_state_mean(model_state, of_state, shares), found

    def _add(self, state: TrainState, leaves: list[jax.Array]) -> list[jax.Array]:
        """The sums over the devices, by one collective for each dtype."""
        if lax.axis_size(self.axis_name) == 1:
            return leaves
        add = collectives.sum_apart if state.store.staleness else lax.psum
        return collectives.allreduce(leaves, self.axis_name, _LIMITS, add)

    def _apply(
        self, state: TrainState, params: Any, summed: Arrays, residuals: Any, ready: Arrays | None, loss: Any
    ) -> tuple[kv.KVStore, Any]:
        """The store and the transform's state after the update by these sums, unchanged where not `ready`."""
        transform = state.transform
        if self.grad_transform is not None:
            summed, transform = self._transform(state, params, summed)
        num_updates = aggregate.num_updates(state.store, summed, ready)
        changes = aggregate.update(state.store, summed, num_updates, loss)._replace(residuals=residuals)
        if ready is not None:
            changes = queue.where_ready(state.store, changes, ready, {}, self.axis_name)
            if jax.tree.leaves(transform):
                transform = queue.select(jnp.stack(list(ready.values())).any(), transform, state.transform)
        return stores.with_changes(state.store, changes), transform

    def _transform(self, state: TrainState, params: Any, summed: Arrays) -> tuple[Arrays, Any]:
        """The summed gradients through `grad_transform`. Those of a sharded store are gathered for it."""
        tx, store = self.grad_transform, state.store
        params = stores.tree_of(store, dict(enumerate(jax.tree.leaves(params))))
        whole = aggregate.gather(store, summed, self.axis_name)
        grads = {k: whole[k] if k in whole else jnp.zeros_like(x) for k, x in stores.by_key(store, params).items()}
        before, fresh = state.transform, jax.eval_shape(tx.init, params)
        if jax.tree.structure(before) != jax.tree.structure(fresh):
            if jax.tree.leaves(fresh):
                hint = "give the same one to train.create_state(store, rng, grad_transform=...)"
                raise ValueError(f"train step: the state was made for another grad_transform; {hint}")
            before = tx.init(params)  # without arrays, which a state has as ()
        updates, transform = tx.update(stores.tree_of(store, grads), before, params)
        new = stores.by_key(store, updates)
        parts = aggregate.own_parts(store, {k: new[k] for k in summed}, self.axis_name)
        return parts, transform if jax.tree.leaves(transform) else ()

    # The beginning and the end of training.

    def with_initial_parts(self, state: TrainState) -> TrainState:
        """The state, which is on its devices, with the parts that this step keeps in it. Parts that it has stay."""
        if carries(state.local) and not self.has_local_part:
            own = "the state has separate parameters for each device, from a step with local_steps"
            raise ValueError(f"train step: {own}; {END_OF_ROUND}")
        missing: dict[str, Any] = {}
        if self.grad_transform is not None and not carries(state.transform):
            transform = self.grad_transform.init(trained_params(state.store))
            if jax.tree.leaves(transform):
                missing["transform"] = transform
        if self.guard is not None and not carries(state.nonfinite):
            missing["nonfinite"] = self.guard.start(state.store)
        if isinstance(self.scaling, DynamicLossScale) and not carries(state.loss_scale):
            missing["loss_scale"] = self.scaling.start()
        return dataclasses.replace(state, **put_copy(missing, stores.sharding_of(state.store))) if missing else state

    def apply_pending(self, state: TrainState) -> TrainState:
        """The state after all pending pushes of its store were applied, the oldest first."""
        for i in range(state.store.staleness):
            params = whole_params(state.store, self.axis_name)
            pending, ready = queue.pending_at(state.store, i)
            due = {k: value.reshape(stores.shapes_of(state.store)[k]) for k, value in pending.items()}
            store, transform = self._apply(state, params, *self._sum(state.store, due), ready, None)
            state = dataclasses.replace(state, store=store, transform=transform)
        empty = jax.tree.map(jnp.zeros_like, state.store.pending)
        return dataclasses.replace(state, store=dataclasses.replace(state.store, pending=empty))


def share_rng(state: TrainState, number: Any) -> jax.Array:
    """The random key of a share of the batch in this step."""
    return jax.random.fold_in(jax.random.fold_in(state.rng, state.step), number)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def marked_as_read(mark: Callable[[], None], x: jax.Array) -> jax.Array:
    """The array itself. `mark` is called when a gradient for it is traced."""
    return x


def _mark(mark: Callable[[], None], _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    mark()
    return (cotangent,)


marked_as_read.defvjp(lambda mark, x: (x, None), _mark)


def _warn_of_unread(names: list[str]) -> None:
    """Name parameters that the loss does not depend on. Python shows it once for all programs."""
    warnings.warn(
        f"train step: the loss does not depend on {', '.join(map(repr, names[:8]))}; the gradients are zeros, but the "
        "optimizer may still change the parameters, as weight decay does; "
        f'train.start(frozen={names[:8]}) or unused="skip" keeps them unchanged',
        stacklevel=2,
    )


def divide(grad: jax.Array, divisor: Any) -> jax.Array:
    """The gradient divided in float32 or wider, in its own dtype."""
    return (widen(grad) / divisor).astype(grad.dtype)


# The step of all devices at once.


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlobalStep(DeviceStep):
    """The step of all devices: `step(state, batch) -> (state, metrics)`, of whole arrays."""

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        mesh, homes = stores.mesh_of_values(state.store), dict(state.store.shardings)
        count = math.prod(mesh.shape[name] for name in self.axes)

        # The gradient of the sum of the losses of all shares, divided afterwards. So a share has the cotangents that it
        # has under the other engines, and a rule of the backward pass that clips them gives the same numbers.
        params = whole_params(state.store, self.axis_name)
        shares = self._shares(state, batch, mesh)
        if self._may_overflow(state.store):
            total = self._gradient_of_each(state, params, *shares)
        else:
            total = self._gradient(state, params, *shares)
        loss = total.metrics["loss"]
        whole = loss.weight if isinstance(loss, Mean) else count
        grads = {k: divide(g, whole).astype(state.store.values[k].dtype) for k, g in total.grads.items()}
        grads = {k: lax.with_sharding_constraint(g, homes[k]) for k, g in grads.items()}
        metrics = finish(total.metrics, count)

        # The update, and the new state. Leaves of the model state that have no mean are those of the first share.
        store, transform = self._apply(state, params, grads, {}, None, metrics["loss"])
        axes = tuple(range(len(self.axes)))
        sums = [tuple(x.sum(axes) for x in terms) for terms in model_state_terms(total.model_state, count)]
        first = jax.tree.map(lambda x: x[(0,) * len(axes)], total.model_state)
        model_state = model_state_mean(first, sums, count)
        found = None if self.guard is None else nonfinite_flags(state.store, metrics["loss"], grads, {})
        return self._next(state, metrics, found, store=store, transform=transform, model_state=model_state)

    def _may_overflow(self, store: kv.KVStore) -> bool:
        """Whether gradients are of float16, in which a sum of what fits may not fit. Then the guard decides by it."""
        if self.scaling is not None:  # for the float16 of a loss_fn that casts by itself too
            return True
        dtypes = [self.compute_dtype, *(store.values[k].dtype for k in stores.trained_keys(store))]
        return any(dtype is not None and jnp.dtype(dtype) == jnp.float16 for dtype in dtypes)

    # Batch, `rng` and model state have a first axis for each name in `axes`, of the lengths of the mesh.

    def _gradient_of_each(self, state: TrainState, params: Any, *shares: Any) -> ShareResult:
        """As `_gradient`, by a gradient for each share, which are added up in float32 or wider.

        A device holds the whole gradient of its share then, also where the params are split. Else the compiler adds up
        the shares wherever a product of the backward pass does, in the dtype of that product.
        """
        one, axes = dataclasses.replace(self, axes=()), tuple(range(len(self.axes)))
        unread: list[frozenset[int]] = []

        def of_share(*share: Any) -> Any:
            grads, metrics, model_state, keys = one._gradient(state, params, *share)
            unread.append(keys)
            return jax.tree.map(widen, (grads, metrics)), model_state

        (grads, metrics), model_state = self._over_shares(of_share)(*shares)
        grads, metrics = jax.tree.map(lambda x: x.sum(axes), (grads, metrics))
        return ShareResult(grads, metrics, model_state, unread[0])

    def _shares(self, state: TrainState, batch: Any, mesh: Mesh) -> tuple[Any, Any, Any]:
        """Batch, `rng` and model state of all shares."""
        sizes = tuple(mesh.shape[name] for name in self.axes)
        count = math.prod(sizes)
        along = NamedSharding(mesh, P(*self.axes))

        def split(x: jax.Array) -> jax.Array:
            return lax.with_sharding_constraint(x.reshape(*sizes, x.shape[0] // count, *x.shape[1:]), along)

        own = jax.vmap(lambda i: (share_rng(state, i), with_own_streams(state.model_state, i)))(jnp.arange(count))
        rngs, model_state = jax.tree.map(lambda x: x.reshape(*sizes, *x.shape[1:]), own)
        return jax.tree.map(split, batch), rngs, model_state

    def _call(self, params: Any, batch: Any, rng: Any, model_state: Any, step: Any) -> tuple[dict[str, Any], Any]:
        def of_share(batch: Any, rng: Any, model_state: Any) -> Any:
            return super(GlobalStep, self)._call(params, batch, rng, model_state, step)

        try:
            metrics, new = self._over_shares(of_share)(batch, rng, model_state)
        except ValueError as error:  # JAX's, for a constraint that names an axis of the batch
            if "spmd_axis_name" not in str(error):
                raise
            spec = str(error).rpartition("got spec ")[2]
            raise ValueError(
                f"train step: loss_fn constrains an array to {spec}, but the step already splits the batch over "
                f"{', '.join(map(repr, self.axes))}, and loss_fn sees one share; write None in place of these axes"
            ) from error
        first = tuple(range(len(self.axes)))
        return jax.tree.map(lambda x: widen(x).sum(first), metrics), new

    def with_initial_parts(self, state: TrainState) -> TrainState:
        check_axes(self.axes, stores.mesh_of_values(state.store), "train step")
        return super().with_initial_parts(state)


def check_axes(axes: tuple[str, ...], mesh: Mesh, where: str) -> None:
    """`ValueError` unless the axes that a batch is split over are axes of the mesh."""
    for name in axes:
        if name not in mesh.axis_names:
            known = ", ".join(mesh.axis_names)
            raise ValueError(f"{where}: axis_name={name!r}: the mesh has no such axis; its axes are {known}")
