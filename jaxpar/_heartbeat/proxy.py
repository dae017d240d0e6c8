"""A door to jax's coordination service that stays open when the service dies.

That service lives in process 0. When process 0 is killed, jax's client in every other process aborts within a
tenth of a second, with a C++ stack trace and status 134, before a monitor could say what happened. Behind this
relay, in the process itself, the client sees no connection closing; it gives up after its own heartbeat timeout,
which comes later than the monitor's.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

_CHUNK = 1 << 18
_MOST = 16  # connections at a time; jax's client has one or two
_RETRY = 0.05  # seconds between two attempts
_END = 5.0  # seconds which the service has to end after its client has


class ServiceProxy(threading.Thread):
    """Listens at `address` on this host and hands every connection on to `target` ("host:port").

    Each connection has threads of its own, so that one that hangs or breaks holds up no other.
    """

    def __init__(self, target: str):
        super().__init__(name="jaxpar-relay", daemon=True)
        host, port = target.rsplit(":", 1)
        self._target = (host.strip("[]"), int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._pairs: list[_Pair] = []

    def run(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # out of descriptors, or the connection is gone already
                time.sleep(_RETRY)
                continue
            self._admit(near)

    def _admit(self, near: socket.socket) -> None:
        """Start a pair; where there are too many, close the oldest that has sent nothing, else the new one."""
        self._pairs = [pair for pair in self._pairs if pair.is_alive()]
        silent = [pair for pair in self._pairs if pair.is_silent]
        if len(self._pairs) >= _MOST and not silent:
            return near.close()
        if len(self._pairs) >= _MOST:
            self._pairs.remove(silent[0])
            silent[0].stop()
        pair = _Pair(near, self._target)
        try:
            pair.start()
        except RuntimeError:  # no more threads
            return near.close()
        self._pairs.append(pair)


class _Pair(threading.Thread):
    """A connection of jax's client and the one to the service that it is handed on to."""

    def __init__(self, near: socket.socket, target: tuple[str, int]):
        super().__init__(name="jaxpar-relay-pair", daemon=True)
        self._near, self._target = near, target
        self.is_silent = True

    def run(self) -> None:
        with self._near as near:
            data = _receive(near)  # jax's client speaks first
            self.is_silent = False
            far = self._reach() if data else None
            if far is None:
                return
            with far:
                self._exchange(near, far, data)

    def stop(self) -> None:
        _shut(self._near, socket.SHUT_RDWR)

    def _reach(self) -> socket.socket | None:
        """A connection to the service; None where the client ends before there is one (process 0 may be slower)."""
        while _is_open(self._near):
            try:
                far = socket.create_connection(self._target, timeout=5)
            except OSError:
                time.sleep(_RETRY)
                continue
            far.settimeout(None)
            return far
        return None

    def _exchange(self, near: socket.socket, far: socket.socket, data: bytes) -> None:
        for sock in (near, far):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answers = threading.Thread(target=_copy, args=(far, near), daemon=True)
        answers.start()
        with contextlib.suppress(OSError):
            far.sendall(data)
        _copy(near, far)
        # The client has finished. That the service is gone is never passed on to it.
        _shut(far, socket.SHUT_WR)
        answers.join(_END)
        for sock in (near, far):
            _shut(sock, socket.SHUT_RDWR)  # wakes the other thread where it still waits
        answers.join()


def _copy(source: socket.socket, drain: socket.socket) -> None:
    """Pass on what comes from `source` until its end; what `drain` no longer takes is dropped."""
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


def _shut(sock: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(how)
