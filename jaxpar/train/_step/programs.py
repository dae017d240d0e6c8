"""The compiled programs of a training step: one step, several in a loop, and the end of training.

An engine is a function `run(step, shardings, state, batch) -> (state, metrics)` of whole arrays, traced inside of a
program. Of the step of one device it makes that of all of them. `shardings` are those of the leaves of the state.

A program is `program(donated, rng, batch) -> (donated, metrics)`, where `rng, *donated = jax.tree.leaves(state)`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, Sharding

from ..._core import checks, host
from ..._core.arrays import Device, is_tracing
from ..._core.process import keep_freed_blocks
from ..._core.recent import forget
from ..._cpu import for_platform, in_blocks
from ..._devices.mesh import STORE_AXIS, are_on, put, put_copy, wait_before_collectives
from ..._devices.user_mesh import without_types
from ..._store.store import mesh_of_values, sharding_of
from .loss import Batch, Metrics
from .state import TrainState, check_is_state, leaf_shardings, shapes_on
from .step import DeviceStep

# Shapes of a batch whose programs in blocks are kept. An own loop that pads texts has a few dozen.
_MOST_SHAPES = 256

Structure = Any  # a `jax.tree_util.PyTreeDef`, which is no generic class
Shape = jax.Array | jax.ShapeDtypeStruct
Engine = Callable[[DeviceStep, TrainState, TrainState, Batch], tuple[TrainState, Metrics]]


def run_by_shard_map(
    step: DeviceStep, shardings: TrainState, state: TrainState, batch: Batch
) -> tuple[TrainState, Metrics]:
    specs = _specs(step, shardings)
    # With the check on, the gradient of replicated params would be summed already, and a second sum is one too many.
    mapped = jax.shard_map(
        step,
        mesh=Mesh(np.array(state.store.devices), (step.axis_name,)),
        in_specs=(specs, P(step.axis_name)),
        out_specs=(specs, P()),
        check_vma=False,
    )
    return mapped(state, batch)


def finish_by_shard_map(step: DeviceStep, shardings: TrainState, state: TrainState) -> TrainState:
    """What the step does at the end of training, on each device."""
    specs = _specs(step, shardings)
    mesh = Mesh(np.array(state.store.devices), (step.axis_name,))
    return jax.shard_map(step.apply_pending, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)(state)


def _specs(step: DeviceStep, shardings: TrainState) -> TrainState:
    """How the leaves of a state are split over the axis of the step."""
    return jax.tree.map(lambda s: P(*[entry and step.axis_name for entry in s.spec]), shardings)


def run_by_pmap(step: DeviceStep, shardings: TrainState, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    devices = state.store.devices or ()
    # Inside of a program, pmap knows the devices of its own process only. By shard_map the same is computed.
    if len({d.process_index for d in devices}) > 1:
        return run_by_shard_map(step, shardings, state, batch)
    # What is split is split along its first axis. What is replicated is given and taken once, not as stacked copies.
    leaves, structure = jax.tree.flatten(state)
    axes = [0 if any(sharding.spec) else None for sharding in jax.tree.leaves(shardings)]

    def body(leaves: list[jax.Array], shard: Batch) -> tuple[list[jax.Array], Metrics]:
        new, metrics = step(structure.unflatten(leaves), shard)
        return jax.tree.leaves(new), metrics

    run = jax.pmap(body, step.axis_name, in_axes=(axes, 0), out_axes=(axes, None), devices=devices)
    shards = jax.tree.map(lambda x: x.reshape(len(devices), x.shape[0] // len(devices), *x.shape[1:]), batch)
    try:
        new, metrics = run(leaves, shards)
    finally:
        forget(body)  # it is a part of the program around it now
    return structure.unflatten(new), metrics


def run_by_jit(step: DeviceStep, shardings: TrainState, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    # All arrays over the same mesh, also those that a user's mesh laid out alike.
    state = jax.tree.map(lax.with_sharding_constraint, state, shardings)
    mesh = mesh_of_values(state.store)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # for bare PartitionSpecs in a loss
        return step(state, batch)


ENGINES: dict[str, Engine] = {"pmap": run_by_pmap, "shard_map": run_by_shard_map, "jit": run_by_jit}


class DeviceProgram(NamedTuple):
    """A program that a device runs in a step, for shapes on the devices of a state."""

    traced: jax.stages.Traced
    runs: int = 1  # how often a device runs it in a step
    other_bytes: int = 0  # that a device holds meanwhile and that are no arguments of it


@dataclasses.dataclass
class Batches:
    """How the batches of a program are cut, and where they go."""

    devices: tuple[Device, ...]
    shards: int  # in which a batch is cut
    microbatches: int  # in which each of them is cut
    # The sharding of a batch, and that of several batches, whose number is the first axis.
    shardings: tuple[NamedSharding, ...]
    cut: str = ""  # in words, where the shards are not those of the devices
    # How the leaves of the last batch were placed, if they could stay where they were.
    last: list[Sharding | None] = dataclasses.field(default_factory=list)

    def check(self, batch: Batch, axis: int = 0) -> None:
        """As `check_even`. `axis` is that of the examples."""
        check_even(batch, axis, self.shards, self.microbatches, self.cut)

    def place(self, batch: Batch, axis: int = 0) -> Batch:
        """The batch on the devices."""
        # Nothing is checked where its arrays are placed as those of the last batch, since this is asked at every step.
        # A program checks the shapes when it is traced for them. Arrays of NumPy are looked at each time: their owner
        # may write the next batch into them while a program still reads them.
        leaves = jax.tree.leaves(batch)
        placed = [getattr(leaf, "sharding", None) for leaf in leaves]
        if placed == self.last:
            return batch
        self.check(batch, axis)
        untyped = without_types(batch)
        arrays = host.own_copies(untyped, "train step: batch")
        is_copied = any(map(operator.is_not, jax.tree.leaves(arrays), jax.tree.leaves(untyped)))
        if not are_on(arrays, self.devices) or (is_copied and not is_tracing()):
            return put(arrays, self.shardings[axis])
        # What is traced has no sharding, as arrays of NumPy have none.
        if untyped is batch and not is_copied and None not in placed:
            self.last = placed
        return arrays


def check_even(batch: Batch, axis: int, shards: int, microbatches: int, cut: str) -> None:
    """`ValueError` where an array of a batch cannot be cut in equal shards, or a shard in microbatches.

    Each array is cut by its own length. `TypeError` for a leaf that is no array of numbers.
    """
    checks.arrays_of_numbers(batch, "train step: batch")
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(batch)]
    if not shapes or any(len(shape) <= axis for shape in shapes):
        checks.batch_length(batch, "train step", axis)  # raises
    lengths, count = {shape[axis] for shape in shapes}, shards * microbatches
    if len(lengths) > 1 and count in lengths:
        raise ValueError(
            "train step: the arrays of a batch must share the length of their first axis, or each have two or more "
            f"rows in every share, got {checks.shorten(shapes)}: in each of {count} shares one row of an array would "
            "be broadcast, and so count for all rows of the others"
        )
    for n in sorted(lengths, reverse=True):
        if n % count == 0:
            continue
        what = f"a batch of {n}"
        if len(lengths) > 1:
            what = f"each array is cut by its own length, but one of {n} rows, of arrays {checks.shorten(shapes)},"
        problem = f"cannot be {cut or f'divided by {shards} devices'}"
        if n % shards == 0:
            problem = (
                f"gives each of {shards} devices {n // shards} examples, which cannot be cut in "
                f"accumulate={microbatches} microbatches"
            )
        sizes = " or ".join(str(size) for size in (n // count * count, -(-n // count) * count) if size)
        raise ValueError(f"train step: {what} {problem}; use a batch of {sizes}, or pad it")


class JointProgram:
    """One step, several steps, and the end of training, as programs of all devices, for states of one structure.

    Attributes:
        batches: how a batch is cut, and where it goes.
        one: `train_step(donated, rng, batch) -> (donated, metrics)`, compiled.
        drawn: what a picture traces in place of `one`, not compiled.
        several: `train_steps(donated, rng, batches, first, end) -> (donated, metrics of each batch)`, compiled.
        every: the same for all batches, without the last two arguments.
        number: an int, on the devices.
    """

    # A program takes the arrays of a state in a list, and the structure by closure: JAX (0.10 to 0.12) keeps the
    # structures of arguments forever, and that of a store refers to its optimizer. It costs the host little: a program
    # that returns its 15 arrays took 74 us with the pytree, and 76 us with the list, flattened before and unflattened
    # after it. The `rng` never changes, and a program takes as long to return a random key as five arrays.
    #
    # Nor does a function that is compiled refer to `self`: in such a circle the garbage collector alone would free it.

    def __init__(self, step: DeviceStep, run: Engine, structure: Structure):
        # 1. Where states and batches are. A batch is cut along the axes of the step, of which only engine `jit` may
        #    have several. A stack of batches has their number as first axis.
        store = structure.unflatten(range(structure.num_leaves)).store
        everywhere, platform = sharding_of(store), store.devices[0].platform
        mesh, axes = everywhere.mesh, step.axes or (STORE_AXIS,)
        along: Any = axes[0] if len(axes) == 1 else axes
        shards = math.prod([mesh.shape[name] for name in axes])
        shardings = NamedSharding(mesh, P(along)), NamedSharding(mesh, P(None, along))
        self.batches = Batches(store.devices, shards, step.accumulate, shardings)
        self._structure, self._everywhere = structure, everywhere
        step_of_platform, check_batch = dataclasses.replace(step, platform=platform), self.batches.check

        # 2. One step.
        def train_step(donated: list[jax.Array], rng: jax.Array, batch: Batch) -> tuple[list[jax.Array], Metrics]:
            check_batch(batch)
            state = structure.unflatten([rng, *donated])
            check_is_state(state, "train step")  # a stack of states has the structure of one
            shardings = leaf_shardings(state)
            new, metrics = run(step_of_platform, shardings, state, batch)
            # The new state is placed exactly as the old one, so the next step finds its program.
            new = jax.tree.map(lax.with_sharding_constraint, new, shardings)
            return jax.tree.leaves(new)[1:], metrics

        # The loss is a user's Python, and slow to trace. As a `jit` of its own the step is traced once, for all below.
        traced_step = jax.jit(train_step, inline=True)

        # 3. The steps of `batches[first:end]`, in a loop. The metrics are stacked, with zeros where no step was.
        def train_steps(
            donated: list[jax.Array], rng: jax.Array, batches: Batch, first: int | jax.Array, end: int | jax.Array
        ) -> tuple[list[jax.Array], Metrics]:
            def batch(i: int | jax.Array) -> Batch:
                return jax.tree.map(functools.partial(lax.dynamic_index_in_dim, index=i, keepdims=False), batches)

            def body(i: jax.Array, carry: tuple[list[jax.Array], Metrics]) -> tuple[list[jax.Array], Metrics]:
                donated, metrics = traced_step(carry[0], rng, batch(i))
                return donated, jax.tree.map(lambda x, row: x.at[i].set(row), carry[1], metrics)

            _, metrics = jax.eval_shape(lambda: traced_step(donated, rng, batch(0)))  # tracers: no new trace
            number = jax.tree.leaves(batches)[0].shape[0]
            rows = jax.tree.map(lambda x: jnp.zeros((number, *x.shape), x.dtype), metrics)
            return lax.fori_loop(first, end, body, (donated, rows))

        def every_step(donated: list[jax.Array], rng: jax.Array, batches: Batch) -> tuple[list[jax.Array], Metrics]:
            return train_steps(donated, rng, batches, 0, jax.tree.leaves(batches)[0].shape[0])

        # 4. Both compiled, on CPUs with faster formulas than XLA's. A call may compile the inner `jit` once more, with
        #    other options, which then traces nothing anew.
        def compiled(function: Callable[..., tuple[list[jax.Array], Metrics]]) -> Any:
            fast = for_platform(function, platform, mesh, step.axes)
            return jax.jit(jax.jit(fast, inline=True), donate_argnums=0)

        self.one, self.several, self.every = compiled(traced_step), compiled(train_steps), compiled(every_step)
        # One step without an inner `jit`, in which JAX 0.10 forgets the lines that a picture is made of.
        self.drawn: Any = for_platform(train_step, platform, mesh, step.axes)
        # After each pass of a loop a GPU asks the host whether there is another one, unless the program says how many
        # there are. Then small steps take half the time. Spans that are asked for by their numbers, as `fit` does, have
        # one program on all platforms, so that a step has the same bits in each of them.
        self.counts_in_program = platform == "gpu"

        # The first and the end that `several` is given are kept on the devices, so that a call sends nothing.
        @functools.lru_cache(maxsize=64)
        def number(i: int) -> jax.Array:
            with jax.ensure_compile_time_eval():  # a number also while a user's `jit` is traced
                return put_copy(jnp.int32(i), everywhere)

        self.number = number

        # On CPUs the C library keeps blocks of memory from step to step, if no value of the program needs a larger one.
        self._has_blocks = platform == "cpu" and keep_freed_blocks()
        self._is_alone = len(mesh.local_devices or ()) == 1
        self._in_blocks: dict[tuple[Any, ...], Any] = {}  # the program to run, by the shapes of a batch

        # 5. The end of training.
        def finish(donated: list[jax.Array], rng: jax.Array) -> list[jax.Array]:
            state = structure.unflatten([rng, *donated])
            return jax.tree.leaves(finish_by_shard_map(step, leaf_shardings(state), state))[1:]

        self._finish = jax.jit(finish)  # donates nothing: a run is saved and goes on from the state before

    def __call__(
        self, donated: list[jax.Array], rng: jax.Array, batch: Batch, *span: int | None, for_picture: bool = False
    ) -> tuple[TrainState, Metrics]:
        """One step, or those of `batch[first:end]`, `span` being these two numbers: (0, None) for all batches."""
        if for_picture:
            new, metrics = self.drawn(donated, rng, self.batches.place(batch))
            return self._structure.unflatten([rng, *new]), metrics
        batch = self.batches.place(batch, axis=1 if span else 0)
        wait_before_collectives((donated, batch), self.batches.devices)
        run, numbers = self._program_of(batch, span)
        args = donated, rng, batch, *map(self.number, numbers)
        # The shapes of a batch decide how large the values of its program are, and so whether they are put in blocks. A
        # `jit` has one set of options, so a program with blocks is another `jit`. It is chosen once for these shapes.
        if self._has_blocks and not is_tracing():  # JAX takes no options inside of another `jit`
            shapes = (run, *[(x.shape, x.dtype) for x in jax.tree.leaves(batch)])
            if shapes not in self._in_blocks:
                if len(self._in_blocks) == _MOST_SHAPES:
                    del self._in_blocks[next(iter(self._in_blocks))]  # the one made first
                options = in_blocks(run.trace(*args).jaxpr, self._is_alone)
                with_blocks = jax.jit(run.__wrapped__, donate_argnums=0, compiler_options=options)
                self._in_blocks[shapes] = with_blocks if options else run
            run = self._in_blocks[shapes]
        new, metrics = run(*args)
        return self._structure.unflatten([rng, *new]), metrics

    def _program_of(self, batch: Batch, span: Sequence[int | None]) -> tuple[Any, list[int]]:
        """The program for a span, and the numbers that it takes."""
        if not span:
            return self.one, []
        first, end = span
        if end is None and self.counts_in_program:
            return self.every, []
        return self.several, [first or 0, jax.tree.leaves(batch)[0].shape[0] if end is None else end]

    def parts(
        self, donated: Sequence[Shape], rng: Shape, batch: Batch, many: bool = False
    ) -> tuple[Batch, list[DeviceProgram]]:
        """The shapes of a batch, and the program for them and for the shapes of a state."""
        axis = int(many)
        self.batches.check(batch, axis)
        shapes = shapes_on(batch, self.batches.shardings[axis])
        number = jax.ShapeDtypeStruct((), jnp.int32, sharding=self._everywhere)
        run, numbers = self._program_of(shapes, (0, None) if many else ())
        return shapes, [DeviceProgram(run.trace(donated, rng, shapes, *[number for _ in numbers]))]

    def finish(self, donated: list[jax.Array], rng: jax.Array) -> TrainState:
        """The state with nothing pending. The old state stays valid."""
        wait_before_collectives(donated, self.batches.devices)
        return self._structure.unflatten([rng, *self._finish(donated, rng)])
