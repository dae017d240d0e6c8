"""A checkpoint on disk: a directory with arrays, written by orbax, and a manifest that vouches for every byte.

    step_00000120/
        jaxpar.json     names, shapes and dtypes of the arrays; size and SHA-256 of each file; its own SHA-256
        arrays/         orbax (OCDBT); the arrays are called "0", "1", ... in the manifest's order

It is written under another name beside its place, flushed, and renamed: a checkpoint is there whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 1
MANIFEST = "jaxpar.json"
_ARRAYS = "arrays"
_UNFINISHED = ".unfinished-"


class CheckpointError(ValueError):
    """A checkpoint that is damaged, of another program, or not of the state that was asked for."""


def write(path: Path, content: dict[str, Any], records: list[dict[str, Any]], arrays: list[np.ndarray]) -> None:
    """Writes a checkpoint; where that fails nothing of it stays.

    Raises:
        FileExistsError: the path exists.
        OSError: it cannot be written: no space, no permission, no directory.
    """
    refuse_existing(path)
    unfinished = path.parent / f"{_UNFINISHED}{path.name}-{secrets.token_hex(4)}"
    try:
        unfinished.mkdir(parents=True)
        _write_arrays(unfinished / _ARRAYS, arrays)
        files = {f.relative_to(unfinished).as_posix(): _print_of(f) for f in _files(unfinished)}
        body = {"format": FORMAT, "leaves": records, "files": files, **content}
        (unfinished / MANIFEST).write_text(json.dumps({"sha256": _digest(body), "content": body}, indent=1))
        for part in [*_files(unfinished), *(d for d in unfinished.rglob("*") if d.is_dir()), unfinished]:
            _flush(part)
        os.rename(unfinished, path)
        _flush(path.parent)
    except Exception as error:
        raise OSError(
            f"checkpoint: {path} could not be written ({_reason(error)}); nothing of it was kept, and earlier "
            "checkpoints are as they were"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # where it was renamed there is nothing to remove


def refuse_existing(path: Path) -> None:
    if os.path.lexists(path):
        raise FileExistsError(f"checkpoint.save: {path} exists already; choose another path, or remove it first")


def manifest(path: Path) -> dict[str, Any]:
    """What the checkpoint says about itself.

    Raises:
        CheckpointError: it is no checkpoint of jaxpar, or the manifest is damaged.
    """
    file = path / MANIFEST
    if not path.is_dir() or not file.exists():
        other = " (an orbax checkpoint of another program)" if (path / "_CHECKPOINT_METADATA").exists() else ""
        raise CheckpointError(f"{path} is no checkpoint of jaxpar{other}: it has no {MANIFEST}")
    try:
        outer = json.loads(file.read_bytes())
        body, good = outer["content"], outer["sha256"] == _digest(outer["content"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {MANIFEST} cannot be read ({error})") from None
    if not good:
        raise CheckpointError(f"{path} is damaged: {MANIFEST} does not have the checksum it was saved with")
    if body["format"] > FORMAT:
        raise CheckpointError(f"{path} was saved by a newer jaxpar (format {body['format']}, this one has {FORMAT})")
    return body


def verify(path: Path, body: dict[str, Any]) -> None:
    """Compares every file with what the manifest says.

    Raises:
        CheckpointError: a file that is missing, shorter, longer or changed; it is named.
    """
    for name, (size, digest) in body["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path} is damaged: {name} is missing")
        if file.stat().st_size != size:
            raise CheckpointError(f"{path} is damaged: {name} has {file.stat().st_size} bytes, saved were {size}")
        if _print_of(file)[1] != digest:
            raise CheckpointError(f"{path} is damaged: {name} does not have the checksum it was saved with")


def read(path: Path) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The manifest and the arrays, everything verified.

    Raises:
        CheckpointError: as `manifest` and `verify`.
    """
    body = manifest(path)
    verify(path, body)
    try:
        arrays = _read_arrays(path / _ARRAYS, body["leaves"])
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read, though no file was changed ({_reason(error)})") from error
    return body, arrays


def remove(path: Path) -> None:
    """Removes a checkpoint, so that no half of one can be found if the process is killed meanwhile."""
    gone = path.parent / f"{_UNFINISHED}{path.name}-{secrets.token_hex(4)}"
    os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def clean(directory: Path) -> None:
    """Removes what was left by processes that were killed while they wrote."""
    for path in directory.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)


def candidates(directory: Path) -> list[Path]:
    """The directories that may be checkpoints, in no order."""
    return sorted(p for p in directory.iterdir() if p.is_dir() and not p.name.startswith("."))


def _stored(shape: Sequence[int]) -> bool:
    return 0 not in shape  # orbax keeps no empty arrays; the manifest knows all there is to know about them


def _write_arrays(path: Path, arrays: list[np.ndarray]) -> None:
    import orbax.checkpoint as ocp

    named = {str(i): a for i, a in enumerate(arrays) if _stored(a.shape)}
    if named:
        with _orbax(ocp) as orbax:
            orbax.save(path.absolute(), args=ocp.args.PyTreeSave(named))


def _read_arrays(path: Path, records: list[dict[str, Any]]) -> list[np.ndarray]:
    import orbax.checkpoint as ocp

    names = [str(i) for i, r in enumerate(records) if _stored(r["shape"])]
    found = {}
    if names:
        each = {n: ocp.RestoreArgs(restore_type=np.ndarray) for n in names}
        with _orbax(ocp) as orbax:
            args = ocp.args.PyTreeRestore(item=dict.fromkeys(names, 0), restore_args=each)
            found = orbax.restore(path.absolute(), args=args)
    return [found[str(i)] if _stored(r["shape"]) else np.zeros(r["shape"], r["dtype"]) for i, r in enumerate(records)]


def _orbax(ocp: Any) -> Any:
    """orbax for this process alone: what is saved is whole in each process, and one of them writes it."""
    import jax

    mine = jax.process_index()
    options = ocp.options.MultiprocessingOptions(
        primary_host=mine, active_processes={mine}, barrier_sync_key_prefix=f"jaxpar{mine}"
    )
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(), multiprocessing_options=options)


def _files(directory: Path) -> list[Path]:
    return sorted(p for p in directory.rglob("*") if p.is_file())


def _print_of(file: Path) -> list[Any]:
    with open(file, "rb") as opened:
        return [file.stat().st_size, hashlib.file_digest(opened, "sha256").hexdigest()]


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _reason(error: BaseException) -> str:
    text = (getattr(error, "strerror", None) or str(error) or type(error).__name__).strip().splitlines()[0]
    return text if len(text) < 200 else text[:200] + "..."
