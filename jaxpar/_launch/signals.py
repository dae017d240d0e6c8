"""The signals that reach the launcher, recorded for its loop."""

from __future__ import annotations

import contextlib
import signal
import socket
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """A context that records SIGINT, SIGTERM, SIGHUP and SIGTSTP. They and SIGCHLD wake the loop.

    Attributes:
        ending: the first signal that ends the run, or 0.
        count: how many such signals came.
        is_stopped: whether Ctrl-Z was pressed (SIGTSTP).
        wake: a socket that is readable after a signal.
    """

    def __enter__(self) -> Signals:
        self.ending, self.count, self.is_stopped = 0, 0, False
        self.wake, self._waker = socket.socketpair()
        for end in (self.wake, self._waker):
            end.setblocking(False)
        self._handlers = {number: signal.getsignal(number) for number in (*_ENDING, signal.SIGTSTP, signal.SIGCHLD)}
        for number in self._handlers:
            signal.signal(number, self._record)
        self._fd = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: Any) -> None:
        signal.set_wakeup_fd(self._fd)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.wake.close()
        self._waker.close()

    def _record(self, number: int, _: Any) -> None:
        if number in _ENDING:
            self.ending, self.count = self.ending or number, self.count + 1
        elif number == signal.SIGTSTP:
            self.is_stopped = True

    def clear(self) -> None:
        """Make `wake` unreadable again."""
        with contextlib.suppress(BlockingIOError):
            self.wake.recv(4096)
