"""The step of one device over virtual shards: the same bits, however many devices there are.

The batch is cut in V fixed shards. One program computes loss and gradient of a shard: the body of a loop over those of
this device, see `fixed_program`. Their sums are added in one tree over the numbers of the shards, see `fixed_tree`. A
second program, which is kept apart too, makes the update. All else moves data and adds.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from ... import kv
from ..._core.arrays import Device, without_keys
from ..._devices import fixed_tree
from ..._devices.fixed_program import run_apart, unknown_zero
from ..._devices.fixed_tree import Deal
from ...kv import _aggregate
from . import batch as _batch, nonfinite
from .device_step import Arrays, DeviceStep
from .gradient import StepResult, wide
from .state import TrainState

AXIS = "devices of virtual shards"  # no loss names it, so a collective in a loss is an error


class Terms(NamedTuple):
    """What is added up over the shards.

    Attributes:
        grads: the gradient of the shard divided by V, for each key, in float32 or wider.
        metrics: `loss` and `aux`, in float32 or wider.
        floating: the floating leaves of the model state, in float32 or wider.
        found: the flags of what is not finite, or None.
    """

    grads: Arrays
    metrics: dict[str, Any]
    floating: list[jax.Array]
    found: jax.Array | None


@dataclasses.dataclass(frozen=True)
class VirtualStep(DeviceStep):
    """The step inside the mapped axis: `one(state, batch) -> (state, metrics)`.

    Attributes:
        shards: V.
    """

    shards: int = 1

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        deal = Deal(self.shards, lax.axis_size(self.axis_name))
        zero = unknown_zero(state.step)
        params = kv.to_params(state.store)
        own, others, unread = self._sums_of_own(state, params, batch, deal, zero)
        leaves, structure = jax.tree.flatten(own)
        totals = structure.unflatten(fixed_tree.sum_everywhere(deal, leaves, self.axis_name, state.store.limits))

        def update(state: TrainState, args: Any) -> tuple[TrainState, dict[str, Any]]:
            return self._update(state, *args, unread)

        return run_apart(update, state, (totals, self._of_first(others)), zero)

    def lay_out(self, batch: Any, devices: int, along: NamedSharding, axis: int = 0) -> Any:
        """The arrays of a batch with rows for every slot."""
        return _batch.lay_out(batch, Deal(self.shards, devices), self.gradient.accumulate, along, axis)

    def check_batch(self, batch: Any, devices: int, axis: int = 0) -> None:
        """`ValueError` where a batch that is laid out cannot be cut in shards. `TypeError` as of any batch."""
        _batch.check_laid_out(batch, Deal(self.shards, devices), self.gradient.accumulate, axis)

    def with_initial_parts(self, state: TrainState, devices: tuple[Device, ...]) -> TrainState:
        """The state as it is. `ValueError` for a store that rounds by the number of devices."""
        store = state.store
        reasons = {
            "a compressor keeps a residual for each device; make the store without one": store.compressor is not None,
            f"pending pushes of a store of staleness {store.staleness} belong to its devices; use kind 'dist_sync', or "
            "staleness=0": bool(store.staleness),
            f"in kind {store.kind!r} each device updates a share of a value, and the compiler rounds shares of other "
            "lengths otherwise; use kind 'device'": _aggregate.is_split(store),
        }
        if reason := next((reason for reason, holds in reasons.items() if holds), None):
            what = f"train step: virtual_shards={self.shards} gives the same bits on any number of devices"
            raise ValueError(f"{what}, and {reason}")
        return super().with_initial_parts(state, devices)

    def _sums_of_own(
        self, state: TrainState, params: Any, batch: Any, deal: Deal, zero: jax.Array
    ) -> tuple[Terms, list[jax.Array], frozenset[int]]:
        """The nodes of this device's shards, the other leaves of shard 0's model state, and the unread keys."""
        rows = jax.tree.leaves(batch)[0].shape[0] // deal.slots
        if deal.slots == 1:  # else the only shard would be no slice, and nothing in the loop would depend on its round
            batch = jax.tree.map(lambda x: jnp.concatenate([x, x]), batch)
        first = lax.axis_index(self.axis_name) * deal.slots
        count = jnp.clip(deal.terms - first, 0, deal.slots) + zero
        rng = jax.random.fold_in(state.rng, state.step)
        merges = jnp.asarray(deal.merges) + zero
        unread: list[frozenset[int]] = []

        def term(i: Any, first: Any, params: Any, batch: Any, rng: Any, state: Any, scale: Any) -> Any:
            mine = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * rows, rows), batch)
            found = self._gradient(params, mine, jax.random.fold_in(rng, first + i), state, scale)
            unread.append(found.unread)
            return self._terms(found)

        traced = jax.jit(term, inline=True)  # so it is traced once
        args = first, params, batch, rng, state.model_state, self._scale(state)
        like, others = jax.eval_shape(traced, zero, *args)

        def body(carry: Any) -> Any:
            i, nodes, length, kept = carry
            new, others = traced(i, *args)
            nodes, length = fixed_tree.add_term(nodes, length, new, merges[first + i])
            return i + 1, nodes, length, jax.tree.map(lambda a, b: jnp.where(first + i == 0, a, b), others, kept)

        others = [jnp.zeros(x.shape, x.dtype) for x in others]
        start = zero, fixed_tree.start(deal, like), zero, others
        _, nodes, _, others = lax.while_loop(lambda carry: carry[0] < count, body, start)
        return jax.tree.map(lambda x: x[: deal.kept], nodes), others, unread[0]

    def _gradient(self, *args: Any) -> StepResult:
        try:
            return self.gradient(*args)
        except NameError as error:
            if "axis name" not in str(error):
                raise
            raise ValueError(
                f"train step: loss_fn has a collective ({error}), and with virtual_shards={self.shards} it sees a "
                "shard of the batch, which is on no axis; leave out the collective, or virtual_shards"
            ) from error

    def _terms(self, found: StepResult) -> tuple[Terms, list[jax.Array]]:
        """What is added up of one shard, and the other leaves of its model state."""
        grads = {k: g.astype(wide(g)) / self.shards for k, g in found.grads.items()}
        metrics = jax.tree.map(lambda x: jnp.asarray(x).astype(wide(x)), found.metrics)
        flags = None
        if self.guard is not None:
            flags = nonfinite.nonfinite_flags(metrics["loss"], {k: found.grads[k] for k in grads}, {})
        plain = jax.tree.leaves(without_keys(found.model_state)[0])
        floating = [x.astype(wide(x)) for x in plain if _is_floating(x)]
        return Terms(grads, metrics, floating, flags), [x for x in plain if not _is_floating(x)]

    def _of_first(self, others: list[jax.Array]) -> list[jax.Array]:
        """The arrays of the first device, on all."""
        if lax.axis_size(self.axis_name) == 1:
            return others
        return [lax.all_gather(x, self.axis_name)[0] for x in others]

    def _update(
        self, state: TrainState, totals: Terms, others: list[jax.Array], unread: frozenset[int]
    ) -> tuple[TrainState, dict[str, Any]]:
        metrics = jax.tree.map(lambda x: x / self.shards, totals.metrics)
        own = StepResult(totals.grads, metrics, (), unread)
        summed = self._without_unused(state, own, totals.grads)
        summed = {k: g.astype(state.store.values[k].dtype) for k, g in summed.items()}
        store, transform = self._apply(state, kv.to_params(state.store), summed, {}, None, metrics["loss"])
        model_state = self._model_state(state.model_state, totals.floating, others)
        parts = {"store": store, "step": state.step + 1, "transform": transform, "model_state": model_state}
        new = dataclasses.replace(state, **parts)
        return (new, metrics) if self.guard is None else self.guard(state, new, metrics, totals.found)

    def _model_state(self, old: Any, floating: list[jax.Array], others: list[jax.Array]) -> Any:
        """The means of the floating leaves, and the others as they are."""
        plain, restore = without_keys(old)
        leaves, structure = jax.tree.flatten(plain)
        sums, rest = iter(floating), iter(others)
        new = [(next(sums) / self.shards).astype(x.dtype) if _is_floating(x) else next(rest) for x in leaves]
        return restore(structure.unflatten(new))


def _is_floating(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
