"""The training step: forward, backward, aggregated push, updater and pull, compiled into one program."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec as P

from ... import kv
from ..._core import checks
from ..._core.arrays import Device, is_traced
from ..._core.recent import Recent
from ..._devices.donation import check_not_donated
from ..._devices.emulated import wait_before_collectives
from ..._devices.mesh import STORE_AXIS, mesh_of
from ..._devices.placement import put
from .apart import Apart, maker
from .device_step import DeviceStep
from .loss_scale import DynamicLossScale
from .pmap_processes import PmapAcross
from .programs import Program, finisher
from .state import TrainState, carries, everywhere, placed

Batch = Any


LossFn = (  # with a model state, or without
    Callable[[Any, Any, jax.Array], tuple[jax.Array, dict[str, Any]]]
    | Callable[[Any, Any, jax.Array, Any], tuple[jax.Array, dict[str, Any], Any]]
)


class TrainStep:
    """What `make_train_step` returns: call it with a state and a batch.

    Attributes:
        engine, axis_name, devices, nonfinite: as given.
    """

    def __init__(self, one: DeviceStep, engine: str, devices: tuple[Device, ...] | None, nonfinite: str):
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
        number = checks.batch_length(batches, "train step, many")
        first, end, _ = slice(first, end).indices(number)
        return self._run(state, batches, first, end)

    def _run(self, state: TrainState, batch: Batch, *part: int) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step; or several, with the part of the batches that they take."""
        if not isinstance(state, TrainState):
            raise TypeError(
                "train step: expected a state, train.create_state(kv.from_params(params, optimizer=...), rng); "
                f"got {checks.describe(state)}"
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
                check_not_donated(state, "train step")
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
        wait_before_collectives(state, devices)
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
        arrays = [leaf for leaf in jax.tree.leaves(batch) if isinstance(leaf, jax.Array) and not is_traced(leaf)]
        if any(array.sharding.device_set != set(devices) for array in arrays):
            program.moves = True
            batch = put(batch, NamedSharding(mesh_of(devices), P(*axis * [None], STORE_AXIS)))
        return program, state, batch


def _compiled(one: DeviceStep, engine: str, devices: tuple[Device, ...], structure: Any) -> Any:
    """The program for states of a structure: of an optimizer, a model and what else the step keeps in them."""
    if engine == "pmap" and len({d.process_index for d in devices}) > 1:
        return PmapAcross(one, one.axis_name, devices)

    def check(batch: Batch) -> None:
        _check_batch(batch, len(devices), one.gradient.accumulate)

    return Program(one, engine, one.axis_name, (devices, structure), check)


def _check_batch(batch: Batch, devices: int, parts: int, axis: int = 0) -> None:
    n = checks.batch_length(batch, "train step", axis)
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
