"""A callback of `fit` that leaves out the steps whose loss spikes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from ..._core import checks
from .history import Record, number_text

Memory = dict[str, Any]
_DEVIATION = 1.4826  # of a normal distribution, in units of its median absolute deviation


class Spike(Exception):
    """A step that is to be left out. `fit` catches it."""

    def __init__(self, step: int, why: str):
        super().__init__(why)
        self.step = step


@dataclasses.dataclass(frozen=True)
class Undo:
    """A callback of `fit` that goes back before a step whose loss spikes, leaves that step out, and goes on.

    `fit` keeps a copy of a state on the devices. It computes the steps from there to the spike again, with the same
    bits, makes no update in the step of the spike, and goes on with the next batch. So the run is the one of
    `step.without([n])`. A line says what was left out, the record counts it under `skipped`, checkpoints and the
    certificate name it, and a resume leaves it out again.

    Args:
        when: "spike": a loss that is not finite, or is far above those of the last steps: by more than `deviations`
            standard deviations above their median, estimated from the median absolute deviation. "nonfinite": only a
            loss that is not finite. A function `when(metrics) -> bool` of the metrics of a step, floats, with its
            number as `step`. It must say the same in all processes.
        most: the number of steps that are left out at most. After one more, `fit` raises an error.
        window: the number of last steps that a loss is compared with. In many steps a loss falls, and the fall would
            count as a deviation. While there are fewer than half of them, only a loss that is not finite is a spike.
        deviations: how far above the median a loss may be.
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

    def init(self, state: Any) -> Memory:
        """No losses yet."""
        return {"losses": np.full(self.window, np.nan), "left_out": 0}

    def check(self, memory: Memory, step: int, metrics: dict[str, float]) -> None:
        """`Spike` if this step is to be left out, `FloatingPointError` if too many were."""
        if "loss" not in metrics and not callable(self.when):
            raise ValueError(f"fit: train.Undo looks at the loss, and the metrics of a step are {list(metrics)}")
        loss, why = metrics.get("loss", math.nan), ""
        if callable(self.when):
            if bool(self.when({**metrics, "step": step})):
                why = f"train.Undo's when is True of it (loss {number_text(loss)})"
        elif not math.isfinite(loss):
            why = f"its loss is {loss}"
        elif self.when == "spike":
            losses = memory["losses"][~np.isnan(memory["losses"])]
            if 2 * len(losses) >= self.window:
                median = float(np.median(losses))
                deviation = _DEVIATION * float(np.median(np.abs(losses - median)))
                if loss > median + self.deviations * deviation:
                    why = (
                        f"its loss is {number_text(loss)}, and of the {len(losses)} steps before it the median is "
                        f"{number_text(median)} and the deviation {number_text(deviation)}"
                    )
        if not why:
            return
        if memory["left_out"] >= self.most:
            raise FloatingPointError(
                f"fit: step {step} would be left out ({why}), but train.Undo leaves out at most {self.most} steps; "
                "look at the data and the learning rate"
            )
        raise Spike(step, why)

    def on_step(self, memory: Memory, step: int, metrics: dict[str, float]) -> Memory:
        """The memory after a step that stays, or that was left out."""
        if metrics.get("skipped", 0.0) > 0 or "loss" not in metrics:
            return memory
        return {**memory, "losses": np.append(memory["losses"][1:], metrics["loss"])}

    def on_epoch(self, memory: Memory, state: Any, record: Record) -> tuple[Memory, bool]:
        """The memory as it is, and no stop."""
        return memory, False
