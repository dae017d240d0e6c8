"""The step over virtual shards on the devices of a state: which programs run where, and what is sent between them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ..._core.arrays import Device, is_traced
from ..._devices.emulated import wait_before_collectives
from ..._devices.fixed_tree import Deal, sum_everywhere
from ..._devices.mesh import STORE_AXIS, copies_on, mesh_of, split_over
from ..._devices.placement import put
from .engines import Batch, Engine
from .programs import Metrics, Program
from .state import TrainState
from .virtual_step import Buffers, ShardPrograms, VirtualStep, parts_of, state_of

_REFUSED = (
    "train step, many: a step with virtual_shards is several programs, which the host starts for each shard; call it "
    "for each batch"
)
_TRACED = (
    "train step: a step with virtual_shards is several programs, which the host starts, so it can be no part of jit, "
    "of a gradient or of a picture; call it outside, or make the step without virtual_shards"
)


class VirtualProgram(Program):
    """One step over virtual shards.

    Each device computes the terms of its shards one after the other, and adds those that are neighbours in the tree at
    once. So it holds the logarithm of their number at most. One program over all devices exchanges what is left, and
    each device makes the update.
    """

    def __init__(self, one: VirtualStep, engine: Engine, treedef: Any):
        super().__init__(one, engine, treedef)
        self._virtual = one
        self._deal = Deal(one.shards, len(self.devices))
        self._ranks = {d: i for i, d in enumerate(self.devices) if d.process_index == jax.process_index()}
        self._numbers = functools.lru_cache(maxsize=None)(lambda i, d: jax.device_put(np.int32(i), d))
        self._exchange = _exchange(self._deal, mesh_of(self.devices))
        self._zeros = functools.lru_cache(maxsize=64)(lambda d, n, dtype: jnp.zeros((1, n), dtype, device=d))

    def __call__(self, state: TrainState, batch: Batch, *part: int) -> tuple[TrainState, Metrics]:
        if part:
            raise ValueError(_REFUSED)
        if is_traced((state, batch)):
            raise ValueError(_TRACED)
        batch_on = self._on_devices(self._place_batch(batch, 0), self._along(0))
        leaves, rng, programs, fit = self._prepare(state)
        leaves_on, rng_on = (self._on_devices(x, copies_on(self.devices)) for x in (leaves, rng))
        own = {d: self._nodes(programs, d, leaves_on[d], rng_on[d], batch_on[d]) for d in self._ranks}
        totals, others = self._sums([nodes for nodes, _ in own.values()], [rest for _, rest in own.values()])
        new = [programs.update(leaves_on[d], rng_on[d], totals[d], others[d]) for d in self._ranks]
        for x in filter(_is_array, leaves):
            x.delete()  # its parts were donated
        parts = [self._join(pieces) for pieces in zip(*(parts for parts, _ in new), strict=True)]
        metrics = jax.tree.map(lambda *pieces: self._join(pieces), *(metrics for _, metrics in new))
        state = dataclasses.replace(state_of(parts, rng, *fit), rng=state.rng)
        return dataclasses.replace(state, store=dataclasses.replace(state.store, devices=self.devices)), metrics

    def compile_own(self, state: TrainState, batch: Batch) -> list[str]:
        """Compile what each device of this process runs by itself, by one run of it. Nothing is exchanged.

        Returns:
            The texts of these programs before compilation.
        """
        leaves, rng, programs, _ = self._prepare(state)
        rows = jax.tree.leaves(batch)[0].shape[0] // self._deal.terms
        shard = jax.tree.map(lambda x: np.asarray(x[:rows]), batch)
        texts: list[str] = []
        for device in self._ranks:
            own = jax.device_put(jax.tree.map(np.array, (leaves, rng, shard, np.int32(0))), device)
            node, others = programs.term(*own)
            total = [x[0] for x in programs.add(node, node)]
            update = own[0], own[1], total, others
            texts = texts or [programs.term.lower(*own).as_text(), programs.update.lower(*update).as_text()]
            jax.block_until_ready(programs.update(*update))
        return texts

    def lower(self, state: TrainState, batch: Batch, *part: int) -> jax.stages.Lowered:
        """The program of the gradient of a shard before compilation."""
        if part:
            raise ValueError(_REFUSED)
        leaves, rng, programs, _ = self._prepare(state)
        batch = self._one.lay_out(batch, self._shares, self._along(0))
        self._one.check_batch(batch, self._shares)
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (leaves, rng))
        return programs.term.lower(*like, self._shard(batch), np.int32(0))

    def lower_exchange(self, *sizes: int) -> jax.stages.Lowered:
        """The program that sums over the devices before compilation, for float32 buffers of these sizes."""
        like = jax.ShapeDtypeStruct
        row = split_over(self.devices)
        nodes = [[like((len(self.devices), n), np.float32, sharding=row) for n in sizes]] * self._deal.kept
        return self._exchange.lower(nodes, [])

    def check(self, state: TrainState, shapes: Batch) -> list[str]:
        """Raise what a call would raise for a batch of these shapes. Return the names of the metrics."""
        batch = self._one.lay_out(shapes, self._shares, self._along(0))
        self._one.check_batch(batch, self._shares)
        leaves, rng, programs, _ = self._prepare(state)
        terms, others = jax.eval_shape(programs.term, leaves, rng, self._shard(batch), np.int32(0))
        totals = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in terms]
        return list(jax.eval_shape(programs.update, leaves, rng, totals, others)[1])

    def _shard(self, batch: Any) -> Any:
        """The shapes of a shard of a batch that is laid out."""
        return jax.tree.map(functools.partial(_shard_struct, slots=self._deal.slots * self._deal.devices), batch)

    def _prepare(self, state: TrainState) -> tuple[list[jax.Array], jax.Array, ShardPrograms, tuple[Any, Any]]:
        leaves, rng, fit = parts_of(state)
        return leaves, rng, self._virtual.programs(*fit), fit

    def _on_devices(self, tree: Any, sharding: NamedSharding) -> dict[Device, Any]:
        """The part of each array on each device of this process."""
        leaves, structure = jax.tree.flatten(tree)
        placed = [x if isinstance(x, jax.Array) and x.sharding == sharding else put(x, sharding) for x in leaves]
        pieces = [{shard.device: shard.data for shard in x.addressable_shards} for x in placed]
        return {d: structure.unflatten([piece[d] for piece in pieces]) for d in self._ranks}

    def _nodes(
        self, programs: ShardPrograms, device: Device, leaves: Any, rng: Any, batch: Any
    ) -> tuple[list[Buffers], Buffers]:
        """The nodes of the shards of a device, and the other leaves of the model state of its first one."""
        deal, rank = self._deal, self._ranks[device]
        nodes: list[Buffers] = []
        first: Buffers = []
        if not deal.merges[rank]:
            return self._nothing(programs, device, leaves, rng, batch)
        for i, merges in enumerate(deal.merges[rank]):
            shard = batch if deal.slots == 1 else _slice(batch, self._numbers(i, device), deal.slots)
            number = self._numbers(deal.range_of(rank)[0] + i, device)
            node, others = programs.term(leaves, rng, shard, number)
            first = first or others
            for _ in range(merges):
                node = programs.add(nodes.pop(), node)
            nodes.append(node)
        return nodes, first

    def _nothing(
        self, programs: ShardPrograms, device: Device, leaves: Any, rng: Any, batch: Any
    ) -> tuple[list[Buffers], Buffers]:
        """As `_nodes`, of a device without a shard: zeros, which are never added."""
        rows = functools.partial(_shard_struct, slots=self._deal.slots)
        like = jax.eval_shape(programs.term, leaves, rng, jax.tree.map(rows, batch), np.int32(0))
        node, others = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=device), like)
        return [node], others

    def _sums(self, nodes: list[list[Buffers]], others: list[Buffers]) -> tuple[dict[Device, Buffers], ...]:
        """The sums over all devices, and the other leaves of device 0, on each device of this process."""
        like = nodes[0][0]
        rows: list[list[Any]] = []
        for k in range(self._deal.kept):
            of_devices = [
                each[k] if k < len(each) else [self._zeros(d, x.shape[1], x.dtype) for x in like]
                for d, each in zip(self._ranks, nodes, strict=True)
            ]
            rows.append([self._stack(pieces) for pieces in zip(*of_devices, strict=True)])
        firsts = [self._stack([_add_axis(x) for x in pieces]) for pieces in zip(*others, strict=True)]
        wait_before_collectives((rows, firsts), self.devices)
        totals, rest = self._exchange(rows, firsts)
        return tuple(self._on_devices(x, copies_on(self.devices)) for x in (totals, rest))

    def _stack(self, pieces: Any) -> jax.Array:
        """An array with a row for each device, out of those of this process."""
        shape = (len(self.devices), *pieces[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, split_over(self.devices), list(pieces))

    def _join(self, pieces: Any) -> jax.Array:
        """An array with a copy on each device, out of those of this process."""
        return jax.make_array_from_single_device_arrays(pieces[0].shape, copies_on(self.devices), list(pieces))


@functools.lru_cache(maxsize=64)
def _exchange(deal: Deal, mesh: Mesh) -> Any:
    """The program `(nodes, others) -> (sums of all terms, others of the first device)`, on every device."""

    def local(nodes: list[Buffers], others: Buffers) -> tuple[Buffers, Buffers]:
        stacked = [jnp.concatenate(same) for same in zip(*nodes, strict=True)]
        sums = [sum_everywhere(deal, x, STORE_AXIS) for x in stacked]
        return sums, [lax.all_gather(x[0], STORE_AXIS)[0] for x in others]

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(STORE_AXIS), out_specs=P(), check_vma=False))


@functools.partial(jax.jit, static_argnums=2)
def _slice(batch: Any, i: jax.Array, slots: int) -> Any:
    """The rows of slot `i` of a device's part of a batch."""

    def rows(x: jax.Array) -> jax.Array:
        count = x.shape[0] // slots
        return lax.dynamic_slice_in_dim(x, i * count, count)

    return jax.tree.map(rows, batch)


def _shard_struct(x: Any, slots: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((x.shape[0] // slots, *x.shape[1:]), jax.dtypes.canonicalize_dtype(x.dtype))


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array)


_add_axis = jax.jit(lambda x: x[None])
