"""Joining where other code has started jax in several processes: Ray Train, or the user's own call."""

from __future__ import annotations

import jax

from .._core.text import say_news
from . import _process, _ray


def attach(num_processes: int | None, process_id: int | None) -> None:
    """Go on in the processes that jax has already. Nothing is started: no heartbeats, no hooks at the end.

    Who started jax also sees to its end. A line says so once where that is Ray Train.

    Raises:
        RuntimeError: the arguments are of another run.
    """
    if _process.this.is_joined:  # by ourselves
        return
    _check("num_processes", num_processes, jax.process_count)
    _check("process_id", process_id, jax.process_index)
    if not _process.this.is_attached and (train := _ray.worker()) is not None:
        context = train.get_context()
        say_once(context.get_world_size(), context.get_world_rank(), "Ray Train has started jax")
    _process.this.is_attached = True


def say_once(size: int, rank: int, what: str) -> None:
    """Say in the first worker of Ray Train who watches it."""
    if rank == 0:
        say_news(f"{what} in {size} processes; Ray watches them and starts them again, so jaxpar sends no heartbeats")


def _check(name: str, given: int | None, found: object) -> None:
    """Compare an argument with what jax has. Without one jax is not asked, which would start its devices."""
    if given is not None and callable(found) and given != (has := found()):
        raise RuntimeError(
            f"distributed.initialize: {name}={given!r}, but jax.distributed was initialised by other code, and there "
            f"it is {has}; leave the arguments out, or call jp.distributed.initialize first"
        )
