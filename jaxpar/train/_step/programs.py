"""The compiled programs of a training step: one step, several in a loop, and the end of training."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ..._core import checks
from ..._core.arrays import is_prng_key, is_traced, without_keys
from ..._devices.emulated import wait_before_collectives
from ..._devices.mesh import STORE_AXIS, is_on, mesh_of, put_copy
from ..._devices.placement import put
from ..._devices.pmap_cache import forget
from ..._devices.user_mesh import without_types
from ...kv import _store
from .device_step import DeviceStep
from .engines import Batch, Devices, Engine, split_batch
from .state import TrainState, leaf_shardings, partition_specs

Metrics = dict[str, jax.Array]
Part = tuple[str, Any, int, int]  # a field, its structure, and where its leaves begin and end


def make_program(one: DeviceStep, engine: Engine, treedef: Any) -> Program:
    """The program of a step for states of this structure, which says which devices they are on."""
    program = Program(one, engine, treedef)
    if engine.within_one_process and len({d.process_index for d in program.devices}) > 1:
        return PmapProgram(one, engine, treedef)
    return program


class Program:
    """One step, or several, for states of one structure. The memory of the state is donated, except its `rng`.

    The `rng` is the same before and after: a compiled program takes as long to return a random key as five arrays.

    Args:
        one: the step of one device.
        engine: runs it on all devices.
        treedef: the structure of the states.

    Attributes:
        devices: those of the states.
    """

    def __init__(self, one: DeviceStep, engine: Engine, treedef: Any):
        state = treedef.unflatten(range(treedef.num_leaves))
        self.devices: Devices = state.store.devices
        self._one, self._treedef, self._rng = one, treedef, state.rng
        mesh, axes = engine.spread(one, state.store)
        self._shares = math.prod(mesh.shape[name] for name in axes)
        self._along = lambda axis: NamedSharding(mesh, P(*[None] * axis, axes[0] if len(axes) == 1 else axes))
        self._store_parts, self._state_parts = _parts(state)
        self._shardings: list[Any] = []  # of the last batch that was checked, or the type of what has none
        self._number = functools.lru_cache(maxsize=64)(functools.partial(_number, _store.copies_for(state.store)))
        step = _step_of_leaves(one, engine, self._shares, treedef, self._rng)
        self._step = jax.jit(step, donate_argnums=0)
        self._steps = jax.jit(_loop_over_batches(step), donate_argnums=0)

    def __call__(self, state: TrainState, batch: Batch, *part: int) -> tuple[TrainState, Metrics]:
        """One step, or those of `batch[first:end]`, `part` being these two numbers. The state has its structure."""
        batch = self._place_batch(batch, 1 if part else 0)
        leaves = self._leaves(state)
        wait_before_collectives((leaves[0], batch), self.devices)
        run = self._steps if part else self._step
        new, metrics = run(leaves, state.rng, batch, *map(self._number, part))
        return self._with_leaves(state, new), metrics

    def lower(self, state: TrainState, batch: Batch, *part: int) -> jax.stages.Lowered:
        batch = self._place_batch(batch, 1 if part else 0)
        run = self._steps if part else self._step
        return run.lower(self._leaves(state), state.rng, batch, *map(self._number, part))

    def _leaves(self, state: TrainState) -> list[Any]:
        """The leaves of the state without its `rng`. As `jax.tree.leaves`, but faster, as most parts have no arrays."""
        leaves: list[Any] = []
        for name, *_ in self._store_parts:
            leaves += jax.tree.leaves(getattr(state.store, name))
        for name, *_ in self._state_parts:
            leaves += jax.tree.leaves(getattr(state, name))
        return leaves

    def _with_leaves(self, state: TrainState, leaves: list[Any]) -> TrainState:
        """The state with these leaves, which are without its `rng`. Parts without arrays are those of `state`.

        As `treedef.unflatten`, but faster, since most parts of a state have no arrays.
        """
        store = {name: treedef.unflatten(leaves[i:j]) for name, treedef, i, j in self._store_parts}
        parts = {name: treedef.unflatten(leaves[i:j]) for name, treedef, i, j in self._state_parts}
        return _replace(state, {"store": _replace(state.store, store), **parts})

    def _place_batch(self, batch: Batch, axis: int) -> Batch:
        """The batch on the program's devices. Where the arrays are as those of the last batch, nothing is checked.

        Their shapes are checked when a program is traced for them.
        """
        leaves = jax.tree.leaves(batch)
        shardings = [getattr(leaf, "sharding", type(leaf)) for leaf in leaves]
        if shardings == self._shardings:
            return batch
        check_batch(batch, self._shares, self._one.gradient.accumulate, axis)
        plain = without_types(batch)
        arrays = [leaf for leaf in jax.tree.leaves(plain) if isinstance(leaf, jax.Array) and not is_traced(leaf)]
        if any(not is_on(array, self.devices) for array in arrays):
            return put(plain, self._along(axis))
        if plain is batch:
            self._shardings = shardings
        return plain


class PmapProgram(Program):
    """One step by `pmap` over the devices of several processes.

    Under `jit`, `pmap` knows the devices of its own process only, so here it is called directly. It takes arrays over
    all devices and returns this process's part of each. The parts are joined without a copy.
    """

    def __init__(self, one: DeviceStep, engine: Engine, treedef: Any):
        super().__init__(one, engine, treedef)
        _check_in_rows(self.devices)
        count, mesh = len(self.devices), Mesh(np.array(self.devices), (one.axis_name,))
        self._split = jax.jit(
            lambda batch: split_batch(batch, count), out_shardings=NamedSharding(mesh, P(one.axis_name))
        )
        self._programs: dict[Any, Any] = {}

    def __call__(self, state: TrainState, batch: Batch, *part: int) -> tuple[TrainState, Metrics]:
        _check_one(part)
        leaves = jax.tree.leaves(state)
        batch = self._place_batch(batch, 0)
        wait_before_collectives((leaves[0], batch), self.devices)
        run, plain, specs, restore = self._prepare(leaves)
        new, metrics = run(plain, self._split(batch))
        new = [self._join(x, spec) for x, spec in zip(new, specs, strict=True)]
        return self._treedef.unflatten(restore(new)), metrics

    def lower(self, state: TrainState, batch: Batch, *part: int) -> jax.stages.Lowered:
        _check_one(part)
        run, plain, *_ = self._prepare(jax.tree.leaves(state))
        return run.lower(plain, self._split(self._place_batch(batch, 0)))

    def _prepare(self, leaves: list[Any]) -> tuple[Any, tuple[Any, ...], tuple[P, ...], Callable[[Any], Any]]:
        """The program, its arguments, their specs, and the function that makes random keys of integers again."""
        specs = tuple(partition_specs(self._treedef.unflatten(leaves), STORE_AXIS))
        plain, restore = without_keys(leaves)
        key = specs, tuple(leaf.dtype for leaf in leaves if is_prng_key(leaf))
        if key not in self._programs:
            self._programs[key] = self._compile(specs, restore)
        return self._programs[key], tuple(plain), specs, restore

    def _compile(self, specs: tuple[P, ...], restore: Callable[[Any], Any]) -> Any:
        axes = tuple(None if spec == P() else 0 for spec in specs)  # pmap wants a hashable tree here
        one, treedef = self._one, self._treedef  # JAX would keep `self` with the function

        def train_step(plain: tuple[jax.Array, ...], batch: Batch) -> Any:
            new, metrics = one(treedef.unflatten(restore(list(plain))), batch)
            return tuple(without_keys(jax.tree.leaves(new))[0]), metrics

        weakref.finalize(self, forget, train_step).atexit = False
        return jax.pmap(
            train_step,
            one.axis_name,
            in_axes=(axes, 0),
            out_axes=(axes, None),
            devices=self.devices,
            donate_argnums=0,
        )

    def _join(self, own: jax.Array, spec: P) -> jax.Array:
        """An array over all devices out of this process's part."""
        shape = own.shape if spec == P() else (len(self.devices), *own.shape[1:])
        parts = [shard.data for shard in own.addressable_shards]
        return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh_of(self.devices), spec), parts)


def make_finish(one: DeviceStep, engine: Engine, treedef: Any) -> Callable[[TrainState], TrainState]:
    """The compiled `TrainStep.finish` of states of this structure. The old state stays valid."""

    @jax.jit
    def finish(leaves: list[jax.Array]) -> list[jax.Array]:
        state = treedef.unflatten(leaves)
        return jax.tree.leaves(engine.finish(one, state.store.devices, state))

    return lambda state: treedef.unflatten(finish(jax.tree.leaves(state)))


def check_batch(batch: Batch, devices: int, parts: int, axis: int = 0) -> None:
    """`ValueError` where a batch cannot be divided by the devices, or a share by the microbatches."""
    n = checks.batch_length(batch, "train step", axis)
    if parts == 1:
        checks.even_share(n, devices, "train step", ", or pad it")
    if n % (devices * parts) == 0:
        return
    size = n // (devices * parts) * devices * parts or devices * parts
    if n % devices:
        raise ValueError(
            f"train step: a batch of {n} cannot be divided by {devices} devices; use a batch of {size}, or pad it"
        )
    raise ValueError(
        f"train step: a batch of {n} gives each of {devices} devices {n // devices} examples, which cannot be cut "
        f"in accumulate={parts} microbatches; use a batch of {size}"
    )


def _parts(state: TrainState) -> tuple[list[Part], list[Part]]:
    """Where the leaves of each field of the store, and of the state without its `rng`, are among the leaves."""
    found: tuple[list[Part], list[Part]] = [], []
    first = 0
    for parts, node, others in ((found[0], state.store, ()), (found[1], state, ("store", "rng"))):
        names = [path[0].name for path, _ in jax.tree_util.tree_leaves_with_path(node)]  # fields with leaves
        for name in dict.fromkeys(name for name in names if name not in others):
            treedef = jax.tree.structure(getattr(node, name))
            parts.append((name, treedef, first, first + treedef.num_leaves))
            first += treedef.num_leaves
    return found


def _replace(node: Any, changes: dict[str, Any]) -> Any:
    """As `dataclasses.replace`, for a class without `__post_init__`. It is faster, and every step calls it."""
    new = object.__new__(type(node))
    new.__dict__.update(node.__dict__)
    new.__dict__.update(changes)
    return new


def _step_of_leaves(one: DeviceStep, engine: Engine, shares: int, treedef: Any, at: int) -> Callable[..., Any]:
    """`train_step(leaves, rng, batch) -> (leaves, metrics)`, the `rng` being leaf number `at` of the state.

    A program gets leaves, since JAX keeps the structures of arguments forever, and this one refers to the optimizer.
    """

    def train_step(leaves: list[jax.Array], rng: jax.Array, batch: Batch) -> tuple[list[jax.Array], Any]:
        check_batch(batch, shares, one.gradient.accumulate)
        state = treedef.unflatten([*leaves[:at], rng, *leaves[at:]])
        new, metrics = engine.step(one, state.store.devices, state, batch)
        # The new state is placed exactly as the old one, so the next step finds its program.
        shardings = leaf_shardings(new)
        leaves = jax.tree.leaves(new)
        del leaves[at], shardings[at]
        return [lax.with_sharding_constraint(x, s) for x, s in zip(leaves, shardings, strict=True)], metrics

    return train_step


def _loop_over_batches(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """`train_steps(leaves, rng, batches, first, end) -> (leaves, metrics of each batch)`."""
    step = jax.jit(train_step)  # so it is traced once, though `train_steps` calls it twice

    def train_steps(leaves: list[jax.Array], rng: jax.Array, batches: Batch, first: jax.Array, end: jax.Array) -> Any:
        def batch(i: Any) -> Batch:
            return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), batches)

        def body(carry: Any) -> Any:
            i, leaves, rows = carry
            leaves, metrics = step(leaves, rng, batch(i))
            return i + 1, leaves, jax.tree.map(lambda x, row: x.at[i].set(row), rows, metrics)

        _, metrics = jax.eval_shape(lambda: step(leaves, rng, batch(0)))
        number = jax.tree.leaves(batches)[0].shape[0]
        rows = jax.tree.map(lambda x: jnp.zeros((number, *x.shape), x.dtype), metrics)
        return lax.while_loop(lambda carry: carry[0] < end, body, (first, leaves, rows))[1:]

    return train_steps


def _number(everywhere: NamedSharding, i: int) -> jax.Array:
    """The int on the devices, so that a call needs nothing from the host."""
    with jax.ensure_compile_time_eval():
        return put_copy(jnp.int32(i), everywhere)


def _check_in_rows(devices: Devices) -> None:
    """`ValueError` unless the devices of each process follow each other, as JAX's `pmap` has them."""
    order = [process for process, _ in itertools.groupby(d.process_index for d in devices)]
    if len(set(order)) < len(order):
        raise ValueError(
            "train step: pmap takes the devices of a process one after the other, and the order here is of processes "
            f"{', '.join(map(str, order))}; make the step with engine='shard_map', or order the devices by process"
        )


def _check_one(part: tuple[int, ...]) -> None:
    if part:
        raise ValueError(
            "train step, many: a pmap over several processes is no part of a larger program; "
            'make the step with engine="shard_map", or call it for each batch'
        )
