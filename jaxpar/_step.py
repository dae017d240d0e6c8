"""The training step: forward, backward, aggregated push, updater and pull, compiled into one program."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from . import _check, kv, parallel
from ._apart import Apart, maker
from ._donated import check_alive
from ._finite import ACTIONS, Guard
from ._gradient import Gradient
from ._local_steps import LocalSteps, check_local_steps
from ._one_device import OneDevice
from ._pmap_across import PmapAcross
from ._program import Program, finisher
from ._put import put
from ._recent import Recent
from ._scaling import DynamicLossScale, check_loss_scale
from ._settle import settle
from ._state import TrainState, carries, everywhere, placed
from ._store import STORE_AXIS, mesh_of
from ._types import Device, traced

if TYPE_CHECKING:
    import optax

Batch = Any
LossFn = (  # with a model state, or without
    Callable[[Any, Any, jax.Array], tuple[jax.Array, dict[str, Any]]]
    | Callable[[Any, Any, jax.Array, Any], tuple[jax.Array, dict[str, Any], Any]]
)


def make_train_step(
    loss_fn: LossFn,
    *,
    engine: parallel.Engine = "pmap",
    devices: Sequence[Device] | None = None,
    axis_name: str = "data",
    grad_transform: optax.GradientTransformation | None = None,
    accumulate: int = 1,
    compute_dtype: Any = None,
    remat: bool | Callable[..., Any] = False,
    nonfinite: Literal["ignore", "skip", "stop"] = "ignore",
    loss_scale: float | Literal["dynamic"] | DynamicLossScale | None = None,
    local_steps: int | None = None,
    outer_optimizer: optax.GradientTransformation | None = None,
) -> TrainStep:
    """A data-parallel training step over the devices that the state lives on.

    Each device takes its share of the batch and computes the gradient of its mean loss; that gradient divided
    by the number of devices is pushed, so the sum over the devices is the gradient of the mean over the batch,
    whatever their number; the store's updater does the rest.

    Args:
        loss_fn: `loss_fn(params, batch, rng) -> (loss, aux)`: the mean loss over the examples of `batch`, which
            is one device's share, and a dict of further values to report. `rng` differs from step to step and
            from device to device. Where the state has a `model_state`,
            `loss_fn(params, batch, rng, model_state) -> (loss, aux, new_model_state)`; the means over the
            devices of its floating leaves are kept, other leaves must come out the same on all devices.
        engine: `pmap` or `shard_map`; same numbers from both.
        devices: None follows the state.
        axis_name: the name of the axis over the devices, for collectives in `loss_fn`.
        grad_transform: an optax transform of all gradients together, after they are summed and before the
            updater: the place for what couples keys, such as `optax.clip_by_global_norm`. It gets whole gradients and
            parameters in every kind of store. In kind `sharded` it may be a whole optimizer that is not elementwise,
            with `updaters.accumulate` in the store; its state is whole on each device.
        accumulate: cuts each device's share in so many microbatches, taken one after the other; their gradients
            are averaged and pushed once. Each gets an `rng` of its own, and the `model_state` of the one before.
        compute_dtype: such as `jnp.bfloat16`: `loss_fn` gets the floating arrays of `params` and `batch` in it.
            The store, the gradients that are pushed, their sums and the loss stay float32.
        remat: True, or a policy of `jax.checkpoint_policies`: `loss_fn` is wrapped in `jax.checkpoint`, so that
            activations are computed again on the way back, all or those that the policy does not save.
        nonfinite: what a NaN or infinite loss or gradient on any device does. `ignore`: nothing, it is pushed as
            any other number. `skip`: that update is left out on all devices (store, transform and model state
            stay as they are, the step is counted); `metrics["skipped"]` is 1. `stop`: nothing changes from that
            step on, not even the number of the step, until the error of `check_finite`, or `fit`, hands out the
            state to go on with.
        loss_scale: a number that the loss is multiplied by and its gradients are divided by, before they are
            pushed; "dynamic", or a `DynamicLossScale`, for one that adapts itself. Made for float16. A dynamic
            scale leaves out the updates that overflow, whatever `nonfinite` says, and stops nothing unless the
            loss itself is not finite or the scale is down at its least.
        local_steps: H: every device makes H updates of its own, by the store's updater and with the mean gradient
            of its share of each batch, before all agree on new parameters; see `jaxpar._local_steps`. The store
            holds the parameters on which they agreed last, so that is what `state.params`, `evaluate` and `fit`
            see; `step.finish(state)` ends a round before its time. A `grad_transform` gets each device's own
            gradients. The metrics, and a `model_state`, are means over the devices at every step.
        outer_optimizer: with `local_steps`, an optax transform for the mean over the devices of (parameters at the
            start of the round - own parameters), such as `optax.sgd(0.7, momentum=0.9, nesterov=True)`, which is
            DiLoCo (Douillard et al. 2023). None averages the parameters.

    Returns:
        `step(state, batch) -> (state, metrics)`, compiled once for each shape of a batch. `batch` is the global
        batch, a pytree of arrays with a common first axis that the number of devices divides. The memory of
        `state` is given to the new one: the old state cannot be used again. `metrics` are the means over the
        devices of `loss` and of what is in `aux`; they are on the devices, and reading one waits for the step.
        `skipped` (0.0 or 1.0) and `loss_scale` are beside them where the step can skip, or scales dynamically.

    Raises:
        ValueError: an unknown engine or another option out of its range; when called, a batch that cannot be
            divided.
        TypeError: a `compute_dtype` that is not floating; when called, a `loss_fn` that returns something else.

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
    if not callable(loss_fn):
        raise TypeError(
            "make_train_step: expected the function loss_fn(params, batch, rng) itself, not what it returns; "
            f"got {_check.describe(loss_fn)}"
        )
    parallel.check_engine(engine, "make_train_step")
    chosen = None if devices is None else parallel.check_devices(devices, "make_train_step")
    _check_options(accumulate, compute_dtype, remat, nonfinite)
    check_local_steps(local_steps, outer_optimizer)
    scaling = check_loss_scale(loss_scale)
    dynamic = scaling if isinstance(scaling, DynamicLossScale) else None
    guard = Guard(nonfinite == "stop", dynamic) if nonfinite != "ignore" or dynamic else None
    gradient = Gradient(loss_fn, accumulate, compute_dtype, remat)
    options = gradient, axis_name, grad_transform, scaling, guard
    one = OneDevice(*options) if local_steps is None else LocalSteps(*options, int(local_steps), outer_optimizer)
    return TrainStep(one, engine, chosen, nonfinite)


def _check_options(accumulate: Any, compute_dtype: Any, remat: Any, nonfinite: Any) -> None:
    if isinstance(accumulate, bool) or not isinstance(accumulate, (int, np.integer)) or accumulate < 1:
        raise ValueError(f"make_train_step: accumulate must be an int of 1 or more, got {accumulate!r}")
    if compute_dtype is not None and not jnp.issubdtype(compute_dtype, jnp.floating):
        raise TypeError(f"make_train_step: compute_dtype must be a floating dtype, got {compute_dtype!r}")
    if not isinstance(remat, bool) and not callable(remat):
        raise ValueError(
            f"make_train_step: remat must be True, False or a policy such as jax.checkpoint_policies.dots_saveable, "
            f"got {remat!r}"
        )
    if nonfinite not in ACTIONS:
        raise ValueError(f"make_train_step: nonfinite must be one of {', '.join(ACTIONS)}, got {nonfinite!r}")


class TrainStep:
    """What `make_train_step` returns: call it with a state and a batch.

    Attributes:
        engine, axis_name, devices, nonfinite: as given.
    """

    def __init__(self, one: OneDevice, engine: str, devices: tuple[Device, ...] | None, nonfinite: str):
        self.engine: str = engine
        self.axis_name: str = one.axis_name
        self.devices: tuple[Device, ...] | None = devices
        self.nonfinite: str = nonfinite
        self._one = one
        self._programs = Recent(functools.partial(_compiled, one, engine))
        self._finishers = Recent(functools.partial(finisher, one, one.axis_name))
        self._stateless = one.grad_transform is None  # whether the grad_transform is known to have no state

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        return self._run(state, batch)

    def many(
        self, state: TrainState, batches: Batch, first: int = 0, end: int | None = None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Several steps by one program, which the host starts once: for short steps.

        The numbers are those of as many calls of the step, on CPUs nearly always to the last bit. The steps are a loop,
        and XLA's CPU compiler has slow code alone for a convolution inside of one (jax 0.10 to 0.12): there a step with
        convolutions is better called for each batch. `models.lenet` has none from 8 images a device on.

        Args:
            batches: a pytree as the step takes it, of arrays with one more axis in front: one batch after the other.
            first, end: takes `batches[first:end]` only. It is the same program for any of them.

        Returns:
            the state after the last step, and the metrics with the batches as a first axis, zeros for those that were
            left out.

        Raises:
            ValueError: batches that differ in number or that cannot be divided; a `pmap` over several processes,
                which no program can hold.

        Example:
            >>> import optax
            >>> from jaxpar import kv, train
            >>> step = train.make_train_step(lambda params, batch, rng: (((params["w"] - batch) ** 2).mean(), {}))
            >>> store = kv.from_params({"w": jnp.zeros(())}, optimizer=optax.sgd(0.25))
            >>> state = train.create_state(store, 0, devices=jax.devices()[:2])
            >>> state, metrics = step.many(state, jnp.ones((3, 8)))  # three steps with batches of eight
            >>> metrics["loss"].tolist(), float(state.params["w"])
            ([1.0, 0.25, 0.0625], 0.875)
        """
        number = parallel.batch_length(batches, "train step, many")
        first, end, _ = slice(first, end).indices(number)
        return self._run(state, batches, first, end)

    def _run(self, state: TrainState, batch: Batch, *part: int) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step; or several, with the part of the batches that they take."""
        if not isinstance(state, TrainState):
            raise TypeError(
                "train step: expected a state, train.create_state(kv.from_params(params, optimizer=...), rng); "
                f"got {_check.describe(state)}"
            )
        try:
            key = maker(state)
            program = None if key is None else self._programs.find(key)
            if program is not None and not program.moves:
                try:
                    return program(state, batch, *part)
                except (TypeError, ValueError):
                    pass  # of a batch on other devices, or of none at all: it is looked at now
            program, state, batch = self._prepared(state, batch, axis=1 if part else 0)
            return program(state, batch, *part)
        except RuntimeError as error:
            if "deleted" in str(error):
                check_alive(state, "train step")
            raise

    def lower(self, state: TrainState, batch: Batch, *, many: bool = False) -> jax.stages.Lowered:
        """The step before compilation, to look at its text, costs or memory; or what `many` runs."""
        program, state, batch = self._prepared(state, batch, axis=int(many))
        return program.lower(state, batch, *([0, 0] if many else []))

    def slow_in_a_loop(self, state: TrainState, batches: Batch) -> bool:
        """Whether `many` had better be left alone on CPUs: where the step has a convolution of XLA's."""
        return "stablehlo.convolution" in self.lower(state, batches, many=True).as_text()

    @property
    def skips(self) -> bool:
        """Whether the step may leave an update out; `metrics` has `skipped` then."""
        return self._one.guard is not None

    def complete(self, state: TrainState) -> TrainState:
        """The state on the step's devices, with all parts that the step keeps in it; those it has stay.

        The first call of the step does the same. It is for a state that a checkpoint is restored into:
        `checkpoint.restore(path, step.complete(train.create_state(store, rng)))`.
        """
        devices = self._devices_for(state)
        if state.store.devices != devices:
            state = placed(state, devices)
        missing = self._missing(state)
        state = dataclasses.replace(state, **everywhere(missing, devices)) if missing else state
        return self._one.begun(state, devices)

    def finish(self, state: TrainState) -> TrainState:
        """The state with nothing left to come, for the end of training; the one that is given stays valid.

        What waits in a store with a staleness is applied, the oldest first; a round of local steps that is under
        way ends, and all devices agree. Otherwise it is the state as it is. Going on from it is fine.
        """
        devices = self._devices_for(state)
        state = self.complete(state)
        if not state.store.staleness and not carries(state.local):
            return state
        settle(state, devices)
        return self._finishers(devices, jax.tree.structure(state))(state)

    def _missing(self, state: TrainState) -> dict[str, Any]:
        """The parts of a state that it has not and that this step keeps, as they are before the first step."""
        one, missing = self._one, {}
        if not self._stateless and not carries(state.transform):
            fresh = one.grad_transform.init(kv.to_params(state.store))
            self._stateless = not jax.tree.leaves(fresh)
            missing |= {} if self._stateless else {"transform": fresh}
        if one.guard is not None and not carries(state.nonfinite):
            missing["nonfinite"] = one.guard.start(state.store)
        if isinstance(one.scaling, DynamicLossScale) and not carries(state.loss_scale):
            missing["loss_scale"] = one.scaling.start()
        return missing

    def _devices_for(self, state: TrainState) -> tuple[Device, ...]:
        return self.devices or state.store.devices or tuple(jax.devices())

    def _prepared(self, state: TrainState, batch: Batch, axis: int = 0) -> tuple[Any, TrainState, Batch]:
        """The program for them, and both as it wants them: complete, looked at, and on its devices.

        Args:
            axis: that of the examples.
        """
        devices = self._devices_for(state)
        state = self.complete(state)
        program = self._programs(devices, Apart.of(state).structure)
        _check_batch(batch, len(devices), self._one.gradient.accumulate, axis)
        arrays = [leaf for leaf in jax.tree.leaves(batch) if isinstance(leaf, jax.Array) and not traced(leaf)]
        if any(array.sharding.device_set != set(devices) for array in arrays):
            program.moves = True
            batch = put(batch, NamedSharding(mesh_of(devices), P(*axis * [None], STORE_AXIS)))
        return program, state, batch


def _compiled(one: OneDevice, engine: str, devices: tuple[Device, ...], structure: Any) -> Any:
    """The program for states of a structure: of an optimizer, a model and what else the step keeps in them."""
    if engine == "pmap" and len({d.process_index for d in devices}) > 1:
        return PmapAcross(one, one.axis_name, devices)

    def check(batch: Batch) -> None:
        _check_batch(batch, len(devices), one.gradient.accumulate)

    return Program(one, engine, one.axis_name, (devices, structure), check)


def _check_batch(batch: Batch, devices: int, parts: int, axis: int = 0) -> None:
    n = parallel.batch_length(batch, "train step", axis)
    if n % (devices * parts) == 0:
        return
    fit = n // (devices * parts) * devices * parts or devices * parts
    if n % devices:
        raise ValueError(
            f"train step: a batch of {n} cannot be divided by {devices} devices; use a batch of {fit}, or pad it"
        )
    raise ValueError(
        f"train step: a batch of {n} gives each of {devices} devices {n // devices} examples, which cannot be cut "
        f"in accumulate={parts} microbatches; use a batch of {fit}"
    )
