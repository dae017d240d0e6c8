"""A step over virtual shards: the batch is cut in V fixed shards, which know nothing of devices.

There are two programs, each for one device: the gradient of a shard, and the update. XLA makes the same code of them on
any number of devices. A part of a larger program would not do: XLA fuses it with its surroundings, and simplifies it
otherwise where there is one device than where there are several. `VirtualStep` is what the programs compute.
`VirtualProgram` runs them on the devices of a state, and sends the sums between these.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, Sharding, SingleDeviceSharding

from ... import checkpoint, kv
from ..._core.arrays import Device, PyTree, is_traced, tree_nbytes, without_keys
from ..._core.recent import Recent
from ..._cpu import for_platform
from ..._devices import collectives
from ..._devices.mesh import (
    STORE_AXIS,
    assemble,
    copies_on,
    mesh_of,
    put,
    spans_processes,
    split_over,
    wait_before_collectives,
)
from ..._devices.user_mesh import without_types
from ..._store.store import is_in_rows
from .loss import (
    Batch,
    Mean,
    Metrics,
    ShardMetrics,
    finish,
    model_state_mean,
    model_state_terms,
    widen,
    with_own_streams,
)
from .nonfinite import nonfinite_flags
from .programs import Batches, DeviceProgram, Shape, Structure, check_even
from .state import TrainState, is_floating, shapes_on, whole_params
from .step import Arrays, DeviceStep, shard_rng

Buffers = list[jax.Array]
# What is added up over the shards, in float32 or wider: the gradient for each key, that of a mean divided by V; `loss`
# and `aux`; the terms of the floating leaves of the model state; the flags of what is not finite, or None.
Terms = tuple[Arrays, ShardMetrics, list[tuple[jax.Array, ...]], jax.Array | None]


@dataclasses.dataclass(frozen=True)
class ShardHashes:
    """Hashes of what the shards of a step add up, and of their sums. The devices may still compute them."""

    names: tuple[str, ...]  # of what is added up: the gradients by param, the metrics, the model state
    sums: jax.Array  # (names, 2): of the sums over all shards
    of_slots: jax.Array  # (slots of all devices, dtypes, 2): of each shard
    count: int  # of shards, the first ones in `of_slots`


_ONE_A_DTYPE = collectives.BucketLimits(float("inf"), float("inf"))  # pyright: ignore[reportArgumentType]
_SEVERAL = "the host starts several programs for each step with virtual_shards"


@dataclasses.dataclass(frozen=True, kw_only=True)
class VirtualStep(DeviceStep):
    """What the programs of a step over virtual shards compute."""

    shards: int

    @functools.cached_property
    def programs(self) -> Recent:
        """The programs for states of the last few structures without devices. Steps over other devices share them."""
        return Recent(functools.partial(_programs_of, self))

    def with_initial_parts(self, state: TrainState) -> TrainState:
        """As of any step. `ValueError` for a store that rounds by the number of devices."""
        # Each of these rounds, or waits, by the number of devices, which the bits must not depend on.
        store = state.store
        if store.compressor is not None:
            reason = "a compressor keeps a residual for each device; make the store without one"
        elif store.staleness:
            reason = (
                f"pending pushes of a store of staleness {store.staleness} belong to its devices; use kind "
                "'dist_sync', or staleness=0"
            )
        elif is_in_rows(store):
            reason = (
                f"in kind {store.kind!r} each device updates a share of a value, and rounding depends on its length; "
                "use kind 'device'"
            )
        else:
            return super().with_initial_parts(state)
        raise ValueError(
            f"train step: virtual_shards={self.shards} gives the same bits on any number of devices, but {reason}"
        )

    def terms(self, state: TrainState, batch: Batch, number: jax.Array) -> tuple[Terms, Buffers]:
        """What shard `number` adds, and the leaves of its model state that are not added, such as counts."""
        params = whole_params(state.store, self.axis_name)
        try:
            model_state = with_own_streams(state.model_state, number)
            shard = self.gradient(state, params, batch, shard_rng(state, number), model_state)
        except NameError as error:
            if "axis name" not in str(error):
                raise
            raise ValueError(
                "train step: loss_fn has a collective, but a virtual shard has no axis; leave it out"
            ) from error
        # Sums are in float32 or wider, since V terms in bfloat16 would round V times.
        # A loss that is a mean over what counts is divided by the weight of all shards, when that is known.
        divisor = 1 if isinstance(shard.metrics["loss"], Mean) else self.shards
        grads = {k: widen(g) / divisor for k, g in shard.grads.items()}
        metrics = jax.tree.map(widen, shard.metrics)
        flags = None if self.guard is None else nonfinite_flags(state.store, metrics["loss"], shard.grads, {})
        # Counts and random keys have no mean. Those of shard 0 are taken, which has the same ones on any devices.
        plain, _ = without_keys(shard.model_state)
        unsummed = [x for x in jax.tree.leaves(plain) if not is_floating(x)]
        return (grads, metrics, model_state_terms(plain, self.shards), flags), unsummed

    def update(self, state: TrainState, totals: Terms, unsummed: Buffers) -> tuple[TrainState, Metrics]:
        """The next state and the metrics, out of the sums over the shards. `unsummed` are those of shard 0."""
        summed, sums, of_model_state, flags = totals
        metrics, loss = finish(sums, self.shards), sums["loss"]
        if isinstance(loss, Mean):
            summed = {k: g / loss.weight for k, g in summed.items()}
            if flags is not None:  # a weight of 0 is seen here only
                flags = flags + nonfinite_flags(state.store, metrics["loss"], summed, {})
        summed = {k: g.astype(state.store.values[k].dtype) for k, g in summed.items()}

        # The update.
        params = whole_params(state.store, self.axis_name)
        store, transform = self.apply(state, params, summed, {}, None, metrics["loss"])
        recorded = self.recorded(state.store, store, summed)
        plain, restore = without_keys(state.model_state)
        not_added = iter(unsummed)
        plain = jax.tree.map(lambda x: x if is_floating(x) else next(not_added), plain)
        model_state = restore(model_state_mean(plain, of_model_state, self.shards))
        new = dataclasses.replace(state, step=state.step + 1, store=store, transform=transform, model_state=model_state)

        return self.finish_step(state, new, metrics, flags, recorded)


def _programs_of(step: VirtualStep, structure: Structure, platform: str) -> tuple[Any, Any, Any, Any]:
    """The programs for states of one structure, on whatever device of a platform: the gradient of a shard, the update.

    `term(donated, rng, batch, number) -> (buffers, unsummed)`: what shard `number` adds, an array (1, n) of each dtype,
    and the leaves of its model state that are not added. `update(donated, rng, totals, unsummed)` gives those of the
    next state, and the metrics.
    `rng, *donated = jax.tree.leaves(state)`. Only `update` takes over the memory of `donated`.
    `hashes(totals)`: the sums that are the hashes of all that is added up, and `names()` of these.
    """
    step = dataclasses.replace(step, platform=platform)
    # A device adds terms after each of its shards, and exchanges them. One array of each dtype is one operation each,
    # whatever the number of params. What is where in it is known when `term` was traced.
    layout: list[Any] = []

    # The names of arguments are in the text of the program, `leaves` in those that tests/house/programs has.
    def term(leaves: list[jax.Array], rng: jax.Array, batch: Batch, number: jax.Array) -> tuple[Buffers, Buffers]:
        terms, unsummed = step.terms(structure.unflatten([rng, *leaves]), batch, number)
        values, structure_of_terms = jax.tree.flatten(terms)
        groups = collectives.plan(values, _ONE_A_DTYPE)
        layout[:] = [x.shape for x in values], structure_of_terms, groups
        return [x.reshape(1, -1) for x in collectives.pack(values, groups)], unsummed

    def update(
        donated: list[jax.Array], rng: jax.Array, totals: Buffers, unsummed: Buffers
    ) -> tuple[list[jax.Array], Metrics]:
        shapes, structure_of_terms, groups = layout
        terms = structure_of_terms.unflatten(collectives.unpack(totals, shapes, groups))
        new, metrics = step.update(structure.unflatten([rng, *donated]), terms, unsummed)
        return jax.tree.leaves(new)[1:], metrics

    def hashes(totals: Buffers) -> jax.Array:
        shapes, _, groups = layout
        return checkpoint._hash_sums(collectives.unpack(totals, shapes, groups), (None,) * len(shapes))

    @functools.cache
    def names() -> tuple[str, ...]:
        shapes, structure_of_terms, _ = layout
        grads, metrics, of_model_state, flags = structure_of_terms.unflatten(range(len(shapes)))
        names_of_keys = kv.names(structure.unflatten(range(structure.num_leaves)).store)
        # A leaf of each tree is the number of what has its path.
        trees = (
            {names_of_keys[key]: i for key, i in grads.items()},
            metrics,
            {"model_state": of_model_state},
            {"flags": flags},
        )
        paths = itertools.chain.from_iterable(map(jax.tree_util.tree_leaves_with_path, trees))
        numbers = {i: jax.tree_util.keystr(path, simple=True, separator="/") for path, i in paths}
        return tuple(numbers[i] for i in range(len(shapes)))

    return jax.jit(for_platform(term, platform)), jax.jit(update, donate_argnums=0), jax.jit(hashes), names


class VirtualProgram:
    """One step over virtual shards, for states of one structure."""

    # Each device computes the terms of its shards one after the other, and adds those that are neighbours in the tree
    # at once. So it holds the logarithm of their number at most. One program over all devices exchanges what is left,
    # and each device makes the update.

    def __init__(self, step: VirtualStep, structure: Structure):
        numbers: TrainState = structure.unflatten(range(structure.num_leaves))
        self.devices: tuple[Device, ...] = numbers.store.devices or ()
        self._structure = structure
        bare = dataclasses.replace(numbers, store=dataclasses.replace(numbers.store, devices=None))
        self._term, self._update, self._hash_totals, self._names = step.programs(
            jax.tree.structure(bare), self.devices[0].platform
        )
        self._deal = collectives.Deal(step.shards, len(self.devices))
        self._ranks = {d: i for i, d in enumerate(self.devices) if d.process_index == jax.process_index()}
        self._exchange = exchange(self._deal, mesh_of(self.devices))
        microbatches = step.accumulate
        of_each = f", each in accumulate={microbatches} microbatches" if microbatches > 1 else ""
        self._cut = f"cut in {step.shards} virtual shards{of_each}"
        self._count = step.shards * microbatches
        padded_count = self._deal.slots * self._deal.devices * microbatches  # with those of no example
        self._batches = Batches(self.devices, padded_count, 1, (split_over(self.devices),), self._cut)

    def _pad(self, batch: Batch) -> Batch:
        """The arrays of a batch with rows for as many shards on each device, the last of which may be of no example."""
        shards, devices = self._deal.terms, self._deal.devices
        if isinstance(batch, collectives.PaddedBatch):
            if batch.virtual_shards != shards:
                raise ValueError(
                    f"train step: this batch was padded for {batch.virtual_shards} virtual shards, and the step has "
                    f"{shards}; make batches by data.batches(..., virtual_shards={shards})"
                )
            return batch.arrays
        if shards % devices == 0:
            return batch
        check_even(batch, 0, self._count, 1, self._cut)

        def pad(x: jax.Array | np.ndarray) -> jax.Array | np.ndarray:  # each array by its own length
            n = x.shape[0]
            return collectives.pad_rows(x, collectives.padded_rows(n, shards, devices) - n, 0, split_over(self.devices))

        return jax.tree.map(pad, without_types(batch))

    def __call__(
        self,
        donated: list[jax.Array],
        rng: jax.Array,
        batch: Batch,
        *span: int | None,
        hashes: list[ShardHashes] | None = None,
        for_picture: bool = False,
    ) -> tuple[TrainState, Metrics]:
        """One step. A list gets hashes of what it added up. A picture traces one program in place of several."""
        if span:
            raise ValueError(f"train step, many: {_SEVERAL}; call the step for each batch")
        if for_picture:
            new, metrics = self.drawn(donated, rng, self._pad(batch))
            return self._structure.unflatten([rng, *new]), metrics
        if is_traced((donated, rng, batch)):
            raise ValueError(f"train step: {_SEVERAL}, so the step cannot run inside jit or grad; call it outside")

        # The terms of each device, their sums over all devices, and the update on each device.
        replicated = copies_on(self.devices)
        batches = self._on_devices(self._batches.place(self._pad(batch)), split_over(self.devices))
        states, rngs = (self._on_devices(x, replicated) for x in (donated, rng))
        of_shards: dict[Device, list[jax.Array]] | None = None if hashes is None else {d: [] for d in self._ranks}
        nodes_and_unsummed = [
            self._nodes(d, states[d], rngs[d], batches[d], None if of_shards is None else of_shards[d])
            for d in self._ranks
        ]
        totals, unsummed = self._sums(*zip(*nodes_and_unsummed, strict=True))
        if hashes is not None and of_shards is not None:
            hashes.append(self._hashes(of_shards, totals))
        new = [self._update(states[d], rngs[d], totals[d], unsummed[d]) for d in self._ranks]

        # The update was given the arrays of each device, and so the memory of the arrays over all of them. They are
        # marked as donated, or a later use of the old state would read what the update wrote.
        for x in donated:
            if isinstance(x, jax.Array):
                x.delete()
        arrays, metrics = jax.tree.map(lambda *pieces: assemble(pieces, replicated), *new)
        return self._structure.unflatten([rng, *arrays]), metrics

    def drawn(self, donated: list[jax.Array], rng: jax.Array, batch: Batch) -> tuple[list[jax.Array], Metrics]:
        """One step of a padded batch as one program of all devices, which a picture traces and nobody runs.

        It computes and sends what the programs of a step do, but adds the shards of a device in the order of their
        numbers. A device with fewer shards than others counts as if it had as many.
        """
        self._batches.check(batch)
        deal = self._deal
        term, update = self._term.__wrapped__, self._update.__wrapped__

        def of_device(donated: list[jax.Array], rng: jax.Array, batch: Batch) -> tuple[list[jax.Array], Metrics]:
            first = lax.axis_index(STORE_AXIS) * deal.slots
            if deal.slots == 1:
                node, unsummed = term(donated, rng, batch, first)
                nodes = [node]
            else:

                def of_slot(i: jax.Array, shard: Batch) -> tuple[jax.Array, tuple[Buffers, Buffers]]:
                    return i + 1, term(donated, rng, shard, i)

                shards = jax.tree.map(lambda x: x.reshape(deal.slots, x.shape[0] // deal.slots, *x.shape[1:]), batch)
                _, (of_slots, others) = lax.scan(of_slot, first, shards)
                # As many nodes are left as the device that has the most of them sends.
                apart = deal.kept - 1
                nodes = [[x[i] for x in of_slots] for i in range(apart)] + [[x[apart:].sum(0) for x in of_slots]]
                unsummed = [x[0] for x in others]
            totals, unsummed = _exchanged(deal, nodes, [x[None] for x in unsummed])
            return update(donated, rng, totals, unsummed)

        mapped = jax.shard_map(
            of_device,
            mesh=mesh_of(self.devices),
            in_specs=(P(), P(), P(STORE_AXIS)),
            out_specs=P(),
            check_vma=False,
        )
        return mapped(donated, rng, batch)

    def compile_own(self, donated: list[jax.Array], rng: jax.Array, batch: Batch) -> list[str]:
        """Compile what each device of this process runs by itself, by one run of it. The result are their texts."""
        _, (term, *_, update) = self.parts(donated, rng, batch)
        rows = jax.tree.leaves(batch)[0].shape[0] // self._deal.terms
        shard = jax.tree.map(lambda x: np.asarray(x[:rows]), batch)
        plain, restore = without_keys((donated, rng, shard, np.int32(0)))
        for device in self._ranks:
            # `np.array`: a copy for each device, since the update takes the memory of the state. What is summed does
            # not matter, only its shapes: the programs are what is wanted.
            arguments = restore(jax.device_put(jax.tree.map(np.array, plain), device))
            node, unsummed = self._term(*arguments)
            totals = [x[0] for x in _add(node, node)]
            jax.block_until_ready(self._update(arguments[0], arguments[1], totals, unsummed))
        return [program.traced.lower().as_text() for program in (term, update)]

    def parts(
        self, donated: Sequence[Shape], rng: Shape, batch: Batch, many: bool = False
    ) -> tuple[Batch, list[DeviceProgram]]:
        """The shapes of a batch, and for them the gradient of a shard, the sum of two, the exchange, the update."""
        if many:
            raise ValueError(f"train step, many: {_SEVERAL}; call the step for each batch")
        deal = self._deal
        # The gradient of a shard. A device that is there needs no name, and the program is the one of any device.
        first = None if self.devices[0] in jax.devices() else SingleDeviceSharding(self.devices[0])
        along, slots = split_over(self.devices), deal.slots * deal.devices
        padded = self._pad(batch)
        self._batches.check(padded)
        shapes = shapes_on(padded, along)
        shard = jax.eval_shape(lambda batch: _slice(batch, 0, slots), shapes)
        donated, rng, shard, number = _shapes_of((donated, rng, shard, np.int32(0)), first)
        term = self._term.trace(donated, rng, shard, number)
        node, unsummed = _shapes_of(term.out_info, first)

        # The exchange of what is left of all shards, and the update.
        totals = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=first) for x in node]
        rows = [_shapes_of(totals, along, deal.devices)] * deal.kept
        exchanged = self._exchange.trace(rows, _shapes_of(unsummed, along, deal.devices))

        # What a device holds while each of them runs, and which is no argument of it: the state, the batch, and at most
        # so many nodes that wait for their neighbours.
        of_state, of_batch, of_node = tree_nbytes(donated), deal.slots * tree_nbytes(shard), tree_nbytes(node)
        most = max(sum(1 - n for n in merges[:i]) for merges in deal.merges for i in range(len(merges)))
        return shapes, [
            DeviceProgram(term, deal.slots, of_batch * (deal.slots > 1) + most * of_node),
            DeviceProgram(_add.trace(node, node), deal.slots - 1, of_state + of_batch + max(0, most - 1) * of_node),
            DeviceProgram(exchanged, 1, of_state + of_batch),
            DeviceProgram(self._update.trace(donated, rng, totals, unsummed), 1, of_batch + deal.kept * of_node),
        ]

    def _on_devices(self, tree: PyTree, sharding: NamedSharding) -> dict[Device, PyTree]:
        """The part of each array on each device of this process."""
        leaves, structure = jax.tree.flatten(tree)
        placed = [x if isinstance(x, jax.Array) and x.sharding == sharding else put(x, sharding) for x in leaves]
        pieces = [{shard.device: shard.data for shard in x.addressable_shards} for x in placed]
        return {d: structure.unflatten([piece[d] for piece in pieces]) for d in self._ranks}

    def _nodes(
        self,
        device: Device,
        donated: list[jax.Array],
        rng: jax.Array,
        batch: Batch,
        hashes: list[jax.Array] | None = None,
    ) -> tuple[list[Buffers], Buffers]:
        """The nodes of the shards of a device, and the other leaves of the model state of its first one.

        A list gets a hash of each shard.
        """
        deal, rank = self._deal, self._ranks[device]
        nodes: list[Buffers] = []
        first: Buffers = []
        for i, merges in enumerate(deal.merges[rank]):
            shard = batch if deal.slots == 1 else _slice(batch, np.int32(i), deal.slots)
            node, unsummed = self._term(donated, rng, shard, np.int32(deal.range_of(rank)[0] + i))
            first = first or unsummed
            if hashes is not None:
                hashes.append(checkpoint._hash_sums(node, (None,) * len(node)))
            for _ in range(merges):
                node = _add(nodes.pop(), node)
            nodes.append(node)
        if nodes:
            return nodes, first
        # A device without a shard has zeros, which are never added.
        shard = jax.eval_shape(lambda batch: _slice(batch, 0, deal.slots), batch)
        shapes = jax.eval_shape(self._term, donated, rng, shard, np.int32(0))
        node, first = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=device), shapes)
        return [node], first

    def _hashes(self, of_shards: dict[Device, list[jax.Array]], totals: dict[Device, Buffers]) -> ShardHashes:
        """The hashes of all shards, which other processes may have computed, and of their sums."""
        device, slots = next(iter(self._ranks)), self._deal.slots
        # A slot without a shard has zeros.
        no_shard = np.zeros((len(totals[device]), 2), np.uint32)
        pieces = [
            jnp.stack([*hashes, *[jax.device_put(no_shard, d)] * (slots - len(hashes))])
            for d, hashes in of_shards.items()
        ]
        of_slots = assemble(pieces, split_over(self.devices))
        if spans_processes(of_slots):
            wait_before_collectives(of_slots, self.devices)
            of_slots = jax.jit(lambda x: x, out_shardings=copies_on(self.devices))(of_slots)
        return ShardHashes(self._names(), self._hash_totals(totals[device]), of_slots, self._deal.terms)

    def _sums(
        self, nodes: tuple[list[Buffers], ...], unsummed: tuple[Buffers, ...]
    ) -> tuple[dict[Device, Buffers], ...]:
        """The sums over all devices, and the other leaves of device 0, on each device of this process."""
        # Each device takes part with as many nodes as any of them has. What it lacks are zeros, which are never added.
        shapes = nodes[0][0]
        rows: list[Buffers] = []
        along = split_over(self.devices)
        for k in range(self._deal.kept):
            of_devices = [
                of_device[k] if k < len(of_device) else [jnp.zeros(x.shape, x.dtype, device=d) for x in shapes]
                for d, of_device in zip(self._ranks, nodes, strict=True)
            ]
            rows.append([assemble(pieces, along) for pieces in zip(*of_devices, strict=True)])
        firsts = [assemble([_add_axis(x) for x in pieces], along) for pieces in zip(*unsummed, strict=True)]
        wait_before_collectives((rows, firsts), self.devices)
        sums_and_others = self._exchange(rows, firsts)
        return tuple(self._on_devices(x, copies_on(self.devices)) for x in sums_and_others)


@functools.lru_cache(maxsize=64)
def exchange(deal: collectives.Deal, mesh: Mesh) -> Any:
    """The program `(nodes, unsummed) -> (sums of all terms, unsummed of the first device)`, on every device."""

    def local(nodes: list[Buffers], unsummed: Buffers) -> tuple[Buffers, Buffers]:
        return _exchanged(deal, nodes, unsummed)

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(STORE_AXIS), out_specs=P(), check_vma=False))


def _exchanged(deal: collectives.Deal, nodes: list[Buffers], unsummed: Buffers) -> tuple[Buffers, Buffers]:
    """What a device gets of `exchange`, inside the mapped axis."""
    stacked = [jnp.concatenate(buffers) for buffers in zip(*nodes, strict=True)]
    sums = [collectives.sum_everywhere(deal, x, STORE_AXIS) for x in stacked]
    return sums, [lax.all_gather(x[0], STORE_AXIS)[0] for x in unsummed]


@functools.partial(jax.jit, static_argnums=2)
def _slice(batch: Batch, i: jax.Array, slots: int) -> Batch:
    """The rows of slot `i` of a device's part of a batch."""

    def rows(x: jax.Array) -> jax.Array:
        count = x.shape[0] // slots
        return lax.dynamic_slice_in_dim(x, i * count, count)

    return jax.tree.map(rows, batch)


def _shapes_of(tree: PyTree, sharding: Sharding | None, *lead: int) -> PyTree:
    """The same shapes with this sharding, behind other axes."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype, sharding=sharding), tree)


_add = jax.jit(lambda a, b: [x + y for x, y in zip(a, b, strict=True)])
_add_axis = jax.jit(lambda x: x[None])
