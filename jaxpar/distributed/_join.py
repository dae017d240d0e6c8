"""Joining the other processes on behalf of a caller that needs them, or refusing to go on without them."""

from __future__ import annotations

from . import _environment, _process
from ._initialize import initialize


def join(caller: str) -> None:
    """Join the processes that `initialize()` finds, if this process has not yet.

    `kv.create` calls this for the kinds `dist_...`. Where there are no others it does nothing.

    Args:
        caller: who asks. The message begins with it.

    Raises:
        RuntimeError, ValueError: as `initialize`. JAX was used before, and there are others to join.

    Example:
        >>> from jaxpar import distributed
        >>> distributed.join("my_function")  # one process: there is nothing to join
    """
    if _process.is_joined() or (cluster := _environment.find(None, None, None)) is None:
        return
    if not _process.is_jax_used():
        return initialize()
    if _environment.has_others(cluster):
        raise RuntimeError(
            f"{caller}: this is {_environment.describe(cluster)} and has not joined the others. It cannot join them "
            "now: JAX was used before (by an array, a random key or jax.devices()), which fixed the number of its "
            "processes at 1. Call jp.distributed.initialize() before the first use of JAX"
        )


def check_joined(caller: str, harm: str, *, launched: bool = False) -> None:
    """Raise where `initialize()` would find others that this process has not joined.

    Args:
        caller: who asks. The message begins with it.
        harm: what would go wrong, as a clause.
        launched: True looks only where all processes certainly are one run: under `jaxpar launch`, in Ray Train and
            under jax's own variables. Tasks of SLURM may be runs of their own.

    Raises:
        RuntimeError: this process has not joined the others.
        ValueError: as `initialize`.

    Example:
        >>> from jaxpar import distributed
        >>> distributed.check_joined("my_function", "the sum would be too small")  # one process
    """
    if _process.is_joined():
        return
    cluster = _environment.find_launched() if launched else _environment.find(None, None, None)
    if _environment.has_others(cluster):
        separate = f"; {_environment.describe_separate(cluster)}" if launched else ""
        raise RuntimeError(
            f"{caller}: this is {_environment.describe(cluster)} and has not joined the others, so {harm}. Call "
            f"jp.distributed.initialize() before the first use of JAX{separate}"
        )
