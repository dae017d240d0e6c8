"""A thread that ends this process where it is stuck, with the step and the stack of what it does.

A stuck process sends heartbeats as any other, so the others would wait for it forever. Once it has ended they go on.
What only process 0 does, such as callbacks, may take long for good reasons, and its end would end the run. So there the
step and the stack are only said. Time in which the process was stopped (Ctrl-Z, a paused container) is not counted. A
process that holds Python's lock is not seen here: its heartbeats end, see `distributed._initialize`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator

import jax

from ... import distributed
from ..._core.process import daemon
from ..._core.text import say_before_exit
from ..._devices import processes
from ..._heartbeat.connection import AwakeClock

STUCK_AFTER = 10.0  # seconds, or JAXPAR_STUCK_TIMEOUT
_EVERY = 0.5  # seconds between two looks
_MOST_LINES = 12  # of a stack


@dataclasses.dataclass
class Work:
    """What the watched thread does, since when, and how long it may."""

    what: str
    limit: float
    is_stuck: Callable[[], bool]
    ends: bool
    since: float
    is_said: bool = False


class Watchdog:
    """Watches the thread that made it, inside of the blocks `watch`."""

    def __init__(self) -> None:
        self._watching = daemon("jaxpar-watchdog", self._run, "a stuck process is no longer noticed")
        self._limit = float(os.environ.get("JAXPAR_STUCK_TIMEOUT") or STUCK_AFTER)
        self._thread, self._clock = threading.get_ident(), AwakeClock()
        self._work: Work | None = None

    @contextlib.contextmanager
    def watch(
        self, what: str, is_stuck: Callable[[], bool] = lambda: True, times: int = 1, ends: bool = True
    ) -> Generator[None]:
        """A block that must be over within the limit, or some `times` of it.

        `what` is a verb and its object. `is_stuck` is asked when the limit is over: False if it only takes long. A
        stuck process `ends`, or only says so, once until `note_progress`.
        """
        before, self._work = self._work, Work(what, times * self._limit, is_stuck, ends, self._clock.now)
        try:
            yield
        finally:
            self._work = before
            self.note_progress()

    def note_progress(self) -> None:
        """Count the time of the block from now on."""
        if (work := self._work) is not None:
            work.since, work.is_said = self._clock.now, False

    def _run(self) -> None:
        while True:
            time.sleep(_EVERY)
            self._clock.tick()
            self.look()

    def look(self) -> None:
        """Look once whether the work is stuck."""
        work = self._work
        if work is None or work.is_said or self._clock.now - work.since <= work.limit:
            return
        if not work.is_stuck() or self._work is not work:
            return
        frame = sys._current_frames().get(self._thread)
        stack = "".join(traceback.format_stack(frame)[-_MOST_LINES:]) if frame is not None else ""
        who = f"process {jax.process_index()}"
        why = f"jaxpar: {who} is stuck: it {work.what}, for more than {work.limit:g} seconds, here:\n{stack}"
        work.is_said = True
        if not work.ends:
            return say_before_exit(f"{why}The others wait for it. It may be slow only, so it is not ended")
        say_before_exit(f"{why}It ends with status {distributed.LOST}, and counts as lost")
        os._exit(distributed.LOST)

    def start(self) -> None:
        """Look twice a second. Batches of an evaluation are progress from now on."""
        processes.watch_progress(self.note_progress)
        self._watching.start()
