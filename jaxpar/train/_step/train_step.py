"""The training step: forward, backward, push, updater and pull, compiled into one program; and how it is made."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jax.typing import DTypeLike

from ... import kv
from ..._core import checks
from ..._core.arguments import no_such_arguments, renamed_arguments
from ..._core.arrays import Device, PyTree, tree_nbytes
from ..._core.recent import Recent
from ..._core.text import Table, warn
from ..._core.transfers import allows_transfers
from ..._core.updater import Updater
from ..._devices import processes
from ..._devices.mesh import auto_mesh, check_not_donated, is_donated, mesh_of
from ..._devices.user_mesh import check_traced, outside_mesh, with_types, without_types
from ..._store.aggregate import compressed_keys
from ..._store.mxnet_names import TRAINING_ARGUMENTS
from ..._store.store import is_split, mesh_of_values, specs_of, trained_keys
from . import modules
from .local_sgd import LocalSGD
from .loss import Batch, LossFn, Metrics, check_loss_fn
from .nonfinite import DynamicLossScale, Guard
from .programs import ENGINES, DeviceProgram, JointProgram, Structure
from .state import (
    IN_STORE,
    TrainState,
    carries,
    check_is_state,
    create_state,
    leaf_shardings,
    place_state,
    shapes_on,
)
from .step import DeviceStep, GlobalStep, check_axes
from .virtual import ShardHashes, VirtualProgram, VirtualStep

if TYPE_CHECKING:
    import optax


_NO_MESH = contextlib.nullcontext[Mesh | None](None)  # a block as `outside_mesh`, which a small step would feel


@dataclasses.dataclass(eq=False, repr=False)
class TrainStep:
    """A training step: `step(state, batch)`. `make_train_step` makes it.

    Attributes:
        engine, axis_name, devices, nonfinite, virtual_shards, mesh, loss_fn: as given to `make_train_step`.
        left_out: the numbers of the steps that make no update, see `without`. The first step is 1.
        like: the shapes of the state that `start` made with this step. None for a step of `make_train_step`.
        skips: whether the step may skip an update. Then `metrics` may have `skipped`.
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
    left_out: frozenset[int] = frozenset()
    like: TrainState | None = None

    def __post_init__(self) -> None:
        self.loss_fn: LossFn = self.device_step.loss_fn
        self._programs = Recent(self._make_program)  # by the structures of complete states
        self._returned: weakref.ref[TrainState] | None = None  # by the last call

    @property
    def skips(self) -> bool:
        return self.device_step.guard is not None or bool(self.left_out)

    def __repr__(self) -> str:
        return str(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()

    def __dir__(self) -> list[str]:
        """What users call and read. Tab lists no parts of other rooms, which can be read all the same."""
        return sorted({*super().__dir__()} - {"device_step", "global_step", "parts", "like"})

    def _table(self) -> Table:
        """How the step runs and with which options, as far as that is known without a state."""
        step, store = self.device_step, None if self.like is None else self.like.store
        loss_fn = self.loss_fn.loss_fn if isinstance(self.loss_fn, modules.ModuleLoss) else self.loss_fn
        rows = [("loss_fn", getattr(loss_fn, "__name__", type(loss_fn).__name__))]

        engine = self.engine if store is None else self._engine_and_step(store)[0]
        chosen_by = "" if engine == self.engine else f", chosen by {self.engine!r}"
        rows.append(("engine", "auto, chosen by the first state" if engine == "auto" else f"{engine}{chosen_by}"))

        devices = self.devices or (None if store is None else store.devices)
        mesh = mesh_of_values(store) if store is not None and is_split(store) else self.mesh
        if mesh is not None:
            sizes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
            rows.append(("devices", f"{mesh.size} of a mesh, {sizes}"))
        else:
            rows.append(("devices", f"{len(devices)} x {devices[0].device_kind}" if devices else "those of the state"))

        # What differs from the defaults.
        local = step if isinstance(step, LocalSGD) else None
        options: dict[str, Any] = {
            "accumulate": step.accumulate,
            "compute_dtype": step.compute_dtype and jnp.dtype(step.compute_dtype).name,
            "remat": step.remat if isinstance(step.remat, bool) else getattr(step.remat, "__name__", "a policy"),
            "grad_transform": step.grad_transform is not None,
            "nonfinite": self.nonfinite,
            "loss_scale": "dynamic" if isinstance(step.scaling, DynamicLossScale) else step.scaling,
            "local_steps": local and local.steps,
            "outer_optimizer": local is not None and local.outer is not None,
            "unused": step.unused,
            "virtual_shards": self.virtual_shards,
            "row_sparse": ", ".join(step.row_sparse),
            "record": ", ".join(step.record),
            "left out": ", ".join(map(str, sorted(self.left_out)[:8])) + ", ..." * (len(self.left_out) > 8),
        }
        usual = {"accumulate": 1, "nonfinite": "ignore", "unused": "warn"}
        for name, value in options.items():
            if value and value != usual.get(name):
                rows.append((name, "given" if value is True and name != "remat" else str(value)))

        # What is sent of the gradients, around a ring. Under engine `jit` the compiler decides, and `train.plan` tells.
        if store is not None and devices and engine != "jit":
            specs, keys = specs_of(store), trained_keys(store)
            gradients = f"{tree_nbytes([specs[key] for key in keys]):,} bytes"
            if compressor := store.compressor:
                compressed = compressed_keys(store, keys)
                payload = sum(compressor.wire_bytes(specs[key].shape, specs[key].dtype) for key in compressed)
                payload += tree_nbytes([specs[key] for key in keys if key not in compressed])
                gradients += f", {payload:,} as compression {compressor.name!r} sends them"
            elif self.virtual_shards is None:
                # A ring sends each of n pieces n - 1 times to sum it, and n - 1 times to spread the sum.
                padded = tree_nbytes([store.values[key] for key in keys])  # with the padding of kind `sharded`
                sent = 2 * (len(devices) - 1) * padded // len(devices)
                often = f"once in {local.steps} steps" if local else "a step"
                gradients += f", of which each device sends {sent:,} {often}"
            rows.append(("gradients", gradients))
        return Table("TrainStep", ("", ""), rows)

    @allows_transfers
    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step. `state` is donated: use the one returned."""
        # To read the number of a step waits until the devices have made it.
        if self.left_out and int(state.step) + 1 in self.left_out:
            return leave_out(state)
        return self._run(state, batch)

    @allows_transfers
    def many(
        self, state: TrainState, batches: Batch, first: int = 0, end: int | None = None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Run several short steps in one compiled program.

        The program is a loop over the batches. The results equal those of separate calls, on CPUs nearly always bit for
        bit, except for steps with convolutions: XLA's are slow inside loops, so matrix products replace them there.
        Call such a step once for each batch.

        Args:
            state: as the step takes it.
            batches: batches as the step takes them, stacked along a new first axis.
            first, end: run only `batches[first:end]`, without a new compilation.

        Returns:
            (the state after the last step, the metrics along the first axis, with zeros outside `first:end`).

        Raises:
            ValueError: arrays differ in the number of batches, or a batch cannot be divided evenly.

        Example:
            >>> import jax.numpy as jnp, optax
            >>> from jaxpar import train
            >>> loss_fn = lambda params, batch, rng: (((params["w"] - batch) ** 2).mean(), {})
            >>> state, step = train.start({"w": jnp.zeros(())}, optax.sgd(0.25), loss_fn)
            >>> state, metrics = step.many(state, jnp.ones((3, 8)))  # three steps with batches of eight
            >>> metrics["loss"].tolist(), float(state.params["w"])
            ([1.0, 0.25, 0.0625], 0.875)
        """
        is_whole = (first, end) == (0, None)
        first, end, _ = slice(first, end).indices(checks.batch_length(batches, "train step, many"))
        if self.left_out:
            begins = int(state.step) + 1
            if inside := sorted(self.left_out & set(range(begins, begins + end - first))):
                raise ValueError(f"train step, many: step {inside[0]} is left out; call the step for each batch there")
        return self._run(state, batches, first, None if is_whole else end)

    def without(self, steps: Iterable[int]) -> TrainStep:
        """The same step, which makes no update in the steps of these numbers. The first step of a run is 1.

        Such a step changes the number in the state and nothing else. The batches and random keys after it are those of
        a run that makes all updates. Its metrics are a `loss` of NaN and `skipped`, 1.

        Example:
            >>> import jax.numpy as jnp, optax
            >>> from jaxpar import train
            >>> loss_fn = lambda params, batch, rng: (((params["w"] - batch) ** 2).mean(), {})
            >>> state, step = train.start({"w": jnp.zeros(())}, optax.sgd(0.25), loss_fn)
            >>> step = step.without([1])
            >>> for _ in range(2):
            ...     state, metrics = step(state, jnp.ones(8))
            >>> int(state.step), float(state.params["w"])
            (2, 0.5)
        """
        numbers = frozenset(checks.whole_number(n, "train step, without", "a step") for n in steps)
        step = copy.copy(self)  # with the compiled programs
        step.left_out = numbers
        return step

    def _with_hashes(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics, ShardHashes]:
        """One step, and hashes of what its virtual shards add up."""
        hashes: list[ShardHashes] = []
        new, metrics = self._run(state, batch, hashes=hashes)
        return new, metrics, hashes[0]

    @property
    def _for_picture(self) -> _Drawn | None:
        """What pictures are made of in place of the step. None for the step itself."""
        is_itself = self.virtual_shards is None and jax.__version_info__ >= (0, 11)
        return None if is_itself else _Drawn(self)

    def _run(self, state: TrainState, batch: Batch, *span: int | None, **options: Any) -> tuple[TrainState, Metrics]:
        """One step, or several with the first and the end of the batches that they take."""
        processes.refuse_elastic("train step")
        has_mesh = not jax.sharding.get_abstract_mesh().empty
        with outside_mesh() if has_mesh else _NO_MESH as user:
            if user is not None:
                state, batch = without_types((state, batch))
            elif has_mesh:  # inside of a user's `jit`, where the mesh cannot be left
                check_traced((state, batch), "train step")
            try:
                program, donated, rng = self._prepare(state, user)
                new, metrics = program(donated, rng, batch, *span, **options)
            except RuntimeError as error:  # JAX's "Array has been deleted", of whichever array
                if "deleted" in str(error):
                    _check_arrays(state)
                raise
            self._returned = weakref.ref(new)
            return new, metrics if user is None else with_types(metrics, user)

    def lower(self, state: TrainState, batch: Batch, *, many: bool = False) -> jax.stages.Lowered:
        """The step before compilation, for its text, costs or memory. Nothing is computed.

        Args:
            state, batch: pytrees of arrays or of `jax.ShapeDtypeStruct`s, whose devices need not exist.
            many: True for the program of `step.many`.

        Returns:
            The program of all devices. With `virtual_shards`, the gradient of one shard.
        """
        return self.parts(state, batch, many)[2][0].traced.lower()

    def parts(
        self, state: TrainState, batch: Batch, many: bool = False
    ) -> tuple[TrainState, Batch, list[DeviceProgram]]:
        """The programs that a device runs in a step, and what they take: shapes of the complete state and of a batch.

        There is one, unless the step has virtual shards.
        """
        with outside_mesh() as user:
            leaves, structure = jax.tree.flatten(without_types(state))
            completed: list[Structure] = []

            # Of leaves, since JAX keeps structures forever, with the optimizer that that of a state refers to.
            def complete(leaves: list[jax.Array]) -> list[jax.Array]:
                new, structure_of_new = jax.tree.flatten(self._complete(structure.unflatten(leaves), user))
                completed.append(structure_of_new)
                return new

            shapes = jax.eval_shape(complete, leaves)
            state = completed[0].unflatten(shapes)
            state = shapes_on(state, leaf_shardings(state))
            (rng, *donated), structure = jax.tree.flatten(state)
            return state, *self._programs(structure).parts(donated, rng, batch, many)

    def batch_sharding(self, state: TrainState) -> NamedSharding | None:
        """The sharding of a batch over a mesh with several axes. None: split over all devices."""
        _, step = self._engine_and_step(state.store)
        if not isinstance(step, GlobalStep):
            return None
        mesh = mesh_of_values(state.store) if is_split(state.store) else self.mesh
        axes = step.axes
        if mesh is None or not set(axes) < set(mesh.axis_names):
            return None
        return NamedSharding(auto_mesh(mesh), P(axes[0] if len(axes) == 1 else axes))

    @allows_transfers
    def on(self, devices: Sequence[Device]) -> TrainStep:
        """The same step on other devices, for any state. `ValueError`: it has a mesh, or a device is repeated."""
        chosen = checks.devices(devices, "train step, on")
        if self.mesh is not None:
            raise ValueError("train step, on: this step was made for a mesh; make another by make_train_step(mesh=...)")
        return dataclasses.replace(self, devices=chosen)

    @allows_transfers
    def complete(self, state: TrainState) -> TrainState:
        """The state on the step's devices, with all parts that the step needs.

        Parts that the state already has stay. The first call of the step does the same. Use `complete` for the `like`
        of a restore: `checkpoint.restore(path, step.complete(train.create_state(store, rng)))`.
        """
        with outside_mesh() as user:
            return self._complete(without_types(state), user)

    def _complete(self, state: TrainState, user: Mesh | None) -> TrainState:
        _, step = self._engine_and_step(state.store)
        devices = self.devices or state.store.devices
        if isinstance(step, GlobalStep):
            # In this order: what the step was made for, where the state is, the user's `jax.set_mesh`, all devices.
            mesh = self.mesh or (mesh_of(devices) if devices else user or mesh_of(processes.devices()))
            if not is_split(state.store):
                state = dataclasses.replace(state, store=kv.place(state.store, mesh=mesh))
                state = place_state(state, tuple(mesh.devices.flat))
            elif self.mesh is not None and auto_mesh(mesh) != (mesh_of_state := mesh_of_values(state.store)):
                raise ValueError(
                    f"train step: the state is on a mesh {dict(mesh_of_state.shape)}, and the step was made for "
                    f"{dict(mesh.shape)}, or for other devices; place the store: kv.place(store, mesh=mesh)"
                )
        # The same order where each device runs the step: those of the step, of the state, all.
        devices = self.devices or state.store.devices or processes.devices()
        if state.store.devices != devices:
            state = place_state(state, devices)
        return step.with_initial_parts(state)

    @allows_transfers
    def finish(self, state: TrainState) -> TrainState:
        """The state at the end of training, without pending pushes.

        Pending pushes of a store with staleness are applied, oldest first. An unfinished round of local steps ends with
        an agreement of all devices. The given state stays valid, and training can continue from the result.
        """
        check_is_state(state, "train step, finish")
        with outside_mesh() as user:
            # Without pending pushes and local updates a state is finished after each step.
            if not state.store.staleness and not carries(state.local):
                return self._complete(without_types(state), user)
            program, donated, rng = self._prepare(state, user)
            assert isinstance(program, JointProgram)  # virtual shards leave nothing pending
            return program.finish(donated, rng)

    def _prepare(
        self, state: TrainState, user: Mesh | None
    ) -> tuple[JointProgram | VirtualProgram, list[jax.Array], jax.Array]:
        """The program for a state, and what it takes of the complete state: the arrays to donate, and the `rng`."""
        # What a step returned has no types of a user's mesh. To look takes nine times as long as to flatten it.
        if self._returned is None or state is not self._returned():
            check_is_state(state, "train step")
            state = without_types(state)
        # Where there is a program for the structure of a state, the state is complete and on the program's devices.
        leaves, structure = jax.tree.flatten(state)
        program = self._programs(structure, make=False)
        if program is None:
            leaves, structure = jax.tree.flatten(self._complete(state, user))
            program = self._programs(structure)
        rng, *donated = leaves
        return program, donated, rng

    def _make_program(self, structure: Structure) -> JointProgram | VirtualProgram:
        """The program for complete states of this structure."""
        engine, step = self._engine_and_step(structure.unflatten(range(structure.num_leaves)).store)
        if isinstance(step, VirtualStep):
            return VirtualProgram(step, structure)
        return JointProgram(step, ENGINES[engine], structure)

    def _engine_and_step(self, store: kv.KVStore) -> tuple[str, DeviceStep]:
        """The engine for a store, and the step that it runs: of one device, or of all under engine `jit`."""
        if self.engine != "jit" and self.mesh is None and not is_split(store):
            return "pmap" if self.engine == "pmap" else "shard_map", self.device_step
        if self.engine in ("auto", "jit") and self.global_step is not None:
            return "jit", self.global_step
        # Only the compiler computes with values that are split in their own shapes.
        reason = f"engine {self.engine!r} cannot take them; use engine 'jit' or 'auto'"
        if self.virtual_shards is not None:
            fixed = f"virtual_shards={self.virtual_shards} fixes the order of sums"
            reason = f"{fixed} that the compiler chooses here; leave it out"
        elif self.global_step is None:
            reason = "local_steps are updates of each device by itself; leave them out"
        raise ValueError(
            f"train step: values of this store are split over a mesh in their own shapes, and {reason}; or use kind "
            "'device' without mesh= and sharding="
        )


@dataclasses.dataclass(frozen=True)
class _Drawn:
    """What pictures are made of, as one program: of several that the host starts, or with the lines of its source."""

    step: TrainStep

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        return self.step._run(state, batch, for_picture=True)

    def lower(self, state: TrainState, batch: Batch) -> jax.stages.Lowered:
        """As of a step."""
        state, batch, _ = self.step.parts(state, batch)
        (rng, *donated), structure = jax.tree.flatten(state)
        return jax.jit(self.step._programs(structure).drawn, donate_argnums=0).lower(donated, rng, batch)


def leave_out(state: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """A step without an update: the number of the step passes. The metrics are on the host."""
    with outside_mesh():
        state = dataclasses.replace(state, step=state.step + 1)
    return state, {"loss": np.float32("nan"), "skipped": np.float32(1)}


def _check_arrays(state: TrainState) -> None:
    """`RuntimeError` for a state that was donated, or that shares arrays with one that was."""
    shared = [f.name for f in dataclasses.fields(state) if is_donated(getattr(state, f.name))]
    # A step takes the store and the number of a state in any case. Where these are there, another state was taken.
    if shared and not {"store", "step"} & set(shared):
        raise RuntimeError(
            f"train step: this state shares the arrays in {' and '.join(shared)} with another state, which was "
            "donated to a step; give each state its own copies: kv.to_params(other.store) copies, other.params does not"
        ) from None
    check_not_donated(state, "train step")


_HINTS = {
    **dict.fromkeys(("optimizer", "tx", "learning_rate", "lr"), IN_STORE),
    **dict.fromkeys(("kind", "kvstore", "compression", "staleness"), "give it to train.start or kv.from_params"),
    **dict.fromkeys(("dtype", "precision"), "write compute_dtype="),
    **dict.fromkeys(("clip_norm", "max_grad_norm"), "give grad_transform=optax.clip_by_global_norm(1.0)"),
    "apply_fn": "write loss_fn=train.classification_loss(apply_fn)",
    "batch_size": "give it to train.fit",
    **dict.fromkeys(("metrics", "metric"), "return them beside the loss: return loss, {'accuracy': accuracy}"),
    "has_aux": "loss_fn returns the loss, or (loss, aux) where aux is a dict",
}


@no_such_arguments(_HINTS)
def make_train_step(
    loss_fn: LossFn,
    *,
    engine: Literal["auto", "pmap", "shard_map", "jit"] = "auto",
    devices: Sequence[Device] | None = None,
    mesh: Mesh | None = None,
    axis_name: str | Sequence[str] = "data",
    grad_transform: optax.GradientTransformation | None = None,
    accumulate: int = 1,
    compute_dtype: DTypeLike | None = None,
    remat: bool | Callable[..., Any] = False,
    nonfinite: Literal["ignore", "skip", "stop"] = "ignore",
    loss_scale: float | Literal["dynamic"] | DynamicLossScale | None = None,
    local_steps: int | None = None,
    outer_optimizer: optax.GradientTransformation | None = None,
    unused: Literal["warn", "skip"] = "warn",
    virtual_shards: int | None = None,
    row_sparse: str | Sequence[str] | None = None,
    record: str | Sequence[str] = (),
) -> TrainStep:
    """Make a data-parallel training step.

    Each device computes the gradient of the mean loss over its share of the batch, divides it by the number of devices
    and pushes it. So the sum over the devices is the gradient of the mean loss over the batch. The store's updater
    applies it. docs/training.md explains the options.

    Args:
        loss_fn: `loss_fn(params, batch, rng) -> (loss, aux)`. `batch` is one device's share, `loss` the mean loss over
            its examples, and `aux` a dict of other values to report. `rng` differs between steps and between devices.
            If the state has a `model_state`, the signature is `loss_fn(params, batch, rng, model_state) -> (loss, aux,
            new_model_state)`. Floating leaves of the new model state are averaged over the devices. Random keys differ
            between the devices, see docs/training.md. Other leaves must be equal. For a weighted mean, such as over
            unmasked tokens, `loss` is a pair `(sum, weight)`, two scalars or two arrays of one shape. Then the loss is
            the sum of all sums divided by the sum of all weights. Values of `aux` may be such pairs. Its other arrays
            are averaged over the devices, entry by entry. `fit` calls those in a dict or list "name/inner". A
            parameter `step` gets the number of the step by keyword.
        engine: `pmap`, `shard_map` or `jit`: how the step runs on all devices. All engines compute the same, see
            docs/engines.md. `jit` compiles the whole step for all devices, partitioned by the shardings of the params:
            use it for params that do not fit one device. "auto" takes `jit` if `mesh` is given or the values of the
            store are split over a mesh, else `shard_map`.
        devices: the devices of the step. None: the devices of the state.
        mesh: for engine `jit`, in place of `devices`. None: the mesh of the store, or else of `jax.set_mesh`, or else
            one axis over the devices.
        axis_name: the name of the axis over the devices, for collectives in `loss_fn`. For engine `jit`, the mesh axis
            or axes that split the batch.
        grad_transform: an optax transform of the summed gradients of all keys, before the updater. Use it for
            transforms that couple keys, such as `optax.clip_by_global_norm`. It gets whole gradients and parameters in
            every kind of store. In kind `sharded` it may be an optimizer that is not elementwise, with
            `updaters.accumulate` in the store. Its state is replicated.
        accumulate: the number of microbatches in each device's share. They run one after the other, each with its own
            `rng` and the `model_state` of the previous one, and the mean of their gradients is pushed once.
        compute_dtype: the dtype, such as `jnp.bfloat16`, of floating arrays in `params` and `batch` for `loss_fn`. The
            store, the pushed gradients, their sums and the loss stay float32. Engine `jit` sums the shares in bfloat16.
        remat: True, or a policy of `jax.checkpoint_policies`: `loss_fn` is wrapped in `jax.checkpoint`. The backward
            pass then recomputes all activations, or the activations that the policy does not save.
        nonfinite: the effect of a NaN or infinite loss or gradient on any device. `ignore`: it is pushed as any other
            number. `skip`: no device makes the update, the step counts, and `metrics["skipped"]` is 1. `stop`: the
            state, including `step`, stays unchanged from that step on, and `fit` or `check_finite` raises an error.
        loss_scale: for float16: a number that multiplies the loss and divides the gradients before the push; or
            "dynamic" or a `DynamicLossScale`, which adapts the number. A dynamic scale skips updates that overflow, for
            any `nonfinite`. With "stop", the step then stops only if the loss itself is not finite, or if a gradient
            overflows at the smallest scale.
        local_steps: H. Every device makes H local updates with the store's updater and the gradients of its own shares.
            Then the devices agree on new parameters, which the store, `state.params`, `evaluate` and `fit` have.
            `step.finish(state)` ends a round early. A `grad_transform` gets each device's own gradients. Metrics and
            `model_state` are averaged over the devices at every step.
        outer_optimizer: with `local_steps`, an optax transform for the mean over the devices of (parameters at the
            start of the round - local parameters), such as `optax.sgd(0.7, momentum=0.9, nesterov=True)`, which is
            DiLoCo (Douillard et al. 2023). None averages the parameters.
        unused: a parameter that the loss does not depend on has a zero gradient, but weight decay or momentum would
            change it. `warn`: a warning names it once. `skip`: it and its optimizer state stay unchanged.
        virtual_shards: V: results are bit-equal on any number of devices and processes, under `pmap` and `shard_map`.
            The batch is cut into V fixed shards. `loss_fn` sees one shard, with an `rng` for that shard, and means are
            over the shards. V must divide every batch. The number of devices need not divide V. What it costs, and the
            options that it refuses, are in docs/same_bits.md.
        row_sparse: the params whose gradients are rows: a pattern of names, or several. They are tables that `loss_fn`
            uses only to look up rows, `params["users"][ids]`. Devices send the rows that are looked up, and the
            optimizer updates these rows alone and their part of its state. Any other use of a table, and optimizers
            that treat rows together, are errors. docs/training.md says more.
        record: of "lr", "grad_norm", "update_norm", "grad_norms" and "update_norms" one or several: the step reports
            them as metrics, in the same program. "grad_norm" is the norm of the summed gradients before
            `grad_transform`, "update_norm" that of the change of the trained params. "grad_norms" and "update_norms"
            are those of each param, as `grad_norm/hidden/kernel`; the lines of `fit` leave them out. "lr" is the
            learning rate of the update, which the optimizer must have in its state, by `optax.inject_hyperparams` or
            `rate_in_state=True`. Of several optimizers it is `lr/<name>` for each. With `local_steps` they are means
            over the devices, of each one's own gradients and updates.

    Returns:
        `step(state, batch) -> (state, metrics)`, compiled once for each shape of a batch. `batch` is the global
        batch, a pytree of arrays. Each is cut along its first axis, whose length is a multiple of the number of
        devices. NumPy's arrays are copied, so they may change afterwards. `state` is donated: do not use the old state
        again. `metrics` are the means over the devices of `loss` and of the values in `aux`, in float32 or wider, on
        the devices. They include `skipped` (0.0 or 1.0) if the step can skip, and `loss_scale` if the scale is dynamic.

    Raises:
        TypeError, ValueError: an option has the wrong type, is unknown, out of range or excluded by another. Raised by
            the step: the batch cannot be divided evenly, or `loss_fn` returns other values.

    Example:
        >>> import jax, jax.numpy as jnp, optax
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
    # What one option alone may be.
    caller = "make_train_step"
    check_loss_fn(loss_fn, caller)
    checks.choice(engine, caller, "engine", ("auto", *ENGINES))
    checks.choice(nonfinite, caller, "nonfinite", ("ignore", "skip", "stop"))
    checks.choice(unused, caller, "unused", ("warn", "skip"))
    accumulate = checks.whole_number(accumulate, caller, "accumulate")
    record = (record,) if isinstance(record, str) else tuple(record)
    for name in record:
        checks.choice(name, caller, "record", ("lr", "grad_norm", "update_norm", "grad_norms", "update_norms"))
    if local_steps is not None:
        local_steps = checks.whole_number(local_steps, caller, "local_steps")
    if virtual_shards is not None:
        virtual_shards = checks.whole_number(virtual_shards, caller, "virtual_shards")
    for name, tx in (("grad_transform", grad_transform), ("outer_optimizer", outer_optimizer)):
        if tx is not None:
            checks.transform(tx, f"{caller}: {name}")
    if compute_dtype is not None and not jnp.issubdtype(compute_dtype, jnp.floating):
        raise TypeError(f"{caller}: compute_dtype must be floating, as jnp.bfloat16, got {compute_dtype!r}")
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    num_axes = len(axes)
    tables = (row_sparse,) if isinstance(row_sparse, str) else tuple(row_sparse or ())
    chosen = None if devices is None else checks.devices(devices, caller)
    scaling = DynamicLossScale() if isinstance(loss_scale, str) and loss_scale == "dynamic" else loss_scale
    if not isinstance(scaling, DynamicLossScale | None):
        wanted = "None, a number above 0, 'dynamic' or a train.DynamicLossScale"
        scaling = checks.number(scaling, caller, "loss_scale", wanted, lambda x: 0 < x < math.inf)

    # Options of which one leaves no place for another. Else one of them would be ignored.
    is_mapped, is_jit = engine in ("pmap", "shard_map"), engine == "jit" or mesh is not None
    is_local, is_virtual = local_steps is not None, virtual_shards is not None
    local, fixed = "local_steps= updates each device separately", "virtual_shards= fixes the order of all sums"
    by_compiler = "with engine 'jit' and mesh= the compiler chooses them; use engine 'shard_map' and devices="
    conflicts = {
        f"mesh= is for engine 'jit' and replaces devices=; got engine={engine!r}"
        f"{', and devices' if devices is not None else ''}": mesh is not None and (is_mapped or devices is not None),
        f"several axes {axes} are for engine 'jit'; engine {engine!r} has one": num_axes > 1 and is_mapped,
        f"{fixed}, and {local}; leave out one of them": is_virtual and is_local,
        f"{fixed}, and {by_compiler}": is_virtual and is_jit,
        f"{local}, and {by_compiler}": is_local and is_jit,
        f"row_sparse={list(tables)} needs engine 'shard_map' or 'pmap', and neither mesh=, virtual_shards= nor "
        "local_steps=; leave out one of them": bool(tables) and (is_jit or is_virtual or is_local),
        "outer_optimizer needs local_steps=, which is None": outer_optimizer is not None and not is_local,
    }
    for conflict, is_there in conflicts.items():
        if is_there:
            raise ValueError(f"{caller}: {conflict}")
    if mesh is not None:
        check_axes(axes, mesh, caller)

    # The step of one device, and that of all under engine `jit`.
    dynamic = scaling if isinstance(scaling, DynamicLossScale) else None
    options: dict[str, Any] = {
        "loss_fn": loss_fn,
        "axis_name": axes[0],
        "accumulate": accumulate,
        "compute_dtype": compute_dtype,
        "remat": remat or False,
        "grad_transform": grad_transform,
        "scaling": scaling,
        # A dynamic scale finds its size by overflows, whose updates must be left out.
        "guard": Guard(nonfinite == "stop", dynamic) if nonfinite != "ignore" or dynamic else None,
        "unused": unused,
        "row_sparse": tables,
        "record": record,
    }
    global_step = None
    if virtual_shards is not None:
        device_step = VirtualStep(**options, shards=virtual_shards)
    elif local_steps is not None:
        device_step = LocalSGD(**options, steps=local_steps, outer=outer_optimizer)
    else:
        device_step, global_step = DeviceStep(**options), GlobalStep(**options, axes=axes)
    return TrainStep(device_step, global_step, engine, axes[0], chosen, nonfinite, virtual_shards, mesh)


# The options of `start` are those of `kv.from_params`, `create_state` and `make_train_step`, written out once more. A
# TypedDict, `**options: Unpack[StepOptions]`, would be one place for names and types, and pyright would know them. But
# Tab, Shift-Tab and `help()` read the signature of the function that runs, and would show `**options` alone. So each is
# written twice, and tests/train/test_own_loop.py asserts that names, defaults and types are the same. The docstring of
# `start` says in a line what an option is for, and that of `make_train_step` all about it.

# What `start` takes itself needs no hint there.
_START_HINTS = {
    **kv._NOT_TRAINED,
    **{name: hint for name, hint in _HINTS.items() if name not in ("kind", "compression", "staleness", "optimizer")},
    **TRAINING_ARGUMENTS,
    "kvstore": 'call it kind: kind="device". In place of None write jax.grad and optax, without a store',
    **dict.fromkeys(("tx", "learning_rate", "lr"), "give the optimizer as the second argument: optax.sgd(0.1)"),
    "updater": "give it to kv.from_params, and make the state by train.create_state and the step by make_train_step",
}


@renamed_arguments(params="model")
@no_such_arguments(_START_HINTS)
@allows_transfers
def start(
    model: Any,
    optimizer: optax.GradientTransformation | Updater | Any,  # or an `nnx.Optimizer`
    loss_fn: LossFn,
    *,
    rng: jax.Array | int = 0,
    model_state: Any = (),
    wrt: Any = None,
    sync_batch_norm: bool = True,
    kind: str = "device",
    devices: Sequence[Device] | None = None,
    mesh: Mesh | None = None,
    sharding: PyTree = None,
    frozen: str | Sequence[str] | Callable[[str, jax.Array], bool] | Any = None,
    compression: dict[str, Any] | None = None,
    staleness: int | None = None,
    engine: Literal["auto", "pmap", "shard_map", "jit"] = "auto",
    axis_name: str | Sequence[str] = "data",
    grad_transform: optax.GradientTransformation | None = None,
    accumulate: int = 1,
    compute_dtype: DTypeLike | None = None,
    remat: bool | Callable[..., Any] = False,
    nonfinite: Literal["ignore", "skip", "stop"] = "ignore",
    loss_scale: float | Literal["dynamic"] | DynamicLossScale | None = None,
    local_steps: int | None = None,
    outer_optimizer: optax.GradientTransformation | None = None,
    unused: Literal["warn", "skip"] = "warn",
    virtual_shards: int | None = None,
    row_sparse: str | Sequence[str] | None = None,
    record: str | Sequence[str] = (),
) -> tuple[TrainState, TrainStep]:
    """Make the first state and the step for `fit`.

    It calls `kv.from_params`, `create_state` and `make_train_step`, which say more about their options and errors.

    Args:
        model: an `nnx.Module` or an `eqx.Module`, whole; or params, any pytree of arrays. The arrays are copied. A
            module is trained in its mode, and `state.model` is the trained one in evaluation mode.
        optimizer: an optax transform, an optimizer of `jp.updaters`, or an `nnx.Optimizer`, whose `tx` and `wrt` are
            taken.
        loss_fn: `loss_fn(model, batch)`, `loss_fn(model, batch, rng)`, or with `model_state`,
            `loss_fn(model, batch, rng, model_state)`. It returns the loss, or (loss, aux), or with `model_state` (loss,
            aux, new model state). Of a module it gets the module, else the params.
        rng: a random key, or an int seed.
        model_state: a pytree of arrays that the model updates without gradients, such as running means, or the
            `eqx.nn.State` of a module. An `nnx.Module` has its own.
        wrt: of a module, what is trained: a filter of Flax such as `nnx.LoRAParam`, or of Equinox. All else is frozen.
            None: each `nnx.Param`, or each floating array.
        sync_batch_norm: whether each batch norm of a module takes the statistics of the whole batch, over all devices.
            With False each device takes those of its share. With `accumulate`, they are of one microbatch.
        kind: as in `kv.create`. "device" keeps params and optimizer state on every device, "sharded" a part on each.
        devices: the training devices. None: all of them.
        mesh: a `jax.sharding.Mesh`, in place of `devices`.
        sharding: how params are split over the mesh: a rule, such as `jp.parallel.fsdp("data")`, or a pytree.
        frozen: the params that are not trained: a pattern of names, several, a function `(name, leaf) -> bool`, or a
            pytree of bools.
        compression: gradient compression, such as `{"type": "2bit", "threshold": 0.5}`, as in
            `kv.set_gradient_compression`.
        staleness: for kind `dist_async`: gradients are applied so many steps later. None is 1.
        engine: how the step runs on all devices. "auto" takes "jit" for params that are split over a mesh, else
            "shard_map".
        axis_name: the axis over the devices, for collectives in `loss_fn`. For engine `jit`, the mesh axis or axes that
            split the batch.
        grad_transform: an optax transform of the summed gradients, such as `optax.clip_by_global_norm(1.0)`.
        accumulate: the number of microbatches that a device's share of the batch is cut into.
        compute_dtype: the dtype of floating params and batches in `loss_fn`, such as `jnp.bfloat16`.
        remat: True, or a policy of `jax.checkpoint_policies`: the backward pass computes activations again.
        nonfinite: what a NaN or infinite loss or gradient does: it is ignored, the update is skipped, or the training
            stops.
        loss_scale: for float16: a number, "dynamic" or a `DynamicLossScale`.
        local_steps: the number of updates that a device makes by itself before all devices agree.
        outer_optimizer: with `local_steps`, an optax transform for the mean of the devices' changes.
        unused: whether a param that the loss does not depend on is warned of and updated, or skipped.
        virtual_shards: the number of fixed shards of a batch, for bit-equal results on any number of devices.
        row_sparse: the tables whose gradients are the rows that the loss looks up, `params["users"][ids]`: a pattern of
            names, or several. Only these rows are sent and updated.
        record: "grad_norm", "update_norm", or "grad_norms", "update_norms" of each param, and "lr", the learning rate:
            what the step reports as metrics.

    Returns:
        (state, step), for `train.fit(state, step, data, ...)` or `state, metrics = step(state, batch)`.

    Raises:
        TypeError, ValueError: an option is unknown, has the wrong type or is excluded by another.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jaxpar import train
        >>> def loss_fn(params, batch, rng):
        ...     return ((batch["x"] * params["w"] - batch["y"]) ** 2).mean(), {}
        >>> state, step = train.start({"w": jnp.zeros(())}, optax.sgd(0.25), loss_fn)
        >>> state, metrics = step(state, {"x": jnp.ones(8), "y": jnp.ones(8)})
        >>> float(metrics["loss"]), float(state.params["w"])
        (1.0, 0.5)
    """
    optimizer, wrt = modules.transform_of(optimizer, wrt)

    # A whole module becomes params, a model state and a loss of these.
    module, params, loss = (), model, loss_fn
    axes = axis_name if isinstance(axis_name, str) else tuple(axis_name)
    if (module_parts := modules.take_apart(model, wrt, axes)) is not None:
        module, params, state_of_module, frozen_by_wrt, _ = module_parts
        check_loss_fn(loss_fn, "train.start")
        if isinstance(module, modules.OfNnx):
            if carries(model_state):
                raise ValueError("train.start: leave out model_state=, since an nnx.Module has its own")
            model_state = state_of_module
        if frozen_by_wrt is not None and frozen is not None:
            raise ValueError("train.start: wrt= says what is trained, and frozen= what is not; give one of them")
        frozen = frozen if frozen_by_wrt is None else frozen_by_wrt
        if not sync_batch_norm:
            module = dataclasses.replace(module, axes=None)
        elif virtual_shards or local_steps:
            apart = "virtual_shards" if virtual_shards else "local_steps"
            if module.has_unsynced_norms(params, model_state):
                raise ValueError(
                    f"train.start: with {apart}= a batch norm has the statistics of one share of the batch, since "
                    f"shares know nothing of each other; write sync_batch_norm=False, or leave out {apart}="
                )
        loss: Any = modules.ModuleLoss(loss_fn, module)
    elif wrt is not None:
        raise ValueError(f"train.start: wrt={wrt!r} is for a whole nnx.Module or eqx.Module; of params give frozen=")

    # The step first, so that an option that it refuses costs no copy of the params.
    step = make_train_step(
        loss,
        engine=engine,
        devices=devices,
        mesh=mesh if engine in ("auto", "jit") else None,  # the other engines take the devices of the state
        axis_name=axis_name,
        grad_transform=grad_transform,
        accumulate=accumulate,
        compute_dtype=compute_dtype,
        remat=remat,
        nonfinite=nonfinite,
        loss_scale=loss_scale,
        local_steps=local_steps,
        outer_optimizer=outer_optimizer,
        unused=unused,
        virtual_shards=virtual_shards,
        row_sparse=row_sparse,
        record=record,
    )
    store = kv.from_params(
        params,
        kind=kind,
        optimizer=optimizer,
        devices=devices,
        staleness=staleness,
        mesh=mesh,
        sharding=sharding,
        frozen=frozen,
    )
    # With params of integers alone every step would succeed, and change nothing.
    if not trained_keys(store):
        dtypes = sorted({str(value.dtype) for value in store.values.values()})
        raise ValueError(
            f"train.start: no param is floating, so none would be trained; they are {', '.join(dtypes)}: write them as "
            "jnp.zeros(n), or with .astype(jnp.float32)"
        )
    if module_parts is not None:
        trained = set(trained_keys(store))
        is_trained = {name: key in trained for key, name in store.paths}
        if layers := modules.trained_in_evaluation_mode(module_parts.modes, is_trained):
            which, hint = "the model is", f"first call {module_parts.module.to_train}"
            if store.frozen:
                which = f"the layers {checks.shorten(layers)} are not frozen and are"
                hint += ", and then put the frozen part into evaluation mode again, where it is to stay in it"
            warn(
                f"train.start: {which} in evaluation mode, which trains without dropout and with the "
                f"running statistics of batch norm; to train in the other mode, {hint}"
            )
    if compression is not None:
        store = kv.set_gradient_compression(store, compression)
    state = create_state(store, rng, devices=devices, grad_transform=grad_transform, model_state=model_state)
    state = dataclasses.replace(state, module=module)
    return state, dataclasses.replace(step, like=shapes_on(state, leaf_shardings(state)))
