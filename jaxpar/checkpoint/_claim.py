"""The claim of a run to write the checkpoints of a directory: a file that names its process.

    .writer     {"owner": ..., "host": ..., "pid": ..., "token": ...}

A claim of a process that has ended is taken over at once where that can be known, which is on the same machine. Of
another machine nothing is known. So a claim is touched every few seconds, and one that was not for a while is taken
over. A process that was stopped for so long notices the loss of its claim before it writes again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

from .._core import regular_file, text
from .._core.files import create
from . import _owner

_NAME = ".writer"
_TOUCH_EVERY = 5.0  # seconds
_STALE = 20.0  # seconds after which a claim that nobody touched belongs to nobody
_LOOK_EVERY = 0.5
_AGAIN = 0.02
_LONGEST = 4096  # bytes of the file


@dataclasses.dataclass(frozen=True)
class _Other:
    """What the file of another process says.

    Attributes:
        owner: see `_owner`.
        words: which process that is, for people.
        content: all bytes.
        changed: when it was touched, by the clock of the file system.
    """

    owner: str
    words: str
    content: bytes
    changed: float


class Claim:
    """The claim of this process to a directory. `hold` makes it or proves that it is still there."""

    def __init__(self, directory: Path):
        self._directory, self._path = directory, directory / _NAME
        mine = {"owner": _owner.tag(), "host": socket.gethostname(), "pid": os.getpid(), "token": secrets.token_hex(8)}
        self._content = json.dumps(mine).encode() + b"\n"
        self._is_held, self._pid = False, os.getpid()  # a fork has a copy of it
        self._ended: threading.Event | None = None

    def hold(self) -> None:
        """Claim the directory, which is made where it does not exist, or keep the claim.

        Raises:
            OSError: another process writes there, or has taken this claim over. Nothing can be written there.
        """
        while not self._is_mine() and not self._create():
            if (other := self._other()) is None:
                time.sleep(_AGAIN)  # it was given up meanwhile, which a network's file system shows late
                continue
            if other.owner == _owner.tag():
                return  # another manager of this process has it
            if self._is_held:
                raise _taken(f"{self._directory} was taken over by {other.words} while this process was stopped")
            if not self._is_free(other):
                raise _taken(f"{self._directory} belongs to {other.words}, which runs and writes its checkpoints there")
            self._remove(other)
        self._is_held = True
        self._touch_from_now_on()

    def release(self) -> None:
        """Give the claim up. Where this process has none, nothing happens."""
        if self._ended is not None:
            self._ended.set()
            self._ended = None
        if self._is_held and os.getpid() == self._pid and self._is_mine():
            with contextlib.suppress(OSError):
                self._path.unlink()
        self._is_held = False

    def _create(self) -> bool:
        """Make the file. It is False where there is one."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            create(self._path, self._content)
        except FileExistsError:
            return False
        except OSError as error:
            words = f"checkpoint: {self._directory} cannot be written ({error.strerror}); nothing was saved"
            raise OSError(words) from error
        return True

    def _is_mine(self) -> bool:
        try:
            return regular_file.read(self._path, _LONGEST) == self._content
        except OSError:
            return False

    def _other(self) -> _Other | None:
        """Whose file is there. It is None where there is none."""
        try:
            with regular_file.opened(self._path) as file:  # to open it asks the server of a network's file system
                content, changed = file.read(_LONGEST), os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            if self._path.is_symlink():
                raise _taken(f"{self._path} is a link to a file that does not exist; remove it") from None
            return None
        except OSError as error:
            raise _taken(f"{self._path} cannot be read ({error.strerror})") from None
        try:
            said: dict[str, Any] = json.loads(content)
            owner, words = str(said["owner"]), f"process {int(said['pid'])} on {str(said['host'])[:100]}"
        except (ValueError, KeyError, TypeError, RecursionError):
            owner, words = "", "another process"  # it may not have written all of it yet
        return _Other(owner, text.for_terminal(words), content, changed)

    def _is_free(self, other: _Other) -> bool:
        """Whether a claim has no owner any more. For one of another machine this may take 20 seconds."""
        if _owner.is_of_this_machine(other.owner):
            return _owner.has_ended(other.owner)
        if (age := self._now() - other.changed) > _STALE:
            return True
        left = _STALE - max(age, 0.0)
        text.say(f"{self._directory} was claimed by {other.words}; waiting {left:.0f} seconds to see whether it runs")
        end = time.monotonic() + left
        while time.monotonic() < end:
            time.sleep(_LOOK_EVERY)
            if (now := self._other()) is None:
                return True
            if (now.content, now.changed) != (other.content, other.changed):
                return False
        return True

    def _remove(self, other: _Other) -> None:
        """Remove a claim without an owner. One that another process has made meanwhile stays."""
        gone = self._path.with_name(f"{_NAME}-{secrets.token_hex(4)}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._path, gone)
            with contextlib.suppress(OSError):
                if (content := regular_file.read(gone, _LONGEST)) != other.content:
                    create(self._path, content)
            os.unlink(gone)

    def _now(self) -> float:
        """The time by the clock of the file system, which may be another machine's."""
        probe = self._path.with_name(f"{_NAME}-{secrets.token_hex(4)}")
        try:
            probe.touch(exist_ok=False)
            return probe.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)

    def _touch_from_now_on(self) -> None:
        if self._ended is None:
            self._ended = threading.Event()
            threading.Thread(target=_touch, args=(self, self._ended), name="jaxpar-claim", daemon=True).start()

    def touch(self) -> None:
        """Show other machines that this process runs, unless the claim is lost or cannot be read now."""
        if self._is_mine():
            with contextlib.suppress(OSError):
                os.utime(self._path)


def _touch(claim: Claim, ended: threading.Event) -> None:
    """A read that fails once says nothing of the next one, and a claim that was lost may be made again."""
    while not ended.wait(_TOUCH_EVERY):
        claim.touch()


def _taken(why: str) -> OSError:
    return OSError(f"checkpoint: {why}; one run at a time writes to a directory. Choose another one, or end that run")
