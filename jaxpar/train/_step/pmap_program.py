"""The program of a step by `pmap` over several processes, and which program a state gets."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ..._core.arrays import is_prng_key, without_keys
from ..._devices.emulated import wait_before_collectives
from ..._devices.mesh import STORE_AXIS, mesh_of
from ..._devices.pmap_cache import forget
from .batch import split_batch
from .device_step import DeviceStep
from .engines import Batch, Devices, Engine
from .programs import Metrics, Program
from .state import TrainState, partition_specs
from .virtual_program import VirtualProgram
from .virtual_step import VirtualStep


def make_program(one: DeviceStep, engine: Engine, treedef: Any) -> Program:
    """The program of a step for states of this structure, which says which devices they are on."""
    if isinstance(one, VirtualStep):
        return VirtualProgram(one, engine, treedef)
    program = Program(one, engine, treedef)
    if engine.within_one_process and len({d.process_index for d in program.devices}) > 1:
        return PmapProgram(one, engine, treedef)
    return program


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

    def check(self, state: TrainState, shapes: Batch) -> list[str]:
        """Only the sizes. The rest comes up at the first call, before the state is donated."""
        del state
        self._one.check_batch(self._one.lay_out(shapes, self._shares, self._along(0)), self._shares)
        return []

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
