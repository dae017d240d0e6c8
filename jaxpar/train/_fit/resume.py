"""The checkpoints of a run of `fit`: where it resumes, and what it saves."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path
from typing import Any

import jax

from ... import data, distributed, updaters
from ..._core.text import say, say_news
from ..._devices import processes
from ..._devices.mesh import is_donated, zeros_if_donated
from ..._devices.user_mesh import outside_mesh
from ...checkpoint import CheckpointError, Found, Manager, _of_step
from .._callbacks.callbacks import is_saved_memory
from .._callbacks.history import Record
from .._step.state import TrainState
from .progress import Epoch
from .run import Run


@dataclasses.dataclass(frozen=True)
class RunHistory:
    """What happened before this call of `fit`."""

    first: int  # the step at which the run began
    history: list[Record] = dataclasses.field(default_factory=list)  # the records of the epochs that are over
    epoch: Epoch = dataclasses.field(default_factory=Epoch)  # the one that is not
    stopped: bool = False  # whether a callback ended the training
    memories: list[Any] | None = None  # of the callbacks, as `Callbacks.to_json` gave them. None: they were not saved.
    resumed: bool = False  # whether it goes on from a checkpoint of `fit`


class RunCheckpoints:
    """The checkpoints of a run. There are none without a directory. One of a run with other batches is refused."""

    def __init__(self, run: Run):
        self._run, self.directory = run, run.options.checkpoint_dir
        self._sizes = {"batch_size": run.options.batch_size, "examples": run.examples}
        self._manager = None
        self._latest: Path | None = None
        self._rates: dict[str, float] = {}  # that the run was begun with, where the state has them
        if self.directory is not None:
            self._manager = Manager(self.directory, keep=run.options.keep, on_latest=self._note)

    def resume(self, state: TrainState) -> tuple[TrainState, RunHistory]:
        """The state to resume from, and its run."""
        found, resume = None, self._run.options.resume
        if self._manager is not None and resume:
            with processes.raise_together():
                self._run.callbacks.call("before_resume", self._manager.directory)
            found = self._manager._restore(like_saved(state, self._run.step), _check_info)
        if found is None and resume is True:
            raise FileNotFoundError(f"fit: resume=True, but {self.directory} holds no checkpoint")
        donated = is_donated(state)  # as by a call of `fit` that failed: a checkpoint is its only way on
        self._rates = {} if donated or self._manager is None else updaters.learning_rates(state)
        if found is None or not (donated or _goes_on(*found, int(state.step))):
            if donated:
                raise ValueError("fit: this state was donated to an earlier step; use the state that it returned")
            return state, RunHistory(int(state.step))
        first = None if donated else int(state.step)
        state, info = found  # the checkpoint is after the state
        if jax.process_index() == 0:
            say_news(f"resumed from step {int(state.step)} in {self.directory}")
            self._say_other_rates(info.get("rates", {}), state)
        if _is_of_fit(info):
            data._go_to(self._run.source, info.get("place"))
            return state, self._history(info)
        return state, RunHistory(int(state.step) if first is None else first)  # no epoch of that state is known

    def _say_other_rates(self, saved: dict[str, float], state: TrainState) -> None:
        """Say that a resumed run keeps the rate of its checkpoint, if `fit` is now given another rate than at first."""
        # Compares the rates given to the two calls of `fit`, because a callback may have changed the rate since.
        if saved and self._rates and saved != self._rates:
            given, before, now = (
                ", ".join(f"{rate:g}" for rate in rates.values())
                for rates in (self._rates, saved, updaters.learning_rates(state))
            )
            say(
                f"fit: the given state has the learning rate {given}, but the run in {self.directory} began with "
                f"{before}. The resumed run keeps the rate of the checkpoint, {now}. To change it, call "
                "updaters.set_learning_rate on the state that checkpoint.restore returns; resume=False begins a new run"
            )

    def _history(self, info: dict[str, Any]) -> RunHistory:
        """The run of a checkpoint. `ValueError` if it had other batches."""
        batch_size, examples = info["batch_size"], info["examples"]
        if {"batch_size": batch_size, "examples": examples} != self._sizes:
            raise ValueError(
                f"fit: the checkpoint is from a run with batches of {batch_size} out of {examples} examples, but this "
                f"run has {self._sizes['batch_size']} out of {self._sizes['examples']}; give the same again, another "
                "checkpoint_dir, or resume=False"
            )
        epoch = Epoch(collections.Counter(info.get("sums", {})), info.get("counted", 0), info.get("seconds", 0.0))
        history = list(filter(_is_record, info.get("history", [])))
        return RunHistory(
            info["first"], history, epoch, info.get("stopped", False), info.get("callbacks"), resumed=True
        )

    def claim(self) -> None:
        """Claim the directory for this run. `OSError` where another one that runs has it."""
        if self._manager is not None:
            self._manager._claim_directory()

    def save(self, state: TrainState, about: dict[str, Any], history: list[Record], best: bool) -> None:
        """Save a state, `about` beside it as JSON, and the history. `best`: it stays when later ones come."""
        # Most of the history is in a file of its own, which a save does not write again.
        if self._manager is not None:
            about = {**about, **self._sizes, "rates": self._rates}
            place = data._place_in(self._run.source)
            about |= {} if place is None else {"place": place}
            self._manager._save(state, about, best=best, records=history)

    def restore(self, state: TrainState, step: int) -> TrainState:
        """The state that was saved after a step, on the devices of `state`. `CheckpointError` where it is gone."""
        like = like_saved(state, self._run.step)
        found = self._manager and self._manager._restore(like, _check_info, lambda body: body.get("step") == step)
        if not found:
            raise CheckpointError(f"fit: {self.directory} has no good checkpoint of the best state, of step {step}")
        return found[0]

    def written(self, step: int) -> Path | None:
        """Wait until all is on disk. Return what this run wrote or restored of a step, in the process that writes."""
        if self._manager is not None:
            self._manager.wait()
        latest = self._latest
        return latest if latest is not None and latest.name.startswith(f"step_{step:08d}") else None

    def _note(self, path: Path) -> None:
        self._latest = path
        distributed.set_resume_hint(path)

    def path(self, step: int) -> Path | None:
        """The newest checkpoint of a step. None where there is no directory."""
        return None if self.directory is None else _of_step(Path(self.directory), step)

    def close(self) -> None:
        """Wait until all is written. `OSError` where it cannot be."""
        if self._manager is not None:
            self._manager.close()


def like_saved(state: TrainState, step: Any) -> TrainState:
    """A state with all parts that the step's checkpoints have. A step of the user's own has those of `state`."""
    with outside_mesh():
        state = zeros_if_donated(state)
    return step.complete(state) if hasattr(step, "complete") else state


def copy_state(state: TrainState) -> TrainState:
    """A copy, which stays when the state is donated to a step."""
    with outside_mesh():
        return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, state)


def _goes_on(found: TrainState, info: dict[str, Any], step: int) -> bool:
    """Whether a checkpoint is after a step, or of a run that was interrupted at it."""
    return int(found.step) > step or (int(found.step) == step and bool(info.get("interrupted")))


def _is_of_fit(info: dict[str, Any]) -> bool:
    """Whether `fit` saved a checkpoint with this info, not the user."""
    return "first" in info


def _check_info(found: Found) -> None:
    """`CheckpointError` for the info of a run that `fit` cannot have saved."""
    info, step = found.body.get("info", {}), found.body.get("step", 0)
    if not _is_of_fit(info):
        return
    history, sums, callbacks = info.get("history", []), info.get("sums", {}), info.get("callbacks", [])
    rates = info.get("rates", {})
    good = {
        "first": _is_count(info.get("first")) and info["first"] <= step,
        **{name: _is_count(info.get(name)) for name in ("batch_size", "examples")},
        **{name: isinstance(info.get(name, False), bool) for name in ("stopped", "interrupted")},
        "history": isinstance(history, list) and all(map(_is_record, history)),
        "sums": isinstance(sums, dict) and all(map(_is_number, sums.values())),
        "counted": _is_count(info.get("counted", 0)),
        "seconds": _is_number(info.get("seconds", 0.0)),
        "rates": isinstance(rates, dict) and all(map(_is_number, rates.values())),
        "callbacks": isinstance(callbacks, list) and all(map(is_saved_memory, callbacks)),
        "place": isinstance(info.get("place", []), list),
    }
    wrong = [name for name, holds in good.items() if not holds]
    if wrong:
        raise CheckpointError(f"{found.path} is damaged: wrong {' and '.join(wrong)} in the info of the run")


def _is_record(record: Any) -> bool:
    return isinstance(record, dict) and _is_count(record.get("epoch")) and _is_count(record.get("step"))


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_count(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
