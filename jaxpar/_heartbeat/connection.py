"""One end of a connection that carries messages, and a clock that skips the time in which this process stood still."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from typing import Any

from .messages import LONGEST, Message, Types, encode, parse

BEAT = 1.0  # seconds from one heartbeat to the next
_PAUSE = 2.0  # seconds between two looks at the clock from which this process counts as having been held up


class JsonConnection:
    """One end of a connection. It never blocks: a peer that does not read loses messages, not our time.

    Args:
        sock: a connected socket.
        types: the messages that the other end may send.

    Attributes:
        closed: whether the connection has ended, or what arrived was no message.
        fault: what was wrong with what arrived, in printable words, else None.
    """

    def __init__(self, sock: socket.socket, types: Types):
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.closed, self._types = sock, False, types
        self.fault: str | None = None
        self._rest, self._unsent = b"", b""
        self._sending = threading.RLock()
        self._since, self._received = time.monotonic(), 0

    def send(self, **message: Any) -> None:
        """Send a message, whole; it is dropped where 64 KiB wait to be read."""
        with self._sending:
            if len(self._unsent) <= LONGEST:
                self._unsent += encode(message)
            try:
                while self._unsent:
                    self._unsent = self._unsent[self.sock.send(self._unsent) :]
            except (BlockingIOError, InterruptedError):
                pass
            except OSError:
                self.closed, self._unsent = True, b""

    def receive(self) -> list[Message]:
        """The next messages, of 64 KiB at most; `closed` and `fault` are set where there are no more."""
        try:
            data = self.sock.recv(LONGEST)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            data = b""
        self._count(len(data))
        self.closed = self.closed or not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        messages: list[Message] = []
        try:
            for line in lines:
                messages.append(parse(line, self._types))
            if len(self._rest) > LONGEST:
                raise ValueError(f"a message has at most {LONGEST} bytes")
        except ValueError as error:
            self.closed, self.fault, self._rest = True, str(error), b""
        return messages

    @property
    def is_flooding(self) -> bool:
        """Whether more than 128 KiB arrived within the present second."""
        return self._received > 2 * LONGEST and time.monotonic() - self._since < BEAT

    def wait(self, seconds: float) -> None:
        """Wait until something arrives; for the whole time where too much does."""
        if self.is_flooding:
            return time.sleep(seconds)
        poll = select.poll()  # select.select takes no descriptor above 1023
        poll.register(self.sock, select.POLLIN)
        poll.poll(1000 * seconds)

    def close(self) -> None:
        self.closed = True
        self.sock.close()

    def _count(self, number: int) -> None:
        now = time.monotonic()
        if now - self._since >= BEAT:
            self._since, self._received = now, 0
        self._received += number


class AwakeClock:
    """Seconds during which this process ran.

    Where it was stopped (SIGSTOP, a laptop's sleep) or a thread of it kept the interpreter lock for seconds, the
    others looked silent only because nobody listened: that time is left out.
    """

    def __init__(self) -> None:
        self._last, self.now = time.monotonic(), 0.0

    def tick(self) -> float:
        last, self._last = self._last, time.monotonic()
        passed = self._last - last
        self.now += passed if passed < _PAUSE else 0.0
        return self.now
