"""A door to jax's coordination service that stays open when the service dies.

That service lives in process 0. When process 0 is killed, jax's client in every other process aborts within a
tenth of a second, with a C++ stack trace and status 134, before a monitor could say what happened. Behind this
relay, in the process itself, the client sees no connection closing; it gives up after its own heartbeat timeout,
which comes later than the monitor's.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable

_CHUNK = 1 << 18


class Relay(threading.Thread):
    """Listens at `address` on this host and hands every connection on to `target` ("host:port")."""

    def __init__(self, target: str):
        super().__init__(name="jaxpar-relay", daemon=True)
        host, port = target.rsplit(":", 1)
        self._target = (host.strip("[]"), int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._connect)

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                key.data()

    def _connect(self) -> None:
        near, _ = self._listener.accept()
        far = self._reach()
        for sock in (near, far):
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(near, selectors.EVENT_READ, self._pump(near, far, near_end=True))
        self._selector.register(far, selectors.EVENT_READ, self._pump(far, near, near_end=False))

    def _reach(self) -> socket.socket:
        """A connection to the service. Until there is one (process 0 may be slower) the client just waits."""
        while True:
            try:
                return socket.create_connection(self._target, timeout=5)
            except OSError:
                time.sleep(0.05)

    def _pump(self, source: socket.socket, drain: socket.socket, *, near_end: bool) -> Callable[[], None]:
        def pump() -> None:
            try:
                data = source.recv(_CHUNK)
                if data:
                    drain.sendall(data)
                    return
            except OSError:
                pass
            self._selector.unregister(source)
            if near_end:  # our client has finished; the far end hears of it
                with contextlib.suppress(OSError):
                    drain.shutdown(socket.SHUT_WR)
            # else: the service is gone, and the client is not told

        return pump
