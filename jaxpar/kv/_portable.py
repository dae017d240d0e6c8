"""How a store is saved and restored: whole values, whatever its kind and devices.

- A value of a store of kind `sharded` is saved whole. A store of any kind on any number of devices can restore it.
- Residuals belong to the devices that pushed. For another number of devices they start again.
- Pending pushes are regrouped for the new devices. Their sum stays the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import updaters
from .._core import checks
from .._core.portable import NodeFormat, Saved, SavedArray, describe_record, join_names, path_name, register_node
from .._devices.mesh import copies_on, put, split_over
from .._store import aggregate, placing, queue
from .._store.store import WHOLE, KVStore, Rows, layouts_of, names, shapes_of, specs_of
from ..updaters import _TreeOptimizer as TreeOptimizer, _UnknownOwners as UnknownOwners

_RESIDUALS, _PENDING, _OPTIMIZER = "residuals", "pending", "optimizer_state"
_PARTS = {_RESIDUALS: "residual", _PENDING: "pending"}


def slots(store: KVStore, prefix: str) -> list[SavedArray]:
    """What is saved of each leaf of the store."""
    paths, leaves = zip(*jax.tree_util.tree_flatten_with_path(store)[0], strict=True) if store.values else ((), ())
    layouts, called, rules = layouts_of(store), names(store), rule_of_each(store)
    of_state = iter(placing.state_layouts(store))
    found: list[SavedArray] = []
    for path, leaf in zip(paths, leaves, strict=True):
        field, name = path[0].name, path_name(path)
        words, part, rule = name, _PARTS.get(field), None
        if field == _OPTIMIZER:
            layout = next(of_state)
        else:
            k = path[1].key
            key = f"key {k} ({called[k]!r})" if called.get(k, str(k)) != str(k) else f"key {k}"
            words = f"{key}: {'value' if field == 'values' else name}"
            rule = rules.get(k) if field == "values" else None
            layout = layouts[k] if not part and leaf.shape == store.values[k].shape else WHOLE
        shape, in_rows = (layout.shape, True) if isinstance(layout, Rows) else (leaf.shape, False)
        frozen = field == "values" and path[1].key in store.frozen
        found.append(SavedArray(join_names(prefix, name), words, leaf, shape, in_rows, part, rule, frozen))
    return found


def rule_of_each(store: KVStore) -> dict[int, str | None]:
    """What identifies the computation by which a push updates each key. None where that is not known."""
    specs = specs_of(store)
    if not isinstance(store.updater, TreeOptimizer):
        return updaters._rule_of_each(store.updater, None, tuple(specs), tuple(specs.values()))
    keys, structure = placing.trained_keys(store), jax.tree.structure(placing.tree_of(store, specs))
    return updaters._rule_of_each(store.updater, structure, tuple(keys), tuple(specs[k] for k in keys))


def bare(store: KVStore) -> KVStore:
    """The store without what belongs to the devices that pushed."""
    return dataclasses.replace(store, residuals={}, pending={})


def complete(store: KVStore, like: KVStore, saved: Saved, prefix: str, remarks: list[str]) -> KVStore:
    """The store with residuals and pending pushes, for the devices of `like`."""
    _check_rules(like, by_key(saved, join_names(prefix, "values"), like), remarks)
    residuals = _residuals(store, like, by_key(saved, join_names(prefix, _RESIDUALS), like), remarks)
    pending = _pending(store, like, by_key(saved, join_names(prefix, _PENDING), like))
    return dataclasses.replace(store, residuals=residuals, pending=pending)


def _check_rules(like: KVStore, saved: dict[int, Saved], remarks: list[str]) -> None:
    """`ValueError` where a value was updated by another rule than the store of `like` has. Other numbers are said."""
    has_other_numbers = False
    for k, rule in rule_of_each(like).items():
        record, _ = saved[k][""]
        if updaters._is_other_rule(rule, record.get("rule")):
            raise ValueError(
                f"{record['words']}: it was saved with another optimizer than that of `like`; give a state with the "
                "saved optimizer. To continue with another optimizer and keep the saved state, put what you restored "
                "into the new state: jax.tree.unflatten(jax.tree.structure(new), jax.tree.leaves(restored))"
            )
        has_other_numbers |= updaters._has_other_numbers(rule, record.get("rule"))
    if has_other_numbers:
        remarks.append(
            "the optimizer has other numbers (learning rate, schedule, decay) than the saved one; the new numbers "
            "apply from now on"
        )


def by_key(saved: Saved, prefix: str, store: KVStore) -> dict[int, Saved]:
    """What was saved below a prefix, for each key of the store. The names are what follows the key."""
    keys, found = {str(k): k for k in store.values}, dict[int, Saved]()
    for name, (record, array) in saved.items():
        if name.startswith(prefix + "/"):
            key, _, rest = name.removeprefix(prefix + "/").partition("/")
            if key not in keys:
                raise ValueError(f"{record['words']}: found {name!r}, but the store of `like` has no such key")
            found.setdefault(keys[key], {})[rest] = record, array
    return found


def _residuals(store: KVStore, like: KVStore, saved: dict[int, Saved], remarks: list[str]) -> Any:
    """The residuals of each key: as saved where they fit the devices of `like`, else new ones."""
    if saved and store.compressor is None:
        record = next(iter(next(iter(saved.values())).values()))[0]
        hint = "use kv.set_gradient_compression on it as before (and again after restoring, to change it)"
        found = f"found {describe_record(record)}, but the store of `like` compresses nothing"
        raise ValueError(f"{record['words']}: {found}; {hint}")
    both = {k: _residual(store, like, k, saved.get(k, {})) for k in sorted({*like.residuals, *saved})}
    new = [k for k, (_, fits) in both.items() if not fits]
    if new:
        remarks.append(
            f"the compressor's residuals of keys {checks.shorten(new)} start anew, because the saved residuals belong "
            "to another number of devices or another compressor"
        )
    return {k: residual for k, (residual, _) in both.items()}


def _residual(store: KVStore, like: KVStore, k: int, own: Saved) -> tuple[Any, bool]:
    """The residual of a key, and whether it is the saved one."""
    _check_rows(own)
    held = jax.tree.leaves(like.residuals.get(k))
    first = held[0].shape[0] if held else None
    count = first or (len(store.devices) if store.devices else next(iter(own.values()))[0]["shape"][0])
    fresh = aggregate.start_residuals(store, k, count)
    expected = {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(fresh)[0]}
    fits = {name: (tuple(r["shape"]), r["dtype"]) for name, (r, _) in own.items()} == {
        name: (leaf.shape, str(leaf.dtype)) for name, leaf in expected.items()
    }
    where = split_over(store.devices) if store.devices else None
    shardings = [getattr(leaf, "sharding", where) for leaf in held] or [where] * len(expected)
    leaves = [own[name][1] if fits else np.asarray(leaf) for name, leaf in expected.items()]
    placed = [put(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)]
    return jax.tree.structure(fresh).unflatten(placed), fits


def _check_rows(saved: Saved) -> None:
    """`ValueError` for an array that does not have a row for each device."""
    for record, array in saved.values():
        if not array.ndim or not array.shape[0]:
            raise ValueError(f"{record['words']}: expected a row for each device, found the shape {list(array.shape)}")


def _pending(store: KVStore, like: KVStore, saved: dict[int, Saved]) -> dict[int, queue.PendingPushes]:
    """The pending pushes of each key, for the devices of `like`. None where none were saved."""
    pending = {}
    for k in sorted({*like.pending, *saved}):
        held = like.pending.get(k)
        count = held.values[0].shape[0] if held else len(store.devices) if store.devices else None
        found = _restore_pending(store, k, saved[k], count) if k in saved else queue.start(store, k, count or 1)
        along, everywhere = None, None
        if store.devices:
            along, everywhere = split_over(store.devices), copies_on(store.devices)
        if held:
            along, everywhere = held.values[0].sharding, held.count.sharding
        pending[k] = queue.PendingPushes(put(found.values, along), put(found.count, everywhere))
    return pending


def _restore_pending(store: KVStore, k: int, found: Saved, count: int | None) -> queue.PendingPushes:
    """The pending pushes of a key, regrouped for `count` devices. None for as many as before."""
    record = next(iter(found.values()))[0]
    words, staleness = record["words"].partition(":")[0], len(found) - 1
    if found.keys() != {"count", *(f"values/{i}" for i in range(staleness))}:
        raise ValueError(f"{words}: expected a count and the pending values, found {sorted(found)}")
    if staleness != store.staleness:
        raise ValueError(
            f"{words}: values wait for {staleness} pushes, but the store of `like` has staleness {store.staleness}; "
            f"make it with kv.from_params(..., kind='dist_async', staleness={staleness}), or apply what is pending "
            "before saving (step.finish, kv.flush)"
        )
    arrays = [found[f"values/{i}"][1] for i in range(staleness)]
    rows, pushes = max((a.shape[0] for a in arrays if a.ndim), default=0), found["count"][1]
    expected = (rows, *shapes_of(store)[k]), store.values[k].dtype
    if not rows or any((a.shape, a.dtype) != expected for a in arrays) or (pushes.shape, pushes.dtype) != ((), "int32"):
        raise ValueError(f"{words}: pending values must have the key's shape and dtype, with a row for each device")
    held = queue.PendingPushes(tuple(map(jnp.asarray, arrays)), jnp.asarray(pushes))
    return held if count is None else queue.regroup(held, count)


def adapt(like: KVStore, saved: Saved, prefix: str, remarks: list[str]) -> Saved:
    """What was saved with one optimizer state a key, for a store whose optimizer has one state for the whole pytree."""
    # What a run saved that froze other params is for those that are frozen now. Where nothing fits, it stays as it is,
    # and the comparison with `like` says what is missing.
    saved = _for_frozen(like, dict(saved), prefix, remarks)
    before = join_names(prefix, "updater_state") + "/"
    old = {name.removeprefix(before): entry for name, entry in saved.items() if name.startswith(before)}
    wanted = [slot for slot in slots(like, prefix) if slot.name.startswith(join_names(prefix, _OPTIMIZER) + "/")]
    if not isinstance(like.updater, TreeOptimizer) or not old or not wanted:
        return saved
    made_of, trained = _names_of_keys(like), set(map(str, placing.trained_keys(like)))
    if {name for names in made_of for name in names} != {name for name in old if name.partition("/")[0] in trained}:
        return saved
    found: Saved = {}
    for slot, of_each in zip(wanted, made_of, strict=True):
        record, array = old[of_each[0]]
        if not all(np.array_equal(old[name][1], array) for name in of_each):
            return saved
        found[slot.name] = {**record, "name": slot.name, "words": slot.words}, array
    remarks.append("the optimizer's state was saved for each key, and was joined into one for all params")
    rest = {name: entry for name, entry in saved.items() if not name.startswith(before)}
    for record, _ in rest.values():
        record.pop("rule", None)  # it was that of a single key
    return rest | found


def _for_frozen(like: KVStore, saved: Saved, prefix: str, remarks: list[str]) -> Saved:
    """What was saved, with the states of the params that are trained now. Those of thawed params begin anew."""
    fields = tuple(join_names(prefix, field) + "/" for field in (_OPTIMIZER, "updater_state"))
    wanted = {slot.name: slot for slot in slots(like, prefix) if slot.name.startswith(fields)}
    held = {name for name in saved if name.startswith(fields)}
    if wanted.keys() == held or not isinstance(like.updater, (TreeOptimizer, updaters.Updater)):
        return saved
    try:
        owner = _owners_of_names(dataclasses.replace(like, frozen=()), prefix)
    except UnknownOwners:
        return saved
    frozen_then = {owner[name] for name in owner.keys() - held}
    values = join_names(prefix, "values")
    if not held <= owner.keys() or not saved.keys() >= {f"{values}/{k}" for k in like.values}:
        return saved  # of another model
    if None in frozen_then or any(owner[name] in frozen_then for name in held):
        return saved
    # The rule of a param that an optimizer of the whole pytree updates depends on the others. So it is compared here.
    then = dataclasses.replace(like, frozen=tuple(sorted(k for k in frozen_then if k is not None)))
    _check_rules(then, by_key(saved, values, like), remarks)
    fresh, thawed = _fresh_states(like, saved, prefix), wanted.keys() - held
    saved |= {name: (wanted[name].record(), fresh[name]) for name in thawed}
    for k in like.values:
        record, array = saved[f"{values}/{k}"]
        saved[f"{values}/{k}"] = {n: x for n, x in record.items() if n != "rule"}, array
    if thawed:
        called = ", ".join(repr(names(like)[k]) for k in sorted({owner[name] or 0 for name in thawed}))
        remarks.append(f"{called}: frozen in the checkpoint, so the optimizer's state of these params starts anew")
    return {name: entry for name, entry in saved.items() if name in wanted or name not in held}


def _owners_of_names(store: KVStore, prefix: str) -> dict[str, int | None]:
    """The name of each leaf of the updater's state, and the key to which it belongs."""
    specs = specs_of(store)
    if isinstance(store.updater, TreeOptimizer):
        state = jax.eval_shape(store.updater.init, placing.tree_of(store, specs))
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path({_OPTIMIZER: state})]
        return dict(zip([join_names(prefix, path_name(p)) for p in paths], placing.owners(store), strict=True))
    states = {k: jax.eval_shape(lambda x, k=k: store.updater.init(k, x), spec) for k, spec in specs.items()}
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path({"updater_state": states})]
    return {join_names(prefix, path_name(path)): path[1].key for path in paths}


def _fresh_states(like: KVStore, saved: Saved, prefix: str) -> dict[str, np.ndarray]:
    """By name, the updater's state before the first update of the values that were saved."""
    trained = placing.trained_keys(like)
    values = {k: jnp.asarray(saved[join_names(prefix, f"values/{k}")][1]) for k in trained}
    if isinstance(like.updater, TreeOptimizer):
        state: Any = {_OPTIMIZER: like.updater.init(placing.tree_of(like, values))}
    else:
        state = {"updater_state": {k: like.updater.init(k, v) for k, v in values.items()}}
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {join_names(prefix, path_name(path)): np.asarray(leaf) for path, leaf in leaves}


def _names_of_keys(store: KVStore) -> list[list[str]]:
    """For each leaf of the optimizer's state the names `key/leaf` of what it is, where each key has a state of its own.

    What belongs to no single param is in the state of each key. The list is empty where that cannot be said.
    """
    specs, single = specs_of(store), dict[int, tuple[Iterator[str], Iterator[str]]]()
    try:
        owners = placing.owners(store)
        for k in placing.trained_keys(store):
            leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(store.updater.init, specs[k]))
            called = [join_names(str(k), path_name(path)) for path, _ in leaves]
            both = list(zip(called, store.updater.owners(specs[k]), strict=True))
            single[k] = iter([n for n, i in both if i is not None]), iter([n for n, i in both if i is None])
        return [[next(s) for _, s in single.values()] if k is None else [next(single[k][0])] for k in owners]
    except (UnknownOwners, StopIteration):
        return []


register_node(KVStore, NodeFormat(slots, bare, complete, adapt))
