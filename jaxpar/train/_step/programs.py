"""The compiled programs of a training step: one step, several in a loop, and the end of training."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from ... import kv
from ..._devices.emulated import can_hang, wait_before_collectives
from ..._devices.formulas import fast_on_cpus
from ..._devices.mesh import are_on, put_copy
from ..._devices.placement import put
from ..._devices.user_mesh import without_types
from ...kv import _store
from .device_step import DeviceStep
from .engines import Batch, Devices, Engine
from .state import TrainState, leaf_shardings

Metrics = dict[str, jax.Array]
Parts = tuple[Any, ...]  # the values of the fields of a store and of a state that have arrays, see `Program`
_new, _set = object.__new__, object.__setattr__


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
        self._can_hang = can_hang(self.devices)
        self._shares = math.prod(mesh.shape[name] for name in axes)
        self._along = functools.cache(
            lambda axis: NamedSharding(mesh, P(*[None] * axis, axes[0] if len(axes) == 1 else axes))
        )
        of_store, of_state = _fields_with_arrays(state)
        self._of_store, self._of_state = list(enumerate(of_store)), list(enumerate(of_state, len(of_store)))
        self._store = vars(state.store) | dict.fromkeys(of_store)  # the fields without arrays
        self._state = vars(state) | dict.fromkeys(("store", "rng", *of_state))
        self._parts = operator.attrgetter(*(f"store.{name}" for name in of_store), *of_state)
        self._shardings: list[Any] = []  # of the last batch that was checked, or the type of what has none
        self._number = functools.lru_cache(maxsize=64)(functools.partial(_number, _store.copies_for(state.store)))
        step = _step_of_parts(one, engine, self._shares, treedef, self._rng)
        self._traced = jax.jit(step, inline=True)  # so it is traced once, for `check` and for both programs
        self._step = jax.jit(_one_step(self._traced), donate_argnums=0)
        self._steps = jax.jit(_loop_over_batches(self._traced), donate_argnums=0)

    def __call__(self, state: TrainState, batch: Batch, *part: int) -> tuple[TrainState, Metrics]:
        """One step, or those of `batch[first:end]`, `part` being these two numbers. The state has its structure."""
        if _shardings_of(batch) != self._shardings:  # else as the last batch that was checked
            batch = self._place_batch(batch, 1 if part else 0)
        parts = self._parts(state)
        if self._can_hang:
            wait_before_collectives((parts, batch), self.devices)
        if part:
            new, metrics = self._steps(parts, state.rng, batch, *map(self._number, part))
        else:
            new, metrics = self._step(parts, state.rng, batch)
        return self._state_of(new, state.rng), metrics

    def lower(self, state: TrainState, batch: Batch, *part: int) -> jax.stages.Lowered:
        batch = self._place_batch(batch, 1 if part else 0)
        run = self._steps if part else self._step
        return run.lower(self._parts(state), state.rng, batch, *map(self._number, part))

    def check(self, state: TrainState, shapes: Batch) -> list[str]:
        """Raise what a call would raise for a batch of these shapes. Return the names of the metrics."""
        along = self._along(0)
        batch = self._one.lay_out(shapes, self._shares, along)
        self._one.check_batch(batch, self._shares)
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=along), batch)
        return list(self._traced.eval_shape(self._parts(state), state.rng, batch)[1])

    def compile_own(self, state: TrainState, batch: Batch) -> list[str]:
        """Compile what each device runs by itself: nothing, as this is one program over all of them."""
        return []

    def _state_of(self, parts: Parts, rng: jax.Array) -> TrainState:
        """The state with these parts. Every step calls it, and `dataclasses.replace` takes as long as a small step."""
        store, state = _new(kv.KVStore), _new(TrainState)
        fields = self._store.copy()
        for i, name in self._of_store:
            fields[name] = parts[i]
        _set(store, "__dict__", fields)
        fields = self._state.copy()
        fields["store"], fields["rng"] = store, rng
        for i, name in self._of_state:
            fields[name] = parts[i]
        _set(state, "__dict__", fields)
        return state

    def _place_batch(self, batch: Batch, axis: int) -> Batch:
        """The batch on the program's devices. Where the arrays are as those of the last batch, nothing is checked.

        Their shapes are checked when a program is traced for them.
        """
        batch = self._one.lay_out(batch, self._shares, self._along(axis), axis)
        shardings = _shardings_of(batch)
        if shardings == self._shardings:
            return batch
        self._one.check_batch(batch, self._shares, axis)
        plain = without_types(batch)
        if not are_on(plain, self.devices):
            return put(plain, self._along(axis))
        if plain is batch:
            self._shardings = shardings
        return plain


def make_finish(one: DeviceStep, engine: Engine, treedef: Any) -> Callable[[TrainState], TrainState]:
    """The compiled `TrainStep.finish` of states of this structure. The old state stays valid."""

    @jax.jit
    def finish(leaves: list[jax.Array]) -> list[jax.Array]:
        state = treedef.unflatten(leaves)
        return jax.tree.leaves(engine.finish(one, state.store.devices, state))

    return lambda state: treedef.unflatten(finish(jax.tree.leaves(state)))


def _fields_with_arrays(state: TrainState) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the fields of the store that have arrays, and of those of the state without its `rng`.

    `values` and `step` are always among them.
    """
    of_store, of_state = (
        {path[0].name: None for path, _ in jax.tree_util.tree_leaves_with_path(node)} for node in (state.store, state)
    )
    return tuple({"values": None, **of_store}), tuple(name for name in of_state if name not in ("store", "rng"))


def _shardings_of(batch: Batch) -> list[Any]:
    """The sharding of each leaf, or type and dtype of one that has none."""
    try:
        return [array.sharding for array in batch.values()]  # most batches are a dict of arrays, and this is faster
    except AttributeError:
        leaves = jax.tree.leaves(batch)
        return [getattr(leaf, "sharding", None) or (type(leaf), getattr(leaf, "dtype", None)) for leaf in leaves]


def _step_of_parts(one: DeviceStep, engine: Engine, shares: int, treedef: Any, at: int) -> Callable[..., Any]:
    """`train_step(parts, rng, batch) -> (parts, metrics)`, the `rng` being leaf number `at` of the state.

    A program gets the parts of a state that have arrays. JAX keeps the structures of arguments forever, and that of
    the whole state refers to the optimizer. Also most fields have no arrays, so that a call is faster.
    """

    def train_step(parts: Parts, rng: jax.Array, batch: Batch) -> tuple[Parts, Any]:
        one.check_batch(batch, shares)
        leaves, structure = jax.tree.flatten(parts)
        state = treedef.unflatten([*leaves[:at], rng, *leaves[at:]])
        new, metrics = engine.step(one, state.store.devices, state, batch)
        # The new state is placed exactly as the old one, so the next step finds its program.
        shardings = leaf_shardings(new)
        leaves = jax.tree.leaves(new)
        del leaves[at], shardings[at]
        placed = [lax.with_sharding_constraint(x, s) for x, s in zip(leaves, shardings, strict=True)]
        return structure.unflatten(placed), metrics

    return train_step


def _one_step(step: Callable[..., Any]) -> Callable[..., Any]:
    def train_step(parts: Parts, rng: jax.Array, batch: Batch) -> Any:
        return step(parts, rng, batch)

    return train_step


def _loop_over_batches(step: Callable[..., Any]) -> Callable[..., Any]:
    """`train_steps(parts, rng, batches, first, end) -> (parts, metrics of each batch)`."""

    def train_steps(parts: Parts, rng: jax.Array, batches: Batch, first: jax.Array, end: jax.Array) -> Any:
        def batch(i: Any) -> Batch:
            return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), batches)

        def body(carry: Any) -> Any:
            i, parts, rows = carry
            parts, metrics = step(parts, rng, batch(i))
            return i + 1, parts, jax.tree.map(lambda x, row: x.at[i].set(row), rows, metrics)

        _, metrics = jax.eval_shape(lambda: step(parts, rng, batch(0)))
        number = jax.tree.leaves(batches)[0].shape[0]
        rows = jax.tree.map(lambda x: jnp.zeros((number, *x.shape), x.dtype), metrics)

        def loop(carry: Any) -> Any:
            return lax.while_loop(lambda carry: carry[0] < end, body, carry)

        return fast_on_cpus(loop)((first, parts, rows))[1:]

    return train_steps


def _number(everywhere: NamedSharding, i: int) -> jax.Array:
    """The int on the devices, so that a call needs nothing from the host."""
    with jax.ensure_compile_time_eval():
        return put_copy(jnp.int32(i), everywhere)
