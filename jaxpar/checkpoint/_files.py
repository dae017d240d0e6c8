"""A checkpoint on disk: a directory with arrays, written by orbax, and a manifest that vouches for every byte.

    step_00000120/
        jaxpar.json     the manifest, with its own SHA-256
        arrays/         orbax (OCDBT). The arrays are called "0", "1", ... in the manifest's order
        frozen/         the same for params that are not trained

    {"sha256": ..., "content": {"format": 1, "order": ..., "step": ..., "best": true, "info": {...},
                                "records": {"number", "at", "sha256"}, "files": {name: [size, sha256]},
                                "frozen": sha256 of the arrays that are not trained,
                                "leaves": [{"name", "words", "shape", "dtype", ...}]}}

Equal frozen params are on disk once: their files are hard links to those of an earlier checkpoint beside it.

It is written under another name in the same directory, flushed, and renamed. So a checkpoint is there whole or not at
all. The other name says which process writes. Reading changes nothing on disk.

The manifest is read within bounds, and checked as a whole before anything in it is used. What is written passes the
same checks, so every saved checkpoint can be restored.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import reprlib
import secrets
import shutil
import tempfile
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, TypeVar

import jax
import numpy as np

from .._core import files, process, text
from .._core.files import CheckpointError as CheckpointError, flush_to_disk
from ._leaves import LeafRecord

FORMAT = 1
MANIFEST = "jaxpar.json"
RECORDS = "records.jsonl"  # beside the checkpoints of a run, see `_run`
CHECKSUM = "it does not have the checksum it was saved with"
MOST_BYTES = 64 << 20  # of a manifest
MOST_SHOWN = 500  # characters of what a file says
_LINES = 1 << 18  # bytes up to which it is written in lines, for people. Longer ones take seconds so.
_MOST_DEPTH = 100  # of lists and objects in each other; Python's reader of JSON has a limit too
_MOST_INT = 1 << 62
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ARRAYS, _FROZEN = "arrays", "frozen"
_UNFINISHED = ".unfinished-"
_OWNED = re.compile(re.escape(_UNFINISHED) + "(.+)-[0-9a-f]{8}")
_T = TypeVar("_T")
Layout = tuple[tuple[int, ...], np.dtype[Any]]  # shape and dtype of an array
Manifest = dict[str, Any]  # one that `_check` let pass, as above
_OLD = 7 * 24 * 3600  # seconds without a change, after which what nobody is known to write was left by somebody


class Place(TypedDict):
    """Where the records of a checkpoint end in the file of the records, see `_run`."""

    number: int  # of records
    at: int  # byte at which the last one begins
    sha256: str  # of its line


class Content(TypedDict, total=False):
    """What a manifest says beside the arrays. Only checkpoints of a run have more than an order and a step."""

    order: int  # of the checkpoints of a directory: the newest one has the highest
    step: int
    best: bool
    info: dict[str, Any]  # what the user or `fit` saves with the state
    records: Place
    frozen: str  # SHA-256 of the arrays that are not trained. `write` adds it


class Found(NamedTuple):
    """A good checkpoint: its path, its manifest, and the arrays in the order of the manifest."""

    path: Path
    body: Manifest
    arrays: list[np.ndarray]


def write(path: Path, content: Content, records: list[LeafRecord], arrays: list[np.ndarray]) -> None:
    """Write a checkpoint, whole or not at all. `OSError` where it cannot be written."""
    try:
        with _unfinished(path.parent) as unfinished:
            unfinished.mkdir(parents=True)
            # The arrays. Equal frozen ones are on disk once.
            trained, frozen = _trained_and_frozen(records, arrays)
            _write_arrays(unfinished / _ARRAYS, trained)
            if frozen:
                content = {**content, "frozen": _digest(frozen)}
                if not _link_frozen(path.parent, unfinished, content["frozen"]):
                    _write_arrays(unfinished / _FROZEN, frozen)

            # The manifest. What would be refused is not written.
            manifest = {"format": FORMAT, "leaves": records, "files": _fingerprints(unfinished), **content}
            _check(manifest)
            outer = {"sha256": digest(manifest), "content": manifest}
            text_of_manifest = json.dumps(outer)  # ASCII
            size = len(text_of_manifest)
            expect(size <= MOST_BYTES, f"the manifest has {size} bytes, more than {MOST_BYTES}; save less info with it")
            (unfinished / MANIFEST).write_text(text_of_manifest if size > _LINES else json.dumps(outer, indent=1))

            # The name comes last, when all is on disk.
            _flush_all(unfinished)
            os.rename(unfinished, path)
            flush_to_disk(path.parent)
    except Exception as error:
        raise OSError(
            f"checkpoint: {path} could not be written ({_reason(error)}); it was removed, and earlier checkpoints are "
            "unchanged"
        ) from error


def as_checkpoint(path: str | os.PathLike[str] | None) -> Path:
    """The path of a checkpoint that `restore` is given."""
    if path is None:
        raise FileNotFoundError("checkpoint.restore: the path is None; checkpoint.latest found no checkpoint")
    return files.as_path(path, "checkpoint.restore: path")


def read(path: Path) -> Found:
    """The checkpoint at a path, all verified. It raises what `restore` raises."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        hint = "; every process must see the directory of the checkpoints" if jax.process_count() > 1 else ""
        raise FileNotFoundError(f"checkpoint.restore: there is nothing at {path}{hint}") from None
    except OSError as error:
        raise CheckpointError(f"{path} is unreadable: {error.strerror or error}") from error
    manifest = load(path)
    verify(path, manifest)
    try:
        layouts = [_layout(record) for record in manifest["leaves"]]
        trained, frozen = _trained_and_frozen(manifest["leaves"], layouts)
        by_number = _read_arrays(path / _ARRAYS, trained) | _read_arrays(path / _FROZEN, frozen)
        arrays = [by_number[i] for i in range(len(layouts))]
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read, but its checksums are right ({_reason(error)})") from error
    return Found(path, manifest, arrays)


def verify(path: Path, manifest: Manifest) -> None:
    """Compare every file with what the manifest says. A `CheckpointError` names the file that differs."""
    for name, (size, sha256) in manifest["files"].items():
        try:
            fingerprint = files.fingerprint(path / name, size)
        except OSError as error:
            how = "damaged" if isinstance(error, (FileNotFoundError, NotADirectoryError)) else "unreadable"
            raise CheckpointError(f"{path} is {how}: {name}: {_reason(error)}") from error
        if fingerprint != (size, sha256):
            raise CheckpointError(f"{path} is damaged: {name} does not have the checksum it was saved with")
    for entry in [*(path / _ARRAYS).rglob("*"), *(path / _FROZEN).rglob("*")]:
        if not os.path.isfile(entry) and not os.path.isdir(entry):  # orbax would wait for a pipe
            raise CheckpointError(f"{path} is damaged: {entry.relative_to(path)} is neither a file nor a directory")


def newest_first(directory: Path) -> tuple[list[tuple[Path, Manifest]], dict[Path, str]]:
    """The checkpoints of a directory and their manifests, the newest first, and why others cannot be read."""
    if not directory.exists():
        return [], {}
    if not directory.is_dir():
        raise NotADirectoryError(f"checkpoint: {directory} is not a directory")
    readable: list[tuple[Path, Manifest]] = []
    unreadable: dict[Path, str] = {}
    for path in directory.iterdir():
        if not path.name.startswith(".") and not os.path.isfile(path):
            try:
                readable.append((path, load(path)))
            except CheckpointError as error:
                unreadable[path] = str(error)
    return sorted(readable, key=lambda item: (item[1]["order"], item[0].name), reverse=True), unreadable


def free_path(directory: Path, step: int | None, order: int) -> Path:
    """A path for a checkpoint in a directory, by its step or else its order."""
    # The step may be there already, damaged or from an earlier run.
    name = f"save_{order:08d}" if step is None else f"step_{step:08d}"
    path, number = directory / name, 1
    while os.path.lexists(path):
        number += 1
        path = directory / f"{name}.{number}"
    return path


def of_step(directory: Path, step: int) -> Path | None:
    """The newest checkpoint of a step in a directory, by its name."""
    return max(directory.glob(f"step_{step:08d}*"), key=lambda path: path.stat().st_mtime, default=None)


def remove(path: Path) -> None:
    # A process that is killed meanwhile leaves no half of one.
    with _unfinished(path.parent) as gone, contextlib.suppress(FileNotFoundError):  # another process removed it
        os.rename(path, gone)


def remove_leftovers(directory: Path, abandoned: bool = True) -> None:
    """Remove what processes that have certainly ended left half-written, or were to remove.

    Only who has the lock of the directory removes what is `abandoned`, too.
    """
    # Nothing is known of processes on another machine, before this machine's last start, or of an earlier jaxpar. What
    # they left is abandoned when nothing in it has changed for a week.
    for path in directory.glob(f"{_UNFINISHED}*"):
        with contextlib.suppress(OSError):  # what cannot be looked at stays
            owner = _OWNED.fullmatch(path.name)
            if owner and process.has_ended(owner[1]):
                shutil.rmtree(path, ignore_errors=True)
            elif abandoned:
                changed = max(entry.lstat().st_mtime for entry in [path, *path.rglob("*")])
                if files.clock_of(directory) - changed > _OLD:
                    shutil.rmtree(path, ignore_errors=True)


def check_writable(directory: Path, where: str) -> None:
    """`OSError` where a directory cannot be written or made. Nothing is written. `where` begins the message."""
    nearest = directory.absolute()  # of the directory and its parents, the first one that exists
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        reason = os.strerror(errno.EACCES if nearest.is_dir() else errno.ENOTDIR)
        raise OSError(f"{where}: nothing can be written to {directory} ({reason}); choose another directory")


@contextlib.contextmanager
def whole_copy(path: Path) -> Generator[Path]:
    """A block with a directory that has a checkpoint and the records of its run. `adopt` takes both."""
    # Its files are hard links, where the file system has those.
    with _unfinished(path.parent) as copy:
        shutil.copytree(path, copy, copy_function=_link_or_copy)
        if (path.parent / RECORDS).is_file():
            shutil.copyfile(path.parent / RECORDS, copy / RECORDS)  # a run appends to it
        yield copy


def adopt(source: Path, directory: Path) -> None:
    """Copy a checkpoint into a directory, unless a good one of the same step and content is there."""
    manifest = load(source)
    verify(source, manifest)
    directory.mkdir(parents=True, exist_ok=True)
    # Several processes may do so at once. The name comes first: then one that is faster has that name, and the renaming
    # here fails.
    path = free_path(directory, manifest.get("step"), manifest["order"])
    if _has_copy(directory, manifest):
        return
    try:
        with _unfinished(directory) as copy:
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns(RECORDS))
            if (source / RECORDS).is_file():
                with contextlib.suppress(FileExistsError):  # those that are there stay
                    files.create(directory / RECORDS, (source / RECORDS).read_bytes())
            _flush_all(copy)
            os.rename(copy, path)
    except OSError:
        if not _has_copy(directory, manifest):  # else another process was faster
            raise


def _has_copy(directory: Path, manifest: Manifest) -> bool:
    """Whether a directory has a good checkpoint with this manifest, under whatever name."""
    for path, other in newest_first(directory)[0]:
        if digest(other) == digest(manifest):
            with contextlib.suppress(CheckpointError):
                verify(path, manifest)
                return True
    return False


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # perhaps the file system has no hard links
        shutil.copyfile(source, target)


@contextlib.contextmanager
def _unfinished(directory: Path) -> Generator[Path]:
    """A block with a path in a directory that names this process. What is there at its end is removed."""
    path = directory / f"{_UNFINISHED}{process.tag()}-{secrets.token_hex(4)}"
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _flush_all(directory: Path) -> None:
    for entry in [*directory.rglob("*"), directory]:
        flush_to_disk(entry)


def _fingerprints(directory: Path) -> dict[str, list[Any]]:
    """Size and SHA-256 of each file in a directory, by name."""
    sizes = [(file, file.stat().st_size) for file in sorted(directory.rglob("*")) if file.is_file()]
    return {file.relative_to(directory).as_posix(): list(files.fingerprint(file, size)) for file, size in sizes}


def _reason(error: BaseException) -> str:
    reason = (getattr(error, "strerror", None) or str(error) or type(error).__name__).strip().splitlines()[0]
    return reason if len(reason) < 200 else reason[:200] + "..."


def _trained_and_frozen(records: list[LeafRecord], values: Sequence[_T]) -> tuple[dict[int, _T], dict[int, _T]]:
    """What belongs to trained leaves and to frozen ones, by their number in the manifest."""
    trained: dict[int, _T] = {}
    frozen: dict[int, _T] = {}
    for i, (record, value) in enumerate(zip(records, values, strict=True)):
        (frozen if record.get("frozen", False) else trained)[i] = value
    return trained, frozen


def _digest(arrays: dict[int, np.ndarray]) -> str:
    """The SHA-256 of arrays, with their numbers, dtypes and shapes."""
    digest = hashlib.sha256()
    for i, array in arrays.items():
        digest.update(f"{i} {array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _link_frozen(directory: Path, unfinished: Path, sha256: str) -> bool:
    """Link the frozen arrays of another checkpoint in the directory, if one has the same, undamaged."""
    for path, manifest in newest_first(directory)[0]:
        if manifest.get("frozen") != sha256:
            continue
        with contextlib.suppress(OSError):  # another process removed it
            saved = {name: entry for name, entry in manifest["files"].items() if name.startswith(f"{_FROZEN}/")}
            shutil.copytree(path / _FROZEN, unfinished / _FROZEN, copy_function=_link_or_copy)
            if {f"{_FROZEN}/{name}": entry for name, entry in _fingerprints(unfinished / _FROZEN).items()} == saved:
                return True
        shutil.rmtree(unfinished / _FROZEN, ignore_errors=True)
    return False


# Arrays without elements are not written, because orbax drops them. The manifest has their shapes and dtypes.


def _write_arrays(path: Path, arrays: dict[int, np.ndarray]) -> None:
    named = {str(i): array for i, array in arrays.items() if array.size}
    if named:
        with _orbax(path) as (ocp, orbax, path):
            orbax.save(path, args=ocp.args.PyTreeSave(named))


def _read_arrays(path: Path, layouts: dict[int, Layout]) -> dict[int, np.ndarray]:
    """Arrays with the shapes and dtypes of the manifest. `ValueError` for others, and for more than the memory."""
    expected = {str(i): layout for i, layout in layouts.items() if 0 not in layout[0]}
    restored: dict[str, np.ndarray] = {}
    if expected:
        with _orbax(path) as (ocp, orbax, path):
            stored = orbax.metadata(path).item_metadata.tree
            for name, (shape, dtype) in expected.items():
                stored_shape, stored_dtype = tuple(stored[name].shape), np.dtype(stored[name].dtype)
                expect(
                    (stored_shape, stored_dtype) == (shape, dtype.newbyteorder("=")),  # orbax stores one byte order
                    f"array {name} is {stored_dtype}{list(stored_shape)}, and in the manifest {dtype}{list(shape)}",
                )
            total = sum(math.prod(shape) * dtype.itemsize for shape, dtype in expected.values())
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            expect(total <= memory, f"the arrays have {total} bytes, more than the {memory} of this machine's memory")
            restore_args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in expected}
            args = ocp.args.PyTreeRestore(item=dict.fromkeys(expected, 0), restore_args=restore_args)
            restored = orbax.restore(path, args=args)
    return {i: restored[str(i)] if str(i) in restored else np.zeros(*layout) for i, layout in layouts.items()}


def _layout(record: LeafRecord) -> Layout:
    """Shape and dtype of the array that is stored for a leaf. Random keys are stored as their data."""
    shape = tuple(record["shape"])
    if "impl" in record:
        key = jax.eval_shape(lambda: jax.random.key(0, impl=record["impl"]))
        data = jax.eval_shape(jax.random.key_data, key)
        name, shape, dtype = str(key.dtype), (*shape, *data.shape), np.dtype(data.dtype)
    else:
        dtype = np.dtype(record["dtype"])
        name = str(dtype)  # NumPy takes other names too, which are saved by nobody
    expect(name == record["dtype"], f"the dtype must be {name}, got {record['dtype']}")
    return shape, dtype


@contextlib.contextmanager
def _orbax(path: Path) -> Generator[tuple[Any, Any, Path]]:
    """orbax, its object that saves and restores, and a name of a path that it takes."""
    import orbax.checkpoint as ocp

    this_process = jax.process_index()  # each process has all arrays, and one process writes them
    options = ocp.options.MultiprocessingOptions(
        primary_host=this_process, active_processes={this_process}, barrier_sync_key_prefix=f"jaxpar{this_process}"
    )
    path = path.absolute()
    with contextlib.ExitStack() as stack:
        handler = ocp.PyTreeCheckpointHandler()
        orbax = stack.enter_context(ocp.Checkpointer(handler, multiprocessing_options=options))
        if os.fsencode(path).decode(errors="ignore") != str(path):  # orbax takes names in UTF-8 only
            link = Path(stack.enter_context(tempfile.TemporaryDirectory()), "link")
            link.symlink_to(path.parent, target_is_directory=True)
            path = link / path.name
        yield ocp, orbax, path


# The manifest.


def load(path: Path) -> Manifest:
    """What the checkpoint at a path says about itself. A `CheckpointError` says why it cannot be used."""
    try:
        raw = files.read(path / MANIFEST, MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        of_orbax = " (an orbax checkpoint of another program)" if (path / "_CHECKPOINT_METADATA").exists() else ""
        raise CheckpointError(f"{path} is not a checkpoint of jaxpar{of_orbax}: it has no {MANIFEST}") from None
    except OSError as error:
        raise CheckpointError(f"{path} is unreadable: {MANIFEST}: {error.strerror or error}") from error
    try:
        outer = json.loads(raw)
        manifest = outer["content"]
        expect(outer["sha256"] == digest(manifest), CHECKSUM)
        _check(manifest)
    except Exception as error:  # a forger may give anything the right checksum
        reason = text.for_terminal(f"{type(error).__name__}: {error}", MOST_SHOWN)
        raise CheckpointError(f"{path} is damaged: {MANIFEST}: {reason}") from None
    if manifest["format"] > FORMAT:
        raise CheckpointError(
            f"{path} was saved by a newer jaxpar (format {manifest['format']}, this one has {FORMAT})"
        )
    return manifest


def digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


# What is not as it must be raises: a `ValueError`, or what Python says of an entry that is missing or of another type.


def _check(manifest: Any) -> None:
    """Check that each entry of a manifest is there, of its type and within bounds. Of a newer format only that."""
    expect(_is_int(manifest["format"], 1), "wrong format")
    if manifest["format"] > FORMAT:
        return
    expect(_is_int(manifest["order"], 1), "wrong order")
    expect(_is_int(manifest.get("step", 0), -_MOST_INT), "wrong step")
    expect(type(manifest.get("best", False)) is bool, "wrong best")
    expect(type(manifest.get("info", {})) is dict, "wrong info")
    check_depth(manifest.get("info"))
    expect("frozen" not in manifest or _is_sha256(manifest["frozen"]), "wrong frozen")
    if "records" in manifest:
        check_place(manifest["records"])
    for name, (size, checksum) in manifest["files"].items():
        is_inside = name.isprintable() and name != MANIFEST and not {"", ".", ".."} & set(name.split("/"))
        expect(is_inside and _is_int(size, 0) and _is_sha256(checksum), f"wrong files: {reprlib.repr(name)}")
    expect(type(manifest["leaves"]) is list, "wrong leaves")
    names = [record["name"] for record in manifest["leaves"]]
    expect(len(set(names)) == len(names), "two leaves have the same name")
    for i, record in enumerate(manifest["leaves"]):
        texts = [record["name"], record["words"], record["dtype"], record.get("impl", ""), record.get("rule", "")]
        expect(all(type(each) is str for each in texts), f"wrong leaf {i}")
        expect(type(record.get("frozen", False)) is bool, f"wrong leaf {i}: frozen")
        shape = record["shape"]
        expect(type(shape) is list and all(_is_int(n, 0) for n in shape), f"wrong leaf {i}: shape")


def check_place(place: Any) -> None:
    is_good = set(place) == {"number", "at", "sha256"} and _is_int(place["number"], 1) and _is_int(place["at"], 0)
    message = f"a record must have a number, a place and a SHA-256, got {reprlib.repr(place)}"
    expect(is_good and _is_sha256(place["sha256"]), message)


def check_depth(value: object, left: int = _MOST_DEPTH) -> None:
    """Check that JSON has at most a hundred lists and objects in each other."""
    if not left:
        raise ValueError(f"lists and objects are nested more than {_MOST_DEPTH} deep; save a flatter info")
    inner: Any = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        check_depth(each, left - 1)


def expect(is_good: bool, why: str) -> None:
    if not is_good:
        raise ValueError(why)


def _is_int(value: object, least: int) -> bool:
    return type(value) is int and least <= value <= _MOST_INT


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None
