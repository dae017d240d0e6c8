"""The heartbeat server: registers every process of a run, reads their heartbeats, and reports the first loss.

It is in the launcher where there is one, else in a thread of process 0. Each process holds one connection to it. A
connection that closes without a message is a killed process, which is noticed at once. A process without a heartbeat
for `heartbeat_timeout` seconds is frozen, or its host is gone.

An elastic run goes on after the loss of a process other than 0. The server forgets the lost one, so that another may
join in its place, once process 0 has said that jax has forgotten it too.

An invalid message ends the connection that it came from, and no other. A process of the run that sends one is reported
as lost. Where the run has a secret, a connection takes part in nothing before it has proved that it knows it.
"""

from __future__ import annotations

import collections
import dataclasses
import errno
import selectors
import socket
import time
from collections.abc import Callable

from .._core.process import daemon
from .connection import (
    FROM_PROCESS,
    INTERVAL,
    LONGEST,
    AwakeClock,
    Field,
    JsonConnection,
    Message,
    Secret,
    challenge,
    clean,
)

# Seconds. A busy machine may delay heartbeats, and C code may hold Python's lock: a large pickle, garbage collection.
HEARTBEAT_TIMEOUT = 30.0
ELASTIC_TIMEOUT = 4.0  # in an elastic run: the others wait so long, and a false alarm costs one process only
INTERRUPTED = (130, 143)  # exit statuses after SIGINT and SIGTERM
INTERRUPT_GRACE = 5.0  # seconds which the others have to end by themselves after one was interrupted
# Limits for all peers, also hostile ones. `connection` limits the bytes of a message, of a second, of what is unsent.
_MOST_PENDING = 64  # connections that are no process of the run yet, or its size; one more closes the oldest
_LONGEST_EARLY = 1 << 13  # bytes of a message before a process takes part: a hello is shorter
_HELLO_TIMEOUT = 5.0  # seconds in which a connection sends its hello and its proof: no work comes between them
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclasses.dataclass(eq=False)
class Peer:
    """One connection to the server."""

    connection: JsonConnection
    last_message: float  # when it came, or when the connection began
    rank: int = -1  # which process of the run it is, -1 before it takes part
    hello: Message | None = None  # while it has not proved that it knows the secret
    challenge: str = ""  # what it has to prove that with
    timeout: float = 0.0  # seconds for which it waits for the other processes
    is_leaving: bool = False  # it ends, or was refused; its further messages do not count
    is_paused: bool = False  # it is not read for now, since it sent too much
    is_dropped: bool = False  # its connection is closed


class HeartbeatServer:
    """A server whose owner calls `turn` at least twice a second, or starts `thread`, which does so to the run's end.

    `on_leave` makes the run elastic. It is called with the rank of a process that is lost, and why.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        job: str,  # the name of this run; processes of another job are dropped
        size: int,  # how many processes there are
        secret: Secret | None = None,  # None lets every process take part that names the job
        heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
        join_timeout: float = 1.0,  # seconds from the first process to the last; the largest of a process counts
        launched: bool = False,  # a launcher sees the status of a process, so a closed connection alone is no loss
        on_leave: Callable[[int, str], None] | None = None,
        on_work: Callable[[int], None] = lambda rank: None,  # called with the rank of a process that works
    ):
        self.job, self.size, self._secret = clean("job", job), size, secret
        self.heartbeat_timeout, self.join_timeout = heartbeat_timeout, join_timeout
        self.peers: dict[int, Peer] = {}  # the connected processes, by rank
        self.lost: Message | None = None  # the first loss, as all processes are told
        self.hint: str | None = None  # what the processes resume from
        self._sent_hint: str | None = None
        self._hosts: dict[int, str] = {}  # of all that have joined
        self._selector, self._listener = selectors.DefaultSelector(), listener
        self._launched, self._on_leave, self._on_work = launched, on_leave, on_work
        self._pending: list[Peer] = []  # connections that are no process of the run yet, the oldest first
        self._refused: str | None = None  # why the run cannot begin
        self._faults: list[str] = []  # why processes were dropped or refused while others were joining
        self._interrupt: tuple[float, int, str] | None = None  # when to report which process, and why
        self._unreleased = collections.Counter[int]()  # losses that process 0 was told and has not released
        self._clock, self._last_heartbeat = AwakeClock(), 0.0
        self._is_joining, self._first_join = True, None
        self._most_pending = max(_MOST_PENDING, size)
        self._may_accept = 4 * self._most_pending  # connections until the next second
        self.thread = daemon("jaxpar-heartbeat-server", self._run, "the run ends", self.close)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def turn(self, seconds: float) -> None:
        """Handle what arrives within so many seconds, and check."""
        for key, _ in self._selector.select(seconds):
            key.data()
        self.check()

    def _run(self) -> None:
        # Until every process has left, or process 0 was informed that the run cannot begin.
        while self._is_joining or 0 not in self._hosts or self.peers or self._pending:
            self.turn(INTERVAL / 2)
        self.close()

    def check(self) -> None:
        """Send heartbeats, and report processes that are silent or did not join."""
        now = self._clock.tick()
        if now - self._last_heartbeat >= INTERVAL:
            self._last_heartbeat = now
            self._send_hint()
            self._send_all(heartbeat=1)
            if self._may_accept <= 0:
                self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._may_accept = 4 * self._most_pending
        for peer in [*self._pending, *self.peers.values()]:
            if peer.is_paused and not peer.connection.is_flooding:
                self._watch(peer)
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
        """Report to every process that `rank` is lost, the first one only. If the others can continue, forget it."""
        if self._on_leave is not None and rank and not self._is_joining:
            self._on_leave(rank, why)
            return self.forget(rank)
        if self.lost is None:
            why += "; an elastic run cannot continue without process 0" if self._on_leave and not rank else ""
            self._send_hint()
            self.lost = {"lost": rank, "host": self._hosts.get(rank, socket.gethostname()), "why": why}
            self._send_all(**self.lost)

    def forget(self, rank: int) -> None:
        """Let another process of an elastic run join in the place of this one."""
        self._hosts.pop(rank, None)
        if rank in self.peers:
            self._drop(self.peers[rank])
        if 0 in self.peers and not self._is_joining:  # before that, jax runs in none of them
            self._unreleased[rank] += 1
            self.peers[0].connection.send(left=rank)
        if self._interrupt is not None and self._interrupt[1] == rank:
            self._interrupt = None

    def wait_for_peers(self, seconds: float) -> None:
        """Wait until every peer has closed its connection: then all have read the last message."""
        end = time.monotonic() + seconds
        gone = {0, self.lost["lost"]} if self.lost else {0}
        while time.monotonic() < end and set(self.peers) - gone:
            time.sleep(0.02)

    def close(self) -> None:
        for peer in [*self.peers.values(), *self._pending]:
            self._drop(peer)
        self._listener.close()
        self._selector.close()

    def _send_all(self, **message: Field) -> None:
        for rank in sorted(self.peers, reverse=True):  # process 0 last: the server may be in it
            self.peers[rank].connection.send(**message)

    def _send_hint(self) -> None:
        """Send the newest hint once. A second may bring thousands."""
        if self.hint != self._sent_hint:
            self._sent_hint = self.hint
            self._send_all(hint=self.hint)

    # Connections: the next ones wait where there were too many in a second, and one that floods is read later.

    def _accept(self) -> None:
        self._may_accept -= 1
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            sock = None
            if error.errno in _EXHAUSTED:  # the connection stays, so the selector would report it forever
                self._may_accept = 0
        if self._may_accept <= 0:
            self._selector.unregister(self._listener)
        if sock is None:
            return
        if len(self._pending) >= self._most_pending:
            self._drop(self._pending[0])
        peer = Peer(JsonConnection(sock, FROM_PROCESS, _LONGEST_EARLY), self._clock.now)
        self._pending.append(peer)
        self._watch(peer)

    def _watch(self, peer: Peer) -> None:
        peer.is_paused = False
        self._selector.register(peer.connection.sock, selectors.EVENT_READ, lambda: self._read(peer))

    def _drop(self, peer: Peer) -> None:
        if peer.is_dropped:  # an elastic run has forgotten it already
            return
        if peer in self._pending:
            self._pending.remove(peer)
        if self.peers.get(peer.rank) is peer:
            del self.peers[peer.rank]
        if not peer.is_paused:
            self._selector.unregister(peer.connection.sock)
        peer.is_dropped = True
        peer.connection.close()

    # What a connection sends

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
            if self._can_be_lost(peer) and not self._launched:
                self.report(peer.rank, "its connection closed (killed?)")
            elif self._can_be_lost(peer) and self._on_leave is not None and peer.rank:
                self.forget(peer.rank)
        elif peer.connection.is_flooding:
            peer.is_paused = True
            self._selector.unregister(peer.connection.sock)

    def _can_be_lost(self, peer: Peer) -> bool:
        return peer.rank >= 0 and not peer.is_leaving and self._refused is None

    def _handle_fault(self, peer: Peer, fault: str) -> None:
        """Drop a connection that sent an invalid message. Before the run begins, the process may connect again."""
        why = f"it sent an invalid message: {fault}"
        if peer.rank >= 0 and self._is_joining:
            del self._hosts[peer.rank]
            self._record_fault(f"process {peer.rank} was dropped, {why}")
        elif self._can_be_lost(peer):
            self.report(peer.rank, why)
        self._drop(peer)

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
        elif "working" in message:
            self._on_work(peer.rank)
        elif "released" in message and peer.rank == 0:
            rank = message["released"]
            self._unreleased[rank] -= 1
            if rank in self.peers and not self._unreleased[rank]:
                self._send_go(self.peers[rank])

    def _send_go(self, peer: Peer) -> None:
        """Have a process begin that comes later than the others."""
        if self.lost is None:
            peer.connection.send(go=1, host=socket.gethostname())
            if self.hint is not None:
                peer.connection.send(hint=self.hint)

    # How a connection becomes a process of the run: its hello, the proof of the secret, a welcome

    def _admit(self, peer: Peer, message: Message) -> None:
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
        if not self._secret.is_proof(message["proof"], "process", *about):
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
        peer.rank, peer.timeout = rank, message["timeout"]
        self.peers[rank], self._hosts[rank] = peer, message["host"]
        self._first_join = self._clock.now if self._first_join is None else self._first_join
        if self.lost is not None:
            peer.connection.send(**self.lost)
        elif self._is_joining and len(self.peers) == self.size:
            self._is_joining = False
            self._send_all(go=1, host=socket.gethostname())
        elif not self._is_joining and self._unreleased[rank] <= 0:
            self._send_go(peer)  # it comes back in an elastic run

    def _objection(self, rank: int, size: int) -> str | None:
        """Why a process with these numbers cannot take part, or None."""
        if size != self.size:
            return f"process {rank} was started as one of {size}, this run has {self.size} processes"
        if rank >= size:
            return f"process {rank} was started as one of {size}, the processes of this run are 0 to {size - 1}"
        if rank in (self._hosts if self.lost is None else self.peers):
            return f"two processes say that they are process {rank}; each needs its own number"
        return None

    def _record_fault(self, why: str) -> None:
        if why not in self._faults and len(self._faults) < 3:  # a hostile peer may cause many
            self._faults.append(why)

    def _check_join_timeout(self, now: float) -> None:
        """Refuse all processes where some did not join in time. Each gets the same reason."""
        limit = max([self.join_timeout, *(peer.timeout for peer in self.peers.values())])
        if not self._is_joining or self._first_join is None or now - self._first_join <= limit:
            return
        missing = [rank for rank in range(self.size) if rank not in self.peers]
        names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        plural = "es" if len(missing) > 1 else ""
        absent = f"process{plural} {names} of {self.size} did not come within {limit:g} seconds"
        self._refused = "; ".join([absent, *self._faults])
        self._is_joining = False
        self._send_all(refused=self._refused)
