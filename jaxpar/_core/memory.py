"""Memory that a process keeps for its next step.

XLA takes the memory for all intermediate values of a program at once, and frees it at the end. The C library hands
blocks of that size back to the kernel. Each page of the next block is filled with zeros when it is touched first, by
the thread that computes: 84,000 pages in a step of ResNet-18, a tenth of its time (`benchmarks/NOTES.md`).
"""

from __future__ import annotations

import ctypes
import os

# The GNU C library's names of options, in <malloc.h>, and what they are set to; see mallopt(3). Blocks must come from
# the one heap that grows without limit, whichever thread asks, and stay there.
_ARENA_MAX, _MMAP_MAX, _TRIM_THRESHOLD = -8, -4, -1
_OPTIONS = {_ARENA_MAX: 1, _MMAP_MAX: 0, _TRIM_THRESHOLD: -1}


def keep_freed_memory() -> bool:
    """Have `malloc` keep what is freed, in the whole process. Threads that have allocated before go on as they did.

    The result is whether this C library can: the GNU one, which most Linux systems have.
    """
    library = ctypes.CDLL(None) if os.name == "posix" else None
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    done = [library.mallopt(option, value) for option, value in _OPTIONS.items()]
    return all(done)
