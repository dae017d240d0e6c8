"""A checkpoint that leaves the directory of its run with all that it needs, and one that comes into another."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

from .._core.files import create, flush_to_disk
from . import _files, _manifest
from ._manifest import CheckpointError

_MOST = 10  # checkpoints of one step
_RECORDS = "records.jsonl"  # what a directory has beside its checkpoints


@contextlib.contextmanager
def whole_copy(path: Path) -> Generator[Path]:
    """A block with a directory that has a checkpoint and the records of its run. `adopt` takes both.

    Its files are hard links, where the file system has those.
    """
    copy = _files._unfinished_path(path.parent)
    try:
        shutil.copytree(path, copy, copy_function=_link)
        if (path.parent / _RECORDS).is_file():
            shutil.copyfile(path.parent / _RECORDS, copy / _RECORDS)  # a run appends to it
        yield copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def adopt(source: Path, directory: Path) -> None:
    """Copy a checkpoint into a directory, unless a good one of the same step and content is there.

    It is there whole or not at all. Several processes may do so at once.

    Raises:
        CheckpointError: the source is damaged.
        OSError: it cannot be copied. FileExistsError: there are too many damaged ones of its step.
    """
    body = _manifest.load(source)
    _files.verify(source, body)
    name = f"step_{body['step']:08d}" if "step" in body else f"save_{body['order']:08d}"
    if any(_is_same(path, body) for path in directory.glob(f"{name}*")):
        return
    copy = _files._unfinished_path(directory)
    try:
        shutil.copytree(source, copy)
        _bring_records(copy / _RECORDS, directory / _RECORDS)
        for part in [*copy.rglob("*"), copy]:
            flush_to_disk(part)
        _rename(copy, directory / name, body)
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _bring_records(brought: Path, path: Path) -> None:
    """Move the records of the run to their place. Those that are there already stay."""
    if brought.is_file():
        with contextlib.suppress(FileExistsError):
            try:
                os.link(brought, path)
            except FileExistsError:
                raise
            except OSError:  # there are no hard links
                create(path, brought.read_bytes())
        brought.unlink()


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _is_same(path: Path, body: dict[str, Any]) -> bool:
    try:
        same = _manifest.digest(_manifest.load(path)) == _manifest.digest(body)
        _files.verify(path, body)
    except CheckpointError:
        return False
    return same


def _rename(copy: Path, path: Path, body: dict[str, Any]) -> None:
    """Give the copy its name, or another where a damaged checkpoint has it."""
    for again in ("", *(f".{i}" for i in range(2, _MOST))):
        target = path.with_name(path.name + again)
        try:
            return os.rename(copy, target)
        except OSError:
            if not os.path.lexists(target):
                raise
            if _is_same(target, body):
                return  # another process was faster
    raise FileExistsError(f"checkpoint: {path} and {_MOST - 2} more of that name are damaged; remove them first")
