"""Signals that are recorded while a block runs, for a loop that obeys them later."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Iterable
from typing import Any


class Signals:
    """A block in which signals are recorded. It must be in the main thread, unless there are no numbers.

    Args:
        numbers: which signals.
        on_signal: is called with the number of each. It may run inside of any call of the main thread.
        once: whether the second one of a kind acts as it did before the block.
        wakes: whether a signal makes `wake` readable, a socket for a selector. `clear` makes it unreadable again.

    Attributes:
        received: those that came, in their order.

    Example:
        >>> with Signals([signal.SIGTERM]) as signals:
        ...     signal.raise_signal(signal.SIGTERM)
        >>> signals.received == [signal.SIGTERM]
        True
    """

    def __init__(
        self,
        numbers: Iterable[int] = (),
        *,
        on_signal: Callable[[int], object] = lambda number: None,
        once: bool = False,
        wakes: bool = False,
    ):
        self.received: list[int] = []
        self._numbers, self._on_signal, self._once, self._wakes = tuple(numbers), on_signal, once, wakes
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in self._numbers:
            self._handlers[number] = signal.signal(number, self._record)
        if self._wakes:
            self.wake, self._waker = socket.socketpair()
            for end in (self.wake, self._waker):
                end.setblocking(False)
            self._fd = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *error: object) -> None:
        if self._wakes:
            signal.set_wakeup_fd(self._fd)
            self.wake.close()
            self._waker.close()
        for number in list(self._handlers):
            self._restore_handler(number)

    def clear(self) -> None:
        """Make `wake` unreadable until the next signal."""
        with contextlib.suppress(BlockingIOError):
            self.wake.recv(4096)

    def _record(self, number: int, frame: Any) -> None:
        self.received.append(number)
        if self._once:
            self._restore_handler(number)
        self._on_signal(number)

    def _restore_handler(self, number: int) -> None:
        signal.signal(number, self._handlers.pop(number))
