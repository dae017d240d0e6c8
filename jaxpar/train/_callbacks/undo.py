"""A callback of `fit` that leaves out the steps whose loss or gradient spikes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from ..._core import checks
from .callback import Callback
from .history import number_text

Memory = dict[str, Any]
_NAMES = "loss", "grad_norm"  # of the metrics that a spike is seen in
_DEVIATION = 1.4826  # of a normal distribution, in units of its median absolute deviation


class Spike(Exception):
    """A step that is to be left out. `fit` catches it."""

    def __init__(self, step: int, why: str):
        super().__init__(why)
        self.step = step


@dataclasses.dataclass(frozen=True)
class Undo(Callback):
    """A callback of `fit` that goes back before a step whose loss spikes, leaves that step out, and goes on.

    `fit` keeps a copy of a state on the devices. It computes the steps from there to the spike again, with the same
    bits, makes no update in the step of the spike, and goes on with the next batch. So the run is the one of
    `step.without([n])`. A line says what was left out, the record counts it under `skipped`, checkpoints and the
    certificate name it, and a resume leaves it out again.

    Args:
        when: "spike": a loss that is not finite, or is far above those of the last steps: by more than `deviations`
            standard deviations above their median, estimated from the median absolute deviation. If the metrics of the
            step have `grad_norm`, it is judged in the same way. "nonfinite": only a loss that is not finite. A function
            `when(metrics) -> bool` of the metrics of a step, floats, with its number as `step`. It must say the same in
            all processes.
        most: the number of steps that are left out at most. After one more, `fit` raises an error.
        window: the number of last steps that a loss or a norm is compared with. In many steps a loss falls, and the
            fall would count as a deviation. With fewer than half of them, only what is not finite is a spike.
        deviations: how far above the median a loss or a norm may be.
        every: the number of steps between two copies of the state. A spike costs so many steps at most.

    Raises:
        FloatingPointError: raised by `fit`, before one step more than `most` is left out. Its `state` is before it.
        ValueError: raised by `fit`: the data can be read only once, or the run is elastic.

    Example:
        >>> import numpy as np, optax
        >>> import jax.numpy as jnp
        >>> from jaxpar import train
        >>> def loss_fn(params, batch, rng):
        ...     return ((batch["x"] * params["w"] - batch["y"]) ** 2).mean(), {}
        >>> batches = [{"x": np.ones(8, np.float32), "y": np.full(8, y, np.float32)} for y in (1, 1, np.nan, 1)]
        >>> state, step = train.start({"w": jnp.zeros(())}, optax.sgd(0.25), loss_fn)
        >>> state, history = train.fit(
        ...     state, step, batches, epochs=1, batch_size=8, progress=False, callbacks=train.Undo("nonfinite"))
        jaxpar: step 3 is left out: its loss is nan
        >>> float(state.params["w"]), history[0]["skipped"]
        (0.875, 1)
    """

    when: Literal["spike", "nonfinite"] | Callable[[dict[str, float]], Any] = "spike"
    most: int = 3
    window: int = 20
    deviations: float = 8.0
    every: int = 16

    def __post_init__(self) -> None:
        if not callable(self.when):
            checks.choice(self.when, "train.Undo", "when", ("spike", "nonfinite"))
        for name in ("most", "every"):
            checks.whole_number(getattr(self, name), "train.Undo", name)
        checks.whole_number(self.window, "train.Undo", "window", least=4)
        checks.number(self.deviations, "train.Undo", "deviations", "a number above 0", lambda x: 0 < x < math.inf)

    def init(self, state: object) -> Memory:
        """No losses and norms yet."""
        return {**{name: np.full(self.window, np.nan) for name in _NAMES}, "left_out": 0}

    def check(self, memory: Memory, step: int, metrics: dict[str, float]) -> None:
        """`Spike` if this step is to be left out, `FloatingPointError` if too many were."""
        if "loss" not in metrics and not callable(self.when):
            raise ValueError(f"fit: train.Undo looks at the loss, and the metrics of a step are {list(metrics)}")
        loss, why = metrics.get("loss", math.nan), ""
        if callable(self.when):
            if bool(self.when({**metrics, "step": step})):
                why = f"train.Undo's when is True of it (loss {number_text(loss)})"
        elif self.when == "nonfinite":
            why = "" if math.isfinite(loss) else f"its loss is {loss}"
        else:
            whys = [self._of_a_spike(name, memory[name], metrics[name]) for name in _NAMES if name in metrics]
            why = next(filter(None, whys), "")
        if not why:
            return
        if memory["left_out"] >= self.most:
            raise FloatingPointError(
                f"fit: step {step} would be left out ({why}), but train.Undo leaves out at most {self.most} steps; "
                "look at the data and the learning rate"
            )
        raise Spike(step, why)

    def _of_a_spike(self, name: str, last: np.ndarray, value: float) -> str:
        """Why a value is a spike after those of the last steps, in words. "" if it is none."""
        if not math.isfinite(value):
            return f"its {name} is {value}"
        last = last[~np.isnan(last)]
        if 2 * len(last) < self.window:
            return ""
        median = float(np.median(last))
        deviation = _DEVIATION * float(np.median(np.abs(last - median)))
        if value <= median + self.deviations * deviation:
            return ""
        return (
            f"its {name} is {number_text(value)}, and of the {len(last)} steps before it the median is "
            f"{number_text(median)} and the deviation {number_text(deviation)}"
        )

    def on_step(self, memory: Memory, step: int, metrics: dict[str, float]) -> Memory:
        """The memory after a step that stays, or that was left out."""
        if metrics.get("skipped", 0.0) > 0:
            return memory
        return {**memory, **{name: np.append(memory[name][1:], metrics[name]) for name in _NAMES if name in metrics}}
