"""The memory of a program's intermediate values on CPUs, in blocks that the C library keeps.

XLA takes the memory of all intermediate values of a program at once. A block of 32 MB or more the GNU C library gives
back to Linux, which fills each page of the next one with zeros: up to a quarter of the time of a step. So XLA is asked
for blocks that the library keeps.
"""

from __future__ import annotations

import math
import platform
from typing import Any

# Bytes of a block, and of the largest one that the library keeps. Of 4 to 30 MB, 12 touched the fewest new pages
# (benchmarks/NOTES.md).
_USUAL, _MOST = 12_000_000, 30_000_000
IS_KEPT = platform.libc_ver()[0] == "glibc"


def in_blocks(jaxpr: Any) -> dict[str, int] | None:
    """Options of the compiler for a program, by which each value has room in a block.

    None where one block for all values is kept, or none for the largest.
    """
    # XLA warns of a value that is larger than a block.
    block, total, work = _USUAL, 0, [jaxpr]
    while work:
        for eqn in work.pop().eqns:
            for value in eqn.params.values():
                parts = value if isinstance(value, tuple) else (value,)
                work += [getattr(part, "jaxpr", part) for part in parts if hasattr(part, "eqns")]
            if eqn.primitive.name == "shard_map":  # whose results are the values of all devices
                continue
            for aval in [v.aval for v in eqn.outvars if hasattr(v.aval, "shape")]:
                size = math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 8)
                block, total = max(block, size), total + size
    return {"xla_multiheap_size_constraint_per_heap": block} if block <= _MOST < total else None
