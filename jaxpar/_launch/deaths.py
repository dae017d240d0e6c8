"""How often the processes of an elastic run have died, and when that is endless."""

from __future__ import annotations

import collections
import time

from .._heartbeat.messages import LOST

_MOST_OWN = 3  # failures by itself, without a signal, before it has worked again
_MOST = 10  # deaths of any kind, before it has worked again
_MOST_IN_TIME, _TIME = 50, 600.0  # deaths within so many seconds, though it worked in between


class Deaths:
    """The deaths of each process, by its rank."""

    def __init__(self) -> None:
        self._in_a_row: collections.defaultdict[int, list[int]] = collections.defaultdict(list)
        self._times: collections.defaultdict[int, list[float]] = collections.defaultdict(list)

    def add(self, rank: int, status: int) -> str:
        """Note that a process ended with this status. Return why it is not to be started again, or nothing."""
        now, row = time.monotonic(), self._in_a_row[rank]
        row.append(status)
        times = self._times[rank] = [at for at in self._times[rank] if now - at < _TIME] + [now]
        own = sum(status < 128 and status != LOST for status in row)
        if own >= _MOST_OWN or len(row) >= _MOST:
            return f", {len(row)} times in a row"
        if len(times) >= _MOST_IN_TIME:
            return f", {len(times)} times within {(now - times[0]) / 60:.0f} minutes"
        return ""

    def end_row(self, rank: int) -> None:
        """Note that a process works."""
        self._in_a_row[rank].clear()
