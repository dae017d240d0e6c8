"""What `fit` calls after each step and each epoch, and what callbacks remember from one to the next."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import jax
import numpy as np

from ..._core import checks
from ..._core.text import say
from ..._devices import processes
from .._step.state import TrainState
from . import memory
from .early_stopping import EarlyStopping, KeepBest, raise_unknown
from .history import History, Record
from .live_plot import LivePlot

Callback = Callable[[TrainState, Record], Any]
OnStep = Callable[[int, dict[str, float]], Any]
_GIVE = {"test_": "test_data and apply_fn", "eval_": "eval_data and eval_fn"}
Memories = tuple[Any, ...]  # one for each callback. That of a function is None.


class WithMemory(Protocol):
    """A callback with a memory of its own, which is saved with the checkpoints.

    It may have `on_step(memory, step, metrics) -> memory` too, for each step.
    """

    def init(self, state: TrainState) -> Any:
        """The memory before the first record: a pytree of arrays, numbers and texts."""
        ...

    def on_epoch(self, memory: Any, state: TrainState, record: Record) -> tuple[Any, Any]:
        """(the memory after a record, True to end the training)."""
        ...


@dataclasses.dataclass(frozen=True)
class Callbacks:
    """The callbacks of a run.

    Attributes:
        each: called with the state and the record after each epoch, the metrics file first.
        on_step: called with the number and the metrics of each step.
    """

    each: tuple[Any, ...] = ()  # of Callback and WithMemory
    on_step: OnStep | None = None

    @property
    def wants_steps(self) -> bool:
        """Whether there is something to call for each step."""
        return self.on_step is not None or any(map(_step_of, self.each))

    @property
    def measures(self) -> bool:
        """Whether a callback adds to the records."""
        return any(hasattr(callback, "measure") for callback in self.each)

    def init(self, state: TrainState, saved: list[Any] | None, resumed: bool) -> Memories:
        """The memories of all callbacks: those that were saved, fresh ones else.

        A line on standard error names those that a resumed run does not find, and those that nobody takes up.
        """
        left = list(saved or [])
        fresh = [callback.init(state) if has_memory(callback) else None for callback in self.each]
        missed: list[str] = []
        found = [
            _take(left, callback, value, missed) if has_memory(callback) else None
            for callback, value in zip(self.each, fresh, strict=True)
        ]
        if resumed and jax.process_index() == 0:
            _say_missed(missed, [entry["name"] for entry in left])
        return tuple(found)

    def to_json(self, memories: Memories) -> list[dict[str, Any]]:
        """The memories as a checkpoint keeps them. `TypeError` for one that cannot be saved."""
        pairs = [(name_of(c), m) for c, m in zip(self.each, memories, strict=True) if has_memory(c)]
        return [{"name": name, **memory.to_json(value, name)} for name, value in pairs]

    def start(self, history: History) -> None:
        """Begin the run with the epochs before this call of `fit`."""
        with processes.raise_together():
            self._call("on_start", history)

    def before_resume(self, directory: Path) -> None:
        """Give each callback that has `before_resume(directory)` the call, before checkpoints are looked for."""
        with processes.raise_together():
            self._call("before_resume", directory)

    def saved(self, record: Record, written: Callable[[], Path | None]) -> None:
        """Give each callback that has `on_saved(record, written)` the call, after the checkpoint of a record.

        All processes wait in `written`, and perhaps in the callback. So an error in one is not raised in the others.
        """
        self._call("on_saved", record, written)

    def step(self, memories: Memories, number: int, metrics: dict[str, float]) -> Memories:
        """Call all that want each step. The memories after it."""
        if self.on_step is not None:
            self.on_step(number, metrics)
        return tuple(
            call(value, number, metrics) if (call := _step_of(callback)) else value
            for callback, value in zip(self.each, memories, strict=True)
        )

    def measure(self, state: TrainState) -> dict[str, float]:
        """What callbacks such as `LearningRate` add to the record of a state."""
        found: dict[str, float] = {}
        for measured in self._call("measure", state):
            found |= measured
        return found

    def run(self, memories: Memories, state: TrainState, record: Record) -> tuple[Memories, bool]:
        """Call each callback.

        Returns:
            The memories, and whether one of them asked to stop, by a True of Python, NumPy or JAX. With several
            processes, an error in one is raised in all, and one request to stop stops all.
        """
        new, answers = list(memories), list[Any]()
        with processes.raise_together():
            for i, callback in enumerate(self.each):
                if has_memory(callback):
                    new[i], answer = _two(callback, callback.on_epoch(new[i], state, record))
                else:
                    answer = callback(state, record)
                answers.append(answer)
        return tuple(new), not processes.all_true(not any(map(_is_true, answers)))

    def is_best(self, memories: Memories, step: int) -> bool:
        """Whether `KeepBest` keeps the checkpoint of this step."""
        pairs = zip(self.each, memories, strict=True)
        return any(isinstance(callback, KeepBest) and value["step"] == step for callback, value in pairs)

    def check(self, checkpoint_dir: Any, evaluates: dict[str, bool]) -> None:
        """Check before the first step what can be known.

        Args:
            evaluates: for each beginning of a metric's name, such as `test_`, whether such metrics are measured.

        Raises:
            ValueError: a `KeepBest` without checkpoints, two of them, or a metric that is never measured.
        """
        keeps = [callback for callback in self.each if isinstance(callback, KeepBest)]
        if keeps and checkpoint_dir is None:
            raise ValueError("fit: train.KeepBest keeps a checkpoint, so it takes checkpoint_dir=")
        if len(keeps) > 1:
            raise ValueError("fit: one checkpoint is the best, so callbacks take one train.KeepBest")
        for callback in self._monitors():
            for start, measured in evaluates.items():
                if (callback.monitor or "").startswith(start) and not measured:
                    raise ValueError(
                        f"fit: {name_of(callback)} looks at {callback.monitor!r}, and nothing is evaluated; give "
                        f"{_GIVE[start]}, or another monitor"
                    )

    def check_metrics(self, names: Sequence[str], unknown: Iterable[str]) -> None:
        """`ValueError` for a metric that there is not.

        Args:
            names: of the metrics. One with columns has further names: "name/0".
            unknown: the beginnings of names of which it is not known which there are.
        """
        for callback in self._monitors():
            name = callback.monitor
            if name is None or name in names or name.rpartition("/")[0] in names:
                continue
            if not name.startswith((*unknown, "learning_rate")):
                raise_unknown(name, names, f"train.{name_of(callback)}")

    def _monitors(self) -> list[EarlyStopping | KeepBest]:
        """Those whose metrics are known. A callback of the user before them may put its own into the record."""
        own = itertools.takewhile(lambda callback: type(callback).__module__.startswith("jaxpar."), self.each)
        return [callback for callback in own if isinstance(callback, EarlyStopping | KeepBest)]

    @contextlib.contextmanager
    def end_after(self, history: History) -> Generator[None]:
        """A block after which each callback that has `on_end(history)` gets the call."""
        try:
            yield
        finally:
            self._call("on_end", history)

    def _call(self, hook: str, *args: Any) -> list[Any]:
        """Call this method of each callback that has it. What they return."""
        hooks = [getattr(callback, hook, None) for callback in self.each]
        return [call(*args) for call in hooks if call is not None]


def has_memory(callback: Any) -> TypeGuard[WithMemory]:
    """Whether a callback is called as `WithMemory`, not as a function."""
    return callable(getattr(callback, "init", None)) and callable(getattr(callback, "on_epoch", None))


def _step_of(callback: Any) -> Callable[[Any, int, dict[str, float]], Any] | None:
    """What to call with the memory, the number and the metrics of each step. Other callbacks are not called."""
    if isinstance(callback, LivePlot):
        return lambda memory, number, metrics: callback.on_step(number, metrics)
    return getattr(callback, "on_step", None) if has_memory(callback) else None


def _take(left: list[Any], callback: Any, fresh: Any, missed: list[str]) -> Any:
    """The memory that was saved for a callback, out of those that are left. Else the fresh one."""
    for i, entry in enumerate(left):
        if entry["name"] == name_of(callback):
            try:
                found = memory.from_json(entry, fresh)
            except ValueError:
                break
            del left[i]
            return found
    missed.append(name_of(callback))
    return fresh


def _say_missed(missed: list[str], left: list[str]) -> None:
    words = f"the checkpoint has no memory that fits {' and '.join(missed)}, so it starts empty" if missed else ""
    others = f"the memory of {' and '.join(left)} in the checkpoint is not used" if left else ""
    if missed or left:
        say("fit: " + "; ".join(filter(None, (words, others))))


def _two(callback: Any, answer: Any) -> tuple[Any, Any]:
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise TypeError(f"fit: {name_of(callback)}.on_epoch must return (memory, stop), got {checks.describe(answer)}")
    return answer


def name_of(callback: Any) -> str:
    """The name of a callback in messages and checkpoints."""
    return type(callback).__name__


def _is_true(answer: Any) -> bool:
    return isinstance(answer, bool | np.bool_ | jax.Array) and np.shape(answer) == () and bool(answer)
