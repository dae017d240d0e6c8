"""Programs for several CPU devices that take the memory of their intermediate values in blocks.

XLA takes the memory of all intermediate values of a program at once. A block of 32 MB or more the GNU C library gives
back to Linux, which fills each page of the next one with zeros: up to a quarter of the time of a step. So XLA is asked
for blocks that the library keeps.
"""

from __future__ import annotations

import functools
import math
import platform
from collections.abc import Callable, Iterator
from typing import Any

import jax

from .._core.arrays import is_tracing

# Bytes of a block, and of the largest one that the library keeps. Of 4 to 30 MB, 12 touched the fewest new pages
# (benchmarks/NOTES.md).
_USUAL, _MOST = 12_000_000, 30_000_000
_OPTION = "xla_multiheap_size_constraint_per_heap"


class InBlocks:
    """`jax.jit(function, donate_argnums=0)`, whose programs take memory in blocks."""

    def __init__(self, function: Callable[..., Any]):
        inner = jax.jit(function, inline=True)  # so it is traced once, for all of these

        def jit(block: int) -> Any:  # 0: one block for all
            return jax.jit(inner, donate_argnums=0, compiler_options={_OPTION: block} if block else None)

        self._jit = functools.cache(jit)
        self._chosen: dict[Any, Any] = {}  # by the shapes of the arguments behind the first

    def trace(self, *args: Any) -> jax.stages.Traced:
        return self._jit(0).trace(*args)

    def __call__(self, *args: Any) -> Any:
        if is_tracing():  # JAX takes no options inside of another `jit`
            return self._jit(0)(*args)
        # The first argument is a state, which can have hundreds of arrays, and has the same shapes each time.
        shapes = tuple([x.shape for x in jax.tree.leaves(args[1:])])
        run = self._chosen.get(shapes)
        if run is None:
            run = self._chosen[shapes] = self._jit(_block(self.trace(*args).jaxpr))
        return run(*args)


def jit_in_blocks(function: Callable[..., Any], devices: int) -> Any:
    """`InBlocks` for so many CPU devices of this process.

    For one of them, whose blocks take half as much memory again, and without the GNU C library, it is a plain `jit`.
    """
    is_kept = devices > 1 and platform.libc_ver()[0] == "glibc"
    return InBlocks(function) if is_kept else jax.jit(function, donate_argnums=0)


def _block(jaxpr: Any) -> int:
    """Bytes of a block in which each value has room. 0 where one block for all is kept, or none for the largest."""
    # XLA warns of a value that is larger than a block.
    sizes = list(_sizes(jaxpr))
    block = max([_USUAL, *sizes])
    return block if block <= _MOST < sum(sizes) else 0


def _sizes(jaxpr: Any) -> Iterator[int]:
    """The bytes of each value that a program computes on a device."""
    for eqn in jaxpr.eqns:
        parts = [part for value in eqn.params.values() for part in (value if isinstance(value, tuple) else (value,))]
        inner = [getattr(part, "jaxpr", part) for part in parts if hasattr(part, "eqns")]
        for program in inner:
            yield from _sizes(program)
        if eqn.primitive.name != "shard_map":  # whose results are the values of all devices
            values = [v.aval for v in eqn.outvars if hasattr(v.aval, "shape")]
            yield from (math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 8) for aval in values)
