"""This process among the processes of a run."""

from __future__ import annotations

import jax

from .. import distributed
from .._devices import processes
from ._mxnet import answers


def rank() -> int:
    """The number of this process, from 0.

    Raises:
        RuntimeError: this is one of several processes, as `jp.distributed.initialize()` finds them, and has not joined
            the others. JAX would give 0 in each. Call `initialize`, or make a store of a kind `dist_*`.

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
        RuntimeError: as of `rank`. JAX would give 1.

    Example:
        >>> from jaxpar import kv
        >>> kv.num_workers()
        1
    """
    distributed.check_joined("kv.num_workers", "JAX would say 1 in each")
    return jax.process_count()


@answers
def barrier(name: str = "barrier") -> None:
    """Wait until every process has called this. With one process it returns at once.

    Args:
        name: of the barrier, the same in every process.

    Raises:
        ValueError: in every process, if they give different names.
        RuntimeError: as of `rank`. It would wait for no process.

    Example:
        >>> from jaxpar import kv
        >>> kv.barrier("epoch 1")
    """
    distributed.check_joined("kv.barrier", "it would wait for none of them")
    processes.refuse_elastic("kv.barrier")
    processes.agree("kv.barrier: the processes wait at different barriers", name)
