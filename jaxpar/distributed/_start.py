"""The start of jax in several processes, after they have joined the heartbeat server."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from .._devices import processes
from .._heartbeat import addresses
from .._heartbeat.client import HeartbeatClient
from .._heartbeat.proxy import ServiceProxy
from .._heartbeat.pulse import Pulse
from .._heartbeat.secret import Secret
from . import _attach, _elastic, _environment, _process, _ray, _rendezvous
from ._environment import Cluster


def start(
    cluster: Cluster, options: dict[str, Any], heartbeat_timeout: float, join_timeout: float, watch: bool
) -> None:
    """Join the others, then start jax.

    Args:
        cluster: the settings of this process.
        options: for `jax.distributed.initialize`.
        heartbeat_timeout, join_timeout: seconds.
        watch: whether the processes send heartbeats.
    """
    several = cluster.num_processes > 1
    with contextlib.ExitStack() as reserved:
        if cluster.process_id == 0 and several:
            reserved.enter_context(_rendezvous.reserve_port(cluster.coordinator))
        client = None
        if watch and (several or cluster.server):
            client = _rendezvous.join(cluster, heartbeat_timeout, join_timeout, processes.is_elastic())
    _process.set_process(cluster.num_processes, client)
    if several or not cluster.server:
        if options["local_device_ids"] is None:
            options = {**options, "local_device_ids": cluster.local_devices}
        _start_jax(cluster, client is not None, options)
    if processes.is_elastic():
        _elastic.release_others(_elastic.Board(), cluster.process_id)


def _start_jax(cluster: Cluster, is_watched: bool, options: dict[str, Any]) -> None:
    address = cluster.coordinator
    if is_watched and cluster.process_id:
        proxy = ServiceProxy(address)
        proxy.start()
        address = proxy.address
    bind_address = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or addresses.bind_address(cluster.coordinator)
    with _process.start_once():
        jax.distributed.initialize(
            address,
            cluster.num_processes,
            cluster.process_id,
            cluster_detection_method="deactivate",  # the settings are complete
            coordinator_bind_address=bind_address,
            **options,
        )


def start_by_ray(options: dict[str, Any]) -> None:
    """Start jax in the workers of Ray Train. There are no heartbeats, as Ray watches its workers.

    Args:
        options: as for `start`.
    """
    address, size, rank = _ray.meet(_ray.worker())
    _process.set_process(size, None)
    _start_jax(Cluster(address, size, rank, _environment.RAY_TRAIN), False, options)
    _attach.say_once(size, rank, "jax runs")


def start_by_jax(name: str, options: dict[str, Any], heartbeat_timeout: float, watch: bool) -> None:
    """Start jax where only it can find the settings. The heartbeats begin after that.

    Args:
        name: of the surroundings, such as "Kubernetes".
        options, heartbeat_timeout, watch: as for `start`.

    Raises:
        RuntimeError: jax finds no settings.
    """
    try:
        with _process.start_once():
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
    client = _join_through_jax(rank, size, heartbeat_timeout) if watch and size > 1 else None
    _process.set_process(size, client)


def _join_through_jax(rank: int, size: int, heartbeat_timeout: float) -> HeartbeatClient:
    """The heartbeat client, after process 0 has sent the address and the secret of its server by a collective."""
    from jax.experimental import multihost_utils

    server, pulse, sent = None, Pulse(), np.zeros(256, np.uint8)
    if rank == 0:
        server, address, secret = _rendezvous.start_server(size, heartbeat_timeout, pulse)
        text = f"{address} {secret.key.decode()}".encode()
        sent[: len(text)] = np.frombuffer(text, np.uint8)
    with ThreadPoolExecutor(1) as thread:  # in this one jax may be tracing, around a kv.create
        sent = thread.submit(multihost_utils.broadcast_one_to_all, sent).result()
    address, key = bytes(np.asarray(sent, np.uint8)).rstrip(b"\0").decode().split(" ")
    secret = Secret(key.encode(), "process 0")
    return _rendezvous.join_at(address, rank, size, heartbeat_timeout, secret, server, pulse)
