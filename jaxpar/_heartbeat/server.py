"""Where the processes of a run meet: it counts them in, reads their heartbeats, and reports a loss to the others.

The hub is in the launcher where there is one, else in a thread of process 0. Each process holds one
connection to it (`_monitor`). A connection that closes without a message is a killed process and noticed at once; one
that is silent for `silence` seconds is a frozen process, or a host that is gone.

Whatever arrives at the port ends its own connection at most. One that is no process of the run is closed; a process
of the run that sends no message of it is reported as lost.
"""

from __future__ import annotations

import dataclasses
import errno
import selectors
import socket
import threading
import time
from collections.abc import Callable

from .connection import BEAT, AwakeClock, JsonConnection
from .messages import FROM_PROCESS, Message, job_name

SILENCE = 10.0  # seconds; with one second of beating and one of looking, a loss is noticed within 12
INTERRUPTED = (130, 143)  # exit statuses after SIGINT and SIGTERM
MOMENT = 5.0  # seconds which the others have to end in order when one was interrupted
_NEW = 64  # connections without a hello at a time; one more closes the oldest
_HELLO = 5.0  # seconds in which a connection says hello
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclasses.dataclass(frozen=True)
class Lost:
    """The first process that was lost: its rank, its host, and why it is taken for lost."""

    rank: int
    host: str
    why: str


@dataclasses.dataclass(eq=False)
class Peer:
    """One connection."""

    line: JsonConnection
    seen: float  # when it connected, or when its last message came
    rank: int = -1  # -1 until it is one of the processes of the run
    patience: float = 0.0  # seconds which it waits for the others
    leaving: bool = False  # it ends, or was refused: it has no more to say
    paused: bool = False  # it sent too much and is not read for now
    dropped: bool = False  # its connection is closed


class HeartbeatServer:
    """Works on a selector whose owner calls `key.data()` for what is ready, and `look()` twice a second.

    Args:
        selector: gets the hub's sockets, with what is to be called as their data.
        listener: a listening socket.
        job: a word that tells the processes of this run from others.
        size: how many processes there are.
        silence: seconds without a heartbeat after which a process is lost.
        joining: seconds for all to come, from the first of them; more where one of them waits longer.
        closed: called with the rank whose connection closed without a message; None reports it as lost.
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
        self.job, self.size, self.silence, self.joining = job_name(job), size, silence, joining
        self.peers: dict[int, Peer] = {}
        self._hosts: dict[int, str] = {}
        self.lost: Lost | None = None
        self.refused: str | None = None
        self.hint: str | None = None
        self._sent_hint: str | None = None
        self._closed = closed or (lambda rank: self.report(rank, "its connection closed without a word (killed?)"))
        self._selector, self._listener = selector, listener
        self._new: list[Peer] = []  # those that are no process of the run yet, the oldest first
        self._faults: list[str] = []  # why others could not take part, before all had joined
        self._due: tuple[float, int, str] | None = None  # when to report which process, and why
        self._clock, self._first, self._beaten, self._met = AwakeClock(), None, 0.0, False
        self._listen_at: float | None = None  # when to try again after running out of descriptors
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def look(self) -> None:
        """Send each a heartbeat, and find those that are silent or never came."""
        now = self._clock.tick()
        if now - self._beaten >= BEAT:
            self._beaten = now
            self._send_hint()
            for peer in self.peers.values():
                peer.line.send(beat=1)
        self._resume(now)
        for peer in [peer for peer in self._new if now - peer.seen > _HELLO]:
            self._drop(peer)
        for rank, peer in list(self.peers.items()):
            if not peer.leaving and now - peer.seen > self.silence:
                self.report(rank, f"no sign of life for {self.silence:g} seconds: it is frozen, or its host is gone")
        if self._due is not None and now > self._due[0]:
            self.report(*self._due[1:])
        self._end_joining(now)

    def report(self, rank: int, why: str) -> None:
        """Report to every process that `rank` is lost. The first loss counts; what it drags along does not."""
        if self.lost is None:
            self._send_hint()
            self.lost = Lost(rank, self._hosts.get(rank, socket.gethostname()), why)
            self._send_all(lost=rank, host=self.lost.host, why=why)

    @property
    def over(self) -> bool:
        """Whether all were there and have gone again, or process 0 knows that the run cannot begin."""
        return self._met and 0 in self._hosts and not self.peers and not self._new

    def close(self) -> None:
        for peer in [*self.peers.values(), *self._new]:
            self._drop(peer)
        if self._listen_at is None:
            self._selector.unregister(self._listener)
        self._listener.close()

    def _send_all(self, **message: object) -> None:
        for rank in sorted(self.peers, reverse=True):  # process 0 last: the hub may be in it
            self.peers[rank].line.send(**message)

    def _send_hint(self) -> None:
        """Pass on the newest hint, once: a second may bring thousands."""
        if self.hint != self._sent_hint:
            self._sent_hint = self.hint
            self._send_all(hint=self.hint)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:  # the connection stays, so the selector would report it without end
                self._selector.unregister(self._listener)
                self._listen_at = self._clock.now + BEAT / 2
            return
        if len(self._new) >= _NEW:
            self._drop(self._new[0])
        peer = Peer(JsonConnection(sock, FROM_PROCESS), self._clock.now)
        self._new.append(peer)
        self._watch(peer)

    def _watch(self, peer: Peer) -> None:
        peer.paused = False
        self._selector.register(peer.line.sock, selectors.EVENT_READ, lambda: self._read(peer))

    def _resume(self, now: float) -> None:
        """Listen and read again where that was left for a while."""
        if self._listen_at is not None and now >= self._listen_at:
            self._listen_at = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        for peer in [*self._new, *self.peers.values()]:
            if peer.paused and not peer.line.is_flooding:
                self._watch(peer)

    def _read(self, peer: Peer) -> None:
        if peer.dropped:  # by another connection in the same turn
            return
        for message in peer.line.receive():
            self._on_message(peer, message)
            if peer.dropped:
                return
        if peer.line.fault is not None:
            self._on_fault(peer, peer.line.fault)
        elif peer.line.closed:
            self._drop(peer)
            if peer.rank >= 0 and not peer.leaving and self.refused is None:
                self._closed(peer.rank)
        elif peer.line.is_flooding:
            peer.paused = True
            self._selector.unregister(peer.line.sock)

    def _on_fault(self, peer: Peer, fault: str) -> None:
        """Drop a connection for what it sent. Before the run begins, the process may connect again."""
        why = f"it sent what is no message of this run: {fault}"
        if peer.rank >= 0 and not self._met:
            del self._hosts[peer.rank]
            self._note(f"process {peer.rank} was dropped, {why}")
        elif peer.rank >= 0 and not peer.leaving and self.refused is None:
            self.report(peer.rank, why)
        self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        if peer in self._new:
            self._new.remove(peer)
        if self.peers.get(peer.rank) is peer:
            del self.peers[peer.rank]
        if not peer.paused:
            self._selector.unregister(peer.line.sock)
        peer.dropped = True
        peer.line.close()

    def _on_message(self, peer: Peer, message: Message) -> None:
        if peer.leaving:
            return
        if ("hello" in message) == (peer.rank >= 0):
            return self._on_fault(peer, "hello comes first, and once")
        peer.seen = self._clock.now
        if "hello" in message:
            self._greet(peer, message)
        elif "hint" in message:
            self.hint = message["hint"]
        elif "failed" in message:
            peer.leaving = True
            self.report(peer.rank, message["failed"])
        elif "interrupted" in message:
            peer.leaving = True
            self._due = self._due or (self._clock.now + MOMENT, peer.rank, message["interrupted"])
        elif "leaving" in message:
            peer.leaving = True
            if peer.rank == 0:
                self._send_all(closing=1)  # where the hub is in process 0 it will be gone

    def _greet(self, peer: Peer, message: Message) -> None:
        if message["job"] != self.job:  # two runs on one host may try each other's port
            peer.line.send(stranger=1)
            return self._drop(peer)
        peer.line.send(welcome=1)
        rank = message["rank"]
        if (why := self.refused or self._objection(rank, message["size"])) is not None:
            peer.leaving = True
            self._note(why)
            return peer.line.send(refused=why)
        self._new.remove(peer)
        peer.rank, self.peers[rank], self._hosts[rank] = rank, peer, message["host"]
        peer.patience = message["patience"]
        self._first = self._clock.now if self._first is None else self._first
        if self.lost is not None:
            peer.line.send(lost=self.lost.rank, host=self.lost.host, why=self.lost.why)
        elif len(self.peers) == self.size:
            self._met = True
            self._send_all(go=1, host=socket.gethostname())

    def _objection(self, rank: int, size: int) -> str | None:
        """Why a process with these numbers cannot take part."""
        if size != self.size:
            return f"process {rank} was started as one of {size}, this run has {self.size} processes"
        if rank >= size:
            return f"process {rank} was started as one of {size}, the processes of this run are 0 to {size - 1}"
        if rank in (self._hosts if self.lost is None else self.peers):
            return f"two processes say that they are process {rank}; each needs a number of its own"
        return None

    def _note(self, why: str) -> None:
        if why not in self._faults and len(self._faults) < 3:
            self._faults.append(why)

    def _end_joining(self, now: float) -> None:
        """Refuse all where some did not come in time; every process gets the same reason."""
        limit = max([self.joining, *(peer.patience for peer in self.peers.values())])
        if self._met or self._first is None or now - self._first <= limit:
            return
        missing = [rank for rank in range(self.size) if rank not in self.peers]
        absent = f"{_processes(missing)} of {self.size} did not come within {limit:g} seconds"
        self.refused = "; ".join([absent, *self._faults])
        self._met = True
        self._send_all(refused=self.refused)


class HubThread(threading.Thread):
    """A hub in a thread of process 0."""

    def __init__(self, listener: socket.socket, *, job: str, size: int, silence: float, joining: float):
        super().__init__(name="jaxpar-hub", daemon=True)
        self._selector = selectors.DefaultSelector()
        self.hub = HeartbeatServer(self._selector, listener, job=job, size=size, silence=silence, joining=joining)

    def run(self) -> None:
        while not self.hub.over:
            for key, _ in self._selector.select(BEAT / 2):
                key.data()
            self.hub.look()
        self.hub.close()
        self._selector.close()

    def linger(self, seconds: float) -> None:
        """Wait until the other processes have read the last message and closed; they would see a reset else."""
        end = time.monotonic() + seconds
        gone = {0} if self.hub.lost is None else {0, self.hub.lost.rank}
        while time.monotonic() < end and set(self.hub.peers) - gone:
            time.sleep(0.02)


def _processes(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"process{'es' if len(ranks) > 1 else ''} {shown}"
