"""Several processes, by `jax.distributed`."""

from __future__ import annotations

from collections.abc import Sequence

import jax


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    initialization_timeout: int = 60,
    heartbeat_timeout: int = 15,
) -> None:
    """Makes this process one of several that train together. To be called before the first use of JAX.

    Without arguments the settings are found as jax does: SLURM, Open MPI, Kubernetes, Cloud TPU. Where the
    process is initialised already, the call does nothing, so a script may be run as a cell again.

    Args:
        coordinator: "host:port" of process 0.
        num_processes: how many there are.
        process_id: which one this is, from 0.
        local_device_ids: the devices of this host that belong to this process; None takes all.
        initialization_timeout: seconds to wait for the others.
        heartbeat_timeout: seconds after which a process that is silent counts as lost (jax waits 100).

    Raises:
        ValueError: some of the first three are given and others not, or an id outside of the range.
        RuntimeError: JAX runs already, or the others did not come in time.
    """
    if jax.distributed.is_initialized():
        return
    given = (coordinator, num_processes, process_id)
    if any(x is not None for x in given) and any(x is None for x in given):
        raise ValueError(
            "distributed.initialize: coordinator, num_processes and process_id belong together, got "
            f"{coordinator!r}, {num_processes!r}, {process_id!r}"
        )
    if num_processes is not None and process_id is not None and not 0 <= process_id < num_processes:
        raise ValueError(f"distributed.initialize: process_id must be from 0 to {num_processes - 1}, got {process_id}")
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        local_device_ids=local_device_ids,
        initialization_timeout=initialization_timeout,
        heartbeat_timeout_seconds=heartbeat_timeout,
    )
