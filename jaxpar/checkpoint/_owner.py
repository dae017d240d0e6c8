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
    return f"{_machine()}-{os.getpid()}-{_began(os.getpid()) or 0}"


def has_ended(tag: str) -> bool:
    """Whether a process has certainly ended. False where that cannot be known, as on another machine."""
    found = _TAG.fullmatch(tag)
    if found is None or found[1] == _UNKNOWN or found[1] != _machine():
        return False
    number, began = int(found[2]), int(found[3])
    try:
        os.kill(number, 0)  # sends nothing
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # it belongs to another user
        pass
    now = _began(number)
    return now is not None and 0 != began != now


def _machine() -> str:
    """This machine since its last start, and its numbering of processes. Zeros where Linux does not say."""
    try:
        parts = [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    except OSError:
        return _UNKNOWN
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/time"))
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def _began(number: int) -> int | None:
    """When a process began, in the kernel's ticks. None where that cannot be read."""
    try:
        return int(Path(f"/proc/{number}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
