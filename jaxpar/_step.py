"""The training step: forward, backward, aggregated push, updater and pull, compiled into one program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from . import _push, collectives, kv, parallel
from ._settle import settle
from ._store import STORE_AXIS, copied, mesh_of, shapes_of
from ._types import Device, traced

if TYPE_CHECKING:
    import optax

Batch = Any
LossFn = Callable[[Any, Batch, jax.Array], tuple[jax.Array, dict[str, Any]]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that training changes; a pytree.

    Attributes:
        store: holds the parameters, the updater's state and the residuals of a compressor.
        step: int32, how many batches the store has seen.
        rng: a random key that stays as it is; step t uses `fold_in(rng, t)`, so a run that is resumed draws
            the same numbers.
        transform: the state of the step's `grad_transform`, () where there is none.
    """

    store: kv.KVStore
    step: jax.Array
    rng: jax.Array
    transform: Any = ()

    @property
    def params(self) -> Any:
        """The parameters as they were given to `kv.from_params`."""
        return kv.to_params(self.store)


def create_state(
    store: kv.KVStore,
    rng: jax.Array | int,
    *,
    devices: Sequence[Device] | None = None,
    grad_transform: optax.GradientTransformation | None = None,
) -> TrainState:
    """The state before the first step, copied onto the devices that will train.

    Args:
        store: made by `kv.from_params`; it stays valid, the state holds copies.
        rng: a random key, or an int to make one of.
        devices: None takes the store's, or else all of them.
        grad_transform: the one given to `make_train_step`, where it has a state.

    Raises:
        ValueError: the store was not made by `kv.from_params`.

    Example:
        >>> import optax
        >>> from jaxpar import kv, models, train
        >>> params = models.lenet.init(jax.random.key(0))
        >>> state = train.create_state(kv.from_params(params, optimizer=optax.sgd(0.2)), 0)
        >>> int(state.step)
        0
    """
    if store.treedef is None:
        raise ValueError("train.create_state: the store must be made by kv.from_params, so that it knows the params")
    if devices is None:
        devices = store.devices or tuple(jax.devices())
    rng = jax.random.key(rng) if isinstance(rng, (int, np.integer)) else rng
    transform = () if grad_transform is None else grad_transform.init(kv.to_params(store))
    state = TrainState(store, jnp.zeros((), jnp.int32), rng, transform)
    return _on(state, tuple(devices))


def _on(state: TrainState, devices: tuple[Device, ...]) -> TrainState:
    """The state copied onto these devices."""
    rest = copied((state.step, state.rng, state.transform), NamedSharding(mesh_of(devices), P()))
    return TrainState(kv.place(state.store, devices), *rest)


def make_train_step(
    loss_fn: LossFn,
    *,
    engine: parallel.Engine = "pmap",
    devices: Sequence[Device] | None = None,
    axis_name: str = "data",
    grad_transform: optax.GradientTransformation | None = None,
) -> TrainStep:
    """A data-parallel training step over the devices that the state lives on.

    Each device takes its share of the batch and computes the gradient of its mean loss; that gradient divided
    by the number of devices is pushed, so the sum over the devices is the gradient of the mean over the batch,
    whatever their number; the store's updater does the rest.

    Args:
        loss_fn: `loss_fn(params, batch, rng) -> (loss, aux)`: the mean loss over the examples of `batch`, which
            is one device's share, and a dict of further values to report. `rng` differs from step to step and
            from device to device.
        engine: `pmap` or `shard_map`; same numbers from both.
        devices: None follows the state.
        axis_name: the name of the axis over the devices, for collectives in `loss_fn`.
        grad_transform: an optax transform of all gradients together, after they are summed and before the
            updater: the place for what couples keys, such as `optax.clip_by_global_norm`. Where it has a state,
            give it to `create_state` as well.

    Returns:
        `step(state, batch) -> (state, metrics)`, compiled once for each shape of a batch. `batch` is the global
        batch, a pytree of arrays with a common first axis that the number of devices divides. The memory of
        `state` is given to the new one: the old state cannot be used again. `metrics` are the means over the
        devices of `loss` and of what is in `aux`; they are on the devices, and reading one waits for the step.

    Raises:
        ValueError: an unknown engine; when called, a batch that cannot be divided.
        TypeError: when called, a `loss_fn` that returns something else.

    Example:
        >>> import optax
        >>> from jaxpar import kv, train
        >>> def loss_fn(params, batch, rng):
        ...     return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean(), {}
        >>> step = train.make_train_step(loss_fn)
        >>> store = kv.from_params({"w": jnp.zeros(1)}, optimizer=optax.sgd(0.5))
        >>> state = train.create_state(store, 0, devices=jax.devices()[:2])
        >>> state, metrics = step(state, {"x": jnp.ones((4, 1)), "y": jnp.ones(4)})
        >>> float(metrics["loss"]), state.params["w"].tolist()
        (1.0, [1.0])
    """
    parallel.check_engine(engine, "make_train_step")
    chosen = None if devices is None else parallel.check_devices(devices, "make_train_step")
    return TrainStep(loss_fn, engine, axis_name, grad_transform, chosen)


class TrainStep:
    """What `make_train_step` returns: call it with a state and a batch.

    Attributes:
        engine, axis_name, devices: as given.
    """

    def __init__(self, loss_fn: LossFn, engine: str, axis_name: str, grad_transform: Any, devices: Any):
        self.engine, self.axis_name, self.devices = engine, axis_name, devices
        self._one = _OneDevice(loss_fn, axis_name, grad_transform)
        self._programs: dict[tuple[Device, ...], Any] = {}

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        program, state, batch = self._prepared(state, batch)
        return program(state, batch)

    def lower(self, state: TrainState, batch: Batch) -> jax.stages.Lowered:
        """The step before compilation, to look at its text, costs or memory."""
        program, state, batch = self._prepared(state, batch)
        return program.lower(state, batch)

    def _prepared(self, state: TrainState, batch: Batch) -> tuple[Any, TrainState, Batch]:
        devices = self.devices or state.store.devices or tuple(jax.devices())
        if state.store.devices != devices:
            state = _on(state, devices)
        n = parallel.batch_length(batch, "train step")
        if n % len(devices):
            raise ValueError(
                f"train step: a batch of {n} cannot be divided by {len(devices)} devices; use a batch of "
                f"{n // len(devices) * len(devices) or len(devices)}, or pad it"
            )
        if devices not in self._programs:
            self._programs[devices] = self._compiled(devices)
        batch = _batch_on(batch, devices)
        settle((state.step, batch), devices)
        return self._programs[devices], state, batch

    def _compiled(self, devices: tuple[Device, ...]) -> Any:
        engine = _pmapped if self.engine == "pmap" else _shard_mapped

        def train_step(state: TrainState, batch: Batch) -> Any:
            new, metrics = engine(self._one, self.axis_name, devices, state, batch)
            # The new state lies exactly as the old one does, so the next step finds its program.
            shardings = [NamedSharding(mesh_of(devices), spec) for spec in _specs(new, STORE_AXIS)]
            leaves, structure = jax.tree.flatten(new)
            leaves = [lax.with_sharding_constraint(x, s) for x, s in zip(leaves, shardings, strict=True)]
            return structure.unflatten(leaves), metrics

        return jax.jit(train_step, donate_argnums=0)


def _batch_on(batch: Batch, devices: tuple[Device, ...]) -> Batch:
    """The batch, moved only where it lies on devices that are not the step's."""
    for leaf in jax.tree.leaves(batch):
        if isinstance(leaf, jax.Array) and not traced(leaf):
            there = leaf.sharding.device_set
            if len(there) != len(devices) or there != set(devices):
                return jax.device_put(batch, NamedSharding(mesh_of(devices), P(STORE_AXIS)))
    return batch


def _pmapped(one: Any, axis_name: str, devices: Any, state: TrainState, batch: Batch) -> Any:
    leaves, structure = jax.tree.flatten(state)
    axes = [None if spec == P() else 0 for spec in _specs(state, axis_name)]

    def body(leaves: list[jax.Array], batch: Batch) -> Any:
        new, metrics = one(structure.unflatten(leaves), batch)
        return jax.tree.leaves(new), metrics

    run = jax.pmap(body, axis_name, in_axes=(axes, 0), out_axes=(axes, None), devices=devices)
    k = len(devices)
    new, metrics = run(leaves, jax.tree.map(lambda x: x.reshape(k, x.shape[0] // k, *x.shape[1:]), batch))
    return structure.unflatten(new), metrics


def _shard_mapped(one: Any, axis_name: str, devices: Any, state: TrainState, batch: Batch) -> Any:
    specs = jax.tree.structure(state).unflatten(_specs(state, axis_name))
    return jax.shard_map(
        one,
        mesh=Mesh(np.array(devices), (axis_name,)),
        in_specs=(specs, P(axis_name)),
        out_specs=(specs, P()),
        check_vma=False,  # with the check on, the gradient of replicated params would come summed already
    )(state, batch)


def _specs(state: TrainState, axis_name: str) -> list[P]:
    rest = jax.tree.leaves((state.step, state.rng, state.transform))
    return jax.tree.leaves(kv.partition_specs(state.store, axis_name)) + [P() for _ in rest]


@dataclasses.dataclass(frozen=True)
class _OneDevice:
    """The step as one device runs it, inside the mapped axis."""

    loss_fn: LossFn
    axis_name: str
    grad_transform: Any

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        params = kv.to_params(state.store, axis_name=self.axis_name)
        rng = jax.random.fold_in(jax.random.fold_in(state.rng, state.step), lax.axis_index(self.axis_name))
        grads, metrics = self._gradient(params, batch, rng)
        summed, residuals = _push.reduce(state.store, grads, self.axis_name)
        transform = state.transform
        if self.grad_transform is not None:
            summed, transform = self._transformed(state, params, summed)
        values, states = _push.update(state.store, summed)
        store = dataclasses.replace(
            state.store,
            values={**state.store.values, **values},
            updater_state={**state.store.updater_state, **states},
            residuals={**state.store.residuals, **residuals},
        )
        return TrainState(store, state.step + 1, state.rng, transform), self._means(metrics)

    def _gradient(self, params: Any, batch: Batch, rng: jax.Array) -> tuple[dict[int, jax.Array], dict[str, Any]]:
        """What this device pushes for each floating parameter, and its metrics."""
        leaves, structure = jax.tree.flatten(params)
        keys = [k for k, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

        def loss(trained: list[jax.Array]) -> tuple[jax.Array, Any]:
            merged = {**dict(enumerate(leaves)), **dict(zip(keys, trained, strict=True))}
            return _checked_loss(self.loss_fn(structure.unflatten(list(merged.values())), batch, rng))

        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)([leaves[k] for k in keys])
        count = lax.axis_size(self.axis_name)
        return {k: g / count for k, g in zip(keys, grads, strict=True)}, {"loss": value, **aux}

    def _transformed(self, state: TrainState, params: Any, summed: dict[int, jax.Array]) -> Any:
        """The summed gradients through `grad_transform`; a sharded store's are gathered for it."""
        keys, store = list(summed), state.store
        whole = list(summed.values())
        if store.kind == "sharded":
            shapes = shapes_of(store)
            whole = collectives.all_gather(whole, [shapes[k] for k in keys], self.axis_name, store.limits)
        leaves, structure = jax.tree.flatten(params)
        grads = [jnp.zeros_like(leaf) for leaf in leaves]
        for k, g in zip(keys, whole, strict=True):
            grads[k] = g
        held = jax.tree.structure(state.transform)
        fresh = jax.eval_shape(self.grad_transform.init, params)
        if held != jax.tree.structure(fresh):
            if jax.tree.leaves(fresh):
                raise ValueError(
                    "train step: grad_transform has a state of its own; give it to train.create_state as well"
                )
            state = dataclasses.replace(state, transform=self.grad_transform.init(params))
        updates, transform = self.grad_transform.update(structure.unflatten(grads), state.transform, params)
        new = jax.tree.leaves(updates)
        own = collectives.own_chunk if store.kind == "sharded" else lambda x, _: x
        transform = transform if jax.tree.leaves(transform) else ()
        return {k: own(new[k], self.axis_name) for k in keys}, transform

    def _means(self, metrics: dict[str, Any]) -> dict[str, Any]:
        leaves, structure = jax.tree.flatten(metrics)
        floats = [jnp.asarray(x).astype(jnp.result_type(x, jnp.float32)) for x in leaves]
        sums = collectives.allreduce(floats, self.axis_name, collectives.Limits())
        return structure.unflatten([s / lax.axis_size(self.axis_name) for s in sums])


def _checked_loss(result: Any) -> tuple[jax.Array, dict[str, Any]]:
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise TypeError(
            "train step: loss_fn(params, batch, rng) must return (loss, aux) with aux a dict, which may be empty; "
            f"got {type(result).__name__}"
        )
    loss, aux = result
    if jnp.shape(loss) != ():
        raise TypeError(
            f"train step: the loss must be a scalar, the mean over the examples; got shape {jnp.shape(loss)}"
        )
    return loss, aux
