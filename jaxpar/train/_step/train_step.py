"""The training step: forward, backward, push, updater and pull, compiled into one program."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ... import kv
from ..._core import checks
from ..._core.arrays import Device
from ..._core.calls import answers
from ..._core.recent import Recent
from ..._devices import formulas, processes
from ..._devices.emulated import wait_before_collectives
from ..._devices.mesh import auto_mesh, mesh_of
from ..._devices.user_mesh import check_traced, outside_mesh, with_types, without_types
from ...kv import _store
from .device_step import DeviceStep
from .engines import ENGINES, Batch, Engine
from .global_step import GlobalStep
from .gradient import LossFn, check_loss_takes
from .pmap_program import make_program
from .programs import Program, make_finish
from .state import (
    TrainState,
    carries,
    check_is_state,
    everywhere,
    explain_donated,
    place_on_mesh,
    place_state,
)


class TrainStep:
    """A training step, called with a state and a batch. Made by `make_train_step`.

    Attributes:
        engine, axis_name, devices, nonfinite, virtual_shards: as given.
    """

    def __init__(
        self,
        one: DeviceStep,
        engine: str,
        axis_name: str,
        devices: tuple[Device, ...] | None,
        nonfinite: str,
        mesh: Mesh | None,
        whole: GlobalStep | None,
        virtual_shards: int | None,
    ):
        self.engine: str = engine
        self.axis_name: str = axis_name
        self.devices: tuple[Device, ...] | None = devices
        self.nonfinite: str = nonfinite
        self.virtual_shards: int | None = virtual_shards
        self._one = one
        self._mesh, self._whole = mesh, whole
        self._programs = Recent(lambda treedef: make_program(*self._engine_for(treedef), treedef))
        self._finishers = Recent(lambda treedef: make_finish(*self._engine_for(treedef), treedef))
        self._last: Any = (_no_state, None)  # a reference to the last state returned, and its program

    @answers("train step")
    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step. `state` is donated: use the one returned."""
        last, program = self._last
        if last() is not state or state is None or not jax.sharding.get_abstract_mesh().empty:
            return self._run(state, batch)
        try:  # as in every step of a loop but the first
            new, metrics = program(state, batch)
        except RuntimeError as error:
            explain_donated(error, state)
            raise
        self._last = weakref.ref(new), program
        return new, metrics

    @answers("train step, many")
    def many(
        self, state: TrainState, batches: Batch, first: int = 0, end: int | None = None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Several steps by one program, which the host starts once. For short steps.

        The steps are a loop. The numbers are those of as many calls, on CPUs nearly always to the last bit, but for
        convolutions: XLA has slow code for them in loops, so they are products there. Call such a step for each batch.

        Args:
            batches: a pytree as the step takes it, of arrays with one more axis in front, that of the batches.
            first, end: takes `batches[first:end]` only. It is the same program for any of them.

        Returns:
            The state after the last step, and the metrics with the batches as a first axis, zeros outside of
            `first:end`.

        Raises:
            ValueError: batches that differ in number or that cannot be divided, or a `pmap` over several processes,
                which cannot be a part of a program.

        Example:
            >>> import jax, jax.numpy as jnp, optax
            >>> from jaxpar import kv, train
            >>> step = train.make_train_step(lambda params, batch, rng: (((params["w"] - batch) ** 2).mean(), {}))
            >>> store = kv.from_params({"w": jnp.zeros(())}, optimizer=optax.sgd(0.25))
            >>> state = train.create_state(store, 0, devices=jax.devices()[:2])
            >>> state, metrics = step.many(state, jnp.ones((3, 8)))  # three steps with batches of eight
            >>> metrics["loss"].tolist(), float(state.params["w"])
            ([1.0, 0.25, 0.0625], 0.875)
        """
        first, end, _ = slice(first, end).indices(checks.batch_length(batches, "train step, many"))
        return self._run(state, batches, first, end)

    def _run(self, state: TrainState, batch: Batch, *part: int) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step, or several with the part of the batches that they take."""
        processes.refuse_elastic("train step")
        with _outside_mesh() as user:
            if user is not None:
                state, batch = without_types((state, batch))
            elif not jax.sharding.get_abstract_mesh().empty:
                check_traced((state, batch), "train step")
            check_is_state(state, "train step")
            try:
                program, state = self._prepare(state, user)
                new, metrics = program(state, batch, *part)
            except RuntimeError as error:
                explain_donated(error, state)
                raise
            self._last = weakref.ref(new), program
            return new, metrics if user is None else with_types(metrics, user)

    @answers("train step, lower")
    def lower(self, state: TrainState, batch: Batch, *, many: bool = False) -> jax.stages.Lowered:
        """The step before compilation, for its text, costs or memory. With `many`, what `step.many` runs.
        With `virtual_shards` it is the gradient of one shard only."""
        with _outside_mesh() as user:
            program, state = self._prepare(without_types(state), user)
            return program.lower(state, batch, *([0, 0] if many else []))

    def check(self, state: TrainState, shapes: Batch) -> list[str]:
        """Raise what a call would raise for a batch of these shapes. Nothing is computed.

        Args:
            state: as from `complete`.
            shapes: a pytree of `jax.ShapeDtypeStruct`s. None: only the arguments of `loss_fn` are checked.

        Returns:
            The names of the metrics. Empty where they are not known before the first call.
        """
        has_state = carries(state.model_state)
        hint = ", since the state has a model_state" if has_state else ""
        check_loss_takes(self._one.gradient.loss_fn, has_state, "train step", hint)
        if shapes is None:
            return []
        with _outside_mesh() as user:
            program, state = self._prepare(without_types(state), user)
            return program.check(state, shapes)

    def compile_own(self, state: TrainState, batch: Batch) -> list[str]:
        """Compile what the devices of this process run by themselves, and return its text. The state stays valid."""
        program, state = self._prepare(state, None)
        return program.compile_own(state, batch)

    def slow_in_a_loop(self, state: TrainState, batches: Batch) -> bool:
        """Whether `many` is slow on CPUs: whether the step has a convolution, of XLA's or as products in a loop."""
        text = self.lower(state, batches, many=True).as_text()
        return any(name in text for name in ("stablehlo.convolution", formulas.CONVOLUTION_IN_LOOP))

    def batch_sharding(self, state: TrainState) -> NamedSharding | None:
        """The sharding of a batch over a mesh that has further axes. None: all devices of the state split it."""
        if self._engine_name(state.store) != "jit" or self._whole is None:
            return None
        mesh, axes = _store.mesh_of_values(state.store) if state.store.shardings else self._mesh, self._whole.axes
        if mesh is None or not set(axes) < set(mesh.axis_names):
            return None
        return NamedSharding(auto_mesh(mesh), P(axes[0] if len(axes) == 1 else axes))

    @answers("train step, on")
    def on(self, devices: Sequence[Device]) -> TrainStep:
        """The same step over other devices. It takes a state from any others, and compiles for these.

        Raises:
            ValueError: the step was made for a mesh, or a device is given twice.
        """
        chosen = checks.check_devices(devices, "train step, on")
        if self._mesh is not None:
            raise ValueError("train step, on: this step was made for a mesh; make another by make_train_step(mesh=...)")
        options = self.nonfinite, None, self._whole, self.virtual_shards
        return TrainStep(self._one, self.engine, self.axis_name, chosen, *options)

    @property
    def loss_fn(self) -> LossFn:
        """As given to `make_train_step`."""
        return self._one.gradient.loss_fn

    @property
    def skips(self) -> bool:
        """Whether the step may skip an update. `metrics` then has `skipped`."""
        return self._one.guard is not None

    @answers("train step, complete")
    def complete(self, state: TrainState) -> TrainState:
        """The state on the step's devices, with all parts that the step keeps in it. Parts that it has stay.

        The first call of the step does the same. Use it for a state that a checkpoint is restored into:
        `checkpoint.restore(path, step.complete(train.create_state(store, rng)))`.
        """
        with _outside_mesh() as user:
            return self._complete(without_types(state), user)

    def _complete(self, state: TrainState, user: Mesh | None) -> TrainState:
        one, engine = self._engine_of(state.store)
        if engine.on_mesh:
            free = self.devices is None and state.store.devices is None
            state = place_on_mesh(state, self._mesh, (user if free else None) or mesh_of(self._devices_for(state)))
        devices = self._devices_for(state)
        if state.store.devices != devices:
            state = place_state(state, devices)
        missing = one.missing_parts(state)
        state = dataclasses.replace(state, **everywhere(missing, state.store)) if missing else state
        return one.with_initial_parts(state, devices)

    @answers("train step, finish")
    def finish(self, state: TrainState) -> TrainState:
        """The state with nothing pending, for the end of training. The given state stays valid.

        Pending pushes of a store with a staleness are applied, the oldest first. An unfinished round of local steps
        ends, and all devices agree. Any other state is returned as it is. Training can go on from the result.
        """
        with _outside_mesh() as user:
            devices = self._devices_for(state)
            state = self._complete(without_types(state), user)
            if not state.store.staleness and not carries(state.local):
                return state
            wait_before_collectives(state, devices)
            return self._finishers(jax.tree.structure(state))(state)

    def _engine_name(self, store: kv.KVStore) -> str:
        """The engine for a store, see `make_train_step`."""
        if self.engine != "auto":
            if store.shardings and self.engine != "jit":
                raise ValueError(
                    f"train step: values of this store are split over a mesh in their own shapes, and engine "
                    f"{self.engine!r} gives each device whole values or flat shares; use engine 'jit' or 'auto'"
                )
            return self.engine
        if self._mesh is not None or store.shardings:
            return "jit"
        devices = self.devices or store.devices or processes.devices()
        return "shard_map" if len({d.process_index for d in devices}) > 1 else "pmap"

    def _engine_of(self, store: kv.KVStore) -> tuple[DeviceStep, Engine]:
        name = self._engine_name(store)
        if name != "jit":
            return self._one, ENGINES[name]
        if self._whole is None:
            reason = "local_steps are updates of each device by itself"
            if self.virtual_shards is not None:
                reason = f"virtual_shards={self.virtual_shards} fixes the order of sums that the compiler chooses here"
            raise ValueError(
                f"train step: values of this store are split over a mesh, and {reason}; "
                "use kind 'device' without mesh= and sharding="
            )
        return self._whole, ENGINES[name]

    def _engine_for(self, treedef: Any) -> tuple[DeviceStep, Engine]:
        return self._engine_of(treedef.unflatten(range(treedef.num_leaves)).store)

    def _devices_for(self, state: TrainState) -> tuple[Device, ...]:
        return self.devices or state.store.devices or processes.devices()

    def _prepare(self, state: TrainState, user: Mesh | None) -> tuple[Program, TrainState]:
        """The program for a state, and the complete state.

        The state that the last call returned has the structure of that call. Where there is a program for the structure
        of a state, the state is complete and on the program's devices.
        """
        last, program = self._last
        if last() is state:
            return program, state
        state = without_types(state)
        program = self._programs.find((jax.tree.structure(state),))
        if program is None:
            state = self._complete(state, user)
            program = self._programs(jax.tree.structure(state))
        return program, state


def _outside_mesh() -> contextlib.AbstractContextManager[Mesh | None]:
    """As `outside_mesh`, without a call where no mesh is set."""
    return contextlib.nullcontext() if jax.sharding.get_abstract_mesh().empty else outside_mesh()


def _no_state() -> None:
    """A reference to a state that is gone."""
