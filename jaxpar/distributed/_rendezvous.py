"""How a process gets to the hub: its address follows from the coordinator's, or the launcher tells it."""

from __future__ import annotations

import contextlib
import os
import socket

from .._heartbeat.addresses import is_loopback, own_address, split
from .._heartbeat.client import HeartbeatClient
from .._heartbeat.server import HubThread
from ._environment import Cluster

_PORTS = 8  # the hub takes the first free one of so many after the coordinator's


def join(found: Cluster, silence: float, seconds: float) -> HeartbeatClient:
    """The monitor of this process, after all have met; process 0 starts the hub where no launcher has it.

    Raises:
        RuntimeError: process 0 is not there, others did not come in time or with other numbers, no port is free.
    """
    hub, host, port = None, *split(found.hub or found.coordinator)
    addresses = [(host, port)] if found.hub else [(host, p) for p in _ports(port)]
    if found.process_id == 0 and not found.hub:
        listener = _listen(host, _ports(port))
        addresses = [("127.0.0.1", listener.getsockname()[1])]
        hub = HubThread(listener, job=found.job, size=found.num_processes, silence=silence, joining=seconds)
    monitor = HeartbeatClient(
        found.process_id, found.num_processes, job=found.job, silence=silence, launched=bool(found.hub), hub=hub
    )
    if found.hub:
        where = f"the launcher is not there: no answer at {found.hub}"
    else:
        ports = sorted(_ports(port))
        where = (
            f"process 0 is not there: no answer from the coordinator {found.coordinator} at ports {ports[0]} to "
            f"{ports[-1]} of the monitor"
        )
    return _joined(monitor, addresses, seconds, where)


def hub_anywhere(size: int, silence: float) -> tuple[HubThread, str]:
    """A hub at a free port of this host, and its address."""
    listener = socket.create_server(("", 0))
    hub = HubThread(listener, job="jax", size=size, silence=silence, joining=60.0)
    return hub, f"{own_address()}:{listener.getsockname()[1]}"


def join_at(address: str, rank: int, size: int, silence: float, hub: HubThread | None) -> HeartbeatClient:
    monitor = HeartbeatClient(rank, size, job="jax", silence=silence, launched=False, hub=hub)
    return _joined(monitor, [split(address)], 60.0, f"no answer at {address}")


def reserve_port(address: str) -> socket.socket:
    """Keeps the coordinator's port until jax takes it (close the socket then); gRPC would share it without a word.

    Raises:
        RuntimeError: the port is taken.
    """
    _, port = split(address)
    reserved = socket.socket()
    try:
        with socket.create_server(("", port)):
            pass  # nobody listens there; what is left of an earlier run does not count
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("", port))
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # from now on nobody else may bind it
    except OSError as error:
        reserved.close()
        raise RuntimeError(
            f"distributed.initialize: port {port} of the coordinator {address} cannot be used on this host: "
            f"{os.strerror(error.errno or 0)}; another run may have it, choose another port"
        ) from None
    return reserved


def _joined(monitor: HeartbeatClient, addresses: list[tuple[str, int]], seconds: float, absent: str) -> HeartbeatClient:
    if monitor.hub is not None:
        monitor.hub.start()
    try:
        monitor.join_run(addresses, seconds, absent)
    except ConnectionError as error:
        raise RuntimeError(
            f"distributed.initialize: {error} (this is process {monitor.rank} of {monitor.size})"
        ) from None
    return monitor


def _listen(host: str, ports: list[int]) -> socket.socket:
    interface = "127.0.0.1" if is_loopback(host) else ""
    for port in ports:
        with contextlib.suppress(OSError):
            return socket.create_server((interface, port))
    raise RuntimeError(
        f"distributed.initialize: the monitor takes one of the ports {min(ports)} to {max(ports)} on this host, and "
        "none is free; choose another port for the coordinator"
    )


def _ports(port: int) -> list[int]:
    up = port + _PORTS <= 65535
    return [port + i if up else port - i for i in range(1, _PORTS + 1)]
