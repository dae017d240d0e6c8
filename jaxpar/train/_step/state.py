"""The state of training: everything that a step changes, as one pytree, and where its parts lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from ... import distributed, kv
from ..._core import checks, portable
from ..._core.arrays import Device, is_traced
from ..._devices import processes
from ..._devices.donation import check_not_donated
from ..._devices.mesh import STORE_AXIS, copied, mesh_of
from ..._devices.placement import to_host

if TYPE_CHECKING:
    import optax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that training changes; a pytree.

    Attributes:
        store: holds the parameters, the updater's state and the residuals of a compressor.
        step: int32, how many batches the store has seen.
        rng: a random key that stays as it is; step t uses `fold_in(rng, t)`, so a run that is resumed draws
            the same numbers.
        transform: the state of the step's `grad_transform`, () where there is none.
        model_state: what the model itself carries from step to step, such as the running statistics of batch
            norm; () where it carries nothing.
        loss_scale: `{"scale", "good_steps"}` of a step with `loss_scale="dynamic"`, else ().
        nonfinite: float32 (1 + floating keys,) of a step with `nonfinite="stop"`, else (): zeros until a step
            finds a number that is not finite, then on how many devices the loss and the gradient of each key
            were not.
        outer: of a step with `local_steps`, else (): `state`, that of the outer optimizer, and `since`, int32, how
            many updates every device has made by itself since all agreed on the parameters in `store`.
        local: of a step with `local_steps`, else (): the `values`, `updater_state` and `transform` of each device,
            which are the first axis.
    """

    store: kv.KVStore
    step: jax.Array
    rng: jax.Array
    # By factories: a default that is an attribute of the class would hide a part that is not put together yet.
    transform: Any = dataclasses.field(default_factory=tuple)
    model_state: Any = dataclasses.field(default_factory=tuple)
    loss_scale: Any = dataclasses.field(default_factory=tuple)
    nonfinite: Any = dataclasses.field(default_factory=tuple)
    outer: Any = dataclasses.field(default_factory=tuple)
    local: Any = dataclasses.field(default_factory=tuple)

    @property
    def params(self) -> Any:
        """The parameters as they were given to `kv.from_params`; `RuntimeError` where a step took the state."""
        if not is_traced(self.store.values):
            check_not_donated(self.store.values, "state.params")
        return kv.to_params(self.store)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A part of a state that a step made: they are put together when one of them is first asked for."""
            if name not in self.__dataclass_fields__ or "_apart" not in vars(self):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            vars(self).update(vars(vars(self)["_apart"].together(self.rng)))
            return vars(self)[name]

    def __repr__(self) -> str:
        from .state_display import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from .state_display import as_html

        return as_html(self)


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
        store: made by `kv.from_params`; it stays valid, the state holds copies.
        rng: a random key, or an int to make one of.
        devices: None takes the store's, or else all of them.
        grad_transform: the one given to `make_train_step`; the step makes the state of it at its first call
            where it is not given here.
        model_state: a pytree of arrays that the model changes itself, such as the running statistics of batch
            norm. Where it is given, `loss_fn` takes it as a fourth argument and returns the new one.

    Raises:
        ValueError: the store was not made by `kv.from_params`.
        RuntimeError: one of several processes of `python -m jaxpar launch` that has not joined the others, so that each
            would train a model of its own: call `jp.distributed.initialize()` first.

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
        devices = store.devices or tuple(jax.devices())
    devices = checks.devices(devices, "train.create_state")
    rng = jax.random.key(rng) if isinstance(rng, (int, np.integer)) else rng
    transform = () if grad_transform is None else grad_transform.init(kv.to_params(store))
    model_state = () if model_state is None else model_state
    state = TrainState(store, jnp.zeros((), jnp.int32), rng, transform, model_state)
    return placed(state, tuple(devices))


def _rest(state: TrainState) -> dict[str, Any]:
    """What of a state each device has a copy of, beside the store."""
    return {f.name: getattr(state, f.name) for f in dataclasses.fields(state) if f.name not in ("store", "local")}


def placed(state: TrainState, devices: tuple[Device, ...]) -> TrainState:
    """The state copied onto these devices."""
    rest = _rest(state)
    if processes.to_share(rest, devices):
        rest = processes.from_first(rest)
    local = copied(regrouped(state.local, len(devices)), NamedSharding(mesh_of(devices), P(STORE_AXIS)))
    return TrainState(kv.place(state.store, devices), **everywhere(rest, devices), local=local)


def regrouped(local: Any, count: int) -> Any:
    """What devices have for themselves, for another number of them: each takes the mean of all.

    The mean of the parameters is all that the outer gradient depends on. Integers, such as counts of steps, are
    those of the first device.
    """

    def shared(x: jax.Array) -> jax.Array:
        if x.shape[0] == count:
            return x
        x = jnp.asarray(to_host(x))
        mean = x.mean(0, keepdims=True, dtype=x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x[:1]
        return jnp.broadcast_to(mean, (count, *x.shape[1:]))

    return jax.tree.map(shared, local)


def everywhere(tree: Any, devices: tuple[Device, ...]) -> Any:
    """A copy of the arrays on each of the devices."""
    return copied(tree, NamedSharding(mesh_of(devices), P()))


def specs(state: TrainState, axis_name: str) -> list[P]:
    """How each leaf of the state lies along the axis of the devices."""
    store, rest = jax.tree.leaves(kv.partition_specs(state.store, axis_name)), jax.tree.leaves(_rest(state))
    return store + [P() for _ in rest] + [P(axis_name) for _ in jax.tree.leaves(state.local)]


def carries(part: Any) -> bool:
    """Whether a part of a state is there; () stands for none."""
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
        array = np.asarray(regrouped(jnp.asarray(array), count))
        new[name] = {**record, "shape": list(array.shape)}, array
    return {**saved, **new}


portable.register_adapter(TrainState, _average_local)
