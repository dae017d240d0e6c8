"""What a push computes: the sums over the devices, then the update by them. Pure functions of arrays.

They run under `jit`, `pmap`, `shard_map` and `vmap`, with the name of a mapped axis or without. `program` compiles them
for a push at the prompt.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from .. import sparse, updaters
from .._core import checks
from .._core.arrays import Device, PyTree, Shaped, Tree, is_tracing
from .._core.recent import Recent
from .._devices import collectives
from .._devices.mesh import STORE_AXIS
from .._devices.user_mesh import split_like, unsplit
from ..compression import Compressor, _start_owner as start_owner
from ..updaters import UpdateFn, Updater, _TreeOptimizer as TreeOptimizer, stateless
from . import store as stores
from .store import REPLICATED, Arrays, Changes, Form, KVStore, Layout, Layouts, Lists

Pair = tuple[jax.Array, PyTree]  # a new value and a new state

_TILE = 1024  # elements in a tile of a flat array on TPUs

POSITION = "position"  # the axis of a pushed list of values


class Entry(NamedTuple):
    """What a program of a push is given of one key."""

    stored: jax.Array
    state: PyTree  # of the updater
    pushed: list[jax.Array]  # over a mesh: one array, of which each device has its value
    residual: PyTree = None  # None: its values are not compressed
    num_updates: jax.Array | None = None  # None: its updater asks for none


class Updated(NamedTuple):
    """What a program of a push changes of one key."""

    value: jax.Array
    state: PyTree
    residual: PyTree


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the programs of a push depend on beside arrays, updater and compressor."""

    kind: str
    limits: collectives.BucketLimits
    devices: tuple[Device, ...] | None = None  # of the store
    layouts: Layouts = ()
    # The keys of the entries, as the updater sees them. If it does not look at them they are 0, 1, ..., so that a loop
    # over the keys of a model compiles a program for each shape, not one for each key.
    keys: tuple[int, ...] = ()


@Recent
def program(updater: Updater, compressor: Compressor | None) -> Any:
    """The functions below, compiled for a push at the prompt. It is found by the shapes and dtypes of the entries.

    It comes without updater and compressor, since JAX keeps what it was called with forever. Without an updater that
    reads the stored values (`assign`) it sums only. With a mesh, each of its devices has one of the pushed values.
    """

    def run(setting: Setting, entries: Sequence[Entry], mesh: Mesh | None) -> list[Updated]:
        # A store of these keys alone, so that the functions below see here what they see in a user's `jit`.
        by_key = dict(zip(setting.keys, entries, strict=True))
        store = KVStore(
            {k: entry.stored for k, entry in by_key.items()},
            {k: entry.state for k, entry in by_key.items()},
            {k: entry.residual for k, entry in by_key.items() if entry.residual is not None},
            setting.kind,
            updater=updater,
            compressor=compressor,
            devices=setting.devices,
            limits=setting.limits,
            layouts=setting.layouts,
        )
        pushed = {k: entry.pushed for k, entry in by_key.items()}
        num_updates = {k: entry.num_updates for k, entry in by_key.items() if entry.num_updates is not None}
        if mesh is None:
            changes = _at_home(store, push(store, pushed, num_updates, None))
        else:
            # Each device is given its row of what is in rows, and all of what is replicated; it gives the same back.
            specs = jax.tree.map(operator.attrgetter("spec"), stores.layout_of_each(store))
            changed = Changes(specs.values, specs.updater_state, specs.residuals)
            # A value without axes comes in the shape (1,), since one in () could not be split. The update reshapes it.
            push_on_each, args = functools.partial(push, axis_name=STORE_AXIS), (specs, P(STORE_AXIS), P())
            over_mesh = jax.shard_map(push_on_each, mesh=mesh, in_specs=args, out_specs=changed, check_vma=False)
            changes = over_mesh(store, pushed, num_updates)
        return [Updated(changes.values[k], changes.updater_state[k], changes.residuals.get(k)) for k in by_key]

    return jax.jit(run, static_argnums=(0, 2))


@Recent
def tree_program(optimizer: TreeOptimizer) -> Any:
    """The update by sums of an optimizer that sees the whole pytree, compiled for a push at the prompt."""

    def run(store: KVStore, sums: Arrays) -> Changes:
        store = dataclasses.replace(store, updater=optimizer)
        return _at_home(store, update(store, sums, {}))

    return jax.jit(run)


def _at_home(store: KVStore, changes: Changes) -> Changes:
    """The changes, with the shardings of what is split over devices."""

    def constrain(layout: Layout, x: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x, stores.home(store, layout))

    # Else the compiler chooses the shardings of results, perhaps a copy on each device, and the next push, of arrays
    # with other shardings, compiles another program. Without layouts no value is split.
    if store.layouts:
        layouts = dict(store.layouts)
        changes = changes._replace(values={k: constrain(layouts[k], v) for k, v in changes.values.items()})
    if changes.optimizer_state is None or store.devices is None:
        return changes
    state = jax.tree.map(constrain, stores.state_layouts(store), changes.optimizer_state)
    return changes._replace(optimizer_state=state)


def push(store: KVStore, pushed: Lists, num_updates: Mapping[int, jax.Array], axis_name: str | None) -> Changes:
    """What a push changes: the sums of the lists, over the mapped axis too, and the update by them."""
    lists = as_stored(store, pushed)
    if axis_name is None:
        sums, residuals = _sums_of_lists(store, lists)
    else:
        sums, residuals = reduce(store, {k: add(values) for k, values in lists.items()}, axis_name)
    return update(store, sums, num_updates)._replace(residuals=residuals)


def axis_size(axis_name: str, what: str) -> int:
    """The number of devices along a mapped axis. `NameError` if there is no such axis."""
    try:
        return lax.axis_size(axis_name)
    except NameError:  # JAX's own says "unbound axis name", and not what to do
        raise NameError(
            f"{what}: no pmap or shard_map around this call has the axis axis_name={axis_name!r}; leave it out for "
            "values outside of them"
        ) from None


def reduce(store: KVStore, pushed: Arrays, axis_name: str) -> tuple[Arrays, dict[int, Any]]:
    """The sum of each value over the axis, or this device's (chunk,) of it in kind `sharded`. And its new residuals."""
    kind = stores.KINDS[store.kind]
    if stores.is_split(store):  # a mapped axis would give a device parts of them that fit no push
        raise ValueError(
            "kv.push: values of this store are split over a mesh in their own shapes; push without axis_name, or train "
            'by make_train_step(loss_fn, engine="jit")'
        )
    if stores.is_in_rows(store) and lax.axis_size(axis_name) != stores.shards(store):
        each = "list of compressed values" if axis_name == POSITION else f"axis {axis_name!r}"
        raise ValueError(
            f"kv.push: the {each} has {lax.axis_size(axis_name)} devices, but this {store.kind!r} store was made for "
            f"{stores.shards(store)}; push one value for each of them"
        )
    # Values that compress travel as packed bits in buckets of their own, all others plain.
    small = compressed_keys(store, pushed)
    # Each has its collectives, and the sums are put back in the order of the pushed keys.
    plain, packed = [k for k in pushed if k not in small], [k for k in pushed if k in small]
    sums = kind.reduce([pushed[k] for k in plain], axis_name, store.limits)
    summed, residuals = dict(zip(plain, sums, strict=True)), dict[int, Any]()
    if packed:
        # A compressor takes and gives what one device has, (*shape). The store may hold that as (1, *shape).
        old_residuals = held_residuals(store, packed, axis_name)
        specs = jax.eval_shape(lambda: _first_residuals(store, packed, lax.axis_size(axis_name), 0))
        before = [jax.tree.map(lambda x, spec: x.reshape(spec.shape), old_residuals[k], specs[k]) for k in packed]
        values = [pushed[k] for k in packed]
        sums, after = kind.reduce_compressed(store.compressor, values, before, axis_name, store.limits)
        summed |= zip(packed, sums, strict=True)
        for k, state in zip(packed, after, strict=True):
            residuals[k] = jax.tree.map(lambda new, old: new.reshape(old.shape), state, old_residuals[k])
    return {k: summed[k] for k in pushed}, residuals


add: Any = functools.partial(functools.reduce, operator.add)  # of a list of arrays, in its order


def as_stored(store: KVStore, pushed: Lists) -> Lists:
    """The pushed values in the stored dtypes, split over a user's mesh as the stored values are."""
    lists: Lists = {}
    for k, values in pushed.items():
        stored = store.values[k]
        values = [v.astype(stored.dtype) for v in values]
        lists[k] = [unsplit(v) if stores.is_in_rows(store) else split_like(v, stored) for v in values]
    return lists


def _sums_of_lists(store: KVStore, pushed: Lists) -> tuple[Arrays, dict[int, Any]]:
    """Sums without a mapped axis. Each position of a list is a device with a residual of its own."""
    small, layouts = compressed_keys(store, pushed), dict(store.layouts)
    # Plain values are added in the order of their list: a key has the same bits, whatever else is pushed.
    sums = {k: layouts.get(k, REPLICATED).stored(add(values)) for k, values in pushed.items() if k not in small}
    # Compressed ones: keys with as many values share one mapped axis, and so the buckets of `reduce`.
    residuals: dict[int, Any] = {}
    for count in sorted({len(pushed[k]) for k in small}):
        keys = [k for k in pushed if k in small and len(pushed[k]) == count]
        stacked = {k: jnp.stack(pushed[k]) for k in keys}
        held_residuals = residuals_for(store, dict.fromkeys(keys, count))
        # The positions become a mapped axis, so `reduce` compresses and sums them as it would devices.
        # (count, *shape) of each key in, and one sum of each out: of rows (count, chunk), one for each device.
        summed, new = jax.vmap(
            lambda values, own_residuals: reduce(dataclasses.replace(store, residuals=own_residuals), values, POSITION),
            axis_name=POSITION,
            out_axes=(0 if stores.is_in_rows(store) else None, 0),
        )(stacked, held_residuals)
        sums |= summed
        residuals |= new
    return sums, residuals


# Values of which each device has a part.


def gather(store: KVStore, chunks: Arrays, axis_name: str) -> Arrays:
    """The whole values, out of what every device has of each."""
    if not stores.is_in_rows(store):
        return chunks
    # Of rows a device does not know the shape: the layout, which is static, has it.
    shapes = stores.shapes_of(store)
    full = collectives.all_gather(list(chunks.values()), [shapes[k] for k in chunks], axis_name, store.limits)
    return dict(zip(chunks, full, strict=True))


def own_parts(store: KVStore, values: Arrays, axis_name: str) -> Arrays:
    """What this device stores of whole values: the inverse of `gather`."""
    if not stores.is_in_rows(store):
        return values
    return {k: collectives.own_chunk(v, axis_name) for k, v in values.items()}


# Residuals: what a compressor left out of the values of a key, and will add to the next one.
#
# That of one device is a pytree of arrays (*shape), as the compressor makes it. A store has those of all its devices,
# (devices, *shape). Inside of a mapped axis a device sees of these its own: as (1, *shape) under `shard_map`, and as
# (*shape) under `pmap` and `vmap`. A store has none of a key before the first push.


def compressed_keys(store: KVStore, keys: Iterable[int]) -> set[int]:
    """The keys whose values are smaller compressed than plain. The others are sent as they are."""
    if store.compressor is None:
        return set()
    shapes = stores.shapes_of(store)
    return {k for k in keys if k not in store.frozen and store.compressor.pays(shapes[k], store.values[k].dtype)}


def residuals_for(store: KVStore, counts: Mapping[int, int]) -> dict[int, Any]:
    """The residuals before a push of as many values of each key as `counts` says, (count, *shape)."""
    # What a device left out belongs to its own next value. Of another number of values nobody could say whose it is.
    residuals = {k: store.residuals[k] for k in counts if k in store.residuals}
    for k, residual in residuals.items():
        count_before = jax.tree.leaves(residual)[0].shape[0]
        if count_before != counts[k]:
            raise ValueError(
                f"kv.push: key {k} is compressed and was pushed with {count_before} values before, now with "
                f"{counts[k]}; kv.set_gradient_compression starts the residuals anew"
            )
    # The first push of a key starts them. Keys with as many values share a program.
    for count in set(counts.values()):
        keys = [k for k in counts if k not in residuals and counts[k] == count]
        residuals |= start_residuals(store, keys, count)
    return residuals


def held_residuals(store: KVStore, keys: list[int], axis_name: str) -> dict[int, Any]:
    """This device's residuals before a push, as the store holds them: (1, *shape) or (*shape), see above."""
    first = _first_residuals(store, keys, lax.axis_size(axis_name), lax.axis_index(axis_name))
    return {k: store.residuals.get(k, jax.tree.map(lambda leaf: leaf[None], first[k])) for k in keys}


def start_residuals(store: KVStore, keys: list[int], count: int) -> dict[int, Any]:
    """The residuals of these keys on `count` devices before the first push, (count, *shape)."""
    return jax.vmap(functools.partial(_first_residuals, store, keys, count))(jnp.arange(count)) if keys else {}


def _first_residuals(store: KVStore, keys: list[int], count: int, device: jax.typing.ArrayLike) -> dict[int, Any]:
    """The residuals of these keys on one of `count` devices before the first push, (*shape)."""
    compressor, shapes, residuals = store.compressor, stores.shapes_of(store), dict[int, Any]()
    if compressor is None:
        return residuals
    # Rows are compressed one by one, for the devices that will have them, so each has a residual. A linear compressor
    # sums whole values.
    rows = {} if compressor.linear else stores.rows_of(store)
    for k in keys:
        # Rounding at random needs other numbers for each key and device: seed = key * 0x9E3779B1 + device, mod 2^32. A
        # factor near 2^32 / 1.618 keeps the seeds of keys apart by more than there are devices.
        seed = jnp.uint32(k % (1 << 32)) * jnp.uint32(0x9E3779B1) + jnp.asarray(device, jnp.uint32)
        dtype = store.values[k].dtype
        if k in rows:
            seeds = seed * jnp.uint32(rows[k].count) + jnp.arange(rows[k].count, dtype=jnp.uint32)
            init = functools.partial(compressor.init, (rows[k].chunk,), dtype)
            residuals[k] = jax.vmap(lambda seed, init=init: init(seed=seed))(seeds)
        else:
            residuals[k] = compressor.init(shapes[k], dtype, seed=seed)
            if compressor.two_way:  # each device owns a share of a value, whose sum it compresses too
                residuals[k] = {**residuals[k], **start_owner(shapes[k], count)}
    return residuals


# The update by the sums.


def update(
    store: KVStore, summed: Arrays, num_updates: Mapping[int, jax.Array], loss: jax.Array | None = None
) -> Changes:
    """The changes of the keys in `summed`, in ascending order. A `TreeOptimizer` gets the loss, if it is known."""
    # Sums are laid out as the values: whole, one device's share, or rows of all shares.
    keys = sorted(summed)
    pushed = {k: summed[k].astype(store.values[k].dtype).reshape(store.values[k].shape) for k in keys}
    pushed = {k: split_like(v, store.values[k]) for k, v in pushed.items()}
    if isinstance(store.updater, TreeOptimizer):
        return _update_tree(store, pushed, loss)
    updater, states, rows = store.updater, store.updater_state, stores.rows_of(store)
    pairs: dict[int, Pair] = {}
    for k in keys:
        if k in rows:
            pairs[k] = _update_shares(store, k, rows[k], pushed[k], num_updates.get(k))
        else:
            pairs[k] = update_one(updater, k, pushed[k], states[k], store.values[k], num_updates.get(k))
    return Changes({k: new for k, (new, _) in pairs.items()}, {k: state for k, (_, state) in pairs.items()})


def num_updates(store: KVStore, keys: Iterable[int], ready: Mapping[int, jax.Array] | None = None) -> Arrays:
    """What each of these keys asks a schedule of MXNet's with when they are updated. {} if the updater has none.

    That is the largest number of updates of any key of the store, so it is counted once for a whole push, of all its
    keys, and each part of the push is given it. `ready`: which of the keys are updated, where a program decides.
    """
    # It is no field of the store. MXNet counts the updates of each key too: its Adam corrects the bias by them, and a
    # schedule is asked with the larger one of the number before and the key's own count. So the counts stay in the
    # states, where checkpoints have them, and the number is their largest, always. A field would say the same once
    # more, in one array more of each program, and a store whose states were replaced without it would take another
    # rate, without an error. benchmarks/NOTES.md has what it costs.
    if not (isinstance(store.updater, Updater) and getattr(store.updater.update, "takes_num_updates", False)):
        return {}
    counts: dict[int, Any] = {k: state["count"] for k, state in store.updater_state.items() if k not in store.frozen}
    maximum: Any = jnp.maximum
    as_number: Any = jnp.asarray
    if not is_tracing():
        # On the host, where a schedule costs no program. By NumPy, since JAX keeps what it once copied for that: so a
        # push waits for the counts of the last push only.
        counts = {k: int(np.asarray(count)) for k, count in counts.items()}
        maximum, as_number = max, np.int32
    # As MXNet, which updates one key after the other: each one is counted before its schedule is asked. MXNet asks with
    # the number of this update, from 1 on, and a schedule here is of the earlier ones: one less.
    largest, numbers = functools.reduce(maximum, counts.values()), dict[int, jax.Array]()
    for k in sorted(keys):
        largest = maximum(largest, counts[k] + (1 if ready is None else ready[k]))
        numbers[k] = as_number(largest - 1)
    return numbers


def update_one(
    updater: Any, key: int, pushed: jax.Array, state: PyTree, stored: jax.Array, num_updates: jax.Array | None
) -> Pair:
    """What the updater gives for one key, checked, and in the dtype of the stored value."""
    if num_updates is not None:
        new, state = updater.update(key, pushed, state, stored, num_updates=num_updates)
    elif isinstance(updater, Updater):
        new, state = updater.update(key, pushed, state, stored)
    else:
        new = updater(key, pushed, stored)
    # An updater is the user's function. What it gives would be broadcast or cast at some later push, or lost.
    what = f"kv.push: the updater's result for key {key}"
    if new is None:
        raise TypeError(f"{what} is None; an updater returns the new value, it cannot change `stored` in place")
    value = checks.array(new, what)
    checks.storable(value, stored.shape, stored.dtype, what)
    return value.astype(stored.dtype), state


def _update_shares(store: KVStore, key: int, rows: Layout, pushed: jax.Array, num_updates: jax.Array | None) -> Pair:
    """As `update_one`, of a value of kind `sharded`, one row a device. An `Updater` gets each as a flat share."""
    # A plain function gets the whole value if all rows are here. Elsewhere it must be elementwise.
    updater, state, stored = store.updater, store.updater_state[key], store.values[key]
    if not isinstance(updater, Updater):
        if stored.size == rows.count * rows.chunk:
            new, state = update_one(updater, key, rows.full(pushed), state, rows.full(stored), None)
            return stores.lay_out(store, key, new).reshape(stored.shape), state
        updater = stateless(updater)
        spec = jax.ShapeDtypeStruct(rows.shape, stored.dtype)
        check_shares(dataclasses.replace(store, updater=updater), {key: spec}, "kv.push")
    # Under `pmap` the axis of the devices is gone: (chunk,). Elsewhere rows are (n, chunk), and each is updated by
    # itself. Leaves of the state that are no rows, such as a count, are the same for all.
    if stored.ndim == 1:
        return update_one(updater, key, pushed, state, stored, num_updates)
    is_row = jax.tree.map(lambda leaf: leaf.shape == stored.shape, state)
    run = functools.partial(update_one, updater, key, num_updates=num_updates)
    return _of_each_row(store, run, is_row, pushed, state, stored)


def _of_each_row(
    store: KVStore,
    run: Callable[[Tree, PyTree, Tree], tuple[Tree, PyTree]],
    is_row: PyTree,
    pushed: Tree,
    state: PyTree,
    stored: Tree,
) -> tuple[Tree, PyTree]:
    """`run` of each row of arrays (n, chunk). `is_row` tells which leaves of the state have rows."""
    is_on_tpu = store.devices is not None and store.devices[0].platform == "tpu"
    if not is_on_tpu or jax.tree.leaves(stored)[0].shape[0] > 1:
        axes = jax.tree.map(lambda has_rows: 0 if has_rows else None, is_row)
        return jax.vmap(run, in_axes=(0, axes, 0), out_axes=(0, axes))(pushed, state, stored)
    # Under `shard_map` there is one row. A TPU fills the tiles of a flat array. Of (1, chunk) seven lines of eight are
    # empty, and an update takes three times as long.
    pushed, stored = _kept_flat(jax.tree.map(lambda x: x[0], (pushed, stored)))
    state = _kept_flat(jax.tree.map(lambda has_rows, x: x[0] if has_rows else x, is_row, state))
    new, state = _kept_flat(run(pushed, state, stored))
    state = jax.tree.map(lambda has_rows, x: x[None] if has_rows else x, is_row, state)
    return jax.tree.map(lambda x: x[None], new), state


def _kept_flat(tree: Tree) -> Tree:
    """The same arrays. XLA computes with those of whole tiles as they are, and not as (1, chunk)."""
    # A row of whole tiles is a flat array as it lies there. Any other would be copied, which takes longer still.
    leaves, structure = jax.tree.flatten(tree)
    in_tiles = {i: x for i, x in enumerate(leaves) if x.size and x.size % _TILE == 0}
    kept = lax.optimization_barrier(in_tiles)
    return structure.unflatten([kept.get(i, x) for i, x in enumerate(leaves)])


def _update_tree(store: KVStore, grads: Arrays, loss: jax.Array | None) -> Changes:
    """The changes by an optimizer that sees the whole pytree."""
    # A param without a gradient is left as it is, and its part of the state too. The optimizer sees zeros for it.
    left = {k: jnp.zeros_like(store.values[k]) for k in stores.trained_keys(store) if k not in grads}
    run = functools.partial(store.updater.update, value=loss)
    # Rows (devices, chunk) of all devices: the optimizer is elementwise, and sees one row at a time, as a device does.
    if stores.is_in_rows(store) and any(g.ndim > 1 for g in grads.values()):
        is_row = jax.tree.map(lambda leaf: leaf.ndim > 1, store.optimizer_state)  # as the grads
        run = functools.partial(_of_each_row, store, run, is_row)
    before = store.optimizer_state
    params, state = run(stores.tree_of(store, {**grads, **left}), before, stores.tree_of(store, store.values))
    leaves, structure = jax.tree.flatten(state)
    if structure != jax.tree.structure(before):  # it could not be stored
        raise TypeError(
            "kv.push: the optimizer's update returns a state of another structure than its init: expected "
            f"{jax.tree.structure(before)}, got {structure}"
        )
    # It has seen zeros for these, and may have decayed or moved them all the same. Their part of the state goes back.
    if left:
        try:
            owners = stores.owners(store)
        except updaters._UnknownOwners as error:
            names = ", ".join(repr(stores.names(store)[k]) for k in sorted(left)[:8])
            raise ValueError(
                f'train step: unused="skip" keeps {names} and their state, but which part of it is theirs is unknown: '
                f"{error}; give frozen=, or updater=jp.updaters.from_optax(tx)"
            ) from error
        owned_leaves = zip(owners, leaves, jax.tree.leaves(before), strict=True)
        state = structure.unflatten([old if k in left else new for k, new, old in owned_leaves])
    values = {k: v for k, v in stores.by_key(store, params).items() if k not in left}
    return Changes(values, dict.fromkeys(values, ()), optimizer_state=state)


# Rows of a table.


def update_by_rows(
    updater: Updater | UpdateFn,
    key: int,
    axis_name: str | None,
    rows: list[sparse.RowSparse],
    state: PyTree,
    stored: jax.Array,
    num_updates: jax.Array | None,
) -> Pair:
    """The value and the state of a key after a push of these rows, summed over the mapped axis if there is one."""
    # With the default updater the rows replace the whole value, as in MXNet: the other rows become 0. Any other updater
    # sees the rows that are pushed, of the stored value and of its own state. Some of MXNet's optimizers update the
    # whole table instead, as MXNet does.
    total = sparse.add(cast_rows(rows, stored.dtype), size=sum(r.indices.shape[0] for r in rows))
    if axis_name is not None:
        total = sparse.allreduce(total, axis_name)

    if updater == updaters.assign:
        return split_like(sparse.to_dense(total), stored), state
    # The whole table, with zeros where nothing was pushed; or only the rows, which are then read, updated and written.
    update = functools.partial(update_one, updater, key, num_updates=num_updates)
    if not updaters._is_lazy(updater, state):
        return update(sparse.to_dense(total), state, stored)
    return sparse.lazy_update(update, total, state, stored, coalesced=True)


def with_rows(store: KVStore, rows: Mapping[int, sparse.RowSparse], axis_name: str) -> tuple[KVStore, Arrays]:
    """The store with these rows in place of their tables, in the values and in the updater's states; and their values.

    In a store of kind `sharded`, they are the elements of the rows, as its updater sees elements of a table.
    """

    def read(k: int, table: jax.Array, _: jax.Array) -> jax.Array:
        flat, indices = _as_table(store, table, rows[k], axis_name)
        taken = sparse._read(flat, indices)
        # Of a table that is cut: elements, with the axis of the devices in front if the table has it.
        return taken.reshape(*table.shape[:-1], -1) if stores.is_in_rows(store) else taken

    taken = _map_tables(store, rows, read, store)
    return taken, {k: r.values.reshape(taken.values[k].shape) for k, r in rows.items()}


def with_tables(store: KVStore, updated: KVStore, rows: Mapping[int, sparse.RowSparse], axis_name: str) -> KVStore:
    """What `with_rows` gave of a store, after an update, with the tables in place again."""
    # All reads come before all writes. A read after a scatter would cost a copy of the table.
    leaves, structure = jax.tree.flatten(updated)
    updated = structure.unflatten(lax.optimization_barrier(leaves))

    # A row of another device's is not written: its index is beyond the table.
    def write(k: int, table: jax.Array, new: jax.Array) -> jax.Array:
        flat, indices = _as_table(store, table, rows[k], axis_name)
        return sparse._write(flat, indices, new.reshape(*indices.shape, *flat.shape[1:])).reshape(table.shape)

    return _map_tables(store, rows, write, updated)


def _as_table(store: KVStore, stored: jax.Array, rows: sparse.RowSparse, axis_name: str) -> tuple[jax.Array, jax.Array]:
    """What a device stores of a table, and the indices of these rows, or of their elements, in it."""
    if not stores.is_in_rows(store):
        return stored, rows.indices
    return stored.reshape(-1), own_elements(rows.indices, rows.shape, axis_name)


def own_elements(ids: jax.Array, shape: collectives.Shape, axis_name: str) -> jax.Array:
    """The elements of these rows, by their numbers in this device's (chunk,) of the table. Beyond it for all others."""
    devices, width = lax.axis_size(axis_name), math.prod(shape[1:])
    chunk = collectives.chunk_size(math.prod(shape), devices)
    # A chunk begins somewhere in a row. Numbers of elements of the whole table may be too large for int32.
    row, column = (jnp.asarray(x, jnp.int32) for x in np.divmod(np.arange(devices, dtype=np.int64) * chunk, width))
    device = lax.axis_index(axis_name)
    # So it counts from the first row of its own chunk, and only rows near that one are multiplied by the width.
    distance = ids - row[device]
    is_near = (distance >= 0) & (distance <= chunk // width + 1) & (ids < shape[0])
    first = jnp.where(is_near, distance, 0) * width - column[device]
    elements = first[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    is_own = is_near[:, None] & (elements >= 0) & (elements < chunk)
    return jnp.where(is_own, elements, chunk).reshape(-1)


def _map_tables(
    store: KVStore, keys: Iterable[int], fn: Callable[[int, jax.Array, jax.Array], jax.Array], updated: KVStore
) -> KVStore:
    """`updated`, with `fn(key, leaf of store, leaf of updated)` for the values of these keys and what is by row."""
    keys = set(keys)

    def of_state(k: int, old: PyTree, new: PyTree) -> PyTree:
        shape = store.values[k].shape
        return jax.tree.map(lambda x, y: fn(k, x, y) if x.shape == shape else y, old, new)

    values = {k: fn(k, store.values[k], updated.values[k]) for k in keys}
    states = {k: of_state(k, store.updater_state[k], updated.updater_state[k]) for k in keys}
    optimizer_state = updated.optimizer_state
    if isinstance(store.updater, TreeOptimizer):
        leaves, structure = jax.tree.flatten(store.optimizer_state)
        owned = zip(stores.owners(store), leaves, jax.tree.leaves(optimizer_state), strict=True)
        optimizer_state = structure.unflatten([y if k not in keys else of_state(k, x, y) for k, x, y in owned])
    return dataclasses.replace(
        updated,
        values=updated.values | values,
        updater_state=updated.updater_state | states,
        optimizer_state=optimizer_state,
    )


def cast_rows(rows: list[sparse.RowSparse], dtype: np.dtype[Any]) -> list[sparse.RowSparse]:
    return [sparse.RowSparse(r.indices, r.values.astype(dtype), r.shape) for r in rows]


def check_shares(store: KVStore, values: Mapping[int, Shaped], caller: str) -> None:
    """`ValueError` if values are cut into rows and the updater is not elementwise for one of these whole values."""
    # A plain function is checked when it is traced: to trace it here would run its Python once more.
    if not stores.is_in_rows(store):
        return
    if isinstance(store.updater, TreeOptimizer):
        updaters._check_elementwise_tree(store.updater, stores.tree_of(store, values), stores.shards(store), caller)
    if isinstance(store.updater, Updater):
        spec, shards, forms = jax.ShapeDtypeStruct, stores.shards(store), dict[int, Any]()
        for k, v in values.items():
            if k not in store.frozen:
                chunk = Layout(Form.ROWS, v.shape, shards).chunk
                forms[k] = spec(v.shape, v.dtype), spec((chunk,), v.dtype), spec((shards, chunk), v.dtype)
        updaters._check_elementwise(store.updater, forms, dict(store.paths), caller)
