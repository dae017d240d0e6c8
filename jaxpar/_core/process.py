"""What a process does with signals, with threads that fail and with freed memory, and which process it is."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

from .text import say_before_exit

# The GNU C library's names of options, in <malloc.h>, and what they are set to; see mallopt(3). Blocks must come from
# the one heap that grows without limit, whichever thread asks, and stay there.
_ARENA_MAX, _MMAP_MAX, _TRIM_THRESHOLD = -8, -4, -1
_OPTIONS = {_ARENA_MAX: 1, _MMAP_MAX: 0, _TRIM_THRESHOLD: -1}

# What stays free at the end of a heap. A thread's heap has 64 MB, and goes back to Linux as a whole if less is to stay.
# The threshold is the largest that the library knows. It arrives there by itself, unless another option is set.
_TOP_PAD, _MMAP_THRESHOLD = -2, -3
_OPTIONS_OF_BLOCKS = {_TOP_PAD: 256 << 20, _MMAP_THRESHOLD: 32 << 20}


class Signals:
    """A block in which signals are recorded. It must be in the main thread, unless there are no numbers."""

    def __init__(self, numbers: Iterable[int]):
        self.received: list[int] = []  # those that came, in their order
        self._numbers = numbers
        # The handlers outside of the block. A number or None is a handler that is not of Python.
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Signals:
        for number in self._numbers:
            self._before[number] = signal.getsignal(number)  # first: the signal may come before the next line ends
            signal.signal(number, self._record)
        return self

    def __exit__(self, *error: object) -> None:
        for number in reversed(self._before):
            signal.signal(number, self._before[number])

    def _record(self, number: int, frame: FrameType | None) -> None:
        """The handler, which may run inside of any call of the main thread."""
        self.received.append(number)


def daemon(
    name: str, run: Callable[[], object], consequence: str, end: Callable[[], object] = lambda: None
) -> threading.Thread:
    """A thread that does not keep the process alive. It is not started.

    An exception ends it, with its trace and one line that names the consequence. Then `end` is called.
    """
    # A class has a thread instead of being one: `threading.Thread` keeps private attributes, and a new release of
    # Python may give one of them the name of a method of ours.

    def watched() -> None:
        try:
            run()
        except Exception as error:
            what = f"the thread {name} failed: {type(error).__name__}: {error}"
            say_before_exit(f"{traceback.format_exc()}jaxpar: {what}; {consequence}")
            end()

    return threading.Thread(target=watched, name=name, daemon=True)


def keep_freed_memory() -> bool:
    """Have `malloc` keep what is freed, in the whole process. The result is whether this C library can."""
    # XLA takes the memory of all intermediate values of a program at once. The C library hands blocks of that size back
    # to the kernel, and the thread that computes fills each page of the next block with zeros: 84,000 pages in a step
    # of ResNet-18, a tenth of its time (`benchmarks/NOTES.md`). Threads that have allocated before go on as they did.
    return _mallopt(_OPTIONS)


def keep_freed_blocks() -> bool:
    """Have `malloc` keep freed blocks of less than 32 MB, in the whole process. Whether this C library can."""
    # It does so by itself too, but for whole heaps that happen to be free. How many are depends on how the threads of a
    # process began: a step of ResNet-18 touched between 5,000 and 24,000 new pages, and none with these options.
    return _mallopt(_OPTIONS_OF_BLOCKS)


def _mallopt(options: dict[int, int]) -> bool:
    library = ctypes.CDLL(None) if os.name == "posix" else None
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    done = [library.mallopt(option, value) for option, value in options.items()]
    return all(done)


# Which process it is, for others that see its files.


_TAG = re.compile(r"([0-9a-f]{16})-(\d{1,10})-(\d{1,20})")


def tag() -> str:
    """The name of this process: its machine since the last start, its number there, and the time at which it began."""
    # Numbers are reused and hosts share names, so none of the three is enough.
    return f"{_machine()}-{os.getpid()}-{_stat(os.getpid())[1]}"


def has_ended(tag: str) -> bool | None:
    """Whether a process of this machine has certainly ended. None for one of another machine."""
    match = _TAG.fullmatch(tag)
    if match is None or match[1] != _machine():
        return None
    number, began = int(match[2]), int(match[3])
    try:
        os.kill(number, 0)  # sends nothing
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # it belongs to another user
        pass
    state, now = _stat(number)
    return state in ("Z", "X") or (0 not in (began, now) and began != now)  # else its number was used again


def _machine() -> str:
    """This machine since its last start, and its numbering of processes. Empty where Linux does not say."""
    try:
        names = [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    except OSError:
        return ""
    with contextlib.suppress(OSError):
        names.append(os.readlink("/proc/self/ns/time"))
    return hashlib.sha256(" ".join(names).encode()).hexdigest()[:16]


def _stat(number: int) -> tuple[str, int]:
    """The state of a process, such as "R", and its start time in kernel ticks. Empty and 0 where they are unknown."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, ValueError, IndexError):
        return "", 0
