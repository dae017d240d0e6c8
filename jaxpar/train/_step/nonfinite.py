"""What happens when a loss or gradient is not finite on some device: no device updates, and the keys are named.

Loss scaling keeps the small gradients of float16 from becoming zero. A dynamic scale falls when gradients overflow.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from ..._core import checks
from ..._core.arrays import Tree
from ..._core.transfers import allows_transfers
from ..._devices.user_mesh import on_own_mesh
from ..._store.store import trained_keys
from ...kv import KVStore
from .loss import Mean, Metrics
from .state import TrainState, carries, check_is_state


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that adapts: it grows until gradients overflow.

    The scale multiplies the loss before differentiation and divides the gradients. After `period` good steps in a row,
    the scale is multiplied by `factor`. If a gradient overflows, the scale is divided by `factor`, and the update is
    skipped. Source: Micikevicius et al. 2018, "Mixed precision training", section 3.2.

    Attributes:
        initial: the scale at the first step. A power of two avoids rounding.
        period: the number of good steps before the scale grows.
        factor: the factor of growth, above 1.
        least, most: the bounds of the scale.

    Example:
        >>> scaling = DynamicLossScale(initial=8.0, period=2)
        >>> state = scaling.start()
        >>> for overflow in (False, False, True):
        ...     state = scaling.next_state(state, jnp.array(overflow))
        ...     print(state["scale"], state["good_steps"])
        8.0 1
        16.0 0
        8.0 0
    """

    initial: float = 2.0**15
    period: int = 2000
    factor: float = 2.0
    least: float = 1.0
    most: float = 2.0**24

    def __post_init__(self) -> None:
        # A factor of 1 or less would never end an overflow, and each step of the run would be skipped.
        caller = "train.DynamicLossScale"
        numbers: dict[str, float] = {"period": checks.whole_number(self.period, caller, "period")}
        numbers["factor"] = checks.number(self.factor, caller, "factor", "a number above 1", lambda n: 1 < n < math.inf)
        for name in ("initial", "least", "most"):
            number = getattr(self, name)
            numbers[name] = checks.number(number, caller, name, "a number above 0", lambda n: 0 < n < math.inf)
        for name, number in numbers.items():  # 2**15 is 2.0**15: two that are equal are described alike
            object.__setattr__(self, name, number)
        if not self.least <= self.initial <= self.most:
            raise ValueError(f"{caller}: expected least <= initial <= most, got {self}")

    def start(self) -> dict[str, jax.Array]:
        """The first `state.loss_scale`: float32 `scale` and int32 `good_steps`."""
        return {"scale": jnp.float32(self.initial), "good_steps": jnp.int32(0)}

    def next_state(self, state: dict[str, jax.Array], overflow: jax.Array) -> dict[str, jax.Array]:
        """`state.loss_scale` after a step. `overflow`: whether a gradient was not finite."""
        scale, good_steps = state["scale"], state["good_steps"] + 1
        is_period_over = good_steps >= self.period
        grown = jnp.where(is_period_over, jnp.minimum(scale * self.factor, self.most), scale)
        return {
            "scale": jnp.where(overflow, jnp.maximum(scale / self.factor, self.least), grown),
            "good_steps": jnp.where(overflow | is_period_over, 0, good_steps),
        }


class NonFiniteError(FloatingPointError):
    """The loss or a gradient of a step is NaN or infinite.

    Attributes:
        step: the number of the step, from 0.
        names: "loss" if the loss was not finite, and the paths of parameters whose gradients were not finite.
        state: a valid `TrainState`. After `nonfinite="stop"` it is bit-equal to the state before the step.
    """

    def __init__(self, step: int, names: tuple[str, ...], state: TrainState, consequence: str):
        self.step: int = step
        self.names: tuple[str, ...] = names
        self.state: TrainState = state
        has_loss = names[:1] == ("loss",)
        gradients, which = names[has_loss:], ["the loss"] * has_loss
        if gradients:
            more = f" and {len(gradients) - 8} more" if len(gradients) > 8 else ""
            which.append(f"the gradients of {', '.join(map(repr, gradients[:8]))}{more}")
        super().__init__(f"train step {step} (the first is 0): not finite: {' and '.join(which)}; {consequence}")


@dataclasses.dataclass(frozen=True)
class Guard:
    """Decides, the same on all devices, whether the update of a step is made.

    What a step does that is bad, which is one with a loss or a gradient that is not finite on some device:

    | `nonfinite`  | `loss_scale` | bad step                                                     | noted in the state |
    |--------------|--------------|--------------------------------------------------------------|--------------------|
    | ignore       | not dynamic  | its update is made; there is no guard                        | nothing            |
    | skip         | not dynamic  | the step counts without its update                           | the last bad step  |
    | ignore, skip | dynamic      | the same, and the scale falls                                | the last bad step  |
    | stop         | not dynamic  | nothing changes from here on, also in later steps            | the first bad step |
    | stop         | dynamic      | as "stop" if the loss itself is not finite, or the scale is  | the first step     |
    |              |              | the least one; else as "skip, dynamic": a smaller scale may  | that stopped       |
    |              |              | cure the overflow of a gradient                              |                    |
    """

    stop: bool
    scaling: DynamicLossScale | None = None  # the dynamic loss scale

    def start(self, store: KVStore) -> dict[str, jax.Array]:
        """The part `nonfinite` of a state before the first step."""
        flags = jnp.zeros(1 + len(_parameter_names(store)), jnp.float32)
        return {"found": flags, "step": jnp.int32(-1), "skipped": jnp.int32(0)}

    def __call__(self, old: TrainState, new: TrainState, flags: jax.Array) -> tuple[TrainState, Metrics]:
        """The next state, out of those before and after the update, and what the guard reports of the step.

        `flags` is float32 (1 + trained keys,): the number of devices on which loss or gradient were not finite. All is
        alike on all devices, or they would part.
        """
        # Whether this step is bad, and whether it or an earlier one ends the run. See the table. The host learns of a
        # bad step some steps later, so those after it must change nothing either.
        is_bad = (flags > 0).any()
        already_stopped, stop_now = jnp.array(False), jnp.array(False)
        if self.stop:
            already_stopped = (old.nonfinite["found"] > 0).any()
            stop_now = is_bad
            if self.scaling is not None:
                stop_now = is_bad & ((flags[0] > 0) | (old.loss_scale["scale"] <= self.scaling.least))
        is_stopped = already_stopped | stop_now

        # A bad step is skipped: the old state stays, except its number and what is noted of the step.
        skip_update = is_bad | already_stopped
        state = _where(skip_update, old, new)
        is_noted = stop_now & ~already_stopped if self.stop else is_bad
        nonfinite = {
            "found": jnp.where(is_noted, flags, old.nonfinite["found"]),
            "step": jnp.where(is_noted, old.step, old.nonfinite["step"]),
            "skipped": old.nonfinite["skipped"] + (is_bad & ~is_stopped).astype(jnp.int32),
        }
        state = dataclasses.replace(state, step=jnp.where(is_stopped, old.step, new.step), nonfinite=nonfinite)

        # The loss scale of the next step. A bad step is reported with the scale that it had.
        reported = {"skipped": skip_update.astype(jnp.float32)}
        if self.scaling is not None:
            reported["loss_scale"] = old.loss_scale["scale"]
            loss_scale = self.scaling.next_state(old.loss_scale, is_bad)
            state = dataclasses.replace(state, loss_scale=_where(is_stopped, old.loss_scale, loss_scale))
        return state, reported


def nonfinite_flags(
    store: KVStore, loss: jax.Array | Mean, pushed: dict[int, jax.Array], summed: dict[int, jax.Array]
) -> jax.Array:
    """float32 (1 + trained keys,): 1 where this device's loss, pushed gradient or its sum, if given, is not finite."""
    is_bad = [~jnp.isfinite(jnp.stack(jax.tree.leaves(loss))).all()]  # a Mean has two numbers
    for k in trained_keys(store):
        # `unused="skip"` pushes nothing for a param that the loss does not depend on.
        is_finite = jnp.isfinite(pushed[k]).all() if k in pushed else jnp.array(True)
        is_bad.append(~(is_finite & jnp.isfinite(summed[k]).all() if k in summed else is_finite))
    return jnp.stack(is_bad).astype(jnp.float32)


@allows_transfers
@on_own_mesh
def check_finite(metrics: Mapping[str, jax.Array | float], state: TrainState) -> None:
    """Raise an error if a step had numbers that are not finite.

    Use it in your own loop; `fit` calls it for a step with `nonfinite="stop"`. Each call waits for the step. With
    "stop", a call every hundred steps is enough, because the state does not change after a bad step.

    Args:
        metrics: the metrics that the step returned.
        state: the state that the step returned, or a later state.

    Raises:
        NonFiniteError: a `FloatingPointError` with the step, the keys and a valid state.

    Example:
        >>> import optax
        >>> from jaxpar import kv, train
        >>> def loss_fn(params, batch, rng):
        ...     return (params["w"] * batch).mean(), {}
        >>> step = train.make_train_step(loss_fn, nonfinite="stop")
        >>> state = train.create_state(kv.from_params({"w": jnp.ones(())}, optimizer=optax.sgd(0.1)), 0)
        >>> state, metrics = step(state, jnp.full(jax.device_count(), jnp.inf))
        >>> try:
        ...     train.check_finite(metrics, state)
        ... except FloatingPointError as error:
        ...     print(error.step, error.names, float(error.state.params["w"]))
        0 ('loss', 'w') 1.0
    """
    check_is_state(state, "check_finite")
    if not carries(state.nonfinite):
        if not np.isfinite(float(metrics["loss"])):
            raise NonFiniteError(int(state.step) - 1, ("loss",), state, "its update was made")
        return
    if not jax.device_get(metrics["skipped"]):
        return
    noted = jax.device_get(state.nonfinite)
    if not noted["found"].any():
        return  # an overflow on the way to the right loss scale
    flagged = zip(("loss", *_parameter_names(state.store)), noted["found"], strict=True)
    names = tuple(name for name, count in flagged if count)
    bad_step = int(noted["step"])
    if bad_step != int(state.step):
        raise NonFiniteError(bad_step, names, state, "its update was left out")
    # The run stopped there. A step on the state of the error trains on, so nothing is noted in it.
    flags, step = state.nonfinite["found"], state.nonfinite["step"]
    nonfinite = {**state.nonfinite, "found": jnp.zeros_like(flags), "step": jnp.full_like(step, -1)}
    consequence = "no update was made since, and `state` of this error is the state before it"
    raise NonFiniteError(bad_step, names, dataclasses.replace(state, nonfinite=nonfinite), consequence)


def _parameter_names(store: KVStore) -> list[str]:
    paths = dict(store.paths)
    return [paths[k] for k in trained_keys(store)]


def _where(condition: jax.Array, tree: Tree, other: Tree) -> Tree:
    """`tree` where the condition is true, else `other`. A leaf that both share is returned as it is."""
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(condition, a, b), tree, other)
