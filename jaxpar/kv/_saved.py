"""A store in a checkpoint: what `checkpoint` asks of it, as a `NodeFormat`.

`slots` says what is saved, then `adapt` and `complete` restore into a template. A value of a store of kind `sharded` is
saved whole, so a store of any kind on any number of devices can restore it. Residuals belong to the devices that
pushed. For another number of devices they start again. Pending pushes are regrouped for the new devices, with the same
sum.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import updaters
from .._core import checks
from .._core.arrays import PyTree
from .._core.portable import FORMATS, NodeFormat, Saved, SavedArray, describe_record, join_names, path_name
from .._devices.mesh import copies_on, put, split_over
from .._store import aggregate, queue, store as stores
from .._store.store import Form, KVStore

_ROLES = {"residuals": "residual", "pending": "pending"}  # of what belongs to the devices that pushed


def slots(store: KVStore, prefix: str) -> list[SavedArray]:
    """What is saved of each leaf of the store."""
    names, rules, saved = stores.names(store), rule_of_each(store), list[SavedArray]()
    layouts = jax.tree.leaves(stores.layout_of_each(store))
    for (path, leaf), layout in zip(jax.tree_util.tree_leaves_with_path(store), layouts, strict=True):
        field, name, frozen = path[0].name, path_name(path), False
        description, rule, array = name, None, name
        if field != "optimizer_state":
            k = path[1].key
            param = names.get(k, str(k))
            # What orbax and people find: `params/conv1/kernel`. A variable of NNX has its array in `value`.
            array = join_names("params" if field == "values" else field, param.removesuffix("/value"))
            array = join_names(array, path_name(path[2:]))
            key = f"key {k} ({param!r})" if param != str(k) else f"key {k}"
            description = f"{key}: {name}"
            if field == "values":
                description, rule, frozen = f"{key}: value", rules.get(k), k in store.frozen
        # Rows are saved in the full shape, which any number of devices can cut anew.
        shape, in_rows = (layout.shape, True) if layout.form is Form.ROWS else (leaf.shape, False)
        # A store in a state is at `store`, which says nothing to other tools: `params/...`, and not `store/params/...`.
        role, array = _ROLES.get(field), join_names(prefix.removesuffix("store").removesuffix("/"), array)
        saved.append(SavedArray(join_names(prefix, name), description, leaf, shape, in_rows, role, rule, frozen, array))
    return saved


def rule_of_each(store: KVStore) -> dict[int, str | None]:
    """What identifies the computation by which a push updates each key. None where that is not known."""
    specs = stores.specs_of(store)
    if not isinstance(store.updater, updaters._TreeOptimizer):
        return updaters._rule_of_each(store.updater, None, tuple(specs), tuple(specs.values()))
    keys, structure = stores.trained_keys(store), jax.tree.structure(stores.tree_of(store, specs))
    return updaters._rule_of_each(store.updater, structure, tuple(keys), tuple([specs[k] for k in keys]))


# What was saved, under the names that the template's optimizer has. `checkpoint` then fills the template's values and
# states by these names.


def adapt(template: KVStore, saved: Saved, prefix: str, remarks: list[str]) -> Saved:
    """What was saved, with the optimizer's states of the params that are trained now, in the form that they have now.

    What a step here cannot make fit stays as it is. The comparison with `like` then says what is missing.
    """
    saved = with_wide_averages(template.optimizer_state, saved, join_names(prefix, "optimizer_state"), remarks)
    saved = _with_frozen_as_now(template, saved, prefix, remarks)
    return _with_joined_states(template, saved, prefix, remarks)


def with_wide_averages(optimizer_state: PyTree, saved: Saved, prefix: str, remarks: list[str]) -> Saved:
    """What was saved, with averages of params in float32 that were kept in the narrower dtype of the params."""

    def is_average(node: object) -> bool:
        return isinstance(node, updaters._AverageState)

    widened: Saved = {}
    for path, node in jax.tree_util.tree_leaves_with_path(optimizer_state, is_leaf=is_average):
        if not is_average(node):
            continue
        for inner, leaf in jax.tree_util.tree_leaves_with_path(node.average):
            name = join_names(join_names(prefix, path_name(path)), join_names("average", path_name(inner)))
            record, array = saved.get(name, ({}, np.zeros(())))
            if leaf.dtype == np.float32 and record.get("dtype") in ("bfloat16", "float16"):
                widened[name] = {**record, "dtype": "float32"}, array.astype(np.float32)
    if widened:
        remarks.append("the averages of params were saved in 16 bits, and are kept in float32 now")
    return {**saved, **widened}


def _with_frozen_as_now(template: KVStore, saved: Saved, prefix: str, remarks: list[str]) -> Saved:
    """What was saved by a run that froze other params than the template does.

    The states of params that are frozen now are left out. Params that are trained again get a first state.
    """
    fields = tuple(join_names(prefix, field) + "/" for field in ("optimizer_state", "updater_state"))
    states_now = {slot.name: slot for slot in slots(template, prefix) if slot.name.startswith(fields)}
    states_saved = {name for name in saved if name.startswith(fields)}
    is_tree = isinstance(template.updater, updaters._TreeOptimizer)
    if states_now.keys() == states_saved or not (is_tree or isinstance(template.updater, updaters.Updater)):
        return saved

    def first_state(frozen: Iterable[int], values: Mapping[int, Any]) -> dict[str, Any]:
        """The updater's state before the first update, if these keys are frozen, by the store's field that has it."""
        store = dataclasses.replace(template, frozen=tuple(sorted(frozen)))
        if is_tree:
            return {"optimizer_state": store.updater.init(stores.tree_of(store, values))}
        return {"updater_state": {k: store.updater.init(k, v) for k, v in values.items() if k not in store.frozen}}

    def named(state: PyTree) -> dict[str, Any]:
        """The arrays of such a state, by the names under which they are saved."""
        return {join_names(prefix, path_name(path)): x for path, x in jax.tree_util.tree_leaves_with_path(state)}

    # 1. Which params were frozen then? Those of which no state was saved, although they would have one.
    specs = stores.specs_of(template)
    if is_tree:
        all_trained = dataclasses.replace(template, frozen=())
        try:
            owners = stores.owners(all_trained)
        except updaters._UnknownOwners:
            return saved
        names = named(jax.eval_shape(functools.partial(first_state, ()), specs))
        frozen_then = {k for k, name in zip(owners, names, strict=True) if k is not None and name not in states_saved}
    else:
        before = join_names(prefix, "updater_state") + "/"
        keys_saved = {name.removeprefix(before).partition("/")[0] for name in states_saved}
        with_state = [k for k in specs if k in template.frozen or jax.tree.leaves(template.updater_state[k])]
        frozen_then = {k for k in with_state if str(k) not in keys_saved}

    # 2. Was it this model, and an optimizer with such a state? Then, with these frozen, it has what was saved.
    values = join_names(prefix, "values")
    states_then = named(jax.eval_shape(functools.partial(first_state, frozen_then), specs))
    if states_then.keys() != states_saved or not saved.keys() >= {f"{values}/{k}" for k in specs}:
        return saved

    # 3. Was it the same optimizer? The rule of a param that an optimizer of the whole pytree updates depends on which
    #    others are trained. So it is compared with those frozen that were then. `complete` would compare it again, with
    #    what is frozen now, so the records lose their rules.
    then = dataclasses.replace(template, frozen=tuple(sorted(frozen_then)))
    _check_rules(then, by_key(saved, values, template), remarks)
    adapted = {name: entry for name, entry in saved.items() if name in states_now or name not in states_saved}
    for k in specs:
        record, array = saved[f"{values}/{k}"]
        adapted[f"{values}/{k}"] = {field: x for field, x in record.items() if field != "rule"}, array

    # 4. A param that is trained again begins from its saved value with the state of a first update.
    trained = {k: jnp.asarray(np.asarray(saved[f"{values}/{k}"][1])) for k in specs if k not in template.frozen}
    for name, leaf in named(first_state(template.frozen, trained)).items():
        if name not in states_saved:
            adapted[name] = states_now[name].record(), np.asarray(leaf)
    if thawed := frozen_then.difference(template.frozen):
        names = ", ".join(repr(stores.names(template)[k]) for k in sorted(thawed))
        remarks.append(f"{names}: frozen in the checkpoint, so the optimizer's state of these params starts anew")
    return adapted


def _with_joined_states(template: KVStore, saved: Saved, prefix: str, remarks: list[str]) -> Saved:
    """What was saved with one optimizer state a key, for a store whose optimizer has one state for the whole pytree.

    So `{"0": (count, mean of 0), "1": (count, mean of 1)}` becomes `(count, {0: mean of 0, 1: mean of 1})`. A
    store made with `updater=from_optax(tx)` has the former.
    """
    of_keys, of_tree = (join_names(prefix, field) + "/" for field in ("updater_state", "optimizer_state"))
    key_leaves = {name.removeprefix(of_keys): entry for name, entry in saved.items() if name.startswith(of_keys)}
    tree_slots = [slot for slot in slots(template, prefix) if slot.name.startswith(of_tree)]
    if not isinstance(template.updater, updaters._TreeOptimizer) or not key_leaves or not tree_slots:
        return saved

    # 1. Which leaves would this optimizer have in the state of each key? By the names `key/leaf`: those that belong to
    #    the param of the key, as a mean does, and those that belong to none, as a count does.
    specs, trained = stores.specs_of(template), stores.trained_keys(template)
    leaves_of_param, leaves_of_none = dict[int, list[str]](), dict[int, list[str]]()
    try:
        for k in trained:
            leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(template.updater.init, specs[k]))
            leaf_names = [join_names(str(k), path_name(path)) for path, _ in leaves]
            owners = template.updater.owners(specs[k])
            leaves_of_param[k] = [name for name, owner in zip(leaf_names, owners, strict=True) if owner is not None]
            leaves_of_none[k] = [name for name, owner in zip(leaf_names, owners, strict=True) if owner is None]
        owner_of_each = stores.owners(template)
    except updaters._UnknownOwners:
        return saved

    # 2. Of which of these is each leaf of the one state made? `init` makes both in one order, so each takes the next.
    try:
        sources = [
            [leaves_of_none[k].pop(0) for k in trained] if owner is None else [leaves_of_param[owner].pop(0)]
            for owner in owner_of_each
        ]
    except IndexError:
        return saved  # it has leaves that the states of single keys have not
    trained_names = {name for name in key_leaves if name.partition("/")[0] in set(map(str, trained))}
    if {name for names in sources for name in names} != trained_names:
        return saved  # another optimizer was saved

    # 3. A mean goes over as it is. A count is in the states of all keys, and can become one if it is the same in all.
    joined: Saved = {}
    for slot, names in zip(tree_slots, sources, strict=True):
        record, array = key_leaves[names[0]]
        if not all(np.array_equal(key_leaves[name][1], array) for name in names):
            return saved
        joined[slot.name] = {**record, "name": slot.name, "words": slot.words}, array
    remarks.append("the optimizer's state was saved for each key, and was joined into one for all params")
    adapted = {name: entry for name, entry in saved.items() if not name.startswith(of_keys)}
    for record, _ in adapted.values():
        record.pop("rule", None)  # it was that of a single key
    return adapted | joined


# What is restored beside values and states: whatever belongs to the devices that pushed.


def complete(store: KVStore, template: KVStore, saved: Saved, prefix: str, remarks: list[str]) -> KVStore:
    """The store with residuals and pending pushes, for the devices of `template`."""
    _check_rules(template, by_key(saved, join_names(prefix, "values"), template), remarks)

    # A residual is what one compressor left out on one device. It is taken up where both are as before. Else it starts
    # anew, and what was left out is lost, so the user is told.
    saved_residuals = by_key(saved, join_names(prefix, "residuals"), template)
    if saved_residuals and store.compressor is None:
        record = next(iter(next(iter(saved_residuals.values())).values()))[0]
        raise ValueError(
            f"{record['words']}: found {describe_record(record)}, but the store of `like` compresses nothing; use "
            "kv.set_gradient_compression on it"
        )
    residuals, restarted = dict[int, Any](), list[int]()
    for k in sorted({*template.residuals, *saved_residuals}):
        arrays = {name: np.asarray(array) for name, (_, array) in saved_residuals.get(k, {}).items()}
        # For as many devices as the template has it for, else as the store has, else as it was saved for.
        leaves = jax.tree.leaves(template.residuals.get(k))
        saved_for = next((array.shape[0] for array in arrays.values() if array.ndim), 1)
        count = leaves[0].shape[0] if leaves else len(store.devices) if store.devices else max(1, saved_for)
        initial = aggregate.start_residuals(store, [k], count)[k]
        forms, expected = ({name: (x.shape, x.dtype) for name, x in state.items()} for state in (arrays, initial))
        if forms != expected:
            arrays = jax.tree.map(np.asarray, initial)
            restarted.append(k)
        sharding = leaves[0].sharding if leaves else split_over(store.devices) if store.devices else None
        residuals[k] = put(arrays, sharding)
    if restarted:
        remarks.append(
            f"residuals of keys {checks.shorten(restarted)} start anew: other devices, or another compressor"
        )

    # Pending pushes: a count, and as many values as the staleness, each with a row for each device that pushed.
    saved_pending = by_key(saved, join_names(prefix, "pending"), template)
    pending: dict[int, queue.PendingPushes] = {}
    for k in sorted({*template.pending, *saved_pending}):
        count, along, everywhere = None, None, None  # as many devices as before, anywhere
        if queued := template.pending.get(k):
            count, along, everywhere = queued.values[0].shape[0], queued.values[0].sharding, queued.count.sharding
        elif store.devices:
            count, along, everywhere = len(store.devices), split_over(store.devices), copies_on(store.devices)
        if k not in saved_pending:
            pushes = queue.start(store, k, count or 1)
        else:
            record = next(iter(saved_pending[k].values()))[0]
            key, staleness = record["words"].partition(":")[0], len(saved_pending[k]) - 1
            if staleness != store.staleness:
                raise ValueError(
                    f"{key}: values wait for {staleness} pushes, but the store of `like` has staleness "
                    f"{store.staleness}; make it with staleness={staleness}, or call kv.flush before saving"
                )
            arrays = {name: np.asarray(array) for name, (_, array) in saved_pending[k].items()}
            rows = max((a.shape[0] for a in arrays.values() if a.ndim), default=0)
            value = (rows, *stores.shapes_of(store)[k]), store.values[k].dtype
            expected = {"count": ((), np.dtype("int32")), **{f"values/{i}": value for i in range(staleness)}}
            if not rows or {name: (a.shape, a.dtype) for name, a in arrays.items()} != expected:
                raise ValueError(f"{key}: expected a count, and pending values with a row for each device")
            count_pushed, *values = [jnp.asarray(arrays[name]) for name in expected]
            pushes = queue.PendingPushes(tuple(values), count_pushed)
            pushes = pushes if count is None else queue.regroup(pushes, count)
        pending[k] = queue.PendingPushes(put(pushes.values, along), put(pushes.count, everywhere))
    return dataclasses.replace(store, residuals=residuals, pending=pending)


def _check_rules(template: KVStore, saved: dict[int, Saved], remarks: list[str]) -> None:
    """`ValueError` where a value was updated by another rule than that of the template. Other numbers are said."""
    differences = set[str]()
    for k, rule in rule_of_each(template).items():
        record, _ = saved[k][""]
        differences.add(difference := updaters._difference_of_rules(rule, record.get("rule")))
        if difference == "rule":
            raise ValueError(
                f"{record['words']}: it was saved with another optimizer than that of `like`; restore with that one, "
                "then jax.tree.unflatten(jax.tree.structure(new), jax.tree.leaves(restored))"
            )
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


# Without what belongs to the devices that pushed, which `complete` restores.
_bare = functools.partial(dataclasses.replace, residuals={}, pending={})
FORMATS[KVStore] = NodeFormat(slots, _bare, complete, adapt)
