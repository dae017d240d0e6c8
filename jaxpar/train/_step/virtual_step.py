"""The two programs of a step over virtual shards, each for one device: the gradient of a shard, and the update.

The batch is cut in V fixed shards. They know nothing of devices, so XLA makes the same code of them on any number.
A part of a larger program would not do: XLA fuses it with its surroundings, and simplifies it otherwise where there is
one device than where there are several.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from ... import kv
from ..._core.arrays import Device, is_prng_key, without_keys
from ..._core.recent import Recent
from ..._devices import buckets
from ..._devices.fixed_tree import Deal
from ...kv import _aggregate
from . import batch as _batch, means, nonfinite
from .device_step import Arrays, DeviceStep
from .gradient import StepResult
from .means import wide
from .state import TrainState

_ONE_A_DTYPE = buckets.BucketLimits(float("inf"), float("inf"))  # pyright: ignore[reportArgumentType]
AXIS = "devices"
Buffers = list[jax.Array]


class Terms(NamedTuple):
    """What is added up over the shards.

    Attributes:
        grads: the gradient of the shard for each key, in float32 or wider. That of a mean is divided by V.
        metrics: `loss` and `aux`, in float32 or wider.
        floating: the terms of the floating leaves of the model state.
        found: the flags of what is not finite, or None.
    """

    grads: Arrays
    metrics: dict[str, Any]
    floating: list[tuple[jax.Array, ...]]
    found: jax.Array | None


@dataclasses.dataclass(frozen=True)
class VirtualStep(DeviceStep):
    """What the programs of a step over virtual shards compute.

    Attributes:
        shards: V.
    """

    shards: int = 1

    @functools.cached_property
    def programs(self) -> Recent:
        """The programs for states of the last few structures. Steps over other devices share them."""
        return Recent(lambda structure, impls: ShardPrograms(self, structure, impls))

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

    def terms(self, state: TrainState, batch: Any, number: jax.Array) -> tuple[Terms, list[jax.Array], frozenset[int]]:
        """What shard `number` adds, the other leaves of its model state, and the unread keys."""
        rng = jax.random.fold_in(jax.random.fold_in(state.rng, state.step), number)
        params = kv.to_params(state.store)
        found = self._gradient(params, batch, rng, state.model_state, state.step, self._scale(state))
        divisor = self.shards if found.weight is None else 1
        grads = {k: g.astype(wide(g)) / divisor for k, g in found.grads.items()}
        metrics = means.widen(found.metrics)
        flags = None if self.guard is None else nonfinite.nonfinite_flags(metrics["loss"], found.grads, {})
        plain = jax.tree.leaves(without_keys(found.model_state)[0])
        floating = [means.state_terms(x, self.shards) for x in plain if _is_floating(x)]
        others = [x for x in plain if not _is_floating(x)]
        return Terms(grads, metrics, floating, flags), others, found.unread

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

    def update(
        self, state: TrainState, totals: Terms, others: list[jax.Array], unread: frozenset[int]
    ) -> tuple[TrainState, dict[str, Any]]:
        """The next state and the metrics.

        Args:
            totals: the sums over the shards.
            others: the leaves of the model state of shard 0 that are not added.
            unread: the keys of parameters that the loss does not depend on.
        """
        own = StepResult(totals.grads, totals.metrics, (), unread)
        metrics = means.finish(totals.metrics, self.shards)
        found = totals.found
        summed = totals.grads
        if own.weight is not None:
            summed = {k: g / own.weight for k, g in summed.items()}
            if found is not None:  # a weight of 0 is seen here only
                found = found + nonfinite.nonfinite_flags(metrics["loss"], summed, {})
        summed = self._without_unused(state, own, summed)
        summed = {k: g.astype(state.store.values[k].dtype) for k, g in summed.items()}
        store, transform = self._apply(state, kv.to_params(state.store), summed, {}, None, metrics["loss"])
        model_state = self._model_state(state.model_state, totals.floating, others)
        parts = {"store": store, "step": state.step + 1, "transform": transform, "model_state": model_state}
        new = dataclasses.replace(state, **parts)
        if self.guard is None or found is None:
            return new, metrics
        return self.guard(state, new, metrics, found)

    def _model_state(self, old: Any, floating: list[Any], others: list[jax.Array]) -> Any:
        """The means of the floating leaves, and the others as they are."""
        plain, restore = without_keys(old)
        leaves, structure = jax.tree.flatten(plain)
        sums, rest = iter(floating), iter(others)
        new = [means.state_mean(next(sums), self.shards, x.dtype) if _is_floating(x) else next(rest) for x in leaves]
        return restore(structure.unflatten(new))


class ShardPrograms:
    """The compiled programs for states of one structure, on whatever device their arguments are.

    Attributes:
        term: `(leaves, rng, batch, number) -> (buffers, others)`: what shard `number` adds, an array (1, n) for each
            dtype, and the leaves of its model state that are not added.
        update: `(leaves, rng, totals, others) -> (leaves, metrics)`. The old leaves are donated.
        add: the sum of two lists of buffers.
    """

    def __init__(self, one: VirtualStep, structure: Any, impls: Any):
        self._one, self._fit = one, (structure, impls)
        self._layout: Any = None  # how the terms are laid out in buffers, known when `term` was traced
        self._unread: frozenset[int] = frozenset()
        self.term = jax.jit(self._term)
        self.update = jax.jit(self._update, donate_argnums=0)
        self.add = jax.jit(lambda a, b: [x + y for x, y in zip(a, b, strict=True)])

    def _term(self, leaves: Any, rng: Any, batch: Any, number: jax.Array) -> tuple[Buffers, Buffers]:
        terms, others, self._unread = self._one.terms(state_of(leaves, rng, *self._fit), batch, number)
        values, structure = jax.tree.flatten(terms)
        groups = buckets.plan_of(values, _ONE_A_DTYPE)
        self._layout = [x.shape for x in values], structure, groups
        return [x.reshape(1, -1) for x in buckets.pack(values, groups)], others

    def _update(self, leaves: Any, rng: Any, totals: Buffers, others: Buffers) -> tuple[list[jax.Array], Any]:
        shapes, structure, groups = self._layout
        terms = structure.unflatten(buckets.unpack(totals, shapes, groups))
        new, metrics = self._one.update(state_of(leaves, rng, *self._fit), terms, others, self._unread)
        return parts_of(new)[0], metrics


def parts_of(state: TrainState) -> tuple[list[jax.Array], jax.Array, tuple[Any, Any]]:
    """The arrays of a state without its devices, those of keys as integers, its `rng` so, and how they fit."""
    bare = dataclasses.replace(state, store=dataclasses.replace(state.store, devices=None), rng=())
    leaves, structure = jax.tree.flatten(bare)
    impls = tuple(jax.random.key_impl(x) if is_prng_key(x) else None for x in (*leaves, state.rng))
    *plain, rng = (
        x if impl is None else jax.random.key_data(x) for x, impl in zip((*leaves, state.rng), impls, strict=True)
    )
    return plain, rng, (structure, impls)


def state_of(leaves: Any, rng: Any, structure: Any, impls: Any) -> TrainState:
    """The inverse."""
    *whole, rng = (
        x if impl is None else jax.random.wrap_key_data(x, impl=impl)
        for x, impl in zip((*leaves, rng), impls, strict=True)
    )
    return dataclasses.replace(structure.unflatten(whole), rng=rng)


def _is_floating(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
