"""Several processes, by `jax.distributed`: how they find each other, and how they notice that one is lost.

>>> from jaxpar import distributed
>>> distributed.initialize()  # one process: there is nothing to do

The same script runs in a notebook, under `python -m jaxpar launch`, SLURM, Open MPI, Kubernetes and on Cloud TPU.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from .._heartbeat import addresses
from .._heartbeat.client import LOST as LOST, HeartbeatClient
from .._heartbeat.messages import MOST_SECONDS
from .._heartbeat.proxy import ServiceProxy
from .._heartbeat.server import SILENCE
from . import _environment, _rendezvous
from ._exit import watch_exit

_monitor: HeartbeatClient | None = None
_processes = 1
_joined = False  # whether `initialize` is done; the process may be the only one
_failed = False  # whether jax's part of it failed half-way


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    initialization_timeout: float | None = None,
    heartbeat_timeout: float | None = None,
    monitor: bool = True,
    preemption_service: bool = False,
) -> None:
    """Makes this process one of several that train together. To be called before the first use of JAX.

    Without arguments the settings are found: those of `python -m jaxpar launch` (or the same variables set by
    hand: JAXPAR_COORDINATOR, JAXPAR_NUM_PROCESSES, JAXPAR_PROCESS_ID), then, as jax does, SLURM, Open MPI,
    Kubernetes, Cloud TPU. Where nothing tells of several processes the call returns quietly and the process
    trains alone, so a script or a notebook may always begin with it (jax raises there). Where the process is
    initialised already, the call does nothing. `kv.create` makes this call for the kinds `dist_...`.

    On CPU devices the collectives between processes are Gloo's.

    A monitor notices within 15 seconds that another process was killed, frozen, or failed. Nothing can be
    computed then: a collective that is under way may never return. So the process ends with one line on standard
    error, which names the lost process and the checkpoint to resume from (`set_resume_hint`), and with the
    status `distributed.LOST` (75). A process that ends in order, or pauses for a few seconds, is no loss.

    Args:
        coordinator: "host:port" of process 0. The monitor takes one of the next eight ports.
        num_processes: how many there are.
        process_id: which one this is, from 0.
        local_device_ids: the GPUs of this host that belong to this process; None takes all, or, under SLURM and
            Open MPI with several processes on a host, one for each.
        initialization_timeout: seconds to wait for the others. None: 60, or what JAXPAR_INITIALIZATION_TIMEOUT says.
        heartbeat_timeout: seconds of silence after which a process counts as frozen; a killed one is noticed at
            once. None: 10, or what JAXPAR_HEARTBEAT_TIMEOUT says (the launcher sets it).
        monitor: False leaves the watch to jax: 100 seconds, then a C++ stack trace and status 134. The same in
            all processes.
        preemption_service: True has jax catch SIGTERM, for `multihost_utils.reached_preemption_sync_point`;
            otherwise SIGTERM does what the program says, and `train.fit` saves a checkpoint.

    Raises:
        ValueError: settings that are incomplete, out of range, or contradict each other.
        RuntimeError: JAX runs already; the port is taken; process 0 is not there; the others did not come in
            time, or with other numbers; an earlier call failed half-way.
    """
    global _joined
    if _is_joined():
        return
    if initialization_timeout is None:
        initialization_timeout = float(os.environ.get("JAXPAR_INITIALIZATION_TIMEOUT") or 60)
    if heartbeat_timeout is None:
        heartbeat_timeout = float(os.environ.get("JAXPAR_HEARTBEAT_TIMEOUT") or SILENCE)
    if not 0 < initialization_timeout <= MOST_SECONDS or not 2 <= heartbeat_timeout <= MOST_SECONDS:
        raise ValueError(
            "distributed.initialize: initialization_timeout must be above 0 and heartbeat_timeout 2 seconds or more, "
            f"got {initialization_timeout:g} and {heartbeat_timeout:g}; both at most {MOST_SECONDS:.0f}, a week"
        )
    found = _environment.find(coordinator, num_processes, process_id)
    by_hand = any(x is not None for x in (coordinator, num_processes, process_id))
    if found is None or (not isinstance(found, str) and found.num_processes == 1 and not found.hub and not by_hand):
        return
    if _is_jax_used():
        raise RuntimeError(
            "distributed.initialize: JAX runs already and cannot become one of several processes now; call it before "
            "anything else that uses JAX (in a notebook, restart the kernel and call it first)"
        )
    jax.config.update("jax_enable_preemption_service", preemption_service)
    chosen = jax.config.jax_cpu_collectives_implementation  # pyright: ignore[reportAttributeAccessIssue]
    if not chosen:  # "mpi" stays where somebody chose it
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    options: dict[str, Any] = {
        "initialization_timeout": max(1, round(initialization_timeout)),
        # A net under the monitor: what jax does comes later, and ugly.
        "heartbeat_timeout_seconds": round(max(100, 10 * heartbeat_timeout)),
    }
    if isinstance(found, str):
        _found_by_jax(found, {**options, "local_device_ids": local_device_ids}, heartbeat_timeout, monitor)
    else:
        options["local_device_ids"] = found.local_devices if local_device_ids is None else local_device_ids
        _found_here(found, options, heartbeat_timeout, initialization_timeout, monitor)
    _joined = True


def join(caller: str) -> None:
    """Joins the processes that `initialize()` finds, if this process has not yet.

    `kv.create` calls this for the kinds `dist_...`. Where there are no others it does nothing.

    Args:
        caller: who asks; the message begins with it.

    Raises:
        RuntimeError, ValueError: as `initialize`; JAX was used before, and there are others to join.

    Example:
        >>> from jaxpar import distributed
        >>> distributed.join("my_function")  # one process: there is nothing to join
    """
    if _is_joined() or (found := _environment.find(None, None, None)) is None:
        return
    if not _is_jax_used():
        return initialize()
    if _environment.has_others(found):
        raise RuntimeError(
            f"{caller}: this is {_environment.describe(found)} and has not joined the others. It cannot join them "
            "now: JAX was used before (by an array, a random key or jax.devices()), which fixed the number of its "
            "processes at 1. Call jp.distributed.initialize() before the first use of JAX"
        )


def check_joined(caller: str, harm: str, *, launched: bool = False) -> None:
    """Raises where `initialize()` would find others that this process has not joined.

    Args:
        caller: who asks; the message begins with it.
        harm: what would go wrong, a clause.
        launched: True asks only for the variables of `jaxpar launch`; tasks of SLURM may be runs of their own.

    Raises:
        RuntimeError: this process has not joined the others. ValueError: as `initialize`.

    Example:
        >>> from jaxpar import distributed
        >>> distributed.check_joined("my_function", "the sum would be too small")  # one process
    """
    if _is_joined():
        return
    found = _environment.launched() if launched else _environment.find(None, None, None)
    if _environment.has_others(found):
        apart = "; separate runs are started without the variables JAXPAR_*" if launched else ""
        raise RuntimeError(
            f"{caller}: this is {_environment.describe(found)} and has not joined the others, so {harm}. Call "
            f"jp.distributed.initialize() before the first use of JAX{apart}"
        )


def set_resume_hint(path: str | os.PathLike[str] | None) -> None:
    """Tells the monitor what to resume from: it stands in the last line of a process that ends by a loss.

    `train.fit` calls this after each checkpoint.

    Args:
        path: the newest good checkpoint, or None.

    Example:
        >>> from jaxpar import distributed
        >>> distributed.set_resume_hint("runs/lenet/step_00000120")
    """
    if _monitor is not None:
        _monitor.tell_hint(None if path is None else os.fspath(path))


def known_processes() -> int:
    """How many processes `initialize` found, 1 before it; unlike `jax.process_count` this starts no device.

    Example:
        >>> from jaxpar import distributed
        >>> distributed.known_processes()
        1
    """
    return _processes


def hear_of_losses() -> None:
    """To be called before an error is shown: does not return where another process is the cause of it.

    A collective whose peer was killed may raise a moment before this process hears of the loss. So this waits a
    second for the news. With one process it returns at once.

    Example:
        >>> from jaxpar import distributed
        >>> distributed.hear_of_losses()
    """
    if _monitor is not None:
        _monitor.hear()


def _found_here(
    found: _environment.Cluster, options: dict[str, Any], silence: float, seconds: float, watch: bool
) -> None:
    """Meets the others, then starts jax."""
    several = found.num_processes > 1
    with contextlib.ExitStack() as kept:
        if found.process_id == 0 and several:
            kept.enter_context(_rendezvous.reserve_port(found.coordinator))
        watching = _rendezvous.join(found, silence, seconds) if watch and (several or found.hub) else None
    _begun(found.num_processes, watching)
    if several or not found.hub:
        _start_jax(found, watching is not None, options)


def _start_jax(found: _environment.Cluster, watched: bool, options: dict[str, Any]) -> None:
    address = found.coordinator
    if watched and found.process_id:
        relay = ServiceProxy(address)
        relay.start()
        address = relay.address
    bind_address = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or addresses.bind_address(found.coordinator)
    with _not_again():
        jax.distributed.initialize(
            address,
            found.num_processes,
            found.process_id,
            cluster_detection_method="deactivate",  # all is known
            coordinator_bind_address=bind_address,
            **options,
        )


@contextlib.contextmanager
def _not_again() -> Generator[None]:
    """Remembers that jax's own start failed half-way. Its ValueErrors come before it begins."""
    global _failed
    try:
        yield
    except BaseException as error:
        _failed = not isinstance(error, ValueError)
        raise


def _is_joined() -> bool:
    """Whether `initialize` is done, or the user's own `jax.distributed.initialize`."""
    if _failed:  # jax may now say that it is initialised, or that it is one of one
        raise RuntimeError("distributed.initialize: an earlier call failed in this process; start all processes again")
    return _joined or jax.distributed.is_initialized()


def _is_jax_used() -> bool:
    """Whether JAX has started its devices: it takes no setting of their number any more."""
    number = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    try:
        jax.config.update("jax_num_cpu_devices", number + 1 if number > 0 else 1)
        jax.config.update("jax_num_cpu_devices", number)
    except RuntimeError:
        return True
    return False


def _found_by_jax(name: str, options: dict[str, Any], silence: float, watch: bool) -> None:
    """Where only jax can find the settings. They are not known here before JAX runs, so the monitor starts last."""
    try:
        with _not_again():
            jax.distributed.initialize(**options)
    except ValueError as error:
        if "must be defined" not in str(error) and "should be defined" not in str(error):
            raise
        if name == "Cloud TPU":
            return  # a single host
        raise RuntimeError(
            f"distributed.initialize: jax finds no settings in {name}; set JAXPAR_COORDINATOR and "
            "JAXPAR_NUM_PROCESSES (the number of the process is JOB_COMPLETION_INDEX), or install jax[k8s]"
        ) from error
    rank, size = jax.process_index(), jax.process_count()
    if not watch or size == 1:
        return _begun(size, None)
    from jax.experimental import multihost_utils

    hub, address = None, np.zeros(64, np.uint8)
    if rank == 0:
        hub, text = _rendezvous.hub_anywhere(size, silence)
        address[: len(text)] = np.frombuffer(text.encode(), np.uint8)
    with ThreadPoolExecutor(1) as thread:  # in this one jax may be tracing, around a kv.create
        address = thread.submit(multihost_utils.broadcast_one_to_all, address).result()
    text = bytes(np.asarray(address, np.uint8)).rstrip(b"\0").decode()
    _begun(size, _rendezvous.join_at(text, rank, size, silence, hub))


def _begun(processes: int, monitor: HeartbeatClient | None) -> None:
    global _monitor, _processes
    _monitor, _processes = monitor, processes
    if monitor is not None:
        watch_exit(monitor)
