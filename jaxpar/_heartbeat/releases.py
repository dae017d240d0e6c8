"""How process 0 of an elastic run has jax forget a lost process, before another comes in its place."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable

from .messages import LOST
from .thread import daemon


class Releases:
    """Lost processes, forgotten one after the other in a thread: jax may take long, at the start of a run.

    Args:
        forget: has jax forget the process of a rank. It may not fail.
    """

    def __init__(self, forget: Callable[[int], None]):
        self._forget = forget
        self._lost = queue.SimpleQueue[tuple[int, Callable[[int], None]]]()
        consequence = f"the others would wait for a lost process, so process 0 ends with status {LOST}"
        daemon("jaxpar-release", self._run, consequence, lambda: os._exit(LOST)).start()

    def add(self, rank: int, done: Callable[[int], None]) -> None:
        """Forget a process, then call `done` with its rank."""
        self._lost.put((rank, done))

    def _run(self) -> None:
        while True:
            rank, done = self._lost.get()
            self._forget(rank)
            done(rank)
