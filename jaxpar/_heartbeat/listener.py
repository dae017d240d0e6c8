"""The listening socket of the heartbeat server. It accepts so many connections in a second, and no more."""

from __future__ import annotations

import errno
import selectors
import socket
from collections.abc import Callable

from .connection import INTERVAL

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener:
    """A listening socket in a selector. The next connections wait where there were too many.

    Args:
        selector: gets the socket. Its data is the function to call.
        sock: the listening socket.
        most: connections in a second.
        on_connection: called with each connection.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        sock: socket.socket,
        most: int,
        on_connection: Callable[[socket.socket], None],
    ):
        self._selector, self._sock, self._most, self._on_connection = selector, sock, most, on_connection
        self._now, self._since, self._number = 0.0, 0.0, 0  # how many since when
        self._again_at: float | None = None  # when to listen again
        sock.setblocking(False)
        self._listen()

    def check(self, now: float) -> None:
        """Listen again after a pause."""
        self._now = now
        if now - self._since >= INTERVAL:
            self._since, self._number = now, 0
        if self._again_at is not None and now >= self._again_at:
            self._listen()

    def close(self) -> None:
        """Accept no more connections."""
        if self._again_at is None:
            self._selector.unregister(self._sock)
        self._sock.close()

    def _listen(self) -> None:
        self._again_at = None
        self._selector.register(self._sock, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._sock.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:  # the connection stays, so the selector would report it forever
                self._pause(self._now + INTERVAL / 2)
            return
        self._number += 1
        if self._number >= self._most:
            self._pause(self._since + INTERVAL)
        self._on_connection(connection)

    def _pause(self, until: float) -> None:
        self._selector.unregister(self._sock)
        self._again_at = until
