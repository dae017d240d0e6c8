"""`initialize`: its checks, and the choice between the ways of a start."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax

from .._core.calls import answers
from .._heartbeat.elastic_server import ELASTIC_TIMEOUT
from .._heartbeat.messages import MOST_SECONDS
from .._heartbeat.server import HEARTBEAT_TIMEOUT
from . import _attach, _elastic, _environment, _process, _start


@answers("distributed.initialize")
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
    elastic: bool = False,
) -> None:
    """Make this process one of several that train together. Call it before the first use of JAX.

    Without arguments the settings are found. First come those of `python -m jaxpar launch`, or the same variables set
    by hand: JAXPAR_COORDINATOR, JAXPAR_NUM_PROCESSES, JAXPAR_PROCESS_ID. Then come Ray Train, the variables
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, and SkyPilot. Then, as in jax, come SLURM, Open MPI,
    Kubernetes and Cloud TPU. Where none of them names several processes the call returns, and the process trains as
    the only one. So a script or a notebook may always begin with it (jax raises there). A second call does nothing.
    Where other code has called `jax.distributed.initialize`, this joins its processes and starts nothing. Ray Train
    watches its workers and starts them again, so there are no heartbeats in it.
    `kv.create` makes this call for the kinds `dist_...`.

    On CPU devices the collectives between processes are Gloo's.

    Heartbeats show within 15 seconds that another process was killed, frozen, or failed. Nothing can be computed
    then: a collective that is under way may never return. So the process ends with one line on standard error and
    with the status `distributed.LOST` (75). The line names the lost process and the checkpoint to resume from
    (`set_resume_hint`). A process that ends with status 0, or pauses for a few seconds, is no loss.

    Args:
        coordinator: "host:port" of process 0. The heartbeat server takes one of the next eight ports.
        num_processes: how many there are.
        process_id: which one this is, from 0.
        local_device_ids: the GPUs of this host that belong to this process. None takes all. Under SLURM and Open MPI
            with several processes on a host, None takes one for each.
        initialization_timeout: seconds to wait for the others. None: 60, or JAXPAR_INITIALIZATION_TIMEOUT.
        heartbeat_timeout: seconds without a heartbeat after which a process counts as frozen. A killed one is noticed
            at once. None: 10, or JAXPAR_HEARTBEAT_TIMEOUT, which the launcher sets.
        monitor: False leaves the watch to jax: 100 seconds, then a C++ stack trace and status 134. It must be the
            same in all processes.
        preemption_service: True lets jax catch SIGTERM, for `multihost_utils.reached_preemption_sync_point`.
            Otherwise SIGTERM does what the program says, and `train.fit` saves a checkpoint.
        elastic: True lets `train.fit` go on when a process other than 0 is lost. The others make the failed step
            again, and a process that comes back joins at the next step. `heartbeat_timeout` is then 4 by default, and
            also limits how long a collective waits. `jaxpar launch --elastic` sets it. docs/cluster.md has the limits.

    Raises:
        TypeError: `num_processes` or `process_id` is no int.
        ValueError: settings that are incomplete, out of range, or contradict each other, `elastic` without `monitor`.
        RuntimeError: JAX was used before. It is too old for `elastic`. The port is taken. Process 0 does not answer.
            The others did not join in time, or with other numbers. An earlier call failed half-way.
    """
    elastic = elastic or os.environ.get(_elastic.VARIABLE) == "1"
    if _process.is_joined():
        if elastic and not _elastic.is_elastic() and jax.distributed.is_initialized():
            raise RuntimeError(
                "distributed.initialize: elastic=True comes too late, jax was initialised without it; give it in the "
                "first call, instead of jax.distributed.initialize"
            )
        return _attach.attach(num_processes, process_id)
    joining, heartbeat = _timeouts(initialization_timeout, heartbeat_timeout, elastic)
    cluster = _environment.find(coordinator, num_processes, process_id)
    by_hand = any(x is not None for x in (coordinator, num_processes, process_id))
    if cluster is None or (isinstance(cluster, _environment.Cluster) and cluster.is_single and not by_hand):
        return
    if _process.is_jax_used():
        raise RuntimeError(
            "distributed.initialize: JAX runs already and cannot become one of several processes now; call it before "
            "anything else that uses JAX (in a notebook, restart the kernel and call it first)"
        )
    elastic = elastic and (isinstance(cluster, str) or cluster.num_processes > 1)
    if elastic:
        _elastic.check_elastic(cluster, monitor)
    _configure(preemption_service)
    watched = monitor and cluster != _environment.RAY_TRAIN
    options: dict[str, Any] = {
        "local_device_ids": local_device_ids,
        "initialization_timeout": max(1, round(joining)),
        # jax's own watch ends a process with a stack trace, also after a stop of all (Ctrl-Z, a paused container).
        "heartbeat_timeout_seconds": _elastic.NEVER if watched else round(max(100, 10 * heartbeat)),
    }
    if elastic:
        options |= _elastic.configure(heartbeat)
    if cluster == _environment.RAY_TRAIN:
        _start.start_by_ray(options)
    elif isinstance(cluster, str):
        _start.start_by_jax(cluster, options, heartbeat, monitor)
    else:
        _start.start(cluster, options, heartbeat, joining, monitor)
    _process.this.is_joined = True


def _timeouts(initialization: float | None, heartbeat: float | None, elastic: bool) -> tuple[float, float]:
    """Both timeouts in seconds, those that are None from the environment."""
    if initialization is None:
        initialization = float(os.environ.get("JAXPAR_INITIALIZATION_TIMEOUT") or 60)
    if heartbeat is None:
        usual = ELASTIC_TIMEOUT if elastic else HEARTBEAT_TIMEOUT
        heartbeat = float(os.environ.get("JAXPAR_HEARTBEAT_TIMEOUT") or usual)
    if not 0 < initialization <= MOST_SECONDS or not 2 <= heartbeat <= MOST_SECONDS:
        raise ValueError(
            "distributed.initialize: initialization_timeout must be above 0 and heartbeat_timeout 2 seconds or more, "
            f"got {initialization:g} and {heartbeat:g}; both at most {MOST_SECONDS:.0f}, a week"
        )
    return initialization, heartbeat


def _configure(preemption_service: bool) -> None:
    jax.config.update("jax_enable_preemption_service", preemption_service)
    collectives = jax.config.jax_cpu_collectives_implementation  # pyright: ignore[reportAttributeAccessIssue]
    if not collectives:  # the user's own "mpi" stays
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
