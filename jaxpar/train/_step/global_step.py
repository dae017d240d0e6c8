"""The step of all devices at once, for a compiler that spreads it over a mesh by the shardings of its arrays.

`loss_fn` sees what it sees under the other engines: one share of the batch, with an `rng` and a model state of its own.
The shares are mapped by `vmap`, each on its part of the mesh. So batch norm, dropout and collectives over the axis mean
the same everywhere. The gradient is that of the sum over the shares, divided afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ... import kv
from ..._store.store import mesh_of_values, trained_keys
from .device_step import DeviceStep, Gradient, divide
from .loss import call_loss, finish, model_state_mean, model_state_terms, widen
from .nonfinite import nonfinite_flags
from .state import TrainState, leaf_shardings


@dataclasses.dataclass(frozen=True)
class GlobalGradient(Gradient):
    """The gradient of the sum of the losses of all shares.

    It is the sum, so that a share has the cotangents that it has under the other engines: a rule of the backward pass
    that is not linear, such as one that clips, gives the same numbers. The step divides afterwards. The metrics are
    sums over the shares too.

    Batch, `rng` and model state have a first axis for each name in `axes`, of the lengths of the mesh.
    """

    axes: tuple[str, ...] = ()  # the axes of the mesh that the batch is split over

    def _call(self, params: Any, batch: Any, rng: Any, model_state: Any, step: Any) -> tuple[dict[str, Any], Any]:
        def of_share(batch: Any, rng: Any, model_state: Any) -> Any:
            return call_loss(self.loss_fn, params, batch, rng, model_state, step)

        with _explain_constraints(self.axes):
            metrics, new = self._over_shares(of_share)(batch, rng, model_state)
        first = tuple(range(len(self.axes)))
        return jax.tree.map(lambda x: x.sum(first), widen(metrics)), new

    def _microbatches(self, batch: Any) -> Any:
        at, count = len(self.axes), self.accumulate

        def cut(x: jax.Array) -> jax.Array:
            return jnp.moveaxis(x.reshape(*x.shape[:at], count, x.shape[at] // count, *x.shape[at + 1 :]), at, 0)

        return jax.tree.map(cut, batch)

    def _fold_in(self, rng: jax.Array, i: Any) -> jax.Array:
        return self._over_shares(lambda key: jax.random.fold_in(key, i))(rng)

    def _over_shares(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` for every share, each on its part of the mesh."""
        for name in reversed(self.axes):
            fn = jax.vmap(fn, axis_name=name, spmd_axis_name=name)
        return fn


@dataclasses.dataclass(frozen=True)
class GlobalStep(DeviceStep):
    """The step of all devices: `step(state, batch) -> (state, metrics)`, of whole arrays."""

    gradient: GlobalGradient

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        # All arrays over the same mesh, also those that a user's mesh laid out alike.
        state = jax.tree.map(lax.with_sharding_constraint, state, leaf_shardings(state))
        mesh, homes = mesh_of_values(state.store), dict(state.store.shardings)
        count = math.prod(mesh.shape[name] for name in self.axes)

        # The gradient of the sum over the shares, and then of the mean. The compiler sums over the devices.
        params = kv.to_params(state.store)
        trained = trained_keys(state.store)
        total = self.gradient(params, trained, *self._shares(state, batch, mesh), state.step, self._scale(state))
        whole = count if total.weight is None else total.weight
        grads = {k: lax.with_sharding_constraint(divide(g, whole), homes[k]) for k, g in total.grads.items()}
        metrics = finish(total.metrics, count)

        # The update, and the new state.
        due = self._without_unused(state, total, grads)
        store, transform = self._apply(state, params, due, {}, None, metrics["loss"])
        new = dataclasses.replace(
            state,
            store=store,
            step=state.step + 1,
            transform=transform,
            model_state=self._mean_over_shares(total.model_state, count),
        )
        if self.guard is None:
            return new, metrics
        return self.guard(state, new, metrics, nonfinite_flags(metrics["loss"], grads, {}))

    @property
    def axes(self) -> tuple[str, ...]:
        return self.gradient.axes

    def _shares(self, state: TrainState, batch: Any, mesh: Mesh) -> tuple[Any, Any, Any]:
        """Batch, `rng` and model state with a first axis for each of `axes`."""
        sizes = tuple(mesh.shape[name] for name in self.axes)
        count = math.prod(sizes)
        along = NamedSharding(mesh, P(*self.axes))

        def split(x: jax.Array) -> jax.Array:
            return lax.with_sharding_constraint(x.reshape(*sizes, x.shape[0] // count, *x.shape[1:]), along)

        rng = jax.random.fold_in(state.rng, state.step)
        rngs = jax.vmap(lambda i: jax.random.fold_in(rng, i))(jnp.arange(count)).reshape(sizes)
        model_state = jax.tree.map(lambda x: jnp.broadcast_to(x, (*sizes, *x.shape)), state.model_state)
        return jax.tree.map(split, batch), rngs, model_state

    def _mean_over_shares(self, model_state: Any, count: int) -> Any:
        """Floating leaves as means over the shares. Others are those of the first share."""
        axes = tuple(range(len(self.axes)))
        sums = [tuple(x.sum(axes) for x in terms) for terms in model_state_terms(model_state, count)]
        return model_state_mean(jax.tree.map(lambda x: x[(0,) * len(axes)], model_state), sums, count)

    def spread(self, store: kv.KVStore) -> tuple[Mesh, tuple[str, ...]]:
        return mesh_of_values(store), self.axes

    def with_initial_parts(self, state: TrainState) -> TrainState:
        check_axes(self.axes, mesh_of_values(state.store), "train step")
        return super().with_initial_parts(state)


def check_axes(axes: tuple[str, ...], mesh: Mesh, where: str) -> None:
    """`ValueError` unless the axes that a batch is split over are axes of the mesh."""
    for name in axes:
        if name not in mesh.axis_names:
            known = ", ".join(mesh.axis_names)
            raise ValueError(f"{where}: axis_name={name!r}: the mesh has no such axis; its axes are {known}")


@contextlib.contextmanager
def _explain_constraints(axes: tuple[str, ...]) -> Generator[None]:
    """JAX's error for a constraint in the loss that names an axis of the batch, in words that say what to write."""
    try:
        yield
    except ValueError as error:
        if "spmd_axis_name" not in str(error):
            raise
        spec = str(error).rpartition("got spec ")[2]
        raise ValueError(
            f"train step: loss_fn constrains an array to {spec}, but the step already splits the batch over "
            f"{', '.join(map(repr, axes))}, and loss_fn sees one share; write None in place of these axes, and leave "
            "out a constraint that names no others"
        ) from error
