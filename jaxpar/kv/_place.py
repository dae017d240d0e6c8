"""A store on other devices: placed there, or saved and restored there. How it is spread over a mapped axis.

A value of a store of kind `sharded` is saved whole, so a store of any kind on any number of devices can restore it.
Residuals belong to the devices that pushed. For another number of devices they start again. Pending pushes are
regrouped for the new devices, with the same sum.

Begin with `place`. The second half is what `checkpoint` asks of a store, as a `NodeFormat`: `slots` when it saves, then
`adapt` and `complete` when it restores into a template.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from .. import updaters
from .._core import checks
from .._core.arrays import Device, PyTree
from .._core.portable import FORMATS, NodeFormat, Saved, SavedArray, describe_record, join_names, path_name
from .._core.transfers import allows_transfers
from .._devices import processes
from .._devices.mesh import auto_mesh, copies_on, put, put_copy, split_over, to_host
from .._devices.shardings import ShardingRule, check_is_mesh, fsdp, shardings_of
from .._devices.user_mesh import in_user_mesh
from .._store import aggregate, queue, store as stores
from .._store.store import Form, KVStore, Layout, Layouts
from ._create import create, signature

_RESIDUALS, _PENDING, _OPTIMIZER = "residuals", "pending", "optimizer_state"
_PARTS = {_RESIDUALS: "residual", _PENDING: "pending"}


@allows_transfers
@in_user_mesh
def place(
    store: KVStore,
    devices: Sequence[Device] | None = None,
    *,
    mesh: Mesh | None = None,
    sharding: PyTree = None,
) -> KVStore:
    """Copy a store to other devices, with its updater states.

    A store of kind `sharded` is cut into one row for each device. For the other kinds, also `local`, each device gets a
    copy, as a program over these devices needs. Residuals of a compressor are kept for the same number of devices,
    otherwise they start at zero. Pending pushes move to the new devices, so that later sums are the same.

    With a mesh, values keep their shapes and are split over the mesh, as the training step's engine `jit` needs. A
    store that is split over a mesh stays split on the same devices.

    Args:
        store: any store.
        devices: one or more distinct devices.
        mesh: a `jax.sharding.Mesh`, in place of `devices`.
        sharding: how values are split over `mesh`, as in `kv.from_params`. Without `mesh`, the store's own mesh is
            used.

    Returns:
        A new store that shares no memory with `store`.

    Raises:
        ValueError: the kind is `sharded` and the updater is not elementwise for shares of this many devices; values are
            split over a mesh of other devices; both `devices` and `mesh` are given, or `sharding` without a mesh.
        RuntimeError: a stored value was deleted, as by donating the store.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxpar import kv
        >>> store = kv.place(kv.from_params({"w": jnp.ones(2)}), jax.devices()[:1])
        >>> len(store.values[0].sharding.device_set)
        1
    """
    checks.find_keys([*store.values], "kv.place", store)
    if mesh is not None and devices is not None:
        raise ValueError("kv.place: give mesh= or devices=, not both")
    if mesh is None and sharding is not None:
        if devices is not None or not stores.is_split(store):
            raise ValueError("kv.place: sharding= splits values over a mesh; give mesh= with it, not devices=")
        mesh = stores.mesh_of_values(store)
    # Where the store goes, and how each of its values lies there.
    if mesh is not None:
        check_is_mesh(mesh, "kv.place")
        specs, target = stores.specs_of(store), tuple(mesh.devices.flat)
        spec_tree = specs if store.treedef is None else store.treedef.unflatten([specs[k] for k, _ in store.paths])
        if sharding is None:
            sharding = default_rule(store, mesh) if stores.KINDS[store.kind].in_rows else PartitionSpec()
        layouts = split_layouts(store, sorted(specs), spec_tree, mesh, sharding, "kv.place")
    else:
        target = create(store.kind, devices=devices).devices
        if target is None:
            raise ValueError("kv.place: give devices or mesh")
        if stores.is_split(store) and target != store.devices:
            hint = "write kv.place(store, mesh=mesh, sharding=rule)"
            raise ValueError(f"kv.place: the values are split over a mesh with other devices; {hint}")
        rows = {k: dataclasses.replace(layout, count=len(target)) for k, layout in stores.rows_of(store).items()}
        layouts = tuple({**dict(store.layouts), **rows}.items())
    arrays = (store.values, store.updater_state, store.optimizer_state)
    if processes.to_share(arrays, target):  # those of this process only, for devices of several
        processes.agree("kv.place: every process must hold the same keys, in the same shapes", signature(store.values))
        values, states, optimizer_state = processes.from_first(arrays)
        store = dataclasses.replace(store, values=values, updater_state=states, optimizer_state=optimizer_state)
    moved = _move(store, target, layouts)
    return _with_pending(_with_residuals(moved, store.residuals), store.pending)


def default_rule(store: KVStore, mesh: Mesh) -> ShardingRule:
    """How the values of kind `sharded` are split over a mesh: by `fsdp`, those that are frozen not at all."""
    split, frozen = fsdp(mesh.axis_names[0]), {dict(store.paths)[k] for k in store.frozen}
    return lambda path, shape, mesh: PartitionSpec() if path in frozen else split(path, shape, mesh)


def split_layouts(
    store: KVStore, keys: Iterable[int], params: PyTree, mesh: Mesh, sharding: PyTree, where: str
) -> Layouts:
    """The layouts of a pytree of params that is split over a mesh, for the keys of its leaves."""
    kind, fault = stores.KINDS[store.kind], ""
    if kind.on_one_device:
        fault = f"kind {kind.name!r} keeps a value on one device; use kind 'device', or 'sharded'"
    elif store.staleness:
        fault = "delayed pushes belong to the devices that pushed; use kind 'dist_sync', or engine 'shard_map'"
    elif store.compressor is not None:
        fault = "a compressor needs the gradient of each device; use engine 'pmap' or 'shard_map'"
    if fault:
        raise ValueError(f"a store whose values are split over a mesh: {fault}")
    shardings = jax.tree.leaves(shardings_of(params, sharding, auto_mesh(mesh), where=where))
    return tuple((k, Layout(Form.SPLIT, sharding=s)) for k, s in zip(keys, shardings, strict=True))


def _move(store: KVStore, target: tuple[Device, ...], layouts: Layouts) -> KVStore:
    """The values and the updater's states on other devices, in memory of their own."""
    moved = dataclasses.replace(store, devices=target, layouts=layouts, residuals={}, pending={})
    if store.devices is None or len(store.devices) != len(target):
        aggregate.check_shares(moved, stores.specs_of(store), "kv.place")

    # By way of the full value: rows of 3 devices are no rows of 4.
    def move(before: Layout, after: Layout, leaf: jax.Array) -> jax.Array:
        return put_copy(after.stored(before.full(leaf)), stores.sharding_of(moved, after))

    arrays = operator.attrgetter("values", "updater_state", "optimizer_state")
    found = jax.tree.map(move, *map(arrays, (stores.layout_of_each(store), stores.layout_of_each(moved), store)))
    values, states, state = found
    return dataclasses.replace(moved, values=values, updater_state=states, optimizer_state=state)


def partition_specs(store: KVStore, axis_name: str) -> KVStore:
    """The `PartitionSpec`s of a store, for `shard_map`'s in_specs and out_specs.

    Args:
        store: any store.
        axis_name: the mesh axis that splits values (kind `sharded`), residuals and pending pushes.

    Returns:
        The store with a `PartitionSpec` in place of each array: `P(axis_name)` for arrays that are split along the
        first axis, and `P()` for replicated arrays.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxpar import kv
        >>> kv.partition_specs(kv.init(kv.create("device"), 3, jnp.ones(2)), "data").values
        {3: P()}
    """
    layouts = stores.layout_of_each(store)
    return jax.tree.map(lambda layout: PartitionSpec(axis_name) if layout.spec else PartitionSpec(), layouts)


def _with_residuals(store: KVStore, before: dict[int, Any]) -> KVStore:
    """The store with a residual for each compressed key and each of its devices, so that a push makes none."""
    assert store.devices is not None
    keys, residuals = sorted(aggregate.compressed_keys(store, store.values)), dict[int, Any]()
    for k, initial in aggregate.start_residuals(store, keys, len(store.devices)).items():
        fits = k in before and jax.tree.map(jnp.shape, before[k]) == jax.tree.map(jnp.shape, initial)
        residuals[k] = put_copy(before[k] if fits else initial, split_over(store.devices))
    return dataclasses.replace(store, residuals=residuals)


def _with_pending(store: KVStore, before: dict[int, queue.PendingPushes]) -> KVStore:
    """The store with the pending pushes of each of its devices, so that a push makes no room for them."""
    if not store.staleness:
        return store
    assert store.devices is not None
    if processes.to_share([pushes.values for pushes in before.values()], store.devices):
        raise ValueError("kv.place: pushes are pending in this process only; call kv.flush first")
    count, pending = len(store.devices), {}
    floating = {k for k, v in store.values.items() if jnp.issubdtype(v.dtype, jnp.inexact)}
    for k in sorted(before.keys() | floating - {*store.frozen}):
        pushes = before.get(k) or queue.start(store, k, count)
        pushes = queue.regroup(jax.tree.map(to_host, pushes), count)
        values = put_copy(pushes.values, split_over(store.devices))
        pending[k] = queue.PendingPushes(values, put_copy(pushes.count, stores.sharding_of(store)))
    return dataclasses.replace(store, pending=pending)


# How a store is saved and restored.


def slots(store: KVStore, prefix: str) -> list[SavedArray]:
    """What is saved of each leaf of the store."""
    called, rules, saved = stores.names(store), rule_of_each(store), list[SavedArray]()
    layouts = jax.tree.leaves(stores.layout_of_each(store))
    for (path, leaf), layout in zip(jax.tree_util.tree_leaves_with_path(store), layouts, strict=True):
        field, name, frozen = path[0].name, path_name(path), False
        description, rule, array = name, None, name
        if field != _OPTIMIZER:
            k = path[1].key
            rest = path_name(path[2:])
            # What orbax and people find: `params/conv1/kernel`. A variable of NNX has its array in `value`.
            array = join_names("params" if field == "values" else field, called.get(k, str(k)).removesuffix("/value"))
            array = join_names(array, rest)
            key = f"key {k} ({called[k]!r})" if called.get(k, str(k)) != str(k) else f"key {k}"
            description = f"{key}: {name}"
            if field == "values":
                description, rule, frozen = f"{key}: value", rules.get(k), k in store.frozen
        # Rows are saved in the full shape, which any number of devices can cut anew.
        shape, in_rows = (layout.shape, True) if layout.form is Form.ROWS else (leaf.shape, False)
        role, array = _PARTS.get(field), join_names(prefix.removesuffix("store").removesuffix("/"), array)
        saved.append(SavedArray(join_names(prefix, name), description, leaf, shape, in_rows, role, rule, frozen, array))
    return saved


def rule_of_each(store: KVStore) -> dict[int, str | None]:
    """What identifies the computation by which a push updates each key. None where that is not known."""
    specs = stores.specs_of(store)
    if not isinstance(store.updater, updaters._TreeOptimizer):
        return updaters._rule_of_each(store.updater, None, tuple(specs), tuple(specs.values()))
    keys, structure = stores.trained_keys(store), jax.tree.structure(stores.tree_of(store, specs))
    return updaters._rule_of_each(store.updater, structure, tuple(keys), tuple([specs[k] for k in keys]))


def complete(store: KVStore, template: KVStore, saved: Saved, prefix: str, remarks: list[str]) -> KVStore:
    """The store with residuals and pending pushes, for the devices of `template`."""
    _check_rules(template, by_key(saved, join_names(prefix, "values"), template), remarks)
    residuals = _residuals(store, template, by_key(saved, join_names(prefix, _RESIDUALS), template), remarks)
    pending = _pending(store, template, by_key(saved, join_names(prefix, _PENDING), template))
    return dataclasses.replace(store, residuals=residuals, pending=pending)


def _check_rules(template: KVStore, saved: dict[int, Saved], remarks: list[str]) -> None:
    """`ValueError` where a value was updated by another rule than that of the template. Other numbers are said."""
    differences = set[str]()
    for k, rule in rule_of_each(template).items():
        record, _ = saved[k][""]
        differences.add(difference := updaters._difference_of_rules(rule, record.get("rule")))
        if difference == "rule":
            hint = "restore with that one, then jax.tree.unflatten(jax.tree.structure(new), jax.tree.leaves(restored))"
            raise ValueError(f"{record['words']}: it was saved with another optimizer than that of `like`; {hint}")
    if "numbers" in differences:
        remarks.append(
            "the optimizer has other numbers (learning rate, schedule, decay) than were saved; they apply now"
        )


def by_key(saved: Saved, prefix: str, store: KVStore) -> dict[int, Saved]:
    """What was saved below a prefix, for each key of the store. The names are what follows the key."""
    keys, saved_of = {str(k): k for k in store.values}, dict[int, Saved]()
    for name, (record, array) in saved.items():
        if name.startswith(prefix + "/"):
            key, _, leaf_name = name.removeprefix(prefix + "/").partition("/")
            if key not in keys:
                raise ValueError(f"{record['words']}: found {name!r}, but the store of `like` has no such key")
            saved_of.setdefault(keys[key], {})[leaf_name] = record, array
    return saved_of


def _residuals(store: KVStore, template: KVStore, saved: dict[int, Saved], remarks: list[str]) -> Any:
    """The residuals of each key: as saved where they fit the devices of `template`, else new ones."""
    if saved and store.compressor is None:
        record = next(iter(next(iter(saved.values())).values()))[0]
        found = f"{record['words']}: found {describe_record(record)}"
        raise ValueError(f"{found}, but the store of `like` compresses nothing; use kv.set_gradient_compression on it")
    # A residual is what one compressor left out on one device. It is taken up where both are as before. Else it starts
    # anew, and what was left out is lost, so the user is told.
    residuals, new = dict[int, Any](), list[int]()
    for k in sorted({*template.residuals, *saved}):
        saved_arrays = {name: np.asarray(array) for name, (_, array) in saved.get(k, {}).items()}
        leaves = jax.tree.leaves(template.residuals.get(k))
        rows = next((array.shape[:1] for array in saved_arrays.values()), ())
        count = leaves[0].shape[0] if leaves else len(store.devices) if store.devices else max(1, *rows)
        initial = aggregate.start_residuals(store, [k], count)[k]
        found, expected = ({name: (x.shape, x.dtype) for name, x in state.items()} for state in (saved_arrays, initial))
        new += [] if found == expected else [k]
        sharding = leaves[0].sharding if leaves else split_over(store.devices) if store.devices else None
        residuals[k] = put(saved_arrays if found == expected else jax.tree.map(np.asarray, initial), sharding)
    if new:
        remarks.append(f"residuals of keys {checks.shorten(new)} start anew: other devices, or another compressor")
    return residuals


def _pending(store: KVStore, template: KVStore, saved: dict[int, Saved]) -> dict[int, queue.PendingPushes]:
    """The pending pushes of each key, for the devices of `template`. None where none were saved."""
    pending = {}
    for k in sorted({*template.pending, *saved}):
        count, along, everywhere = None, None, None
        if queued := template.pending.get(k):
            value = queued.values[0]
            count, along, everywhere = value.shape[0], value.sharding, queued.count.sharding
        elif store.devices:
            count, along, everywhere = len(store.devices), split_over(store.devices), copies_on(store.devices)
        pushes = _restore_pending(store, k, saved[k], count) if k in saved else queue.start(store, k, count or 1)
        pending[k] = queue.PendingPushes(put(pushes.values, along), put(pushes.count, everywhere))
    return pending


def _restore_pending(store: KVStore, k: int, saved: Saved, count: int | None) -> queue.PendingPushes:
    """The pending pushes of a key, regrouped for `count` devices. None for as many as before."""
    record = next(iter(saved.values()))[0]
    words, staleness = record["words"].partition(":")[0], len(saved) - 1
    if staleness != store.staleness:
        both = f"values wait for {staleness} pushes, but the store of `like` has staleness {store.staleness}"
        raise ValueError(f"{words}: {both}; make it with staleness={staleness}, or call kv.flush before saving")
    arrays = {name: np.asarray(array) for name, (_, array) in saved.items()}
    rows = max((a.shape[0] for a in arrays.values() if a.ndim), default=0)
    value = (rows, *stores.shapes_of(store)[k]), store.values[k].dtype
    expected = {"count": ((), np.dtype("int32")), **{f"values/{i}": value for i in range(staleness)}}
    if not rows or {name: (a.shape, a.dtype) for name, a in arrays.items()} != expected:
        raise ValueError(f"{words}: expected a count, and pending values with a row for each device")
    count_pushed, *values = [jnp.asarray(arrays[name]) for name in expected]
    restored = queue.PendingPushes(tuple(values), count_pushed)
    return restored if count is None else queue.regroup(restored, count)


def adapt(template: KVStore, saved: Saved, prefix: str, remarks: list[str]) -> Saved:
    """What was saved with one optimizer state a key, for a store whose optimizer has one state for the whole pytree."""
    # What a run saved that froze other params is for those that are frozen now. Where nothing fits, it stays as it is,
    # and the comparison with `like` says what is missing.
    saved = _with_wide_averages(template.optimizer_state, dict(saved), join_names(prefix, _OPTIMIZER), remarks)
    saved = _for_frozen(template, saved, prefix, remarks)
    before = join_names(prefix, "updater_state") + "/"
    old = {name.removeprefix(before): entry for name, entry in saved.items() if name.startswith(before)}
    wanted = [slot for slot in slots(template, prefix) if slot.name.startswith(join_names(prefix, _OPTIMIZER) + "/")]
    if not isinstance(template.updater, updaters._TreeOptimizer) or not old or not wanted:
        return saved

    # Each leaf of the new state is that of one key, or is in the states of all keys, as a count is. Then it must be the
    # same in all of them, or it cannot become one number.
    made_of, trained = _names_of_keys(template), set(map(str, stores.trained_keys(template)))
    if {name for names in made_of for name in names} != {name for name in old if name.partition("/")[0] in trained}:
        return saved
    joined: Saved = {}
    for slot, of_each in zip(wanted, made_of, strict=True):
        record, array = old[of_each[0]]
        if not all(np.array_equal(old[name][1], array) for name in of_each):
            return saved
        joined[slot.name] = {**record, "name": slot.name, "words": slot.words}, array
    remarks.append("the optimizer's state was saved for each key, and was joined into one for all params")
    others_saved = {name: entry for name, entry in saved.items() if not name.startswith(before)}
    for record, _ in others_saved.values():
        record.pop("rule", None)  # it was that of a single key
    return others_saved | joined


def _is_average(node: object) -> bool:
    return isinstance(node, updaters._AverageState)


def _with_wide_averages(optimizer_state: PyTree, saved: Saved, at: str, remarks: list[str]) -> Saved:
    """What was saved, with averages of params in float32 that were kept in the narrower dtype of the params."""
    cast = dict[str, Any]()
    nodes = jax.tree_util.tree_leaves_with_path(optimizer_state, is_leaf=_is_average)
    for path, average in [(path, node.average) for path, node in nodes if _is_average(node)]:
        for inner, leaf in jax.tree_util.tree_leaves_with_path(average):
            name = join_names(join_names(at, path_name(path)), join_names("average", path_name(inner)))
            record, array = saved.get(name, ({}, np.zeros(())))
            if leaf.dtype == np.float32 and record.get("dtype") in ("bfloat16", "float16"):
                cast[name] = {**record, "dtype": "float32"}, array.astype(np.float32)
    if cast:
        remarks.append("the averages of params were saved in 16 bits, and are kept in float32 now")
    return {**saved, **cast}


def _for_frozen(template: KVStore, saved: Saved, prefix: str, remarks: list[str]) -> Saved:
    """What was saved, with the states of the params that are trained now. Those of thawed params begin anew."""
    # By name: the arrays of states that `template` has, and those that were saved. Equal sets: the same params are
    # frozen.
    fields = tuple(join_names(prefix, field) + "/" for field in (_OPTIMIZER, "updater_state"))
    wanted = {slot.name: slot for slot in slots(template, prefix) if slot.name.startswith(fields)}
    saved_states = {name for name in saved if name.startswith(fields)}
    if wanted.keys() == saved_states or not isinstance(template.updater, (updaters._TreeOptimizer, updaters.Updater)):
        return saved
    # The state that the optimizer would have if nothing were frozen names the owner of each array. What is not saved of
    # it tells which params were frozen then.
    all_trained = dataclasses.replace(template, frozen=())
    state = jax.eval_shape(functools.partial(_first_state, all_trained), stores.specs_of(template))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    try:
        keys = stores.owners(all_trained) if _OPTIMIZER in state else [path[1].key for path in paths]
    except updaters._UnknownOwners:
        return saved
    owner = dict(zip([join_names(prefix, path_name(path)) for path in paths], keys, strict=True))
    frozen_then = {owner[name] for name in owner.keys() - saved_states}
    values = join_names(prefix, "values")
    if not saved_states <= owner.keys() or not saved.keys() >= {f"{values}/{k}" for k in template.values}:
        return saved  # of another model
    if None in frozen_then or any(owner[name] in frozen_then for name in saved_states):
        return saved
    # The rule of a param that an optimizer of the whole pytree updates depends on the others. So it is compared here.
    then = dataclasses.replace(template, frozen=tuple(sorted(k for k in frozen_then if k is not None)))
    _check_rules(then, by_key(saved, values, template), remarks)
    now = {k: jnp.asarray(np.asarray(saved[f"{values}/{k}"][1])) for k in template.values if k not in template.frozen}
    # A thawed param begins from its saved value with the state of a first update.
    leaves = jax.tree_util.tree_leaves_with_path(_first_state(template, now))
    initial = {join_names(prefix, path_name(path)): np.asarray(leaf) for path, leaf in leaves}
    thawed = wanted.keys() - saved_states
    saved |= {name: (wanted[name].record(), initial[name]) for name in thawed}
    # `complete` would compare these rules again, with what is frozen now.
    for k in template.values:
        record, array = saved[f"{values}/{k}"]
        saved[f"{values}/{k}"] = {n: x for n, x in record.items() if n != "rule"}, array
    if thawed:
        called = ", ".join(repr(stores.names(template)[k]) for k in sorted({owner[name] or 0 for name in thawed}))
        remarks.append(f"{called}: frozen in the checkpoint, so the optimizer's state of these params starts anew")
    return {name: entry for name, entry in saved.items() if name in wanted or name not in saved_states}


def _first_state(store: KVStore, values: Mapping[int, Any]) -> dict[str, Any]:
    """The updater's state before the first update of these values, by the store's field that has it."""
    if isinstance(store.updater, updaters._TreeOptimizer):
        return {_OPTIMIZER: store.updater.init(stores.tree_of(store, values))}
    return {"updater_state": {k: store.updater.init(k, v) for k, v in values.items()}}


def _names_of_keys(store: KVStore) -> list[list[str]]:
    """For each leaf of the optimizer's state the names `key/leaf` of what it is in the states of single keys."""
    # What belongs to no single param is in the state of each key. The list is empty where that cannot be said.
    specs, single = stores.specs_of(store), dict[int, tuple[Iterator[str], Iterator[str]]]()
    try:
        owners = stores.owners(store)
        for k in stores.trained_keys(store):
            leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(store.updater.init, specs[k]))
            called = [join_names(str(k), path_name(path)) for path, _ in leaves]
            owned = list(zip(called, store.updater.owners(specs[k]), strict=True))
            single[k] = (
                iter([n for n, i in owned if i is not None]),
                iter([n for n, i in owned if i is None]),
            )
        return [[next(s) for _, s in single.values()] if k is None else [next(single[k][0])] for k in owners]
    except (updaters._UnknownOwners, StopIteration):
        return []


# Without what belongs to the devices that pushed, which `complete` restores.
_bare = functools.partial(dataclasses.replace, residuals={}, pending={})
FORMATS[KVStore] = NodeFormat(slots, _bare, complete, adapt)
