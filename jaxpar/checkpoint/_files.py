"""A checkpoint on disk: a directory with arrays, written by orbax, and a manifest that vouches for every byte.

    step_00000120/
        jaxpar.json     names, shapes and dtypes of the arrays, size and SHA-256 of each file, its own SHA-256
        arrays/         orbax (OCDBT). The arrays are called "0", "1", ... in the manifest's order

It is written under another name in the same directory, flushed, and renamed. So a checkpoint is there whole or not at
all. The other name says which process writes (see `_owner`). Reading changes nothing on disk.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .._core import regular_file
from .._core.files import flush_to_disk
from . import _manifest, _owner
from ._manifest import CheckpointError

_ARRAYS = "arrays"
_UNFINISHED = ".unfinished-"
_OWNED = re.compile(re.escape(_UNFINISHED) + "(.+)-[0-9a-f]{8}")
_OLD = 7 * 24 * 3600  # seconds without a change, after which what nobody is known to write was left by somebody


def write(path: Path, content: dict[str, Any], records: list[dict[str, Any]], arrays: list[np.ndarray]) -> None:
    """Write a checkpoint, whole or not at all.

    Raises:
        FileExistsError: the path exists.
        OSError: it cannot be written: no space, no permission, no directory.
    """
    refuse_existing(path)
    unfinished = _unfinished_path(path.parent)
    try:
        unfinished.mkdir(parents=True)
        _write_arrays(unfinished / _ARRAYS, arrays)
        files = {f.relative_to(unfinished).as_posix(): _print_of(f) for f in _files(unfinished)}
        body = {"format": _manifest.FORMAT, "leaves": records, "files": files, **content}
        (unfinished / _manifest.NAME).write_text(_manifest.dumps(body))
        for part in [*_files(unfinished), *(d for d in unfinished.rglob("*") if d.is_dir()), unfinished]:
            flush_to_disk(part)
        os.rename(unfinished, path)
        flush_to_disk(path.parent)
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


def verify(path: Path, body: dict[str, Any]) -> None:
    """Compare every file with what the manifest says.

    Raises:
        CheckpointError: a file is missing, has another size or content, or cannot be read. The message names it.
    """
    for name, (size, digest) in body["files"].items():
        try:
            found = regular_file.fingerprint(path / name, size)
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(f"{path} is damaged: {name} is missing") from None
        except OSError as error:
            raise CheckpointError(f"{path} is unreadable: {name}: {_reason(error)}") from error
        if found[0] != size:
            has = "more" if found[0] > size else found[0]
            raise CheckpointError(f"{path} is damaged: {name} has {has} bytes, saved were {size}")
        if found[1] != digest:
            raise CheckpointError(f"{path} is damaged: {name} does not have the checksum it was saved with")
    odd = next(_not_files(path / _ARRAYS), None)
    if odd is not None:  # orbax would wait for a pipe
        raise CheckpointError(f"{path} is damaged: {odd.relative_to(path)} is neither a file nor a directory")


def read(path: Path) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The manifest and the arrays, all verified.

    Raises:
        CheckpointError: there is no good checkpoint. The message says why.
    """
    body = _manifest.load(path)
    verify(path, body)
    try:
        arrays = _read_arrays(path / _ARRAYS, [_manifest.layout(r) for r in body["leaves"]])
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read, though no file was changed ({_reason(error)})") from error
    return body, arrays


def remove(path: Path) -> None:
    """Remove a checkpoint. A process that is killed meanwhile leaves no half of one."""
    gone = _unfinished_path(path.parent)
    with contextlib.suppress(FileNotFoundError):  # another process removed it
        os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def remove_leftovers(directory: Path) -> None:
    """Remove what processes that have certainly ended left half-written.

    Only a process that writes to the directory may call it.

    Nothing is known of processes on another machine, before this machine's last start, or of an earlier jaxpar. What
    they left is removed when nothing in it has changed for a week.
    """
    with contextlib.suppress(OSError):
        left = list(directory.glob(f"{_UNFINISHED}*"))
        now = _time_at(directory) if left else 0.0
        for path in left:
            owned = _OWNED.fullmatch(path.name)
            if (owned and _owner.has_ended(owned[1])) or now - _last_change(path) > _OLD:
                shutil.rmtree(path, ignore_errors=True)


def candidates(directory: Path) -> list[Path]:
    """The directories that may be checkpoints, in no order. `OSError` where they cannot be listed."""
    with os.scandir(directory) as entries:
        return [directory / e.name for e in entries if not e.name.startswith(".") and _may_be_directory(e)]


def _may_be_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return True  # reading it says what is the matter


def _unfinished_path(directory: Path) -> Path:
    """A new name in a directory, of this process."""
    return directory / f"{_UNFINISHED}{_owner.tag()}-{secrets.token_hex(4)}"


def _time_at(directory: Path) -> float:
    """The time by the file system's clock, which may be another machine's. 0 where no file can be made."""
    probe = _unfinished_path(directory)
    try:
        probe.mkdir()
        return probe.stat().st_mtime
    except OSError:
        return 0.0
    finally:
        shutil.rmtree(probe, ignore_errors=True)


def _last_change(path: Path) -> float:
    """When something in a directory was changed last. Infinity where that cannot be read."""
    try:
        return max(part.lstat().st_mtime for part in [path, *path.rglob("*")])
    except OSError:
        return math.inf


def _not_files(directory: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(directory):
        for part in (Path(folder, name) for name in names):
            try:
                regular = stat.S_ISREG(part.stat().st_mode)
            except OSError:
                regular = False
            if not regular:
                yield part


def _has_elements(shape: Sequence[int]) -> bool:
    return 0 not in shape  # orbax keeps no empty arrays; the manifest knows all there is to know about them


def _write_arrays(path: Path, arrays: list[np.ndarray]) -> None:
    import orbax.checkpoint as ocp

    named = {str(i): a for i, a in enumerate(arrays) if _has_elements(a.shape)}
    if named:
        with _orbax(ocp) as orbax, _unicode(path) as path:
            orbax.save(path, args=ocp.args.PyTreeSave(named))


def _read_arrays(path: Path, layouts: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> list[np.ndarray]:
    import orbax.checkpoint as ocp

    names = [str(i) for i, (shape, _) in enumerate(layouts) if _has_elements(shape)]
    found = {}
    if names:
        each = {n: ocp.RestoreArgs(restore_type=np.ndarray) for n in names}
        with _orbax(ocp) as orbax, _unicode(path) as path:
            _check_layouts(layouts, orbax.metadata(path).item_metadata)
            args = ocp.args.PyTreeRestore(item=dict.fromkeys(names, 0), restore_args=each)
            found = orbax.restore(path, args=args)
    return [found[str(i)] if _has_elements(layouts[i][0]) else np.zeros(*layouts[i]) for i in range(len(layouts))]


def _is_unicode(path: Path) -> bool:
    return str(path) == str(path).encode(errors="ignore").decode()


@contextlib.contextmanager
def _unicode(path: Path) -> Generator[Path]:
    """A name of a path that orbax takes: one in UTF-8, as names of directories need not be."""
    path = path.absolute()
    if _is_unicode(path):
        yield path
    else:
        with tempfile.TemporaryDirectory() as folder:
            link = Path(folder, "link")
            link.symlink_to(path.parent, target_is_directory=True)
            yield link / path.name


def _check_layouts(layouts: Sequence[tuple[tuple[int, ...], np.dtype[Any]]], stored: Any) -> None:
    """`ValueError` where the arrays of orbax are not those of the manifest, or are more than this machine can hold."""
    if stored is None:
        raise ValueError("orbax finds no arrays")
    for i, (shape, dtype) in enumerate(layouts):
        if _has_elements(shape):
            about = stored.tree[str(i)]
            found = tuple(about.shape), np.dtype(about.dtype)
            if found != (shape, dtype.newbyteorder("=")):  # orbax stores the bytes in one order
                raise ValueError(f"array {i} is {found[1]}{list(found[0])}, and in the manifest {dtype}{list(shape)}")
    total = sum(math.prod(shape) * dtype.itemsize for shape, dtype in layouts)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if total > memory:
        raise ValueError(f"the arrays have {total} bytes, more than the {memory} of this machine's memory")


def _orbax(ocp: Any) -> Any:
    """orbax for this process only: what is saved is whole in each process, and one of them writes it."""
    import jax

    mine = jax.process_index()
    options = ocp.options.MultiprocessingOptions(
        primary_host=mine, active_processes={mine}, barrier_sync_key_prefix=f"jaxpar{mine}"
    )
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(), multiprocessing_options=options)


def _files(directory: Path) -> list[Path]:
    return sorted(p for p in directory.rglob("*") if p.is_file())


def _print_of(file: Path) -> list[Any]:
    return list(regular_file.fingerprint(file, file.stat().st_size))


def _reason(error: BaseException) -> str:
    text = (getattr(error, "strerror", None) or str(error) or type(error).__name__).strip().splitlines()[0]
    return text if len(text) < 200 else text[:200] + "..."
