"""The state of training: everything that a step changes, as one pytree, and how its parts are placed."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ... import distributed, kv
from ..._core import checks, portable
from ..._core.arrays import Device, check_plain, is_traced, nbytes
from ..._core.calls import answers
from ..._core.text import plural
from ..._devices import processes
from ..._devices.donation import check_not_donated, is_donated
from ..._devices.mesh import auto_mesh, put_copy, split_over
from ..._devices.placement import to_host
from ..._devices.user_mesh import on_own_mesh
from ..._store import placing
from ..._store.store import copies_for, mesh_of_values, specs_of

if TYPE_CHECKING:
    import optax

IN_STORE = "it belongs to the store, kv.from_params(params, optimizer=optax.sgd(0.1))"
"""The answer to an optimizer, or its rate, that is given to a step, a state or a run."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that training changes. A pytree.

    Attributes:
        store: holds the parameters, the updater's state and the residuals of a compressor.
        step: int32, how many batches the store has seen.
        rng: a random key that never changes. Step t uses `fold_in(rng, t)`, so a resumed run draws the same numbers.
        transform: the state of the step's `grad_transform`, or ().
        model_state: what the model itself carries from step to step, such as the running statistics of batch
            norm, or ().
        loss_scale: `{"scale", "good_steps"}` of a step with `loss_scale="dynamic"`, else ().
        nonfinite: `{"found", "step", "skipped"}` of a step that can skip or stop, else (). `found` is float32
            (1 + floating keys,): on how many devices the loss and the gradient of each key were not finite in the
            bad step, zeros before. `step` is the number of that step, `skipped` how many updates were skipped.
        outer: `{"state", "since"}` of a step with `local_steps`, else (). `state` is that of the outer optimizer.
            `since`, int32, is how many updates each device has made since all agreed on the parameters in `store`.
        local: `{"values", "updater_state", "optimizer_state", "transform"}` of a step with `local_steps`, else ().
            The devices are the first axis.
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

    @property
    def params(self) -> Any:
        """The parameters as they were given to `kv.from_params`. `RuntimeError` if the state was donated.

        They are the arrays of the state, so the next step takes their memory. `kv.to_params(state.store)` copies them.
        """
        if not is_traced(self.store.values):
            check_not_donated(self.store.values, "state.params")
        return kv.to_params(self.store, copy=False)

    @property
    def eval_params(self) -> Any:
        """The parameters to evaluate, see `kv.eval_params`. `RuntimeError` if the state was donated."""
        if not is_traced(self.store.values):
            check_not_donated(self.store.values, "state.eval_params")
        return kv.eval_params(self.store, copy=False)

    def __repr__(self) -> str:
        rest = [f"{name}: {words}" for name, words in self._other_parts()]
        return "\n".join([f"TrainState({self._summary()})", repr(self.store), *rest])

    def _repr_html_(self) -> str:
        rest = "".join(f"<p>{name}: {html.escape(words)}</p>" for name, words in self._other_parts())
        return f"<div><p>TrainState({html.escape(self._summary())})</p>{self.store._repr_html_()}{rest}</div>"

    def _summary(self) -> str:
        if is_donated(self):
            return "donated to a later step; use the state that it returned"
        known = isinstance(self.step, jax.Array) and not is_traced(self.step)
        return f"step={int(self.step) if known else 'traced'}, rng={getattr(self.rng, 'dtype', self.rng)}"

    def _other_parts(self) -> Iterator[tuple[str, str]]:
        """The name of each part next to the store that holds arrays, and how much it holds."""
        for name in [field.name for field in dataclasses.fields(self)][3:]:
            leaves = jax.tree.leaves(getattr(self, name))
            if leaves:
                size = sum(nbytes(leaf) for leaf in leaves if hasattr(leaf, "dtype"))
                yield name, f"{plural(len(leaves), 'array')}, {size:,} bytes"


@answers("train.create_state", {"optimizer": IN_STORE})
@on_own_mesh
def create_state(
    store: kv.KVStore,
    rng: jax.Array | int,
    *,
    devices: Sequence[Device] | None = None,
    grad_transform: optax.GradientTransformation | None = None,
    model_state: Any = (),
) -> TrainState:
    """The state before the first step, copied onto the devices that will train.

    Args:
        store: made by `kv.from_params`. It stays valid, as the state holds copies.
        rng: a random key, or an int to make one of. Under engine `jit` a key of `rbg` or `unsafe_rbg` draws other
            numbers than under the other engines.
        devices: None takes the store's, or else all of them.
        grad_transform: the one given to `make_train_step`. If it is not given here, the first call of the step makes
            its state.
        model_state: a pytree of arrays that the model changes itself, such as the running statistics of batch
            norm. `loss_fn` then takes it as a fourth argument and returns the new one.

    Raises:
        TypeError: no store.
        ValueError: the store was not made by `kv.from_params`.
        RuntimeError: this is one of several processes of `python -m jaxpar launch` or Ray Train and has not joined the
            others. Call `jp.distributed.initialize()` first.

    Example:
        >>> import optax
        >>> from jaxpar import kv, models, train
        >>> params = models.lenet.init(jax.random.key(0))
        >>> state = train.create_state(kv.from_params(params, optimizer=optax.sgd(0.2)), 0)
        >>> int(state.step)
        0
    """
    if not isinstance(store, kv.KVStore):
        raise TypeError(
            f"train.create_state: expected a store, kv.from_params(params, optimizer=...); got {checks.describe(store)}"
        )
    if store.treedef is None:
        raise ValueError("train.create_state: the store must be made by kv.from_params, so that it knows the params")
    distributed.check_joined("train.create_state", "each would train a model of its own", launched=True)
    if devices is None:
        devices = store.devices or processes.devices()
    devices = checks.devices(devices, "train.create_state")
    rng = checks.random_key(rng, "train.create_state")
    transform: Any = ()
    if grad_transform is not None:
        tx = checks.transform(grad_transform, "train.create_state: grad_transform")
        transform = tx.init(with_gradients(kv.to_params(store)))
        transform = transform if jax.tree.leaves(transform) else ()  # as a step returns it
    model_state = () if model_state is None else model_state
    for path, leaf in jax.tree_util.tree_leaves_with_path(model_state):
        check_plain(leaf, f"train.create_state: model_state{jax.tree_util.keystr(path)}")
    state = TrainState(store, jnp.zeros((), jnp.int32), rng, transform, model_state)
    return place_state(state, tuple(devices))


def with_gradients(params: Any) -> Any:
    """The params that have gradients, the floating ones, with None in place of the others."""
    return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else None, params)


def place_state(state: TrainState, devices: tuple[Device, ...]) -> TrainState:
    """The state copied onto these devices."""
    rest = {f.name: getattr(state, f.name) for f in dataclasses.fields(state) if f.name not in ("store", "local")}
    if processes.to_share(rest, devices):
        rest = processes.from_first(rest)
    local = put_copy(regroup_local(state.local, len(devices)), split_over(devices))
    store = kv.place(state.store, devices)
    return TrainState(store, **everywhere(rest, store), local=local)


def place_on_mesh(state: TrainState, mesh: Mesh | None, other: Mesh) -> TrainState:
    """The state on a mesh, for engine `jit`: that of its store, or else `mesh`, or else `other`."""
    store = state.store
    if not store.shardings:
        mesh = mesh or other
        return place_state(dataclasses.replace(state, store=kv.place(store, mesh=mesh)), tuple(mesh.devices.flat))
    own = mesh_of_values(store)
    if mesh is not None and auto_mesh(mesh) != own:
        raise ValueError(
            f"train step: the state is on a mesh {dict(own.shape)}, and the step was made for "
            f"{dict(mesh.shape)}, or for other devices; place the store: kv.place(store, mesh=mesh)"
        )
    return state


def regroup_local(local: Any, count: int) -> Any:
    """The part `local` for another number of devices. Each gets the mean of all.

    The outer gradient depends only on the mean of the parameters. Integers, such as counts of steps, are those of the
    first device.
    """

    def mean(x: jax.Array) -> jax.Array:
        if x.shape[0] == count:
            return x
        x = jnp.asarray(to_host(x))
        value = x.mean(0, keepdims=True, dtype=x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x[:1]
        return jnp.broadcast_to(value, (count, *x.shape[1:]))

    return jax.tree.map(mean, local)


def everywhere(tree: Any, store: kv.KVStore) -> Any:
    """A copy of the arrays on each of the store's devices."""
    return put_copy(tree, copies_for(store))


def partition_specs(state: TrainState, axis_name: str) -> TrainState:
    """How each leaf of the state is laid out along the axis of the devices, in a state's structure."""
    store = kv.partition_specs(state.store, axis_name)
    local = jax.tree.map(lambda _: P(axis_name), state.local)
    return dataclasses.replace(jax.tree.map(lambda _: P(), state), store=store, local=local)


def leaf_shardings(state: TrainState) -> list[NamedSharding]:
    """The sharding of each leaf of the state, whose store has devices."""
    devices, copies = state.store.devices, copies_for(state.store)
    assert devices is not None
    store = placing.leaf_shardings(state.store)
    local = jax.tree.map(lambda _: split_over(devices), state.local)
    return jax.tree.leaves(dataclasses.replace(jax.tree.map(lambda _: copies, state), store=store, local=local))


def params_shapes(state: TrainState) -> Any:
    """The shapes and dtypes of `state.params`, of a donated state too."""
    specs = specs_of(state.store)
    return state.store.treedef.unflatten([specs[key] for key, _ in state.store.paths])


def check_is_state(state: Any, where: str) -> None:
    """`TypeError` for anything else than a state."""
    if not isinstance(state, TrainState):
        raise TypeError(
            f"{where}: expected a state, train.create_state(kv.from_params(params, optimizer=...), rng); "
            f"got {checks.describe(state)}"
        )


def explain_donated(error: RuntimeError, state: TrainState) -> None:
    """Raise what is better said of a state that was donated, or that shares arrays with one that was."""
    if "deleted" not in str(error):
        return
    shared = [f.name for f in dataclasses.fields(state) if is_donated(getattr(state, f.name))]
    if shared and not {"store", "step"} & set(shared):
        raise RuntimeError(
            f"train step: arrays in {' and '.join(shared)} of this state were donated to the step of another state, "
            "which shared them; give this one copies. kv.to_params(other.store) copies, other.params does not"
        )
    check_not_donated(state, "train step")


def carries(part: Any) -> bool:
    """Whether a part of a state is present. () is none."""
    return not (isinstance(part, tuple) and not part)


def _average_local(like: TrainState, saved: portable.Saved, remarks: list[str]) -> portable.Saved:
    """What was saved of local steps, for the number of devices of `like`."""
    wanted = jax.tree.leaves(like.local)
    own = {n: v for n, v in saved.items() if n.startswith("local/") and v[1].ndim}
    if not wanted or not own:
        return saved
    count, before = wanted[0].shape[0], next(iter(own.values()))[1].shape[0]
    if count == before:
        return saved
    remarks.append(
        f"the local parameters and updater states of {before} devices were averaged for {count}: they are in a round "
        "of local steps, and each belongs to its device"
    )
    new: portable.Saved = {}
    for name, (record, array) in own.items():
        array = np.asarray(regroup_local(jnp.asarray(array), count))
        new[name] = {**record, "shape": list(array.shape)}, array
    return {**saved, **new}


portable.register_adapter(TrainState, _average_local)
