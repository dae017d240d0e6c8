"""A thread that ends this process where it is stuck, with the step and the stack of what it does.

A stuck process sends heartbeats as any other, so the others would wait for it forever. Once it has ended they go on.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator

import jax

from ... import distributed
from ..._core.text import say_before_exit

STUCK_AFTER = 10.0  # seconds, or JAXPAR_STUCK_TIMEOUT
_EVERY = 0.5  # seconds between two looks
_LOCKED = 3.0  # seconds more, after which a process that holds Python's lock is ended without this thread
_MOST_LINES = 12  # of a stack


class Watchdog(threading.Thread):
    """Watches the thread that made it, inside of the blocks `watch`."""

    def __init__(self) -> None:
        super().__init__(name="jaxpar-watchdog", daemon=True)
        self._limit = float(os.environ.get("JAXPAR_STUCK_TIMEOUT") or STUCK_AFTER)
        self._thread = threading.get_ident()
        self._doing: tuple[float, str, Callable[[], bool], float] | None = None
        self._stopped = threading.Event()

    @contextlib.contextmanager
    def watch(self, what: str, is_stuck: Callable[[], bool] = lambda: True, times: int = 1) -> Generator[None]:
        """A block that must be over within the limit, or some times of it.

        Args:
            what: what the process does, as a verb and its object.
            is_stuck: asked when the limit is over. False: it only takes long.
        """
        self._doing = time.monotonic(), what, is_stuck, times * self._limit
        try:
            yield
        finally:
            self._doing = None

    def run(self) -> None:
        """Look twice a second until `stop`."""
        can_dump = _has_descriptor()
        while not self._stopped.wait(_EVERY):
            doing = self._doing
            if can_dump and doing is not None:  # by a thread without Python's lock
                faulthandler.dump_traceback_later(doing[3] + _LOCKED, exit=True)
            elif can_dump:
                faulthandler.cancel_dump_traceback_later()
            if doing is not None and time.monotonic() - doing[0] > doing[3] and doing[2]() and self._doing is doing:
                self._end(doing[1], doing[3])
        if can_dump:
            faulthandler.cancel_dump_traceback_later()

    def stop(self) -> None:
        """End this thread."""
        self._stopped.set()

    def _end(self, what: str, seconds: float) -> None:
        frame = sys._current_frames().get(self._thread)
        stack = "".join(traceback.format_stack(frame)[-_MOST_LINES:]) if frame is not None else ""
        say_before_exit(
            f"jaxpar: process {jax.process_index()} is stuck: it {what} for {seconds:g} seconds, here:\n{stack}"
            f"It ends with status {distributed.LOST}, and counts as lost"
        )
        os._exit(distributed.LOST)


def _has_descriptor() -> bool:
    """Whether standard error is a file, as faulthandler needs."""
    try:
        sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True
