"""The training step: forward, backward, push, updater and pull, compiled into one program."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ... import kv
from ..._core import checks
from ..._core.arrays import Device
from ..._core.calls import answers
from ..._core.recent import Recent
from ..._cpu import is_slow_in_a_loop
from ..._devices import processes
from ..._devices.mesh import auto_mesh, mesh_of
from ..._devices.user_mesh import check_traced, outside_mesh, with_types, without_types
from ..._store.store import mesh_of_values
from .device_step import DeviceStep
from .global_step import GlobalStep
from .gradient import LossFn, check_loss_takes
from .programs import ENGINES, Batch, Program
from .state import (
    TrainState,
    carries,
    check_is_state,
    everywhere,
    explain_donated,
    place_on_mesh,
    place_state,
)
from .virtual import VirtualProgram, VirtualStep


@dataclasses.dataclass(eq=False, repr=False)
class TrainStep:
    """A training step, called with a state and a batch. Made by `make_train_step`.

    Attributes:
        engine, axis_name, devices, nonfinite, virtual_shards, mesh: as given.
        device_step: what one device does.
        global_step: what all devices do under engine `jit`. None: that engine is refused.
    """

    device_step: DeviceStep
    global_step: GlobalStep | None
    engine: str
    axis_name: str
    devices: tuple[Device, ...] | None
    nonfinite: str
    virtual_shards: int | None
    mesh: Mesh | None

    def __post_init__(self) -> None:
        self._programs = Recent(self._make_program)
        self._returned: Callable[[], TrainState | None] = lambda: None  # a weak reference to what a call returned last

    @answers("train step")
    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step. `state` is donated: use the one returned."""
        return self._run(state, batch)

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
            ValueError: batches that differ in number or that cannot be divided.

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
        with outside_mesh() as user:
            if user is not None:
                state, batch = without_types((state, batch))
            elif not jax.sharding.get_abstract_mesh().empty:
                check_traced((state, batch), "train step")
            check_is_state(state, "train step")
            try:
                program, leaves = self._prepare(state, user)
                new, metrics = program(leaves, batch, *part)
            except RuntimeError as error:
                explain_donated(error, state)
                raise
            self._returned = weakref.ref(new)
            return new, metrics if user is None else with_types(metrics, user)

    @answers("train step, lower")
    def lower(self, state: TrainState, batch: Batch, *, many: bool = False) -> jax.stages.Lowered:
        """The step before compilation, for its text, costs or memory. With `many`, what `step.many` runs.
        With `virtual_shards` it is the gradient of one shard only."""
        with outside_mesh() as user:
            program, leaves = self._prepare(state, user)
            return program.lower(leaves, batch, *([0, 0] if many else []))

    def check(self, state: TrainState, shapes: Batch) -> list[str]:
        """Raise what a call would raise for a batch of these shapes. Nothing is computed.

        Args:
            state: as from `complete`.
            shapes: a pytree of `jax.ShapeDtypeStruct`s. None: only the arguments of `loss_fn` are checked.

        Returns:
            The names of the metrics. Empty where they are not known before the first call.
        """
        if shapes is None:
            check_loss_takes(self.loss_fn, carries(state.model_state))
            return []
        with outside_mesh() as user:
            program, leaves = self._prepare(state, user)
            return program.check(leaves, shapes)

    def compile_own(self, state: TrainState, batch: Batch) -> list[str]:
        """Compile what the devices of this process run by themselves, and return its text. The state stays valid."""
        program, leaves = self._prepare(state, None)
        return program.compile_own(leaves, batch)

    def slow_in_a_loop(self, state: TrainState, batches: Batch) -> bool:
        """Whether `many` is slow on the step's devices: on CPUs where the step has a convolution."""

        def lower() -> str:
            return self.lower(state, batches, many=True).as_text()

        return is_slow_in_a_loop(lower, self._devices_for(state)[0].platform)

    def batch_sharding(self, state: TrainState) -> NamedSharding | None:
        """The sharding of a batch over a mesh that has further axes. None: all devices of the state split it."""
        if self._engine_name(state.store) != "jit" or self.global_step is None:
            return None
        mesh, axes = mesh_of_values(state.store) if state.store.shardings else self.mesh, self.global_step.axes
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
        if self.mesh is not None:
            raise ValueError("train step, on: this step was made for a mesh; make another by make_train_step(mesh=...)")
        return dataclasses.replace(self, devices=chosen)

    @property
    def loss_fn(self) -> LossFn:
        """As given to `make_train_step`."""
        return self.device_step.gradient.loss_fn

    @property
    def skips(self) -> bool:
        """Whether the step may skip an update. `metrics` then has `skipped`."""
        return self.device_step.guard is not None

    @answers("train step, complete")
    def complete(self, state: TrainState) -> TrainState:
        """The state on the step's devices, with all parts that the step keeps in it. Parts that it has stay.

        The first call of the step does the same. Use it for a state that a checkpoint is restored into:
        `checkpoint.restore(path, step.complete(train.create_state(store, rng)))`.
        """
        with outside_mesh() as user:
            return self._complete(without_types(state), user)

    def _complete(self, state: TrainState, user: Mesh | None) -> TrainState:
        step = self._step_for(state.store)
        if step is self.global_step:
            free = self.devices is None and state.store.devices is None
            state = place_on_mesh(state, self.mesh, (user if free else None) or mesh_of(self._devices_for(state)))
        devices = self._devices_for(state)
        if state.store.devices != devices:
            state = place_state(state, devices)
        missing = step.missing_parts(state)
        state = dataclasses.replace(state, **everywhere(missing, state.store)) if missing else state
        return step.with_initial_parts(state, devices)

    @answers("train step, finish")
    def finish(self, state: TrainState) -> TrainState:
        """The state with nothing pending, for the end of training. The given state stays valid.

        Pending pushes of a store with a staleness are applied, the oldest first. An unfinished round of local steps
        ends, and all devices agree. Any other state is returned as it is. Training can go on from the result.
        """
        with outside_mesh() as user:
            if not state.store.staleness and not carries(state.local):
                return self._complete(without_types(state), user)
            program, leaves = self._prepare(state, user)
            assert isinstance(program, Program)  # virtual shards leave nothing pending
            return program.finish(leaves)

    def _engine_name(self, store: kv.KVStore) -> str:
        """The engine for a store, see `make_train_step`."""
        if self.engine == "auto":
            return "jit" if self.mesh is not None or store.shardings else "shard_map"
        if store.shardings and self.engine != "jit":
            raise ValueError(
                f"train step: values of this store are split over a mesh in their own shapes, and engine "
                f"{self.engine!r} gives each device whole values or flat shares; use engine 'jit' or 'auto'"
            )
        return self.engine

    def _step_for(self, store: kv.KVStore) -> DeviceStep:
        """What one device does, or what all do under engine `jit`."""
        if self._engine_name(store) != "jit":
            return self.device_step
        if self.global_step is None:
            reason = "local_steps are updates of each device by itself"
            if self.virtual_shards is not None:
                reason = f"virtual_shards={self.virtual_shards} fixes the order of sums that the compiler chooses here"
            raise ValueError(
                f"train step: values of this store are split over a mesh, and {reason}; "
                "use kind 'device' without mesh= and sharding="
            )
        return self.global_step

    def _devices_for(self, state: TrainState) -> tuple[Device, ...]:
        return self.devices or state.store.devices or processes.devices()

    def _make_program(self, treedef: Any) -> Program | VirtualProgram:
        """The program for complete states of this structure."""
        store = treedef.unflatten(range(treedef.num_leaves)).store
        step = self._step_for(store)
        if isinstance(step, VirtualStep):
            return VirtualProgram(step, treedef)
        return Program(step, ENGINES[self._engine_name(store)], treedef)

    def _prepare(self, state: TrainState, user: Mesh | None) -> tuple[Program | VirtualProgram, list[jax.Array]]:
        """The program for a state, and the leaves of the complete state.

        Where there is a program for the structure of a state, the state is complete and on the program's devices.
        """
        if state is not self._returned():  # a step returns no types, and to look takes longer than a small step
            state = without_types(state)
        leaves, treedef = jax.tree.flatten(state)
        program = self._programs.find((treedef,))
        if program is None:
            leaves, treedef = jax.tree.flatten(self._complete(state, user))
            program = self._programs(treedef)
        return program, leaves
