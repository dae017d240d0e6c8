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
from ..._core.arrays import Device
from ..._store.store import mesh_of_values, with_changes
from ..._store.update import update
from . import means, nonfinite
from .device_step import DeviceStep
from .gradient import Gradient, call_loss, divide
from .state import TrainState, leaf_shardings


@dataclasses.dataclass(frozen=True)
class GlobalGradient(Gradient):
    """The gradient of the sum of the losses of all shares.

    It is the sum, so that a share has the cotangents that it has under the other engines: a rule of the backward pass
    that is not linear, such as one that clips, gives the same numbers. The step divides afterwards. The metrics are
    sums over the shares too.

    Batch, `rng` and model state have a first axis for each name in `axes`, of the lengths of the mesh.

    Attributes:
        axes: the axes of the mesh that the batch is split over.
    """

    axes: tuple[str, ...] = ()

    def _call(self, params: Any, batch: Any, rng: Any, model_state: Any, step: Any) -> tuple[dict[str, Any], Any]:
        def of_share(batch: Any, rng: Any, model_state: Any) -> Any:
            return call_loss(self.loss_fn, params, batch, rng, model_state, step)

        with _explain_constraints(self.axes):
            metrics, new = _over_shares(of_share, self.axes)(batch, rng, model_state)
        first = tuple(range(len(self.axes)))
        return jax.tree.map(lambda x: x.sum(first), means.widen(metrics)), new

    def _microbatches(self, batch: Any) -> Any:
        at, count = len(self.axes), self.accumulate

        def cut(x: jax.Array) -> jax.Array:
            return jnp.moveaxis(x.reshape(*x.shape[:at], count, x.shape[at] // count, *x.shape[at + 1 :]), at, 0)

        return jax.tree.map(cut, batch)

    def _fold_in(self, rng: jax.Array, i: Any) -> jax.Array:
        return _over_shares(lambda key: jax.random.fold_in(key, i), self.axes)(rng)


@dataclasses.dataclass(frozen=True)
class GlobalStep(DeviceStep):
    """The step of all devices: `step(state, batch) -> (state, metrics)`, of whole arrays.

    Attributes:
        axes: the axes of the mesh that the batch is split over.
    """

    axes: tuple[str, ...] = ()

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        mesh = mesh_of_values(state.store)
        leaves, structure = jax.tree.flatten(state)
        leaves = [lax.with_sharding_constraint(x, s) for x, s in zip(leaves, leaf_shardings(state), strict=True)]
        state = structure.unflatten(leaves)  # all over the same mesh, also what a user's mesh laid out alike
        options = {f.name: getattr(self.gradient, f.name) for f in dataclasses.fields(self.gradient)}
        gradient = GlobalGradient(**options, axes=self.axes)
        params = kv.to_params(state.store)
        shares = self._shares(state, batch, mesh)
        own = gradient(params, *shares, state.step, self._scale(state))
        places, count = dict(state.store.shardings), math.prod(mesh.shape[name] for name in self.axes)
        divisor = count if own.weight is None else own.weight
        grads = {k: lax.with_sharding_constraint(divide(g, divisor), places[k]) for k, g in own.grads.items()}
        metrics = means.finish(own.metrics, count)
        due = self._without_unused(state, own, grads)
        store, transform = self._apply(state, params, due, {}, None, metrics["loss"])
        new = dataclasses.replace(
            state,
            store=store,
            step=state.step + 1,
            transform=transform,
            model_state=_mean_over_shares(own.model_state, len(self.axes), count),
        )
        if self.guard is None:
            return new, metrics
        return self.guard(state, new, metrics, nonfinite.nonfinite_flags(metrics["loss"], grads, {}))

    def spread(self, store: kv.KVStore) -> tuple[Mesh, tuple[str, ...]]:
        """The mesh of the values, and over which of its axes a batch is split."""
        return mesh_of_values(store), self.axes

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

    def _apply(
        self, state: TrainState, params: Any, summed: Any, residuals: Any, ready: Any, loss: Any
    ) -> tuple[kv.KVStore, Any]:
        updates, transform = self._transform(state, params, summed)
        return with_changes(state.store, update(state.store, updates, loss)), transform

    def with_initial_parts(self, state: TrainState, devices: tuple[Device, ...]) -> TrainState:
        """The state as it is, on the mesh."""
        mesh = mesh_of_values(state.store)
        for name in self.axes:
            if name not in mesh.axis_names:
                raise ValueError(
                    f"train step: axis_name={name!r} is no axis of the mesh, which has {', '.join(mesh.axis_names)}; "
                    "give make_train_step the axis, or axes, that the batch is split over"
                )
        return super().with_initial_parts(state, devices)


def _over_shares(fn: Callable[..., Any], axes: tuple[str, ...]) -> Callable[..., Any]:
    """`fn` for every share, each on its part of the mesh."""
    for name in reversed(axes):
        fn = jax.vmap(fn, axis_name=name, spmd_axis_name=name)
    return fn


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
            f"train step: loss_fn constrains an array to {spec}, and the batch is split over "
            f"{', '.join(map(repr, axes))}; loss_fn sees one share of the batch, which is split so already, so name "
            "the other axes only: None in place of that axis, and no constraint where nothing is left"
        ) from error


def _mean_over_shares(tree: Any, axes: int, count: int) -> Any:
    """Floating leaves as means over the shares. Others are those of the first share."""

    def leaf(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x[(0,) * axes]
        sums = tuple(term.sum(tuple(range(axes))) for term in means.state_terms(x, count))
        return means.state_mean(sums, count, x.dtype)

    return jax.tree.map(leaf, tree)
