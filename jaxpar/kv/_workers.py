"""This process among the processes of a run."""

from __future__ import annotations

import jax

from .. import distributed
from .._devices import processes


def rank() -> int:
    """The number of this process, from 0.

    Raises:
        RuntimeError: this is one of several processes, by what `jp.distributed.initialize()` finds, and has not
            joined the others. JAX would answer 0 in each. Call `initialize`, or make a store of a kind `dist_...`.

    Example:
        >>> from jaxpar import kv
        >>> kv.rank()
        0
    """
    distributed.check_joined("kv.rank", "JAX would say 0 in each")
    return jax.process_index()


def num_workers() -> int:
    """The number of processes.

    Raises:
        RuntimeError: as `rank`; JAX would answer 1.

    Example:
        >>> from jaxpar import kv
        >>> kv.num_workers()
        1
    """
    distributed.check_joined("kv.num_workers", "JAX would say 1 in each")
    return jax.process_count()


def barrier(name: str = "barrier") -> None:
    """Returns when every process has called it; at once where there is one process.

    Raises:
        ValueError: in every process, where they came with different names.
        RuntimeError: as `rank`; nobody would be waited for.

    Example:
        >>> from jaxpar import kv
        >>> kv.barrier("epoch 1")
    """
    distributed.check_joined("kv.barrier", "it would wait for none of them")
    processes.agree("kv.barrier: the processes wait at different barriers", name)
