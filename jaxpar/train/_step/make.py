"""`make_train_step`: a training step for a loss function. `start`: a step and its state in one call, for beginners."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import jax.numpy as jnp
from jax.sharding import Mesh

from ... import kv
from ..._core import checks
from ..._core.arguments import check_takes, did_you_mean
from ..._core.arrays import Device
from ..._core.calls import answers
from .device_step import DeviceStep
from .global_step import GlobalStep
from .gradient import LOSS_ARGUMENTS, Gradient, LossFn
from .local_sgd import LocalSGD, check_local_steps
from .nonfinite import ACTIONS, DynamicLossScale, Guard, check_loss_scale
from .state import IN_STORE, TrainState, create_state
from .train_step import TrainStep
from .virtual import AXIS, VirtualStep

if TYPE_CHECKING:
    import optax


Engine = Literal["auto", "pmap", "shard_map", "jit"]

_HINTS = {
    **dict.fromkeys(("optimizer", "tx", "learning_rate", "lr"), IN_STORE),
    **dict.fromkeys(("kind", "kvstore", "compression", "staleness"), "it belongs to the store, see jp.kv"),
    **dict.fromkeys(("dtype", "precision"), "call it compute_dtype"),
    **dict.fromkeys(("clip_norm", "max_grad_norm"), "give grad_transform=optax.clip_by_global_norm(1.0)"),
    "apply_fn": "train.classification_loss(apply_fn) makes a loss_fn",
    "batch_size": "train.fit takes it",
    "has_aux": "loss_fn always returns (loss, aux), where aux is a dict",
}


@answers("make_train_step", _HINTS)
def make_train_step(
    loss_fn: LossFn,
    *,
    engine: Engine = "auto",
    devices: Sequence[Device] | None = None,
    mesh: Mesh | None = None,
    axis_name: str | Sequence[str] = "data",
    grad_transform: optax.GradientTransformation | None = None,
    accumulate: int = 1,
    compute_dtype: Any = None,
    remat: bool | Callable[..., Any] = False,
    nonfinite: Literal["ignore", "skip", "stop"] = "ignore",
    loss_scale: float | Literal["dynamic"] | DynamicLossScale | None = None,
    local_steps: int | None = None,
    outer_optimizer: optax.GradientTransformation | None = None,
    unused: Literal["warn", "skip"] = "warn",
    virtual_shards: int | None = None,
) -> TrainStep:
    """A data-parallel training step over the devices of the state.

    Each device computes the gradient of the mean loss over its share of the batch, and pushes it divided by the number
    of devices. So the sum over the devices is the gradient of the mean over the batch. The store's updater applies it.

    Args:
        loss_fn: `loss_fn(params, batch, rng) -> (loss, aux)`: the mean loss over the examples of `batch`, which
            is one device's share, and a dict of further values to report. `rng` differs from step to step and
            from device to device. If the state has a `model_state`, it is
            `loss_fn(params, batch, rng, model_state) -> (loss, aux, new_model_state)`. The new state has the means
            over the devices of floating leaves. Other leaves must be the same on all devices. For a mean over what
            counts, such as tokens under a mask, the loss is a pair `(sum, weight)`. Then it is the sum of all sums
            divided by the sum of all weights, and the gradient is of that. Values of `aux` may be such pairs. A
            parameter named `step` gets the number of the step, int32, by keyword.
        engine: how the step of one device becomes that of all. All compute the same, see "Engines" below. "auto"
            takes `jit` if `mesh` is given or the values of the store are split over a mesh, else `shard_map`.
        devices: of the step. None: those of the state.
        mesh: for engine `jit`, in place of `devices`. None: that of the store, or else the one that `jax.set_mesh` has
            set, or else one axis over the devices.
        axis_name: the name of the axis over the devices, for collectives in `loss_fn`. For engine `jit` the axis of the
            mesh that the batch is split over, or several of them.
        grad_transform: an optax transform of all gradients together, after they are summed and before the
            updater. It is for transforms that couple keys, such as `optax.clip_by_global_norm`. It gets whole gradients
            and parameters in every kind of store. In kind `sharded` it may be a whole optimizer that is not
            elementwise, with `updaters.accumulate` in the store. Its state is whole on each device.
        accumulate: the number of microbatches that each device's share is cut in. They run one after the other, and
            the mean of their gradients is pushed once. Each gets an `rng` of its own and the `model_state` of the one
            before.
        compute_dtype: such as `jnp.bfloat16`. `loss_fn` gets the floating arrays of `params` and `batch` in it.
            The store, the gradients that are pushed, their sums and the loss stay float32. Under engine `jit` the
            compiler sums the gradients of the shares in `compute_dtype`.
        remat: True, or a policy of `jax.checkpoint_policies`. `loss_fn` is wrapped in `jax.checkpoint`, so the backward
            pass computes activations again, all or those that the policy does not save.
        nonfinite: what a NaN or infinite loss or gradient on any device does. `ignore`: nothing, it is pushed as
            any other number. `skip`: no device makes that update. Store, transform and model state stay as they are,
            the step is counted, and `metrics["skipped"]` is 1. `stop`: nothing changes from that step on, not even
            the number of the step. The error of `check_finite`, or of `fit`, has the state to go on with.
        loss_scale: a number that the loss is multiplied by. The gradients are divided by it before they are pushed.
            "dynamic", or a `DynamicLossScale`, adapts itself. For float16. A dynamic scale skips the updates that
            overflow, whatever `nonfinite` says. It stops only if the loss itself is not finite or the scale is at its
            least.
        local_steps: H. Every device makes H updates of its own, by the store's updater and with the mean gradient
            of its share of each batch, before all agree on new parameters. The store holds the parameters on which
            they agreed last, and `state.params`, `evaluate` and `fit` see these. `step.finish(state)` ends a round
            early. A `grad_transform` gets each device's own gradients. The metrics, and a `model_state`, are means
            over the devices at every step.
        outer_optimizer: with `local_steps`, an optax transform for the mean over the devices of (parameters at the
            start of the round - own parameters), such as `optax.sgd(0.7, momentum=0.9, nesterov=True)`, which is
            DiLoCo (Douillard et al. 2023). None averages the parameters.
        unused: what happens to a parameter that the loss does not depend on. Its gradient is zero, but weight decay or
            momentum would change it. `warn` names it once. `skip` leaves it and its part of the optimizer's state as
            they are, as MXNet's `ignore_stale_grad` does.
        virtual_shards: V. The same bits on any number of devices, in any processes, and by `pmap` and `shard_map`. The
            batch is cut in V fixed shards. `loss_fn` sees one of them, its `rng` is of the shard, and the means are
            over the shards. V must divide every batch, and the number of devices need not divide V. See "Virtual
            shards" below.

    Returns:
        `step(state, batch) -> (state, metrics)`, compiled once for each shape of a batch. `batch` is the global
        batch, a pytree of arrays with a common first axis that the number of devices divides. `state` is donated:
        the old state cannot be used again. `metrics` are the means over the devices of `loss` and of what is in
        `aux`, in float32 or wider. They are on the devices, and reading one waits for the step. They include
        `skipped` (0.0 or 1.0) if the step can skip, and `loss_scale` if it scales dynamically.

    Engines:
        `pmap` and `shard_map` run one program on each device and sum the gradients as the kind of the store says. Over
        several processes `pmap` runs that program by `shard_map`, as `jax.pmap` inside of a program knows the devices
        of its own process only. `jit` hands the whole step to the compiler, which spreads it by the shardings of the
        params. It is for params that do not fit one device, and for optimizers that need whole values of a store of
        kind `sharded`. A mesh that `jax.set_mesh` has set changes no engine. With each of them `loss_fn` sees one share
        of the batch, an `rng` of its own and its own model state, so batch norm and dropout mean the same. Two things
        differ under `jit`: a `custom_vjp` on a param sees the gradient of all shares, not of one, and keys of `rbg`
        draw other numbers. Engine `jit` refuses what needs the gradient of one device: kind `local`, compression, a
        staleness, `local_steps`.

    Virtual shards:
        The gradient of a shard and the update are programs of one device each, compiled once for each device of a
        process. A device computes its shards one after the other, and holds the logarithm of V of their gradients at
        most. The gradients are added in one binary tree over the numbers of the shards. What devices exchange is an
        all-to-all and an all-gather of the size of the params, for small params one all-gather. The bits are those of
        one version of jax on one kind of processor. `data.batches(..., virtual_shards=V)`, `fit` and `lr_find` deal
        the shards to any number of devices. Refused are kind `sharded`, a compression, a staleness, `local_steps`,
        engine `jit`, collectives in `loss_fn`, and `many`.

    Raises:
        ValueError: an unknown engine or another option out of its range. When called: a batch that cannot be
            divided.
        TypeError: an option of a wrong type, or a `compute_dtype` that is not floating. When called: a `loss_fn` that
            returns something else.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> from jaxpar import kv, train
        >>> def loss_fn(params, batch, rng):
        ...     return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean(), {}
        >>> step = train.make_train_step(loss_fn)
        >>> store = kv.from_params({"w": jnp.zeros(1)}, optimizer=optax.sgd(0.5))
        >>> state = train.create_state(store, 0, devices=jax.devices()[:2])
        >>> state, metrics = step(state, {"x": jnp.ones((4, 1)), "y": jnp.ones(4)})
        >>> float(metrics["loss"]), state.params["w"].tolist()
        (1.0, [1.0])
    """
    if not callable(loss_fn):
        raise TypeError(
            "make_train_step: expected the function loss_fn(params, batch, rng) itself, not what it returns; "
            f"got {checks.describe(loss_fn)}"
        )
    _check_loss_fn(loss_fn)
    checks.choice(engine, "make_train_step", "engine", get_args(Engine))
    axes = _check_axes(axis_name, engine, mesh, devices)
    chosen = None if devices is None else checks.check_devices(devices, "make_train_step")
    _check_options(accumulate, compute_dtype, remat, nonfinite)
    if grad_transform is not None:
        checks.transform(grad_transform, "make_train_step: grad_transform")
    check_local_steps(local_steps, outer_optimizer)
    scaling = check_loss_scale(loss_scale)
    dynamic = scaling if isinstance(scaling, DynamicLossScale) else None
    guard = Guard(nonfinite == "stop", dynamic) if nonfinite != "ignore" or dynamic else None
    gradient = Gradient(loss_fn, accumulate, compute_dtype, remat)
    checks.choice(unused, "make_train_step", "unused", ("warn", "skip"))
    shared = grad_transform, scaling, guard, unused, set[str]()
    virtual_shards = _check_virtual_shards(virtual_shards, engine, mesh, local_steps)
    device_step, global_step = DeviceStep(gradient, axes[0], *shared), None
    if virtual_shards is not None:
        device_step = VirtualStep(gradient, AXIS, *shared, virtual_shards)
    elif local_steps is not None:
        device_step = LocalSGD(gradient, axes[0], *shared, int(local_steps), outer_optimizer)
    else:
        global_step = GlobalStep(gradient, axes[0], *shared, axes=axes)
    if engine == "jit" and global_step is None:
        raise ValueError(
            "make_train_step: local_steps are updates of each device by itself, and engine 'jit' sees no single "
            "device; use engine 'pmap' or 'shard_map'"
        )
    return TrainStep(device_step, global_step, engine, axes[0], chosen, nonfinite, virtual_shards, mesh)


def _check_virtual_shards(virtual_shards: Any, engine: str, mesh: Any, local_steps: Any) -> int | None:
    """The option. It is refused beside what gives each number of devices bits of its own."""
    if virtual_shards is None:
        return None
    where = f"make_train_step: virtual_shards={virtual_shards!r}"
    checks.whole_number(virtual_shards, "make_train_step", "virtual_shards")
    if engine == "jit" or mesh is not None:
        raise ValueError(
            f"{where} fixes the order of all sums, and with engine 'jit' and mesh= the compiler chooses it; use engine "
            "'pmap' or 'shard_map' and devices="
        )
    if local_steps is not None:
        raise ValueError(
            f"{where} gives the same bits on any number of devices, and local_steps={local_steps!r} are updates of "
            "each device by itself; leave out one of them"
        )
    return int(virtual_shards)


def _check_loss_fn(loss_fn: Any) -> None:
    """`TypeError` unless it takes the arguments of a loss, with a model state or without."""
    what, hint = "make_train_step: loss_fn", "; rng is for dropout, and may be left unused"
    try:
        check_takes(loss_fn, LOSS_ARGUMENTS[:3], what, hint, also=("step",))
    except TypeError:
        with contextlib.suppress(TypeError):
            return check_takes(loss_fn, LOSS_ARGUMENTS, what, also=("step",))
        raise


def _check_axes(axis_name: Any, engine: str, mesh: Any, devices: Any) -> tuple[str, ...]:
    """The axes that a batch is split over."""
    if mesh is not None and (engine not in ("auto", "jit") or devices is not None):
        raise ValueError(
            f"make_train_step: mesh= is for engine 'jit' and stands in place of devices=; got engine={engine!r}"
            f"{', and devices' if devices is not None else ''}"
        )
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(f"make_train_step: mesh must be a jax.sharding.Mesh, got {checks.describe(mesh)}")
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    if not axes or not all(isinstance(name, str) for name in axes):
        raise TypeError(f"make_train_step: axis_name must be a name, or several, got {axis_name!r}")
    if len(axes) > 1 and engine in ("pmap", "shard_map"):
        raise ValueError(f"make_train_step: several axes {axes} are for engine 'jit'; engine {engine!r} has one")
    if mesh is not None and (unknown := [name for name in axes if name not in mesh.axis_names]):
        raise ValueError(
            f"make_train_step: axis_name={unknown[0]!r} is no axis of the mesh, which has {', '.join(mesh.axis_names)}"
        )
    return axes


def _check_options(accumulate: Any, compute_dtype: Any, remat: Any, nonfinite: Any) -> None:
    checks.whole_number(accumulate, "make_train_step", "accumulate")
    if compute_dtype is not None and not _is_floating(compute_dtype):
        raise TypeError(
            f"make_train_step: compute_dtype must be a floating dtype such as jnp.bfloat16, got {compute_dtype!r}"
        )
    if not isinstance(remat, bool) and not callable(remat):
        raise ValueError(
            f"make_train_step: remat must be True, False or a policy such as jax.checkpoint_policies.dots_saveable, "
            f"got {remat!r}"
        )
    checks.choice(nonfinite, "make_train_step", "nonfinite", ACTIONS)


def _is_floating(dtype: Any) -> bool:
    try:
        return bool(jnp.issubdtype(dtype, jnp.floating))
    except TypeError:  # no dtype
        return False


_TAKERS = (kv.from_params, create_state, make_train_step)
_NAMES = [
    {name for name, p in inspect.signature(taker).parameters.items() if p.kind is p.KEYWORD_ONLY}
    - {"optimizer", "updater"}
    for taker in _TAKERS
]


@answers("train.start")
def start(
    params: Any,
    optimizer: Any,
    loss_fn: Any,
    *,
    rng: Any = 0,
    compression: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[TrainState, TrainStep]:
    """The state before the first step, and the step: all that `fit` takes.

    It is `kv.from_params`, `train.create_state` and `train.make_train_step`, one after the other.

    Args:
        params: any pytree of arrays. It is copied.
        optimizer: an optax transform, or an optimizer of `jp.updaters`.
        loss_fn: as in `make_train_step`.
        rng: a random key, or an int to make one of.
        compression: as in `kv.set_gradient_compression`.
        options: those of the three functions, such as `devices=jax.devices()[:2]`, `kind="sharded"`,
            `sharding=jp.parallel.fsdp("data")`, `model_state=...`, `accumulate=4`, `compute_dtype=jnp.bfloat16`. An
            option that several of them have goes to each.

    Returns:
        (state, step), for `train.fit(state, step, data, ...)` or `state, metrics = step(state, batch)`.

    Raises:
        TypeError: an option that none of them has. The message names the nearest one. What they raise themselves.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jaxpar import train
        >>> def loss_fn(params, batch, rng):
        ...     return ((batch["x"] * params["w"] - batch["y"]) ** 2).mean(), {}
        >>> state, step = train.start({"w": jnp.zeros(())}, optax.sgd(0.25), loss_fn)
        >>> state, metrics = step(state, {"x": jnp.ones(8), "y": jnp.ones(8)})
        >>> float(metrics["loss"]), float(state.params["w"])
        (1.0, 0.5)
    """
    _check_known(options)
    of_store, of_state, of_step = ({k: v for k, v in options.items() if k in names} for names in _NAMES)
    if not callable(loss_fn) and callable(params):
        raise TypeError(
            "train.start: the order is train.start(params, optimizer, loss_fn); this loss_fn is no function"
        )
    step = make_train_step(cast(Any, loss_fn), **_without_mesh(of_step))
    store = kv.from_params(params, optimizer=optimizer, **of_store)
    if compression is not None:
        store = kv.set_gradient_compression(store, compression)
    return create_state(store, rng, **of_state), step


def _without_mesh(options: dict[str, Any]) -> dict[str, Any]:
    """The options of the step. A mesh of the store is that of engine `jit`, which needs no other word."""
    return {k: v for k, v in options.items() if k != "mesh" or options.get("engine", "auto") in ("auto", "jit")}


def _check_known(options: dict[str, Any]) -> None:
    known = sorted(set().union(*_NAMES) | {"compression", "rng"})
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known) or f"; known are {', '.join(known)}"
            raise TypeError(f"train.start: unknown option {name}={hint}")
