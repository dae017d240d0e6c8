"""How a process joins the heartbeat server.

Its address follows from the coordinator's. Under the launcher it is in the environment.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket

from .._core.text import say_news
from .._heartbeat import secret as secrets
from .._heartbeat.addresses import is_loopback, own_address, split
from .._heartbeat.client import HeartbeatClient
from .._heartbeat.pulse import Pulse
from .._heartbeat.releases import Releases
from .._heartbeat.server_thread import ServerThread
from ._elastic import forget
from ._environment import Cluster

_OPEN = (
    "any program that reaches this host's network can take part in the heartbeats of this run and end it; to prevent "
    f"that, set {secrets.VARIABLE} to one random text in all processes, or write it to ~/.config/jaxpar/secret (chmod "
    "600)"
)
_LOCKED = 60.0  # seconds for which a process that others can go on without may hold Python's lock
_PORTS = 8  # the server takes the first free one of these many after the coordinator's


def join(cluster: Cluster, heartbeat_timeout: float, join_timeout: float, elastic: bool = False) -> HeartbeatClient:
    """Join the others, and return the heartbeat client. Process 0 starts the server where no launcher has it.

    Raises:
        RuntimeError: the server does not answer or has another secret, others did not join in time or with other
            numbers, or no port is free. The secret cannot be used.
    """
    server, host, port = None, *split(cluster.server or cluster.coordinator)
    secret, releases = secrets.find(), None
    pulse = Pulse(most=_LOCKED) if elastic and cluster.process_id else Pulse()
    if elastic and cluster.process_id == 0:
        releases = Releases(functools.partial(forget, cluster.coordinator, cluster.num_processes))
    addresses = [(host, port)] if cluster.server else [(host, p) for p in _ports(port)]
    if cluster.process_id == 0 and not cluster.server:
        if secret is None and not is_loopback(host):
            say_news(_OPEN)
        listener = _listen(host, _ports(port))
        addresses = [("127.0.0.1", listener.getsockname()[1])]
        server = ServerThread(
            listener,
            job=cluster.job,
            size=cluster.num_processes,
            secret=secret,
            heartbeat_timeout=heartbeat_timeout,
            join_timeout=join_timeout,
            elastic=elastic,
            pulse=pulse,
        )
    client = HeartbeatClient(
        cluster.process_id,
        cluster.num_processes,
        job=cluster.job,
        secret=secret,
        heartbeat_timeout=heartbeat_timeout,
        launched=bool(cluster.server),
        server=server,
        pulse=pulse,
        releases=releases,
    )
    return _join(client, addresses, join_timeout, _describe_absence(cluster))


def start_server(size: int, heartbeat_timeout: float, pulse: Pulse) -> tuple[ServerThread, str, secrets.Secret]:
    """A heartbeat server at a free port of this host, its address, and a new secret."""
    secret = secrets.new("process 0")
    listener = socket.create_server(("", 0))
    server = ServerThread(
        listener,
        job="jax",
        size=size,
        secret=secret,
        heartbeat_timeout=heartbeat_timeout,
        join_timeout=60.0,
        pulse=pulse,
    )
    return server, f"{own_address()}:{listener.getsockname()[1]}", secret


def join_at(
    address: str,
    rank: int,
    size: int,
    heartbeat_timeout: float,
    secret: secrets.Secret,
    server: ServerThread | None,
    pulse: Pulse,
) -> HeartbeatClient:
    """Join the others through the server at an address, and return the heartbeat client."""
    client = HeartbeatClient(
        rank,
        size,
        job="jax",
        secret=secret,
        heartbeat_timeout=heartbeat_timeout,
        launched=False,
        server=server,
        pulse=pulse,
    )
    return _join(client, [split(address)], 60.0, f"no answer at {address}")


def reserve_port(address: str) -> socket.socket:
    """Reserve the coordinator's port until jax takes it. Close the socket then.

    Without this gRPC would silently share the port with another run.

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


def _join(client: HeartbeatClient, addresses: list[tuple[str, int]], seconds: float, absent: str) -> HeartbeatClient:
    if client.server is not None:
        client.server.start()
    try:
        client.join_run(addresses, seconds, absent)
    except ConnectionError as error:
        raise RuntimeError(
            f"distributed.initialize: {error} (this is process {client.rank} of {client.size})"
        ) from None
    return client


def _describe_absence(cluster: Cluster) -> str:
    """The message where no server answers."""
    if cluster.server:
        return f"the launcher is not there: no answer at {cluster.server}"
    ports = sorted(_ports(split(cluster.coordinator)[1]))
    return (
        f"process 0 is not there: no answer from the coordinator {cluster.coordinator} at ports {ports[0]} to "
        f"{ports[-1]} of the heartbeat server"
    )


def _listen(host: str, ports: list[int]) -> socket.socket:
    interface = "127.0.0.1" if is_loopback(host) else ""
    for port in ports:
        with contextlib.suppress(OSError):
            return socket.create_server((interface, port))
    raise RuntimeError(
        f"distributed.initialize: the heartbeat server takes one of the ports {min(ports)} to {max(ports)} on this "
        "host, and none is free; choose another port for the coordinator"
    )


def _ports(port: int) -> list[int]:
    up = port + _PORTS <= 65535
    return [port + i if up else port - i for i in range(1, _PORTS + 1)]
