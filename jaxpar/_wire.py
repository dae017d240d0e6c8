"""JSON messages, one a line, over a socket; and a clock that stands still while this process does."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

BEAT = 1.0  # seconds from one beat to the next
_LONGEST = 1 << 16  # bytes of one message
_PAUSE = 2.0  # seconds between two looks at the clock from which this process counts as having been held up

Message = dict[str, Any]


class Line:
    """One end of a connection. It never blocks: a peer that does not read loses messages, not our time."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.closed, self._rest = sock, False, b""

    def send(self, **message: Any) -> None:
        try:
            self.sock.send(json.dumps(message).encode() + b"\n")
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.closed = True

    def receive(self) -> list[Message]:
        """What has arrived; `closed` is set where the other end is gone or talks something else."""
        messages: list[Message] = []
        try:
            while chunk := self.sock.recv(_LONGEST):
                *lines, self._rest = (self._rest + chunk).split(b"\n")
                messages += [json.loads(line) for line in lines]
                if len(self._rest) > _LONGEST:
                    raise ValueError("a message without an end")
            self.closed = True
        except (BlockingIOError, InterruptedError):
            pass
        except (OSError, ValueError):
            self.closed = True
        return [m for m in messages if isinstance(m, dict)]

    def close(self) -> None:
        self.closed = True
        self.sock.close()


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
