"""The checkpoints of a run in one directory: written in the background, rotated, and the newest good one restored."""

from __future__ import annotations

import concurrent.futures
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
from . import _files, _leaves, _manifest, _save
from ._lock import DirectoryLock
from ._manifest import CheckpointError
from ._save import Accepts, Found, PathLike, Tree, Wanted


class Manager:
    """Writes the checkpoints of a run in the background.

    Args:
        directory: the directory of the checkpoints. One run at a time writes into it. The first `save` creates it if
            needed and locks it until `close`. Making a `Manager` and restoring change nothing on disk. A `save` removes
            half-written files that killed processes of this machine left. Half-written files of other machines are
            removed a week after their last change.
        keep: how many of the newest checkpoints stay. The best one stays too. Damaged checkpoints do not count and are
            never removed.
        on_latest: called with the path of the newest checkpoint, whenever that changes: after a checkpoint is on disk
            (by the writing thread, in the first process) and after a restore.

    Raises:
        OSError: the directory is not writable.

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
        self.keep: int = checks.whole_number(keep, "checkpoint.Manager", "keep")
        self._on_latest = on_latest
        self._latest: Path | None = None  # what was written or restored last
        self._bad: set[Path] = set()
        self._known: dict[Path, tuple[Any, dict[str, Any]]] = {}  # see `_summary`
        self._records = _manifest.RecordWriter(self.directory)
        self._lock = DirectoryLock(self.directory)
        weakref.finalize(self, self._lock.release)
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        # What `wait` waits for. In the other processes, which write nothing, it does nothing.
        self._writing: concurrent.futures.Future[None] | None = None
        self._writes, self._pid = jax.process_index() == 0, os.getpid()
        with processes.raise_together():
            if self._writes:
                _files.check_writable(self.directory, "checkpoint.Manager")

    def save(self, state: Any, info: dict[str, Any] | None = None, *, best: bool = False) -> None:
        """Copy the state, and write the copy in the background.

        The state may be donated right after the call. If the previous checkpoint is still being written, the call waits
        for it.

        Args:
            state: as for `save`.
            info: a dict that is stored as JSON, nested at most 100 deep.
            best: whether this checkpoint is the best so far. It stays until a better one is saved, and `best` finds it.

        Raises:
            OSError: the previous checkpoint could not be written, or another running process writes into the directory.
            TypeError: a leaf is not an array, or `info` is not a dict of JSON values.
        """
        self._save(state, {} if info is None else info, best=best)

    def _save(
        self, state: Any, info: dict[str, Any], *, best: bool = False, records: Sequence[dict[str, Any]] | None = None
    ) -> None:
        """As `save`. `records` are the records of the whole run. New records are written."""
        self.wait()
        leaves, arrays = _leaves.to_leaves(state, self._writes)
        with processes.raise_together():
            if records is not None:
                info = {**info, "history": list(records[-_manifest.INSIDE :])}
            content = {**_save.step_of(state), "info": _as_json(info), **({"best": True} if best else {})}
            new: list[str] | None = None
            if self._writes:
                self._lock.acquire()
                new = None if records is None else self._records.new(records)
            self._pool = self._pool or concurrent.futures.ThreadPoolExecutor(1, "jaxpar-checkpoint")
            writing = self._pool.submit(self._write, content, leaves, arrays, new)
        self._writing = writing

    def _lock_directory(self) -> None:
        """Lock the directory before the first save. Raises as `save` does."""
        with processes.raise_together():
            if self._writes:
                self._lock.acquire()

    def restore_latest(self, like: Tree) -> tuple[Tree, dict[str, Any]] | None:
        """(the state, the info) of the newest good checkpoint, or None.

        A damaged or unreadable checkpoint is named on standard error, and the previous one is tried. Several processes
        restore the same checkpoint: the newest that all of them can read.

        Raises:
            CheckpointError: the checkpoint is good but does not fit `like`, or no checkpoint that process 0 can read is
                readable by all processes.
        """
        return self._restore(like)

    def restore_best(self, like: Tree) -> tuple[Tree, dict[str, Any]] | None:
        """(the state, the info) of the best checkpoint, or None.

        A damaged or unreadable checkpoint is named on standard error, and the previous best one is restored. Raises as
        `restore_latest` does.
        """
        return self._restore(like, wanted=_save.is_best)

    def _restore(
        self, like: Tree, accepts: Accepts = lambda found: None, wanted: Wanted = lambda body: True
    ) -> tuple[Tree, dict[str, Any]] | None:
        """As `restore_latest`. One that `accepts` refuses by a `CheckpointError` is passed over too."""
        self.wait()
        found = self._agree(accepts, wanted)
        if found is None:
            return None
        state, info = _save.fill(found, like), found.body.get("info", {})
        if (place := found.body.get("records")) is not None:
            info = {**info, "history": self._read_records(found.path, place, info.get("history", []))}
        self._note(found.path)
        return state, info

    def _read_records(self, path: Path, place: _manifest.Place, last: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The records up to a checkpoint, which holds the last one itself. Lost records are reported on standard
        error.
        """
        try:
            found = processes.ask_first(lambda: _manifest.read_records(self.directory, place), CheckpointError)
        except CheckpointError as error:
            if self._writes and len(last) < place["number"]:
                _save.say(f"{error}; {path} is restored with the last {len(last)} of its {place['number']} records")
            return last
        self._records.resume(place, found)
        return found

    def _agree(self, accepts: Accepts, wanted: Wanted) -> Found | None:
        """The newest checkpoint that every process can read, the same in all of them."""
        refused, self._bad = "", set()  # what could not be read before may be readable now

        def choose() -> str | None:
            nonlocal found
            found = _save.newest_good(self.directory, self._bad, accepts, wanted)
            return None if found is None else str(found.path)

        while True:
            found: Found | None = None  # in the first process, which chooses, what it has read
            path = processes.ask_first(choose, CheckpointError)
            if path is None and refused:
                raise CheckpointError(f"{refused}; and there is no earlier checkpoint that all processes can read")
            if path is None:
                return None
            why = ""
            try:
                found = found or _save.read(path)
            except (CheckpointError, FileNotFoundError) as error:
                why = str(error)
            refused = _first_difference(path, found, why)
            if not refused:
                return found
            self._bad.add(Path(path))
            if self._writes:
                _save.say(f"{refused}; looking for an earlier one")

    def wait(self) -> None:
        """Wait until all saved checkpoints are on disk. Raises `OSError` if one could not be written."""
        if os.getpid() != self._pid:  # the thread that writes is not in a fork
            raise RuntimeError(
                f"checkpoint.Manager: process {os.getpid()} is a fork of process {self._pid}, which made this Manager "
                "and writes; save there, or make a Manager in the fork"
            )
        writing, self._writing = self._writing, None
        if writing is not None:
            with processes.raise_together():
                writing.result()

    def close(self) -> None:
        """Wait as `wait` does, end the writing thread, and unlock the directory.

        While an exception is being handled, `close` does not wait for other processes: they may not have raised one.
        """
        if os.getpid() != self._pid:
            return
        try:
            if sys.exception() is None:
                self.wait()
            elif self._writing is not None:
                self._writing.result()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None
            self._lock.release()

    def _note(self, path: Path) -> None:
        self._latest = path
        if self._on_latest is not None:
            self._on_latest(path)

    def _write(
        self, content: dict[str, Any], leaves: list[Any], arrays: list[np.ndarray], records: list[str] | None
    ) -> None:
        if not self._writes:
            return
        _files.remove_leftovers(self.directory)
        if records is not None and (place := self._records.append(records)) is not None:
            content = {**content, "records": place}
        listed, _ = _save.newest_first(self.directory, self._summary)
        content = {**content, "order": 1 + max((body["order"] for _, body in listed), default=0)}
        path = _files.free_path(self.directory, content)
        _files.write(path, content, leaves, arrays)
        self._note(path)
        good = [(path, content), *((old, body) for old, body in listed if old not in self._bad)]
        best = next((path for path, body in good if _save.is_best(body)), None)
        for path, _ in good[self.keep :]:
            if path != best:
                _files.remove(path)

    def _summary(self, path: Path) -> dict[str, Any]:
        """`order` and `best` of a checkpoint. Manifests may be long, so only a changed manifest is read again."""
        try:
            now = os.stat(path / _manifest.NAME)
        except OSError:
            return _manifest.load(path)  # it says what is the matter
        mark = now.st_ino, now.st_size, now.st_mtime_ns
        if path not in self._known or self._known[path][0] != mark:
            body = _manifest.load(path)
            self._known[path] = mark, {name: body[name] for name in ("order", "best") if name in body}
        return self._known[path][1]


def _first_difference(path: str, found: Found | None, why: str) -> str:
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
