"""This process's place in the run."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
from jax.experimental import multihost_utils

from .._core.calls import answers
from .._heartbeat.client import HeartbeatClient, watch_exit


@dataclasses.dataclass
class Process:
    """This process among the others."""

    client: HeartbeatClient | None = None
    processes: int = 1  # how many processes the run has
    is_joined: bool = False  # whether `initialize` is done; the process may be the only one
    has_failed: bool = False  # whether jax failed during its own start
    is_attached: bool = False  # whether `initialize` found jax started by other code


this = Process()


def set_process(processes: int, client: HeartbeatClient | None) -> None:
    """Make this process one of several. From now on it reports how it ends."""
    this.client, this.processes = client, processes
    if client is not None:
        watch_exit(client)


def start_jax(*settings: Any, **options: Any) -> None:
    """Start jax, and record an error of that, which cannot be repeated. Its ValueErrors come before it begins."""
    try:
        jax.distributed.initialize(*settings, **options)
    except BaseException as error:
        this.has_failed = not isinstance(error, ValueError)
        raise


def is_joined() -> bool:
    """Whether `initialize` is done, or the user's own `jax.distributed.initialize`."""
    if this.has_failed:  # jax may now say that it is initialised, or that it is one of one
        raise RuntimeError("distributed.initialize: an earlier call failed in this process; start all processes again")
    return this.is_joined or jax.distributed.is_initialized()


def numbers_of_jax() -> tuple[int, int]:
    """How many processes `jax.distributed` has, and which one this is. It starts no device."""
    state = multihost_utils.distributed.global_state  # pyright: ignore[reportPrivateImportUsage]
    return state.num_processes, state.process_id


def is_jax_used() -> bool:
    """Whether JAX has started its devices. Their number is fixed from then on."""
    number = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    try:
        jax.config.update("jax_num_cpu_devices", number + 1 if number > 0 else 1)
        jax.config.update("jax_num_cpu_devices", number)
    except RuntimeError:
        return True
    return False


@answers("distributed.set_resume_hint")
def set_resume_hint(path: str | os.PathLike[str] | None) -> None:
    """Set the checkpoint to name when a process is lost.

    `train.fit` calls this after each checkpoint. All processes receive the path. A process that ends because another
    process was lost prints it.

    Args:
        path: the newest good checkpoint, or None.

    Example:
        >>> from jaxpar import distributed
        >>> distributed.set_resume_hint("runs/lenet/step_00000120")
    """
    if this.client is not None:
        this.client.send_resume_hint(None if path is None else os.fspath(path))


def report_working() -> None:
    """Tell the launcher that this process, which may have been started again, does its work."""
    if this.client is not None:
        this.client.report_working()


def known_processes() -> int:
    """The number of processes that `initialize` found, and 1 before.

    Unlike `jax.process_count`, this call starts no device. If other code has called `jax.distributed.initialize`, the
    result is the number of processes of that call.

    Example:
        >>> from jaxpar import distributed
        >>> distributed.known_processes()
        1
    """
    if not this.is_joined and jax.distributed.is_initialized():
        return numbers_of_jax()[0]
    return this.processes


def wait_for_loss_report() -> None:
    """Wait one second for the report of a lost process.

    A collective can raise before the report of its lost peer has arrived, so call this before showing the exception. If
    a process was lost, this process ends with one line on standard error. With one process the call returns at once.

    Example:
        >>> from jaxpar import distributed
        >>> distributed.wait_for_loss_report()
    """
    if this.client is not None:
        this.client.wait_for_loss_report()
