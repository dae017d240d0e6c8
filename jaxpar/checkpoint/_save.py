"""One checkpoint saved and restored, and the newest good one of a directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from .._core import text
from .._core.calls import answers
from .._core.files import as_path
from .._devices import processes
from .._devices.user_mesh import outside_mesh
from . import _files, _leaves, _manifest
from ._files import Found as Found
from ._manifest import CheckpointError

Tree = TypeVar("Tree")
PathLike = str | os.PathLike[str]
Accepts = Callable[[Found], object]
Manifest = dict[str, Any]
Wanted = Callable[[Manifest], bool]
_TRIES = 10  # to list a directory while another process removes checkpoints from it


@answers("checkpoint.save")
def save(path: PathLike, state: Any) -> None:
    """Save a state. On return it is on disk, complete and flushed.

    A checkpoint does not depend on the devices: values of a store of kind `sharded` are saved whole. With several
    processes, all of them must call `save`; the first one writes.

    Args:
        path: a directory that does not exist yet. Missing parents are created.
        state: a `train.TrainState`, a `kv.KVStore`, or any pytree of arrays (jax, NumPy, typed random keys) and
            Python numbers.

    Raises:
        FileExistsError: the path exists.
        OSError: the checkpoint cannot be written. No part of it stays on disk.
        TypeError: a leaf is not an array.
    """
    path, writes = as_path(path, "checkpoint.save: path, the first argument,"), jax.process_index() == 0
    with processes.raise_together():
        if writes and os.path.lexists(path):
            raise FileExistsError(f"checkpoint.save: {path} exists already; choose another path, or remove it first")
    records, arrays = _leaves.to_leaves(state, writes)
    with processes.raise_together():
        if writes:
            listed, _ = newest_first(path.parent)
            content = {**step_of(state), "order": 1 + max((body["order"] for _, body in listed), default=0)}
            _files.write(path, content, records, arrays)


@answers("checkpoint.restore")
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
        return fill(read(path), like)
    # Leaves of several processes: all of them restore the one checkpoint that the first process was given.
    path = processes.ask_first(lambda: None if path is None else str(path))
    with processes.raise_together(CheckpointError):
        found = read(path)
    processes.agree(f"checkpoint.restore: {path} is not the same checkpoint everywhere", _manifest.digest(found.body))
    return fill(found, like)


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
    return _files.read(path)


@answers("checkpoint.latest")
def latest(directory: PathLike) -> Path | None:
    """The newest checkpoint of a directory that `restore` can read.

    Every byte of the checkpoint is read and verified. Checkpoints that are damaged, unreadable or from another program
    are named on standard error and skipped. Nothing on disk is changed.

    Args:
        directory: the directory in which `save` or `Manager` wrote checkpoints.

    Returns:
        The path, or None if the directory has no such checkpoint or does not exist.

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
    found = newest_good(Path(directory), set())
    return None if found is None else found.path


@answers("checkpoint.best")
def best(directory: PathLike) -> Path | None:
    """The best checkpoint of a directory, see `train.KeepBest`.

    Every byte is verified, as by `latest`. A checkpoint that is damaged, unreadable or from another program is named on
    standard error. Then the previous best one is returned, if it still exists. Nothing on disk is changed.

    Args:
        directory: the directory in which `fit` with `KeepBest`, or `Manager.save(..., best=True)`, wrote checkpoints.

    Returns:
        The path, or None if the directory has no such checkpoint or does not exist.

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
    directory: Path, bad: set[Path], accepts: Accepts = lambda found: None, wanted: Wanted = lambda body: True
) -> Found | None:
    """The newest good checkpoint. Newer ones are named on standard error, put into `bad` and passed over.

    `accepts` gets each that is good, and raises a `CheckpointError` for one that is not to be taken. Of
    others than `wanted`, by their manifests, nothing more is read.
    """
    for _ in range(_TRIES):
        found, (listed, unreadable) = None, newest_first(directory)
        failed = {path: f"{error}; skipped" for path, error in unreadable.items() if path not in bad}
        for path, body in listed:
            if path not in bad and wanted(body):
                try:
                    accepts(now := _files.read(path))
                    found = now
                    break
                except CheckpointError as error:
                    failed[path] = f"{error}; looking for an earlier one"
        if all(map(os.path.lexists, failed)):
            for why in failed.values():
                say(why)
            bad.update(failed)
            return found
        # The run that writes to the directory removed a checkpoint meanwhile, so there is a newer one.
    raise OSError(f"checkpoint: {directory} changes faster than it can be read; {_TRIES} checkpoints were gone")


def newest_first(
    directory: Path, load: Callable[[Path], Manifest] = _manifest.load
) -> tuple[list[tuple[Path, Manifest]], dict[Path, str]]:
    """The checkpoints of a directory and their manifests, the newest first, and why others cannot be read."""
    if not directory.exists():
        return [], {}
    if not directory.is_dir():
        raise NotADirectoryError(f"checkpoint: {directory} is not a directory")
    found: list[tuple[Path, Manifest]] = []
    unreadable: dict[Path, str] = {}
    for path in _files.candidates(directory):
        try:
            found.append((path, load(path)))
        except CheckpointError as error:
            unreadable[path] = str(error)
    return sorted(found, key=lambda item: (item[1]["order"], item[0].name), reverse=True), unreadable


def step_of(state: Any) -> dict[str, int]:
    """The step of a state, if it has one, for the manifest."""
    step = getattr(state, "step", None)
    return {} if step is None or np.ndim(step) else {"step": int(step)}


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
    text.say(text.for_terminal(message, _manifest.MOST_SHOWN), "jaxpar: checkpoint")
