"""What a run keeps beside its checkpoints: a lock that names the one process that writes there, and its records.

    .writer         {"owner": ..., "host": ..., "pid": ..., "token": ...}
    records.jsonl   {"record": {...}, "before": {"at": ..., "sha256": ...}}, a line for each epoch

A lock of a process that has ended is taken over at once where that can be known, which is on the same machine. Of
another machine nothing is known. So a lock is touched every few seconds, and one that was not for a while is taken
over. A process that was stopped for so long notices the loss of its lock before it writes again.

Lines are only appended to the file of the records. A checkpoint knows its last record by the place and the SHA-256 of
the line, and each line knows the one before it. So a save writes what is new only. A run that goes on from an older
checkpoint appends lines too: the line after it has two followers then, and no checkpoint loses its records. A
checkpoint holds its last records itself, for one that is moved elsewhere.

In a bucket nothing can be touched or appended to. There the lock is written again every few seconds, and the file of
the records with each save, each on the condition that it is still the object that this process has written or read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import io
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from .._core import files, process, text
from . import _bucket, _files
from ._bucket import AnyPath, BucketPath
from ._files import Place

Record = dict[str, Any]  # of an epoch, as `fit` returns them
INSIDE = 64  # of the last records, which a checkpoint holds itself
_LONGEST_LINE = 16 << 20  # bytes of the line of a record
_LOCK = ".writer"
_TOUCH_EVERY = 5.0  # seconds
_STALE = 20.0  # seconds after which a lock that nobody touched belongs to nobody
_LOOK_EVERY = 0.5
_AGAIN = 0.02
_LONGEST = 4096  # bytes of the lock
_held = set[bytes]()  # the contents of the locks that this process takes or has, or in buckets their tokens


@dataclasses.dataclass(frozen=True)
class _Holder:
    """What the file of another process says."""

    tag: str  # see `process.tag`
    name: str  # which process that is, for people
    content: bytes  # all bytes
    changed: float  # when it was touched, by the clock of the file system


class DirectoryLock:
    """The lock of this process on a directory. `acquire` takes it, or proves that it is still there.

    With `file` it is that of one run on one file in the directory.
    """

    lost = ""  # see `BucketLock`

    def __init__(self, directory: Path, file: Path | None = None):
        self._directory, self._file = directory, file
        self._path = directory / (_LOCK if file is None else f".{file.name}{_LOCK}")
        self._content = json.dumps(_this_process()).encode() + b"\n"
        self._pid = os.getpid()  # a fork has a copy of it
        self._ended: threading.Event | None = None  # of the thread that touches the lock, while this process has it

    def acquire(self) -> None:
        """Take the lock, or keep it, and make the directory. `OSError` where another process has it."""
        _held.add(self._content)
        while not self._is_mine():
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                files.create(self._path, self._content)
                break
            except FileExistsError:
                pass
            except OSError as error:
                if self._file is not None:
                    raise
                why = f"cannot be written ({error.strerror}); nothing was saved"
                raise OSError(f"checkpoint: {self._directory} {why}") from error
            if (holder := self._holder()) is None:
                time.sleep(_AGAIN)  # it was given up meanwhile, which a network's file system shows late
                continue
            if holder.tag == process.tag() and holder.content not in _held:  # a second Ctrl-C cut `release` short
                self._remove(holder)
                continue
            if holder.tag == process.tag() and self._file is None:
                return  # another manager of this process has it
            if self._file is not None and (holder.tag == process.tag() or not self._is_abandoned(holder)):
                message = f"another run, in {holder.name}, writes it; give each run its own file"
                raise FileExistsError(errno.EEXIST, message, str(self._file))
            if self._ended is not None:
                raise _taken(f"{self._directory} was taken over by {holder.name} while this process was stopped")
            if not self._is_abandoned(holder):
                raise _taken(f"{self._directory} belongs to {holder.name}, which runs and writes its checkpoints there")
            self._remove(holder)
        if self._ended is None:
            self._ended = threading.Event()
            threading.Thread(target=self._touch_until, args=(self._ended,), name="jaxpar-lock", daemon=True).start()

    def release(self) -> None:
        """Give the lock up. Where this process has none, nothing happens."""
        try:
            if self._ended is not None:
                self._ended.set()
                self._ended = None
            if os.getpid() == self._pid and self._is_mine():
                with contextlib.suppress(OSError):
                    self._path.unlink()
        finally:
            _held.discard(self._content)

    def _is_mine(self) -> bool:
        try:
            return files.read(self._path, _LONGEST) == self._content
        except OSError:
            return False

    def _holder(self) -> _Holder | None:
        try:
            with files.opened(self._path) as file:  # to open it asks the server of a network's file system
                content, changed = file.read(_LONGEST), os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            if self._path.is_symlink():
                raise _taken(f"{self._path} is a link to a file that does not exist; remove it") from None
            return None
        except OSError as error:
            raise _taken(f"{self._path} cannot be read ({error.strerror})") from None
        return _Holder(*_who(content), content, changed)

    def _is_abandoned(self, holder: _Holder) -> bool:
        """Whether the process of a lock has ended. For one of another machine this may take 20 seconds."""
        if (has_ended := process.has_ended(holder.tag)) is not None:
            return has_ended
        # Only times of one clock can be compared, and the file system's may be another machine's.
        age = max(files.clock_of(self._directory) - holder.changed, 0.0)
        if age > _STALE:
            return True
        left = _STALE - age
        text.say(f"{self._directory} was claimed by {holder.name}; waiting {left:.0f} seconds to see whether it runs")
        end = time.monotonic() + left
        while time.monotonic() < end:
            time.sleep(_LOOK_EVERY)
            if (now := self._holder()) != holder:
                return now is None
        return True

    def _remove(self, holder: _Holder) -> None:
        """Remove an abandoned lock. One that another process has made meanwhile stays."""
        gone = self._path.with_name(f"{self._path.name}-{secrets.token_hex(4)}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._path, gone)
            with contextlib.suppress(OSError):
                if (content := files.read(gone, _LONGEST)) != holder.content:
                    files.create(self._path, content)
            os.unlink(gone)

    def _touch_until(self, ended: threading.Event) -> None:
        """Show other machines that this process runs."""
        while not ended.wait(_TOUCH_EVERY):
            # A read that fails once says nothing of the next one, and a lock that was lost may be made again.
            if self._is_mine():
                with contextlib.suppress(OSError):
                    os.utime(self._path)


def _this_process() -> dict[str, Any]:
    """What a lock says of the process that has it."""
    return {"owner": process.tag(), "host": socket.gethostname(), "pid": os.getpid(), "token": secrets.token_hex(8)}


def _who(content: bytes) -> tuple[str, str]:
    """The tag of the process that has a lock with this content, and its name for people."""
    try:
        entry: dict[str, Any] = json.loads(content)
        tag, name = str(entry["owner"]), f"process {int(entry['pid'])} on {str(entry['host'])[:100]}"
    except (ValueError, KeyError, TypeError, RecursionError):
        tag, name = "", "another process"  # it may not have written all of it yet
    return tag, text.for_terminal(name)


class BucketLock:
    """The lock of this process on a directory in a bucket: an object, written again every few seconds.

    Each write is made on the condition that the lock is still what this process wrote last. So of two processes that
    take it over one succeeds, and one that was stopped for long notices that it has lost it.
    """

    def __init__(self, directory: BucketPath):
        self._directory, self._path = directory, directory / _LOCK
        self._about = _this_process()
        self._pid = os.getpid()  # a fork has a copy of it
        self._writes = 0
        self._generation: bytes | None = None  # of what this process wrote last, while it has the lock
        self._busy = threading.Lock()  # the thread that writes it again, and `acquire`
        self._ended: threading.Event | None = None  # of that thread
        self.lost = ""  # the tag of the process from which the lock was taken over

    def acquire(self) -> None:
        """Take the lock, or keep it. `OSError` where another process has it."""
        with self._busy:
            if self._generation is not None:
                self._write(self._generation)
                return
            _held.add(self._token)
            while self._generation is None:
                content, generation = _bucket.get(self._path)
                if content is not None:
                    tag, name = _who(content)
                    if tag == process.tag() and _token_of(content) in _held:
                        return  # another manager of this process has it
                    if tag != process.tag() and not self._is_abandoned(tag, name, generation):
                        raise _taken(
                            f"{self._directory} belongs to {name}, which runs and writes its checkpoints there"
                        )
                    self.lost = "" if tag == process.tag() else tag
                with contextlib.suppress(FileExistsError):  # another process was faster: look again
                    self._generation = _bucket.put_if(self._path, self._content(), generation)
                    if content is None:
                        _bucket.refuse_without_conditions(self._path, generation)
        self._ended = threading.Event()
        threading.Thread(target=self._write_until, args=(self._ended,), name="jaxpar-lock", daemon=True).start()

    def release(self) -> None:
        """Give the lock up. Where this process has none, nothing happens."""
        try:
            if os.getpid() == self._pid and self._ended is not None:
                self._ended.set()
                self._ended = None
                with self._busy, contextlib.suppress(OSError):
                    generation, self._generation = self._generation, None
                    if generation is not None:
                        _bucket.delete(self._path, generation)
        finally:
            _held.discard(self._token)

    @property
    def _token(self) -> bytes:
        return self._about["token"].encode()

    def _content(self) -> bytes:
        """What the lock says. Each time it is something else, so that it has another generation."""
        self._writes += 1
        return json.dumps(self._about | {"writes": self._writes}).encode()

    def _write(self, generation: bytes) -> None:
        """Write the lock again, or notice that it was lost."""
        try:
            self._generation = _bucket.put_if(self._path, self._content(), generation)
        except FileExistsError:
            content, _ = _bucket.get(self._path)
            _, name = _who(content or b"")
            raise _taken(f"{self._directory} was taken over by {name} while this process was stopped") from None

    def _is_abandoned(self, tag: str, name: str, generation: bytes) -> bool:
        """Whether the process of a lock has ended. For one of another machine this takes 20 seconds."""
        if (has_ended := process.has_ended(tag)) is not None:
            return has_ended
        text.say(f"{self._directory} was claimed by {name}; waiting {_STALE:.0f} seconds to see whether it runs")
        end = time.monotonic() + _STALE
        while time.monotonic() < end:
            time.sleep(_LOOK_EVERY)
            content, now = _bucket.get(self._path)
            if now != generation:
                return content is None
        return True

    def _write_until(self, ended: threading.Event) -> None:
        """Show other machines that this process runs."""
        while not ended.wait(_TOUCH_EVERY):
            # A request that fails once says nothing of the next one. `acquire` says that the lock was lost.
            with self._busy, contextlib.suppress(OSError):
                if self._generation is not None and not ended.is_set():
                    self._write(self._generation)


def _token_of(content: bytes) -> bytes:
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        return str(json.loads(content)["token"]).encode()
    return b""


def _taken(why: str) -> OSError:
    return OSError(f"checkpoint: {why}; one run at a time writes to a directory. Choose another one, or end that run")


@dataclasses.dataclass
class Records:
    """The records of a run, in the file of a directory."""

    directory: AnyPath
    place: Place | None = None  # of the last record that was written or read
    last: str = ""  # the record there, as JSON

    def append(self, records: Sequence[Record]) -> Place | None:
        """Write those of a run's records that are not in the file yet, and return the place of the last one.

        Where they begin otherwise than those in the file, all are written. The disk has them on return. After an
        `OSError` the file is as before.
        """
        path, size, lines = self.directory / _files.RECORDS, 0, bytearray()
        number = 0 if self.place is None else self.place["number"]
        if number > len(records) or (number and json.dumps(records[number - 1]) != self.last):
            self.place, number = None, 0
        new = records[number:]
        place: Place | None = self.place
        if not new:
            return place
        written, generation = _bucket.get(path) if isinstance(path, BucketPath) else (None, b"")
        if isinstance(path, BucketPath):
            size = len(written or b"")
        elif os.path.lexists(path):
            with files.opened(path) as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(size - 1, 0))
                if file.read(1) not in (b"\n", b""):  # a killed process left out the end of its line
                    lines += b"\n"
        for i, record in enumerate(new, number + 1):
            before = None if place is None else {"at": place["at"], "sha256": place["sha256"]}
            line = json.dumps({"record": record, "before": before}).encode() + b"\n"
            if len(line) > _LONGEST_LINE:
                hint = f"more than {_LONGEST_LINE}; record fewer values in an epoch"
                raise OSError(f"a record has {len(line)} bytes, {hint}")
            place = {"number": i, "at": size + len(lines), "sha256": hashlib.sha256(line).hexdigest()}
            lines += line
        if isinstance(path, BucketPath):
            _bucket.put_if(path, (written or b"") + lines, generation)
        else:
            files.append(path, bytes(lines))
            files.flush_to_disk(path)
            if not size:  # the file may be new
                files.flush_to_disk(path.parent)
        self.place, self.last = place, json.dumps(new[-1])
        return place

    def read(self, place: Place) -> list[Record]:
        """All records up to a place, the oldest first. `append` goes on there.

        A `CheckpointError` names the file that is missing or damaged.
        """
        # From the last line to the first, since each knows the one before it.
        path, newest_first = self.directory / _files.RECORDS, list[Record]()
        try:
            with self._opened() as file:
                next_place: Mapping[str, Any] | None = place
                while next_place is not None and len(newest_first) < place["number"]:
                    file.seek(next_place["at"])
                    line = file.readline(_LONGEST_LINE)
                    _files.expect(hashlib.sha256(line).hexdigest() == next_place["sha256"], _files.CHECKSUM)
                    entry = json.loads(line)
                    _files.check_depth(entry)
                    _files.expect(type(entry["record"]) is dict, "it is not a record")
                    if (before := entry["before"]) is not None:
                        _files.check_place({"number": 1, **before})
                        _files.expect(before["at"] < next_place["at"], "the record before it comes later")
                    newest_first.append(entry["record"])
                    next_place = before
        except Exception as error:
            reason = getattr(error, "strerror", None) or error
            damage = f"record {place['number'] - len(newest_first)}: {reason}"
            raise _files.CheckpointError(f"{path} is damaged: {damage}") from None
        if next_place is not None or len(newest_first) != place["number"]:
            damage = f"it does not have the {place['number']} records that were saved"
            raise _files.CheckpointError(f"{path} is damaged: {damage}")
        self.place, self.last = place, json.dumps(newest_first[0])
        return newest_first[::-1]

    def _opened(self) -> BinaryIO:
        path = self.directory / _files.RECORDS
        if isinstance(path, Path):
            return files.opened(path)
        content, _ = _bucket.get(path)
        if content is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return io.BytesIO(content)
