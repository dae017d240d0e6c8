"""The heartbeat server of an elastic run, which goes on after the loss of a process other than 0."""

from __future__ import annotations

import collections
import socket
from collections.abc import Callable
from typing import Any

from .messages import Message
from .peer import Peer
from .server import HeartbeatServer

ELASTIC_TIMEOUT = 4.0  # seconds without a heartbeat, in an elastic run


class ElasticServer(HeartbeatServer):
    """A server that forgets a lost process, so that it may join again. The loss of process 0 ends the run.

    Before another comes in its place, process 0 has to say that jax has forgotten the lost one too.

    Args:
        on_leave: called with the rank of a lost process, why, and whether it said so itself.
        on_work: called with the rank of a process that says that it works. Further args as for `HeartbeatServer`.
    """

    def __init__(
        self,
        *args: Any,
        on_leave: Callable[[int, str, bool], None],
        on_work: Callable[[int], None] = lambda rank: None,
        **options: Any,
    ):
        self._on_leave, self._on_work = on_leave, on_work
        self._unreleased = collections.Counter[int]()  # what process 0 was told and has not done
        if "on_close" in options:  # a launcher says by the exit status why a process ended, and it may be 0
            options["on_close"] = lambda rank: self.forget(rank) if rank else None
        super().__init__(*args, **options)

    def report(self, rank: int, why: str) -> None:
        """Forget `rank`. Before all have joined, and for process 0, report it to every process."""
        if rank and not self._is_joining:
            is_ending = rank in self.peers and self.peers[rank].is_leaving
            self.forget(rank)
            return self._on_leave(rank, why, is_ending)
        super().report(rank, why if rank else f"{why}; an elastic run cannot go on without process 0")

    def forget(self, rank: int) -> None:
        """Let another process join in the place of this one."""
        self._hosts.pop(rank, None)
        if rank in self.peers:
            self._drop(self.peers[rank])
        if 0 in self.peers:
            self._unreleased[rank] += 1
            self.peers[0].connection.send(left=rank)
        if self._interrupt is not None and self._interrupt[1] == rank:
            self._interrupt = None

    def _welcome(self, peer: Peer, message: Message) -> None:
        is_late = not self._is_joining
        super()._welcome(peer, message)
        if is_late and peer.rank >= 0 and self._unreleased[peer.rank] <= 0:
            self._send_go(peer)

    def _handle(self, peer: Peer, message: Message) -> None:
        super()._handle(peer, message)
        if "working" in message and peer.rank >= 0:
            self._on_work(peer.rank)
        if "released" in message and peer.rank == 0:
            rank = message["released"]
            self._unreleased[rank] -= 1
            if rank in self.peers and not self._unreleased[rank]:
                self._send_go(self.peers[rank])

    def _send_go(self, peer: Peer) -> None:
        if self.lost is None:
            peer.connection.send(go=1, host=socket.gethostname())
