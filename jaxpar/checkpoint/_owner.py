"""Which process a file belongs to, and whether that process has certainly ended.

A process is named by its machine since its last start, its number there, and the time at which it began. Numbers are
reused and hosts share names, so none of the three is enough.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path

_TAG = re.compile(r"([0-9a-f]{16})-(\d{1,10})-(\d{1,20})")
_UNKNOWN = "0" * 16


def tag() -> str:
    """The name of this process: letters, digits and hyphens."""
    _, began = _stat(os.getpid()) or ("", 0)
    return f"{_machine()}-{os.getpid()}-{began}"


def is_of_this_machine(tag: str) -> bool:
    """Whether it can be known here if a process has ended."""
    found = _TAG.fullmatch(tag)
    return found is not None and _UNKNOWN != found[1] == _machine()


def has_ended(tag: str) -> bool:
    """Whether a process has certainly ended. False where that cannot be known, as on another machine."""
    found = _TAG.fullmatch(tag)
    if found is None or not is_of_this_machine(tag):
        return False
    number, began = int(found[2]), int(found[3])
    try:
        os.kill(number, 0)  # sends nothing
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # it belongs to another user
        pass
    state, now = _stat(number) or ("", None)
    return state in ("Z", "X") or (now is not None and 0 != began != now)


def _machine() -> str:
    """This machine since its last start, and its numbering of processes. Zeros where Linux does not say."""
    try:
        parts = [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    except OSError:
        return _UNKNOWN
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/time"))
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def _stat(number: int) -> tuple[str, int] | None:
    """The state of a process, such as "R", and when it began, in the kernel's ticks. None where Linux does not say."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
