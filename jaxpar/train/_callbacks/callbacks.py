"""What `fit` calls after each step and each epoch, and what callbacks remember from one to the next."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, Protocol, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from ..._core import checks, text
from ..._core.arrays import is_of_numbers
from ..._core.functions import check_takes
from ..._devices import mesh, processes, user_mesh
from .._step.state import TrainState
from .fingerprint import fingerprint
from .history import LivePlot, Record
from .loggers import JsonLines, MetricsFile
from .monitors import EarlyStopping, KeepBest, Monitor, default_monitor, raise_unknown

Callback = Callable[[TrainState, Record], Any]
OnStep = Callable[[int, dict[str, float]], Any]
_GIVE = {"test_": "test_data and apply_fn", "eval_": "eval_data and eval_fn"}
CallbackState = tuple[Any, ...]  # what each callback remembers. That of a function is None.
_MOST_BYTES = 16 << 20  # of all arrays of one memory
_WORDS = (bool, int, float, str, type(None))
_ARRAYS = (jax.Array, np.ndarray, np.generic)


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


class Callbacks:
    """All callbacks of a run. `TypeError` for one that is neither a function nor an object with a memory.

    `ValueError` where two write one file or keep a best checkpoint. The run writes `certificate` too.
    """

    def __init__(
        self,
        metrics_file: str | os.PathLike[str] | None = None,
        callbacks: Any = (),
        on_step: Any = None,
        checkpoint_dir: Any = None,
        certificate: Any = None,
    ):
        if callable(callbacks) or has_memory(callbacks) or not isinstance(callbacks, Iterable):
            callbacks = [callbacks]
        given = list(callbacks)
        for callback in given:
            _check_callback(callback)
        owner = getattr(on_step, "__self__", None)
        if has_memory(owner):
            words = "takes a memory, so fit must call it; leave out on_step=, give callbacks="
            raise TypeError(f"fit: {name_of(owner)}.on_step {words}")
        if on_step is not None:
            check_takes(on_step, ("step", "metrics"), "fit: on_step")
        self.on_step: OnStep | None = on_step  # called with the number and the metrics of each step
        # Called with the state and the record after each epoch, the metrics file first.
        self.each: tuple[Any, ...] = (*([] if metrics_file is None else [MetricsFile(metrics_file)]), *given)
        self._began = [fingerprint(callback) for callback in self.each]
        files = [callback.path.absolute() for callback in self.each if isinstance(callback, JsonLines)]
        files += [] if certificate is None else [certificate.absolute()]
        if twice := [path for path in files if files.count(path) > 1]:
            own = "give metrics_file=, certificate= and each to_jsonl callback different files"
            raise ValueError(f"fit: {twice[0]} is given twice; {own}")
        keep = [i for i, callback in enumerate(self.each) if isinstance(callback, KeepBest)]
        if checkpoint_dir is None and keep:
            raise ValueError("fit: train.KeepBest keeps the best checkpoint, so give checkpoint_dir= too")
        restore = [i for i, c in enumerate(self.each) if isinstance(c, EarlyStopping) and c.restore_best]
        keepers = keep + restore
        if len(keepers) > 1:
            raise ValueError(
                f"fit: {len(keepers)} callbacks keep a best checkpoint, and fit keeps only one; give one "
                "train.KeepBest, or one train.EarlyStopping(restore_best=True), which keeps it too"
            )
        self._keeper = keepers[0] if keepers else None  # the place in `each` of the one that keeps a best state
        self.restores_best: bool = bool(restore)  # whether the run ends with that state, not with its last one

    def init(self, state: TrainState, saved: list[dict[str, Any]] | None, resumed: bool) -> CallbackState:
        """What each callback remembers at first: what was saved of it, or else what it begins with."""
        callback_state, starts_anew, unused = list[Any](), list[str](), list[Any](saved or [])
        for callback in self.each:
            memory = None
            if has_memory(callback):
                memory, name = callback.init(state), name_of(callback)
                entry = next((entry for entry in unused if entry["name"] == name), None)
                try:
                    memory = memory_from_json(entry, memory)
                    unused.remove(entry)
                except ValueError:
                    starts_anew.append(name)
            callback_state.append(memory)
        # A resumed run says which callbacks have no saved memory, and which saved memories have no callback.
        if resumed and jax.process_index() == 0 and (starts_anew or unused):
            names, others = " and ".join(starts_anew), " and ".join(entry["name"] for entry in unused)
            messages = (
                f"the checkpoint has no matching memory of {names}, so it starts anew" if starts_anew else "",
                f"no callback uses the memory of {others} in the checkpoint" if unused else "",
            )
            text.say("fit: " + "; ".join(filter(None, messages)))
        return tuple(callback_state)

    def to_json(self, callback_state: CallbackState) -> list[dict[str, Any]]:
        """What callbacks remember, as a checkpoint keeps it. `TypeError` for a memory that cannot be saved."""
        pairs = [(name_of(c), memory) for c, memory in zip(self.each, callback_state, strict=True) if has_memory(c)]
        return [{"name": name, **memory_to_json(memory, name)} for name, memory in pairs]

    def call(self, hook: str, *args: Any) -> list[Any]:
        """Call this method, such as `on_start`, of each callback that has it. What they return."""
        hooks = [getattr(callback, hook, None) for callback in self.each]
        return [call(*args) for call in hooks if call is not None]

    def after_step(self, callback_state: CallbackState, number: int, metrics: dict[str, float]) -> CallbackState:
        """Call all that want each step. What callbacks remember after it."""
        if self.on_step is not None:
            self.on_step(number, metrics)
        new = list(callback_state)
        for i, callback in enumerate(self.each):
            on_step = getattr(callback, "on_step", None)
            if isinstance(callback, LivePlot):
                callback.on_step(number, metrics)
            elif on_step is not None and has_memory(callback):
                new[i] = on_step(new[i], number, metrics)
        return tuple(new)

    def measure(self, state: TrainState) -> dict[str, float]:
        """What callbacks such as `LearningRate` add to the record of a state."""
        return {name: value for measured in self.call("measure", state) for name, value in measured.items()}

    def after_record(
        self, callback_state: CallbackState, state: TrainState, record: Record
    ) -> tuple[CallbackState, list[str]]:
        """Call each callback. What they remember, and who asked to stop, by a True of Python, NumPy or JAX.

        An exception in any process is raised in every process, and one request to stop stops all. Each is its name and
        what it is now and was when the run began, for `stays_over`.
        """
        new, stops = list(callback_state), list[Any]()
        with processes.raise_together():
            for i, callback in enumerate(self.each):
                if not has_memory(callback):
                    stops.append(callback(state, record))
                    continue
                answer: Any = callback.on_epoch(new[i], state, record)
                if not isinstance(answer, tuple) or len(answer) != 2:
                    given = checks.describe(answer)
                    raise TypeError(f"fit: {name_of(callback)}.on_epoch must return (memory, stop), got {given}")
                new[i] = answer[0]
                stops.append(answer[1])
        kinds = bool | np.bool_ | jax.Array
        asked = [isinstance(stop, kinds) and np.shape(stop) == () and bool(stop) for stop in stops]
        if processes.all_true(True not in asked):
            return tuple(new), []
        own = [i for i, stop in enumerate(asked) if stop]
        now = [f"{name_of(self.each[i])} {self._began[i]} {fingerprint(self.each[i])}" for i in own]
        return tuple(new), sorted({each for text in processes.exchange(json.dumps(now)) for each in json.loads(text)})

    def stays_over(self, ended_by: list[str] | None) -> bool:
        """Whether one of the callbacks that ended a run is given again, with the same settings, in any process.

        None: a checkpoint of an earlier jaxpar does not say who it was.
        """
        if ended_by is None:
            return bool(self.each)
        # An object may count in its attributes. It is as at the end where it is used once more, else as at the start.
        known = {(name, now) for name, *each in map(str.split, ended_by) for now in each}
        own = {(name_of(callback), began) for callback, began in zip(self.each, self._began, strict=True)}
        return not processes.all_true(not known & own)

    def best_step(self, callback_state: CallbackState) -> int | None:
        """The step of the best state so far, 0 if there is none. None where no callback asks for it."""
        return None if self._keeper is None else callback_state[self._keeper]["step"]

    def check_metrics(self, metrics: Sequence[str], scores: Sequence[str], evaluated: Container[str]) -> None:
        """`ValueError` for a callback that looks at a metric that there is not.

        `metrics` of a step and `scores` are empty where they are not known yet. `evaluated`: how names of scores begin.
        """
        names = [*metrics, *scores]
        for callback in self.each:
            if not type(callback).__module__.startswith("jaxpar."):
                return  # a callback of the user may put its own metric into the record
            name = callback.monitor if isinstance(callback, Monitor) else None
            chosen = default_monitor(dict.fromkeys([*metrics, *scores], 0.0)) if isinstance(callback, Monitor) else None
            if name is None and scores and chosen == "loss" and jax.process_index() == 0:
                hint = f"give monitor= and mode= for one of {', '.join(sorted(scores))}"
                what = f"train.{name_of(callback)} monitors the loss of the training; {hint}"
                text.say(f"fit: {what}, whose names do not tell what is better")
            if name is None or name.startswith("learning_rate"):
                continue
            who, start = f"train.{name_of(callback)}", name[:5]
            if start in _GIVE and start not in evaluated:
                raise ValueError(f"fit: {who} monitors {name!r}, but nothing is evaluated; give {_GIVE[start]}")
            known = any(score.startswith(start) for score in scores) if start in _GIVE else metrics
            if known and name not in names and name.rpartition("/")[0] not in names:  # columns: "name/0"
                raise_unknown(name, names, who)


def has_memory(callback: Any) -> TypeGuard[WithMemory]:
    """Whether a callback is called as `WithMemory`, not as a function."""
    return callable(getattr(callback, "init", None)) and callable(getattr(callback, "on_epoch", None))


def name_of(callback: Any) -> str:
    return type(callback).__name__


def _check_callback(callback: Any) -> None:
    parts = [name for name in ("init", "on_epoch") if callable(getattr(callback, name, None))]
    if isinstance(callback, type):
        raise TypeError(f"fit: a callback must be an object, not a class; write {callback.__name__}(...)")
    if len(parts) == 1 and not callable(callback):
        raise TypeError(
            f"fit: {name_of(callback)} has only {parts[0]}; a callback with a memory needs both init(state) and "
            "on_epoch(memory, state, record) -> (memory, stop)"
        )
    if not has_memory(callback):
        hint = "; or give an object with init and on_epoch, or a sequence of such functions and objects"
        return check_takes(callback, ("state", "record"), "fit: a callback", hint)
    on_step = getattr(callback, "on_step", None)
    if on_step is not None:
        what = f"fit: {name_of(callback)} has a memory, so its on_step"
        check_takes(on_step, ("memory", "step", "metrics"), what)


# What a callback remembers, as JSON in a checkpoint, and back to the last bit.


def memory_to_json(memory: Any, who: str) -> dict[str, Any]:
    """A memory as JSON: the path and the value of each leaf. `who` is the callback, for messages."""
    names, values, _ = _flatten(memory)
    for name, value in zip(names, values, strict=True):
        if not (isinstance(value, _WORDS) or (isinstance(value, _ARRAYS) and is_of_numbers(value))):
            raise TypeError(
                f"fit: checkpoints save the memory of {who}, so it must be a pytree of arrays, numbers and texts; got "
                f"{checks.describe(value)} at {name or 'its root'}"
            )
    size = sum(value.nbytes for value in values if isinstance(value, _ARRAYS))
    if size > _MOST_BYTES:
        raise ValueError(
            f"fit: the memory of {who} has {size:,} bytes, more than the {_MOST_BYTES:,} saved; put them in the state"
        )
    for i, array in enumerate(values):
        if not isinstance(array, _WORDS):
            array = np.asarray(mesh.to_host(array))
            data = base64.b64encode(array.tobytes()).decode()
            values[i] = {"dtype": str(array.dtype), "shape": list(array.shape), "data": data}
    return {"names": names, "values": values}


def memory_from_json(saved: Any, fresh: Any) -> Any:
    """A saved memory in the structure of a fresh one. `ValueError` where it does not fit, and without one."""
    names, leaves, structure = _flatten(fresh)
    if saved is None or saved["names"] != names:
        raise ValueError("the structure differs")
    found = list(map(_decode, saved["values"]))
    for i, (value, like) in enumerate(zip(found, leaves, strict=True)):
        kind, wanted = ((x.dtype, x.shape) if isinstance(x, _ARRAYS) else None for x in (value, like))
        if kind != wanted:
            raise ValueError("the shape or dtype of an array differs")
        if isinstance(value, np.ndarray):
            with user_mesh.outside_mesh():
                found[i] = jnp.asarray(value.copy()) if isinstance(like, jax.Array) else value.copy()
    return structure.unflatten(found)


def is_saved_memory(saved: Any) -> bool:
    """Whether `memory_to_json` can have written this."""
    try:
        names, values = saved["names"], saved["values"]
        for value in values:
            _decode(value)
        are_texts = all(isinstance(word, str) for word in (saved["name"], *names))
        return are_texts and isinstance(names, list) and len(names) == len(values)
    except (KeyError, TypeError, ValueError, OverflowError):
        return False


def _decode(value: Any) -> Any:
    """The plain value or the array that was saved. Errors of several types for any other value."""
    if isinstance(value, _WORDS):
        return value
    content = base64.b64decode(value["data"], validate=True)
    array = np.frombuffer(content, jnp.dtype(value["dtype"])).reshape(value["shape"])
    if list(array.shape) != value["shape"] or not is_of_numbers(array):  # -1 in a shape stands for any number
        raise ValueError("expected a saved array of numbers")
    return array


def _flatten(memory: Any) -> tuple[list[str], list[Any], Any]:
    """The path of each leaf, the leaves, and the structure. None is a leaf, since an array may take its place."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(memory, is_leaf=lambda value: value is None)
    return [jax.tree_util.keystr(path) for path, _ in leaves], [value for _, value in leaves], structure
