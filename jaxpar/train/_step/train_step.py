"""The training step: forward, backward, push, updater and pull, compiled into one program."""

from __future__ import annotations

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
from ..._devices import processes
from ..._devices.mesh import auto_mesh, check_not_donated, is_donated, mesh_of
from ..._devices.user_mesh import check_traced, outside_mesh, with_types, without_types
from ..._store.store import is_on_mesh, mesh_of_values
from .loss import LossFn
from .programs import ENGINES, Batch, JointProgram, Part
from .state import TrainState, carries, check_is_state, leaf_shardings, place_on_mesh, place_state, shapes_on
from .step import DeviceStep, GlobalStep
from .virtual import VirtualProgram, VirtualStep


@dataclasses.dataclass(eq=False, repr=False)
class TrainStep:
    """A training step: `step(state, batch)`. `make_train_step` makes it.

    Attributes:
        engine, axis_name, devices, nonfinite, virtual_shards, mesh, loss_fn: as given to `make_train_step`.
        skips: whether the step may skip an update. Then `metrics` has `skipped`.
        device_step: the step of one device.
        global_step: the step of all devices under engine `jit`. None if this step cannot use engine `jit`.
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
        self.loss_fn: LossFn = self.device_step.loss_fn
        self.skips: bool = self.device_step.guard is not None
        self._programs = Recent(self._make_program)
        self._returned: weakref.ref[TrainState] | None = None  # by the last call

    @answers("train step")
    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step. `state` is donated: use the one returned."""
        return self._run(state, batch)

    @answers("train step, many")
    def many(
        self, state: TrainState, batches: Batch, first: int = 0, end: int | None = None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Run several short steps in one compiled program.

        The program is a loop over the batches. The results equal the results of separate calls, on CPUs nearly always
        bit for bit. Steps with convolutions are an exception: XLA's convolutions are slow inside loops, so matrix
        products replace them there. Call such a step once for each batch.

        Args:
            batches: a batch as the step takes it, with a new first axis over the batches.
            first, end: run only `batches[first:end]`, without a new compilation.

        Returns:
            (the state after the last step, the metrics). The first axis of the metrics runs over the batches, with
            zeros outside `first:end`.

        Raises:
            ValueError: arrays differ in the number of batches, or a batch cannot be divided evenly.

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
            try:
                program, leaves = self._prepare(state, user)
                new, metrics = program(leaves, batch, *part)
            except RuntimeError as error:
                _explain_donated(error, state)
                raise
            self._returned = weakref.ref(new)
            return new, metrics if user is None else with_types(metrics, user)

    @answers("train step, lower")
    def lower(self, state: TrainState, batch: Batch, *, many: bool = False) -> jax.stages.Lowered:
        """The step before compilation, for its text, costs or memory. Nothing is computed.

        Args:
            state, batch: pytrees of arrays or of `jax.ShapeDtypeStruct`s. The devices of shapes need not exist, such as
                the devices of `jax.experimental.topologies`.
            many: True for the program of `step.many`.

        Returns:
            The program of all devices. With `virtual_shards`, the gradient of one shard.
        """
        return self.parts(state, batch, many)[2][0].traced.lower()

    def parts(self, state: TrainState, batch: Batch, many: bool = False) -> tuple[TrainState, Batch, list[Part]]:
        """The programs that a device runs in a step, and what they take: shapes of the complete state and of a batch.

        There is one, unless the step has virtual shards.
        """
        with outside_mesh() as user:
            leaves, given = jax.tree.flatten(without_types(state))
            structures: list[Any] = []

            # Of leaves, since JAX keeps the structure of arguments forever, with the optimizer that it refers to.
            def complete(leaves: list[Any]) -> list[Any]:
                new, structure = jax.tree.flatten(self._complete(given.unflatten(leaves), user))
                structures.append(structure)
                return new

            shapes = jax.eval_shape(complete, leaves)
            program, state = self._programs(structures[0]), structures[0].unflatten(shapes)
            state = shapes_on(state, leaf_shardings(state))
            return state, *program.parts(jax.tree.leaves(state), batch, many)

    def compile_own(self, state: TrainState, batch: Batch) -> list[str]:
        """Compile what each device of a step over virtual shards runs by itself, and return the texts."""
        program, leaves = self._prepare(state, None)
        assert isinstance(program, VirtualProgram)
        return program.compile_own(leaves, batch)

    def batch_sharding(self, state: TrainState) -> NamedSharding | None:
        """The sharding of a batch over a mesh with several axes. None: split over all devices."""
        _, step = self._engine_and_step(state.store)
        if not isinstance(step, GlobalStep):
            return None
        mesh, axes = mesh_of_values(state.store) if is_on_mesh(state.store) else self.mesh, step.axes
        if mesh is None or not set(axes) < set(mesh.axis_names):
            return None
        return NamedSharding(auto_mesh(mesh), P(axes[0] if len(axes) == 1 else axes))

    @answers("train step, on")
    def on(self, devices: Sequence[Device]) -> TrainStep:
        """The same step on other devices, for a state from any devices.

        Raises:
            ValueError: the step has a mesh, or a device is repeated.
        """
        chosen = checks.devices(devices, "train step, on")
        if self.mesh is not None:
            raise ValueError("train step, on: this step was made for a mesh; make another by make_train_step(mesh=...)")
        return dataclasses.replace(self, devices=chosen)

    @answers("train step, complete")
    def complete(self, state: TrainState) -> TrainState:
        """The state on the step's devices, with all parts that the step needs.

        Parts that the state already has stay. The first call of the step does the same. Use `complete` for the `like`
        of a restore: `checkpoint.restore(path, step.complete(train.create_state(store, rng)))`.
        """
        with outside_mesh() as user:
            return self._complete(without_types(state), user)

    def _complete(self, state: TrainState, user: Mesh | None) -> TrainState:
        _, step = self._engine_and_step(state.store)
        if isinstance(step, GlobalStep):
            known = self.devices or state.store.devices
            other = mesh_of(known) if known else user or mesh_of(processes.devices())
            state = place_on_mesh(state, self.mesh, other)
        devices = self.devices or state.store.devices or processes.devices()
        if state.store.devices != devices:
            state = place_state(state, devices)
        return step.with_initial_parts(state)

    @answers("train step, finish")
    def finish(self, state: TrainState) -> TrainState:
        """The state at the end of training, without pending pushes.

        Pending pushes of a store with staleness are applied, oldest first. An unfinished round of local steps ends with
        an agreement of all devices. Any other state is returned unchanged. The given state stays valid. Training can
        continue from the result.
        """
        with outside_mesh() as user:
            if not state.store.staleness and not carries(state.local):
                return self._complete(without_types(state), user)
            program, leaves = self._prepare(state, user)
            assert isinstance(program, JointProgram)  # virtual shards leave nothing pending
            return program.finish(leaves)

    def _prepare(self, state: TrainState, user: Mesh | None) -> tuple[JointProgram | VirtualProgram, list[jax.Array]]:
        """The program for a state, and the leaves of the complete state."""
        # Where there is a program for the structure of a state, the state is complete and on the program's devices.
        # What a step returned has no types of a user's mesh, and to look takes longer than a small step.
        if self._returned is None or state is not self._returned():
            state = without_types(state)
        leaves, treedef = jax.tree.flatten(state)
        program = self._programs(treedef, make=False)
        if program is None:
            check_is_state(state, "train step")
            leaves, treedef = jax.tree.flatten(self._complete(state, user))
            program = self._programs(treedef)
        return program, leaves

    def _make_program(self, treedef: Any) -> JointProgram | VirtualProgram:
        """The program for complete states of this structure."""
        engine, step = self._engine_and_step(treedef.unflatten(range(treedef.num_leaves)).store)
        if isinstance(step, VirtualStep):
            return VirtualProgram(step, treedef)
        return JointProgram(step, ENGINES[engine], treedef)

    def _engine_and_step(self, store: kv.KVStore) -> tuple[str, DeviceStep]:
        """The engine for a store, and the step that it runs: of one device, or of all under engine `jit`."""
        split = "values of this store are split over a mesh"
        if is_on_mesh(store) and self.engine not in ("auto", "jit"):
            own = f"{split} in their own shapes, which engine {self.engine!r} cannot take"
            raise ValueError(f"train step: {own}; use engine 'jit' or 'auto'")
        if self.engine != "jit" and self.mesh is None and not is_on_mesh(store):
            return "pmap" if self.engine == "pmap" else "shard_map", self.device_step
        if self.global_step is None:
            reason = "local_steps are updates of each device by itself"
            if self.virtual_shards is not None:
                reason = f"virtual_shards={self.virtual_shards} fixes the order of sums that the compiler chooses here"
            hint = "use kind 'device' without mesh= and sharding="
            raise ValueError(f"train step: {split}, and {reason}; {hint}")
        return "jit", self.global_step


def _explain_donated(error: RuntimeError, state: TrainState) -> None:
    """Raise what is better said of a state that was donated, or that shares arrays with one that was."""
    if "deleted" not in str(error):
        return
    shared = [f.name for f in dataclasses.fields(state) if is_donated(getattr(state, f.name))]
    if shared and not {"store", "step"} & set(shared):
        raise RuntimeError(
            f"train step: this state shares the arrays in {' and '.join(shared)} with another state, which was "
            "donated to a step; give each state its own copies: kv.to_params(other.store) copies, other.params does not"
        )
    check_not_donated(state, "train step")
