"""Saving and restoring a training state, through orbax and without pickle.

>>> import tempfile
>>> import jax.numpy as jnp
>>> from jaxpar import checkpoint
>>> path = tempfile.mkdtemp() + "/first"
>>> checkpoint.save(path, {"w": jnp.ones(2), "step": jnp.int32(7)})
>>> int(checkpoint.restore(path, {"w": jnp.zeros(2), "step": jnp.int32(0)})["step"])
7
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from . import _checkpoint_files as files, _processes, _snapshot
from ._checkpoint_files import CheckpointError as CheckpointError

Tree = TypeVar("Tree")
PathLike = str | os.PathLike[str]


def save(path: PathLike, state: Any) -> None:
    """Saves a state; on return it is on disk, whole and flushed.

    Nothing in a checkpoint depends on the devices: the values of a store of kind `sharded` are saved whole. With
    several processes all of them call it, and the first one writes.

    Args:
        path: a directory that does not exist yet; those above it are made.
        state: a `train.TrainState`, a `kv.KVStore`, or any pytree of arrays (jax, NumPy, typed random keys) and
            Python numbers.

    Raises:
        FileExistsError: the path exists.
        OSError: it cannot be written; nothing of it is kept then.
        TypeError: a leaf that is no array.
    """
    path, writes = Path(path), jax.process_index() == 0
    with _processes.together():
        if writes:
            files.refuse_existing(path)
    records, arrays = _snapshot.take(state, writes)
    with _processes.together():
        if writes:
            files.write(path, _about(state, path.parent), records, arrays)


def restore(path: PathLike, like: Tree) -> Tree:
    """The state saved at a path, in the structure and on the devices of `like`.

    `like` may be on another number of devices than the saved state was, and its stores of another kind (`device`,
    `sharded`, ...). Residuals of a compressor belong to the devices that pushed; with another number of them they
    start anew, which is said on standard error.

    Args:
        path: as given to `save`.
        like: a state such as `train.create_state` returns, or any pytree of arrays or `jax.ShapeDtypeStruct`s.
            Where one has a sharding, the restored array gets it, else it goes to the default device.

    Raises:
        FileNotFoundError: there is nothing at the path.
        CheckpointError: a `ValueError`: the checkpoint is damaged or of another program, or it does not fit
            `like`; the message names the file, or the leaf with what was expected and found.

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
    if not any(map(_spread, jax.tree.leaves(like))):
        return _fit(*_read(path), like)
    path = _processes.first_says(lambda: None if path is None else str(path))
    with _processes.together(CheckpointError):
        found = _read(path)
    return _fit(*found, like)


def _spread(leaf: Any) -> bool:
    """Whether a leaf of `like` belongs to several processes."""
    sharding = getattr(leaf, "sharding", None)
    return sharding is not None and not sharding.is_fully_addressable


def _read(path: PathLike | None) -> tuple[Path, dict[str, Any], list[np.ndarray]]:
    if path is None:
        raise FileNotFoundError("checkpoint.restore: the path is None; checkpoint.latest found no checkpoint")
    path = Path(path)
    if not path.exists():
        hint = "; every process must see the directory of the checkpoints" if jax.process_count() > 1 else ""
        raise FileNotFoundError(f"checkpoint.restore: there is nothing at {path}{hint}")
    return path, *files.read(path)


def latest(directory: PathLike) -> Path | None:
    """The checkpoint in a directory that was saved last and is good: complete, and every byte as it was saved.

    Those that are damaged or of another program are named on standard error and passed over.

    Args:
        directory: where `save` or `Manager` put checkpoints, each a directory in it.

    Returns:
        Its path, or None where there is none, or no such directory.

    Raises:
        NotADirectoryError: there is something else at that path.

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
    for path, body in _newest_first(Path(directory), set()):
        try:
            files.verify(path, body)
        except CheckpointError as error:
            _say(f"{error}; looking for an earlier one")
        else:
            return path
    return None


class Manager:
    """The checkpoints of a run in one directory, written in the background; the last `keep` of them stay.

    Args:
        directory: made where it does not exist; one run at a time writes into it. What a killed process left
            half-written is removed.
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

    def __init__(self, directory: PathLike, *, keep: int = 3, on_latest: Callable[[Path], None] | None = None):
        if keep < 1:
            raise ValueError(f"checkpoint.Manager: keep must be 1 or more, got {keep!r}")
        self.directory: Path = Path(directory)
        self._on_latest = on_latest
        self.keep: int = keep
        self._bad: set[Path] = set()
        self._writer: concurrent.futures.ThreadPoolExecutor | None = None
        self._writing: concurrent.futures.Future[None] | None = None
        self._writes = jax.process_index() == 0
        self._waited = True  # the same in every process
        with _processes.together():
            if self._writes:
                _check_writable(self.directory)
                files.clean(self.directory)

    def save(self, state: Any, info: dict[str, Any] | None = None) -> None:
        """Copies the state and writes the copy in the background; the state may be donated right after.

        It waits for the checkpoint before, where that is still being written.

        Args:
            state: as for `save`.
            info: what to keep beside it, as JSON.

        Raises:
            OSError: the checkpoint before this one could not be written.
            TypeError: a leaf that is no array, an `info` that is not JSON.
        """
        self.wait()
        records, arrays = _snapshot.take(state, self._writes)
        with _processes.together():
            info = json.loads(json.dumps(info or {}))  # a copy, and an error now where it is not JSON
            if self._writes:
                content = {**_about(state, self.directory), "info": info}
                self._writer = self._writer or concurrent.futures.ThreadPoolExecutor(1, "jaxpar-checkpoint")
                self._writing = self._writer.submit(self._write, content, records, arrays)
        self._waited = False

    def restore_latest(self, like: Tree) -> tuple[Tree, dict[str, Any]] | None:
        """(the state, the info) of the newest good checkpoint, or None; as `latest`, then `restore`.

        Raises:
            CheckpointError: the checkpoint is good but does not fit `like`.
        """
        self.wait()
        read: dict[str, Any] = {}
        chosen = _processes.first_says(lambda: self._newest_good(read), CheckpointError)
        if chosen is None:
            return None
        with _processes.together(CheckpointError):
            path, body, arrays = read.get(chosen) or _read(chosen)
        if self._on_latest is not None:
            self._on_latest(path)
        return _fit(path, body, arrays, like), body.get("info", {})

    def _newest_good(self, read: dict[str, Any]) -> str | None:
        """The path of a checkpoint that can be read, and in `read` what it holds."""
        for path, _ in _newest_first(self.directory, self._bad):
            try:
                read[str(path)] = path, *files.read(path)
            except CheckpointError as error:
                self._bad.add(path)
                _say(f"{error}; looking for an earlier one")
            else:
                return str(path)
        return None

    def wait(self) -> None:
        """Returns when what was saved is on disk; `OSError` where it could not be written."""
        if not self._waited:
            self._waited = True
            with _processes.together():
                self._finish()

    def _finish(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        """As `wait`, and ends the thread that writes.

        While an exception is on its way out, which may be so in this process alone, it does not ask the others.
        """
        try:
            if sys.exception() is None:
                self.wait()
            else:
                self._finish()
        finally:
            if self._writer is not None:
                self._writer.shutdown()
                self._writer = None

    def _write(self, content: dict[str, Any], records: list[Any], arrays: list[np.ndarray]) -> None:
        written = _free(self.directory, content)
        files.write(written, content, records, arrays)
        if self._on_latest is not None:
            self._on_latest(written)
        found = _newest_first(self.directory, set(self._bad), say=False)
        for path, _ in list(found)[self.keep :]:
            files.remove(path)


def _about(state: Any, directory: Path) -> dict[str, Any]:
    """Which step the state is at, if it says so, and a number that grows from one checkpoint to the next."""
    step = getattr(state, "step", None)
    about = {} if step is None or np.ndim(step) else {"step": int(step)}
    before = [body["order"] for _, body in _newest_first(directory, set(), say=False)]
    return {**about, "order": 1 + max(before, default=0)}


def _free(directory: Path, content: dict[str, Any]) -> Path:
    """A path that is not taken; a step may be there already, damaged or from an earlier run."""
    name = f"step_{content['step']:08d}" if "step" in content else f"save_{content['order']:08d}"
    path, again = directory / name, 1
    while os.path.lexists(path):
        again += 1
        path = directory / f"{name}.{again}"
    return path


def _newest_first(directory: Path, bad: set[Path], say: bool = True) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The checkpoints whose manifests can be read; `bad` are left out, and gets those that cannot."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise NotADirectoryError(f"checkpoint: {directory} is no directory")
    found = []
    for path in files.candidates(directory):
        if path in bad:
            continue
        try:
            found.append((path, files.manifest(path)))
        except CheckpointError as error:
            bad.add(path)
            if say:
                _say(f"{error}; passed over")
    yield from sorted(found, key=lambda item: (item[1]["order"], item[0].name), reverse=True)


def _fit(path: Path, body: dict[str, Any], arrays: list[np.ndarray], like: Any) -> Any:
    try:
        state, remarks = _snapshot.fit(body["leaves"], arrays, like)
    except ValueError as error:
        raise CheckpointError(f"{path} does not fit `like`: {error}") from None
    for remark in remarks if jax.process_index() == 0 else ():
        _say(f"{path}: {remark}")
    return state


def _check_writable(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=directory):
            pass
    except OSError as error:
        raise OSError(
            f"checkpoint.Manager: nothing can be written to {directory} ({error.strerror}); choose another directory"
        ) from error


def _say(message: str) -> None:
    print(f"jaxpar: checkpoint: {message}", file=sys.stderr, flush=True)
