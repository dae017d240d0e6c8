"""The checkpoints of a run of `fit`: where it goes on, and when it saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from ... import distributed
from ..._core.text import say_news
from ..._devices.donation import is_donated, zeros_if_donated
from ...checkpoint import CheckpointError, Found, Manager
from .._callbacks.memory import is_saved_memory
from .._step.state import TrainState
from .loop import Loop
from .run import Run, RunHistory

_SIZES = ("batch_size", "examples")


class RunCheckpoints:
    """The checkpoints of a run. There are none without a directory.

    Args:
        run: a checkpoint of a run with other batches is refused.
    """

    def __init__(self, run: Run):
        self._run, self.directory = run, run.options.checkpoint_dir
        self._manager = None
        self._latest: Path | None = None
        if self.directory is not None:
            self._manager = Manager(self.directory, keep=run.options.keep, on_latest=self._note)

    def resume(self, state: TrainState) -> tuple[TrainState, RunHistory]:
        """The state to go on from, and the run that it is in."""
        found, resume = None, self._run.options.resume
        if self._manager is not None and resume:
            self._run.callbacks.before_resume(self._manager.directory)
            found = self._manager._restore(like_saved(state, self._run.step), _check_info)
        if found is None and resume is True:
            raise FileNotFoundError(f"fit: resume=True, but {self.directory} holds no checkpoint")
        donated = is_donated(state)
        if found is None or not (donated or _goes_on(*found, int(state.step))):
            if donated:
                raise ValueError("fit: this state was donated to an earlier step; use the one that it returned")
            return state, RunHistory(int(state.step))
        first = None if donated else int(state.step)
        state, info = found
        if jax.process_index() == 0:
            say_news(f"resumed from step {int(state.step)} in {self.directory}")
        if _is_of_fit(info):
            return state, _run_history(info, self._run)
        return state, RunHistory(int(state.step) if first is None else first)  # no epoch of that state is known

    def claim(self) -> None:
        """Claim the directory for this run. `OSError` where another one that runs has it."""
        if self._manager is not None:
            self._manager._claim_directory()

    def save(self, loop: Loop, *, stopped: bool = False, interrupted: bool = False) -> None:
        """Save the state of the loop if it is due."""
        if self._manager is None:
            return
        every, interrupted = self._run.options.checkpoint_every, interrupted or loop.is_cut
        best = self._run.callbacks.is_best(loop.memories, loop.at)
        if loop.between_epochs or stopped or interrupted or best or (every and loop.at % every == 0):
            about = loop.to_save()
            records = about.pop("history")  # most are in a file of their own, which a save does not write again
            about |= dict(zip(_SIZES, _sizes(self._run), strict=True))
            about |= {"stopped": stopped, "interrupted": interrupted}
            self._manager._save(loop.state, about, best=best, records=records)

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
        if self.directory is None:
            return None
        return max(Path(self.directory).glob(f"step_{step:08d}*"), key=lambda path: path.stat().st_mtime, default=None)

    def close(self) -> None:
        """Wait until all is written. `OSError` where it cannot be."""
        if self._manager is not None:
            self._manager.close()


def like_saved(state: TrainState, step: Any) -> TrainState:
    """A state with all parts that the step's checkpoints have. A step of the user's own has those of `state`."""
    state = zeros_if_donated(state)
    return step.complete(state) if hasattr(step, "complete") else state


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
    good = {
        "first": _is_count(info.get("first")) and info["first"] <= step,
        **{name: _is_count(info.get(name)) for name in _SIZES},
        **{name: isinstance(info.get(name, False), bool) for name in ("stopped", "interrupted")},
        "history": isinstance(history, list) and all(map(_is_record, history)),
        "sums": isinstance(sums, dict) and all(map(_is_number, sums.values())),
        "counted": _is_count(info.get("counted", 0)),
        "seconds": _is_number(info.get("seconds", 0.0)),
        "callbacks": isinstance(callbacks, list) and all(map(is_saved_memory, callbacks)),
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


def _sizes(run: Run) -> tuple[int, int]:
    return run.options.batch_size, run.examples


def _run_history(info: dict[str, Any], run: Run) -> RunHistory:
    """The run of a checkpoint. `ValueError` if it had other batches."""
    saved, now = tuple(info[name] for name in _SIZES), _sizes(run)
    if saved != now:
        raise ValueError(
            f"fit: the checkpoint is of a run with batches of {saved[0]} out of {saved[1]} examples, this one has "
            f"{now[0]} out of {now[1]}; use those again, or another checkpoint_dir, or resume=False"
        )
    stopped, memories = info.get("stopped", False), info.get("callbacks")
    history = [record for record in info.get("history", []) if _is_record(record)]
    return RunHistory(info["first"], history, info, stopped, memories, resumed=True)
