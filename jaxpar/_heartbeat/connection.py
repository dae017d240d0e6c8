"""One end of a connection for JSON messages, and a clock of the time in which this process ran."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from typing import Any

from .messages import LONGEST, Message, Types, encode, parse

INTERVAL = 1.0  # seconds from one heartbeat to the next
_PAUSE = 2.0  # a longer step of the clock means that this process was stopped


class JsonConnection:
    """One end of a connection. It never blocks: messages to a peer that does not read are dropped.

    Args:
        sock: a connected socket.
        types: the messages that the other end may send.
        longest: see below.

    Attributes:
        sock: the socket, not blocking.
        longest: bytes of a message that the other end may send.
        is_closed: whether the connection has ended. An invalid message ends it too.
        fault: what was invalid, in printable words, or None.
    """

    fault: str | None

    def __init__(self, sock: socket.socket, types: Types, longest: int = LONGEST):
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.is_closed, self._types = sock, False, types
        self.longest, self.fault = longest, None
        self._rest, self._unsent = b"", b""
        self._sending = threading.RLock()
        self._since, self._received = time.monotonic(), 0

    def send(self, **message: Any) -> None:
        """Send a whole message. It is dropped where more than 64 KiB are still unsent."""
        with self._sending:
            if len(self._unsent) <= LONGEST:
                self._unsent += encode(message)
            try:
                while self._unsent:
                    self._unsent = self._unsent[self.sock.send(self._unsent) :]
            except (BlockingIOError, InterruptedError):
                pass
            except OSError:
                self.is_closed, self._unsent = True, b""

    def receive(self) -> list[Message]:
        """The messages in the next `longest` bytes. At the end of the connection `is_closed` is set."""
        try:
            data = self.sock.recv(self.longest)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            data = b""
        self._count(len(data))
        self.is_closed = self.is_closed or not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        messages: list[Message] = []
        try:
            for line in lines:
                messages.append(parse(line, self._types))
            if len(self._rest) > self.longest:
                raise ValueError(f"a message has at most {self.longest} bytes")
        except ValueError as error:
            self.is_closed, self.fault, self._rest = True, str(error), b""
        return messages

    @property
    def is_flooding(self) -> bool:
        """Whether more than 128 KiB arrived within the present second."""
        return self._received > 2 * LONGEST and time.monotonic() - self._since < INTERVAL

    def wait(self, seconds: float) -> None:
        """Wait until something arrives. A peer that floods is not read for the whole time."""
        if self.is_flooding:
            return time.sleep(seconds)
        poll = select.poll()  # select.select takes no descriptor above 1023
        poll.register(self.sock, select.POLLIN)
        poll.poll(1000 * seconds)

    def close(self) -> None:
        """Close this end, and with it the connection: others may have a copy of the socket, see `pulse`."""
        self.is_closed = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def _count(self, number: int) -> None:
        now = time.monotonic()
        if now - self._since >= INTERVAL:
            self._since, self._received = now, 0
        self._received += number


class AwakeClock:
    """Seconds during which this process ran.

    A peer seems silent to a process that is stopped itself (SIGSTOP, a laptop's sleep) or whose interpreter lock is
    held for seconds. That time is not counted.
    """

    def __init__(self) -> None:
        self._last, self.now = time.monotonic(), 0.0

    def tick(self) -> float:
        """Update the clock and return its time."""
        last, self._last = self._last, time.monotonic()
        passed = self._last - last
        self.now += passed if passed < _PAUSE else 0.0
        return self.now
