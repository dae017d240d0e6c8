"""All callbacks of a run, as one: what `fit` calls, and what the callbacks remember from one call to the next."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ... import checkpoint
from ..._core import checks, text
from ..._core.arrays import PyTree
from ..._core.functions import check_takes
from ..._devices import processes
from .._step.state import TrainState
from .callback import Callback, CallbackFunction, OnStep, WithMemory, as_callback, has_memory, remembers
from .figures import LivePlot
from .fingerprint import fingerprint
from .history import History, Record
from .loggers import JsonLines, Logger, MetricsFile
from .media import Media
from .memory import memory_from_json, memory_to_json
from .monitors import EarlyStopping, KeepBest, LearningRate, Monitor, default_monitor, raise_unknown
from .undo import Undo

_GIVE = {"test_": "test_data and apply_fn", "eval_": "eval_data and eval_fn"}
CallbackState = tuple[PyTree, ...]  # the memory of each callback. That of a function is None.


class Callbacks:
    """All callbacks of a run. `TypeError` for one that is neither a function nor an object with hooks.

    `ValueError` where two write one file or keep a best checkpoint. The run writes `certificate` too.
    """

    def __init__(
        self,
        metrics_file: str | os.PathLike[str] | None = None,
        callbacks: CallbackFunction | WithMemory | Iterable[CallbackFunction | WithMemory] = (),
        on_step: OnStep | None = None,
        checkpoint_dir: checkpoint._AnyPath | None = None,
        certificate: Path | None = None,
    ):
        if callable(callbacks) or has_memory(callbacks) or not isinstance(callbacks, Iterable):
            callbacks = [callbacks]
        # The metrics file comes first, and has a record before a callback can fail.
        files_of_fit = [] if metrics_file is None else [MetricsFile(metrics_file)]
        user_callbacks: list[CallbackFunction | WithMemory] = [*files_of_fit, *callbacks]
        self.each: tuple[Callback, ...] = tuple(map(as_callback, user_callbacks))
        # A function is wrapped in `each`, and not here: its type names it in messages and checkpoints.
        self._from_user: tuple[object, ...] = tuple(user_callbacks)
        self._began = [fingerprint(callback) for callback in user_callbacks]  # before they count in their attributes

        # What gets the number and the metrics of each step, without a memory.
        if on_step is not None:
            check_takes(on_step, ("step", "metrics"), "fit: on_step")
        self.on_step: list[OnStep] = [] if on_step is None else [on_step]
        self.on_step += [callback.on_step for callback in user_callbacks if isinstance(callback, LivePlot)]

        # Two that write one file would each drop the lines of the other.
        self.loggers: list[Logger] = [callback for callback in user_callbacks if isinstance(callback, Logger)]
        paths = [logger.path.absolute() for logger in self.loggers if isinstance(logger, JsonLines)]
        paths += [] if certificate is None else [certificate.absolute()]
        if twice := [path for path in paths if paths.count(path) > 1]:
            raise ValueError(
                f"fit: {twice[0]} is given twice; give metrics_file=, certificate= and each to_jsonl callback "
                "different files"
            )

        # At most one undoes steps, since fit keeps one copy of a state for it.
        undo = [callback for callback in user_callbacks if isinstance(callback, Undo)]
        if len(undo) > 1:
            raise ValueError("fit: there are two train.Undo; give one, with when= a function for two conditions")
        self.undo: Undo | None = undo[0] if undo else None

        # At most one keeps a best state, since a checkpoint is the best or is not.
        keep = [i for i, callback in enumerate(user_callbacks) if isinstance(callback, KeepBest)]
        if checkpoint_dir is None and keep:
            raise ValueError("fit: train.KeepBest keeps the best checkpoint, so give checkpoint_dir= too")
        restore = [i for i, c in enumerate(user_callbacks) if isinstance(c, EarlyStopping) and c.restore_best]
        keepers = keep + restore
        if len(keepers) > 1:
            raise ValueError(
                f"fit: {len(keepers)} callbacks keep a best checkpoint, and fit keeps only one; give one "
                "train.KeepBest, or one train.EarlyStopping(restore_best=True), which keeps it too"
            )
        self._keeper = keepers[0] if keepers else None  # the place in `each` of the one that keeps a best state
        self.restores_best: bool = bool(restore)  # whether the run ends with that state, not with its last one

    # Before the first step.

    def before_resume(self, directory: checkpoint._AnyPath) -> None:
        """Call all before checkpoints are looked for."""
        for callback in self.each:
            callback.before_resume(directory)

    def init(self, state: TrainState, saved: list[dict[str, Any]] | None, resumed: bool) -> CallbackState:
        """What each callback remembers at first: what was saved of it, or else what it begins with."""
        # A memory belongs to the first callback of its class that has none yet, so that two of one class keep theirs as
        # long as their order stays. One that does not fit, as after another `restore_best`, counts as not saved.
        callback_state, starts_anew, unused = list[Any](), list[str](), list(saved or [])
        for i, callback in enumerate(self.each):
            memory, name = callback.init(state), self._name(i)
            if remembers(callback):
                entry = next((entry for entry in unused if entry["name"] == name), None)
                try:
                    if entry is not None:
                        memory = memory_from_json(entry, memory)
                        unused.remove(entry)
                except ValueError:
                    entry = None
                if entry is None:
                    starts_anew.append(name)
            callback_state.append(memory)
        # A resumed run says which callbacks have no saved memory, and which saved memories have no callback.
        if resumed and jax.process_index() == 0 and (starts_anew or unused):
            names, unused_names = " and ".join(starts_anew), " and ".join(entry["name"] for entry in unused)
            messages = (
                f"the checkpoint has no matching memory of {names}, so it starts anew" if starts_anew else "",
                f"no callback uses the memory of {unused_names} in the checkpoint" if unused else "",
            )
            text.say("fit: " + "; ".join(filter(None, messages)))
        return tuple(callback_state)

    def to_json(self, callback_state: CallbackState) -> list[dict[str, Any]]:
        """What callbacks remember, as a checkpoint keeps it. `TypeError` for a memory that cannot be saved."""
        names = [self._name(i) for i in range(len(self.each))]
        memories = zip(names, self.each, callback_state, strict=True)
        return [{"name": name, **memory_to_json(memory, name)} for name, c, memory in memories if remembers(c)]

    def on_start(self, history: History) -> None:
        """Call all before the first step."""
        for callback in self.each:
            callback.on_start(history)

    # After each step.

    def after_step(self, callback_state: CallbackState, number: int, metrics: dict[str, float]) -> CallbackState:
        """Call all that want each step. What callbacks remember after it."""
        for function in self.on_step:
            function(number, metrics)
        memories = zip(self.each, callback_state, strict=True)
        new = [callback.on_step(memory, number, metrics) for callback, memory in memories]
        self._check_saved(new, "on_step")
        return tuple(new)

    def check_step(self, callback_state: CallbackState, number: int, metrics: dict[str, float]) -> None:
        """`Spike` for a step that a `train.Undo` leaves out."""
        if self.undo is not None:
            self.undo.check(callback_state[self.each.index(self.undo)], number, metrics)

    def count_undone(self, callback_state: CallbackState) -> CallbackState:
        """What callbacks remember after one step more was left out."""
        assert self.undo is not None
        new, at = list(callback_state), self.each.index(self.undo)
        new[at] = {**new[at], "left_out": new[at]["left_out"] + 1}
        return tuple(new)

    # After each record.

    def measure(self, state: TrainState, left_out: int) -> dict[str, float]:
        """What `LearningRate` adds to the record of a state, so many of whose steps were left out."""
        rates = [callback.measure(state, left_out) for callback in self.each if isinstance(callback, LearningRate)]
        return {name: value for measured in rates for name, value in measured.items()}

    def after_record(
        self, callback_state: CallbackState, state: TrainState, record: Record, media: dict[str, Media]
    ) -> tuple[CallbackState, list[str]]:
        """Call each callback. What they remember, and who asked to stop, by a True of Python, NumPy or JAX.

        `media`: the images and texts of the evaluation, for those that take them. An exception in any process is raised
        in every process, and one request to stop stops all. Each is its name and what it is now and was when the run
        began, for `stays_over`.
        """
        new, stops = list(callback_state), list[Any]()
        # One that fails in a process would leave the others waiting in the next step.
        with processes.raise_together():
            if media:
                for callback in self.each:
                    callback.on_media(record["step"], media)
            for i, callback in enumerate(self.each):
                # A memory alone may have two members too, which would be taken for (memory, stop).
                answer: Any = callback.on_epoch(new[i], state, record)
                if not isinstance(answer, tuple) or len(answer) != 2:
                    raise TypeError(
                        f"fit: {self._name(i)}.on_epoch must return (memory, stop), got {checks.describe(answer)}"
                    )
                if isinstance(answer[1], TrainState):  # as other libraries change a rate or params
                    raise TypeError(
                        f"fit: the callback {self._name(i)} returned a state, but fit goes on with the one it trains; "
                        "give the optimizer a schedule or optax.contrib.reduce_on_plateau, or call fit once for each "
                        "part of the run and change the state between the calls"
                    )
                new[i] = answer[0]
                stops.append(answer[1])
            self._check_saved(new, "on_epoch")
        # A function may return anything, such as a figure. Only a bool asks.
        kinds = bool | np.bool_ | jax.Array
        asks = [isinstance(stop, kinds) and np.shape(stop) == () and bool(stop) for stop in stops]
        if processes.all_true(True not in asks):
            return tuple(new), []
        ended_by = [
            f"{self._name(i)} {self._began[i]} {fingerprint(self._from_user[i])}" for i, stop in enumerate(asks) if stop
        ]
        of_processes = map(json.loads, processes.exchange(json.dumps(ended_by)))
        return tuple(new), sorted({entry for entries in of_processes for entry in entries})

    def stays_over(self, ended_by: list[str] | None) -> bool:
        """Whether one of the callbacks that ended a run is given again, with the same settings, in any process.

        None: a checkpoint of an earlier jaxpar does not say who it was.
        """
        if ended_by is None:
            return bool(self.each)
        # An object may count in its attributes. It is as at the end where it is used once more, else as at the start.
        enders = {(name, value) for name, *fingerprints in map(str.split, ended_by) for value in fingerprints}
        callbacks = {(self._name(i), began) for i, began in enumerate(self._began)}
        return not processes.all_true(not enders & callbacks)

    def best_step(self, callback_state: CallbackState) -> int | None:
        """The step of the best state so far, 0 if there is none. None where no callback asks for it."""
        return None if self._keeper is None else callback_state[self._keeper]["step"]

    def on_saved(self, record: Record, written: Callable[[], checkpoint._AnyPath | None]) -> None:
        """Call all after a record is saved."""
        for callback in self.each:
            callback.on_saved(record, written)

    def on_end(self, history: History) -> None:
        """Call all at the end of the run."""
        for callback in self.each:
            callback.on_end(history)

    def check_metrics(self, metrics: Sequence[str], scores: Sequence[str], evaluated: Container[str]) -> None:
        """`ValueError` for a callback that looks at a metric that there is not.

        `metrics` of a step and `scores` are empty where they are not known yet. `evaluated`: how names of scores begin.
        """
        names = [*metrics, *scores]
        for i, callback in enumerate(self._from_user):
            if not type(callback).__module__.startswith("jaxpar."):
                return  # a callback of the user may put its own metric into the record
            if not isinstance(callback, Monitor):
                continue
            who, name = f"train.{self._name(i)}", callback.monitor
            if name is None:
                if scores and default_monitor(dict.fromkeys(names, 0.0)) == "loss" and jax.process_index() == 0:
                    text.say(
                        f"fit: {who} monitors the loss of the training; give monitor= and mode= for one of "
                        f"{', '.join(sorted(scores))}, whose names do not tell what is better"
                    )
                continue
            if name.startswith("learning_rate"):
                continue
            data = name[:5]
            if data in _GIVE and data not in evaluated:
                raise ValueError(f"fit: {who} monitors {name!r}, but nothing is evaluated; give {_GIVE[data]}")
            are_known = any(score.startswith(data) for score in scores) if data in _GIVE else metrics
            if are_known and name not in names and name.rpartition("/")[0] not in names:  # columns: "name/0"
                raise_unknown(name, names, who)

    def _name(self, i: int) -> str:
        """The name of a callback in messages and checkpoints."""
        return type(self._from_user[i]).__name__

    def _check_saved(self, memories: Sequence[PyTree], hook: str) -> None:
        """`TypeError` for a memory that no checkpoint would have: a resumed run would go on without it."""
        for i, (callback, memory) in enumerate(zip(self.each, memories, strict=True)):
            if memory is not None and not remembers(callback):
                raise TypeError(
                    f"fit: {self._name(i)}.{hook} returned the memory {checks.describe(memory)}, and the class has no "
                    "init; write init(self, state), which returns the first memory"
                )
