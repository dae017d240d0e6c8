"""The checkpoints of a run of `fit`: what it goes on from, and when it saves."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import jax

from ... import distributed
from ..._devices.donation import is_donated, zeros_if_donated
from ...checkpoint import CheckpointError, Found
from .._step.state import TrainState
from .._step.train_step import TrainStep
from .loop import Loop, Record

_SIZES = ("batch_size", "examples")


@dataclasses.dataclass(frozen=True)
class RunHistory:
    """What happened before this call of `fit`.

    Attributes:
        first: the step at which the run began.
        history: of the epochs that are over.
        under_way: the sums of the epoch that is not.
        stopped: whether a callback ended the training.
    """

    first: int
    history: list[Record] = dataclasses.field(default_factory=list)
    under_way: dict[str, Any] = dataclasses.field(default_factory=dict)
    stopped: bool = False


class RunCheckpoints:
    """The checkpoints in a directory; none where `directory` is None.

    Args:
        every: save after so many steps, beside the end of each epoch.
        batch_size, examples: of the run; a checkpoint of others is refused.
    """

    def __init__(
        self, directory: str | os.PathLike[str] | None, keep: int, every: int | None, batch_size: int, examples: int
    ):
        self.directory, self._every, self._sizes = directory, every, (batch_size, examples)
        self._manager = None
        if directory is not None:
            from ... import checkpoint

            self._manager = checkpoint.Manager(directory, keep=keep, on_latest=distributed.set_resume_hint)

    def resumed(self, state: TrainState, resume: str | bool, step: TrainStep) -> tuple[TrainState, RunHistory]:
        """The state to go on from, and what is known of the run it is in."""
        found = None
        if self._manager is not None and resume:
            found = self._manager._restore(_like(state, step), _check_info)
        if found is None and resume is True:
            raise FileNotFoundError(f"fit: resume=True, but {self.directory} holds no checkpoint")
        stale = is_donated(state)
        if found is None or not (stale or _goes_on(*found, int(state.step))):
            if stale:
                raise ValueError("fit: this state was given away to an earlier step; use the one it returned")
            return state, RunHistory(int(state.step))
        first = None if stale else int(state.step)
        state, info = found
        if jax.process_index() == 0:
            print(f"jaxpar: resumed from step {int(state.step)} in {self.directory}", file=sys.stderr)
        if _is_of_fit(info):
            return state, _past(info, *self._sizes)
        return state, RunHistory(int(state.step) if first is None else first)  # no epoch of that state is known

    def save(
        self, state: TrainState, loop: Loop, history: list[Record], *, over: bool, stopped: bool, interrupted: bool
    ) -> None:
        """Saves the state if it is time to, `over` being whether an epoch ends with it."""
        due = over or stopped or interrupted or (self._every and loop.at % self._every == 0)
        if self._manager is not None and due:
            about = {"first": loop.first, "history": history, "stopped": stopped, "interrupted": interrupted}
            sizes = dict(zip(_SIZES, self._sizes, strict=True))
            self._manager.save(state, {**about, **sizes, **loop.unfinished()})

    def path(self, step: int) -> Path | None:
        """The newest checkpoint of a step, where there are checkpoints at all."""
        if self.directory is None:
            return None
        return max(Path(self.directory).glob(f"step_{step:08d}*"), key=lambda path: path.stat().st_mtime, default=None)

    def close(self) -> None:
        """Waits for what is being written; `OSError` where it could not be."""
        if self._manager is not None:
            self._manager.close()


def _like(state: TrainState, step: TrainStep) -> TrainState:
    """A state of the structure that the step's checkpoints have; a step of the user's own has that of `state`."""
    state = zeros_if_donated(state)
    return step.complete(state) if hasattr(step, "complete") else state


def _goes_on(found: TrainState, info: dict[str, Any], step: int) -> bool:
    """Whether a checkpoint is further than a state, or of the run that was interrupted at it."""
    return int(found.step) > step or (int(found.step) == step and bool(info.get("interrupted")))


def _is_of_fit(info: dict[str, Any]) -> bool:
    """Whether `fit` saved a checkpoint with this info, rather than `checkpoint.save` or a `Manager` by hand."""
    return "first" in info


def _check_info(found: Found) -> None:
    """`CheckpointError` for an info that looks like that of `fit`, which cannot have saved it."""
    info, step = found.body.get("info", {}), found.body.get("step", 0)
    if not _is_of_fit(info):
        return
    history, sums = info.get("history"), info.get("sums", {})
    good = {
        "first": _is_count(info.get("first")) and info["first"] <= step,
        **{name: _is_count(info.get(name)) for name in _SIZES},
        **{name: isinstance(info.get(name, False), bool) for name in ("stopped", "interrupted")},
        "history": isinstance(history, list) and all(map(_is_record, history)),
        "sums": isinstance(sums, dict) and all(map(_is_number, sums.values())),
        "counted": _is_count(info.get("counted", 0)),
        "seconds": _is_number(info.get("seconds", 0.0)),
    }
    wrong = [name for name, holds in good.items() if not holds]
    if wrong:
        raise CheckpointError(f"{found.path} is damaged: its info of the run has a wrong {' and '.join(wrong)}")


def _is_record(record: Any) -> bool:
    return isinstance(record, dict) and _is_count(record.get("epoch")) and _is_count(record.get("step"))


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_count(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _past(info: dict[str, Any], batch_size: int, examples: int) -> RunHistory:
    """A run goes on with the batches it had."""
    then, now = tuple(info[name] for name in _SIZES), (batch_size, examples)
    if then != now:
        raise ValueError(
            f"fit: the checkpoint is of a run with batches of {then[0]} out of {then[1]} examples, this one has "
            f"{now[0]} out of {now[1]}; use those again, or another checkpoint_dir, or resume=False"
        )
    return RunHistory(info["first"], info["history"], info, info.get("stopped", False))
