"""The lock of a directory of checkpoints: a file that names the one process that writes there.

    .writer     {"owner": ..., "host": ..., "pid": ..., "token": ...}

A lock of a process that has ended is taken over at once where that can be known, which is on the same machine. Of
another machine nothing is known. So a lock is touched every few seconds, and one that was not for a while is taken
over. A process that was stopped for so long notices the loss of its lock before it writes again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import secrets
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from .._core import files, text
from .._core.files import create

_NAME = ".writer"
_TOUCH_EVERY = 5.0  # seconds
_STALE = 20.0  # seconds after which a lock that nobody touched belongs to nobody
_LOOK_EVERY = 0.5
_AGAIN = 0.02
_LONGEST = 4096  # bytes of the file
_TAG = re.compile(r"([0-9a-f]{16})-(\d{1,10})-(\d{1,20})")


@dataclasses.dataclass(frozen=True)
class _Holder:
    """What the file of another process says."""

    tag: str  # see `process_tag`
    words: str  # which process that is, for people
    content: bytes  # all bytes
    changed: float  # when it was touched, by the clock of the file system


class DirectoryLock:
    """The lock of this process on a directory. `acquire` takes it, or proves that it is still there."""

    def __init__(self, directory: Path):
        self._directory, self._path = directory, directory / _NAME
        mine = {"owner": process_tag(), "host": socket.gethostname(), "pid": os.getpid(), "token": secrets.token_hex(8)}
        self._content = json.dumps(mine).encode() + b"\n"
        self._is_held, self._pid = False, os.getpid()  # a fork has a copy of it
        self._ended: threading.Event | None = None

    def acquire(self) -> None:
        """Take the lock, or keep it, and make the directory. `OSError` where another process has it."""
        while not self._is_mine():
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                create(self._path, self._content)
                break
            except FileExistsError:
                pass
            except OSError as error:
                words = f"checkpoint: {self._directory} cannot be written ({error.strerror}); nothing was saved"
                raise OSError(words) from error
            if (holder := self._holder()) is None:
                time.sleep(_AGAIN)  # it was given up meanwhile, which a network's file system shows late
                continue
            if holder.tag == process_tag():
                return  # another manager of this process has it
            if self._is_held:
                raise _taken(f"{self._directory} was taken over by {holder.words} while this process was stopped")
            if not self._is_abandoned(holder):
                raise _taken(
                    f"{self._directory} belongs to {holder.words}, which runs and writes its checkpoints there"
                )
            self._remove(holder)
        self._is_held = True
        if self._ended is None:
            self._ended = threading.Event()
            threading.Thread(target=self._touch_until, args=(self._ended,), name="jaxpar-lock", daemon=True).start()

    def release(self) -> None:
        """Give the lock up. Where this process has none, nothing happens."""
        if self._ended is not None:
            self._ended.set()
            self._ended = None
        if self._is_held and os.getpid() == self._pid and self._is_mine():
            with contextlib.suppress(OSError):
                self._path.unlink()
        self._is_held = False

    def _is_mine(self) -> bool:
        try:
            return files.read(self._path, _LONGEST) == self._content
        except OSError:
            return False

    def _holder(self) -> _Holder | None:
        """The owner of the existing file, or None."""
        try:
            with files.opened(self._path) as file:  # to open it asks the server of a network's file system
                content, changed = file.read(_LONGEST), os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            if self._path.is_symlink():
                raise _taken(f"{self._path} is a link to a file that does not exist; remove it") from None
            return None
        except OSError as error:
            raise _taken(f"{self._path} cannot be read ({error.strerror})") from None
        try:
            said: dict[str, Any] = json.loads(content)
            tag, words = str(said["owner"]), f"process {int(said['pid'])} on {str(said['host'])[:100]}"
        except (ValueError, KeyError, TypeError, RecursionError):
            tag, words = "", "another process"  # it may not have written all of it yet
        return _Holder(tag, text.for_terminal(words), content, changed)

    def _is_abandoned(self, holder: _Holder) -> bool:
        """Whether the process of a lock has ended. For one of another machine this may take 20 seconds."""
        if _is_of_this_machine(holder.tag):
            return has_ended(holder.tag)
        # Only times of one clock can be compared, and the file system's may be another machine's.
        age = max(file_time(self._directory) - holder.changed, 0.0)
        if age > _STALE:
            return True
        left = _STALE - age
        text.say(f"{self._directory} was claimed by {holder.words}; waiting {left:.0f} seconds to see whether it runs")
        end = time.monotonic() + left
        while time.monotonic() < end:
            time.sleep(_LOOK_EVERY)
            if (now := self._holder()) != holder:
                return now is None
        return True

    def _remove(self, holder: _Holder) -> None:
        """Remove an abandoned lock. One that another process has made meanwhile stays."""
        gone = self._path.with_name(f"{_NAME}-{secrets.token_hex(4)}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._path, gone)
            with contextlib.suppress(OSError):
                if (content := files.read(gone, _LONGEST)) != holder.content:
                    create(self._path, content)
            os.unlink(gone)

    def _touch_until(self, ended: threading.Event) -> None:
        """Show other machines that this process runs."""
        while not ended.wait(_TOUCH_EVERY):
            # A read that fails once says nothing of the next one, and a lock that was lost may be made again.
            if self._is_mine():
                with contextlib.suppress(OSError):
                    os.utime(self._path)


def _taken(why: str) -> OSError:
    return OSError(f"checkpoint: {why}; one run at a time writes to a directory. Choose another one, or end that run")


def file_time(directory: Path) -> float:
    """The time by the clock of a directory's file system. `OSError` where no file can be made there."""
    with tempfile.TemporaryFile(dir=directory) as probe:
        return os.fstat(probe.fileno()).st_mtime


def process_tag() -> str:
    """The name of this process: its machine since the last start, its number there, and the time at which it began."""
    # Numbers are reused and hosts share names, so none of the three is enough.
    return f"{_machine()}-{os.getpid()}-{_stat(os.getpid())[1]}"


def has_ended(tag: str) -> bool:
    """Whether a process has certainly ended. False where that cannot be known, as on another machine."""
    if not _is_of_this_machine(tag):
        return False
    number, began = map(int, tag.split("-")[1:])
    try:
        os.kill(number, 0)  # sends nothing
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # it belongs to another user
        pass
    state, now = _stat(number)
    return state in ("Z", "X") or (0 not in (began, now) and began != now)  # else its number was used again


def _is_of_this_machine(tag: str) -> bool:
    found = _TAG.fullmatch(tag)
    return found is not None and found[1] == _machine()


def _machine() -> str:
    """This machine since its last start, and its numbering of processes. Empty where Linux does not say."""
    try:
        parts = [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    except OSError:
        return ""
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/time"))
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def _stat(number: int) -> tuple[str, int]:
    """The state of a process, such as "R", and its start time in kernel ticks. Empty and 0 where they are unknown."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, ValueError, IndexError):
        return "", 0
