"""The protocol between the processes of a run: JSON messages over TCP, and the secret that both ends know.

A message is one line of JSON. It is an object with exactly the fields of its type, each within its limits. Anything
else is invalid and ends the connection.

With a secret, the server sends a random challenge. The process answers with a challenge of its own and with a proof,
and the server proves the same in return. A proof is an HMAC with SHA-256 over both challenges and what the process says
it is. The secret itself is never sent. Later messages of the connection carry no proof, and nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._core import files
from .._core.text import for_terminal

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
        if not _is_valid(name, value):
            raise ValueError(f"the value of {name} is out of range, or of another type")
    return message


def _is_valid(name: str, value: Any) -> bool:
    if name in _TEXTS:
        if value is None:
            return name == "hint"
        return isinstance(value, str) and len(value) <= _TEXTS[name] and value.isprintable()
    kinds = (int, float) if name == "timeout" else (int,)
    low, high = _NUMBERS.get(name, (1, 1))
    return type(value) in kinds and low <= value <= high  # false for NaN, and for a bool


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
