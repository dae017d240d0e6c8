"""The heartbeat server of a run, and what the processes say to it and to each other.

It is in the launcher where there is one, else in a thread of process 0. Each process holds one connection to it, over
which it sends a heartbeat each second. A connection that closes without a goodbye is a killed process, which is noticed
at once; the launcher, which sees how its processes end, takes their exit status instead. A process without a heartbeat
for `heartbeat_timeout` seconds is frozen, or its host is gone. The first loss is told to all processes, whose clients
end them.

An elastic run goes on after the loss of a process other than 0. The server forgets the lost one, so that another may
join in its place, once process 0 has said that jax has forgotten it too.

A message is one line of JSON. It is an object with exactly the fields of its type, each within its limits. Anything
else is invalid. It ends the connection that it came from, and no other; a process of the run that sends one counts as
lost.

With a secret, the server sends a random challenge. The process answers with a challenge of its own and with a proof,
and the server proves the same in return. A proof is an HMAC with SHA-256 over both challenges and what the process says
it is. The secret itself is never sent, and a connection takes part in nothing before its proof. Later messages of the
connection carry no proof, and nothing is encrypted.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import hashlib
import hmac
import json
import os
import secrets
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .._core import files
from .._core.process import daemon
from .._core.text import for_terminal

# Messages.

Message = dict[str, Any]
Field = str | int | float | None
Types = Mapping[str, tuple[str, ...]]  # the field that names the type, and the other fields

LOST = 75  # exit status of a process that ends because another was lost: EX_TEMPFAIL of sysexits.h, "try again"
REFUSED = 78  # of a process that would compute something else than the others: EX_CONFIG, "do not try again"
INTERVAL = 1.0  # seconds from one heartbeat to the next: two fit into the shortest heartbeat_timeout
LONGEST = 1 << 16  # bytes of one message: the longest hint, escaped, fits
MOST_SECONDS = 7 * 24 * 3600.0  # the largest time limit: jax takes no infinite one
_MOST_PROCESSES = 1 << 20
_PAUSE = 2.0  # seconds. A thread that ticks twice a second comes so late only after a stop or without Python's lock

FROM_PROCESS: Types = {
    "hello": ("job", "rank", "size", "host", "timeout"),
    "answer": ("proof",),  # to the challenge; its text is a challenge in return
    "heartbeat": (),
    "hint": (),  # what to resume from
    "failed": (),  # why
    "interrupted": (),  # by which signal
    "leaving": (),  # it ends without a failure
    "released": (),  # process 0: jax has forgotten the lost process of this rank
    "working": (),  # its start is over
}
FROM_SERVER: Types = {
    "challenge": (),
    "proof": (),
    "welcome": (),
    "other_run": (),
    "heartbeat": (),
    "hint": (),
    "go": ("host",),  # all have joined
    "lost": ("host", "why"),
    "interrupted": (),  # another process was, by which signal; it is reported as lost some seconds later
    "refused": (),  # why
    "closing": (),  # process 0 ends, and the server in it
    "left": (),  # to process 0: the others of an elastic run go on without this rank
}

# The longest valid text of a field. A longer one is cut before it is sent.
_TEXTS = {
    **dict.fromkeys(("challenge", "answer", "proof"), 64),
    "job": 300,
    "host": 255,
    "hint": 4096,
    **dict.fromkeys(("failed", "interrupted", "refused", "why"), 1000),
}
# The smallest and the largest valid number of a field. Any other field is the number 1.
_NUMBERS = {
    **dict.fromkeys(("rank", "lost", "left", "released"), (0, _MOST_PROCESSES - 1)),
    "size": (1, _MOST_PROCESSES),
    "timeout": (0, MOST_SECONDS),
}


def parse(line: bytes, types: Types) -> Message:
    """Parse and check the message on a line. `ValueError` if it is invalid."""
    if len(line) > LONGEST:
        raise ValueError(f"a message has at most {LONGEST} bytes")
    try:
        message = json.loads(line.decode())
    except (ValueError, RecursionError):  # RecursionError: nested too deeply
        raise ValueError("a message is a line of JSON") from None
    if not isinstance(message, dict) or not any({name, *more} == message.keys() for name, more in types.items()):
        raise ValueError(f"a message is one of: {', '.join(types)}; each with its own fields")
    for name, value in message.items():
        if name in _TEXTS:
            is_text = isinstance(value, str) and len(value) <= _TEXTS[name] and value.isprintable()
            is_valid = is_text or (value is None and name == "hint")
        else:
            kinds = (int, float) if name == "timeout" else (int,)
            low, high = _NUMBERS.get(name, (1, 1))
            is_valid = type(value) in kinds and low <= value <= high  # false for NaN, and for a bool
        if not is_valid:
            raise ValueError(f"the value of {name} is out of range, or of another type")
    return message


def clean(name: str, text: str) -> str:
    """A text as the field of this name carries it: escaped, and cut to the longest valid length."""
    return for_terminal(text)[: _TEXTS[name]]


class JsonConnection:
    """One end of a connection. It never blocks: messages to a peer that does not read are dropped.

    The other end may send messages of some `types`, each of `longest` bytes at most.
    """

    def __init__(self, sock: socket.socket, types: Types, longest: int = LONGEST):
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # it is no TCP socket
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.longest, self._types = sock, longest, types
        self.is_closed = False  # whether the connection has ended; an invalid message ends it too
        self.fault: str | None = None  # what was invalid, in printable words
        self._rest, self._unsent = b"", b""
        self._waiting: list[Message] = []  # received, and not taken by `next_message`
        self._sending = threading.RLock()  # a signal handler may send within a send of the same thread
        self._since, self._received = time.monotonic(), 0  # bytes received in the second that began then

    def send(self, **message: Field) -> None:
        """Send a whole message. It is dropped where more than 64 KiB are still unsent."""
        fields = {name: clean(name, value) if isinstance(value, str) else value for name, value in message.items()}
        with self._sending:
            if len(self._unsent) <= LONGEST:
                self._unsent += json.dumps(fields).encode() + b"\n"
            try:
                while self._unsent:
                    self._unsent = self._unsent[self.sock.send(self._unsent) :]
            except (BlockingIOError, InterruptedError):
                pass
            except OSError:
                self.is_closed, self._unsent = True, b""

    def receive(self) -> list[Message]:
        """The messages in the next `longest` bytes. At the end of the connection `is_closed` is set."""
        messages, self._waiting = self._waiting, []
        try:
            data = self.sock.recv(self.longest)
        except (BlockingIOError, InterruptedError):
            return messages
        except OSError:
            data = b""
        now = time.monotonic()
        if now - self._since >= INTERVAL:
            self._since, self._received = now, 0
        self._received += len(data)
        self.is_closed = self.is_closed or not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            for line in lines:
                messages.append(parse(line, self._types))
            if len(self._rest) > self.longest:
                raise ValueError(f"a message has at most {self.longest} bytes")
        except ValueError as error:
            self.is_closed, self.fault, self._rest = True, str(error), b""
        return messages

    def next_message(self, seconds: float) -> Message:
        """The next message. It is empty after so many seconds, and where the connection ends."""
        end = time.monotonic() + seconds
        while not self._waiting and self.fault is None and (left := end - time.monotonic()) > 0:
            self.wait(left)
            self._waiting = self.receive()
            if self.is_closed:  # perhaps since the last `send`: what had arrived by then is read all the same
                break
        return self._waiting.pop(0) if self._waiting else {}

    @property
    def is_flooding(self) -> bool:
        """Whether more than 128 KiB arrived within the present second. A healthy peer sends some hundred."""
        return self._received > 2 * LONGEST and time.monotonic() - self._since < INTERVAL

    def wait(self, seconds: float) -> None:
        """Wait until something arrives. A peer that floods is not read for the whole time."""
        if self.is_flooding:
            return time.sleep(seconds)
        poll = select.poll()  # select.select takes no descriptor above 1023
        poll.register(self.sock, select.POLLIN)
        poll.poll(1000 * seconds)

    def close(self) -> None:
        """Close this end, and with it the connection: a fork may have a copy of the socket."""
        self.is_closed = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


# The secret of a run: where it is found, and how each end of a connection proves that it knows it.

SECRET, SECRET_FILE = "JAXPAR_SECRET", "JAXPAR_SECRET_FILE"
_WHERE = "distributed.initialize: the secret"
_SHORTEST, _LONGEST_KEY = 16, 4096  # bytes of a secret. A shorter one could be guessed


@dataclasses.dataclass(frozen=True)
class Secret:
    """A secret. Its key is never shown."""

    key: bytes = dataclasses.field(repr=False)
    source: str  # where it was found, in words

    def proof(self, end: str, challenges: tuple[str, str], job: str, rank: int, size: int) -> str:
        """What only those can compute who know the secret, for one end ("process" or "server") of one connection."""
        fields = ["jaxpar 1", end, *challenges, job, str(rank), str(size)]
        framed = "".join(f"{len(field)}:{field}" for field in fields)
        return hmac.new(self.key, framed.encode(), hashlib.sha256).hexdigest()

    def is_proof(self, text: str, end: str, challenges: tuple[str, str], job: str, rank: int, size: int) -> bool:
        """Whether a text is this proof, in a time that does not depend on the text."""
        return hmac.compare_digest(text.encode(), self.proof(end, challenges, job, rank, size).encode())


def new_secret(source: str) -> Secret:
    return Secret(secrets.token_hex(32).encode(), source)


def challenge() -> str:
    return secrets.token_hex(16)


def find_secret(env: Mapping[str, str] = os.environ) -> Secret | None:
    """The secret in `JAXPAR_SECRET`, in the file `JAXPAR_SECRET_FILE`, or in `~/.config/jaxpar/secret`, if any.

    One of another length, or in a file that others can read, is a `RuntimeError`.
    """
    if (value := env.get(SECRET)) is not None:
        key, source = value.encode(errors="surrogateescape"), f"the variable {SECRET}"
    else:
        folder = env.get("XDG_CONFIG_HOME") or os.path.join(env.get("HOME") or os.path.expanduser("~"), ".config")
        path = os.path.join(folder, "jaxpar", "secret")
        if SECRET_FILE in env:
            path = files.as_local(env[SECRET_FILE], f"{_WHERE} in the variable {SECRET_FILE}")
        elif not os.path.lexists(path):
            return None
        source = f"the file {path}"
        try:
            with files.opened(Path(path)) as file:
                about = os.fstat(file.fileno())  # of what is open: the path may be another file by now
                key = file.read(_LONGEST_KEY + 1)
        except OSError as error:
            raise RuntimeError(f"{_WHERE} in {path} cannot be read: {error.strerror}") from None
        if about.st_uid != os.getuid() or about.st_mode & 0o077:
            hint = f"run `chmod 600 {path}`, and make a new one if others could read it"
            raise RuntimeError(f"{_WHERE} {path} must belong to you and be readable by you only; {hint}")
    key = key.strip()
    if not _SHORTEST <= len(key) <= _LONGEST_KEY:
        make = "`python -c 'import secrets; print(secrets.token_hex(32))'` makes one"
        raise RuntimeError(f"{_WHERE} in {source} must have {_SHORTEST} to {_LONGEST_KEY} bytes; {make}")
    return Secret(key, source)


# Clocks and addresses.


class AwakeClock:
    """Seconds during which this process ran."""

    # A peer seems silent to a process that is stopped itself (SIGSTOP, a laptop's sleep) or whose interpreter lock is
    # held for seconds. That time is not counted.

    def __init__(self) -> None:
        self._last, self.now = time.monotonic(), 0.0

    def tick(self) -> float:
        """Update the clock and return its time."""
        last, self._last = self._last, time.monotonic()
        passed = self._last - last
        self.now += passed if passed < _PAUSE else 0.0
        return self.now


def split(address: str) -> tuple[str, int]:
    """Host and port of "host:port"."""
    host, port = address.rsplit(":", 1)
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


# The server.

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

        # Once a second: a heartbeat, and as many new connections as a second may bring.
        if now - self._last_heartbeat >= INTERVAL:
            self._last_heartbeat = now
            self._send_hint()
            self._send_all(heartbeat=1)
            if self._may_accept <= 0:
                self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._may_accept = 4 * self._most_pending

        # Connections: one that flooded is read again, and one that never said who it is makes room.
        for peer in [*self._pending, *self.peers.values()]:
            if peer.is_paused and not peer.connection.is_flooding:
                self._watch(peer)
        for peer in [peer for peer in self._pending if now - peer.last_message > _HELLO_TIMEOUT]:
            self._drop(peer)

        # Losses: who is silent, and who was interrupted some seconds ago.
        for rank, peer in list(self.peers.items()):
            if not peer.is_leaving and now - peer.last_message > self.heartbeat_timeout:
                why = f"no heartbeat for {self.heartbeat_timeout:g} seconds: it is frozen, or its host is gone"
                self.report(rank, why)
        if self._interrupt is not None and now > self._interrupt[0]:
            self.report(*self._interrupt[1:])

        # Where some did not join in time, all are refused. Each gets the same reason.
        limit = max([self.join_timeout, *(peer.timeout for peer in self.peers.values())])
        if self._is_joining and self._first_join is not None and now - self._first_join > limit:
            missing = [rank for rank in range(self.size) if rank not in self.peers]
            names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            plural = "es" if len(missing) > 1 else ""
            absent = f"process{plural} {names} of {self.size} did not come within {limit:g} seconds"
            self._refused = "; ".join([absent, *self._faults])
            self._is_joining = False
            self._send_all(refused=self._refused)

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

    def report_interrupt(self, rank: int, why: str, seconds: float) -> None:
        """Report that `rank` is lost after some seconds. Until then the others, of which some may have been interrupted
        too, have time to end by themselves.
        """
        # They know at once that one was: a collective with it may raise before the report.
        self._send_all(interrupted=why)
        report_at = self._clock.now + seconds
        if self._interrupt is None or report_at < self._interrupt[0]:
            self._interrupt = (report_at, *(self._interrupt or (None, rank, why))[1:])

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
            self.report_interrupt(peer.rank, message["interrupted"], INTERRUPT_GRACE)
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

    # How a connection becomes a process of the run

    def _admit(self, peer: Peer, message: Message) -> None:
        """What a connection sends before it is a process of the run: its hello, then the proof of the secret."""
        # 1. The hello. With a secret, the server asks for a proof that the process knows it, and waits for the answer.
        if peer.hello is None:
            if "hello" not in message:
                return self._handle_fault(peer, "hello comes first, and once")
            if message["job"] != self.job:  # two runs on one host may try each other's port
                peer.connection.send(other_run=1)
                return self._drop(peer)
            hello = message
            if self._secret is not None:
                peer.hello, peer.challenge = hello, challenge()
                return peer.connection.send(challenge=peer.challenge)

        # 2. The answer. The server proves the same in return.
        else:
            assert self._secret is not None
            hello = peer.hello
            if "answer" not in message:
                return self._handle_fault(peer, "the answer to the challenge comes after hello")
            about = ((peer.challenge, message["answer"]), self.job, hello["rank"], hello["size"])
            if not self._secret.is_proof(message["proof"], "process", *about):
                self._record_fault("a process with another secret was dropped")
                return self._drop(peer)
            peer.connection.send(proof=self._secret.proof("server", *about))

        # 3. The welcome. A process whose numbers do not fit is refused.
        peer.connection.send(welcome=1)
        peer.last_message = self._clock.now
        rank, size, why = hello["rank"], hello["size"], self._refused
        if why is None and size != self.size:
            why = f"process {rank} was started as one of {size}, this run has {self.size} processes"
        elif why is None and rank >= size:
            why = f"process {rank} was started as one of {size}, the processes of this run are 0 to {size - 1}"
        elif why is None and rank in (self._hosts if self.lost is None else self.peers):
            why = f"two processes say that they are process {rank}; each needs its own number"
        if why is not None:
            peer.is_leaving = True
            self._record_fault(why)
            return peer.connection.send(refused=why)

        # 4. It takes part. The run begins when all have come.
        self._pending.remove(peer)
        peer.connection.longest = LONGEST
        peer.rank, peer.timeout = rank, hello["timeout"]
        self.peers[rank], self._hosts[rank] = peer, hello["host"]
        self._first_join = self._clock.now if self._first_join is None else self._first_join
        if self.lost is not None:
            peer.connection.send(**self.lost)
        elif self._is_joining and len(self.peers) == self.size:
            self._is_joining = False
            self._send_all(go=1, host=socket.gethostname())
        elif not self._is_joining and self._unreleased[rank] <= 0:
            self._send_go(peer)  # it comes back in an elastic run

    def _record_fault(self, why: str) -> None:
        if why not in self._faults and len(self._faults) < 3:  # a hostile peer may cause many
            self._faults.append(why)
