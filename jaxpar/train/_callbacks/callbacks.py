"""What `fit` calls after each step and each epoch, and what callbacks remember from one to the next."""

from __future__ import annotations

import base64
import dataclasses
import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from ..._core import checks
from ..._core.arrays import is_of_numbers
from ..._core.calls import check_takes
from ..._core.text import say
from ..._devices import processes
from ..._devices.mesh import to_host
from ..._devices.user_mesh import outside_mesh
from .._step.state import TrainState
from .history import Record
from .loggers import JsonLines, MetricsFile
from .monitors import EarlyStopping, KeepBest, Monitor, raise_unknown
from .plots import LivePlot

Callback = Callable[[TrainState, Record], Any]
OnStep = Callable[[int, dict[str, float]], Any]
_GIVE = {"test_": "test_data and apply_fn", "eval_": "eval_data and eval_fn"}
Memories = tuple[Any, ...]  # one for each callback. That of a function is None.
_MOST_BYTES = 16 << 20  # of all arrays of one memory
_WORDS = (bool, int, float, str, type(None))


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
    """The callbacks of a run."""

    # Called with the state and the record after each epoch, the metrics file first.
    each: tuple[Any, ...] = ()  # of Callback and WithMemory
    on_step: OnStep | None = None  # called with the number and the metrics of each step

    def init(self, state: TrainState, saved: list[Any] | None, resumed: bool) -> Memories:
        """The memories of all callbacks: the saved ones, or else new ones."""
        # A resumed run names on standard error the callbacks without a saved memory, and the saved memories without a
        # callback.
        left, missed, found = list(saved or []), list[str](), list[Any]()
        for callback in self.each:
            found.append(callback.init(state) if has_memory(callback) else None)
            if has_memory(callback):
                name = name_of(callback)
                entry = next((entry for entry in left if entry["name"] == name), None)
                try:
                    found[-1] = memory_from_json(entry, found[-1])
                    left.remove(entry)
                except ValueError:
                    missed.append(name)
        if resumed and jax.process_index() == 0 and (missed or left):
            others = " and ".join(entry["name"] for entry in left)
            words = (
                f"the checkpoint has no matching memory of {' and '.join(missed)}, so it starts anew" if missed else "",
                f"no callback uses the memory of {others} in the checkpoint" if left else "",
            )
            say("fit: " + "; ".join(filter(None, words)))
        return tuple(found)

    def to_json(self, memories: Memories) -> list[dict[str, Any]]:
        """The memories as a checkpoint keeps them. `TypeError` for one that cannot be saved."""
        pairs = [(name_of(c), m) for c, m in zip(self.each, memories, strict=True) if has_memory(c)]
        return [{"name": name, **memory_to_json(value, name)} for name, value in pairs]

    def call(self, hook: str, *args: Any) -> list[Any]:
        """Call this method, such as `on_start`, of each callback that has it. What they return."""
        hooks = [getattr(callback, hook, None) for callback in self.each]
        return [call(*args) for call in hooks if call is not None]

    def step(self, memories: Memories, number: int, metrics: dict[str, float]) -> Memories:
        """Call all that want each step. The memories after it."""
        if self.on_step is not None:
            self.on_step(number, metrics)
        new = list(memories)
        for i, callback in enumerate(self.each):
            on_step = getattr(callback, "on_step", None)
            if isinstance(callback, LivePlot):
                callback.on_step(number, metrics)
            elif on_step is not None and has_memory(callback):
                new[i] = on_step(new[i], number, metrics)
        return tuple(new)

    def measure(self, state: TrainState) -> dict[str, float]:
        """What callbacks such as `LearningRate` add to the record of a state."""
        found: dict[str, float] = {}
        for measured in self.call("measure", state):
            found |= measured
        return found

    def run(self, memories: Memories, state: TrainState, record: Record) -> tuple[Memories, bool]:
        """Call each callback. The memories, and whether one of them asked to stop, by a True of Python, NumPy or JAX.

        An exception in any process is raised in every process, and one request to stop stops all.
        """
        new, answers = list(memories), list[Any]()
        with processes.raise_together():
            for i, callback in enumerate(self.each):
                if not has_memory(callback):
                    answers.append(callback(state, record))
                    continue
                answer: Any = callback.on_epoch(new[i], state, record)
                if not isinstance(answer, tuple) or len(answer) != 2:
                    given = checks.describe(answer)
                    raise TypeError(f"fit: {name_of(callback)}.on_epoch must return (memory, stop), got {given}")
                new[i] = answer[0]
                answers.append(answer[1])
        return tuple(new), not processes.all_true(not any(map(_is_true, answers)))

    @property
    def restores_best(self) -> bool:
        """Whether the run ends with its best state, not with its last one."""
        return any(isinstance(callback, EarlyStopping) and callback.restore_best for callback in self.each)

    def best_step(self, memories: Memories) -> int | None:
        """The step of the best state so far, 0 if there is none. None where no callback asks for it."""
        for callback, memory in zip(self.each, memories, strict=True):
            if _keeps_best(callback):
                return memory["step"]
        return None

    def check(self, checkpoint_dir: Any, certificate: Path | None, measures: dict[str, bool]) -> None:
        """`ValueError` for what can be known before the first step: two write one file, or keep a best checkpoint.

        `certificate` is another file that the run writes. `measures`: for each beginning of a score's name, such as
        `test_`, whether there are such scores.
        """
        files = set() if certificate is None else {certificate.absolute()}
        for path in [callback.path for callback in self.each if isinstance(callback, JsonLines)]:
            if path.absolute() in files:
                raise ValueError(
                    f"fit: {path} is given twice; give metrics_file=, certificate= and each to_jsonl callback "
                    "different files"
                )
            files.add(path.absolute())
        keeps = list(filter(_keeps_best, self.each))
        if checkpoint_dir is None and any(isinstance(callback, KeepBest) for callback in keeps):
            raise ValueError("fit: train.KeepBest keeps the best checkpoint, so give checkpoint_dir= too")
        if len(keeps) > 1:
            raise ValueError(
                f"fit: {len(keeps)} callbacks keep a best checkpoint, and fit keeps only one; give one train.KeepBest, "
                "or one train.EarlyStopping(restore_best=True), which keeps it too"
            )
        for callback in self._monitors():
            for start, are_measured in measures.items():
                if not are_measured and (callback.monitor or "").startswith(start):
                    raise ValueError(
                        f"fit: {name_of(callback)} monitors {callback.monitor!r}, but nothing is evaluated; give "
                        f"{_GIVE[start]}, or monitor another metric"
                    )

    def check_metrics(self, metrics: Sequence[str], scores: Sequence[str], measures: dict[str, bool]) -> None:
        """`ValueError` for a callback that looks at a metric that there is not.

        `metrics` are those of a step, and `scores` those of the evaluation, as far as they are known. One with columns
        has further names: "name/0".
        """
        names = [*metrics, *scores]
        unknown = [
            start for start, are in measures.items() if are and not any(name.startswith(start) for name in scores)
        ]
        for callback in self._monitors():
            name = callback.monitor
            if name is None or name in names or name.rpartition("/")[0] in names:
                continue
            if not name.startswith((*unknown, "learning_rate")):
                raise_unknown(name, names, f"train.{name_of(callback)}")

    def _monitors(self) -> list[Monitor]:
        """Those whose metrics are known. A callback of the user before them may put its own into the record."""
        own = itertools.takewhile(lambda callback: type(callback).__module__.startswith("jaxpar."), self.each)
        return [callback for callback in own if isinstance(callback, Monitor)]


def has_memory(callback: Any) -> TypeGuard[WithMemory]:
    """Whether a callback is called as `WithMemory`, not as a function."""
    return callable(getattr(callback, "init", None)) and callable(getattr(callback, "on_epoch", None))


def _keeps_best(callback: Any) -> bool:
    return isinstance(callback, Monitor) and callback._keeps_best


def name_of(callback: Any) -> str:
    return type(callback).__name__


def _is_true(answer: Any) -> bool:
    return isinstance(answer, bool | np.bool_ | jax.Array) and np.shape(answer) == () and bool(answer)


# What a user gave, checked.


def collect_callbacks(metrics_file: str | os.PathLike[str] | None, callbacks: Any, on_step: Any) -> Callbacks:
    """All callbacks of a run. `TypeError` for one that is neither a function nor an object with a memory."""
    if callable(callbacks) or has_memory(callbacks) or not isinstance(callbacks, Iterable):
        callbacks = [callbacks]
    given = list(callbacks)
    for callback in given:
        _check_callback(callback)
    if on_step is not None and not callable(on_step):
        raise TypeError(f"fit: on_step must be a function of (step, metrics), got {checks.describe(on_step)}")
    owner = getattr(on_step, "__self__", None)
    if has_memory(owner):
        raise TypeError(
            f"fit: {name_of(owner)}.on_step takes a memory, so fit must call it; leave out on_step=, and give the "
            "object in callbacks="
        )
    files = [] if metrics_file is None else [MetricsFile(metrics_file)]
    return Callbacks((*files, *given), on_step)


def _check_callback(callback: Any) -> None:
    parts = [name for name in ("init", "on_epoch") if callable(getattr(callback, name, None))]
    if isinstance(callback, type):
        raise TypeError(f"fit: a callback must be an object, not a class; write {callback.__name__}(...)")
    if len(parts) == 1 and not callable(callback):
        raise TypeError(
            f"fit: {name_of(callback)} has only {parts[0]}; a callback with a memory needs both init(state) and "
            "on_epoch(memory, state, record) -> (memory, stop)"
        )
    if not callable(callback) and not parts:
        raise TypeError(
            "fit: a callback must be a function of (state, record), an object with init and on_epoch, or callbacks a "
            f"sequence of them; got {type(callback).__name__}"
        )
    if not has_memory(callback):
        return check_takes(callback, ("state", "record"), "fit: a callback")
    on_step = getattr(callback, "on_step", None)
    if on_step is not None:
        try:
            inspect.signature(on_step).bind(None, 1, {})
        except TypeError:
            raise TypeError(
                f"fit: {name_of(callback)} has a memory, so its on_step must be on_step(memory, step, metrics)"
            ) from None


# What a callback remembers, as JSON in a checkpoint, and back to the last bit.


def memory_to_json(memory: Any, who: str) -> dict[str, Any]:
    """A memory as JSON: the path and the value of each leaf. `who` is the callback, for messages."""
    names: list[str] = []
    values: list[Any] = []
    size = 0
    for path, value in jax.tree_util.tree_leaves_with_path(memory, is_leaf=_is_none):
        names.append(jax.tree_util.keystr(path))
        if isinstance(value, _WORDS):
            values.append(value)
            continue
        if not (_is_array(value) and is_of_numbers(value)):
            raise TypeError(
                f"fit: checkpoints save the memory of {who}, so it must be a pytree of arrays, numbers and texts; got "
                f"{checks.describe(value)} at {names[-1] or 'its root'}"
            )
        array = np.asarray(to_host(value))
        size += array.nbytes
        if size > _MOST_BYTES:
            raise ValueError(
                f"fit: the memory of {who} has {size:,} bytes, more than the {_MOST_BYTES:,} that a checkpoint saves "
                "of it; save large arrays by checkpoint.save, or keep them in the state"
            )
        data = base64.b64encode(array.tobytes()).decode()
        values.append({"dtype": str(array.dtype), "shape": list(array.shape), "data": data})
    return {"names": names, "values": values}


def memory_from_json(saved: Any, fresh: Any) -> Any:
    """A saved memory in the structure of a fresh one. `ValueError` where it does not fit, and without one."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(fresh, is_leaf=_is_none)
    if saved is None or saved["names"] != [jax.tree_util.keystr(path) for path, _ in leaves]:
        raise ValueError("the structure differs")
    found: list[Any] = []
    for value, (_, like) in zip(map(_decode, saved["values"]), leaves, strict=True):
        if _is_array(like) != _is_array(value):
            raise ValueError("expected an array, found a plain value, or the reverse")
        if _is_array(value):
            if (like.dtype, like.shape) != (value.dtype, value.shape):
                raise ValueError("the shape or dtype of an array differs")
            with outside_mesh():
                value = jnp.asarray(value.copy()) if isinstance(like, jax.Array) else value.copy()
        found.append(value)
    return structure.unflatten(found)


def is_saved_memory(saved: Any) -> bool:
    """Whether `memory_to_json` can have written this."""
    try:
        names, values = saved["names"], saved["values"]
        for value in values:
            _decode(value)
        are_texts = all(isinstance(text, str) for text in (saved["name"], *names))
        return are_texts and isinstance(names, list) and len(names) == len(values)
    except (KeyError, TypeError, ValueError):
        return False


def _decode(value: Any) -> Any:
    """The plain value or the array that was saved. `ValueError` for any other value."""
    if isinstance(value, _WORDS):
        return value
    try:
        content = base64.b64decode(value["data"], validate=True)
        array = np.frombuffer(content, jnp.dtype(value["dtype"])).reshape(value["shape"])
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError("expected a saved array") from error
    if list(array.shape) != value["shape"] or not is_of_numbers(array):  # -1 in a shape stands for any number
        raise ValueError("expected a saved array of numbers")
    return array


def _is_array(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, np.generic))


def _is_none(value: Any) -> bool:
    return value is None
