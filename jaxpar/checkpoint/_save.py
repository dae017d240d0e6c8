"""Checkpoints saved, restored and found: one by hand, and those of a run by its `Manager`."""

from __future__ import annotations

import concurrent.futures
import json
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

from .._core import checks, files, text
from .._core.arrays import PyTree
from .._core.transfers import allows_transfers
from .._devices import processes, user_mesh
from . import _bucket, _files, _leaves, _run
from ._bucket import AnyPath, BucketPath
from ._files import CheckpointError, Content, Found as Found, Manifest

Tree = TypeVar("Tree")
PathLike = str | os.PathLike[str]
Condition = Callable[[AnyPath, Manifest], bool]  # of a checkpoint
_TRIES = 10  # to list a directory while another process removes checkpoints from it


@allows_transfers
def save(path: PathLike, state: PyTree) -> None:
    """Save a state. On return it is on disk, complete and flushed.

    A checkpoint does not depend on the devices: it restores onto any. With several processes, all of them must call
    `save`. Each writes the shards that only it has, and the first one the rest.

    Args:
        path: a directory that does not exist yet. Missing parents are created. It may be in a bucket, such as
            "gs://bucket/best" or "s3://bucket/best": see docs/checkpoints.md.
        state: a `train.TrainState`, a `kv.KVStore`, or any pytree of arrays (jax, NumPy, typed random keys) and
            Python numbers.

    Raises:
        FileExistsError: the path exists.
        OSError: the checkpoint cannot be written. No part of it stays on disk.
        TypeError: a leaf is not an array.
    """
    path, writes = _bucket.as_path(path, "checkpoint.save: path, the first argument,"), jax.process_index() == 0
    with processes.raise_together():
        if writes and isinstance(path, BucketPath):  # a save that was killed has left it claimed
            _files.remove_leftovers(path.parent, abandoned=False)
        if writes and _files.exists(path):
            raise FileExistsError(f"checkpoint.save: {path} exists already; choose another path, or remove it first")
    content: Content = {}
    with processes.raise_together():
        step, records, arrays, together = _leaves.to_leaves(state, writes, may_change=False)
        if writes:
            content = {} if step is None else {"step": step}
            listed, _ = _files.newest_first(path.parent)
            content["order"] = 1 + max((manifest["order"] for _, manifest in listed), default=0)
            if isinstance(path, Path):
                _files.remove_leftovers(path.parent, abandoned=False)
    writing = _files.Arrays(path.parent, path, records, arrays, together)
    del arrays
    with processes.raise_together():
        if writes:
            with writing.led():
                _files.write(path, content, writing)
        elif together:
            writing.write_own()


@allows_transfers
def restore(path: PathLike, like: Tree) -> Tree:
    """The saved state, with the structure and devices of `like`.

    `like` may have another number of devices than the saved state, and its stores may be of another kind (`device`,
    `sharded`, ...). Residuals of a compressor belong to the devices that pushed. With another number of devices the
    residuals start at zero, and a line on standard error reports that.

    Args:
        path: as given to `save`.
        like: a state as from `train.create_state`, or any pytree of arrays or `jax.ShapeDtypeStruct`s. A restored array
            gets the sharding of its leaf, or else goes to the default device.

    Raises:
        FileNotFoundError: the path does not exist.
        CheckpointError: a `ValueError`. The checkpoint is damaged, unreadable, from another program, or does not fit
            `like`. The message names the file, or the leaf with the expected and the found value.

    Example:
        >>> import tempfile, jax
        >>> import jax.numpy as jnp
        >>> from jaxpar import checkpoint, kv
        >>> path = tempfile.mkdtemp() + "/store"
        >>> checkpoint.save(path, kv.from_params({"w": jnp.ones(5)}, kind="sharded"))
        >>> like = kv.from_params({"w": jnp.zeros(5)}, kind="device", devices=jax.devices()[:1])
        >>> kv.to_params(checkpoint.restore(path, like))["w"].tolist()
        [1.0, 1.0, 1.0, 1.0, 1.0]
    """
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(like)]
    if all(sharding is None or sharding.is_fully_addressable for sharding in shardings):
        return fill(_files.read(_files.as_checkpoint(path), verified=False), like)
    # Leaves of several processes: all of them restore the one checkpoint that the first process was given.
    chosen = _files.as_checkpoint(processes.ask_first(lambda: str(_files.as_checkpoint(path))))
    with processes.raise_together(CheckpointError):
        saved = _files.read(chosen, verified=False)
    processes.agree(f"checkpoint.restore: {chosen} is not the same checkpoint everywhere", _files.digest(saved.body))
    with processes.raise_together(CheckpointError):
        state = fill(saved, like)
    return state


def latest(directory: PathLike) -> AnyPath | None:
    """The newest checkpoint of a directory that `restore` can read.

    Every byte of the checkpoint is read and verified. Checkpoints that are damaged, unreadable or from another program
    are named on standard error and skipped. Nothing on disk is changed.

    Args:
        directory: the directory in which `save` or `Manager` wrote checkpoints.

    Returns:
        The path in `directory`, or None if that has no such checkpoint or does not exist.

    Raises:
        NotADirectoryError: the path is not a directory.
        OSError: the directory cannot be listed.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> from jaxpar import checkpoint
        >>> directory = tempfile.mkdtemp()
        >>> checkpoint.save(directory + "/a", jnp.zeros(2))
        >>> checkpoint.save(directory + "/b", jnp.zeros(2))
        >>> checkpoint.latest(directory).name
        'b'
    """
    newest = newest_good(place(directory, "checkpoint.latest: directory"), set())
    return None if newest is None else newest.path


def best(directory: PathLike) -> AnyPath | None:
    """The best checkpoint of a directory, see `train.KeepBest`.

    Every byte is verified, as by `latest`. A checkpoint that is damaged, unreadable or from another program is named on
    standard error. Then the previous best one is returned, if it still exists. Nothing on disk is changed.

    Args:
        directory: the directory in which `fit` with `KeepBest`, or `Manager.save(..., best=True)`, wrote checkpoints.

    Returns:
        The path in `directory`, or None if that has no such checkpoint or does not exist.

    Raises:
        NotADirectoryError, OSError: as in `latest`.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> from jaxpar import checkpoint
        >>> manager = checkpoint.Manager(tempfile.mkdtemp(), keep=1)
        >>> for step, is_best in enumerate([False, True, False]):
        ...     manager.save({"step": jnp.int32(step)}, best=is_best)
        >>> manager.close()
        >>> checkpoint.best(manager.directory).name, checkpoint.latest(manager.directory).name
        ('save_00000002', 'save_00000003')
    """
    newest = newest_good(place(directory, "checkpoint.best: directory"), set(), is_best)
    return None if newest is None else newest.path


def place(directory: PathLike, what: str) -> AnyPath:
    """A directory as the user wrote it, so that what is found there has a path of the same kind."""
    return _bucket.parse(directory, what) or Path(files.as_local(directory, what))


def is_best(path: AnyPath, manifest: Manifest) -> bool:
    return bool(manifest.get("best"))


def newest_good(
    directory: AnyPath, bad: set[AnyPath], condition: Condition = lambda path, manifest: True, verified: bool = True
) -> Found | None:
    """The newest good checkpoint. Newer ones are named on standard error, put into `bad` and passed over.

    Without `verified` its arrays are not read yet, and may turn out to be damaged.

    One without the `condition` is passed over unread, and named only if that raises a `CheckpointError`.
    """
    for _ in range(_TRIES):
        good, (listed, unreadable) = None, _files.newest_first(directory)
        failed = {path: f"{error}; skipped" for path, error in unreadable.items() if path not in bad}
        for path, manifest in listed:
            if path not in bad:
                try:
                    if condition(path, manifest):
                        good = _files.read(path, verified=verified)
                        break
                except (CheckpointError, FileNotFoundError) as error:
                    failed[path] = f"{error}; looking for an earlier one"
        if not any(map(_files.is_gone, failed)):
            for why in failed.values():
                say(why)
            bad.update(failed)
            return good
        # The run that writes to the directory removed a checkpoint meanwhile, so there is a newer one.
    raise OSError(f"checkpoint: {directory} changes faster than it can be read; {_TRIES} checkpoints were gone")


def fill(saved: Found, like: PyTree) -> PyTree:
    """The state of a checkpoint in the structure and on the devices of `like`."""
    try:
        with user_mesh.outside_mesh():  # the arrays get the shardings of `like`
            state, remarks = _leaves.from_leaves(saved.body["leaves"], saved.arrays, like)
    except CheckpointError:  # of an array that is damaged
        raise
    except ValueError as error:
        why = text.for_terminal(str(error), _files.MOST_SHOWN)
        misfit = CheckpointError(f"{saved.path} does not fit `like`: {why}")
        misfit._is_misfit = True
        raise misfit from None
    for remark in remarks if jax.process_index() == 0 else ():
        say(f"{saved.path}: {remark}")
    return state


def say(message: str) -> None:
    text.say(text.for_terminal(message, _files.MOST_SHOWN), "jaxpar: checkpoint")


class Manager:
    """Writes the checkpoints of a run in the background.

    Args:
        directory: the directory of the checkpoints, which may be in a bucket: "gs://bucket/run" or "s3://bucket/run".
            One run at a time writes into it. The first `save` creates it if needed and locks it until `close`. Making a
            `Manager` and restoring change nothing on disk. A `save` removes half-written files that killed processes of
            this machine left. Half-written files of other machines are removed a week after their last change.
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

    def __init__(self, directory: PathLike, *, keep: int = 3, on_latest: Callable[[AnyPath], None] | None = None):
        self.directory: AnyPath = _bucket.as_path(directory, "checkpoint.Manager: directory")
        self.keep: int = checks.whole_number(keep, "checkpoint.Manager", "keep")
        self._on_latest = on_latest
        self._latest: AnyPath | None = None  # what was written or restored last
        self._bad: set[AnyPath] = set()
        self._records = _run.Records(self.directory)
        self._lock: _run.DirectoryLock | _run.BucketLock
        if isinstance(self.directory, BucketPath):
            self._lock = _run.BucketLock(self.directory)
        else:
            self._lock = _run.DirectoryLock(self.directory)
        self._is_open = False
        weakref.finalize(self, self._lock.release)
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        # What `wait` waits for. In the other processes, which write nothing, it does nothing.
        self._writing: concurrent.futures.Future[None] | None = None
        self._writes, self._pid = jax.process_index() == 0, os.getpid()
        with processes.raise_together():
            if self._writes:
                _files.check_writable(self.directory, "checkpoint.Manager")

    def __repr__(self) -> str:
        return str(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()

    def _table(self) -> text.Table:
        """The checkpoints of the directory, the newest first. Those that cannot be read, too."""
        readable, unreadable = _files.newest_first(self.directory)
        rows: list[tuple[str, str]] = []
        for path, manifest in readable:
            remarks = [f"step {manifest['step']}"] if "step" in manifest else []
            remarks += [name for name in ("best", "kept") if manifest.get(name)]
            rows.append((path.name, ", ".join(remarks)))
        rows += [(path.name, "cannot be read") for path in unreadable]
        count = text.plural(len(rows), "checkpoint")
        return text.Table(f"Manager({files.shown(self.directory)}, keep={self.keep}): {count}", ("name", ""), rows)

    def save(self, state: PyTree, info: dict[str, Any] | None = None, *, best: bool = False) -> None:
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
            ValueError: `info` is nested too deep.
        """
        self._save(state, {} if info is None else info, best=best)

    def _open(self) -> None:
        """Lock the directory, in the process that writes, and remove what killed processes left there."""
        self._lock.acquire()
        if isinstance(self.directory, Path) or not self._is_open:  # to look through a bucket takes long
            _files.remove_leftovers(self.directory, lost=self._lock.lost)
        self._is_open = True

    @allows_transfers  # orbax fetches the arrays
    def _save(
        self,
        state: PyTree,
        info: dict[str, Any],
        *,
        best: bool = False,
        kept: bool = False,
        records: Sequence[_run.Record] | None = None,
    ) -> None:
        """As `save`. One that is `kept` stays for good. `records` are those of the whole run. New ones are written."""
        self.wait()
        with processes.raise_together():
            step, leaves, arrays, together = _leaves.to_leaves(state, self._writes, may_change=True)
            if records is not None:
                info = {**info, "history": list(records[-_run.INSIDE :])}
            info = json.loads(json.dumps(dict(info)))  # a copy, which the caller does not change meanwhile
            _files.check_depth(info)
            content: Content = {} if step is None else {"step": step}
            content["info"] = info
            if best:
                content["best"] = True
            if kept:
                content["kept"] = True
            if self._writes:
                self._open()
        unwritten = _files.Arrays(self.directory, self.directory, leaves, arrays, together)
        del arrays
        with processes.raise_together():
            self._pool = self._pool or concurrent.futures.ThreadPoolExecutor(1, "jaxpar-checkpoint")
            records_so_far = None if records is None else list(records)  # the run goes on with its own list
            writing = self._pool.submit(self._write, content, unwritten, records_so_far)
        self._writing = writing

    def restore_latest(self, like: Tree) -> tuple[Tree, dict[str, Any]] | None:
        """(the state, the info) of the newest good checkpoint, or None.

        A damaged or unreadable checkpoint is named on standard error, and the previous one is tried. Several processes
        restore the same checkpoint: the newest that all of them can read.

        Raises:
            CheckpointError: the checkpoint is good but does not fit `like`, or no checkpoint that process 0 can read is
                readable by all processes.
        """
        return self._restore(lambda: like)

    def restore_best(self, like: Tree) -> tuple[Tree, dict[str, Any]] | None:
        """(the state, the info) of the best checkpoint, or None.

        A damaged or unreadable checkpoint is named on standard error, and the previous best one is restored. Raises as
        `restore_latest` does.
        """
        return self._restore(lambda: like, is_best)

    def _restore(
        self, like: Callable[[], Tree], condition: Condition = lambda path, manifest: True
    ) -> tuple[Tree, dict[str, Any]] | None:
        """As `restore_latest`, of those with the `condition`, see `newest_good`. `like` is made if there is one."""
        self.wait()
        self._bad = set()  # what could not be read before may be readable now
        refused = ""  # which process could not read the last one that was tried, and why
        template: Tree | None = None
        while True:
            # 1. The first process chooses the newest one whose manifest and files are good.
            chosen: Found | None = None
            with processes.raise_together(CheckpointError):
                if self._writes or processes.count() == 1:
                    chosen = newest_good(self.directory, self._bad, condition, verified=False)
            name = json.loads(processes.exchange(json.dumps(None if chosen is None else chosen.path.name))[0])
            if name is None and refused and processes.count() > 1:
                raise CheckpointError(f"{refused}; and there is no earlier checkpoint that all processes can read")
            if name is None:
                return None

            # 2. Each process reads what it needs of it, and verifies that. A state of another model is no damage: an
            #    earlier checkpoint would not fit either.
            path, template = self.directory / name, like() if template is None else template
            unreadable, misfit, state = "", None, None
            try:
                chosen = chosen or _files.read(path, verified=False)
                state = fill(chosen, template)
            except (CheckpointError, FileNotFoundError) as error:
                if isinstance(error, CheckpointError) and error._is_misfit:
                    misfit = error
                else:
                    unreadable = str(error)

            # 3. All take it, or all look for an earlier one: where a process cannot read it, or reads another one.
            refused, digest = "", None if chosen is None else _files.digest(chosen.body)
            answers = [json.loads(answer) for answer in processes.exchange(json.dumps([digest, unreadable]))]
            for process, (its_digest, its_reason) in enumerate(answers):
                if its_reason or its_digest != answers[0][0]:
                    reason = its_reason or f"{path} is another checkpoint than in process 0"
                    refused = f"process {process}: {reason}" if len(answers) > 1 else reason
                    break
            if chosen is not None and not refused:
                break
            self._bad.add(path)
            if self._writes:
                say(f"{refused}; looking for an earlier one")
        with processes.raise_together(CheckpointError):
            if misfit is not None:
                raise misfit
        assert state is not None
        info = chosen.body.get("info", {})
        if (place := chosen.body.get("records")) is not None:
            # All records of the run, or the last ones, which the checkpoint has itself, where the others are lost.
            history = info.get("history", [])
            try:
                history = processes.ask_first(lambda: self._records.read(place), CheckpointError)
            except CheckpointError as error:
                if self._writes and len(history) < place["number"]:
                    path, number = chosen.path, place["number"]
                    say(f"{error}; {path} is restored with the last {len(history)} of its {number} records")
            info = {**info, "history": history}
        self._note(chosen.path)
        return state, info

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
            self._is_open = False

    def _note(self, path: AnyPath) -> None:
        self._latest = path
        if self._on_latest is not None:
            self._on_latest(path)

    def _write(
        self,
        content: Content,
        arrays: _files.Arrays,
        records: list[_run.Record] | None,
    ) -> None:
        if not self._writes:
            if arrays.together:
                arrays.write_own()
            return
        with arrays.led():
            # The records come first: a checkpoint says where they are.
            if records is not None and (place := self._records.append(records)) is not None:
                content["records"] = place
            listed, _ = _files.newest_first(self.directory)
            content["order"] = 1 + max((manifest["order"] for _, manifest in listed), default=0)
            path = _files.free_path(self.directory, content.get("step"), content["order"])
            _files.write(path, content, arrays)
        self._note(path)
        # The newest good ones stay, the best one, and those that are kept for good, of each step the newest. A damaged
        # one is not counted and not removed.
        good: list[tuple[AnyPath, Mapping[str, Any]]] = [(path, content)]
        good += [(old, manifest) for old, manifest in listed if old not in self._bad]
        best = next((path for path, about in good if about.get("best")), None)
        kept = {about.get("step"): path for path, about in reversed(good) if about.get("kept")}
        for path, _ in good[self.keep :]:
            if path != best and path not in kept.values():
                _files.remove(path)
