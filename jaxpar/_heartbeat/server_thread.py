"""The heartbeat server in a thread of process 0, where there is no launcher."""

from __future__ import annotations

import functools
import selectors
import socket
import time

from .._core.text import say
from .connection import INTERVAL
from .elastic_server import ElasticServer
from .pulse import Pulse
from .secret import Secret
from .server import HeartbeatServer
from .thread import daemon


def _say_lost(rank: int, why: str, is_ending: bool) -> None:
    del is_ending
    say(f"process {rank} was lost: {why}; the others go on")


class ServerThread:
    """A heartbeat server and its thread, which runs until every process has left. Args as for `HeartbeatServer`.

    Args:
        elastic: whether the run goes on after the loss of a process other than 0.

    Attributes:
        server: the server.
        thread: serves until every process has left.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        job: str,
        size: int,
        secret: Secret | None = None,
        heartbeat_timeout: float,
        join_timeout: float,
        elastic: bool = False,
        pulse: Pulse | None = None,
    ):
        self._selector = selectors.DefaultSelector()
        kind = functools.partial(ElasticServer, on_leave=_say_lost) if elastic else HeartbeatServer
        self.server = kind(
            self._selector,
            listener,
            job=job,
            size=size,
            secret=secret,
            heartbeat_timeout=heartbeat_timeout,
            join_timeout=join_timeout,
            pulse=pulse,
        )
        self.thread = daemon("jaxpar-heartbeat-server", self._run, "the run ends", self.server.close)

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def _run(self) -> None:
        while not self.server.is_over:
            for key, _ in self._selector.select(INTERVAL / 2):
                key.data()
            self.server.check()
        self.server.close()
        self._selector.close()

    def wait_for_peers(self, seconds: float) -> None:
        """Wait until every peer has closed its connection, so that none sees a reset before the last message."""
        end = time.monotonic() + seconds
        gone = {0} if self.server.lost is None else {0, self.server.lost.rank}
        while time.monotonic() < end and set(self.server.peers) - gone:
            time.sleep(0.02)
