"""One training step, from top to bottom: gradient of a shard, sum over the devices, update, guard.

`DeviceStep.__call__` is the step. It runs on every device alike, inside an axis that an engine of `programs` maps over
the devices. `definition` in tests/train/test_definition.py says the same on one device, without stores and sums.

`GlobalStep.__call__` is the same step of whole arrays, for a compiler that spreads it over a mesh by their shardings.
There `loss_fn` sees what it sees under the other engines: one shard of the batch, with an `rng` and a model state of
its own. The shards are mapped by `vmap`, each on its part of the mesh. So batch norm, dropout and collectives over the
axis mean the same everywhere.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jax.typing import DTypeLike

from ... import compression, kv, sparse, updaters
from ..._core import checks
from ..._core.arrays import PyTree, is_prng_key, without_keys
from ..._core.text import warn
from ..._cpu import fast_loops
from ..._devices import collectives
from ..._devices.mesh import put_copy
from ..._store import aggregate, queue, store as stores
from ...sparse import RowSparse
from . import lookups
from .loss import (
    Batch,
    Mean,
    Metrics,
    ShardMetrics,
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

if TYPE_CHECKING:
    import optax

Arrays = dict[int, jax.Array]  # by the keys of the store
Rows = Mapping[int, RowSparse]  # likewise

_NO_ROWS: dict[int, RowSparse] = {}  # a pytree, as the rows of a gradient are

END_OF_ROUND = "end the round with that step's finish(state), then continue with train.create_state(state.store, rng)"
_LIMITS = collectives.BucketLimits()  # of what is summed beside the gradients: metrics, model state, flags


class ShardGradient(NamedTuple):
    """What one device computes of its shard of the batch."""

    # The gradient of the shard's loss for the key of each trained parameter, in its dtype. Of a loss `(sum, weight)` it
    # is the gradient of the sum.
    grads: Arrays
    # `loss`, and `aux` of `loss_fn`. What came as `(sum, weight)` is a `Mean` of two scalars. If the loss is none, all
    # shards count alike.
    metrics: ShardMetrics
    model_state: PyTree  # the new one, or ()
    unread: frozenset[int] = frozenset()  # the keys of gradients that are zeros, since the loss does not depend on them
    rows: Rows = _NO_ROWS  # the gradients of row-sparse tables, which `grads` has not


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceStep:
    """The step inside the mapped axis. Attributes without a comment are as in `make_train_step`."""

    loss_fn: Callable[..., Any]
    axis_name: str
    accumulate: int = 1
    compute_dtype: DTypeLike | None = None
    remat: bool | Callable[..., Any] = False
    grad_transform: optax.GradientTransformation | None = None
    scaling: float | DynamicLossScale | None = None  # the loss scale
    guard: Guard | None = None  # decides whether the update is made. None: always.
    unused: str = "warn"
    row_sparse: tuple[str, ...] = ()  # patterns of names
    record: tuple[str, ...] = ()
    platform: str = ""  # of the devices, which a program knows
    axes: tuple[str, ...] = ()  # of a mesh, which arrays of a batch have as first axes. For `GlobalStep` only.

    has_local_part: ClassVar[bool] = False  # whether it keeps the part `local` of a state

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """`batch` is this device's shard, (examples / devices, ...). The state is one for all devices."""
        store, axis = state.store, self.axis_name

        # The loss and the gradient of this device's shard. It has a random key of its own, or all shards would drop the
        # same units, and draws of its own from the streams in a model state.
        params = whole_params(store, axis, self.tables(store))
        number = lax.axis_index(axis)
        model_state = with_own_streams(state.model_state, number)
        shard = self.gradient(state, params, batch, shard_rng(state, number), model_state)

        # The gradient is divided before it is summed, so that finite shards have a finite sum, also in float16: by the
        # number of shards, or by the weight of all of them, where the loss is a mean over what counts.
        loss = shard.metrics["loss"]
        divisor = self.add_up(state, [loss.weight])[0] if isinstance(loss, Mean) else lax.axis_size(axis)
        grads = {k: divide(g, divisor) for k, g in shard.grads.items()}
        rows = divide_rows(shard.rows, divisor)

        # The sum over the devices. With a staleness it is that of gradients from earlier steps, which wait in a queue
        # and need not wait for this step's backward pass. Which of those were zeros is not known any more.
        pushed, pending, ready, zeros = grads, {}, None, shard.unread
        if store.staleness:
            pushed, pending, ready = queue.rotate_queue(store, grads, of_one_device=True)
            zeros = frozenset[int]()
        summed, residuals = self.sum_gradients(store, pushed, zeros)
        pushed_rows = {k: r.values for k, r in rows.items()}
        metrics, model_state, flags = self.mean_over_devices(state, shard, grads | pushed_rows, summed)

        # The update by the store's optimizer.
        summed_rows = self.sum_rows(rows)
        store, transform = self.apply(state, params, summed, residuals, ready, metrics["loss"], summed_rows)
        store = dataclasses.replace(store, pending={**store.pending, **pending})
        recorded = self.recorded(state.store, store, summed, summed_rows)
        new = dataclasses.replace(state, step=state.step + 1, store=store, transform=transform, model_state=model_state)

        return self.finish_step(state, new, metrics, flags, recorded)

    def gradient(
        self, state: TrainState, params: PyTree, batch: Batch, rng: jax.Array, model_state: PyTree
    ) -> ShardGradient:
        """The loss and the gradient of a shard, for the keys of the params to update.

        With `axes` it is that of the sum over all shards, which batch, `rng` and model state have as first axes.
        """
        leaves, structure = jax.tree.flatten(params)
        tables = self.tables(state.store)
        if stores.is_in_rows(state.store):
            layouts = stores.rows_of(state.store)
            for k in tables:
                leaves[k] = lookups.Shards(leaves[k].reshape(-1), layouts[k].shape, self.axis_name)
        keys = stores.trained_keys(state.store)
        scale = state.loss_scale["scale"] if isinstance(self.scaling, DynamicLossScale) else self.scaling
        read: set[int] = set()  # the keys of the params that the loss depends on, known when it is traced

        # Labels and ids stay integers: in bfloat16 the ids above 256 would run together.
        def cast(tree: PyTree) -> PyTree:
            dtype = self.compute_dtype
            if dtype is None:
                return tree
            return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)

        # The gradient of one microbatch: of the loss, or of the sum in (sum, weight), times the loss scale. It is taken
        # of the params before the cast, so it has their dtype, and the store never holds a rounded one.
        def of_microbatch(batch: Batch, rng: jax.Array, model_state: PyTree) -> ShardGradient:
            batch = cast(batch)

            def scaled_loss(trained: list[jax.Array]) -> tuple[jax.Array, tuple[ShardMetrics, PyTree]]:
                with_frozen = list(leaves)
                for k, x in zip(keys, trained, strict=True):
                    with_frozen[k] = call_if_read(functools.partial(read.add, k), x)
                metrics, new_state = self.call_loss_fn(
                    cast(structure.unflatten(with_frozen)), batch, rng, model_state, state.step
                )
                loss = metrics["loss"]
                value = loss.total if isinstance(loss, Mean) else widen(loss)
                return value if scale is None else value * scale, (metrics, new_state)

            if self.remat:
                scaled_loss = jax.checkpoint(scaled_loss, policy=None if self.remat is True else self.remat)
            # Frozen params are no arguments, so no gradient is computed for them. The rows of tables are gathered from
            # the backward pass by a trace of their own.
            trained = [leaves[k] for k in keys]
            if not tables:
                (_, (metrics, new_state)), grads = jax.value_and_grad(scaled_loss, has_aux=True)(trained)
                return ShardGradient(dict(zip(keys, grads, strict=True)), metrics, new_state)
            names = {i: tables[k] for i, k in enumerate(keys) if k in tables}
            (_, (metrics, new_state)), grads = lookups.value_and_grad(scaled_loss, trained, names)
            by_key = dict(zip(keys, grads, strict=True))
            rows = {k: by_key.pop(k) for k in tables}
            return ShardGradient(by_key, metrics, new_state, rows={k: r for k, r in rows.items() if r is not None})

        # That of all microbatches is their mean, or the sum of sums. They run one after the other, so memory holds the
        # activations of one. The sums are in float32 or wider: the eight bits of a bfloat16 lose the later addends.
        if self.accumulate == 1:
            shard = of_microbatch(batch, rng, model_state)
        else:
            axis, count = len(self.axes), self.accumulate

            # (*axes, examples, ...) -> (microbatches, *axes, examples of one, ...), since `scan` takes the first axis.
            def cut(x: jax.Array) -> jax.Array:
                x = x.reshape(*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])
                return jnp.moveaxis(x, axis, 0)

            def add(
                sums_and_state: tuple[Arrays, PyTree], microbatch: tuple[jax.Array, Batch]
            ) -> tuple[tuple[Arrays, PyTree], tuple[ShardMetrics, Rows]]:
                sums, model_state = sums_and_state
                i, batch = microbatch
                keys_of_microbatch = self.map_shards(lambda key: jax.random.fold_in(key, i))(rng)
                gradient = of_microbatch(batch, keys_of_microbatch, model_state)
                sums = {k: total + gradient.grads[k].astype(total.dtype) for k, total in sums.items()}
                return (sums, gradient.model_state), (gradient.metrics, gradient.rows)

            zeros = {k: widen(jnp.zeros_like(leaves[k])) for k in keys if k not in tables}
            microbatches = jnp.arange(count), jax.tree.map(cut, batch)
            (sums, model_state), (metrics, stacks) = lax.scan(add, (zeros, model_state), microbatches)
            divisor = 1 if isinstance(metrics["loss"], Mean) else count
            grads = {k: (total / divisor).astype(leaves[k].dtype) for k, total in sums.items()}
            # The rows of all microbatches, one after the other.
            rows = {
                k: RowSparse(r.indices.reshape(-1), r.values.reshape(-1, *r.shape[1:]), r.shape)
                for k, r in stacks.items()
            }
            rows = divide_rows(rows, divisor)
            shard = ShardGradient(grads, over_microbatches(metrics, count), model_state, rows=rows)

        # Without the loss scale. Division of a power of two is exact, unless the quotient is subnormal.
        if scale is not None:
            grads = {k: divide(g, scale) for k, g in shard.grads.items()}
            shard = shard._replace(grads=grads, rows=divide_rows(shard.rows, scale))
        grads = shard.grads

        # Params that the loss does not depend on have no gradient, or zeros.
        unread = frozenset(grads) - read
        if self.unused != "skip" and (idle := [name for k, name in tables.items() if k not in shard.rows]):
            raise ValueError(f"train step: the loss looks up no rows of {idle}; leave them out of row_sparse=")
        if self.unused == "skip":
            return shard._replace(grads={k: g for k, g in grads.items() if k in read})
        if unread:
            names = [name for k, name in state.store.paths if k in unread]
            warn(  # Python shows it once for all programs
                f"train step: the loss does not depend on {', '.join(map(repr, names[:8]))}; the gradients are zeros, "
                "but the optimizer may still change the parameters, as weight decay does; "
                f'train.start(frozen={names[:8]}) or unused="skip" keeps them unchanged'
            )
        return shard._replace(grads=grads, unread=unread)

    def map_shards(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` for every shard, each on its part of the mesh. Without `axes` there is one shard."""
        # The last axis is the innermost `vmap`, so that the results have the axes in their order. `spmd_axis_name`
        # keeps what is constrained inside of `fn` split over these axes, which `vmap` alone would gather.
        for name in reversed(self.axes):
            fn = jax.vmap(fn, axis_name=name, spmd_axis_name=name)
        return fn

    def call_loss_fn(
        self, params: PyTree, batch: Batch, rng: jax.Array, model_state: PyTree, step: jax.Array
    ) -> tuple[ShardMetrics, PyTree]:
        """(metrics, new model state). With `axes` the metrics are the sums over all shards."""
        loss = fast_loops(functools.partial(call_loss, self.loss_fn), self.platform)

        def of_shard(batch: Batch, rng: jax.Array, model_state: PyTree) -> tuple[ShardMetrics, PyTree]:
            return loss(params, batch, rng, model_state, step)

        try:
            metrics, new_state = self.map_shards(of_shard)(batch, rng, model_state)
        except NameError as error:  # JAX's, which advises a `shard_map`, where this is one with another axis
            if "unbound axis name" not in str(error):
                raise
            names = " and ".join(map(repr, self.axes or (self.axis_name,)))
            fault = str(error).partition(". ")[0]
            raise NameError(f"train step: loss_fn: {fault}; this step has {names}, which axis_name= changes") from error
        except ValueError as error:  # JAX's, for a constraint that names an axis of the batch
            if not self.axes or "spmd_axis_name" not in str(error):
                raise
            spec = str(error).rpartition("got spec ")[2]
            raise ValueError(
                f"train step: loss_fn constrains an array to {spec}, but the step already splits the batch over "
                f"{', '.join(map(repr, self.axes))}, and loss_fn sees one share; write None in place of these axes"
            ) from error
        if self.axes:
            metrics = jax.tree.map(lambda x: widen(x).sum(tuple(range(len(self.axes)))), metrics)
        return metrics, new_state

    def sum_gradients(self, store: kv.KVStore, grads: Arrays, zeros: frozenset[int]) -> tuple[Arrays, dict[int, Any]]:
        """The sums over the devices, and the residuals. The gradients of `zeros` are zeros, which are not sent."""
        # One device needs no collective, and XLA would keep it with its copies. What a store compresses goes on: its
        # numbers are those of the codec on one device too.
        is_alone = lax.axis_size(self.axis_name) == 1 and not stores.is_in_rows(store)
        if is_alone and not aggregate.compressed_keys(store, grads):
            return grads, {}
        sums, residuals = aggregate.reduce(store, {k: g for k, g in grads.items() if k not in zeros}, self.axis_name)
        if zeros:
            sums |= aggregate.own_parts(store, {k: grads[k] for k in zeros}, self.axis_name)
        return sums, residuals

    def sum_rows(self, rows: Rows) -> Rows:
        """The sums over the devices of rows, sorted and unique. Devices send rows alone."""
        count = lax.axis_size(self.axis_name)

        # A program has fixed shapes, so there is room for rows that are all different. What is left over is padding.
        def total(rows: RowSparse) -> RowSparse:
            size = min(count * rows.indices.shape[0], rows.shape[0])
            if count == 1:
                return sparse.coalesce(rows, size=size)
            return sparse.allreduce(rows, self.axis_name, size=size)

        return {k: total(r) for k, r in rows.items()}

    def mean_over_devices(
        self, state: TrainState, shard: ShardGradient, grads: Arrays, summed: Arrays
    ) -> tuple[Metrics, PyTree, jax.Array | None]:
        """The metrics and the model state as means over the devices, and the flags of what is not finite.

        All of them share one collective.
        """
        # What is pushed is checked, not its sum: a compressor may make a zero of a NaN, or keep it in its residual. And
        # finite gradients that were divided have a finite sum, unless a compressor rounds them: bfloat16 may round up
        # to infinity.
        metrics, flags = shard.metrics, None
        if self.guard is not None:
            sums = summed if state.store.compressor else {}
            flags = nonfinite_flags(state.store, metrics["loss"], grads, sums)
        # A residual that has a NaN keeps it, and 2bit and 1bit go on to send a number for it. The param is lost, and
        # nothing would show that. So the loss is NaN then, as it is without a compressor, where the param is NaN.
        residuals = jax.tree.leaves(state.store.residuals)
        if residuals and isinstance(state.store.compressor, (compression.OneBit, compression.TwoBit)):
            is_finite = jnp.stack([jnp.isfinite(x).all() for x in residuals]).all()
            metrics = metrics | {"loss": jax.tree.map(lambda x: jnp.where(is_finite, x, jnp.nan), metrics["loss"])}
        count = lax.axis_size(self.axis_name)
        terms = model_state_terms(shard.model_state, count)
        # Random keys are those of the first shard: the sum of its own and of zeros. A key has no mean, and the state
        # must be the same on all devices.
        numbers, with_keys = without_keys([x for x in jax.tree.leaves(shard.model_state) if is_prng_key(x)])
        numbers = [jnp.where(lax.axis_index(self.axis_name) == 0, x, jnp.zeros_like(x)) for x in numbers]

        leaves, structure = jax.tree.flatten((jax.tree.map(widen, metrics), terms, flags, numbers))
        metrics, terms, flags, numbers = structure.unflatten(self.add_up(state, leaves))
        keys = iter(with_keys(numbers))
        model_state = jax.tree.map(lambda x: next(keys) if is_prng_key(x) else x, shard.model_state)
        return finish(metrics, count), model_state_mean(model_state, terms, count), flags

    def add_up(self, state: TrainState, leaves: list[jax.Array]) -> list[jax.Array]:
        """The sums of small arrays over the devices, by one collective for each dtype."""
        if lax.axis_size(self.axis_name) == 1:
            return leaves
        # XLA would join a `psum` with that of the delayed gradients, which then waits for this step's loss.
        add = collectives.sum_apart if state.store.staleness else lax.psum
        return collectives.allreduce(leaves, self.axis_name, _LIMITS, add)

    def apply(
        self,
        state: TrainState,
        params: PyTree,
        summed: Arrays,
        residuals: dict[int, Any],
        ready: dict[int, jax.Array] | None,
        loss: jax.Array | None,
        rows: Rows = _NO_ROWS,
    ) -> tuple[kv.KVStore, PyTree]:
        """The store and the transform's state after the update by these sums, unchanged where not `ready`."""
        # Of a row-sparse table, the update sees the rows with a gradient alone.
        if rows:
            store, values = aggregate.with_rows(state.store, rows, self.axis_name)
            params = None if stores.is_in_rows(store) else whole_params(store, self.axis_name)
            state_of_rows = dataclasses.replace(state, store=store)
            store, transform = self.apply(state_of_rows, params, summed | values, residuals, ready, loss)
            return aggregate.with_tables(state.store, store, rows, self.axis_name), transform

        transform = state.transform
        if self.grad_transform is not None:
            summed, transform = self.transform_gradients(self.grad_transform, state, params, summed)
        # The queue of a delayed store is not full in the first steps. Until it is, `ready` is false and nothing moves.
        num_updates = aggregate.num_updates(state.store, summed, ready)
        changes = aggregate.update(state.store, summed, num_updates, loss)._replace(residuals=residuals)
        if ready is not None:
            changes = queue.where_ready(state.store, changes, ready, {}, self.axis_name)
            if jax.tree.leaves(transform):
                transform = queue.select(jnp.stack(list(ready.values())).any(), transform, state.transform)
        return stores.with_changes(state.store, changes), transform

    def recorded(self, old: kv.KVStore, new: kv.KVStore, summed: Arrays, rows: Rows = _NO_ROWS) -> Metrics:
        """What `record` asks for: norms of the summed gradients and of the change of the trained params, and rates."""

        def squares(arrays: Iterable[jax.Array]) -> jax.Array:
            return sum((jnp.sum(jnp.square(jnp.abs(widen(x)))) for x in arrays), jnp.float32(0))

        def over_shards(total: jax.Array) -> jax.Array:
            # In kind `sharded` each device has a shard of each value, and all have all summed rows.
            return lax.psum(total, self.axis_name) if stores.is_in_rows(old) else total

        recorded: Metrics = {}
        if "grad_norm" in self.record:
            of_rows = squares(r.values for r in rows.values())
            recorded["grad_norm"] = jnp.sqrt(over_shards(squares(summed.values())) + of_rows)
        if "update_norm" in self.record:
            changes = (widen(new.values[k]) - widen(old.values[k]) for k in stores.trained_keys(old))
            recorded["update_norm"] = jnp.sqrt(over_shards(squares(changes)))

        # Of each param, by the names of the params.
        names = kv.names(old)
        for name in ("grad_norm", "update_norm"):
            if f"{name}s" not in self.record:
                continue
            keys = stores.trained_keys(old)
            arrays = summed if name == "grad_norm" else {k: widen(new.values[k]) - widen(old.values[k]) for k in keys}
            of_keys = [squares([arrays[k]] if k in arrays else []) for k in keys]
            of_rows = [squares([rows[k].values] if k in rows and name == "grad_norm" else []) for k in keys]
            each = jnp.sqrt(over_shards(jnp.stack(of_keys)) + jnp.stack(of_rows))
            recorded |= {f"{name}/{names[k]}": each[i] for i, k in enumerate(keys)}

        # The rate of this update: an optimizer leaves the one that it used in its state. An optimizer of `jp.updaters`
        # has it once for each key. If somebody gave these different ones, no number is the rate.
        if "lr" in self.record:
            rates = updaters._rate_arrays(new)
            if all(path.startswith("updater_state/") for path in rates):
                of_keys = jnp.stack(list(rates.values()))
                rates = {"": jnp.where((of_keys == of_keys[0]).all(), of_keys[0], jnp.nan)}
            names_of_rates = updaters._rate_names(rates) if len(rates) > 1 else []
            recorded |= zip([f"lr/{name}" for name in names_of_rates] or ["lr"], rates.values(), strict=True)
        return recorded

    def finish_step(
        self, old: TrainState, new: TrainState, metrics: Metrics, flags: jax.Array | None, recorded: Metrics
    ) -> tuple[TrainState, Metrics]:
        """The state after the guard, which may keep the old one, and all metrics."""
        reported = recorded
        if self.guard is not None and flags is not None:  # there are flags where there is a guard
            new, of_guard = self.guard(old, new, flags)
            for name in recorded:
                if name.startswith("update_norm"):  # an update that was left out changed nothing
                    recorded = {**recorded, name: jnp.where(of_guard["skipped"] > 0, 0, recorded[name])}
            reported = {**of_guard, **recorded}
        if taken := metrics.keys() & reported.keys():
            raise ValueError(
                f"train step: aux of loss_fn has {min(taken)!r}, which the step reports itself; rename that value"
            )
        return new, {**metrics, **reported}

    def transform_gradients(
        self, tx: optax.GradientTransformation, state: TrainState, params: PyTree, summed: Arrays
    ) -> tuple[Arrays, PyTree]:
        """The summed gradients through `grad_transform`. Those of a sharded store are gathered for it."""
        store = state.store
        params = stores.tree_of(store, dict(enumerate(jax.tree.leaves(params))))
        gathered = aggregate.gather(store, summed, self.axis_name)
        # An optax transform takes gradients of all params: a norm is one over all. Those that this step leaves out, by
        # `unused="skip"`, are zeros.
        by_key = stores.by_key(store, params)
        grads = {k: gathered[k] if k in gathered else jnp.zeros_like(x) for k, x in by_key.items()}
        old, initial = state.transform, jax.eval_shape(tx.init, params)
        if jax.tree.structure(old) != jax.tree.structure(initial):
            if jax.tree.leaves(initial):
                raise ValueError(
                    "train step: the state was made for another grad_transform; give the same one to "
                    "train.create_state(store, rng, grad_transform=...)"
                )
            old = tx.init(params)  # without arrays, which a state has as ()
        updates, transform = tx.update(stores.tree_of(store, grads), old, params)
        new = stores.by_key(store, updates)
        new = aggregate.own_parts(store, {k: new[k] for k in summed}, self.axis_name)
        return new, transform if jax.tree.leaves(transform) else ()

    def tables(self, store: kv.KVStore) -> dict[int, str]:
        """The names of the row-sparse params, by their keys."""
        if not self.row_sparse:
            return {}
        names = dict(store.paths)
        flags = checks.matched(self.row_sparse, list(names.values()), "train step: row_sparse")
        return {k: name for (k, name), flag in zip(names.items(), flags, strict=True) if flag}

    # The beginning and the end of training.

    def with_initial_parts(self, state: TrainState) -> TrainState:
        """The state, which is on its devices, with the parts that this step keeps in it. Parts that it has stay."""
        if carries(state.local) and not self.has_local_part:
            raise ValueError(
                "train step: the state has separate parameters for each device, from a step with local_steps; "
                f"{END_OF_ROUND}"
            )
        if tables := self.tables(state.store):
            check_tables(state.store, tables, self.grad_transform)
        if "lr" in self.record and not updaters._rate_arrays(state.store):
            raise ValueError(
                "train step: record='lr': the state of this optimizer has no learning rate; make it by "
                "optax.inject_hyperparams(optax.adam)(learning_rate=...), or one of jp.updaters with "
                "rate_in_state=True, or give fit(callbacks=train.LearningRate(schedule))"
            )
        # A state of `create_state` knows nothing of the step's options. One that was restored, or comes from another
        # step, keeps what it has: the scale that was found, what a transform remembers.
        missing: dict[str, PyTree] = {}
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
            pushed = {k: value.reshape(stores.shapes_of(state.store)[k]) for k, value in pending.items()}
            summed, residuals = self.sum_gradients(state.store, pushed, zeros=frozenset())
            store, transform = self.apply(state, params, summed, residuals, ready, None)
            state = dataclasses.replace(state, store=store, transform=transform)
        empty = jax.tree.map(jnp.zeros_like, state.store.pending)
        return dataclasses.replace(state, store=dataclasses.replace(state.store, pending=empty))


def shard_rng(state: TrainState, number: int | jax.Array) -> jax.Array:
    """The random key of a shard of the batch in this step."""
    return jax.random.fold_in(jax.random.fold_in(state.rng, state.step), number)


def divide(grad: jax.Array, divisor: float | jax.Array) -> jax.Array:
    """The gradient divided in float32 or wider, in its own dtype."""
    # In the dtype of a float16 gradient a loss scale of 2**16 would be infinite.
    return (widen(grad) / divisor).astype(grad.dtype)


def divide_rows(rows: Rows, divisor: float | jax.Array) -> dict[int, RowSparse]:
    return {k: RowSparse(r.indices, divide(r.values, divisor), r.shape) for k, r in rows.items()}


def check_tables(
    store: kv.KVStore, tables: dict[int, str], grad_transform: optax.GradientTransformation | None
) -> None:
    """`ValueError` where these params cannot be updated by rows as they would be whole."""
    # An update of some rows is that of all rows only if a row without a gradient would have stayed as it is.
    trained, specs = stores.trained_keys(store), stores.specs_of(store)
    reason = None
    if untrained := [name for k, name in tables.items() if k not in trained or not specs[k].shape]:
        reason = f"{untrained} are frozen, or are no floating tables"
    elif stores.is_split(store):
        reason = "the params are split over a mesh in their own shapes; use kind 'device' without mesh= and sharding="
    elif stores.is_in_rows(store) and grad_transform is not None:
        reason = f"kind {store.kind!r} gives grad_transform= whole gradients; use kind 'device'"
    elif store.compressor is not None:
        reason = "gradient compression sends no rows; leave it out"
    elif store.staleness:
        reason = f"a store of staleness {store.staleness} delays no rows; use kind 'dist_sync', or staleness=0"
    elif hasattr(getattr(store.updater, "update", None), "is_lazy"):  # one of MXNet's
        for k, name in tables.items():
            updaters._check_rows(store.updater, k)
            if not updaters._is_lazy(store.updater, store.updater_state[k]):
                reason = f"this optimizer updates all rows of {name!r} at each step"
    elif not isinstance(store.updater, updaters._TreeOptimizer):
        reason = "an update of rows needs an optimizer of optax, or one of MXNet's in jp.updaters"
    if reason is None:
        params, positions = stores.tree_of(store, specs), [trained.index(k) for k in tables]
        if isinstance(store.updater, updaters._TreeOptimizer):
            fault = updaters._lazy_fault(store.updater, params, positions)
            reason = fault and f"the optimizer cannot update some rows alone: {fault}"
        if reason is None and grad_transform is not None:
            fault = updaters._transform_fault(grad_transform, params, positions)
            reason = fault and f"grad_transform cannot be given some rows alone: {fault}"
    if reason is not None:
        raise ValueError(f"train step: row_sparse={list(tables.values())}: {reason}; or leave out row_sparse=")


# JAX makes the gradient of a param that the loss does not depend on as zeros, which look like any others in the
# program. The program of the loss itself does not say it either: a param under `stop_gradient` is an operand there. So
# each param goes through a function whose backward pass, which is traced only where there is one, says that it was.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def call_if_read(callback: Callable[[], None], x: jax.Array) -> jax.Array:
    """The array itself. `callback` is called when a gradient for it is traced."""
    return x


def _call_and_pass(callback: Callable[[], None], _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    callback()
    return (cotangent,)


call_if_read.defvjp(lambda callback, x: (x, None), _call_and_pass)


# The step of all devices at once.


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlobalStep(DeviceStep):
    """The step of all devices: `step(state, batch) -> (state, metrics)`, of whole arrays."""

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        store, mesh = state.store, stores.mesh_of_values(state.store)
        sizes = tuple(mesh.shape[name] for name in self.axes)
        count, axes = math.prod(sizes), tuple(range(len(sizes)))

        # The shards. Batch, random keys and model state have a first axis for each name in `axes`.
        params = whole_params(store, self.axis_name)
        by_number = jax.vmap(lambda i: (shard_rng(state, i), with_own_streams(state.model_state, i)))(jnp.arange(count))
        rngs, model_states = jax.tree.map(lambda x: x.reshape(*sizes, *x.shape[1:]), by_number)
        along = NamedSharding(mesh, P(*self.axes))

        def split(x: jax.Array) -> jax.Array:
            return lax.with_sharding_constraint(x.reshape(*sizes, x.shape[0] // count, *x.shape[1:]), along)

        shards = jax.tree.map(split, batch), rngs, model_states

        # The gradient of the sum of the losses of all shards, divided afterwards. So a shard has the cotangents that it
        # has under the other engines, and a rule of the backward pass that clips them gives the same numbers.
        #
        # The compiler adds up the shards wherever a product of the backward pass does, in the dtype of that product. In
        # float16 a sum of what fits may not fit, and the guard decides by it. So there each shard has a gradient of its
        # own, and they are added up in float32 or wider. A device then holds the whole gradient of its shard, also
        # where the params are split. A loss scale is for the float16 of a loss_fn that casts by itself too.
        dtypes = [self.compute_dtype, *(store.values[k].dtype for k in stores.trained_keys(store))]
        has_float16 = any(dtype is not None and jnp.dtype(dtype) == jnp.float16 for dtype in dtypes)
        if self.scaling is None and not has_float16:
            total = self.gradient(state, params, *shards)
        else:
            step_of_shard, unread = dataclasses.replace(self, axes=()), list[frozenset[int]]()

            def of_shard(
                batch: Batch, rng: jax.Array, model_state: PyTree
            ) -> tuple[tuple[Arrays, ShardMetrics], PyTree]:
                shard = step_of_shard.gradient(state, params, batch, rng, model_state)
                unread.append(shard.unread)
                return jax.tree.map(widen, (shard.grads, shard.metrics)), shard.model_state

            (grads, metrics), model_states = self.map_shards(of_shard)(*shards)
            grads, metrics = jax.tree.map(lambda x: x.sum(axes), (grads, metrics))
            total = ShardGradient(grads, metrics, model_states, unread[0])
        loss = total.metrics["loss"]
        divisor = loss.weight if isinstance(loss, Mean) else count
        grads = {k: divide(g, divisor).astype(store.values[k].dtype) for k, g in total.grads.items()}
        shardings = dict(store.shardings)
        grads = {k: lax.with_sharding_constraint(g, shardings[k]) for k, g in grads.items()}
        metrics = finish(total.metrics, count)

        # The update. Leaves of the model state that have no mean are those of the first shard.
        store, transform = self.apply(state, params, grads, {}, None, metrics["loss"])
        recorded = self.recorded(state.store, store, grads)
        sums = [tuple(x.sum(axes) for x in terms) for terms in model_state_terms(total.model_state, count)]
        first = jax.tree.map(lambda x: x[(0,) * len(axes)], total.model_state)
        model_state = model_state_mean(first, sums, count)
        new = dataclasses.replace(state, step=state.step + 1, store=store, transform=transform, model_state=model_state)

        # The guard, which may keep the old state.
        flags = None
        if self.guard is not None:
            flags = nonfinite_flags(state.store, metrics["loss"], grads, {})
        return self.finish_step(state, new, metrics, flags, recorded)

    def with_initial_parts(self, state: TrainState) -> TrainState:
        check_axes(self.axes, stores.mesh_of_values(state.store), "train step")
        return super().with_initial_parts(state)


def check_axes(axes: tuple[str, ...], mesh: Mesh, caller: str) -> None:
    """`ValueError` unless the axes that a batch is split over are axes of the mesh."""
    for name in axes:
        if name not in mesh.axis_names:
            raise ValueError(
                f"{caller}: axis_name={name!r}: the mesh has no such axis; its axes are {', '.join(mesh.axis_names)}"
            )
