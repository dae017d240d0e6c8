"""The engines: how the step of one device becomes the step of all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

from ... import kv
from ..._core.arrays import Device
from ..._devices.mesh import STORE_AXIS, mesh_of
from ..._devices.pmap_cache import forget
from ...kv import _store
from .batch import split_batch
from .device_step import DeviceStep
from .global_step import GlobalStep
from .state import TrainState, partition_specs

Batch = Any
Devices = tuple[Device, ...]


@dataclasses.dataclass(frozen=True)
class Engine:
    """What the programs of a step need to know of an engine.

    Attributes:
        step: `step(one, devices, state, batch) -> (state, metrics)` of whole arrays, traced inside a program.
        finish: `finish(one, devices, state) -> state`, the same for the end of training.
        within_one_process: whether `step` can be traced only where all devices are of this process.
        spread: `spread(one, store) -> (mesh, axes)`, over which axes of which mesh a batch is split.
        on_mesh: whether it takes stores whose values are split over a mesh in their own shapes, and no others.
    """

    step: Callable[[DeviceStep, Devices, TrainState, Batch], tuple[TrainState, Any]]
    finish: Callable[[DeviceStep, Devices, TrainState], TrainState]
    within_one_process: bool = False
    spread: Callable[[DeviceStep, kv.KVStore], tuple[Mesh, tuple[str, ...]]] = lambda one, store: (
        mesh_of(store.devices or ()),
        (STORE_AXIS,),
    )
    on_mesh: bool = False


def _step_by_pmap(one: DeviceStep, devices: Devices, state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
    leaves, treedef = jax.tree.flatten(state)
    axes = [None if spec == P() else 0 for spec in partition_specs(state, one.axis_name)]

    def body(leaves: list[jax.Array], batch: Batch) -> Any:
        new, metrics = one(treedef.unflatten(leaves), batch)
        return jax.tree.leaves(new), metrics

    run = jax.pmap(body, one.axis_name, in_axes=(axes, 0), out_axes=(axes, None), devices=devices)
    try:
        new, metrics = run(leaves, split_batch(batch, len(devices)))
    finally:
        forget(body)  # it is a part of the program around it now
    return treedef.unflatten(new), metrics


def _step_by_shard_map(one: DeviceStep, devices: Devices, state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
    specs = _spec_tree(one, state)
    # With the check on, the gradient of replicated params would be summed already.
    run = jax.shard_map(
        one,
        mesh=_mesh(one, devices),
        in_specs=(specs, P(one.axis_name)),
        out_specs=(specs, P()),
        check_vma=False,
    )
    return run(state, batch)


def _finish_by_shard_map(one: DeviceStep, devices: Devices, state: TrainState) -> TrainState:
    specs = _spec_tree(one, state)
    mesh = _mesh(one, devices)
    return jax.shard_map(one.apply_pending, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)(state)


def _step_by_jit(one: DeviceStep, devices: Devices, state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
    del devices
    with jax.sharding.use_abstract_mesh(
        _store.mesh_of_values(state.store).abstract_mesh
    ):  # for bare PartitionSpecs in a loss
        return one(state, batch)


def _nothing_to_finish(one: DeviceStep, devices: Devices, state: TrainState) -> TrainState:
    del one, devices
    return state


def _spread_by_jit(one: DeviceStep, store: kv.KVStore) -> tuple[Mesh, tuple[str, ...]]:
    assert isinstance(one, GlobalStep)
    return _store.mesh_of_values(store), one.axes


ENGINES = {
    "pmap": Engine(_step_by_pmap, _finish_by_shard_map, within_one_process=True),
    "shard_map": Engine(_step_by_shard_map, _finish_by_shard_map),
    "jit": Engine(_step_by_jit, _nothing_to_finish, spread=_spread_by_jit, on_mesh=True),
}


def _spec_tree(one: DeviceStep, state: TrainState) -> Any:
    return jax.tree.structure(state).unflatten(partition_specs(state, one.axis_name))


def _mesh(one: DeviceStep, devices: Devices) -> Mesh:
    return Mesh(np.array(devices), (one.axis_name,))
