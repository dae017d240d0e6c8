"""Joining where other code has started jax in several processes: Ray Train, or the user's own call."""

from __future__ import annotations

from .._core.text import say_news
from . import _process, _ray

_NAMES = "num_processes", "process_id"


def attach(num_processes: int | None, process_id: int | None) -> None:
    """Go on in the processes that jax has already. Nothing is started: no heartbeats, no hooks at the end.

    Who started jax also sees to its end. A line says so once where that is Ray Train.

    Raises:
        RuntimeError: the arguments are of another run.
    """
    if _process.this.is_joined:  # by ourselves
        return
    for name, given, has in zip(_NAMES, (num_processes, process_id), _process.numbers_of_jax(), strict=True):
        _check(name, given, has)
    if not _process.this.is_attached and (train := _ray.worker()) is not None:
        context = train.get_context()
        say_once(context.get_world_size(), context.get_world_rank(), "Ray Train has started jax")
    _process.this.is_attached = True


def say_once(size: int, rank: int, what: str) -> None:
    """Say in the first worker of Ray Train who watches it."""
    if rank == 0:
        say_news(f"{what} in {size} processes; Ray watches them and starts them again, so jaxpar sends no heartbeats")


def _check(name: str, given: int | None, has: int) -> None:
    """Compare an argument with what jax has."""
    if given is not None and given != has:
        raise RuntimeError(
            f"distributed.initialize: {name}={given!r}, but jax.distributed was initialised by other code, and there "
            f"it is {has}; leave the arguments out, or call jp.distributed.initialize first"
        )
