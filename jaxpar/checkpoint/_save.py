"""One checkpoint saved and restored, and the newest good one of a directory."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from .._core import text
from .._core.calls import answers
from .._core.files import as_path
from .._devices import processes
from .._devices.user_mesh import outside_mesh
from . import _files, _leaves, _manifest
from ._manifest import CheckpointError

Tree = TypeVar("Tree")
PathLike = str | os.PathLike[str]
Known = dict[Path, tuple[Any, dict[str, Any]]]  # of each checkpoint the mark of its manifest, and a part of it
_TRIES = 10  # to list a directory while another process removes checkpoints from it


class Found(NamedTuple):
    """A good checkpoint: its path, its manifest, and the arrays in the order of the manifest."""

    path: Path
    body: dict[str, Any]
    arrays: list[np.ndarray]


@answers("checkpoint.save")
def save(path: PathLike, state: Any) -> None:
    """Save a state. On return it is on disk, whole and flushed.

    Nothing in a checkpoint depends on the devices: the values of a store of kind `sharded` are saved whole. All of
    several processes call it, and the first one writes.

    Args:
        path: a directory that does not exist yet. Those above it are made.
        state: a `train.TrainState`, a `kv.KVStore`, or any pytree of arrays (jax, NumPy, typed random keys) and
            Python numbers.

    Raises:
        FileExistsError: the path exists.
        OSError: it cannot be written. Nothing of it is kept then.
        TypeError: a leaf that is no array.
    """
    path, writes = as_path(path, "checkpoint.save: path, the first argument,"), jax.process_index() == 0
    with processes.raise_together():
        if writes:
            _files.refuse_existing(path)
    records, arrays = _leaves.to_leaves(state, writes)
    with processes.raise_together():
        if writes:
            _files.write(path, about(state, path.parent), records, arrays)


@answers("checkpoint.restore")
def restore(path: PathLike, like: Tree) -> Tree:
    """The state saved at a path, in the structure and on the devices of `like`.

    `like` may be on another number of devices than the saved state was, and its stores of another kind (`device`,
    `sharded`, ...). Residuals of a compressor belong to the devices that pushed. With another number of devices they
    start again, and a line on standard error says so.

    Args:
        path: as given to `save`.
        like: a state such as `train.create_state` returns, or any pytree of arrays or `jax.ShapeDtypeStruct`s.
            Where one has a sharding, the restored array gets it, else it goes to the default device.

    Raises:
        FileNotFoundError: there is nothing at the path.
        CheckpointError: a `ValueError`. The checkpoint is damaged, cannot be read, is of another program, or does not
            fit `like`. The message names the file, or the leaf with what was expected and found.

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
        return fill(read(path), like)
    path = processes.ask_first(lambda: None if path is None else str(path))
    with processes.raise_together(CheckpointError):
        found = read(path)
    processes.agree(f"checkpoint.restore: {path} is not the same checkpoint everywhere", _manifest.digest(found.body))
    return fill(found, like)


def _spread(leaf: Any) -> bool:
    """Whether a leaf of `like` belongs to several processes."""
    sharding = getattr(leaf, "sharding", None)
    return sharding is not None and not sharding.is_fully_addressable


def read(path: PathLike | None) -> Found:
    """The checkpoint at a path, all verified. It raises what `restore` raises."""
    if path is None:
        raise FileNotFoundError("checkpoint.restore: the path is None; checkpoint.latest found no checkpoint")
    path = Path(path)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        hint = "; every process must see the directory of the checkpoints" if jax.process_count() > 1 else ""
        raise FileNotFoundError(f"checkpoint.restore: there is nothing at {path}{hint}") from None
    except OSError as error:
        raise CheckpointError(f"{path} is unreadable: {error.strerror or error}") from error
    return Found(path, *_files.read(path))


@answers("checkpoint.latest")
def latest(directory: PathLike) -> Path | None:
    """The newest checkpoint of a directory that `restore` can read.

    It is read whole, so every byte is known to be as it was saved. Checkpoints that are damaged, cannot be read or are
    of another program are named on standard error and passed over. Nothing on disk is changed.

    Args:
        directory: where `save` or `Manager` put checkpoints, each a directory in it.

    Returns:
        Its path, or None where there is none, or no such directory.

    Raises:
        NotADirectoryError: there is something else at that path.
        OSError: the directory itself cannot be listed.

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
    found = newest_good(Path(directory), set())
    return None if found is None else found.path


@answers("checkpoint.best")
def best(directory: PathLike) -> Path | None:
    """The checkpoint of a directory that was saved as the best one, see `train.KeepBest`.

    It is read whole, as by `latest`. One that is damaged, cannot be read or is of another program is named on standard
    error, and the one that was the best before it is taken, if it is still there. Nothing on disk is changed.

    Args:
        directory: where `fit` with `KeepBest`, or `Manager.save(..., best=True)`, put checkpoints.

    Returns:
        Its path, or None where there is none, or no such directory.

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
    found = newest_good(Path(directory), set(), wanted=is_best)
    return None if found is None else found.path


def is_best(body: dict[str, Any]) -> bool:
    """Whether the manifest is of a checkpoint that was saved as the best."""
    return bool(body.get("best"))


def newest_good(
    directory: Path,
    bad: set[Path],
    accepts: Callable[[Found], object] = lambda found: None,
    wanted: Callable[[dict[str, Any]], bool] = lambda body: True,
) -> Found | None:
    """The newest good checkpoint. Newer ones are named on standard error, put into `bad` and passed over.

    `accepts` gets each that is good, and raises a `CheckpointError` for one that is not to be taken. Of
    others than `wanted`, by their manifests, nothing more is read.
    """
    for _ in range(_TRIES):
        for path in [path for path, body in newest_first(directory, bad) if wanted(body)]:
            try:
                found = Found(path, *_files.read(path))
                accepts(found)
                return found
            except CheckpointError as error:
                if not os.path.lexists(path):
                    break  # the run that writes there has removed it, so there is a newer one
                pass_over(path, bad, str(error))
        else:
            return None
    raise OSError(f"checkpoint: {directory} changes faster than it can be read; {_TRIES} checkpoints were gone")


def pass_over(path: Path, bad: set[Path], why: str) -> None:
    """Put a checkpoint among the bad ones, and say so."""
    bad.add(path)
    say(f"{why}; looking for an earlier one")


def about(state: Any, directory: Path, known: Known | None = None) -> dict[str, Any]:
    """Which step the state is at, if it says so, and a number that grows from one checkpoint to the next."""
    step = getattr(state, "step", None)
    before = [body["order"] for _, body in newest_first(directory, set(), report=False, known=known)]
    return {**({} if step is None or np.ndim(step) else {"step": int(step)}), "order": 1 + max(before, default=0)}


def newest_first(
    directory: Path, bad: set[Path], report: bool = True, known: Known | None = None
) -> list[tuple[Path, dict[str, Any]]]:
    """The checkpoints whose manifests can be read, without those in `bad`, which gets those that cannot.

    With `known` only `order` and `best` of each, which is not read again while its file does not change.
    """
    if not directory.exists():
        return []
    if not directory.is_dir():
        raise NotADirectoryError(f"checkpoint: {directory} is no directory")
    tries, (found, gone) = 1, _list(directory, bad, report, known)
    while gone and tries < _TRIES:  # the run that writes there removed one, so there may be a newer one
        tries, (found, gone) = tries + 1, _list(directory, bad, report, known)
    return sorted(found, key=lambda item: (item[1]["order"], item[0].name), reverse=True)


def _list(
    directory: Path, bad: set[Path], report: bool, known: Known | None
) -> tuple[list[tuple[Path, dict[str, Any]]], bool]:
    """The manifests that can be read, and whether a checkpoint was removed meanwhile."""
    found: list[tuple[Path, dict[str, Any]]] = []
    gone = False
    for path in _files.candidates(directory):
        if path in bad:
            continue
        try:
            found.append((path, _manifest.load(path) if known is None else _load_short(path, known)))
        except CheckpointError as error:
            if not os.path.lexists(path):
                gone = True
                continue
            bad.add(path)
            if report:
                say(f"{error}; passed over")
    return found, gone


def _load_short(path: Path, known: Known) -> dict[str, Any]:
    """`order` and `best` of a manifest. A long one, with the history of thousands of epochs, takes a second to read."""
    if path not in known or known[path][0] != _mark(path):
        remember(path, _manifest.load(path), known)
    return known[path][1]


def remember(path: Path, body: dict[str, Any], known: Known) -> None:
    """Put what is known of a manifest among the known ones."""
    known[path] = _mark(path), {name: body[name] for name in ("order", "best") if name in body}


def _mark(path: Path) -> Any:
    """What changes when the manifest at a path does."""
    try:
        now = os.stat(path / _manifest.NAME)
    except OSError:
        return secrets.token_bytes(16)  # reading it says what is the matter
    return now.st_ino, now.st_size, now.st_mtime_ns


def fill(found: Found, like: Any) -> Any:
    """The state of a checkpoint in the structure and on the devices of `like`."""
    try:
        with outside_mesh():  # the arrays get the shardings of `like`
            state, remarks = _leaves.from_leaves(found.body["leaves"], found.arrays, like)
    except ValueError as error:
        raise CheckpointError(
            f"{found.path} does not fit `like`: {text.for_terminal(str(error), _manifest.MOST_SHOWN)}"
        ) from None
    for remark in remarks if jax.process_index() == 0 else ():
        say(f"{found.path}: {remark}")
    return state


def say(message: str) -> None:
    """Write a line to standard error."""
    text.say(text.for_terminal(message, _manifest.MOST_SHOWN), "jaxpar: checkpoint")
