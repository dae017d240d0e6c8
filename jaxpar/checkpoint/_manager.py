"""The checkpoints of a run in one directory: written in the background, rotated, and the newest good one restored."""

from __future__ import annotations

import concurrent.futures
import errno
import json
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._core import checks
from .._core.calls import answers
from .._core.files import as_path
from .._devices import processes
from . import _files, _leaves, _manifest, _records, _save
from ._claim import Claim
from ._manifest import CheckpointError
from ._save import Found, PathLike, Tree

Accepts = Callable[[Found], object]
Wanted = Callable[[dict[str, Any]], bool]  # of a manifest


def _any(body: dict[str, Any]) -> bool:
    return True


class Manager:
    """The checkpoints of a run in one directory, written in the background. The last `keep` stay, and the best one.

    Args:
        directory: one run at a time writes into it. The first `save` makes it where it does not exist, and claims it
            until `close`. Making a `Manager` and restoring change nothing there. A `save` removes what killed
            processes of this machine left half-written. What others left is removed when it has not changed for a
            week.
        keep: how many stay. Damaged ones do not count and are never removed.
        on_latest: called with the path of the checkpoint that would be restored, whenever that is another one: when
            one is on disk (by the thread that writes, in the first of several processes) or was restored.

    Raises:
        OSError: nothing can be written there.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> from jaxpar import checkpoint
        >>> checkpoints = checkpoint.Manager(tempfile.mkdtemp(), keep=2)
        >>> checkpoints.save({"w": jnp.ones(2)}, {"seen": 1})
        >>> checkpoints.close()
        >>> state, info = checkpoints.restore_latest({"w": jnp.zeros(2)})
        >>> state["w"].tolist(), info
        ([1.0, 1.0], {'seen': 1})
    """

    @answers("checkpoint.Manager")
    def __init__(self, directory: PathLike, *, keep: int = 3, on_latest: Callable[[Path], None] | None = None):
        self.directory: Path = as_path(directory, "checkpoint.Manager: directory")
        self._on_latest = on_latest
        self.keep: int = checks.whole_number(keep, "checkpoint.Manager", "keep")
        self._bad: set[Path] = set()
        self._known: _save.Known = {}
        self._claim, self._records = Claim(self.directory), _records.RecordWriter(self.directory)
        weakref.finalize(self, self._claim.release)
        self._writer: concurrent.futures.ThreadPoolExecutor | None = None
        self._writing: concurrent.futures.Future[None] | None = None
        self._writes, self._pid = jax.process_index() == 0, os.getpid()
        self._waited = True  # the same in every process
        with processes.raise_together():
            if self._writes:
                _check_writable(self.directory)

    def save(self, state: Any, info: dict[str, Any] | None = None, *, best: bool = False) -> None:
        """Copy the state and write the copy in the background. The state may be donated right after.

        It waits for the checkpoint before, where that is still being written.

        Args:
            state: as for `save`.
            info: what to keep with it, as JSON: a dict of at most 100 lists and dicts in each other.
            best: whether it is the best one so far. It stays until another one is, and `best` finds it.

        Raises:
            OSError: the checkpoint before this one could not be written. Another process that runs writes there.
            TypeError: a leaf that is no array, an `info` that is no dict of JSON.
        """
        self._save(state, {} if info is None else info, best=best)

    def _save(
        self, state: Any, info: dict[str, Any], *, best: bool = False, records: Sequence[dict[str, Any]] | None = None
    ) -> None:
        """As `save`. `records` are those of the whole run. Those that are new are written."""
        self.wait()
        leaves, arrays = _leaves.to_leaves(state, self._writes)
        with processes.raise_together():
            last = {} if records is None else {"history": list(records[-_records.INSIDE :])}
            info = _as_json({**info, **last} if last else info)
            if self._writes:
                self._claim.hold()
                content = {
                    **_save.about(state, self.directory, self._known),
                    "info": info,
                    **({"best": True} if best else {}),
                }
                new = None if records is None else self._records.new(records)
                self._writer = self._writer or concurrent.futures.ThreadPoolExecutor(1, "jaxpar-checkpoint")
                self._writing = self._writer.submit(self._write, content, leaves, arrays, new)
        self._waited = False

    def _claim_directory(self) -> None:
        """Claim the directory before there is anything to save. The errors are those of `save`."""
        with processes.raise_together():
            if self._writes:
                self._claim.hold()

    def restore_latest(self, like: Tree) -> tuple[Tree, dict[str, Any]] | None:
        """(the state, the info) of the newest good checkpoint, or None.

        A damaged or unreadable checkpoint is named on standard error, and the one before is tried. Several processes
        take the same one: the newest that each of them can read.

        Raises:
            CheckpointError: the checkpoint is good but does not fit `like`, or process 0 can read checkpoints, and
                there is none that all processes can read.
        """
        return self._restore(like, lambda found: None)

    def restore_best(self, like: Tree) -> tuple[Tree, dict[str, Any]] | None:
        """(the state, the info) of the best checkpoint, or None. The errors are those of `restore_latest`.

        A damaged or unreadable one is named on standard error, and the best one before it is taken.
        """
        return self._restore(like, lambda found: None, _save.is_best)

    def _restore(self, like: Tree, accepts: Accepts, wanted: Wanted = _any) -> tuple[Tree, dict[str, Any]] | None:
        """As `restore_latest`. One that `accepts` refuses by a `CheckpointError` is passed over too."""
        self.wait()
        found = self._agree(accepts, wanted)
        if found is None:
            return None
        state, info = _save.fill(found, like), found.body.get("info", {})
        if (place := found.body.get("records")) is not None:
            info = {**info, "history": self._read_records(found.path, place, info.get("history", []))}
        if self._on_latest is not None:
            self._on_latest(found.path)
        return state, info

    def _read_records(self, path: Path, place: _records.Place, last: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The records of a checkpoint, the last of which it holds itself. Standard error says where others are lost."""
        try:
            found = processes.ask_first(lambda: _records.read(self.directory, place), CheckpointError)
        except CheckpointError as error:
            if self._writes and len(last) < place["number"]:
                _save.say(f"{error}; {path} is restored with the last {len(last)} of its {place['number']} records")
            return last
        self._records.go_on(place, found)
        return found

    def _agree(self, accepts: Accepts, wanted: Wanted) -> Found | None:
        """The newest checkpoint that every process can read, the same in all of them."""
        missed, self._bad = "", set()  # what could not be read before may be readable now
        while True:
            own: dict[str, Found] = {}
            chosen = processes.ask_first(lambda own=own: self._newest_good(own, accepts, wanted), CheckpointError)
            if chosen is None and missed:
                raise CheckpointError(f"{missed}; and there is no earlier checkpoint that all processes can read")
            if chosen is None:
                return None
            with processes.raise_together(CheckpointError):
                found, why = (own[chosen], None) if chosen in own else _try_to_read(chosen)
            missed = _difference(chosen, found, why)
            if not missed:
                return found
            if self._writes:
                _save.pass_over(Path(chosen), self._bad, missed)

    def _newest_good(self, own: dict[str, Found], accepts: Accepts, wanted: Wanted) -> str | None:
        """The path of a checkpoint that this process can read, and in `own` what it holds."""
        found = _save.newest_good(self.directory, self._bad, accepts, wanted)
        if found is None:
            return None
        own[str(found.path)] = found
        return str(found.path)

    def wait(self) -> None:
        """Wait until what was saved is on disk. `OSError` where it could not be written."""
        if os.getpid() != self._pid:  # the thread that writes is not in a fork
            raise RuntimeError(
                f"checkpoint.Manager: process {os.getpid()} is a fork of the one that made this Manager, {self._pid}, "
                "which writes; save there, or make a Manager in the fork"
            )
        if not self._waited:
            self._waited = True
            with processes.raise_together():
                self._finish()

    def _finish(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        """Wait as `wait` does, end the thread that writes, and let another process write to the directory.

        While an exception is raised, perhaps in this process only, the other processes are not asked.
        """
        if os.getpid() != self._pid:
            return
        try:
            if sys.exception() is None:
                self.wait()
            else:
                self._finish()
        finally:
            if self._writer is not None:
                self._writer.shutdown()
                self._writer = None
            self._claim.release()

    def _write(
        self, content: dict[str, Any], leaves: list[Any], arrays: list[np.ndarray], records: list[str] | None
    ) -> None:
        _files.remove_leftovers(self.directory)
        if records is not None and (place := self._records.append(records)) is not None:
            content = {**content, "records": place}
        written = _free(self.directory, content)
        _files.write(written, content, leaves, arrays)
        _save.remember(written, content, self._known)
        if self._on_latest is not None:
            self._on_latest(written)
        listed = _save.newest_first(self.directory, set(self._bad), report=False, known=self._known)
        self._known = {path: self._known[path] for path, _ in listed}
        best = next((path for path, body in listed if _save.is_best(body)), None)
        for path, _ in listed[self.keep :]:
            if path != best:
                _files.remove(path)


def _try_to_read(path: str) -> tuple[Found | None, str | None]:
    """What this process reads at a path, or the reason why it cannot."""
    try:
        return _save.read(path), None
    except (CheckpointError, FileNotFoundError) as error:
        return None, str(error)


def _difference(path: str, found: Found | None, why: str | None) -> str:
    """Which process cannot read the checkpoint that process 0 reads, and why. "" where all read the same."""
    digest = None if found is None else _manifest.digest(found.body)
    said = [json.loads(text) for text in processes.exchange(json.dumps([digest, why]))]
    for process, (theirs, reason) in enumerate(said):
        if theirs != said[0][0]:
            return f"process {process}: {reason or f'{path} is another checkpoint than in process 0'}"
    return ""


def _as_json(info: Any) -> dict[str, Any]:
    """A copy of the info. `TypeError` where it cannot be saved."""
    if not isinstance(info, dict):
        raise TypeError(f"checkpoint.Manager.save: info must be a dict, got {type(info).__name__}")
    try:
        copy = json.loads(json.dumps(info))
        _manifest.check_depth(copy)
    except (ValueError, RecursionError) as error:
        raise TypeError(f"checkpoint.Manager.save: info must be JSON ({error})") from error
    return copy


def _check_writable(directory: Path) -> None:
    """`OSError` where a directory cannot be written or made. Nothing is written."""
    there = next(p for p in (directory.absolute(), *directory.absolute().parents) if os.path.lexists(p))
    number = errno.ENOTDIR if not there.is_dir() else errno.EACCES if not os.access(there, os.W_OK | os.X_OK) else 0
    if number:
        reason = os.strerror(number)
        raise OSError(f"checkpoint.Manager: nothing can be written to {directory} ({reason}); choose another directory")


def _free(directory: Path, content: dict[str, Any]) -> Path:
    """A path that is not taken. The step may be there already, damaged or from an earlier run."""
    name = f"step_{content['step']:08d}" if "step" in content else f"save_{content['order']:08d}"
    path, again = directory / name, 1
    while os.path.lexists(path):
        again += 1
        path = directory / f"{name}.{again}"
    return path
