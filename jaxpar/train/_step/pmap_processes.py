"""The training step by `pmap` over the devices of several processes.

Within one process the whole step is one `jit` around a `pmap`. Under `jit` a `pmap` knows the devices of its own
process alone, so over several it must be called from outside. There it takes arrays over all devices as they are
and gives back each process's own part; the parts are put together again, without a copy.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ..._core.arrays import Device
from ..._devices.emulated import wait_before_collectives
from ..._devices.mesh import STORE_AXIS, mesh_of
from ..._devices.pmap_cache import forget
from .state import TrainState, specs


class PmapAcross:
    """`program(state, batch) -> (new state, metrics)`; `one` is the step of one device. The state is donated."""

    def __init__(self, one: Any, axis_name: str, devices: tuple[Device, ...]):
        self._one, self._axis_name, self.devices = one, axis_name, devices
        self._programs: dict[Any, Any] = {}
        by_device = NamedSharding(Mesh(np.array(devices), (axis_name,)), P(axis_name))
        self._cut = jax.jit(functools.partial(_cut, len(devices)), out_shardings=by_device)

    def __call__(self, state: TrainState, batch: Any, *part: int) -> tuple[TrainState, Any]:
        _check_one(part)
        wait_before_collectives((state.step, batch), self.devices)
        run, plain, layout, impls, structure = self._prepared(state)
        new, metrics = run(plain, self._cut(batch))
        new = [self._whole(x, spec) for x, spec in zip(new, layout, strict=True)]
        return structure.unflatten(_wrapped(new, impls)), metrics

    def lower(self, state: TrainState, batch: Any, *part: int) -> Any:
        _check_one(part)
        run, plain, *_ = self._prepared(state)
        return run.lower(plain, self._cut(batch))

    def _prepared(self, state: TrainState) -> tuple[Any, ...]:
        leaves, structure = jax.tree.flatten(state)
        layout = tuple(specs(state, STORE_AXIS))
        impls = tuple(jax.random.key_impl(x) if _is_key(x) else None for x in leaves)
        plain = tuple(x if impl is None else jax.random.key_data(x) for x, impl in zip(leaves, impls, strict=True))
        key = structure, layout, impls
        if key not in self._programs:
            self._programs[key] = self._program(structure, layout, impls)
        return self._programs[key], plain, layout, impls, structure

    def _program(self, structure: Any, layout: tuple[P, ...], impls: tuple[Any, ...]) -> Any:
        axes = tuple(None if spec == P() else 0 for spec in layout)  # pmap wants a hashable tree here
        one = self._one  # JAX would keep `self` with the function

        def train_step(plain: tuple[jax.Array, ...], batch: Any) -> Any:
            new, metrics = one(structure.unflatten(_wrapped(plain, impls)), batch)
            return tuple(jax.random.key_data(x) if _is_key(x) else x for x in jax.tree.leaves(new)), metrics

        weakref.finalize(self, forget, train_step).atexit = False
        return jax.pmap(
            train_step,
            self._axis_name,
            in_axes=(axes, 0),
            out_axes=(axes, None),
            devices=self.devices,
            donate_argnums=0,
        )

    def _whole(self, mine: jax.Array, spec: P) -> jax.Array:
        """An array over all devices out of this process's part."""
        shape = mine.shape if spec == P() else (len(self.devices), *mine.shape[1:])
        parts = [shard.data for shard in mine.addressable_shards]
        return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh_of(self.devices), spec), parts)


def _check_one(part: tuple[int, ...]) -> None:
    if part:
        raise ValueError(
            "train step, many: a pmap over several processes is no part of a larger program; "
            'make the step with engine="shard_map", or call it for each batch'
        )


def _cut(count: int, batch: Any) -> Any:
    return jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), batch)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _wrapped(leaves: Sequence[jax.Array], impls: tuple[Any, ...]) -> list[jax.Array]:
    return [x if i is None else jax.random.wrap_key_data(x, impl=i) for x, i in zip(leaves, impls, strict=True)]
