"""The compiled programs of a training step: one step, several in a loop, and the end of training.

An engine is a function `run(step, shardings, state, batch) -> (state, metrics)` of whole arrays, traced inside of a
program. Of the step of one device it makes that of all of them. `shardings` are those of the leaves of the state.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ..._core import checks, host
from ..._core.arrays import Device, forget, is_tracing
from ..._cpu import IS_KEPT, for_platform, in_blocks
from ..._devices.mesh import STORE_AXIS, are_on, put, put_copy, wait_before_collectives
from ..._devices.user_mesh import without_types
from ..._store.store import mesh_of_values, sharding_of
from .state import TrainState, check_is_state, leaf_shardings, shapes_on
from .step import DeviceStep

# Shapes of a batch whose programs in blocks are kept. An own loop that pads texts has a few dozen.
_MOST_SHAPES = 256

Batch = Any
Metrics = dict[str, jax.Array]
Engine = Callable[[DeviceStep, TrainState, TrainState, Batch], tuple[TrainState, Metrics]]


def run_by_shard_map(step: DeviceStep, shardings: TrainState, state: TrainState, *batch: Batch) -> Any:
    """The step on each device. Without a batch what the step does at the end of training, which gives the state."""
    axis = P(step.axis_name)
    specs = jax.tree.map(lambda s: P(*[part and step.axis_name for part in s.spec]), shardings)
    mesh = Mesh(np.array(state.store.devices), (step.axis_name,))
    # With the check on, the gradient of replicated params would be summed already.
    over = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    if not batch:
        return over(step.apply_pending, in_specs=(specs,), out_specs=specs)(state)
    return over(step, in_specs=(specs, axis), out_specs=(specs, P()))(state, *batch)


def run_by_pmap(step: DeviceStep, shardings: TrainState, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    devices = state.store.devices or ()
    # Inside of a program, pmap knows the devices of its own process only. By shard_map it is the same program.
    if len({d.process_index for d in devices}) > 1:
        return run_by_shard_map(step, shardings, state, batch)
    leaves, treedef = jax.tree.flatten(state)
    axes = [0 if any(sharding.spec) else None for sharding in jax.tree.leaves(shardings)]

    def body(leaves: list[jax.Array], batch: Batch) -> Any:
        new, metrics = step(treedef.unflatten(leaves), batch)
        return jax.tree.leaves(new), metrics

    run = jax.pmap(body, step.axis_name, in_axes=(axes, 0), out_axes=(axes, None), devices=devices)
    shares = jax.tree.map(lambda x: x.reshape(len(devices), x.shape[0] // len(devices), *x.shape[1:]), batch)
    try:
        new, metrics = run(leaves, shares)
    finally:
        forget(body)  # it is a part of the program around it now
    return treedef.unflatten(new), metrics


def run_by_jit(step: DeviceStep, shardings: TrainState, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    # All arrays over the same mesh, also those that a user's mesh laid out alike.
    state = jax.tree.map(lax.with_sharding_constraint, state, shardings)
    mesh = mesh_of_values(state.store)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # for bare PartitionSpecs in a loss
        return step(state, batch)


ENGINES: dict[str, Engine] = {"pmap": run_by_pmap, "shard_map": run_by_shard_map, "jit": run_by_jit}


class Part(NamedTuple):
    """A program of a step, for shapes on the devices of a state."""

    traced: jax.stages.Traced
    runs: int = 1  # how often a device runs it in a step
    held: int = 0  # bytes that a device holds meanwhile and that are no arguments of it


@dataclasses.dataclass
class Batches:
    """How the batches of a program are cut, and where they go."""

    devices: tuple[Device, ...]
    # In how many shares a batch is cut, and each of them in how many microbatches; in words, if not over devices.
    cut: tuple[int, int, str]
    # The sharding of a batch, and that of several batches, whose number is the first axis.
    along: tuple[NamedSharding, ...]
    # How the leaves of the last batch were placed, if they could stay where they were.
    last: list[Any] = dataclasses.field(default_factory=list)

    def place(self, batch: Batch, axis: int = 0) -> Batch:
        """The batch on the devices. `axis` is that of the examples."""
        # Nothing is checked where its arrays are placed as those of the last batch, since this is asked at every step.
        # A program checks the shapes when it is traced for them. Arrays of NumPy are looked at each time: their owner
        # may write the next batch into them while a program still reads them.
        leaves = jax.tree.leaves(batch)
        placed = [getattr(leaf, "sharding", None) for leaf in leaves]
        if placed == self.last:
            return batch
        check_even(batch, axis, *self.cut)
        plain = without_types(batch)
        own = host.own_copies(plain, "train step: batch")
        was_copied = any(map(operator.is_not, jax.tree.leaves(own), jax.tree.leaves(plain)))
        if not are_on(own, self.devices) or (was_copied and not is_tracing()):
            return put(own, self.along[axis])
        # What is traced has no sharding, as arrays of NumPy have none.
        if plain is batch and not was_copied and None not in placed:
            self.last = placed
        return own


def check_even(batch: Batch, axis: int, shares: int, parts: int, words: str) -> None:
    """`ValueError` where an array of a batch cannot be cut in equal shares, or a share in microbatches.

    Each array is cut by its own length. `TypeError` for a leaf that is no array of numbers.
    """
    checks.arrays_of_numbers(batch, "train step: batch")
    lengths = {np.shape(leaf)[axis : axis + 1] for leaf in jax.tree.leaves(batch)}
    if not lengths or () in lengths:
        checks.batch_length(batch, "train step", axis)  # raises
    whole = shares * parts
    if len(lengths) > 1 and (whole,) in lengths:
        shapes = checks.shorten([tuple(np.shape(leaf)) for leaf in jax.tree.leaves(batch)])
        rule = "must share the length of their first axis, or each have two or more rows in every share"
        raise ValueError(
            f"train step: the arrays of a batch {rule}, got {shapes}: in each of {whole} shares one row of an array "
            "would be broadcast, and so count for all rows of the others"
        )
    for (n,) in sorted(lengths, reverse=True):
        if n % whole == 0:
            continue
        sizes = " or ".join(str(size) for size in (n // whole * whole, -(-n // whole) * whole) if size)
        problem = f"cannot be {words or f'divided by {shares} devices'}"
        if n % shares == 0:
            each = f"gives each of {shares} devices {n // shares} examples"
            problem = f"{each}, which cannot be cut in accumulate={parts} microbatches"
        what = f"a batch of {n}"
        if len(lengths) > 1:
            shapes = checks.shorten([tuple(np.shape(leaf)) for leaf in jax.tree.leaves(batch)])
            what = f"each array is cut by its own length, but one of {n} rows, of arrays {shapes},"
        raise ValueError(f"train step: {what} {problem}; use a batch of {sizes}, or pad it")


class JointProgram:
    """One step, or several, as one compiled program of all devices, for states of one structure."""

    # A program takes the leaves of a state in a list, whose memory is donated, and the `rng` by itself. JAX keeps the
    # structures of arguments forever, and that of a state refers to its optimizer. The `rng` never changes, and a
    # program takes as long to return a random key as five arrays.

    def __init__(self, step: DeviceStep, run: Engine, treedef: Any):
        state = treedef.unflatten(range(treedef.num_leaves))
        self._everywhere = sharding_of(state.store)
        devices, mesh, axes = state.store.devices, self._everywhere.mesh, step.axes or (STORE_AXIS,)
        first = axes[0] if len(axes) == 1 else axes
        cut = math.prod([mesh.shape[name] for name in axes]), step.accumulate, ""
        self._batches = Batches(devices, cut, (NamedSharding(mesh, P(first)), NamedSharding(mesh, P(None, first))))
        self._step, self._treedef, self._rng_at, self._platform = step, treedef, state.rng, devices[0].platform
        self._number = functools.lru_cache(maxsize=64)(functools.partial(_number, self._everywhere))
        own, at = dataclasses.replace(step, platform=self._platform), state.rng

        # It does not refer to the program, which would then be freed by the garbage collector only.
        def train_step(leaves: list[jax.Array], rng: jax.Array, batch: Batch) -> tuple[list[jax.Array], Metrics]:
            check_even(batch, 0, *cut)
            state = treedef.unflatten([*leaves[:at], rng, *leaves[at:]])
            check_is_state(state, "train step")  # a stack of states has the structure of one
            shardings = leaf_shardings(state)
            new, metrics = run(own, shardings, state, batch)
            # The new state is placed exactly as the old one, so the next step finds its program.
            leaves = jax.tree.map(lax.with_sharding_constraint, jax.tree.leaves(new), jax.tree.leaves(shardings))
            del leaves[at]
            return leaves, metrics

        self._traced = jax.jit(train_step, inline=True)  # so it is traced once, for all that follows
        self._fast = functools.partial(for_platform, platform=self._platform, mesh=mesh, axes=step.axes)
        self._one = jax.jit(jax.jit(self._fast(self._traced), inline=True), donate_argnums=0)
        # One device takes half as much memory again for its blocks, several take hardly more.
        self._has_blocks = self._platform == "cpu" and IS_KEPT and len(mesh.local_devices or ()) > 1
        # The program in blocks for batches of these shapes and dtypes, or None, by the first state.
        self._chosen: dict[Any, Any] = {}

    def __call__(self, leaves: list[jax.Array], batch: Batch, *part: int) -> tuple[TrainState, Metrics]:
        """One step, or those of `batch[first:end]`, `part` being these two numbers."""
        batch = self._batches.place(batch, axis=1 if part else 0)
        wait_before_collectives((leaves, batch), self._batches.devices)
        rng = leaves.pop(self._rng_at)
        run: Any = self._several if part else self._one
        args = (leaves, rng, batch, *map(self._number, part))
        if self._has_blocks:
            shapes = (len(part), *[(x.shape, x.dtype) for x in jax.tree.leaves(batch)])
            if shapes not in self._chosen:
                if len(self._chosen) == _MOST_SHAPES:
                    del self._chosen[next(iter(self._chosen))]  # the one made first
                options = in_blocks(run.trace(*args).jaxpr)
                again = jax.jit(run.__wrapped__, donate_argnums=0, compiler_options=options)
                self._chosen[shapes] = again if options else None
            if self._chosen[shapes] and not is_tracing():  # JAX takes no options inside of another `jit`
                run = self._chosen[shapes]
        new, metrics = run(*args)
        new.insert(self._rng_at, rng)
        return self._treedef.unflatten(new), metrics

    @functools.cached_property
    def _several(self) -> Any:
        """`train_steps(leaves, rng, batches, first, end) -> (leaves, metrics of each batch)`."""
        step = self._traced

        def train_steps(leaves: list[Any], rng: jax.Array, batches: Batch, first: jax.Array, end: jax.Array) -> Any:
            def batch(i: Any) -> Batch:
                return jax.tree.map(functools.partial(lax.dynamic_index_in_dim, index=i, keepdims=False), batches)

            def body(i: Any, carry: Any) -> Any:
                leaves, metrics = step(carry[0], rng, batch(i))
                return leaves, jax.tree.map(lambda x, row: x.at[i].set(row), carry[1], metrics)

            _, metrics = jax.eval_shape(lambda: step(leaves, rng, batch(0)))  # of tracers, so nothing is traced anew
            number = jax.tree.leaves(batches)[0].shape[0]
            rows = jax.tree.map(lambda x: jnp.zeros((number, *x.shape), x.dtype), metrics)
            return lax.fori_loop(first, end, body, (leaves, rows))

        return jax.jit(jax.jit(self._fast(train_steps), inline=True), donate_argnums=0)

    def parts(self, leaves: list[Any], batch: Batch, many: bool = False) -> tuple[Batch, list[Part]]:
        """The shapes of a batch, and the program for them and for the shapes of a state."""
        rng, axis = leaves.pop(self._rng_at), int(many)
        check_even(batch, axis, *self._batches.cut)
        shapes = shapes_on(batch, self._batches.along[axis])
        number = jax.ShapeDtypeStruct((), jnp.int32, sharding=self._everywhere)
        run, part = (self._several, (number, number)) if many else (self._one, ())
        return shapes, [Part(run.trace(leaves, rng, shapes, *part))]

    def finish(self, leaves: list[jax.Array]) -> TrainState:
        """The state with nothing pending. The old state stays valid."""
        wait_before_collectives(leaves, self._batches.devices)
        return self._treedef.unflatten(self._finish(leaves))

    @functools.cached_property
    def _finish(self) -> Any:
        step, treedef = self._step, self._treedef

        def finish(leaves: list[jax.Array]) -> list[jax.Array]:
            state = treedef.unflatten(leaves)
            return jax.tree.leaves(run_by_shard_map(step, leaf_shardings(state), state))

        return jax.jit(finish)


def _number(everywhere: NamedSharding, i: int) -> jax.Array:
    """The int on the devices, so that a call needs nothing from the host."""
    with jax.ensure_compile_time_eval():
        return put_copy(jnp.int32(i), everywhere)
