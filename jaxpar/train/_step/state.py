"""The state of training: everything that a step changes, as one pytree, and how its parts are placed."""

from __future__ import annotations

import copy
import dataclasses
import functools
import html
import importlib
import importlib.util
import warnings
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from ... import distributed, kv, updaters
from ..._core import checks, host, portable
from ..._core.arrays import Device, PyTree, check_plain, is_traced, tree_nbytes
from ..._core.text import plural
from ..._core.transfers import allows_transfers
from ..._devices import processes
from ..._devices.mesh import check_not_donated, is_donated, put_copy, split_over, to_host
from ..._devices.user_mesh import on_own_mesh
from ..._store import aggregate, store as stores

if TYPE_CHECKING:
    import optax

IN_STORE = "give the optimizer to train.start, or to the store: kv.from_params(params, optimizer=optax.sgd(0.1))"
"""The hint if an optimizer or its rate is given to a step, a state or a run."""


@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of training, as a pytree.

    Attributes:
        store: holds the parameters, the updater's state and the residuals of a compressor.
        step: int32, the number of steps so far.
        rng: a constant random key. Step t uses `fold_in(rng, t)`, so a resumed run draws the same numbers.
        transform: the state of the step's `grad_transform`, or ().
        model_state: what the model updates without gradients, such as the running statistics of batch norm, or ().
        loss_scale: `{"scale", "good_steps"}` of a step with `loss_scale="dynamic"`, else ().
        nonfinite: `{"found", "step", "skipped"}` of a step that can skip or stop, else (). `found` is float32 (1 +
            trained keys,): the number of devices on which the loss and the gradient of each key were not finite in the
            last bad step, or zeros. `step` is the number of that step. `skipped` counts the skipped updates.
        outer: `{"state", "since"}` of a step with `local_steps`, else (). `state` is the state of the outer optimizer.
            `since`, int32, counts the updates of each device since the last agreement.
        local: `{"values", "updater_state", "optimizer_state", "transform"}` of a step with `local_steps`, else ().
            The first axis runs over the devices.
        module: what puts a whole module together again, without arrays, or ().
    """

    store: kv.KVStore
    step: jax.Array
    rng: jax.Array
    transform: Any = ()
    model_state: Any = ()
    loss_scale: Any = ()
    nonfinite: Any = ()
    outer: Any = ()
    local: Any = ()
    module: Any = ()

    @property
    def model(self) -> Any:
        """The module that was given to `train.start`, in evaluation mode, or the params if these were given.

        It has the values of `eval_params` and `model_state`, which the next step donates.
        """
        params = self.eval_params
        return self.module.evaluated(params, self.model_state) if carries(self.module) else params

    @property
    def opt_state(self) -> Any:
        """The state of the optimizer. Of an optimizer of `jp.updaters`, it is a dict with that of each key.

        Do not assign into its dicts, which of an optax optimizer changes nothing: see `updaters.set_learning_rate`.
        """
        check_not_donated(self.store, "state.opt_state")
        has_one = isinstance(self.store.updater, updaters._TreeOptimizer)
        return stores.whole_state(self.store) if has_one else self.store.updater_state

    @property
    def params(self) -> Any:
        """The parameters, as the pytree given to `kv.from_params`.

        The next step donates these arrays. `kv.to_params(state.store)` makes copies. Assigning into its dicts changes
        nothing in the state.
        """
        check_not_donated(self.store.values, "state.params")
        return kv.to_params(self.store, copy=False)

    @property
    def eval_params(self) -> Any:
        """The parameters to evaluate, see `kv.eval_params`. `RuntimeError` if the state was donated."""
        check_not_donated(self.store.values, "state.eval_params")
        return kv.eval_params(self.store, copy=False)

    # Devices, and the functions of most optimizers, cannot be pickled. Copies are made without that.
    def __reduce__(self) -> Any:
        raise TypeError(
            "a TrainState cannot be pickled; write checkpoint.save(path, state), or pickle jax.device_get(state.params)"
        )

    def __copy__(self) -> TrainState:
        return dataclasses.replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainState:
        return jax.tree.map(lambda leaf: copy.deepcopy(leaf, memo), self)

    def __dir__(self) -> list[str]:
        """What Tab lists: all but the parts that a step keeps for itself, which can be read all the same."""
        return sorted({*super().__dir__()} - {"transform", "nonfinite", "outer", "local", "module"})

    def __repr__(self) -> str:
        about_state, *about_fields = self._lines()
        return "\n".join([about_state, repr(self.store), *about_fields])

    def _repr_html_(self) -> str:
        about_state, *about_fields = [f"<p>{html.escape(line)}</p>" for line in self._lines()]
        elements = [about_state, self.store._repr_html_(), *about_fields]
        # Flax brings treescope. It reads the values, which one of several processes cannot do alone. A stack of states,
        # as `jax.vmap` makes one, has no params of its own.
        is_readable = processes.count() == 1 and not is_donated(self) and not is_traced(self)
        is_readable = is_readable and np.ndim(self.step) == 0
        if is_readable and importlib.util.find_spec("treescope"):
            with warnings.catch_warnings(action="ignore"):  # it looks at old names of NumPy
                treescope: Any = importlib.import_module("treescope")
                tree = treescope.render_to_html(self.params, ignore_exceptions=True)
            elements.append(f"<details><summary>params</summary>{tree}</details>")
        return f"<div>{''.join(elements)}</div>"

    def _lines(self) -> list[str]:
        """A line about the state, and one about each part next to the store that holds arrays."""
        summary = "donated to a later step; use the state that it returned"
        if not is_donated(self):
            has_value = isinstance(self.step, jax.Array) and not is_traced(self.step)
            # What `jax.vmap(step)` returns is a stack of states.
            step = self.step.tolist() if has_value else "traced"
            summary = f"step={step}, rng={getattr(self.rng, 'dtype', self.rng)}"
        lines = [f"TrainState({summary})"]
        for field in dataclasses.fields(self)[3:]:
            tree = getattr(self, field.name)
            if count := len(jax.tree.leaves(tree)):
                lines.append(f"{field.name}: {plural(count, 'array')}, {tree_nbytes(tree):,} bytes")
        return lines


# Its first leaf is the `rng`. All leaves behind it change in a step, whose program takes over their memory:
# `rng, *donated = jax.tree.leaves(state)`.
_BEHIND = [field.name for field in dataclasses.fields(TrainState) if field.name != "rng"]
jax.tree_util.register_dataclass(TrainState, ["rng", *_BEHIND], [])


@allows_transfers
@on_own_mesh
def create_state(
    store: kv.KVStore,
    rng: jax.Array | int,
    *,
    devices: Sequence[Device] | None = None,
    grad_transform: optax.GradientTransformation | None = None,
    model_state: Any = (),
) -> TrainState:
    """Make the first state, as copies on the training devices.

    Args:
        store: made by `kv.from_params`. It stays valid, because the state holds copies.
        rng: a random key, or an int seed.
        devices: the training devices. None: the devices of the store, or else all devices.
        grad_transform: as given to `make_train_step`. Without it, the first call of the step adds the state of the
            transform.
        model_state: a pytree of arrays that the model updates without gradients, see `make_train_step`.

    Raises:
        TypeError: `model_state` has a raw random key, uint32[2].
        ValueError: the store was not made by `kv.from_params`.
        RuntimeError: this process of `python -m jaxpar launch` or Ray Train has not joined the others by
            `jp.distributed.initialize()`.

    Example:
        >>> import optax
        >>> from jaxpar import kv, models, train
        >>> params = models.lenet.init(jax.random.key(0))
        >>> state = train.create_state(kv.from_params(params, optimizer=optax.sgd(0.2)), 0)
        >>> int(state.step)
        0
    """
    stores.check_is_store(store, "train.create_state")
    if store.treedef is None:
        raise ValueError("train.create_state: the store must be made by kv.from_params, so that it knows the params")

    # Where the state goes, and its random key.
    if devices is None:
        devices = store.devices or processes.devices()
    devices = checks.devices(devices, "train.create_state")
    rng = checks.random_key(rng, "train.create_state")

    # The state of the transform. One without arrays is (), as a step returns it: else the second step would be another
    # program.
    transform: PyTree = ()
    if grad_transform is not None:
        tx = checks.transform(grad_transform, "train.create_state: grad_transform")
        transform = tx.init(trained_params(store))
        transform = transform if jax.tree.leaves(transform) else ()

    # The model state. Shards get keys of their own by the type of a key, and raw ones would give all the same numbers.
    model_state = () if model_state is None else model_state
    for path, leaf in jax.tree_util.tree_leaves_with_path(model_state):
        name = f"train.create_state: model_state{jax.tree_util.keystr(path)}"
        check_plain(leaf, name)
        if getattr(leaf, "dtype", None) == np.uint32 and leaf.shape == (2,):
            raise TypeError(
                f"{name}: uint32[2] is a raw random key, from which all devices draw the same; give "
                "jax.random.wrap_key_data(key), or, if it is no key, another dtype or shape"
            )
    model_state = host.own_copies(model_state, "train.create_state: model_state")

    state = TrainState(store, jnp.zeros((), jnp.int32), rng, transform, model_state)
    return place_state(state, tuple(devices))


def whole_params(store: kv.KVStore, axis_name: str, but: Container[int] = ()) -> PyTree:
    """The params inside of a program. Those that are cut into rows are gathered over the mapped axis, `but` these."""
    rows = stores.rows_of(store) if stores.is_in_rows(store) else {}
    chunks = {k: store.values[k].reshape(-1) for k, _ in store.paths if k in rows and k not in but}
    values = {**store.values, **(aggregate.gather(store, chunks, axis_name) if chunks else {})}
    return store.treedef.unflatten([values[k] for k, _ in store.paths])


def trained_params(store: kv.KVStore) -> PyTree:
    """The params that have gradients, with None in place of the others."""
    return stores.tree_of(store, dict(enumerate(jax.tree.leaves(kv.to_params(store)))))


def is_floating(x: jax.Array) -> bool:
    """Whether an array has a gradient or a mean: of floats or complex numbers."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def place_state(state: TrainState, devices: tuple[Device, ...]) -> TrainState:
    """The state copied onto these devices. `RuntimeError` in a process that has not joined its run."""
    distributed.check_joined("train.create_state", "each process would train its own model", launched=True)
    # Processes that made their params by themselves would begin with different ones: those of the first are taken.
    replicated = {f.name: getattr(state, f.name) for f in dataclasses.fields(state) if f.name not in ("store", "local")}
    if processes.to_share(replicated, devices):
        replicated = processes.from_first(replicated)
    # Each part as it lies in a program: a row of `local` on each device, the store as its kind has it, copies of the
    # others.
    local = put_copy(regroup_local(state.local, len(devices)), split_over(devices))
    store = kv.place(state.store, devices)
    return TrainState(store, **put_copy(replicated, stores.sharding_of(store)), local=local)


def regroup_local(local: PyTree, count: int) -> PyTree:
    """The part `local` for another number of devices. Each gets the mean of all."""
    # The outer gradient depends only on the mean of the parameters. Integers, such as counts of steps, are those of the
    # first device.

    def mean(x: jax.Array) -> jax.Array:
        if x.shape[0] == count:
            return x
        x = jnp.asarray(to_host(x))
        value = x.mean(0, keepdims=True, dtype=x.dtype) if is_floating(x) else x[:1]
        return jnp.broadcast_to(value, (count, *x.shape[1:]))

    return jax.tree.map(mean, local)


def leaf_shardings(state: TrainState) -> TrainState:
    """The state, whose store has devices, with the sharding of each leaf in place of the leaf."""
    devices, replicated = state.store.devices, stores.sharding_of(state.store)
    assert devices is not None
    # In the store each leaf has the layout of its value. What is `local` has the devices as first axis. All else is
    # replicated.
    store = jax.tree.map(functools.partial(stores.sharding_of, state.store), stores.layout_of_each(state.store))
    local = jax.tree.broadcast(split_over(devices), state.local)
    return dataclasses.replace(jax.tree.broadcast(replicated, state), store=store, local=local)


def shapes_on(tree: PyTree, shardings: PyTree) -> PyTree:
    """The shapes and dtypes that the arrays of a pytree have in a program, each with its sharding, or all with one."""

    def shape(x: jax.Array, sharding: Sharding | None) -> jax.ShapeDtypeStruct:
        x = jax.typeof(x)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type)

    return jax.tree.map(shape, tree, jax.tree.broadcast(shardings, tree))


def check_is_state(state: object, caller: str) -> None:
    """`TypeError` for anything else than a state, `ValueError` for a stack of states."""
    if not isinstance(state, TrainState):
        raise TypeError(f"{caller}: expected a state, train.create_state(store, rng), got {checks.describe(state)}")
    if shape := np.shape(state.step):
        raise ValueError(
            f"{caller}: this is a stack of {shape[0]} states, as jax.vmap returns it; take one of them, "
            "jax.tree.map(lambda x: x[0], state), or map over them, jax.vmap(step)(state, batches)"
        )


def carries(tree: PyTree) -> bool:
    """Whether a part of a state is present. () is none."""
    return not (isinstance(tree, tuple) and not tree)


def _average_local(template: TrainState, saved: portable.Saved, remarks: list[str]) -> portable.Saved:
    """What was saved of local steps, for the number of devices of the template."""
    # Each device had params of its own. On another number of devices there is no state that equals it, and the mean is
    # what the devices would have agreed on.
    saved = kv._with_wide_averages(template.local, saved, "local", remarks)
    leaves = jax.tree.leaves(template.local)
    local = {name: v for name, v in saved.items() if name.startswith("local/") and v[1].ndim}
    if not leaves or not local:
        return saved
    count, saved_count = leaves[0].shape[0], next(iter(local.values()))[1].shape[0]
    if count == saved_count:
        return saved
    remarks.append(
        "the state was saved within a round of local steps, with separate parameters and updater states on "
        f"{saved_count} devices; they were averaged for {count}"
    )
    averaged: portable.Saved = {}
    for name, (record, array) in local.items():
        new = np.asarray(regroup_local(jnp.asarray(np.asarray(array)), count))
        averaged[name] = {**record, "shape": list(new.shape)}, new
    return saved | averaged


portable.ADAPTERS[TrainState] = _average_local
