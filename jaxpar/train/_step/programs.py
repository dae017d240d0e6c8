"""The compiled programs of a training step: one step, several in a loop, and the end of training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ..._core.arrays import Device
from ..._devices.emulated import wait_before_collectives
from ..._devices.mesh import STORE_AXIS, mesh_of
from ..._devices.pmap_cache import forget
from .apart import Apart, made_of
from .device_step import DeviceStep
from .state import TrainState, everywhere, specs

Batch = Any


class Program:
    """`program(state, batch) -> (new state, metrics)`, compiled; the state is donated, but for its `rng`.

    That stays as it is, and handing a random key out of a compiled program takes as long as five arrays.

    Args:
        one: the step of one device.
        key: the devices that it runs on, and the structure of the states without their `rng`.
        check: raises where a batch cannot be divided.

    Attributes:
        key: as given; a state that the program made carries it.
        devices: those that it runs on.
        moves: whether a batch had to be moved there; until then, a batch for a state that the program made is not
            looked at, which would take as long as half of a small step.
    """

    moves = False

    def __init__(
        self, one: Any, engine: str, axis_name: str, key: tuple[tuple[Device, ...], Any], check: Callable[[Batch], None]
    ):
        devices, structure = key
        names = Apart(structure, range(structure.num_leaves)).names()
        mapped = _pmapped if engine == "pmap" else _shard_mapped

        def train_step(state: Apart, rng: jax.Array, batch: Batch) -> Any:
            check(batch)
            whole = Apart(structure, state.leaves).together(rng)
            new, metrics = mapped(one, axis_name, devices, whole, batch)
            new = Apart.of(new)
            # The new state lies exactly as the old one does, so the next step finds its program.
            shardings = [NamedSharding(mesh_of(devices), spec) for spec in specs(new.together(None), STORE_AXIS)]
            leaves = [lax.with_sharding_constraint(x, s) for x, s in zip(new.leaves, shardings, strict=True)]
            return Apart(names if new.structure == structure else new.structure, leaves), metrics

        step = jax.jit(train_step)  # so it is traced once, though `train_steps` asks for it twice

        def train_steps(state: Apart, rng: jax.Array, batches: Batch, first: jax.Array, end: jax.Array) -> Any:
            def batch(i: Any) -> Batch:
                return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), batches)

            def body(carry: Any) -> Any:
                i, state, rows = carry
                state, metrics = step(state, rng, batch(i))
                return i + 1, state, jax.tree.map(lambda x, row: x.at[i].set(row), rows, metrics)

            _, metrics = jax.eval_shape(lambda: step(state, rng, batch(0)))
            number = jax.tree.leaves(batches)[0].shape[0]
            rows = jax.tree.map(lambda x: jnp.zeros((number, *x.shape), x.dtype), metrics)
            return lax.while_loop(lambda carry: carry[0] < end, body, (first, state, rows))[1:]

        self.key, self.devices, self._names = key, devices, names
        self._number = functools.lru_cache(maxsize=64)(functools.partial(_number, devices))
        self._step, self._steps = (jax.jit(f, donate_argnums=0) for f in (train_step, train_steps))

    def __call__(self, state: TrainState, batch: Batch, *part: int) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step; or those of `batch[first:end]`, `part` being these."""
        apart = Apart.of(state)
        wait_before_collectives((apart.leaves[0], batch), self.devices)
        run, given = self._steps if part else self._step, Apart(self._names, apart.leaves)
        new, metrics = run(given, state.rng, batch, *map(self._number, part))
        if isinstance(new.structure, tuple):
            new.structure = self.key[1]
        return made_of(new, state.rng, self.key), metrics

    def lower(self, state: TrainState, batch: Batch, *part: int) -> jax.stages.Lowered:
        run = self._steps if part else self._step
        return run.lower(Apart(self._names, Apart.of(state).leaves), state.rng, batch, *map(self._number, part))


def _number(devices: tuple[Device, ...], i: int) -> jax.Array:
    """The int on the devices, so that a call needs nothing from the host."""
    with jax.ensure_compile_time_eval():
        return everywhere(jnp.int32(i), devices)


def finisher(one: DeviceStep, axis_name: str, devices: tuple[Device, ...], structure: Any) -> Any:
    """The compiled `TrainStep.finish` of states of this structure; the old state stays."""

    @jax.jit
    def finish(leaves: list[jax.Array]) -> list[jax.Array]:
        layout = specs(structure.unflatten(leaves), axis_name)

        def flush(leaves: list[jax.Array]) -> list[jax.Array]:
            return jax.tree.leaves(one.flushed(structure.unflatten(leaves)))

        mesh = Mesh(np.array(devices), (axis_name,))
        return jax.shard_map(flush, mesh=mesh, in_specs=(layout,), out_specs=layout, check_vma=False)(leaves)

    return lambda state: structure.unflatten(finish(jax.tree.leaves(state)))


def _pmapped(one: Any, axis_name: str, devices: Any, state: TrainState, batch: Batch) -> Any:
    leaves, structure = jax.tree.flatten(state)
    axes = [None if spec == P() else 0 for spec in specs(state, axis_name)]

    def body(leaves: list[jax.Array], batch: Batch) -> Any:
        new, metrics = one(structure.unflatten(leaves), batch)
        return jax.tree.leaves(new), metrics

    run = jax.pmap(body, axis_name, in_axes=(axes, 0), out_axes=(axes, None), devices=devices)
    k = len(devices)
    try:
        new, metrics = run(leaves, jax.tree.map(lambda x: x.reshape(k, x.shape[0] // k, *x.shape[1:]), batch))
    finally:
        forget(body)  # it is a part of the program around it now
    return structure.unflatten(new), metrics


def _shard_mapped(one: Any, axis_name: str, devices: Any, state: TrainState, batch: Batch) -> Any:
    layout = jax.tree.structure(state).unflatten(specs(state, axis_name))
    return jax.shard_map(
        one,
        mesh=Mesh(np.array(devices), (axis_name,)),
        in_specs=(layout, P(axis_name)),
        out_specs=(layout, P()),
        check_vma=False,  # with the check on, the gradient of replicated params would come summed already
    )(state, batch)
