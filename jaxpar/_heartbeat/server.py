"""The heartbeat server: registers every process of a run, reads their heartbeats, and reports the first loss.

It is in the launcher where there is one, else in a thread of process 0. Each process holds one connection to it. A
connection that closes without a message is a killed process, which is noticed at once. A process without a heartbeat
for `heartbeat_timeout` seconds is frozen, or its host is gone.

An invalid message ends the connection that it came from, and no other. A process of the run that sends one is reported
as lost. Where the run has a secret, a connection takes part in nothing before it has proved that it knows it.

Limits hold for all: connections and their number in a second, bytes of a message, of a second, and of what is unsent,
seconds until the proof and between heartbeats.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable

from .connection import INTERVAL, AwakeClock, JsonConnection
from .listener import Listener
from .messages import FROM_PROCESS, LONGEST, Message, job_name
from .peer import Lost, Peer
from .pulse import Pulse
from .secret import Secret, challenge, is_equal

HEARTBEAT_TIMEOUT = 10.0  # seconds; with one second between heartbeats, a loss is noticed within 12
INTERRUPTED = (130, 143)  # exit statuses after SIGINT and SIGTERM
INTERRUPT_GRACE = 5.0  # seconds which the others have to end by themselves after one was interrupted
_MOST_PENDING = 64  # connections that are no process of the run yet, or its size; one more closes the oldest
_LONGEST_EARLY = 1 << 13  # bytes of a message before a process takes part
_HELLO_TIMEOUT = 5.0  # seconds in which a connection sends its hello and its proof


class HeartbeatServer:
    """A server without a thread. Its owner calls `key.data()` for what is ready, and `check()` twice a second.

    Args:
        selector: gets the server's sockets. Their data is the function to call.
        listener: a listening socket.
        job: the name of this run. Processes of another job are dropped.
        size: how many processes there are.
        secret: of the run. None lets every process take part that names the job.
        heartbeat_timeout: seconds without a heartbeat after which a process is lost.
        join_timeout: seconds from the first process to the last. The largest timeout of a process counts.
        pulse: gets the connections of the processes, if the server is in a process that trains.
        on_close: called with the rank of a connection that closes without a message. None reports it as lost.

    Attributes:
        peers: the connected processes, by rank.
        lost: the first loss, or None.
        hint: what the processes resume from, or None.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listener: socket.socket,
        *,
        job: str,
        size: int,
        secret: Secret | None = None,
        heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
        join_timeout: float = 1.0,
        pulse: Pulse | None = None,
        on_close: Callable[[int], None] | None = None,
    ):
        self.job, self.size, self._secret = job_name(job), size, secret
        self.heartbeat_timeout, self.join_timeout = heartbeat_timeout, join_timeout
        self.peers: dict[int, Peer] = {}
        self.lost: Lost | None = None
        self.hint: str | None = None
        self._sent_hint: str | None = None
        self._hosts: dict[int, str] = {}
        self._on_close = on_close or (lambda rank: self.report(rank, "its connection closed (killed?)"))
        self._selector, self._pulse = selector, pulse
        self._pending: list[Peer] = []  # connections without a hello, the oldest first
        self._refused: str | None = None  # why the run cannot begin
        self._faults: list[str] = []  # why processes were dropped or refused while others were joining
        self._interrupt: tuple[float, int, str] | None = None  # when to report which process, and why
        self._clock, self._last_heartbeat = AwakeClock(), 0.0
        self._is_joining, self._first_join = True, None
        self._most_pending = max(_MOST_PENDING, size)
        self._listener = Listener(selector, listener, 4 * self._most_pending, self._connect)

    def check(self) -> None:
        """Send heartbeats, and report processes that are silent or did not join."""
        now = self._clock.tick()
        if now - self._last_heartbeat >= INTERVAL:
            self._last_heartbeat = now
            self._send_hint()
            for peer in self.peers.values():
                peer.connection.send(heartbeat=1)
        self._resume(now)
        for peer in [peer for peer in self._pending if now - peer.last_message > _HELLO_TIMEOUT]:
            self._drop(peer)
        for rank, peer in list(self.peers.items()):
            if not peer.is_leaving and now - peer.last_message > self.heartbeat_timeout:
                why = f"no heartbeat for {self.heartbeat_timeout:g} seconds: it is frozen, or its host is gone"
                self.report(rank, why)
        if self._interrupt is not None and now > self._interrupt[0]:
            self.report(*self._interrupt[1:])
        self._check_join_timeout(now)

    def report(self, rank: int, why: str) -> None:
        """Report to every process that `rank` is lost. Only the first loss is reported."""
        if self.lost is None:
            self._send_hint()
            self.lost = Lost(rank, self._hosts.get(rank, socket.gethostname()), why)
            self._send_all(lost=rank, host=self.lost.host, why=why)

    @property
    def is_over(self) -> bool:
        """Whether every process has left, or process 0 was informed that the run cannot begin."""
        return not self._is_joining and 0 in self._hosts and not self.peers and not self._pending

    def close(self) -> None:
        """Close all connections and the listener."""
        for peer in [*self.peers.values(), *self._pending]:
            self._drop(peer)
        self._listener.close()

    def _send_all(self, **message: object) -> None:
        for rank in sorted(self.peers, reverse=True):  # process 0 last: the server may be in it
            self.peers[rank].connection.send(**message)

    def _send_hint(self) -> None:
        """Send the newest hint once. A second may bring thousands."""
        if self.hint != self._sent_hint:
            self._sent_hint = self.hint
            self._send_all(hint=self.hint)

    def _connect(self, sock: socket.socket) -> None:
        if len(self._pending) >= self._most_pending:
            self._drop(self._pending[0])
        peer = Peer(JsonConnection(sock, FROM_PROCESS, _LONGEST_EARLY), self._clock.now)
        self._pending.append(peer)
        self._watch(peer)

    def _watch(self, peer: Peer) -> None:
        peer.is_paused = False
        self._selector.register(peer.connection.sock, selectors.EVENT_READ, lambda: self._read(peer))

    def _resume(self, now: float) -> None:
        """Listen and read again after a pause."""
        self._listener.check(now)
        for peer in [*self._pending, *self.peers.values()]:
            if peer.is_paused and not peer.connection.is_flooding:
                self._watch(peer)

    def _read(self, peer: Peer) -> None:
        if peer.is_dropped:  # by another connection in the same turn
            return
        for message in peer.connection.receive():
            self._handle(peer, message)
            if peer.is_dropped:
                return
        if peer.connection.fault is not None:
            self._handle_fault(peer, peer.connection.fault)
        elif peer.connection.is_closed:
            self._drop(peer)
            if self._can_be_lost(peer):
                self._on_close(peer.rank)
        elif peer.connection.is_flooding:
            peer.is_paused = True
            self._selector.unregister(peer.connection.sock)

    def _can_be_lost(self, peer: Peer) -> bool:
        return peer.rank >= 0 and not peer.is_leaving and self._refused is None

    def _handle_fault(self, peer: Peer, fault: str) -> None:
        """Drop a connection for what it sent. Before the run begins, the process may connect again."""
        why = f"it sent an invalid message: {fault}"
        if peer.rank >= 0 and self._is_joining:
            del self._hosts[peer.rank]
            self._record_fault(f"process {peer.rank} was dropped, {why}")
        elif self._can_be_lost(peer):
            self.report(peer.rank, why)
        self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        if peer in self._pending:
            self._pending.remove(peer)
        if self.peers.get(peer.rank) is peer:
            del self.peers[peer.rank]
        if not peer.is_paused:
            self._selector.unregister(peer.connection.sock)
        peer.is_dropped = True
        peer.connection.close()

    def _handle(self, peer: Peer, message: Message) -> None:
        if peer.is_leaving:
            return
        if peer.rank < 0:
            return self._admit(peer, message)
        if "hello" in message or "answer" in message:
            return self._handle_fault(peer, "hello comes first, and once")
        peer.last_message = self._clock.now
        if "hint" in message:
            self.hint = message["hint"]
        elif "failed" in message:
            peer.is_leaving = True
            self.report(peer.rank, message["failed"])
        elif "interrupted" in message:
            peer.is_leaving = True
            report_at = self._clock.now + INTERRUPT_GRACE
            self._interrupt = self._interrupt or (report_at, peer.rank, message["interrupted"])
        elif "leaving" in message:
            peer.is_leaving = True
            if peer.rank == 0:
                self._send_all(closing=1)  # a server in process 0 will be gone

    def _admit(self, peer: Peer, message: Message) -> None:
        """Handle what comes before a process takes part: its hello, and its answer to the challenge."""
        if peer.hello is not None:
            return self._handle_answer(peer, peer.hello, message)
        if "hello" not in message:
            return self._handle_fault(peer, "hello comes first, and once")
        if message["job"] != self.job:  # two runs on one host may try each other's port
            peer.connection.send(other_run=1)
            return self._drop(peer)
        if self._secret is None:
            return self._welcome(peer, message)
        peer.hello, peer.challenge = message, challenge()
        peer.connection.send(challenge=peer.challenge)

    def _handle_answer(self, peer: Peer, hello: Message, message: Message) -> None:
        assert self._secret is not None
        if "answer" not in message:
            return self._handle_fault(peer, "the answer to the challenge comes after hello")
        about = ((peer.challenge, message["answer"]), self.job, hello["rank"], hello["size"])
        if not is_equal(message["proof"], self._secret.proof("process", *about)):
            self._record_fault("a process with another secret was dropped")
            return self._drop(peer)
        peer.connection.send(proof=self._secret.proof("server", *about))
        self._welcome(peer, hello)

    def _welcome(self, peer: Peer, message: Message) -> None:
        """Take a process into the run, or refuse it."""
        peer.connection.send(welcome=1)
        peer.last_message = self._clock.now
        rank = message["rank"]
        if (why := self._refused or self._objection(rank, message["size"])) is not None:
            peer.is_leaving = True
            self._record_fault(why)
            return peer.connection.send(refused=why)
        self._pending.remove(peer)
        peer.connection.longest = LONGEST
        if self._pulse is not None:
            self._pulse.add(peer.connection.sock)
        peer.rank, peer.timeout = rank, message["timeout"]
        self.peers[rank], self._hosts[rank] = peer, message["host"]
        self._first_join = self._clock.now if self._first_join is None else self._first_join
        if self.lost is not None:
            peer.connection.send(lost=self.lost.rank, host=self.lost.host, why=self.lost.why)
        elif self._is_joining and len(self.peers) == self.size:
            self._is_joining = False
            self._send_all(go=1, host=socket.gethostname())

    def _objection(self, rank: int, size: int) -> str | None:
        """Why a process with these numbers cannot take part, or None."""
        if size != self.size:
            return f"process {rank} was started as one of {size}, this run has {self.size} processes"
        if rank >= size:
            return f"process {rank} was started as one of {size}, the processes of this run are 0 to {size - 1}"
        if rank in (self._hosts if self.lost is None else self.peers):
            return f"two processes say that they are process {rank}; each needs a number of its own"
        return None

    def _record_fault(self, why: str) -> None:
        if why not in self._faults and len(self._faults) < 3:
            self._faults.append(why)

    def _check_join_timeout(self, now: float) -> None:
        """Refuse all processes where some did not join in time. Each gets the same reason."""
        limit = max([self.join_timeout, *(peer.timeout for peer in self.peers.values())])
        if not self._is_joining or self._first_join is None or now - self._first_join <= limit:
            return
        missing = [rank for rank in range(self.size) if rank not in self.peers]
        absent = f"{_name_processes(missing)} of {self.size} did not come within {limit:g} seconds"
        self._refused = "; ".join([absent, *self._faults])
        self._is_joining = False
        self._send_all(refused=self._refused)


def _name_processes(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"process{'es' if len(ranks) > 1 else ''} {shown}"
