"""A checkpoint on disk: a directory with arrays, written by orbax, and a manifest that vouches for every byte.

    step_00000120/
        jaxpar.json     the manifest, with its own SHA-256
        state/ ...      what orbax wrote, with the names of the params: orbax finds a checkpoint of its own here
        frozen/         a checkpoint of orbax with the params that are not trained

    {"sha256": ..., "content": {"format": 2, "order": ..., "step": ..., "best": true, "kept": true, "info": {...},
                                "records": {"number", "at", "sha256"}, "files": {name: [size, sha256]},
                                "frozen": what identifies the arrays in `frozen`,
                                "leaves": [{"name", "words", "shape", "dtype", "array", "boxes": [[box, sha256]]}]}}

Arrays are verified by the hashes of their boxes, see `_arrays`. The files that hold them have a size only, and no
SHA-256. Equal frozen params are on disk once: their files are hard links to those of an earlier checkpoint beside it.

It is written under another name in the same directory, flushed, and renamed. So a checkpoint is there whole or not at
all. The other name says which process writes. Each process writes the shards that it has, and leaves their hashes in a
file beside them. The first process waits for these files and commits. Reading changes nothing on disk.

One for a bucket is written in the same way in a temporary folder of this machine, and sent in place of the renaming.
`_bucket` says how that is all or nothing too. A path may be in either; what is done otherwise in a bucket asks for its
type here, and in `_run` for the lock and the records.

The manifest is read within bounds, and checked as a whole before anything in it is used. What is written passes the
same checks, so every saved checkpoint can be restored.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import math
import os
import re
import reprlib
import secrets
import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import jax
import numpy as np

from .._core import files, process, text
from .._core.files import CheckpointError as CheckpointError, flush_to_disk
from .._devices import processes
from . import _arrays, _bucket, _format1
from ._arrays import HostShards, LeafRecord, Stored
from ._bucket import AnyPath, BucketPath

FORMAT = 2
MANIFEST = "jaxpar.json"
RECORDS = "records.jsonl"  # beside the checkpoints of a run, see `_run`
CHECKSUM = "it does not have the checksum it was saved with"
MOST_BYTES = 64 << 20  # of a manifest
MOST_SHOWN = 500  # characters of what a file says
_LINES = 1 << 18  # bytes up to which it is written in lines, for people. Longer ones take seconds so.
_MOST_DEPTH = 100  # of lists and objects in each other; Python's reader of JSON has a limit too
_MOST_INT = 1 << 62
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FROZEN = "frozen"
_COMPLETE = "whole"  # in the unfinished directory, what becomes the checkpoint
_ASK_EVERY, _ASK_BUCKET_EVERY = 0.01, 0.3  # seconds
_UNFINISHED = ".unfinished-"
_OWNED = re.compile(re.escape(_UNFINISHED) + "(.+)-[0-9a-f]{8}")
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
    kept: bool  # for good
    info: dict[str, Any]  # what the user or `fit` saves with the state
    records: Place
    frozen: str  # SHA-256 of the arrays that are not trained. `write` adds it


class Found(NamedTuple):
    """A checkpoint: its path, its manifest, and the arrays in the order of the manifest, which are read when needed."""

    path: AnyPath
    body: Manifest
    arrays: Sequence[Stored | np.ndarray]


class Arrays:
    """The arrays of a state on their way to the disk. All processes make it, in the same order of saves.

    orbax writes them from when this is made on, beside the training. Then the state may be donated.
    """

    # orbax is given the arrays here, and not by the thread that waits for it: what is donated after this call is read
    # before.
    #
    # `together`: each process has shards of the arrays and writes these. Else the first process has all of each array,
    # and the others write nothing. `target` is what an error names: the path of the checkpoint, or its directory where
    # that is not known yet.
    def __init__(
        self, directory: AnyPath, target: AnyPath, records: list[LeafRecord], arrays: Sequence[Any], together: bool
    ):
        self.records, self.together = records, together
        first = jax.process_index() == 0

        # What this process hashes, and what it gives to orbax, which refuses arrays without elements. `write` writes
        # frozen arrays of one process itself, if the directory does not have them yet.
        self.shards: list[list[tuple[list[list[int]], np.ndarray | HostShards]]] = []
        self.frozen: dict[str, np.ndarray | HostShards] = {}
        to_orbax: dict[str, Any] = {}
        if first or together:
            for record, array in zip(records, arrays, strict=True):
                if record.get("frozen") and not together:
                    self.frozen[record["array"]] = array
                elif array.size and (first or isinstance(array, jax.Array) or isinstance(directory, Path)):
                    to_orbax[record["array"]] = array
                # An array of NumPy is the same in all processes, and the first one writes it.
                self.shards.append(_arrays.shards(array) if first or isinstance(array, jax.Array) else [])

        # All write into the folder of the first process. For a bucket each writes into a temporary one of its machine,
        # and sends what it has written. The folder of the bucket in which they then leave their answers has its name.
        self.folder = _unfinished_path(directory if isinstance(directory, Path) else _bucket.temporary_folder())
        self.meeting: BucketPath | None = None
        self.file_size = None if isinstance(directory, Path) else _bucket.FILE_SIZE
        self.wait: Callable[[], None] = lambda: None
        has_folder = first or (together and isinstance(directory, BucketPath))
        try:
            with processes.raise_together(), _as_not_written(target):
                if has_folder:
                    self.folder.mkdir(parents=True, mode=0o777 if isinstance(directory, Path) else 0o700)
            writers = {jax.process_index()}
            if together:
                name = processes.ask_first(lambda: self.folder.name)
                if isinstance(directory, BucketPath):
                    self.meeting = directory / name
                else:
                    self.folder, writers = directory / name, set(range(jax.process_count()))
            with processes.raise_together(), _as_not_written(target):
                if to_orbax:
                    self.wait = _arrays.write(self.folder / _COMPLETE, to_orbax, writers, self.file_size)
        except BaseException:
            if has_folder:
                shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def hashes(self) -> list[list[Any]]:
        """`[box, SHA-256]` of each shard of this process, for each array. orbax writes meanwhile."""
        hashes = [[[box, _arrays.sha256(data)] for box, data in shards if data.size] for shards in self.shards]
        self.shards = []
        return hashes

    def write_own(self) -> None:
        """Wait until this process has written its shards, and leave their hashes, or why it failed, for the first one.

        For a bucket, the other processes also send what they have written.
        """
        answer: dict[str, Any] = {}
        try:
            answer["boxes"] = self.hashes()
            self.wait()
            if self.meeting is not None and jax.process_index() > 0:
                path = _bucket.parse(self._ask("path.json", 0)["path"], "the path")
                assert path is not None
                complete = self.folder / _COMPLETE
                answer["files"] = _fingerprints(complete, f"{_arrays.STATE}/{_arrays.own_folder()}/**/*")
                _bucket.send(path, complete, answer["files"])
        except Exception as error:
            answer = {"error": _reason(error)}
            raise OSError(
                f"checkpoint: process {jax.process_index()} could not write its shards to {self.folder.parent} "
                f"({_reason(error)}); earlier checkpoints are unchanged"
            ) from error
        finally:
            self._leave(f"{jax.process_index()}.json", answer)
            if self.meeting is not None and jax.process_index() > 0:
                shutil.rmtree(self.folder, ignore_errors=True)

    def answers(self) -> tuple[list[list[Any]], dict[str, list[Any]]]:
        """`[box, SHA-256]` of the shards of all processes, for each array, and the files that the others have sent."""
        boxes: list[list[Any]] = [[] for _ in self.records]
        sent: dict[str, list[Any]] = {}
        for process_index in range(jax.process_count()):
            answer = self._ask(f"{process_index}.json", process_index)
            for boxes_of_array, of_process in zip(boxes, answer["boxes"], strict=True):
                boxes_of_array += of_process
            sent |= answer.get("files", {})
        return boxes, sent

    @contextlib.contextmanager
    def led(self) -> Generator[None]:
        """A block in which the first process commits. The others learn of its error, and do not wait for it.

        The unfinished folder is removed at its end.
        """
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(Exception):
                self.wait()  # orbax may write yet, and would make the folder again
            if self.meeting is not None:
                with contextlib.suppress(OSError):
                    self._leave("path.json", {"error": _reason(error)})
            raise
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _leave(self, name: str, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        if self.meeting is None:
            files.replace(self.folder / name, content)
        else:
            _bucket.put(self.meeting / name, content)

    def _ask(self, name: str, process_index: int) -> dict[str, Any]:
        """What a process has left, as soon as it is there."""
        end = time.monotonic() + 2 * _arrays.TIMEOUT
        while True:
            if self.meeting is not None:
                content, _ = _bucket.get(self.meeting / name)
            else:
                path = self.folder / name
                content = path.read_bytes() if path.exists() else None
            if content is not None:
                break
            expect(time.monotonic() < end, f"process {process_index} did not write its part")
            time.sleep(_ASK_EVERY if self.meeting is None else _ASK_BUCKET_EVERY)
        answer = json.loads(content)
        expect("error" not in answer, f"process {process_index}: {answer.get('error')}")
        return answer


def write(path: AnyPath, content: Content, arrays: Arrays) -> None:
    """Write a checkpoint, whole or not at all. `OSError` where it cannot be written."""
    complete = arrays.folder / _COMPLETE
    with contextlib.ExitStack() as block:
        block.enter_context(_as_not_written(path))
        # The hashes of all shards. orbax has written them after this. In a bucket the checkpoint is claimed then.
        boxes: list[list[Any]] = []
        sent: dict[str, list[Any]] = {}
        if arrays.together:
            arrays.write_own()
        else:
            boxes = arrays.hashes()
            arrays.wait()
        sending: _bucket.Sending | None = None
        if isinstance(path, BucketPath):
            sending = block.enter_context(_bucket.sending(path, MANIFEST, leaves_claim=arrays.meeting is not None))
        if arrays.meeting is not None:
            block.callback(_bucket.remove_all, arrays.meeting)
            arrays._leave("path.json", {"path": str(path)})
        if arrays.together:
            boxes, sent = arrays.answers()
        records = [record | {"boxes": hashes} for record, hashes in zip(arrays.records, boxes, strict=True)]

        # Equal frozen arrays are on disk once: those of another checkpoint in the directory are linked, if it has the
        # same, undamaged. A bucket has no links, so there each checkpoint has its own.
        complete.mkdir(exist_ok=True)
        if arrays.frozen:
            of_frozen = [[record["array"], record["boxes"]] for record in records if record.get("frozen")]
            content = {**content, "frozen": hashlib.sha256(json.dumps(of_frozen).encode()).hexdigest()}
            for other, manifest in newest_first(path.parent)[0] if isinstance(path, Path) else ():
                if manifest.get("frozen") != content["frozen"] or not isinstance(other, Path):
                    continue
                try:
                    shutil.copytree(other / _FROZEN, complete / _FROZEN, copy_function=_link_or_copy)
                    for record, array in zip(manifest["leaves"], _stored(complete, manifest), strict=True):
                        if record.get("frozen"):
                            array.verify()
                    break
                except (OSError, CheckpointError):  # another process removed it, or it is damaged
                    shutil.rmtree(complete / _FROZEN, ignore_errors=True)
            else:
                if with_elements := {name: array for name, array in arrays.frozen.items() if array.size}:
                    _arrays.write(complete / _FROZEN, with_elements, {jax.process_index()}, arrays.file_size)()

        # The files: size and SHA-256.
        fingerprints = _fingerprints(complete, "**/*")
        if sending is not None:
            if arrays.meeting is not None:  # the index of all is made where all have sent theirs
                index = (f"{_arrays.STATE}/manifest.ocdbt", f"{_arrays.STATE}/d/")
                fingerprints = {name: value for name, value in fingerprints.items() if not name.startswith(index)}
            _bucket.send(sending.path, complete, fingerprints)
            fingerprints |= sent
            if arrays.meeting is not None:
                fingerprints |= _arrays.merge(sending.path / _arrays.STATE, jax.process_count())

        # The manifest. What would be refused is not written.
        manifest = {"format": FORMAT, "leaves": records, "files": fingerprints, **content}
        _check(manifest)
        outer = {"sha256": digest(manifest), "content": manifest}
        text_of_manifest = json.dumps(outer)  # ASCII
        length = len(text_of_manifest)
        expect(length <= MOST_BYTES, f"the manifest has {length} bytes, more than {MOST_BYTES}; save less info with it")
        if length <= _LINES:
            text_of_manifest = json.dumps(outer, indent=1)

        if sending is not None:
            sending.commit(text_of_manifest.encode())
            return
        assert isinstance(path, Path)
        (complete / MANIFEST).write_text(text_of_manifest)

        # The name comes last, when all is on disk. Renamed first, a crash of the machine could leave a checkpoint with
        # empty files under a good name.
        _flush_all(complete)
        os.rename(complete, path)
        flush_to_disk(path.parent)


def _fingerprints(folder: Path, pattern: str) -> dict[str, list[Any]]:
    """Size and SHA-256 of files of a folder by their names, such as "state/_METADATA".

    Those in which orbax keeps arrays, in a folder `d`, would be read a second time for it, and each box of an array has
    a hash already.
    """
    fingerprints: dict[str, list[Any]] = {}
    for file in sorted(folder.glob(pattern)):
        if file.is_file():
            size = file.stat().st_size
            _, sha256 = (size, "") if file.parent.name == "d" else files.fingerprint(file, size)
            fingerprints[file.relative_to(folder).as_posix()] = [size, sha256]
    return fingerprints


@contextlib.contextmanager
def _as_not_written(path: AnyPath) -> Generator[None]:
    """A block whose exceptions become an `OSError` that names a checkpoint."""
    try:
        yield
    except Exception as error:
        raise OSError(
            f"checkpoint: {path} could not be written ({_reason(error)}); it was removed, and earlier checkpoints are "
            "unchanged"
        ) from error


def as_checkpoint(path: str | os.PathLike[str] | None) -> AnyPath:
    """The path of a checkpoint that `restore` is given."""
    if path is None:
        raise FileNotFoundError("checkpoint.restore: the path is None; checkpoint.latest found no checkpoint")
    given = _bucket.as_path(path, "checkpoint.restore: path")
    if isinstance(given, Path) and given.is_dir() and not (given / MANIFEST).exists() and newest_first(given)[0]:
        raise CheckpointError(
            f"checkpoint.restore: {given} has checkpoints in it; give checkpoint.latest({str(given)!r})"
        )
    return given


def read(path: AnyPath, *, verified: bool = True) -> Found:
    """The checkpoint at a path. It raises what `restore` raises.

    Without `verified` an array is compared with its hashes when it is read, and not here.
    """
    try:
        is_there = exists(path) if isinstance(path, BucketPath) else bool(path.stat())
    except (FileNotFoundError, NotADirectoryError):
        is_there = False
    except OSError as error:
        if isinstance(path, BucketPath):
            raise  # that a bucket does not answer says nothing of the checkpoint
        raise CheckpointError(f"{path} is unreadable: {error.strerror or error}") from error
    if not is_there:
        hint = "; every process must see the directory of the checkpoints" if jax.process_count() > 1 else ""
        raise FileNotFoundError(f"checkpoint.restore: there is nothing at {path}{hint}")
    manifest = load(path)
    if isinstance(path, BucketPath):
        _check_objects(path, manifest)
    else:
        _check_files(path, manifest)

    # The arrays. Those of format 1 are read here, since only their files have hashes.
    if manifest["format"] == 1:
        if isinstance(path, BucketPath):
            raise CheckpointError(f"{path} is of jaxpar 0.1 or 0.2; copy it to a folder of a disk to restore it")
        return Found(path, manifest, _format1.read(path, manifest))
    arrays = _stored(path, manifest)
    for array in arrays if verified else ():
        array.verify()
    return Found(path, manifest, arrays)


# The files: those of orbax with the arrays have a size only in format 2, since each array has hashes of its own.


def _check_files(path: Path, manifest: Manifest) -> None:
    for name, (size, sha256) in manifest["files"].items():
        try:
            if sha256:
                is_same = files.fingerprint(path / name, size) == (size, sha256)
            else:
                with files.opened(path / name) as file:
                    is_same = os.fstat(file.fileno()).st_size == size
        except OSError as error:
            how = "damaged" if isinstance(error, (FileNotFoundError, NotADirectoryError)) else "unreadable"
            raise CheckpointError(f"{path} is {how}: {name}: {_reason(error)}") from error
        if not is_same:
            raise CheckpointError(f"{path} is damaged: {name} does not have the checksum it was saved with")
    for entry in path.rglob("*"):
        if not os.path.isfile(entry) and not os.path.isdir(entry):  # orbax would wait for a pipe
            raise CheckpointError(f"{path} is damaged: {entry.relative_to(path)} is neither a file nor a directory")


def _check_objects(path: BucketPath, manifest: Manifest) -> None:
    names = set(_bucket.names(path))
    for name, (size, sha256) in manifest["files"].items():
        if name not in names:
            raise CheckpointError(f"{path} is damaged: {name}: there is no such object")
        if sha256:  # the size of an object without reading it is nothing that tensorstore tells
            content = _bucket.get(path / name)[0] or b""
            if (len(content), hashlib.sha256(content).hexdigest()) != (size, sha256):
                raise CheckpointError(f"{path} is damaged: {name} does not have the checksum it was saved with")


def _stored(path: AnyPath, manifest: Manifest) -> list[Stored]:
    try:
        return [
            Stored(path / _FROZEN if "frozen" in manifest and record.get("frozen") else path, record)
            for record in manifest["leaves"]
        ]
    except Exception as error:
        raise CheckpointError(f"{path} is damaged: {MANIFEST}: {_reason(error)}") from error


def newest_first(directory: AnyPath) -> tuple[list[tuple[AnyPath, Manifest]], dict[AnyPath, str]]:
    """The checkpoints of a directory and their manifests, the newest first, and why others cannot be read."""
    loads: list[tuple[AnyPath, Callable[[], Manifest]]] = []
    if isinstance(directory, BucketPath):
        for path, raw in _bucket.manifests(directory, MANIFEST):
            loads.append((path, functools.partial(_of_object, path, raw)))
    elif directory.exists():
        for path in directory.iterdir():
            if not path.name.startswith(".") and not os.path.isfile(path):
                loads.append((path, functools.partial(load, path)))
    readable: list[tuple[AnyPath, Manifest]] = []
    unreadable: dict[AnyPath, str] = {}
    for path, load_manifest in loads:
        try:
            readable.append((path, load_manifest()))
        except _bucket.UnfinishedError:
            pass
        except CheckpointError as error:
            unreadable[path] = str(error)
    return sorted(readable, key=lambda item: (item[1]["order"], item[0].name), reverse=True), unreadable


def exists(path: AnyPath) -> bool:
    """Whether there is something at a path. In a bucket, whether there is an object below."""
    return os.path.lexists(path) if isinstance(path, Path) else bool(_bucket.names(path))


def is_gone(path: AnyPath) -> bool:
    """Whether another process has removed a checkpoint that was there, or removes it now."""
    return not exists(path) or (
        isinstance(path, BucketPath) and _bucket.as_claim(_bucket.get(path / MANIFEST)[0]) is not None
    )


def free_path(directory: AnyPath, step: int | None, order: int) -> AnyPath:
    """A path for a checkpoint in a directory, by its step or else its order."""
    # The step may be there already, damaged or from an earlier run.
    name = f"save_{order:08d}" if step is None else f"step_{step:08d}"
    path, number = directory / name, 1
    while exists(path):
        number += 1
        path = directory / f"{name}.{number}"
    return path


def of_step(directory: AnyPath, step: int) -> AnyPath | None:
    """The newest checkpoint of a step in a directory, by its name."""
    if isinstance(directory, BucketPath):
        return next((path for path, manifest in newest_first(directory)[0] if manifest.get("step") == step), None)
    return max(directory.glob(f"step_{step:08d}*"), key=lambda path: path.stat().st_mtime, default=None)


def remove(path: AnyPath) -> None:
    if isinstance(path, BucketPath):
        _bucket.remove(path, MANIFEST)
        return
    # A process that is killed meanwhile leaves no half of one.
    with _unfinished(path.parent) as gone, contextlib.suppress(FileNotFoundError):  # another process removed it
        os.rename(path, gone)


def remove_leftovers(directory: AnyPath, abandoned: bool = True, lost: str = "") -> None:
    """Remove what processes that have certainly ended left half-written, or were to remove.

    Only who has the lock of the directory removes what is `abandoned`, too. In a bucket, `lost` is the tag of a process
    whose lock it took over.
    """
    if isinstance(directory, BucketPath):
        remove_leftovers(_bucket.temporary_folder(), abandoned=False)
        _bucket.remove_leftovers(directory, MANIFEST, lost, abandoned)
        for meeting in {name.partition("/")[0] for name in _bucket.names(directory) if name.startswith(_UNFINISHED)}:
            owner = _OWNED.fullmatch(meeting)
            if owner and (process.has_ended(owner[1]) or owner[1] == lost):
                _bucket.remove_all(directory / meeting)
        return
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


def check_writable(directory: AnyPath, caller: str) -> None:
    """`OSError` where a directory cannot be written or made. Nothing is written. `caller` begins the message."""
    if isinstance(directory, BucketPath):
        _bucket.names(directory)  # whether it can be written is known when the lock is taken, before the first step
        return
    nearest = directory.absolute()  # of the directory and its parents, the first one that exists
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        reason = os.strerror(errno.EACCES if nearest.is_dir() else errno.ENOTDIR)
        raise OSError(f"{caller}: nothing can be written to {directory} ({reason}); choose another directory")


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
    manifest = read(source).body
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
                read(path)
                return True
    return False


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # perhaps the file system has no hard links
        shutil.copyfile(source, target)


def _unfinished_path(directory: Path) -> Path:
    """A path in a directory that names this process, for what is not finished yet."""
    return directory / f"{_UNFINISHED}{process.tag()}-{secrets.token_hex(4)}"


@contextlib.contextmanager
def _unfinished(directory: Path) -> Generator[Path]:
    """A block with such a path. What is there at its end is removed."""
    path = _unfinished_path(directory)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _flush_all(directory: Path) -> None:
    for entry in [*directory.rglob("*"), directory]:
        flush_to_disk(entry)


def _reason(error: BaseException) -> str:
    reason = (getattr(error, "strerror", None) or str(error) or type(error).__name__).strip().splitlines()[0]
    return reason if len(reason) < 200 else reason[:200] + "..."


# The manifest.


def load(path: AnyPath) -> Manifest:
    """What the checkpoint at a path says about itself. A `CheckpointError` says why it cannot be used.

    `OSError` where a bucket does not answer: no checkpoint is passed over for that.
    """
    if isinstance(path, BucketPath):
        return _of_object(path, _bucket.get(path / MANIFEST)[0])
    try:
        raw = files.read(path / MANIFEST, MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        of_orbax = " (an orbax checkpoint of another program)" if (path / "_CHECKPOINT_METADATA").exists() else ""
        raise CheckpointError(f"{path} is not a checkpoint of jaxpar{of_orbax}: it has no {MANIFEST}") from None
    except OSError as error:
        raise CheckpointError(f"{path} is unreadable: {MANIFEST}: {error.strerror or error}") from error
    return _parse(path, raw)


def _of_object(path: BucketPath, raw: bytes | None) -> Manifest:
    """`load`, of the content of the manifest's object."""
    if raw is None:
        raise CheckpointError(f"{path} is not a checkpoint of jaxpar: it has no {MANIFEST}")
    if (claim := _bucket.as_claim(raw)) is not None:
        raise _bucket.UnfinishedError(f"{path} is not complete: {claim.name} has not finished it, or removes it")
    if len(raw) > MOST_BYTES:
        raise CheckpointError(f"{path} is unreadable: {MANIFEST}: it has more than {MOST_BYTES} bytes")
    return _parse(path, raw)


def _parse(path: AnyPath, raw: bytes) -> Manifest:
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
    for name in ("best", "kept"):
        expect(type(manifest.get(name, False)) is bool, f"wrong {name}")
    expect(type(manifest.get("info", {})) is dict, "wrong info")
    check_depth(manifest.get("info"))
    expect("frozen" not in manifest or _is_sha256(manifest["frozen"]), "wrong frozen")
    if "records" in manifest:
        check_place(manifest["records"])
    for name, (size, checksum) in manifest["files"].items():
        is_inside = name.isprintable() and name != MANIFEST and not {"", ".", ".."} & set(name.split("/"))
        is_checksum = _is_sha256(checksum) or (checksum == "" and "/d/" in name)
        expect(is_inside and _is_int(size, 0) and is_checksum, f"wrong files: {reprlib.repr(name)}")
    expect(type(manifest["leaves"]) is list, "wrong leaves")
    names = [record["name"] for record in manifest["leaves"]]
    expect(len(set(names)) == len(names), "two leaves have the same name")
    for i, record in enumerate(manifest["leaves"]):
        texts = [record["name"], record["words"], record["dtype"], record.get("impl", ""), record.get("rule", "")]
        expect(all(type(each) is str for each in texts), f"wrong leaf {i}")
        expect(type(record.get("frozen", False)) is bool, f"wrong leaf {i}: frozen")
        shape = record["shape"]
        expect(type(shape) is list and all(_is_int(n, 0) for n in shape), f"wrong leaf {i}: shape")
    if manifest["format"] == 1:
        return

    # The arrays of format 2: where each is, and the hash of each of its boxes.
    arrays = [record["array"] for record in manifest["leaves"]]
    expect(len(set(arrays)) == len(arrays), "two leaves have the same array")
    for record in manifest["leaves"]:
        expect(type(record["array"]) is str and bool(record["array"]), "wrong array")
        shape, _ = _arrays.layout(record)
        if "rows" in record:
            rows, width = record["rows"]
            expect(_is_int(rows, 1) and _is_int(width, 0), "wrong rows")
            expect(math.prod(shape) <= rows * width, "the rows are fewer than the elements")
            shape = rows, width
        for box, sha256 in record["boxes"]:
            expect(all(_is_int(n, 0) for ends in box for n in ends), "wrong box")
            expect(all(len(ends) == 2 for ends in box), "wrong box")
            expect(_is_sha256(sha256), "wrong boxes")
        _arrays.check_boxes([box for box, _ in record["boxes"]], shape)


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
