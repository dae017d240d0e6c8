"""What an elastic run sets before jax starts, and jax's own record of which processes live."""

from __future__ import annotations

import os
from typing import Any

import jax
from jax.experimental import multihost_utils

from .._devices import processes
from .._heartbeat.messages import MOST_SECONDS
from ._environment import RAY_TRAIN, Cluster

VARIABLE = "JAXPAR_ELASTIC"  # the launcher sets it with --elastic
NEVER = round(MOST_SECONDS)  # the time limit of jax's own heartbeats where ours watch
_FLAG = "--xla_cpu_collective_timeout_seconds"
_WHERE = "distributed.initialize: elastic=True"


def check_elastic(cluster: Cluster | str, monitor: bool) -> None:
    """Raise what keeps a run from being elastic, before anything is set.

    Raises:
        RuntimeError: jax is too old, only jax can find the settings, or a launcher without --elastic started this.
        ValueError: without heartbeats.
    """
    if not monitor:
        raise ValueError(f"{_WHERE}: heartbeats say who is lost; leave out monitor=False")
    if not hasattr(multihost_utils, "live_devices") or not hasattr(jax.config, "jax_enable_recoverability"):
        raise RuntimeError(
            f"{_WHERE}: jax {jax.__version__} cannot go on after a loss; use jax 0.10.2 or later, or leave out "
            "elastic: then all processes end after a loss, and resume from a checkpoint"
        )
    if cluster == RAY_TRAIN:
        raise RuntimeError(f"{_WHERE}: Ray Train starts all its workers again after a loss; leave out elastic")
    if isinstance(cluster, str):
        raise RuntimeError(
            f"{_WHERE}: in {cluster} only jax can find the settings, and no process could come back; set "
            "JAXPAR_COORDINATOR, JAXPAR_NUM_PROCESSES and JAXPAR_PROCESS_ID"
        )
    if cluster.server and os.environ.get(VARIABLE) != "1":
        raise RuntimeError(
            f"{_WHERE}: the launcher would end all processes after a loss; start them by jaxpar launch --elastic"
        )


def configure(heartbeat_timeout: float) -> dict[str, Any]:
    """Set what jax reads at its start of an elastic run. Return options of `jax.distributed.initialize`."""
    flags = os.environ.get("XLA_FLAGS", "")
    if _FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}={round(heartbeat_timeout)}".strip()
    jax.config.update("jax_enable_recoverability", True)
    processes.become_elastic()
    return {"shutdown_timeout_seconds": 5}


def forget(address: str, processes: int, rank: int) -> None:
    """Have jax's coordination service forget a lost process. Called in process 0, where the service is.

    The service is meant to notice a loss by jax's own heartbeats. But it takes a run that was stopped for a loss of
    every process, and ends them with SIGABRT. So its time limit is a week, and our heartbeats say who is lost: this
    connects in the place of the lost process, and leaves in order.
    """
    one = type(multihost_utils.distributed.global_state)()  # pyright: ignore[reportPrivateImportUsage]
    one.initialize_preemption_sync_manager = lambda: None
    options: dict[str, Any] = {"cluster_detection_method": "deactivate", "local_device_ids": []}
    one.initialize(address, processes, rank, **options, heartbeat_timeout_seconds=NEVER, shutdown_timeout_seconds=5)
    one.shutdown()


def is_elastic() -> bool:
    """Whether this process is one of an elastic run, see `initialize`.

    Example:
        >>> from jaxpar import distributed
        >>> distributed.is_elastic()
        False
    """
    return processes.is_elastic()
