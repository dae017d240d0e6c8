"""The signals that reach the launcher, noted for its loop."""

from __future__ import annotations

import contextlib
import signal
import socket
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Notes SIGINT, SIGTERM, SIGHUP (to end) and SIGTSTP (Ctrl-Z), and wakes the loop; SIGCHLD wakes it too."""

    def __enter__(self) -> Signals:
        self.ending, self.times, self.stopped = 0, 0, False
        self.wake, self._waker = socket.socketpair()
        for end in (self.wake, self._waker):
            end.setblocking(False)
        self._handlers = {number: signal.getsignal(number) for number in (*_ENDING, signal.SIGTSTP, signal.SIGCHLD)}
        for number in self._handlers:
            signal.signal(number, self._note)
        self._fd = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: Any) -> None:
        signal.set_wakeup_fd(self._fd)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.wake.close()
        self._waker.close()

    def _note(self, number: int, _: Any) -> None:
        if number in _ENDING:
            self.ending, self.times = self.ending or number, self.times + 1
        elif number == signal.SIGTSTP:
            self.stopped = True

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.wake.recv(4096)
