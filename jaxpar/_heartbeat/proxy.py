"""A local proxy for jax's coordination service. It hides a lost connection from jax's client, which would abort.

The service is in process 0. When process 0 is killed, jax's client in every other process aborts within a tenth of a
second, with a C++ stack trace and status 134, before the loss can be reported. Through this proxy, which is in the same
process, the client sees no closed connection. It gives up after its own heartbeat timeout, which is longer than ours.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from .connection import split
from .thread import daemon

_CHUNK = 1 << 18
_MOST = 16  # connections at a time; jax's client has one or two
_RETRY = 0.05  # seconds between two attempts: jax's client waits, and a refused connection costs little
_CONNECT_TIMEOUT = 5.0  # seconds: a host that is gone answers nothing
_END = 5.0  # seconds which the service has to end after its client has


class ServiceProxy:
    """A listener on this host that forwards every connection.

    Each connection has threads of its own, so that one that hangs or breaks does not delay another. `target`, the
    service, and `address`, where the proxy listens, are "host:port".
    """

    def __init__(self, target: str):
        self._target = split(target)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._pairs: list[_Pair] = []
        consequence = "jax cannot connect to process 0 again"
        self.thread = daemon("jaxpar-proxy", self._run, consequence, self._listener.close)
        self.thread.start()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # out of descriptors, or the connection is gone already
                time.sleep(_RETRY)
                continue
            self._admit(client)

    def _admit(self, client: socket.socket) -> None:
        """Start a pair. Where there are too many, close the oldest that has sent nothing, else the new one."""
        self._pairs = [pair for pair in self._pairs if pair.thread.is_alive()]
        silent = [pair for pair in self._pairs if pair.is_silent]
        if len(self._pairs) >= _MOST:
            if not silent:
                return client.close()
            self._pairs.remove(silent[0])
            _shut(silent[0].client, socket.SHUT_RDWR)
        pair = _Pair(client, self._target)
        try:
            pair.thread.start()
        except RuntimeError:  # no more threads
            return client.close()
        self._pairs.append(pair)


class _Pair:
    """A connection of jax's client, and the connection to the service to which it is forwarded."""

    def __init__(self, client: socket.socket, target: tuple[str, int]):
        self.client, self._target = client, target
        self.thread = daemon("jaxpar-proxy-pair", self._run, "jax has to connect to process 0 again")
        self.is_silent = True

    def _run(self) -> None:
        with self.client as client:
            data = _receive(client)  # jax's client sends first
            self.is_silent = False
            service = self._connect() if data else None
            if service is None:
                return
            with service:
                self._forward(client, service, data)

    def _connect(self) -> socket.socket | None:
        """A connection to the service, which may start later. None if the client ends first."""
        while _is_open(self.client):
            try:
                service = socket.create_connection(self._target, timeout=_CONNECT_TIMEOUT)
            except OSError:
                time.sleep(_RETRY)
                continue
            service.settimeout(None)
            return service
        return None

    def _forward(self, client: socket.socket, service: socket.socket, data: bytes) -> None:
        """Forward both directions until the client ends. The end of the service is never forwarded."""
        for sock in (client, service):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answers = threading.Thread(target=_copy, args=(service, client), daemon=True)
        answers.start()
        with contextlib.suppress(OSError):
            service.sendall(data)
        _copy(client, service)
        _shut(service, socket.SHUT_WR)
        answers.join(_END)
        for sock in (client, service):
            _shut(sock, socket.SHUT_RDWR)  # wakes the other thread where it still waits
        answers.join()


def _copy(source: socket.socket, drain: socket.socket) -> None:
    """Copy from `source` until its end. What `drain` no longer takes is dropped."""
    is_open = True
    while data := _receive(source):
        try:
            if is_open:
                drain.sendall(data)
        except OSError:
            is_open = False


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(_CHUNK)
    except OSError:
        return b""


def _is_open(sock: socket.socket) -> bool:
    try:
        return bool(sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except OSError:
        return False


def _shut(sock: socket.socket, direction: int) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(direction)
