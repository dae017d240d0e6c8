"""`make_train_step`: a training step for a loss function. `start`: a step and its state in one call, for beginners."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax.numpy as jnp
from jax.sharding import Mesh

from ... import kv
from ..._core import checks
from ..._core.arrays import Device
from ..._core.calls import answers, check_takes
from ..._core.text import did_you_mean
from .local_sgd import LocalSGD
from .loss import LOSS_ARGUMENTS, LossFn
from .nonfinite import DynamicLossScale, Guard
from .state import IN_STORE, TrainState, create_state
from .step import DeviceStep, GlobalStep, check_axes
from .train_step import TrainStep
from .virtual import VirtualStep

if TYPE_CHECKING:
    import optax


Engine = Literal["auto", "pmap", "shard_map", "jit"]

_HINTS = {
    **dict.fromkeys(("optimizer", "tx", "learning_rate", "lr"), IN_STORE),
    **dict.fromkeys(("kind", "kvstore", "compression", "staleness"), "give it to train.start or kv.from_params"),
    **dict.fromkeys(("dtype", "precision"), "write compute_dtype="),
    **dict.fromkeys(("clip_norm", "max_grad_norm"), "give grad_transform=optax.clip_by_global_norm(1.0)"),
    "apply_fn": "write loss_fn=train.classification_loss(apply_fn)",
    "batch_size": "give it to train.fit",
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
    """Make a data-parallel training step.

    Each device computes the gradient of the mean loss over its share of the batch, divides it by the number of devices
    and pushes it. So the sum over the devices is the gradient of the mean loss over the batch. The store's updater
    applies it.

    Args:
        loss_fn: `loss_fn(params, batch, rng) -> (loss, aux)`. `batch` is one device's share, `loss` the mean loss over
            its examples, and `aux` a dict of other values to report. `rng` differs between steps and between devices.
            If the state has a `model_state`, the signature is `loss_fn(params, batch, rng, model_state) -> (loss, aux,
            new_model_state)`. Floating leaves of the new model state are averaged over the devices. Other leaves must
            be equal on all devices. For a weighted mean, such as over unmasked tokens, `loss` is a pair `(sum,
            weight)`. Then the loss is the sum of all sums divided by the sum of all weights. Values of `aux` may be
            such pairs too. A parameter named `step` gets the number of the step, int32, by keyword.
        engine: `pmap`, `shard_map` or `jit`: how the step runs on all devices. All engines compute the same, see
            "Engines" below. "auto" takes `jit` if `mesh` is given or the values of the store are split over a mesh,
            else `shard_map`.
        devices: the devices of the step. None: the devices of the state.
        mesh: for engine `jit`, in place of `devices`. None: the mesh of the store, or else of `jax.set_mesh`, or else
            one axis over the devices.
        axis_name: the name of the axis over the devices, for collectives in `loss_fn`. For engine `jit`, the mesh axis
            or axes that split the batch.
        grad_transform: an optax transform of the summed gradients of all keys, before the updater. Use it for
            transforms that couple keys, such as `optax.clip_by_global_norm`. It gets whole gradients and parameters in
            every kind of store. In kind `sharded` it may be an optimizer that is not elementwise, with
            `updaters.accumulate` in the store. Its state is replicated.
        accumulate: the number of microbatches in each device's share. They run one after the other, and the mean of
            their gradients is pushed once. Each microbatch gets its own `rng` and the `model_state` of the previous
            microbatch.
        compute_dtype: the dtype, such as `jnp.bfloat16`, of floating arrays in `params` and `batch` for `loss_fn`. The
            store, the pushed gradients, their sums and the loss stay float32. Under engine `jit`, the compiler sums the
            gradients of the shares in `compute_dtype`.
        remat: True, or a policy of `jax.checkpoint_policies`: `loss_fn` is wrapped in `jax.checkpoint`. The backward
            pass then recomputes all activations, or the activations that the policy does not save.
        nonfinite: the effect of a NaN or infinite loss or gradient on any device. `ignore`: it is pushed as any other
            number. `skip`: no device makes the update. Store, transform and model state stay unchanged, the step
            counts, and `metrics["skipped"]` is 1. `stop`: the state, including `step`, stays unchanged from that step
            on. `fit` or `check_finite` then raises an error with the last good state.
        loss_scale: for float16: a number that multiplies the loss and divides the gradients before the push; or
            "dynamic" or a `DynamicLossScale`, which adapts the number. A dynamic scale skips updates that overflow, for
            any `nonfinite`. With `nonfinite="stop"`, the step stops only if the loss itself is not finite, or if a
            gradient overflows at the smallest scale.
        local_steps: H. Every device makes H local updates with the store's updater and the mean gradient of its own
            shares. Then the devices agree on new parameters. The store, `state.params`, `evaluate` and `fit` have the
            parameters of the last agreement. `step.finish(state)` ends a round early. A `grad_transform` gets each
            device's own gradients. Metrics and `model_state` are averaged over the devices at every step.
        outer_optimizer: with `local_steps`, an optax transform for the mean over the devices of (parameters at the
            start of the round - local parameters), such as `optax.sgd(0.7, momentum=0.9, nesterov=True)`, which is
            DiLoCo (Douillard et al. 2023). None averages the parameters.
        unused: the treatment of a parameter that the loss does not depend on. Its gradient is zero, but weight decay or
            momentum would change it. `warn`: a warning names it once. `skip`: the parameter and its optimizer state
            stay unchanged, as with MXNet's `ignore_stale_grad`.
        virtual_shards: V: results are bit-equal on any number of devices and processes, under `pmap` and `shard_map`.
            The batch is cut into V fixed shards. `loss_fn` sees one shard, with an `rng` for that shard, and means are
            over the shards. V must divide every batch. The number of devices need not divide V. See "Virtual shards"
            below.

    Returns:
        `step(state, batch) -> (state, metrics)`, compiled once for each shape of a batch. `batch` is the global
        batch, a pytree of arrays that share a first axis, whose length is a multiple of the number of devices. `state`
        is donated: do not use the old state again. `metrics` are the means over the devices of `loss` and of the values
        in `aux`, in float32 or wider. They are on the devices, and reading one waits for the step. They include
        `skipped` (0.0 or 1.0) if the step can skip, and `loss_scale` if the scale is dynamic.

    Engines:
        `pmap` and `shard_map` run one program on each device and sum the gradients according to the kind of the store.
        Over several processes, `pmap` runs the program by `shard_map`, because a nested `jax.pmap` sees only the
        devices of its own process. `jit` compiles the whole step for all devices, partitioned by the shardings of the
        params. Use `jit` for params that do not fit one device, and for optimizers that need whole values in a store of
        kind `sharded`. `jax.set_mesh` does not change the engine. With every engine, `loss_fn` sees one share of the
        batch with its own `rng` and model state, so batch norm and dropout behave the same. Two things differ under
        `jit`: a `custom_vjp` on a param sees the gradient of all shares, and `rbg` keys draw other numbers. Engine
        `jit` refuses options that need the gradient of one device: kind `local`, compression, staleness, `local_steps`.

    Virtual shards:
        The gradient of a shard and the update are single-device programs, compiled once for each device of a process. A
        device computes its shards one after the other, and holds at most about log2(V) gradients. The gradients are
        added in a fixed binary tree over the shard numbers. Devices exchange an all-to-all and an all-gather of the
        size of the params, or one all-gather for small params. Bits are equal for one version of jax on one kind of
        processor. `data.batches(..., virtual_shards=V)`, `fit` and `lr_find` distribute the shards over any number of
        devices. Virtual shards refuse kind `sharded`, compression, staleness, `local_steps`, engine `jit`, collectives
        in `loss_fn`, and `many`.

    Raises:
        ValueError: the engine is unknown, or an option is out of range. Raised by the step: the batch cannot be divided
            evenly.
        TypeError: an option has the wrong type, or `compute_dtype` is not floating. Raised by the step: `loss_fn`
            returns other values.

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
    where = "make_train_step"
    _check_loss_fn(loss_fn)
    checks.choice(engine, where, "engine", get_args(Engine))
    checks.choice(nonfinite, where, "nonfinite", ("ignore", "skip", "stop"))
    checks.choice(unused, where, "unused", ("warn", "skip"))
    checks.whole_number(accumulate, where, "accumulate")
    for name, count in (("local_steps", local_steps), ("virtual_shards", virtual_shards)):
        if count is not None:
            checks.whole_number(count, where, name)
    for name, tx in (("grad_transform", grad_transform), ("outer_optimizer", outer_optimizer)):
        if tx is not None:
            checks.transform(tx, f"{where}: {name}")
    if compute_dtype is not None and not jnp.issubdtype(compute_dtype, jnp.floating):
        raise TypeError(f"{where}: compute_dtype must be floating, as jnp.bfloat16, got {compute_dtype!r}")
    if not isinstance(remat, bool) and not callable(remat):
        raise ValueError(f"{where}: remat must be True, False or a policy of jax.checkpoint_policies, got {remat!r}")
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    _check_together(engine, mesh, devices, axes, local_steps, outer_optimizer, virtual_shards)
    chosen = None if devices is None else checks.devices(devices, where)
    scaling = DynamicLossScale() if isinstance(loss_scale, str) and loss_scale == "dynamic" else loss_scale
    if not isinstance(scaling, DynamicLossScale | None):
        wanted = "None, a number above 0, 'dynamic' or a train.DynamicLossScale"
        scaling = checks.number(scaling, where, "loss_scale", wanted, lambda x: 0 < x < math.inf)
    dynamic = scaling if isinstance(scaling, DynamicLossScale) else None
    options: dict[str, Any] = {
        "loss_fn": loss_fn,
        "axis_name": axes[0],
        "accumulate": accumulate,
        "compute_dtype": compute_dtype,
        "remat": remat,
        "grad_transform": grad_transform,
        "scaling": scaling,
        "guard": Guard(nonfinite == "stop", dynamic) if nonfinite != "ignore" or dynamic else None,
        "unused": unused,
    }
    global_step = None
    if virtual_shards is not None:
        device_step = VirtualStep(**options, shards=virtual_shards)
    elif local_steps is not None:
        device_step = LocalSGD(**options, steps=int(local_steps), outer=outer_optimizer)
    else:
        device_step, global_step = DeviceStep(**options), GlobalStep(**options, axes=axes)
    return TrainStep(device_step, global_step, engine, axes[0], chosen, nonfinite, virtual_shards, mesh)


def _check_together(
    engine: str, mesh: Any, devices: Any, axes: tuple[str, ...], local_steps: Any, outer: Any, virtual_shards: Any
) -> None:
    """`ValueError` for options of which one leaves no place for another."""
    own, fixed = "local_steps= updates each device separately", "virtual_shards= fixes the order of all sums"
    by_compiler = "with engine 'jit' and mesh= the compiler chooses them; use engine 'shard_map' and devices="
    is_mapped, is_jit = engine in ("pmap", "shard_map"), engine == "jit" or mesh is not None
    came = f"engine={engine!r}{', and devices' if devices is not None else ''}"
    faults = {
        f"mesh= is for engine 'jit' and replaces devices=; got {came}": mesh is not None
        and (is_mapped or devices is not None),
        f"several axes {axes} are for engine 'jit'; engine {engine!r} has one": len(axes) > 1 and is_mapped,
        f"{fixed}, and {own}; leave out one of them": None not in (virtual_shards, local_steps),
        f"{fixed}, and {by_compiler}": is_jit and virtual_shards is not None,
        f"{own}, and {by_compiler}": is_jit and local_steps is not None,
        "outer_optimizer needs local_steps=, which is None": local_steps is None and outer is not None,
    }
    for fault, is_there in faults.items():
        if is_there:
            raise ValueError(f"make_train_step: {fault}")
    if mesh is not None:
        check_axes(axes, mesh, "make_train_step")


def _check_loss_fn(loss_fn: Any) -> None:
    """`TypeError` unless it takes the arguments of a loss, with a model state or without."""
    what, hint = "make_train_step: loss_fn", "; rng is for dropout, and may stay unused"
    try:
        check_takes(loss_fn, LOSS_ARGUMENTS[:3], what, hint, also=("step",))
    except TypeError:
        with contextlib.suppress(TypeError):
            return check_takes(loss_fn, LOSS_ARGUMENTS, what, also=("step",))
        raise


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
    """Make the first state and the step for `fit`.

    It calls `kv.from_params`, `train.create_state` and `train.make_train_step`.

    Args:
        params: any pytree of arrays. The arrays are copied.
        optimizer: an optax transform, or an optimizer of `jp.updaters`.
        loss_fn: as in `make_train_step`.
        rng: a random key, or an int seed.
        compression: as in `kv.set_gradient_compression`.
        options: options of the three functions, such as `devices=jax.devices()[:2]`, `kind="sharded"`,
            `sharding=jp.parallel.fsdp("data")`, `model_state=...`, `accumulate=4`, `compute_dtype=jnp.bfloat16`. An
            option that several functions have is passed to each.

    Returns:
        (state, step), for `train.fit(state, step, data, ...)` or `state, metrics = step(state, batch)`.

    Raises:
        TypeError: an option is unknown. The message names the most similar option. The three functions raise their own
            errors.

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
    known = sorted(set().union(*_NAMES) | {"compression", "rng"})
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known) or f"; known are {', '.join(known)}"
            hint = f"; {kv._NOT_TRAINED[name]}" if name in kv._NOT_TRAINED else hint
            raise TypeError(f"train.start: unknown option {name}={hint}")
    of_store, of_state, of_step = ({k: v for k, v in options.items() if k in names} for names in _NAMES)
    if of_step.get("engine", "auto") not in ("auto", "jit"):
        of_step.pop("mesh", None)  # it is that of the store, of which these engines need no word
    step = make_train_step(loss_fn, **of_step)
    store = kv.from_params(params, optimizer=optimizer, **of_store)
    if compression is not None:
        store = kv.set_gradient_compression(store, compression)
    return create_state(store, rng, **of_state), step
