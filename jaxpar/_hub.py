"""Where the processes of a run meet: it counts them in, listens to their beats, and tells the others of a loss.

The hub lives in the launcher where there is one, else in a thread of process 0. Each process holds one
connection to it (`_monitor`). A connection that closes without a word is a killed process and noticed at once; one
that is silent for `silence` seconds is a frozen process, or a host that is gone.
"""

from __future__ import annotations

import dataclasses
import selectors
import socket
import threading
import time
from collections.abc import Callable

from ._wire import BEAT, AwakeClock, Line, Message

SILENCE = 10.0  # seconds; with one second of beating and one of looking, a loss is noticed within 12
INTERRUPTED = (130, 143)  # exit statuses after SIGINT and SIGTERM
MOMENT = 5.0  # seconds which the others have to end in order when one was interrupted


@dataclasses.dataclass(frozen=True)
class Lost:
    """The first process that was lost: its rank, its host, and why it is taken for lost."""

    rank: int
    host: str
    why: str


@dataclasses.dataclass
class Peer:
    """One connected process; `rank` is -1 until it has said which it is."""

    line: Line
    seen: float
    rank: int = -1
    leaving: bool = False


class Hub:
    """Works on a selector whose owner calls `key.data()` for what is ready, and `look()` twice a second.

    Args:
        selector: gets the hub's sockets, with what is to be called as their data.
        listener: a listening socket.
        job: a word that tells the processes of this run from strangers.
        size: how many processes there are.
        silence: seconds without a beat after which a process is lost.
        joining: seconds for all to come, from the first of them; more where one of them waits longer.
        closed: called with the rank whose connection closed without a word; None reports it as lost.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listener: socket.socket,
        *,
        job: str,
        size: int,
        silence: float = SILENCE,
        joining: float = 1.0,
        closed: Callable[[int], None] | None = None,
    ):
        self.job, self.size, self.silence, self.joining = job, size, silence, joining
        self.peers: dict[int, Peer] = {}
        self._hosts: dict[int, str] = {}
        self.lost: Lost | None = None
        self.refused: str | None = None
        self.hint: str | None = None
        self._closed = closed or (lambda rank: self.report(rank, "its connection closed without a word (killed?)"))
        self._selector, self._listener = selector, listener
        self._strangers: list[Peer] = []
        self._due: tuple[float, int, str] | None = None  # when to report which process, and why
        self._clock, self._first, self._beaten, self._met = AwakeClock(), None, 0.0, False
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def look(self) -> None:
        """Sends a beat to each, and finds those that are silent or never came."""
        now = self._clock.tick()
        if now - self._beaten >= BEAT:
            self._beaten = now
            for peer in self.peers.values():
                peer.line.send(beat=1)
        for rank, peer in list(self.peers.items()):
            if not peer.leaving and now - peer.seen > self.silence:
                self.report(rank, f"no sign of life for {self.silence:g} seconds: it is frozen, or its host is gone")
        if self._due is not None and now > self._due[0]:
            self.report(*self._due[1:])
        if self._first is not None and not self._met and now - self._first > self.joining:
            missing = [rank for rank in range(self.size) if rank not in self.peers]
            self._refuse(f"{_processes(missing)} of {self.size} did not come within {self.joining:g} seconds")

    def report(self, rank: int, why: str) -> None:
        """Tells every process that `rank` is lost. The first loss counts; what it drags along does not."""
        if self.lost is None:
            self.lost = Lost(rank, self._hosts.get(rank, socket.gethostname()), why)
            self._tell_all(lost=rank, host=self.lost.host, why=why)

    @property
    def over(self) -> bool:
        """Whether all were there and have gone again, or process 0 knows that the run cannot begin."""
        return self._met and 0 in self._hosts and not self.peers and not self._strangers

    def close(self) -> None:
        for peer in [*self.peers.values(), *self._strangers]:
            self._drop(peer)
        self._selector.unregister(self._listener)
        self._listener.close()

    def _tell_all(self, **message: object) -> None:
        for rank in sorted(self.peers, reverse=True):  # process 0 last: the hub may live in it
            self.peers[rank].line.send(**message)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        peer = Peer(Line(sock), self._clock.now)
        self._strangers.append(peer)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._read(peer))

    def _read(self, peer: Peer) -> None:
        for message in peer.line.receive():
            self._on_message(peer, message)
        peer.seen = self._clock.now
        if peer.line.closed:
            self._drop(peer)
            if peer.rank >= 0 and not peer.leaving and self.refused is None:
                self._closed(peer.rank)

    def _drop(self, peer: Peer) -> None:
        if peer in self._strangers:
            self._strangers.remove(peer)
        if self.peers.get(peer.rank) is peer:
            del self.peers[peer.rank]
        self._selector.unregister(peer.line.sock)
        peer.line.close()

    def _on_message(self, peer: Peer, message: Message) -> None:
        if "hello" in message:
            self._greet(peer, message)
        if "hint" in message:
            self.hint = message["hint"]
            self._tell_all(hint=self.hint)
        if "failed" in message and peer.rank >= 0:
            peer.leaving = True
            self.report(peer.rank, str(message["failed"]))
        if "interrupted" in message and peer.rank >= 0:
            peer.leaving = True
            self._due = self._due or (self._clock.now + MOMENT, peer.rank, str(message["interrupted"]))
        if "leaving" in message:
            peer.leaving = True
            if peer.rank == 0:
                self._tell_all(closing=1)  # where the hub lives in process 0 it will be gone

    def _greet(self, peer: Peer, message: Message) -> None:
        job, rank, size = message.get("job"), message.get("rank"), message.get("size")
        if job != self.job:
            return peer.line.send(stranger=1)  # two runs on one host may knock at each other's door
        peer.line.send(welcome=1)
        if size != self.size:
            return self._refuse(
                f"process {rank} was started as one of {size}, this run has {self.size} processes", peer
            )
        if not isinstance(rank, int) or rank in self.peers or not 0 <= rank < self.size:
            return self._refuse(f"two processes say that they are process {rank}; each needs a number of its own", peer)
        self._strangers.remove(peer)
        peer.rank, self.peers[rank], self._hosts[rank] = rank, peer, str(message.get("host", "?"))
        self.joining = max(self.joining, float(message.get("patience", 0)))
        self._first = self._clock.now if self._first is None else self._first
        if self.lost is not None:
            peer.line.send(lost=self.lost.rank, host=self.lost.host, why=self.lost.why)
        elif self.refused is not None:
            peer.line.send(refused=self.refused)
        elif len(self.peers) == self.size and not self._met:
            self._met = True
            self._tell_all(go=1, host=socket.gethostname())

    def _refuse(self, why: str, *more: Peer) -> None:
        """The run cannot begin: every process gets the same reason."""
        if self._met:  # a stranger that comes later does not disturb those that work
            for peer in more:
                peer.line.send(refused=why)
            return
        self.refused = self.refused or why
        for peer in more:
            peer.line.send(refused=self.refused)
        self._tell_all(refused=self.refused)
        self._met = True


class HubThread(threading.Thread):
    """A hub in a thread of process 0."""

    def __init__(self, listener: socket.socket, *, job: str, size: int, silence: float, joining: float):
        super().__init__(name="jaxpar-hub", daemon=True)
        self._selector = selectors.DefaultSelector()
        self.hub = Hub(self._selector, listener, job=job, size=size, silence=silence, joining=joining)

    def run(self) -> None:
        while not self.hub.over:
            for key, _ in self._selector.select(BEAT / 2):
                key.data()
            self.hub.look()
        self.hub.close()
        self._selector.close()

    def linger(self, seconds: float) -> None:
        """Waits until the other processes have read the last message and hung up; they would see a reset else."""
        end = time.monotonic() + seconds
        gone = {0} if self.hub.lost is None else {0, self.hub.lost.rank}
        while time.monotonic() < end and set(self.hub.peers) - gone:
            time.sleep(0.02)


def _processes(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"process{'es' if len(ranks) > 1 else ''} {shown}"
