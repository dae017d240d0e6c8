"""Callbacks of one number: when to stop, which checkpoint is the best, and the learning rate in the records.

Which metric is monitored where none is named is at the end, and in which direction one is better in `directions`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, get_args

from ... import updaters
from ..._core import checks
from ..._devices.user_mesh import outside_mesh
from .._step.state import TrainState
from .callback import Callback
from .directions import Mode, direction_of, resolve_mode
from .history import Record, metric_names

Memory = dict[str, Any]
_NOTHING: Memory = {"monitor": None, "mode": None, "best": None}
_NAME = "learning_rate"


class Monitor(Callback):
    """A callback that remembers the best value of a metric."""

    monitor: str | None
    mode: Mode

    def __post_init__(self) -> None:
        caller = f"train.{type(self).__name__}"
        checks.choice(self.mode, caller, "mode", get_args(Mode))
        if self.monitor is not None:
            resolve_mode(checks.text(self.monitor, caller, "monitor"), self.mode, caller)
        elif self.mode != "auto":
            raise ValueError(f"{caller}: mode={self.mode!r} needs the name of a metric; give monitor= too")

    def _look(self, memory: Memory, record: Record, min_delta: float = 0.0) -> tuple[Memory, bool]:
        """The memory with the best value so far, and whether this record has it."""
        caller = f"train.{type(self).__name__}"
        name = self.monitor or memory["monitor"] or default_monitor(record)
        mode = resolve_mode(name, self.mode, caller)
        # A memory of another metric begins anew. That happens if a run is resumed with another `monitor`.
        if (name, mode) != (memory["monitor"], memory["mode"]):
            counts = dict.fromkeys(memory.keys() & {"without", "step"}, 0)
            worst = math.inf if mode == "min" else -math.inf  # every finite value improves on it
            memory = {**memory, **counts, "monitor": name, "mode": mode, "best": worst}
        value = record.get(name)
        if value is None or isinstance(value, (str, bool)):
            raise_unknown(name, metric_names(record), caller)
        best, value = memory["best"], float(value)
        is_better = value < best - min_delta if mode == "min" else value > best + min_delta  # NaN is not
        # A memory has the step of the best value, 0 before there is one, only where its checkpoint stays.
        step = {"step": record["step"]} if is_better and "step" in memory else {}
        return {**memory, **step, "best": value if is_better else best}, is_better


@dataclasses.dataclass(frozen=True)
class EarlyStopping(Monitor):
    """A callback of `fit` that stops when a metric no longer improves.

    Checkpoints hold its state, so a resumed run stops after the same epoch as an uninterrupted run.

    Args:
        monitor: the name of a metric in the records. None takes the first of these: `eval_loss`, `test_loss`, another
            metric of the evaluation whose name implies a direction, `loss`.
        patience: the number of records without an improvement before the stop.
        mode: "min" if a smaller value is better, "max" if a larger value is better. "auto" decides by the name, if that
            is certain: `accuracy` is "max", `loss` is "min". `score`, `neg_loss` and the like need "min" or "max".
        min_delta: the least change that counts as an improvement. NaN does not count.
        restore_best: True: `fit` returns the whole state of the best record, after an early stop and after the last
            epoch. The history keeps all records. With `checkpoint_dir`, the best checkpoint is kept, as by `KeepBest`,
            and read at the end. Without it, a copy of the state stays on the devices. An interrupted run returns its
            last state, and restores the best one when it was resumed and ends.

    Raises:
        ValueError: the direction of the metric is unknown. Raised by `fit`: the records lack the metric;
            `restore_best=True` in an elastic run or beside a `KeepBest`.

    Example:
        >>> from jaxpar import train
        >>> stopping = train.EarlyStopping("loss", patience=2)
        >>> memory, stops = stopping.init(None), []
        >>> for loss in (3.0, 2.0, 2.5, float("nan")):
        ...     memory, stop = stopping.on_epoch(memory, None, {"loss": loss})
        ...     stops.append(stop)
        >>> stops, memory["best"]
        ([False, False, False, True], 2.0)
    """

    monitor: str | None = None
    patience: int = 3
    mode: Mode = "auto"
    min_delta: float = 0.0
    restore_best: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        caller = "train.EarlyStopping"
        checks.whole_number(self.patience, caller, "patience")
        allowed = "a finite number of 0 or more"
        checks.number(self.min_delta, caller, "min_delta", allowed, lambda x: 0 <= x < math.inf)
        if not isinstance(self.restore_best, bool):  # an array has no truth value
            raise TypeError(f"{caller}: restore_best must be True or False, got {checks.describe(self.restore_best)}")

    def init(self, state: object) -> Memory:
        """The callback's state before the first record."""
        return {**_NOTHING, "without": 0, **({"step": 0} if self.restore_best else {})}

    def on_epoch(self, memory: Memory, state: object, record: Record) -> tuple[Memory, bool]:
        """(the callback's state after a record, whether to stop)."""
        memory, is_better = self._look(memory, record, float(self.min_delta))
        without = 0 if is_better else memory["without"] + 1
        return {**memory, "without": without}, without >= self.patience


@dataclasses.dataclass(frozen=True)
class KeepBest(Monitor):
    """A callback of `fit` that keeps the checkpoint with the best value of a metric.

    It stays in addition to the last `keep` checkpoints. `checkpoint.best(directory)` returns its path. A best state at
    an evaluation within an epoch, see `fit(eval_every=)`, is saved too. The metric belongs to the `eval_params` of the
    saved state, which differ from `params` for some optimizers.

    Args:
        monitor, mode: as in `EarlyStopping`.

    Raises:
        ValueError: as in `EarlyStopping`. Raised by `fit`: `checkpoint_dir` is missing, or there are two `KeepBest`.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp, numpy as np, optax
        >>> from jaxpar import checkpoint, data, kv, train
        >>> def loss_fn(params, batch, rng):
        ...     return ((batch["image"] @ params["w"] - batch["label"]) ** 2).mean(), {}
        >>> lines = data.Dataset(np.ones((8, 2), np.float32), np.ones(8, np.float32))
        >>> state = train.create_state(kv.from_params({"w": jnp.zeros(2)}, optimizer=optax.sgd(0.6)), 0)
        >>> directory = tempfile.mkdtemp()  # the rate is too large: the loss grows from epoch to epoch
        >>> state, history = train.fit(state, train.make_train_step(loss_fn), lines, epochs=6, batch_size=8,
        ...     progress=False, checkpoint_dir=directory, keep=2, callbacks=train.KeepBest())
        >>> checkpoint.best(directory).name
        'step_00000001'
    """

    monitor: str | None = None
    mode: Mode = "auto"

    def init(self, state: object) -> Memory:
        """The callback's state before the first record."""
        return {**_NOTHING, "step": 0}

    def on_epoch(self, memory: Memory, state: object, record: Record) -> tuple[Memory, bool]:
        """(the callback's state after a record, with the best step, False)."""
        return self._look(memory, record)[0], False


@dataclasses.dataclass(frozen=True)
class LearningRate(Callback):
    """A callback of `fit` that adds `learning_rate` to records and progress bar.

    The value is the rate of the last step. A rate in the state is read at most once a second.

    Args:
        schedule: the optimizer's schedule: a function of the number of earlier updates, as in optax, or a number. None
            reads the rate from the state, which needs `optax.inject_hyperparams`, or an optimizer of `jp.updaters` with
            `rate_in_state=True`. With several rates, each gets its own name, such as `learning_rate_head`.

    Raises:
        ValueError: raised by `fit` before the first step: the state has no rate.

    Example:
        >>> import optax
        >>> from jaxpar import train
        >>> rate = train.LearningRate(optax.linear_schedule(0.5, 0.0, 10))
        >>> # state, history = train.fit(..., callbacks=rate)
    """

    schedule: Callable[[Any], Any] | float | None = None

    def __post_init__(self) -> None:
        if self.schedule is not None and not callable(self.schedule):
            allowed = "a function or a number of 0 or more"
            checks.number(self.schedule, "train.LearningRate", "schedule", allowed, lambda x: 0 <= x < math.inf)

    def measure(self, state: TrainState, left_out: int = 0) -> dict[str, float]:
        """The rates of the last step, {name in the record: rate}.

        `left_out` is the number of steps without an update that the state does not count, see `TrainStep.without`.
        """
        if self.schedule is None:
            rates = updaters.learning_rates(state)
            if not rates:
                raise ValueError(
                    "train.LearningRate: the state has no learning rate; give the schedule, "
                    "train.LearningRate(schedule), or make the optimizer by "
                    "optax.inject_hyperparams(optax.adam)(learning_rate=schedule)"
                )
            # `optax.multi_transform` of equal rates, or one rate in several places of the state, is one number.
            if len(set(rates.values())) == 1:
                return {_NAME: next(iter(rates.values()))}
            # Each is named by what its path in the state does not share with those of the others.
            names = updaters._rate_names(rates)
            return {f"{_NAME}_{name}": rate for name, rate in zip(names, rates.values(), strict=True)}
        if not callable(self.schedule):
            return {_NAME: float(self.schedule)}
        # The state counts all steps, and the optimizer asks its schedule with the number of its own updates.
        skipped = state.nonfinite["skipped"] if isinstance(state.nonfinite, dict) else 0  # steps without an update
        with outside_mesh():
            return {_NAME: float(self.schedule(max(0, int(state.step) - int(skipped) - left_out - 1)))}


# The metric that is monitored where none is named.

_FIRST = ("eval_loss", "test_loss")


def default_monitor(record: Record) -> str:
    """The metric that is monitored by default: one of the evaluation if the record has one, else the loss."""
    names = metric_names(record)
    with_direction = [n for n in names if n.startswith(("eval_", "test_")) and direction_of(n)]
    return next((name for name in _FIRST if name in names), with_direction[0] if with_direction else "loss")


def raise_unknown(monitor: str, names: Iterable[str], caller: str) -> NoReturn:
    """`ValueError` for a metric that the record lacks."""
    raise ValueError(f"{caller}: unknown metric {monitor!r}; known are {', '.join(sorted(names)) or 'none'}")
